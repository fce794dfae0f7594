"""How the pictures of a model family become tiles and tokens: the half of a family that readers need, without torch.

Its other half, in the model, is model/towers/. Both are found by the `model_type` of the checkpoint's config.json.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import UserError
from ...plugins import load_plugins
from . import internvl
from .base import FAMILIES, PictureFamily, register_family

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..sample import EncodeConfig

__all__ = ["PictureFamily", "internvl", "make_family", "register_family"]


def make_family(config: EncodeConfig, tokenizer: PreTrainedTokenizerBase) -> PictureFamily:
    """The family of `config.family`.

    Raises:
        UserError: there is none of this name, or the tokenizer lacks its tokens.
    """
    if config.family not in FAMILIES:
        load_plugins()
    if config.family not in FAMILIES:
        raise UserError(f"family is {config.family!r}: use one of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[config.family](config, tokenizer)
