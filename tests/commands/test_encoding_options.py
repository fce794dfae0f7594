"""Commands encode as training does: the same defaults, and what the checkpoint says."""

from __future__ import annotations

import argparse
import json

import pytest
from helpers.factory import write_jsonl

from internvl_pack import EncodeConfig, encode_config_of
from internvl_pack.checkpoints import encoding
from internvl_pack.commands._options import add_encoding, encode_config
from internvl_pack.errors import UserError
from train.arguments import DataTrainingArguments


@pytest.fixture
def meta(tmp_path):
    return write_jsonl(tmp_path, 2)


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_encoding(parser)
    return parser.parse_args(argv)


def test_defaults_are_those_of_training(meta):
    of_training = encoding.encode_config(vars(DataTrainingArguments(meta_path=str(meta))), {})
    assert encode_config(parsed()) == of_training == EncodeConfig()


@pytest.mark.parametrize("size", [lambda side: side, lambda side: [side, side]], ids=["number", "pair"])
def test_chat_format_and_sizes_are_the_checkpoints(tmp_path, size):
    tower = {"patch_size": size(16), "image_size": size(256)}
    config = {"model_type": "internvl_chat", "template": "phi3-chat", "vision_config": tower, "downsample_ratio": 0.25}
    (tmp_path / "config.json").write_text(json.dumps(config))
    encode = encode_config(parsed("--tokenizer", str(tmp_path)))
    assert encode.conv_style == "phi3-chat"
    assert (encode.image_size, encode.tokens_per_tile) == (256, 16)
    with pytest.raises(UserError, match="force_image_size 392 with patches of 16"):
        encode_config(parsed("--force_image_size", "392", "--tokenizer", str(tmp_path)))


def test_in_python_a_checkpoint_gives_what_a_command_takes_from_it(tmp_path):
    tower = {"patch_size": 14, "image_size": 56}
    config = {"model_type": "internvl_chat", "template": "phi3-chat", "vision_config": tower}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("--max_dynamic_patch", "6", "--objective", "dpo")
    given = encode_config_of(tmp_path, max_dynamic_patch=6, objective="dpo")
    assert given == encode_config(parsed(*words, "--tokenizer", str(tmp_path))) and given.conv_style == "phi3-chat"
    with pytest.raises(UserError, match="unknown option 'image_sise'"):
        encode_config_of(tmp_path, image_sise=56)
    with pytest.raises(UserError, match="of a model there: give"):
        encode_config_of(tmp_path.parent)


def test_a_tokenizer_alone_says_nothing_about_patches(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert encode_config(parsed("--tokenizer", str(tmp_path))).tokens_per_tile == 256
