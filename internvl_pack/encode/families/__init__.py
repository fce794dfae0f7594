"""How the pictures of a model family become tiles and tokens: the half of a family that readers need, without torch.

Its other half, in the model, is model/towers/. Both are found by the `model_type` of the checkpoint's config.json.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import UserError
from ...plugins import find_in
from . import internvl, native
from .base import FAMILIES, PictureFamily, register_family

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..config import EncodeConfig

__all__ = ["PictureFamily", "family_of", "internvl", "is_family", "make_family", "native", "register_family"]


def make_family(config: EncodeConfig, tokenizer: PreTrainedTokenizerBase) -> PictureFamily:
    """The family of `config.family`.

    Raises:
        UserError: there is none of this name, or the tokenizer lacks its tokens.
    """
    family = find_in(FAMILIES, config.family)
    if family is None:
        raise UserError(f"family is {config.family!r}: use one of {', '.join(sorted(FAMILIES))}")
    return family(config, tokenizer)


def is_family(model_type: str | None) -> bool:
    """Whether a family is registered under a `model_type`, those of plugins included."""
    return find_in(FAMILIES, model_type) is not None


def family_of(model_type: str | None) -> type[PictureFamily]:
    """The family of a `model_type`; the base of all, whose rules are InternVL's, where there is none."""
    return find_in(FAMILIES, model_type) or PictureFamily
