"""`--family_check`: models of unknown kinds by the rules of known families, and what it refuses."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import torch
from helpers.native_samples import CLIP, HALVES, collated, native_tokenizer, processor, segments_of
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

from internvl_pack.batch.collate import packed_collate_fn
from internvl_pack.batch.row import PackRow
from internvl_pack.checkpoints.encoding import encode_config
from internvl_pack.errors import UserError
from internvl_pack.model import parity
from internvl_pack.model.build import build_model, check_loadable
from internvl_pack.model.family_check import check_by_parity, shrunken
from internvl_pack.model.selfcheck import check_isolation
from internvl_pack.model.towers import TOWERS
from internvl_pack.model.towers.internvl import InternVLTower
from internvl_pack.packing.cost import VisionSide

ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}
TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "rope_parameters": ROPE}
VISION = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 14}


@pytest.fixture(scope="module")
def tokenizer():
    return native_tokenizer("qwen2_5_vl")


def checkpoint(folder, tokenizer, statistics=CLIP):
    """A tiny Qwen2-VL, which is no family here; its tower is Qwen2.5-VL's without windows."""
    vocabulary = tokenizer.get_added_vocab()
    config = AutoConfig.for_model(
        "qwen2_vl",
        text_config=TEXT | {"vocab_size": len(tokenizer)},
        vision_config=VISION,
        image_token_id=vocabulary["<|image_pad|>"],
        vision_start_token_id=vocabulary["<|vision_start|>"],
    )
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    mean, std = statistics
    written = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "image_mean": mean, "image_std": std}
    written |= {"image_processor_type": "Qwen2VLImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(written))
    return folder


def build(folder, tokenizer, family="qwen2_5_vl"):
    return build_model(folder, tokenizer=tokenizer, device="cpu", dtype=torch.float32, family_check=family)


@pytest.mark.slow
def test_a_model_built_as_a_known_family_is_packed_exactly(tokenizer, tmp_path, caplog):
    """What is then trained is the checkpoint's model, not the shrunken one."""
    folder = checkpoint(tmp_path, tokenizer)
    with caplog.at_level(logging.INFO):
        packed = build(folder, tokenizer).train()
    assert "family check: 'qwen2_vl' by the rules of 'qwen2_5_vl': loss off by" in caplog.text
    options = json.loads((folder / "config.json").read_text())
    encode = encode_config({"family_check": "qwen2_5_vl"}, options)
    assert encode.family == "qwen2_5_vl" and not encode.takes_videos
    segments = segments_of(tokenizer, "qwen2_5_vl", parity.PLANS)
    loss = packed(**collated(tokenizer, "qwen2_5_vl", segments)).loss
    expected = parity.own_loss(parity.own_model(packed), segments, processor("qwen2_5_vl", tokenizer))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    matrices = [p.numel() for p in packed.tower.layers.parameters() if p.ndim == 2]
    assert VisionSide.of(packed.config.to_dict()).layers == sum(matrices), "what a step's operations are counted by"


@pytest.mark.slow
def test_with_zero_3_the_model_that_is_tried_is_whole(tokenizer, tmp_path):
    folder = checkpoint(tmp_path, tokenizer)
    config = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
    check_by_parity(folder, "qwen2_5_vl", tokenizer)
    assert is_deepspeed_zero3_enabled() and config.is_zero3(), "what is loaded then is not"


@pytest.mark.parametrize(
    ("family", "statistics", "message"),
    [
        pytest.param(
            "qwen2_5_vl",
            HALVES,
            "'qwen2_vl', packed by the rules of that family, differs from its own forward: loss",
            marks=pytest.mark.slow,
        ),
        ("internvl", CLIP, "'qwen2_vl' is not built as that family is .AttributeError"),
        ("qwen9_vl", CLIP, "--family_check 'qwen9_vl' is unknown: use one of glm4v, internvl"),
    ],
)
def test_what_does_not_fit_is_refused(tokenizer, tmp_path, family, statistics, message):
    with pytest.raises(UserError, match=message) as caught:
        build(checkpoint(tmp_path, tokenizer, statistics), tokenizer, family)
    assert "\n" not in str(caught.value)


def test_without_its_image_processor_nothing_is_compared(tokenizer, tmp_path):
    folder = checkpoint(tmp_path, tokenizer)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(UserError, match="has no image processor to compare with"):
        build(folder, tokenizer)


def test_without_the_option_a_model_of_an_unknown_kind_is_refused(tokenizer, tmp_path):
    with pytest.raises(UserError, match="name the one that it is built as by --family_check"):
        build(checkpoint(tmp_path, tokenizer), tokenizer, None)


class GemmaTower(InternVLTower):
    """As a module of a user's could have it."""

    tile_size = (56, 56)
    tokens_per_tile = 4
    image_token = "<image_soft_token>"

    def __init__(self, model):
        self._model, self._config = model, model.config
        self._config.vision_feature_layer = self._config.vision_feature_select_strategy = None


@pytest.mark.slow
def test_a_model_whose_image_tokens_see_each_other_is_isolated_and_fails(monkeypatch):
    """Gemma3: no sample sees its neighbour, and each is computed otherwise than by the model itself."""
    monkeypatch.setitem(TOWERS, "gemma3", GemmaTower)
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = TEXT | {"vocab_size": 300, "head_dim": 16, "sliding_window": 64, "pad_token_id": None}
    text.pop("rope_parameters")
    config = AutoConfig.for_model(
        "gemma3",
        text_config=text,
        vision_config=vision | {"image_size": 56, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_id=299,
    )
    torch.manual_seed(0)
    model = parity.perturbed(AutoModelForImageTextToText.from_config(config))
    packed = parity.pack_on_cpu(model)
    check_isolation(packed)
    layout = {"image_token_id": 299, "side": 56, "tokens_per_tile": 4, "around": ([0], [1])}
    pictures = parity.make_segment([("text", 3), ("image", 1), ("text", 4), ("answer", 6)], **layout)
    text_alone = parity.make_segment([("text", 9), ("answer", 6)], **layout)

    def process(segment):
        tiles = torch.from_numpy(np.stack(parity.pictures(segment)))
        scaled = tiles.permute(0, 3, 1, 2).float() / 255
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
        return {"pixel_values": (scaled - mean) / std}

    collation = {"image_size": 56, "image_token_id": 299}
    without = packed(**packed_collate_fn([PackRow([text_alone, text_alone])], **collation)).loss.item()
    assert without == pytest.approx(parity.own_loss(parity.own_model(packed), [text_alone]).item(), rel=1e-6)
    found = parity.measure_parity(packed, [pictures, text_alone], process, **collation)
    assert not found.holds and found.gradient > 0.01, found


def test_such_a_model_stays_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "vision_config": {}}))
    with pytest.raises(UserError, match="'gemma3' lets the tokens of an image see those after them"):
        check_loadable("internvl", model_name_or_path=tmp_path)


def test_a_shrunken_config_keeps_kinds_of_layers_and_widths_of_heads():
    config = AutoConfig.for_model(
        "qwen3_vl_moe",
        text_config={"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128},
        image_token_id=151655,
    )
    small = shrunken(config)
    text, vision = small.text_config, small.vision_config
    assert (text.num_hidden_layers, text.hidden_size, text.head_dim, text.num_experts) == (4, 256, 128, 4)
    assert (text.num_attention_heads, text.num_key_value_heads) == (4, 2)
    assert (vision.depth, vision.hidden_size, vision.deepstack_visual_indexes) == (4, 2 * 72, [1, 3])
    assert vision.out_hidden_size == text.hidden_size and small.image_token_id < text.vocab_size == 512
    assert config.text_config.num_experts == 128
