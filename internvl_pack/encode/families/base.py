"""What a family's half for readers is, and the registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from ...plugins import add_to
from ..chat import single_token
from ..tiles import TileGrid

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..config import EncodeConfig


class PictureFamily(Protocol):
    """From a picture's size alone to its tiles, and from these to its tokens.

    Every family cuts a picture into square tiles of `EncodeConfig.image_size` pixels, the rows of `pixel_values`, of
    which each becomes `EncodeConfig.tokens_per_tile` tokens. Picklable.

    Attributes:
        image_token_id: of the tokens that the features of tiles replace.
        unused_options: fields of EncodeConfig that mean nothing to it, and stand in no fingerprint.
        grid_positions: whether the model tells rows and columns of a picture's tokens by their positions (native.py).
            Tiles are then one token each, their grid is the tokens'.
        breaks_after_images: whether its chat template writes a line break after an image of a list of parts.
        picture_token_ids: `image_token_id`, and that of videos where it is another.
    """

    image_token_id: int
    unused_options: frozenset[str]
    grid_positions: bool
    breaks_after_images: bool
    picture_token_ids: tuple[int, ...]

    def plan(self, size: tuple[int, int], num_images: int, max_dynamic_patch: int) -> TileGrid:
        """The grid of a picture.

        Args:
            size: upright (width, height) in pixels.
            num_images: of its sample.
            max_dynamic_patch: of its data set.

        Raises:
            SampleError: the family takes no picture of this size.
        """
        ...

    def block(self, grid: Any) -> np.ndarray:
        """int32 ids of a picture in the text: its tokens, with what the family writes around and between them.

        Args:
            grid: of `plan`, or of `plan_video`.
        """
        ...

    # A family may have a method `plan_video(size, frames, rate) -> VideoGrid`, to which a video of so many frames, at
    # `rate` a second, is one picture of pairs of frames. To others a frame is a tile.


class Bordered:
    """Pictures whose block is one token, those of all tiles, and another one.

    Args:
        start, context, end: the tokens.
    """

    grid_positions = False
    breaks_after_images = True

    def __init__(
        self, config: EncodeConfig, tokenizer: PreTrainedTokenizerBase, start: str, context: str, end: str
    ) -> None:
        self.start_id, self.image_token_id, self.end_id = (
            single_token(tokenizer, token, config.conv_style) for token in (start, context, end)
        )
        self.picture_token_ids: tuple[int, ...] = (self.image_token_id,)
        self._tokens_per_tile = config.tokens_per_tile

    def block(self, grid: Any) -> np.ndarray:
        block = np.full(grid.num_tiles * self._tokens_per_tile + 2, self.image_token_id, dtype=np.int32)
        block[0], block[-1] = self.start_id, self.end_id
        return block


# Factories by model_type.
FAMILIES: dict[str, Callable[..., PictureFamily]] = {}

_Factory = TypeVar("_Factory", bound=Callable[..., Any])


def register_family(model_type: str) -> Callable[[_Factory], _Factory]:
    """Register a factory `(EncodeConfig, tokenizer) -> PictureFamily` under a checkpoint's `model_type`.

    Raises:
        UserError: another one has the name.
    """
    return lambda factory: add_to(FAMILIES, "family", model_type, factory)
