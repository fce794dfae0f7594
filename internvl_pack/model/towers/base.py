"""What the vision side of a family is, and the registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor, nn

from ...plugins import add_to

if TYPE_CHECKING:
    import torch


class Tower(Protocol):
    """A vision tower and its projector within a model that is not changed.

    Attributes:
        modules: the tower and the projector.
        tokens_per_tile: features that a tile becomes.
        tile_size: (height, width) of a tile in pixels.
    """

    modules: list[nn.Module]
    tokens_per_tile: int
    tile_size: tuple[int, int]

    @property
    def dtype(self) -> torch.dtype:
        """Of the tower's weights."""
        ...

    def features(self, tiles: Tensor, *, is_compiled: bool = False) -> Tensor:
        """Tiles (T, 3, S, S), uint8 or normalised, to (T, tokens_per_tile, H) in the language model's width."""
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
