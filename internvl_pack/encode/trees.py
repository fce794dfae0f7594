"""Records of several answers to one prompt: pairs of a preferred and a rejected one, and groups.

    {"image": "a.jpg", "question": "What is it?", "chosen": "A crane.", "rejected": "A dog."}
    {"conversations": [... , {"from": "human", "value": "What is it?"}], "answers": ["A crane.", ...]}

Each answer is written out as the conversation that it would be alone: what a tree is made of (sample.py). docs/data.md
has the table of forms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import SampleError
from ..sources.normalise import ANSWERS, normalised
from .fields import TRAINING_FLAGS, bad_label, is_answer, is_filled, is_preference

OBJECTIVES = ("sft", "dpo", "mpo")
MAX_ANSWERS = 4096

# What a record may hold instead of a conversation.
PROMPTS = ("prompt", "question")

_LARGEST = 1e24  # of weights and rewards: float32 holds the sums of a step
_ASSISTANT = ("gpt", "assistant")
_ASKING = ("system", "human", "user")


class Answer(NamedTuple):
    """One of several answers.

    data: the record with this answer alone, its conversation in `conversations`; of its turns only those of the answer
        are trained. weight, reward, sample_id: as `records.Branch` has them.
    """

    data: dict[str, Any]
    weight: float = 1.0
    reward: float | None = None
    sample_id: str = ""


def answers_of(data: Mapping[str, Any], objective: str) -> list[Answer] | None:
    """The answers of a record, chosen before rejected; None where its conversation has one.

    Raises:
        SampleError: `preference_data` or `no_preference_data`, a record that is not for this objective, or an answer
            that is labelled as a bad one; `answers`, a form that is none of those in docs/data.md.
    """
    is_pair = is_preference(data) or is_answer(data.get("rejected_response"))
    if not is_pair and (label := bad_label(data)):
        raise SampleError(
            "preference_data",
            f"{label!r} is {str(data[label])[:40].lower()}: its answer is a bad one, as data for KTO has it; leave it "
            "out, or write it as 'rejected' beside a good answer as 'chosen'",
        )
    if is_pair and objective == "sft":
        raise SampleError(
            "preference_data",
            "it has a preferred and a rejected answer: train on pairs with --objective dpo or mpo, or write the "
            "preferred one into 'conversations'",
        )
    if objective != "sft" and not is_pair:
        raise SampleError(
            "no_preference_data",
            f"objective {objective!r} is of pairs, the record has {_missing(data)}",
        )
    if is_pair:
        return _pair(data)
    if not is_filled(data.get("answers")) or _is_answered(data):
        return None
    return _group(data)


def _missing(data: Mapping[str, Any]) -> str:
    """What of a pair is not in a record that is none."""
    if is_filled(data.get("rejected_messages")):
        return "'rejected_messages', which are not read: write both conversations as 'chosen' and 'rejected'"
    names = ("chosen", "rejected")
    lacks = [repr(name) for name in names if not is_answer(data.get(name))]
    if len(lacks) == 1 or any(data.get(name) is not None for name in names):
        return f"nothing in {' and '.join(lacks)}"
    return "no 'chosen' and 'rejected': use sft for it"


def _is_answered(data: Mapping[str, Any]) -> bool:
    """Whether its conversation has its answer: other `answers` beside it are for evaluation, as in many VQA data."""
    turns = data.get("conversations")
    return isinstance(turns, list) and bool(turns) and isinstance(turns[-1], dict) and _role(turns[-1]) in _ASSISTANT


def _pair(data: Mapping[str, Any]) -> list[Answer]:
    if is_answer(data.get("rejected_response")):  # beside a conversation that ends with the chosen one
        if is_preference(data):
            raise _bad("'rejected_response' stands beside 'chosen' and 'rejected': keep one of the two pairs")
        turns = _turns(data.get("conversations"), "conversations")
        if not turns or _role(turns[-1]) not in _ASSISTANT:
            raise _bad("'rejected_response' stands beside a conversation whose last turn is the preferred answer")
        prompt, chosen = turns[:-1], turns[-1:]
        rejected = _completion(data["rejected_response"], "rejected_response")
    else:
        prompt = _prompt(data)
        chosen, rejected = (_completion(data[name], name) for name in ("chosen", "rejected"))
        if not prompt:  # both are whole conversations: what they share is the prompt
            shared = 0
            while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
                shared += 1
            while shared and _role(chosen[shared - 1]) in _ASSISTANT:
                shared -= 1  # an answer that both begin with is an answer
            prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        else:
            chosen, rejected = _after(prompt, chosen, "chosen"), _after(prompt, rejected, "rejected")
    return [_answer(data, prompt, completion) for completion in (chosen, rejected)]


def _group(data: Mapping[str, Any]) -> list[Answer]:
    prompt, given = _prompt(data), data["answers"]
    if not isinstance(given, list) or len(given) > MAX_ANSWERS:
        raise _bad(f"'answers' is no list of at most {MAX_ANSWERS} answers")
    found = []
    for number, each in enumerate(given, 1):
        if isinstance(each, str):
            each = {"text": each}
        if not isinstance(each, dict) or not isinstance(each.get("text"), str):
            raise _bad(f"answer {number} is neither a text nor an object with 'text'")
        if unknown := each.keys() - {"text", "weight", "reward"}:
            raise _bad(f"answer {number} has {min(map(str, unknown))!r}; known are text, weight and reward")
        weight, reward = (_number(each.get(name), name, number) for name in ("weight", "reward"))
        answer = _answer(data, prompt, _completion(each["text"], f"answer {number}"))
        found.append(answer._replace(weight=1.0 if weight is None else weight, reward=reward))
    return found


def _number(value: Any, name: str, number: int) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        raise _bad(f"{name!r} of answer {number} is {str(value)[:40]!r}, not a number of at most {_LARGEST:g}")
    if name == "weight" and value < 0:
        raise _bad(f"'weight' of answer {number} is {value}, below 0")
    return float(value)


def _prompt(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The turns before the answers; none where the answers hold them."""
    given = [name for name in ("conversations", *PROMPTS) if is_filled(data.get(name))]
    if len(given) > 1:
        raise _bad(f"{' and '.join(map(repr, given))} are both a prompt: keep one of them")
    if not given:
        return []
    value = data[given[0]]
    turns = [{"role": "user", "content": value}] if isinstance(value, str) else _turns(value, given[0])
    if not turns or _role(turns[-1]) in _ASSISTANT:
        raise _bad(f"{given[0]!r} ends with an answer, where 'chosen', 'rejected' or 'answers' go on")
    return turns


