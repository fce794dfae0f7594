"""Models that cannot be trained here are refused in one line that names their kind, by config.json alone."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from helpers.original_samples import chat_config, chat_weights, write_chat_checkpoint

from internvl_pack.checkpoints import internvl_format_files
from internvl_pack.checkpoints.internvl_format_files import convert_to_native, local_folder
from internvl_pack.errors import UserError
from internvl_pack.model.build import build_model, check_loadable
from internvl_pack.parallel.checks import check_pictures


@pytest.mark.parametrize(
    "content, message",
    [
        ({"model_type": "qwen2_vl", "vision_config": {"depth": 32}}, "'qwen2_vl' is a multimodal model of another"),
        ({"model_type": "llava", "vision_config": {"model_type": "clip"}}, "'llava' is a multimodal model of another"),
        (
            {"model_type": "qwen2_audio", "audio_config": {"d_model": 8}},
            "'qwen2_audio' is a multimodal .audio_config in",
        ),
        ({"model_type": "llava_llama", "mm_vision_tower": "clip"}, "'llava_llama' is a multimodal .mm_vision_tower in"),
        ({"model_type": "gemma3", "vision_config": {}}, "'gemma3' lets the tokens of an image see those after them"),
        ({"model_type": "paligemma", "vision_config": {}}, "'paligemma' lets the tokens of an image see those after"),
        ({"model_type": "internlm2"}, "'internlm2' is no language model of transformers"),
        ({"model_type": "bloom"}, "'bloom' computes attention itself"),
    ],
)
@pytest.mark.parametrize("option", ["model_name_or_path", "llm_path"])
def test_other_kinds_of_models(option, content, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(
        UserError, match=f"--{option} .*{message.replace('multimodal .', 'multimodal model.*')}"
    ) as caught:
        check_loadable(**{option: tmp_path})
    assert "\n" not in str(caught.value)


def test_a_run_is_refused_before_a_tokenizer_is_looked_for(tmp_path, tokenizer):
    config = chat_config(tokenizer, llm_config={"architectures": ["InternLM3ForCausalLM"]})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"InternLM3 \(InternVL3-9B\)"):
        check_loadable(model_name_or_path=tmp_path)
    check_loadable(vision_path=tmp_path), "its tower is InternVL's"


def test_a_flash_model_is_named_by_its_weights(tokenizer, tmp_path):
    config = chat_config(tokenizer, "qwen3")
    weights = chat_weights(config) | {"gating.0.weight": torch.ones(2), "mlp2.1.weight": torch.ones(2)}
    folder = write_chat_checkpoint(tmp_path / "flash", config, weights, tokenizer)
    with pytest.raises(UserError, match=r"--model_name_or_path .*: a Flash model of InternVL3\.5: .* without -Flash"):
        build_model(folder, tokenizer=tokenizer, device="cpu", dtype=torch.float32)
    with pytest.raises(UserError, match="a Flash model"):
        convert_to_native(folder, tmp_path / "out", 5, "1GB")


def test_a_flash_model_of_the_hub_is_refused_by_its_index_before_its_weights_are_fetched(tmp_path, monkeypatch):
    import huggingface_hub

    fetched = []

    def snapshot_download(name, allow_patterns=None, ignore_patterns=None):
        fetched.append(allow_patterns)
        index = {"weight_map": {"gating.0.weight": "a", "language_model.lm_head.weight": "a"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(UserError, match=r"someone/InternVL3_5-8B-Flash: a Flash model"):
        local_folder("someone/InternVL3_5-8B-Flash")
    assert fetched == [["*.json"]]
    monkeypatch.setattr(internvl_format_files, "indexed_names", lambda folder: ["vision_model.x"])
    assert local_folder("someone/InternVL3_5-8B") == tmp_path
    assert fetched[1:] == [["*.json"], None]


@pytest.mark.parametrize("option", [{"fp8": "rowwise"}, {"vision_micro_tiles": 4}, {"drop_path_rate": 0.1}])
def test_what_does_not_go_with_native_resolution_yet_is_refused_before_a_weight_is_read(option, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "vision_config": {"depth": 2}}))
    ((name, value),) = option.items()
    with pytest.raises(UserError, match=f"--{name} {value} does not go with a 'qwen3_vl' model yet"):
        build_model(tmp_path, tokenizer=None, **option)


def test_rows_of_native_resolution_are_not_shared_among_ranks():
    tower = SimpleNamespace(grid_positions=True)
    with pytest.raises(UserError, match="--sequence_parallel_size 2 does not go with a 'qwen3_vl' model yet"):
        check_pictures(tower, "qwen3_vl", 2)
