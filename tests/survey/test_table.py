"""The version of the tables: another one wherever a row would be measured otherwise."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

from helpers.chat_tokenizers import of_format
from helpers.encode_samples import SPEC, jpeg, raw_sample

from internvl_pack.checkpoints.encoding import encode_config
from internvl_pack.encode import EncodeConfig, Encoder
from internvl_pack.errors import SampleError
from internvl_pack.survey.table import VERSION
from internvl_pack.testing.tiny import tiny_tokenizer

IMAGES = {"a.jpg": jpeg(), "b.jpg": jpeg(90, 200)}
STYLES = (
    "Hermes-2",
    "chat_template",
    "internlm2-chat",
    "internvl2_5",
    "internvl3_5_gpt_oss",
    "internvl_zh",
    "phi3-chat",
)
NATIVE = ("qwen2_5_vl", "qwen3_vl", "glm4v")
TURNS = [
    ("system", "Be brief."),
    ("human", "<image>\n<image>\nAlike?"),
    ("gpt", "No."),
    ("human", "Why?"),
    ("gpt", "é"),
]
PARTS = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "q"}, {"type": "image"}]}]
RECORDS = {
    "a conversation": (TURNS, IMAGES, {}),
    "images without a place": (TURNS[3:], IMAGES, {}),
    "images in parts": ([*PARTS, {"role": "assistant", "content": "a"}], IMAGES, {}),
    "another notation": ([("human", "<image_1> or <image_2>?"), ("gpt", "a")], IMAGES, {}),
    "an answer that is untrained": (
        [
            {"from": "human", "value": "q"},
            {"from": "gpt", "value": "a", "loss": 0},
            {"from": "human", "value": "r"},
            {"from": "gpt", "value": "b <|im_end|> <ref>c</ref>"},
        ],
        None,
        {"system": ""},
    ),
    "a text": ([("pretrain", "See <image> and\n<image>.")], IMAGES, {}),
    "a group": (TURNS[1:2], IMAGES, {"answers": ["Yes.", {"text": "No, never.", "weight": 0.5}]}),
    "a bad answer": (TURNS[1:3], IMAGES, {"label": False}),
    "an image that is missing": ([("human", "<image>\nq"), ("gpt", "a")], None, {}),
    "an image in an answer": ([("human", "q"), ("gpt", "<img>a.jpg</img>")], None, {}),
}
PAIR = (None, IMAGES, {"question": "<image><image>q", "chosen": "Yes.", "rejected": "Yes, or no."})


def encoders() -> Iterator[tuple[str, Encoder]]:
    """Of every chat format and family. A tokenizer without merges has the same ids wherever it is made."""
    plain = tiny_tokenizer([])
    for style in STYLES:
        options = {"conv_style": style, "image_size": 56, "tokens_per_tile": 4, "dynamic_image_size": True}
        for objective in ("sft", "dpo"):
            config = EncodeConfig(**options, use_thumbnail=True, objective=objective)
            yield f"{style} {objective}", Encoder(of_format(plain, style), config)
    for family in NATIVE:
        vision = {"patch_size": 14, "spatial_merge_size": 2, "tokens_per_second": 2}
        config = encode_config({}, {"model_type": family, "vision_config": vision})
        yield family, Encoder(tiny_tokenizer([], family=family), config)


def measured(encoder: Encoder, conversation, images, fields) -> list:
    try:
        one = encoder.encode(raw_sample(conversation, images, **fields), SPEC)
    except SampleError as error:
        return [error.reason]
    tiles = [image.grid.num_tiles for image in one.images]
    spans = [[span.num_tokens, span.num_tiles, span.ends_turn] for span in one.record.spans]
    return [one.input_ids.tolist(), one.labels.tolist(), tiles, spans, list(map(list, one.branches))]


def test_a_change_of_what_is_measured_has_a_version_of_its_own():
    found = {
        name: {case: measured(encoder, *record) for case, record in (RECORDS | {"a pair": PAIR}).items()}
        for name, encoder in encoders()
    }
    assert len(found["internvl2_5 sft"]["a conversation"][0]) > 20 and found["qwen3_vl"]["a bad answer"] == [
        "preference_data"
    ]
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]
    assert (VERSION, digest) == (5, "a175435455dd384c"), (
        "records are encoded otherwise than the surveys of this VERSION (survey/table.py) have measured them: raise "
        "VERSION and renew the digest"
    )
