"""The vision sides of model families: tiles to features. The other half of a family is encode/families/.

A model is found by the `model_type` of its config. One of a plugin registers itself as those here do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import UserError
from ...plugins import load_plugins
from . import internvl
from .base import TOWERS, Tower, register_tower

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Tower", "internvl", "make_tower", "register_tower"]


def make_tower(model: PreTrainedModel) -> Tower | None:
    """The vision side of a model; None of one without a vision config.

    Raises:
        UserError: its family is not known.
    """
    if not hasattr(model.config, "vision_config"):
        return None
    family = model.config.model_type
    if family not in TOWERS:
        load_plugins()
    if family not in TOWERS:
        raise UserError(
            f"{family!r} is a vision-language model of a family that is not known here: its images would not be packed "
            f"exactly; use one of {', '.join(sorted(TOWERS))}"
        )
    return TOWERS[family](model)
