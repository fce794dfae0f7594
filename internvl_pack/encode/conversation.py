"""What a record's fields may look like: its conversation, its images, and which placeholder stands for which image.

Every odd shape has one verdict, listed in docs/encoding.md. Nothing is repaired silently except what is listed there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType

from ..errors import SampleError
from ..options import count
from ..sources.normalise import IMAGES, IN_PARTS, TURNS
from .chat import Turn
from .fields import misspelt, system_of
from .notations import PLACEHOLDER, bind_other_notations

_ROLES = {
    "system": "system",
    "human": "human",
    "user": "human",
    "gpt": "gpt",
    "assistant": "gpt",
    "function": "function",
    "pretrain": "pretrain",
}
# Roles that every chat format can write. `pretrain` needs none.
COMMON_ROLES = frozenset({"system", "human", "gpt", "pretrain"})
# Roles in whose text `<image>` is a placeholder.
IMAGE_ROLES = frozenset({"human", "pretrain"})

# A placeholder (or a run of them) at the border of a line: where annotations put images, and prose rarely puts a tag.
_AT_LINE_BORDER = re.compile(r"^[^\S\n]*<image>|<image>[^\S\n]*$", re.MULTILINE)
_VIDEO_AT_LINE_BORDER = re.compile(r"^[^\S\n]*<video>|<video>[^\S\n]*$", re.MULTILINE)

# Turns of a sample: more are damage, or a file in one record. So many take 0.1 s.
MAX_TURNS = 10_000
# Images of a sample, of which each header is read: 1 s for so many.
MAX_IMAGES = 10_000


def turns_of(
    data: Mapping, roles: Collection[str] = COMMON_ROLES, *, breaks_after_images: bool = True
) -> list[tuple[str, str]]:
    """(role, text) of each turn, roles as "system", "human", "gpt", and those of `roles` beside them.

    The record's own `system` comes first where no turn is one.

    Args:
        breaks_after_images: whether images that were parts of a turn (sources/normalise.py) have a line break after
            them.

    Raises:
        SampleError: `no_conversation`, `too_many_turns`, `turn_not_object`, `unknown_role`,
            `turn_value_not_text`, `turn_ambiguous`, `system_turn_not_first`, `system_field`, `pretrain_turn_not_alone`.
    """
    conversation = data.get("conversations")
    if not isinstance(conversation, list) or not conversation:
        raise SampleError(
            "no_conversation",
            "neither 'conversations' nor 'messages' of the record is a list of at least one turn"
            + misspelt(data, TURNS),
        )
    if len(conversation) > MAX_TURNS:
        raise SampleError("too_many_turns", f"{len(conversation)} turns, more than {MAX_TURNS}")
    turns: list[tuple[str, str]] = []
    for number, turn in enumerate(conversation, 1):
        if not isinstance(turn, dict):
            raise SampleError(
                "turn_not_object", f"turn {number} is {_kind(turn)}, not an object with 'from' and 'value'"
            )
        name = _one_of(turn, "from", "role", number, _ROLES)
        role = _ROLES.get(name) if isinstance(name, str) else None
        if role is None or role not in roles:
            known = ", ".join(sorted(name for name, role in _ROLES.items() if role in roles))
            raise SampleError("unknown_role", f"turn {number} has the role {_short(name)}: known are {known}")
        if role == "system" and turns:
            raise SampleError("system_turn_not_first", f"turn {number} is a system turn; only the first one may be")
        if role == "pretrain" and len(conversation) > 1:
            raise SampleError("pretrain_turn_not_alone", f"turn {number} of {len(conversation)} is a pretrain turn")
        text = _text_of(_one_of(turn, "value", "content", number), number)
        if not breaks_after_images and turn.get(IN_PARTS):
            text = text.replace(f"{PLACEHOLDER}\n", PLACEHOLDER)
        turns.append((role, text))
    system = system_of(data)
    if system is None:
        return turns
    if turns[0][0] == "pretrain":
        raise SampleError("pretrain_turn_not_alone", "field 'system' beside a pretrain turn, which is all of its text")
    if turns[0][0] != "system":
        return [("system", system), *turns]
    if turns[0][1] != system:
        raise SampleError("system_field", "field 'system' and the system turn differ: keep one of them")
    return turns


def _one_of(turn: Mapping, name: str, other: str, number: int, same: Mapping = MappingProxyType({})) -> object:
    """A turn's value under one of two names; null is absent. `same` maps words to what they mean."""
    if other not in turn:
        return turn.get(name)
    given = [turn[key] for key in (name, other) if turn.get(key) is not None]
    if len(given) == 2 and given[0] != given[1] and same.get(str(given[0]), 0) != same.get(str(given[1]), 1):
        raise SampleError("turn_ambiguous", f"turn {number} has both {name!r} and {other!r}, which differ")
    return given[0] if given else None


