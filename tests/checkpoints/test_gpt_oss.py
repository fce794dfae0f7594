"""InternVL3.5-GPT-OSS in InternVL's own format: its names, there and back, and what its config says."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.model_samples import mixed_segments, packed_batch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from internvl_pack.checkpoints.internvl_format_files import (
    convert_to_internvl_format,
    convert_to_native,
    save_internvl_format,
)
from internvl_pack.model.build import build_model
from internvl_pack.testing.tiny import save_tiny_checkpoint, tiny_internvl, tiny_text_config

# Of one decoder layer, as GptOssForCausalLM stores them.
LAYER = {
    "input_layernorm.weight": (64,),
    "post_attention_layernorm.weight": (64,),
    "self_attn.q_proj.weight": (64, 64),
    "self_attn.q_proj.bias": (64,),
    "self_attn.k_proj.weight": (32, 64),
    "self_attn.k_proj.bias": (32,),
    "self_attn.v_proj.weight": (32, 64),
    "self_attn.v_proj.bias": (32,),
    "self_attn.o_proj.weight": (64, 64),
    "self_attn.o_proj.bias": (64,),
    "self_attn.sinks": (4,),
    "mlp.router.weight": (4, 64),
    "mlp.router.bias": (4,),
    "mlp.experts.gate_up_proj": (4, 64, 256),
    "mlp.experts.gate_up_proj_bias": (4, 256),
    "mlp.experts.down_proj": (4, 128, 64),
    "mlp.experts.down_proj_bias": (4, 64),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A checkpoint as InternVLChatModel holds GPT-OSS, with random weights."""
    model = tiny_internvl(tokenizer, "gpt_oss")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    folder = tmp_path_factory.mktemp("gpt_oss") / "chat"
    folder.mkdir()
    save_internvl_format(folder, model.config, model.state_dict(), template="internvl3_5_gpt_oss")
    tokenizer.save_pretrained(folder)
    return folder


def test_names_and_shapes_are_gpt_osss_own(folder):
    weights = load_file(folder / "model.safetensors")
    prefix = "language_model.model.layers.1."
    found = {n.removeprefix(prefix): tuple(t.shape) for n, t in weights.items() if n.startswith(prefix)}
    assert found == LAYER
    config = json.loads((folder / "config.json").read_text())
    assert (
        config["llm_config"]["architectures"] == ["GptOssForCausalLM"] and config["template"] == "internvl3_5_gpt_oss"
    )
    assert config["llm_config"]["layer_types"] == ["sliding_attention", "full_attention"]
    assert config["llm_config"]["rope_scaling"]["rope_type"] == "yarn"


def test_it_is_trained_and_written_back_bit_for_bit(folder, tmp_path, tokenizer):
    packed = build_model(folder, tokenizer=tokenizer, device="cpu", dtype=torch.float32)
    batch = packed_batch(mixed_segments(tokenizer))
    packed.train()(**batch).loss.backward()
    assert all(p.grad is not None for p in packed.parameters())
    save_internvl_format(tmp_path / "back", packed.config, packed.model.state_dict(), like=folder)
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(t, after[n]) for n, t in before.items())
    contents = [json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "back")]
    assert contents[0] == contents[1] | {"torch_dtype": contents[0]["torch_dtype"]}


@pytest.mark.slow
def test_it_is_converted_there_and_back(folder, tmp_path, tokenizer):
    image = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    convert_to_native(folder, tmp_path / "hf", image, "1GB")
    native = build_model(tmp_path / "hf", tokenizer=tokenizer, device="cpu", dtype=torch.float32)
    original = build_model(folder, tokenizer=tokenizer, device="cpu", dtype=torch.float32)
    batch = packed_batch(mixed_segments(tokenizer))
    assert native.eval()(**batch).loss.item() == original.eval()(**batch).loss.item()
    convert_to_internvl_format(tmp_path / "hf", tmp_path / "back", None, "1GB")
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(t, after[n]) for n, t in before.items())


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@pytest.mark.slow
def test_a_published_language_model_in_4_bits_is_taken_whole(tmp_path, tokenizer):
    """MXFP4: blocks of 32 values, two in a byte, the lower half first, and a power of two for each block."""
    model = AutoModelForCausalLM.from_config(tiny_text_config("gpt_oss", vocab_size=len(tokenizer)))
    model.save_pretrained(tmp_path / "llm")
    weights, expected = load_file(tmp_path / "llm" / "model.safetensors"), {}
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = weights.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 128, (experts, outer, inner // 32), dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        pairs = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()
        values = torch.cat([FP4, -FP4])[pairs] * 2.0 ** (scales.float() - 127)[..., None]
        expected[name] = values.flatten(2).transpose(1, 2)
    save_file(weights, tmp_path / "llm" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "llm" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "llm" / "config.json").write_text(json.dumps(config))
    vision = save_tiny_checkpoint(tmp_path / "vision", tokenizer)
    packed = build_model(tokenizer=tokenizer, vision_path=vision, llm_path=tmp_path / "llm", device="cpu")
    parameters = packed.language_model.named_parameters()
    found = {name: parameter for name, parameter in parameters if name.endswith(("gate_up_proj", "down_proj"))}
    assert len(found) == 4
    for name, parameter in found.items():
        assert parameter.requires_grad and torch.equal(parameter.float(), expected[f"model.{name}"]), name
