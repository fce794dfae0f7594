"""Records as people write them, and the one form that they are read as."""

from __future__ import annotations

import json

import pytest

from internvl_pack.errors import SampleError
from internvl_pack.sources.normalise import IN_PARTS, normalised

ASK = {"role": "user", "content": "What is it?"}
TELL = {"role": "assistant", "content": "Tea."}
IMAGE = {"type": "image"}
WHAT = {"type": "text", "text": "What is it?"}


def user(*parts) -> dict:
    return {"role": "user", "content": list(parts)}


def asked(text: str) -> list[dict]:
    return [{"role": "user", "content": text}, TELL]


@pytest.mark.parametrize(
    ("record", "turns", "images"),
    [
        # names
        ({"conversations": [ASK, TELL], "image": "a.jpg"}, [ASK, TELL], "a.jpg"),
        ({"messages": [ASK, TELL]}, [ASK, TELL], None),
        ({"messages": [ASK, TELL], "conversations": None}, [ASK, TELL], None),
        ({"messages": [ASK, TELL], "images": ["a.jpg", "b.jpg"]}, [ASK, TELL], ["a.jpg", "b.jpg"]),
        ({"conversations": [ASK, TELL], "images": "a.jpg", "image": []}, [ASK, TELL], "a.jpg"),
        ({"conversations": [ASK, TELL], "image": "a.jpg", "images": [None][:0]}, [ASK, TELL], "a.jpg"),
        ({"conversations": [ASK, TELL], "image": {"bytes": None, "path": None}, "images": ["b"]}, [ASK, TELL], ["b"]),
        ({"messages": [ASK, TELL], "images": [{"path": "a.jpg"}, "b"]}, [ASK, TELL], ["a.jpg", "b"]),
        ({"conversations": [ASK, TELL], "image": {"path": "a.jpg", "bytes": None}}, [ASK, TELL], "a.jpg"),
        (
            {"conversations": [ASK, TELL], "image": {"path": "a", "bytes": b"b"}},
            [ASK, TELL],
            {"path": "a", "bytes": b"b"},
        ),
        # turns
        ({"conversations": json.dumps([ASK, TELL])}, [ASK, TELL], None),
        ({"messages": {"role": ["user"], "content": ["What is it?"]}}, [ASK], None),
        ({"messages": (ASK, TELL)}, [ASK, TELL], None),
        # named in texts
        (
            {"conversations": asked("Picture 1: <img>a.jpg</img>\n<img>file:///b/c d.png</img>\nWhat?")},
            asked("Picture 1: <image>\n<image>\nWhat?"),
            ["a.jpg", "/b/c d.png"],
        ),
        ({"messages": asked("<img>a.jpg</img>What?"), "images": ["a.jpg"]}, asked("<image>What?"), ["a.jpg"]),
        (
            {"messages": [user({"type": "text", "text": "<img>a.jpg</img>"})]},
            [ASK | {"content": "<image>"}],
            ["a.jpg"],
        ),
        ({"messages": asked("<img>a.jpg</img>"), "images": ["b.jpg"]}, asked("<img>a.jpg</img>"), ["b.jpg"]),
        ({"conversations": asked("<image><img>a.jpg</img>")}, asked("<image><img>a.jpg</img>"), None),
        ({"conversations": asked("the tags <img></img>")}, asked("the tags <img></img>"), None),
        # parts
        ({"messages": [user(WHAT), TELL]}, asked("What is it?"), None),
        ({"messages": [user(IMAGE, WHAT), TELL], "images": ["a.jpg"]}, asked("<image>\nWhat is it?"), ["a.jpg"]),
        ({"messages": [user(IMAGE, WHAT), TELL]}, asked("<image>\nWhat is it?"), None),  # a shard's own image
        (
            {"messages": [user({"type": "text", "text": "Left: "}, IMAGE, {"type": "text", "text": "right: "}, IMAGE)]},
            [{"role": "user", "content": "Left: <image>\nright: <image>\n"}],
            None,
        ),
        (
            {"messages": [user({"type": "image", "image": "a.jpg"}, {"type": "image", "path": "b.jpg"}, WHAT), TELL]},
            asked("<image>\n<image>\nWhat is it?"),
            ["a.jpg", "b.jpg"],
        ),
        (
            {"messages": [user({"type": "image_url", "image_url": {"url": "https://host/a.jpg"}}, WHAT), TELL]},
            asked("<image>\nWhat is it?"),
            ["https://host/a.jpg"],
        ),
        (
            {"messages": [user({"type": "image_url", "image_url": "a.jpg"})]},
            [{**ASK, "content": "<image>\n"}],
            ["a.jpg"],
        ),
        ({"messages": [user({"image": "file:///d/a.jpg"}, {"text": "q"}), TELL]}, asked("<image>\nq"), ["/d/a.jpg"]),
        (
            {"messages": [user({"type": "image", "text": None, "index": 0}, {**WHAT, "index": None})], "images": ["a"]},
            [{**ASK, "content": "<image>\nWhat is it?"}],
            ["a"],
        ),
        (
            {
                "messages": [
                    user({"type": "input_image", "image_url": "a"}, {"type": "input_text", "text": "What?"}),
                    TELL | {"content": [{"type": "output_text", "text": "Tea.", "annotations": []}]},
                ]
            },
            asked("<image>\nWhat?"),
            ["a"],
        ),
        (
            {"messages": [user(IMAGE | {"image": "a"}, {"text": "Or?"}), TELL], "image": "a"},
            asked("<image>\nOr?"),
            ["a"],
        ),
        (
            {"conversations": [{"from": "human", "value": [IMAGE, WHAT]}, {"from": "gpt", "value": [WHAT], "loss": 0}]},
            [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "What is it?", "loss": 0}],
            None,
        ),
    ],
)
def test_forms_that_are_read(record, turns, images):
    found = normalised(record | {"id": "7"})
    assert normalised(found) is found
    for turn in found["conversations"]:
        turn.pop(IN_PARTS, None)
    assert found == {"id": "7", "conversations": turns} | ({} if images is None else {"image": images})


