"""The vision sides of model families: tiles to features. The other half of a family is encode/families/.

A model is found by the `model_type` of its config. One of a plugin registers itself as those here do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...errors import UserError
from ...plugins import find_in
from . import internvl, native
from .base import TOWERS, Features, Tower, register_tower

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "TOWERS",
    "Features",
    "Tower",
    "check_native_options",
    "find_tower",
    "internvl",
    "make_tower",
    "native",
    "register_tower",
]


def make_tower(model: PreTrainedModel, family: str | None = None) -> Tower | None:
    """The vision side of a model; None of one without a vision config.

    Args:
        family: whose it is, if not that of its `model_type`.

    Raises:
        UserError: its family is not known.
    """
    if not hasattr(model.config, "vision_config"):
        return None
    family = family or model.config.model_type
    tower = find_tower(family)
    if tower is None:
        raise UserError(
            f"{family!r} is a vision-language model of a family that is not known here: its images would not be packed "
            f"exactly; use one of {', '.join(sorted(TOWERS))}"
        )
    return tower(model)


def check_native_options(model_type: str | None, **options: Any) -> None:
    """Refuse by name options that do not go with a model of native resolution.

    Args:
        options: of `build_model` and of training, by name; one that is empty or 0 is not given.

    Raises:
        UserError: one is given.
    """
    if not getattr(find_tower(model_type), "grid_positions", False):
        return
    if given := next((name for name, value in options.items() if value), None):
        raise UserError(f"--{given} {options[given]} does not go with a {model_type!r} model yet: leave it out")


def find_tower(model_type: str | None) -> Callable[..., Tower] | None:
    """The factory registered under a `model_type`, those of plugins included; None where there is none."""
    return find_in(TOWERS, model_type)
