"""What the fields of a record and of its turns mean: read, refused, or unknown.

A field that says what is to be learnt is honoured, or refuses the sample by name. Fields that nobody here knows are
passed over and can be counted (`unknown_fields`). docs/data.md has the table. Null counts as absent everywhere, since
tables that were joined from two schemas fill their gaps with it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import SampleError
from ..sources.names import meant
from ..sources.normalise import IN_PARTS

# Marks of a turn that say whether its answer is trained: true or 1, false or 0.
TRAINING_FLAGS = ("loss", "weight", "train", "trainable", "loss_mask")

# A record's own system prompt, where its turns have none.
SYSTEM_FIELDS = ("system", "system_prompt")

# Whether a record's answer is a good one, as data for KTO says it.
LABELS = ("label", "kto_tag")

# They change what is to be learnt and no template here writes them: filled, they refuse the sample.
REFUSED_IN_TURN = {
    "tool_calls": "calls of tools",
    "function_call": "a call of a function",
    "reasoning_content": "reasoning beside the answer",
    "reasoning": "reasoning beside the answer",
    "thinking": "reasoning beside the answer",
    "audio": "audio",
    "audios": "audio",
    "image": "images of a turn",
    "images": "images of a turn",
    "video": "a video of a turn",
    "videos": "videos of a turn",
}
REFUSED_IN_RECORD = {
    "functions": "definitions of functions",
    "audio": "audio",
    "audios": "audio",
    "videos": "several videos",
    "chosen": "a preferred answer without a rejected one",
    "rejected": "a rejected answer without a preferred one",
    "rejected_messages": "a rejected conversation, known as 'rejected'",
    "rejected_images": "images of the rejected answer alone",
    "loss_mask": "flags of turns beside them",
}

_ROLE_AND_TEXT = frozenset(("from", "value", "role", "content", IN_PARTS))
TURN_FIELDS = _ROLE_AND_TEXT | {*TRAINING_FLAGS, *REFUSED_IN_TURN}
RECORD_FIELDS = frozenset((
    "id", "conversations", "image", "width", "height", "width_list", "height_list", "video", "clip",
    "tools", *SYSTEM_FIELDS, *LABELS, *REFUSED_IN_RECORD, "answers", "prompt", "question", "rejected_response",
))  # fmt: skip

_EMPTY = (None, "", "[]", "{}", "null")
_MANY = 50  # names of unknown fields reported of one record


def is_filled(value: Any) -> bool:
    """Whether a field says anything: not null, nor empty, nor the JSON of that."""
    return value not in _EMPTY and value != [] and value != {}


def is_answer(value: Any) -> bool:
    """Whether a field of an answer holds one: the text `[]` is an answer as any other."""
    return value not in (None, "", [], {})


def is_preference(data: Mapping[str, Any]) -> bool:
    """Whether a record holds a preferred answer and a rejected one."""
    return is_answer(data.get("chosen")) and is_answer(data.get("rejected"))


def bad_label(data: Mapping[str, Any]) -> str | None:
    """The field that does not call a record's answer a good one: `label` where it is false, since it may be anything
    else's, and `kto_tag` unless it is true."""
    if data.get("label") is False:
        return "label"
    tag = data.get("kto_tag")
    return None if tag in (None, "", 1) or str(tag).lower() == "true" else "kto_tag"


def refuse_fields(data: Mapping[str, Any]) -> None:
    """Refuse fields of a record or turn that no template can write.

    Raises:
        SampleError: `unsupported_field`, one of them is filled.
    """
    _refuse(data, REFUSED_IN_RECORD, "the record")
    for number, turn in _turns(data):
        if not turn.keys() <= _ROLE_AND_TEXT:
            _refuse(turn, REFUSED_IN_TURN, f"turn {number}")


def tools_of(data: Mapping[str, Any], *, written: bool) -> list[dict[str, Any]]:
    """The definitions of tools of a record, none where the field is absent or empty.

    Args:
        written: whether the chat format writes them.

    Raises:
        SampleError: `unsupported_field`, it does not, or they are no list of objects, nor the JSON of one.
    """
    tools = data.get("tools")
    if not is_filled(tools):
        return []
    if not written:
        _refuse(data, {"tools": "definitions of tools"}, "the record")
    with contextlib.suppress(ValueError, RecursionError):
        tools = json.loads(tools) if isinstance(tools, str) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise SampleError("unsupported_field", "field 'tools' is no list of objects, nor the JSON of one")
    return tools