def test_turns_whose_images_were_parts_say_so():
    turns = [user(IMAGE, WHAT), TELL, user(WHAT), TELL, {"role": "user", "content": "<image>\nWhat?"}]
    found = normalised({"messages": turns, "images": ["a", "b"]})["conversations"]
    assert [turn.get(IN_PARTS) for turn in found] == [True, None, None, None, None]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"conversations": [ASK], "messages": [ASK]}, "conversation_ambiguous"),
        ({"conversations": [ASK], "image": "a", "images": ["a"]}, "image_field"),
        ({"conversations": "[{"}, "invalid_json"),
        ({"conversations": r'["\ud800"]'}, "lone_surrogate"),
        ({"messages": [ASK, {"role": "assistant", "content": [IMAGE]}]}, "placeholder_mismatch"),
        ({"messages": [{"role": "system", "content": [IMAGE]}, ASK]}, "placeholder_mismatch"),
        ({"messages": [user({"type": "audio", "audio": "a.wav"})]}, "turn_value_not_text"),
        ({"messages": [user({"type": "text", "text": None})]}, "turn_value_not_text"),
        ({"messages": [user(7)]}, "turn_value_not_text"),
        ({"messages": [user("q")]}, "turn_value_not_text"),
        ({"messages": [user(IMAGE, {"type": "image", "image": "a"})]}, "image_field"),
        ({"messages": [user({"type": "image", "image": "a"})], "images": ["b"]}, "image_field"),
        ({"messages": [user(IMAGE | {"index": 1})], "images": ["a", "b"]}, "image_field"),
    ],
)
def test_forms_that_say_two_things_or_none_are_refused(record, reason):
    with pytest.raises(SampleError) as error:
        normalised(record)
    assert error.value.reason == reason


@pytest.mark.parametrize(
    "record", [{}, {"conversations": 7}, {"conversations": "text"}, {"conversations": [7], "image": 3}]
)
def test_what_no_form_fits_is_left_for_encoding_to_judge(record):
    assert normalised(record) is record


def test_an_image_without_path_or_bytes_is_refused_by_its_own_field():
    with pytest.raises(SampleError, match=r"entry 2 of field 'images' .*\(it has file\)") as caught:
        normalised({"messages": [ASK, TELL], "images": ["a.jpg", {"file": "b.jpg"}]})
    assert caught.value.reason == "image_field"
