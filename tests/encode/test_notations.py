"""Images in the notations of other tools: bound where it is clear, else refused, never trained as text in silence."""

from __future__ import annotations

import pytest

from internvl_pack.encode.notations import bind_other_notations
from internvl_pack.errors import SampleError


def bound(text: str, num_images: int) -> str | None:
    """The text of a human turn with `<image>` in it; None where the sample is refused."""
    try:
        turns = bind_other_notations([("human", text), ("gpt", "<IMAGE>\n")], num_images)
    except SampleError as error:
        assert error.reason == "placeholder_mismatch"
        return None
    assert turns[1] == ("gpt", "<IMAGE>\n"), "answers are text"
    return turns[0][1]


@pytest.mark.parametrize(
    "text, num_images, expected",
    [
        ("<IMAGE>\nq", 1, "<image>\nq"),
        ("<image_1> <image_2> differ?", 2, "<image> <image> differ?"),
        ("<image 0> and <image 1>", 2, "<image> and <image>"),
        ("Is <|image_1|> red?", 1, "Is <image> red?"),
        ("<|vision_start|><|image_pad|><|vision_end|>q", 1, "<image>q"),
        ("<ImageHere><ImageHere>q", 2, "<image><image>q"),
        ("[IMG]\nq", 1, "<image>\nq"),
        ("[image]\nq", 1, "<image>\nq"),
        ("<Img><ImageHere></Img> q", 1, "<image> q"),
        ("<img>\nq", 1, "<image>\nq"),
        ("<start_of_image>q", 1, "<image>q"),
        ("<__media__>\n<__media__>q", 2, "<image>\n<image>q"),
    ],
)
def test_a_clear_notation_is_taken_for_image(text, num_images, expected):
    assert bound(text, num_images) == expected


@pytest.mark.parametrize(
    "text, num_images",
    [
        ("<IMAGE>\nq", 0),
        ("<IMAGE>\nq", 2),
        ("q\n[IMG]", 0),
        ("<image0>\nq", 0),
        ("<Img><ImageHere></Img> q", 0),
        ("<|media|>q", 0),
        ("<|vision_start|><|video_pad|><|vision_end|>q", 0),
        ("<VIDEO>\nq", 1),
        ("Picture 1: <img>d.jpg</img>\nq", 0),
        ("compare <img>a.png</img> to it", 1),
        ("<image>\n<img>b.png</img>", 1),
        ("<image_1> <image_2> differ?", 1),
        ("<image_2> <image_1> differ?", 2),
        ("What is in <image_1>?", 0),
        ("<image>\nand <image_2>", 1),
        ("<IMAGE> and <image_1>", 2),
        ("<image>\n<IMAGE>\nq", 1),
        ("<audio>\nq", 0),
        ("<audio>\nq", 1),
    ],
)
def test_an_unclear_notation_refuses_the_sample(text, num_images):
    assert bound(text, num_images) is None


@pytest.mark.parametrize(
    "text, num_images",
    [
        ("<image>\nq", 1),
        ("What does [IMG] mean?", 0),
        ("the tags <img></img> and <IMG_CONTEXT> stay", 0),
        ('write <img src="a.png"> here', 0),
        ("<image>\nDescribe <image_1> please", 1),
        ("<image>\nWhat does [IMG] mean?", 1),
        ("an <audio> element", 0),
        ("a <video> or an <img> in HTML", 0),
    ],
)
def test_words_stay_words(text, num_images):
    assert bound(text, num_images) == text


@pytest.mark.parametrize("role", ["system", "gpt"])
@pytest.mark.parametrize("num_images", [0, 1])
def test_a_file_between_img_tags_is_no_text_of_other_turns_either(role, num_images):
    turns = [(role, "See <img>d.jpg</img>."), ("human", "<image>\nq" if num_images else "q")]
    with pytest.raises(SampleError, match=f"'<img>d.jpg</img>' stands in a turn of '{role}'") as refused:
        bind_other_notations(turns, num_images)
    assert refused.value.reason == "placeholder_mismatch"
    words = [(role, "the tags <img></img> and <img src='a.png'>"), turns[1]]
    assert bind_other_notations(words, num_images) == words
