"""What a family's half for readers is, and the registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ...plugins import add_to
from ..chat import single_token
from ..tiles import TileGrid, VideoGrid

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..config import EncodeConfig


class PictureFamily:
    """From a picture's size alone to its tiles, and from these to its tokens: the base of all families.

    Every family cuts a picture into square tiles of `EncodeConfig.image_size` pixels, the rows of `pixel_values`, of
    which each becomes `EncodeConfig.tokens_per_tile` tokens. Made of an EncodeConfig and a tokenizer. Picklable.

    Attributes:
        image_token_id: of the tokens that the features of tiles replace.
        CONV_STYLE: chat format by default.
        unused_options: fields of EncodeConfig that mean nothing to it, and stand in no fingerprint.
        grid_positions: whether the model tells rows and columns of a picture's tokens by their positions (native.py).
            Tiles are then one token each, their grid is the tokens'.
        breaks_after_images: whether its chat template writes a line break after an image of a list of parts.
        plans_videos: whether a video is one picture, of `plan_video`; to others each of its frames is one.
    """

    image_token_id: int
    CONV_STYLE = "internvl2_5"
    unused_options: frozenset[str] = frozenset()
    grid_positions = False
    breaks_after_images = True
    plans_videos = False

    def __init__(self, config: EncodeConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """
        Raises:
            UserError: the tokenizer lacks its tokens, or the config does not go with it.
        """

    @property
    def picture_token_ids(self) -> tuple[int, ...]:
        """`image_token_id`, and that of videos where it is another."""
        return (self.image_token_id,)

    @classmethod
    def encoding(cls, options: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
        """Fields of EncodeConfig that a checkpoint decides on; None: those of tiles of one size.

        Args:
            options: by their names on a command line.
            checkpoint: config.json.

        Raises:
            UserError: an option that does not go with the family.
        """
        return None

    @classmethod
    def processor_files(cls, config: EncodeConfig) -> dict[str, dict[str, Any]] | None:
        """By name, files by which transformers' processor prepares pictures as in training; None: InternVL's."""
        return None

    def plan(self, size: tuple[int, int], num_images: int, max_dynamic_patch: int) -> TileGrid:
        """The grid of a picture.

        Args:
            size: upright (width, height) in pixels.
            num_images: of its sample.
            max_dynamic_patch: of its data set.

        Raises:
            SampleError: the family takes no picture of this size.
        """
        raise NotImplementedError

    def plan_video(self, size: tuple[int, int], frames: int, rate: float) -> VideoGrid:
        """The grid of a video, with `plans_videos`.

        Args:
            size: of a frame, as of `plan`.
            frames: that the clip has, `rate` a second.

        Raises:
            SampleError: the family takes no such video.
        """
        raise NotImplementedError

    def block(self, grid: Any) -> np.ndarray:
        """int32 ids of a picture in the text: its tokens, with what the family writes around and between them.

        Args:
            grid: of `plan`, or of `plan_video`.
        """
        raise NotImplementedError


class Bordered(PictureFamily):
    """Pictures whose block is one token, those of all tiles, and another one.

    Args:
        start, context, end: the tokens.
    """

    def __init__(
        self, config: EncodeConfig, tokenizer: PreTrainedTokenizerBase, start: str, context: str, end: str
    ) -> None:
        super().__init__(config, tokenizer)
        self.start_id, self.image_token_id, self.end_id = (
            single_token(tokenizer, token, config.conv_style) for token in (start, context, end)
        )
        self._tokens_per_tile = config.tokens_per_tile

    def block(self, grid: Any) -> np.ndarray:
        block = np.full(grid.num_tiles * self._tokens_per_tile + 2, self.image_token_id, dtype=np.int32)
        block[0], block[-1] = self.start_id, self.end_id
        return block


# By model_type.
FAMILIES: dict[str, type[PictureFamily]] = {}

_Family = TypeVar("_Family", bound=type[PictureFamily])


def register_family(model_type: str) -> Callable[[_Family], _Family]:
    """Register a subclass of PictureFamily under a checkpoint's `model_type`.

    Raises:
        UserError: another one has the name.
    """
    return lambda family: add_to(FAMILIES, "family", model_type, family)
