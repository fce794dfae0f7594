"""Chat formats by name: those of chat.py and formats.py, and those that plugins register."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UserError
from ..plugins import load_plugins
from . import formats
from .chat import TEMPLATES, ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

assert formats.INTERNVL2_SYSTEM_PROMPT, "its import registers the formats of InternVL's other models"


def known_templates() -> tuple[str, ...]:
    """The names that users may write as `conv_style`."""
    load_plugins()
    return tuple(sorted(TEMPLATES))


def make_template(conv_style: str, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """Build the template of a `conv_style`; UserError for an unknown name or an unsuitable tokenizer."""
    if conv_style not in TEMPLATES:
        load_plugins()
    if conv_style not in TEMPLATES:
        raise UserError(f"conv_style is {conv_style!r}: choose one of {', '.join(known_templates())}")
    return TEMPLATES[conv_style](tokenizer)
