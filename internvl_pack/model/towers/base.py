"""What the vision side of a family is, and the registry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from torch import Tensor, nn

from ...plugins import add_to

if TYPE_CHECKING:
    import torch

    from ..attention import Kernel


class Features(NamedTuple):
    """What a tower makes of T tiles.

    Attributes:
        tokens: (T, tokens_per_tile, H), in the language model's width.
        deep: of earlier layers, for the first decoder layers, each (T * tokens_per_tile, H).
    """

    tokens: Tensor
    deep: tuple[Tensor, ...] = ()


class Tower(Protocol):
    """A vision tower and its projector within a model.

    Attributes:
        modules: the tower and the projector.
        layers: of the tower.
        blocks: what of both is compiled, and comes and goes under ZeRO-3, as one piece each.
        lora_targets: names of the tower's linear layers that LoRA goes on.
        image_token: of the tokenizer, for the tokens that features replace.
        tokens_per_tile: features that a tile becomes.
        tile_size: (height, width) of a tile in pixels.
        grid_positions: whether it needs the grids of pictures, and the decoder positions of three axes.
    """

    modules: list[nn.Module]
    layers: nn.ModuleList
    blocks: list[nn.Module]
    lora_targets: tuple[str, ...]
    image_token: str
    tokens_per_tile: int
    tile_size: tuple[int, int]
    grid_positions: bool

    @property
    def dtype(self) -> torch.dtype:
        """Of the tower's weights."""
        ...

    def use_kernel(self, kernel: Kernel) -> None:
        """Attention by `kernel`, the language model's, where that is made for it."""
        ...

    def features(
        self,
        tiles: Tensor,
        grids: Sequence[tuple[int, ...]] = (),
        second_frames: Tensor | None = None,
        *,
        is_compiled: bool = False,
    ) -> Features:
        """Of tiles (T, 3, S, S), uint8 or normalised.

        Args:
            grids, second_frames: `image_grids` and `second_frames` of the batch, with `grid_positions`.
        """
        ...


# Factories by model_type.
TOWERS: dict[str, Callable[..., Tower]] = {}

_Factory = TypeVar("_Factory", bound=Callable[..., Any])


def register_tower(model_type: str) -> Callable[[_Factory], _Factory]:
    """Register a factory `PreTrainedModel -> Tower` under the `model_type` of a config.

    Raises:
        UserError: another one has the name.
    """
    return lambda factory: add_to(TOWERS, "tower", model_type, factory)
