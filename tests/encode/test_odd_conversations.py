"""Conversations that InternVL's preprocessing writes otherwise, and what is made of them here (docs/migration.md)."""

from __future__ import annotations

import pytest
from helpers.encode_samples import SPEC, expected, jpeg, raw_sample

from internvl_pack.encode import EncodeConfig, Encoder
from internvl_pack.errors import SampleError

BLOCK = "<img><IMG_CONTEXT><IMG_CONTEXT><IMG_CONTEXT><IMG_CONTEXT></img>"
ONE, TWO = {"a": jpeg(40, 40)}, {"a": jpeg(40, 40), "b": jpeg(41, 40)}


def encoded(tokenizer, turns, images=None):
    encoder = Encoder(tokenizer, EncodeConfig(conv_style="internvl2_5", tokens_per_tile=4))
    sample = encoder.encode(raw_sample(turns, images), SPEC)
    return sample.input_ids.tolist(), sample.labels.tolist()


SYSTEM = "<|im_start|>system\nS<|im_end|>\n"


@pytest.mark.parametrize(
    "turns, images, runs",
    [
        pytest.param(
            [("human", "q"), ("gpt", "\n\na")],
            None,
            ["<|im_start|>user\nq<|im_end|>\n", "<|im_start|>assistant\n", ["\n\na"], ["<|im_end|>"], "\n"],
            id="an answer begins with line breaks: they are its own, and trained",
        ),
        pytest.param(
            [("human", "q"), ("gpt", " "), ("human", "r"), ("gpt", "a")],
            None,
            [
                *("<|im_start|>user\nq<|im_end|>\n", "<|im_start|>assistant\n", " ", "<|im_end|>\n"),
                *("<|im_start|>user\nr<|im_end|>\n", "<|im_start|>assistant\n", ["a"], ["<|im_end|>"], "\n"),
            ],
            id="a blank answer is context",
        ),
        pytest.param(
            [("human", "q"), ("gpt", "a"), ("human", "<image>\nr"), ("gpt", "b")],
            ONE,
            [
                *("<|im_start|>user\nq<|im_end|>\n", "<|im_start|>assistant\n", ["a"], ["<|im_end|>"], "\n"),
                *(
                    "<|im_start|>user\n",
                    BLOCK,
                    "\nr<|im_end|>\n",
                    "<|im_start|>assistant\n",
                    ["b"],
                    ["<|im_end|>"],
                    "\n",
                ),
            ],
            id="an image of the second turn stays there",
        ),
        pytest.param(
            [("human", "q"), ("gpt", "a")],
            ONE,
            ["<|im_start|>user\n", BLOCK, "\nq<|im_end|>\n", "<|im_start|>assistant\n", ["a"], ["<|im_end|>"], "\n"],
            id="an image without a placeholder comes before the question, not into the system prompt",
        ),
        pytest.param(
            [("human", "q"), ("gpt", "a")],
            TWO,
            [
                *("<|im_start|>user\n", BLOCK, "\n", BLOCK, "\nq<|im_end|>\n"),
                *("<|im_start|>assistant\n", ["a"], ["<|im_end|>"], "\n"),
            ],
            id="two images without placeholders",
        ),
    ],
)
def test_what_is_written(turns, images, runs, tokenizer):
    assert encoded(tokenizer, [("system", "S"), *turns], images) == expected(tokenizer, SYSTEM, *runs)


@pytest.mark.parametrize("typed", ["<|im_end|>", "<IMG_CONTEXT>"])
def test_control_tokens_that_were_typed_are_no_tokens(typed, tokenizer):
    ids, _ = encoded(tokenizer, [("system", "S"), ("human", f"q {typed}"), ("gpt", "a")])
    plain, _ = encoded(tokenizer, [("system", "S"), ("human", "q"), ("gpt", "a")])
    token = tokenizer.convert_tokens_to_ids(typed)
    assert ids.count(token) == plain.count(token) and typed in tokenizer.decode(ids)


def test_more_placeholders_than_images_is_an_image_that_is_missing(tokenizer):
    with pytest.raises(SampleError) as caught:
        encoded(tokenizer, [("human", "<image>\n<image>\nq"), ("gpt", "a")], ONE)
    assert caught.value.reason == "placeholder_mismatch"


def test_other_names_of_the_fields_are_read(tokenizer):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert encoded(tokenizer, turns) == encoded(tokenizer, [("human", "q"), ("gpt", "a")])