def _completion(value: Any, name: str) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    return _turns([value] if isinstance(value, dict) else value, name)


def _after(prompt: list[dict[str, Any]], turns: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The turns without the prompt, where they are the whole conversation."""
    turns = turns[len(prompt) :] if turns[: len(prompt)] == prompt else turns
    if turns and _role(turns[0]) in _ASKING:
        raise _bad(f"{name!r} begins with a turn that is no answer, and not with the prompt that stands beside it")
    return turns


def _turns(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise _bad(f"{name!r} is neither a text nor a list of turns")
    return value


def _role(turn: Mapping[str, Any]) -> Any:
    return turn.get("role") or turn.get("from")


def _answer(data: Mapping[str, Any], prompt: Sequence[dict], completion: Sequence[dict]) -> Answer:
    if not prompt or not completion:
        raise _bad("the answers begin with no common prompt, or one of them is empty")
    asked = [_untrained(turn) if _role(turn) in _ASSISTANT else turn for turn in prompt]
    rest = {name: value for name, value in data.items() if name not in (*PROMPTS, *ANSWERS)}
    return Answer(normalised(rest | {"conversations": [*asked, *completion]}))


def _untrained(turn: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in turn.items() if name not in TRAINING_FLAGS} | {"loss": False}


def with_those_that_leave(error: SampleError, sample_ids: Sequence[str]) -> SampleError:
    """The error of a tree of joined rows, by whose first id it is known, with the ids of the others."""
    return SampleError(
        error.reason, f"{error.detail}; with it leave {', '.join(sample_ids)} (share_prefix)", error.source
    )


def _bad(detail: str) -> SampleError:
    return SampleError("answers", detail)
