"""A record as people write it, in the one form that everything else reads.

    {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}, ...],
     "images": ["a.jpg"]}

    {"conversations": [{"role": "user", "content": "<image>\\nWhat is it?"}, ...], "image": ["a.jpg"]}

What it makes no sense of stays as it is: encoding refuses it by name. docs/data.md has the table of forms.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import SampleError
from .parse import parse_record

TURNS = ("conversations", "messages")
ANSWERS = ("chosen", "rejected", "rejected_response", "answers")  # several to one prompt, see encode/trees.py
IMAGES = ("image", "images")
IN_PARTS = "images_in_parts"
_TEXTS = ("content", "value")
# Types of parts, those of OpenAI's Responses among them.
_PARTS = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
}
_IMAGE_PARTS = ("image", "image_url", "url", "path", "base64")
_IMAGE_ROLES = ("user", "human", "pretrain")
NAMED_IN_TEXT = re.compile(r"<img>([^<>\n]{1,1000}\.\w{2,5})</img>")  # as Qwen-VL's data has it


def normalised(data: dict[str, Any]) -> dict[str, Any]:
    """The record with its turns in `conversations`, each with a text, and its images in `image`; itself if it is so.

    `messages` may stand for `conversations` and `images` for `image`. Turns may be a list, the JSON of one, or a dict
    of equally long lists. A text may be a list of parts: those of images become `<image>` and a line break, as
    InternVL's chat templates write them, and name their images or stand for the record's, in order; such a turn has
    IN_PARTS, since other families write no line break there. A user's text may name
    images in their places, `<img>a.jpg</img>`, where nothing else says where images stand. An image may be
    `{"path": ...}`.

    Raises:
        SampleError: `conversation_ambiguous`, `image_field`, `turn_value_not_text` or `placeholder_mismatch`.
    """
    turns = _turns_of(data)
    in_parts = isinstance(turns, list) and any(_key_of_parts(turn) for turn in turns)
    in_order = turns is data.get("conversations") and "messages" not in data and "images" not in data
    plain = not in_parts and in_order and not _has_structs(data.get("image"))
    if plain and _named_in_texts(turns, data.get("image")) is None:
        return data
    images = _one_of(data, IMAGES, "image_field")
    if _has_structs(images):
        field = next(name for name in IMAGES if data.get(name) is images)
        named = [_name_of(image, number, field) for number, image in enumerate(as_list(images), 1)]
        images = named if isinstance(images, (list, tuple)) else named[0]
    if in_parts:
        turns, images = _written_out(turns, images)
    turns, images = _named_in_texts(turns, images) or (turns, images)
    found = {key: value for key, value in data.items() if key not in (*TURNS, *IMAGES)}
    found |= {"conversations": turns} if turns is not None else {}
    return found | ({"image": images} if images is not None else {})


def is_absent(found: Any) -> bool:
    """Null, no name, no images, or a struct of nulls, as a table joined from two schemas holds it."""
    if isinstance(found, (list, tuple)):
        return not found
    if isinstance(found, Mapping):
        return all(value is None for value in found.values())
    return found is None or (isinstance(found, str) and not found)


def as_list(images: Any) -> list[Any]:
    """The images of a field: none, one, or a list of them."""
    if is_absent(images):
        return []
    return list(images) if isinstance(images, (list, tuple)) else [images]


def _is_struct(image: Any) -> bool:
    """Whether an image is a struct without bytes, of which the path is its name."""
    return isinstance(image, Mapping) and not is_absent(image) and image.get("bytes") is None


def _has_structs(images: Any) -> bool:
    return any(map(_is_struct, images)) if isinstance(images, (list, tuple)) else _is_struct(images)


def _name_of(image: Any, number: int, field: str) -> Any:
    """The path of a struct `{"path": ...}` without bytes; anything else as it is."""
    if not _is_struct(image):
        return image
    if image.get("path") is None:
        found = ", ".join(str(key)[:40] for key in list(image)[:10])
        raise SampleError(
            "image_field", f"entry {number} of field {field!r} is an object without 'path' or 'bytes' (it has {found})"
        )
    return image["path"]


def _one_of(data: Mapping[str, Any], names: tuple[str, str], reason: str) -> Any:
    first, second = (data.get(name) for name in names)
    if is_absent(second):
        return first
    if is_absent(first):
        return second
    raise SampleError(reason, f"fields {names[0]!r} and {names[1]!r} are both filled: keep one of them")


def _turns_of(data: Mapping[str, Any]) -> Any:
    """The turns as a list of dicts where they can be read as one, else as they are."""
    turns = _one_of(data, TURNS, "conversation_ambiguous")
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        try:
            return parse_record(f'{{"turns": {turns}}}'.encode("utf-8", "surrogatepass"))["turns"]
        except SampleError as error:
            raise SampleError(error.reason, f"the conversation, a text of JSON: {error.detail}") from None
    if isinstance(turns, tuple):
        return list(turns)
    if not isinstance(turns, Mapping) or not turns:
        return turns
    columns = list(turns.values())
    if not all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
        return turns
    return [dict(zip(turns, values, strict=True)) for values in zip(*columns, strict=True)]


def _named_in_texts(turns: Any, images: Any) -> tuple[list[Any], list[str]] | None:
    """Turns with `<image>` in place of the images that the user's texts name, and these.

    None where there are none, or it is not clear: with an `<image>` beside, or where the record's images are others.
    """
    if not isinstance(turns, list):
        return None
    keys = [_key_of_text(turn) for turn in turns]
    texts = [turn[key] for turn, key in zip(turns, keys, strict=True) if key is not None]
    if not any("</img>" in text for text in texts) or any("<image>" in text for text in texts):
        return None
    named = [name.removeprefix("file://") for text in texts for name in NAMED_IN_TEXT.findall(text)]
    if not named or (not is_absent(images) and as_list(images) != named):
        return None
    written = [
        turn if key is None else turn | {key: NAMED_IN_TEXT.sub("<image>", turn[key])}
        for turn, key in zip(turns, keys, strict=True)
    ]
    return written, named


def _key_of_text(turn: Any) -> str | None:
    """The key under which a turn in which images may stand has its text."""
    if isinstance(turn, dict) and (turn.get("role") or turn.get("from")) in _IMAGE_ROLES:
        return next((key for key in _TEXTS if isinstance(turn.get(key), str)), None)
    return None


def _key_of_parts(turn: Any) -> str | None:
    """The key under which a turn has a list of parts."""
    return next((key for key in _TEXTS if type(turn.get(key)) is list), None) if isinstance(turn, dict) else None


def _written_out(turns: list[Any], images: Any) -> tuple[list[Any], Any]:
    """Turns with texts in place of parts; the images that the parts name, or else `images`."""
    written: list[Any] = []
    named: list[Any] = []  # by a part of an image each, None where it only says where one stands
    for number, turn in enumerate(turns, 1):
        if (key := _key_of_parts(turn)) is not None:
            before = len(named)
            turn = turn | {key: "".join(_text_of(part, number, named) for part in turn[key])}
            role = turn.get("role") or turn.get("from")
            if len(named) > before and role not in _IMAGE_ROLES:
                raise SampleError(
                    "placeholder_mismatch", f"turn {number} ({role}) has an image; only the user's turns may"
                )
            if len(named) > before:
                turn[IN_PARTS] = True
        written.append(turn)
    if all(name is None for name in named):
        return written, images
    if None in named:
        raise SampleError("image_field", "some parts of type 'image' name their image, others do not")
    if not is_absent(images) and as_list(images) != named:
        raise SampleError("image_field", "the parts of the turns name other images than the record's field: keep one")
    return written, named


def _text_of(part: Any, number: int, named: list[Any]) -> str:
    """What a part is in its turn's text; the image of one that has any is added to `named`."""
    found = part if isinstance(part, Mapping) else {}
    name = found.get("type") or next((key for key in ("text", "image", "image_url") if found.get(key)), None)
    kind = _PARTS.get(name) if isinstance(name, str) else None
    if kind == "text" and isinstance(found.get("text"), str):
        return found["text"]
    if kind != "image":
        what = f"a part of type {str(name)[:40]!r}" if name and kind is None else "a part without a text"
        raise SampleError("turn_value_not_text", f"turn {number} has {what}; known are {', '.join(map(repr, _PARTS))}")
    if found.get("index") not in (None, len(named)):
        raise SampleError("image_field", f"turn {number} names image {found['index']} where {len(named)} is the next")
    image = next((found[key] for key in _IMAGE_PARTS if not is_absent(found.get(key))), None)
    if isinstance(image, Mapping) and isinstance(image.get("url"), str):
        image = image["url"]
    image = _name_of(image, len(named) + 1, "content")
    named.append(image.removeprefix("file://") if isinstance(image, str) else image)
    return "<image>\n"