def image_names_of(data: Mapping) -> list[str]:
    """The names in field `image`: a string, a list of strings, or nothing (absent, null, "", []).

    Raises:
        SampleError: `image_field`, any other shape.
    """
    names = data.get("image")
    if names is None or names == "" or names == []:
        return []
    if isinstance(names, str):
        return [names]
    if not isinstance(names, list):
        raise SampleError("image_field", f"'image' or 'images' is {_kind(names)}, not a string or a list of strings")
    if len(names) > MAX_IMAGES:
        raise SampleError("too_many_images", f"{len(names)} images, more than {MAX_IMAGES}")
    for number, name in enumerate(names, 1):
        if not isinstance(name, str) or not name:
            raise SampleError("image_field", f"entry {number} of 'image' or 'images' is {_kind(name)}, not a file name")
    return names


def bind_images(turns: list[tuple[str, str]], num_images: int, data: Mapping = MappingProxyType({})) -> list[Turn]:
    """Cut the human turns, or the pretrain turn, where images stand.

    `<image>` counts in those turns only. With as many as images, each is one, in order. With images and no `<image>`,
    all go before the first human turn's text, each followed by a newline. Without images, `<image>` inside a line is
    text, and at the border of a line (first or last on it, spaces aside) it is an image that is missing. There it is
    refused in the system turn of a record with images, too. Other notations of an image (`<IMAGE>`, `<image_1>`) are
    taken for `<image>` where that is clear, see notations.py.
    The error names a misspelt field of images in `data`, the record.

    Raises:
        SampleError: `placeholder_mismatch`.
    """
    turns = bind_other_notations(turns, num_images)
    human = [text for role, text in turns if role in IMAGE_ROLES]
    found = sum(text.count(PLACEHOLDER) for text in human)
    if num_images == 0:
        if found and any(_AT_LINE_BORDER.search(text) for text in human):
            what = f"{count(found, 'placeholders')} <image>, but no image"
            raise SampleError("placeholder_mismatch", what + misspelt(data, IMAGES))
        if any(_VIDEO_AT_LINE_BORDER.search(text) for text in human):
            raise SampleError("placeholder_mismatch", "a placeholder <video>, but no video")
        return [Turn(role, (text,)) for role, text in turns]
    if turns[0][0] == "system" and (_AT_LINE_BORDER.search(turns[0][1]) or _VIDEO_AT_LINE_BORDER.search(turns[0][1])):
        raise SampleError(
            "placeholder_mismatch", "a placeholder <image> or <video> in the system turn: write it into the user's turn"
        )
    if found == 0:
        place = next((at for at, (role, _) in enumerate(turns) if role in IMAGE_ROLES), None)
        if place is None:
            raise SampleError("placeholder_mismatch", f"{count(num_images, 'images')}, but no human turn to hold it")
        role, text = turns[place]
        turns = [*turns[:place], (role, f"{PLACEHOLDER}\n" * num_images + text), *turns[place + 1 :]]
    elif found != num_images:
        raise SampleError(
            "placeholder_mismatch",
            f"{count(found, 'placeholders')} <image> in human turns for {count(num_images, 'images')}",
        )
    return [Turn(role, tuple(text.split(PLACEHOLDER)) if role in IMAGE_ROLES else (text,)) for role, text in turns]


def _text_of(value: object, number: int) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)  # a count or a measure written without quotes
    raise SampleError("turn_value_not_text", f"turn {number} has {_kind(value)} instead of text")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", type(None): "null", str: "an empty string"}
    return names.get(type(value), f"the number {_short(value)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