def _refuse(fields: Mapping[str, Any], refused: Mapping[str, str], whose: str) -> None:
    if refused.keys().isdisjoint(fields):
        return
    for name in refused.keys() & fields.keys():
        if is_filled(fields[name]):
            raise SampleError(
                "unsupported_field",
                f"{whose} has a field {name!r} ({refused[name]}), which is not trained: write it into the texts of "
                "the turns, or remove it",
            )


def system_of(data: Mapping[str, Any]) -> str | None:
    """The system prompt in a record's own field, None where there is none.

    Raises:
        SampleError: `system_field`, it is no text, or two of them differ.
    """
    found = {name: data[name] for name in SYSTEM_FIELDS if data.get(name) not in (None, "", [])}
    for name, value in found.items():
        if not isinstance(value, str):
            raise SampleError("system_field", f"field {name!r} is a {type(value).__name__}, not text")
    if len(set(found.values())) > 1:
        raise SampleError("system_field", f"fields {' and '.join(map(repr, found))} differ: keep one of them")
    return next(iter(found.values()), None)


def trained_answers(data: Mapping[str, Any], turns: Sequence[tuple[str, str]]) -> list[bool] | None:
    """Whether each answer of a conversation is to be trained, by the flags of its turn; None where all are.

    Args:
        data: the record.
        turns: (role, text) of all its turns, as "system", "human" or "gpt"; those in `conversations` come last.

    Raises:
        SampleError: `turn_flag`, a flag is neither yes nor no, two of a turn differ, or a turn that is no answer is to
            be trained.
    """
    written = data["conversations"]
    if all(turn.keys() <= _ROLE_AND_TEXT for turn in written):
        return None
    flags = []
    for (number, turn), (role, _) in zip(_turns(data), turns[-len(written) :], strict=True):
        trained = None if turn.keys() <= _ROLE_AND_TEXT else _flag_of(turn, number)
        if trained and role != "gpt":
            raise SampleError("turn_flag", f"turn {number} is marked to be trained, but only answers are")
        if role == "gpt":
            flags.append(trained is not False)
    return None if all(flags) else flags


def _flag_of(turn: Mapping[str, Any], number: int) -> bool | None:
    found = {name: turn[name] for name in TRAINING_FLAGS if turn.get(name) is not None}
    for name, value in found.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise SampleError(
                "turn_flag", f"turn {number} has {name!r}: {str(value)[:40]}; known are true, false, 1 and 0"
            )
    if len({bool(value) for value in found.values()}) > 1:
        raise SampleError(
            "turn_flag", f"turn {number} has {' and '.join(map(repr, found))}, which contradict each other"
        )
    return bool(next(iter(found.values()))) if found else None


def unknown_fields(data: Mapping[str, Any]) -> list[str]:
    """Names of the filled fields that are passed over: `mood`, and of turns `conversations[].mood`. Each once."""
    found = [name for name in data if name not in RECORD_FIELDS and is_filled(data[name])]
    of_turns = {
        f"conversations[].{name}"
        for _, turn in _turns(data)
        for name in turn.keys() - TURN_FIELDS
        if is_filled(turn[name])
    }
    return [name[:80] for name in (*found, *sorted(of_turns))][:_MANY]


def misspelt(data: Mapping[str, Any], names: Sequence[str]) -> str:
    """`; the record has 'imgae': did you mean 'image'?` where an unknown field is nearly one of `names`; else ""."""
    for field in unknown_fields(data):
        if "did you mean" in (hint := meant(field, names, cutoff=0.75)):
            return f"; the record has {field!r}{hint}"
    return ""


def _turns(data: Mapping[str, Any]) -> Iterator[tuple[int, dict]]:
    turns = data.get("conversations")
    for number, turn in enumerate(turns if isinstance(turns, list) else (), 1):
        if isinstance(turn, dict):
            yield number, turn
