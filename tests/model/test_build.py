"""Loading, what is trained, checkpoints, and the mistakes that are named."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from helpers.model_samples import mixed_segments, packed_batch, text_segments, tiny_packed
from transformers import AutoConfig, AutoModelForCausalLM, InternVLForConditionalGeneration

from internvl_pack.errors import UserError
from internvl_pack.model.build import build_model
from internvl_pack.model.families import check_family
from internvl_pack.model.packed import PackedModel
from internvl_pack.testing.tiny import save_tiny_checkpoint, tiny_text_config


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), tokenizer, "qwen3")


def build(checkpoint, tokenizer, **options):
    return build_model(checkpoint, tokenizer=tokenizer, **({"device": "cpu", "dtype": torch.float32} | options))


def trained(packed):
    """Which parts are trained: all, some or none of their parameters."""
    parts = dict(zip(("vision", "projector"), packed.vision_modules, strict=True))
    parts |= {"llm": packed.language_model, "head": packed.get_output_embeddings()}
    flags = {name: {p.requires_grad for p in part.parameters()} for name, part in parts.items()}
    return {name: {(True,): "all", (False,): "none"}.get(tuple(f), "some") for name, f in flags.items()}


def test_a_checkpoint_loads_with_packed_text_attention_and_plain_vision_attention(checkpoint, tokenizer):
    packed = build(checkpoint, tokenizer)
    assert packed.config.text_config._attn_implementation == "internvl_pack_segments"
    assert packed.config.vision_config._attn_implementation == "sdpa"
    assert packed.tokens_per_tile == 4
    segments = mixed_segments(tokenizer)
    plain = InternVLForConditionalGeneration.from_pretrained(checkpoint)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, dict(packed.model.named_parameters())[name])
    assert torch.isfinite(packed(**packed_batch(segments)).loss)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"vision": "all", "projector": "all", "llm": "all", "head": "all"}),
        ({"freeze_llm": True}, {"vision": "all", "projector": "all", "llm": "none", "head": "none"}),
        ({"freeze_backbone": True}, {"vision": "none", "projector": "all", "llm": "all", "head": "all"}),
        ({"freeze_mlp": True}, {"vision": "all", "projector": "none", "llm": "all", "head": "all"}),
        (
            {"freeze_backbone": True, "unfreeze_vit_layers": -1, "freeze_llm": True},
            {"vision": "some", "projector": "all", "llm": "none", "head": "none"},
        ),
    ],
)
def test_freezing_follows_internvl(checkpoint, tokenizer, options, expected):
    packed = build(checkpoint, tokenizer, grad_checkpoint=True, **options)
    assert trained(packed) == expected
    packed.train()
    for segments in (mixed_segments(tokenizer), text_segments(tokenizer)):
        packed.zero_grad()
        packed(**packed_batch(segments)).loss.backward()
        for name, parameter in packed.named_parameters():
            assert (parameter.grad is not None) == parameter.requires_grad, name


def test_unfrozen_vision_layers_are_counted_from_the_end(checkpoint, tokenizer):
    packed = build(checkpoint, tokenizer, freeze_backbone=True, unfreeze_vit_layers=-1)
    layers = packed.vision_modules[0].encoder.layer
    assert [any(p.requires_grad for p in layer.parameters()) for layer in layers] == [False, True]


def test_a_frozen_vision_side_keeps_no_graph(checkpoint, tokenizer):
    packed = build(checkpoint, tokenizer, freeze_backbone=True, freeze_mlp=True)
    assert not packed.image_features(torch.zeros(1, 3, 56, 56)).requires_grad


@pytest.mark.slow
def test_saved_checkpoints_are_ordinary_and_load_again(checkpoint, tokenizer, tmp_path):
    packed = tiny_packed(tokenizer, "qwen3").eval()
    batch = packed_batch(mixed_segments(tokenizer))
    expected = packed(**batch).loss.item()
    packed.save_pretrained(tmp_path / "own")
    packed.save_pretrained(tmp_path / "gathered", state_dict={k: v.clone() for k, v in packed.state_dict().items()})
    for folder in ("own", "gathered"):
        plain = InternVLForConditionalGeneration.from_pretrained(tmp_path / folder)
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), packed.parameters(), strict=True))
        again = build(checkpoint, tokenizer)
        again.load_pretrained(tmp_path / folder)
        assert again.eval()(**batch).loss.item() == expected


def test_a_saved_files_names_are_not_taken_silently(checkpoint, tokenizer):
    from safetensors.torch import load_file

    packed = build(checkpoint, tokenizer)
    with pytest.raises(ValueError, match="use load_pretrained"):
        packed.load_state_dict(load_file(checkpoint / "model.safetensors"), strict=False)


def test_tied_checkpoints_save_and_load(tokenizer, tmp_path):
    packed = tiny_packed(tokenizer, "qwen2", tie_word_embeddings=True)
    packed.save_pretrained(tmp_path)
    plain = InternVLForConditionalGeneration.from_pretrained(tmp_path)
    assert plain.lm_head.weight is plain.get_input_embeddings().weight
    assert torch.equal(plain.lm_head.weight, packed.get_output_embeddings().weight)


@pytest.mark.slow
def test_a_vision_tower_and_a_language_model_are_joined(checkpoint, tokenizer, tmp_path):
    config = tiny_text_config("llama", vocab_size=len(tokenizer) - 5)  # as before the image tokens were added
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "llm")
    whole = InternVLForConditionalGeneration.from_pretrained(checkpoint)
    whole.model.vision_tower.save_pretrained(tmp_path / "vision")
    for vision_path in (tmp_path / "vision", checkpoint):
        packed = build(None, tokenizer, vision_path=vision_path, llm_path=tmp_path / "llm")
        assert packed.config.text_config.model_type == "llama"
        assert packed.get_input_embeddings().num_embeddings == len(tokenizer)
        expected = whole.model.vision_tower.state_dict()
        assert all(torch.equal(v, expected[k]) for k, v in packed.vision_modules[0].state_dict().items())
    packed.train()(**packed_batch(mixed_segments(tokenizer))).loss.backward()
    assert all(p.grad is not None for p in packed.parameters())
    packed.save_pretrained(tmp_path / "joined")
    again = build(tmp_path / "joined", tokenizer)
    assert again.config.text_config._attn_implementation == "internvl_pack_segments"


def test_a_text_only_model_loads(tokenizer, tmp_path):
    config = tiny_text_config("qwen2", vocab_size=len(tokenizer))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    packed = build(tmp_path, tokenizer)
    assert not packed.has_vision
    assert torch.isfinite(packed(**packed_batch(text_segments(tokenizer))).loss)
    with pytest.raises(UserError, match="--use_backbone_lora: the model has no vision tower"):
        build(tmp_path, tokenizer, use_backbone_lora=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop_path_rate": 1.0}, "--drop_path_rate 1.0: give a probability"),
        ({"attn_kernel": "flash_attn"}, "--attn_kernel flash_attn needs a CUDA device"),
        ({"force_image_size": 60}, "--force_image_size 60: the model's tiles are 56x56 pixels in patches of 14; give"),
        ({"down_sample_ratio": 0.25}, "--down_sample_ratio 0.25: the model's is 0.5"),
        ({"freeze_llm": True, "freeze_backbone": True, "freeze_mlp": True}, "nothing is left to train"),
    ],
)
def test_options_that_do_not_fit_the_model_are_named(checkpoint, tokenizer, options, message):
    with pytest.raises(UserError, match=message):
        build(checkpoint, tokenizer, **options)


def test_missing_and_foreign_checkpoints_are_one_line(tokenizer, tmp_path):
    for path, message in ((tmp_path / "nowhere", "nowhere"), (tmp_path, "config.json")):
        with pytest.raises(UserError, match=message) as caught:
            build(path, tokenizer)
        assert str(caught.value).startswith("--model_name_or_path") and "\n" not in str(caught.value)
    (tmp_path / "config.json").write_text('{"model_type": "internvl_chat"}')
    with pytest.raises(UserError, match=r"--model_name_or_path .*: config.json: vision_config is missing"):
        build(tmp_path, tokenizer)
    with pytest.raises(UserError, match="--model_name_or_path is missing: give a checkpoint, or both --vision_path"):
        build(None, tokenizer)


def test_weights_that_do_not_fit_the_config_are_one_line(checkpoint, tokenizer, tmp_path, monkeypatch):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["intermediate_size"] *= 2
    (folder / "config.json").write_text(json.dumps(config))
    for on, ending in ((False, "see above"), (True, "use --sharding fsdp2")):
        monkeypatch.setattr("internvl_pack.model.build.zero3_is_on", lambda on=on: on)
        with pytest.raises(UserError, match=r"--model_name_or_path .*: weights do not fit config.json") as caught:
            build(folder, tokenizer)
        assert str(caught.value).endswith(ending) and "\n" not in str(caught.value)


def test_another_models_tokenizer_is_refused(checkpoint, tokenizer):
    from internvl_pack.testing.tiny import tiny_tokenizer

    with pytest.raises(UserError, match=r"<IMG_CONTEXT> is token \d+ of the tokenizer and \d+ of the model"):
        build(checkpoint, tiny_tokenizer(["a b c"], vocab_size=300))
    with pytest.raises(UserError, match=r"the tokenizer has \d+ tokens, the model embeds \d+"):
        build(checkpoint, tiny_tokenizer([f"word{i} and {i * 7}" for i in range(4000)], vocab_size=4096))


def test_reentrant_checkpointing_is_refused(checkpoint, tokenizer):
    with pytest.raises(UserError, match="set use_reentrant to false"):
        build(checkpoint, tokenizer).gradient_checkpointing_enable({"use_reentrant": True})


# --- families -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mamba2", "jamba", "olmo_hybrid", "recurrent_gemma", "falcon_mamba", "lfm2"])
def test_families_with_a_state_along_the_row_are_refused_by_name(family):
    with pytest.raises(UserError, match=f"{family!r} has layers that carry a state along the row"):
        check_family(AutoConfig.for_model(family))


def test_layers_with_a_state_in_an_unknown_family_are_refused():
    config = tiny_text_config("qwen2", vocab_size=10, layer_types=["full_attention", "linear_attention"])
    with pytest.raises(UserError, match=r"carry a state along the row \(linear_attention\)"):
        check_family(config)


def test_multi_token_prediction_and_attention_dropout_are_refused():
    with pytest.raises(UserError, match=r"multi-token prediction head \(num_nextn_predict_layers"):
        check_family(tiny_text_config("qwen2", vocab_size=10, num_nextn_predict_layers=1))
    assert check_family(AutoConfig.for_model("qwen3_5_text", mtp_num_hidden_layers=1))  # transformers leaves it out
    with pytest.raises(UserError, match=r"attention_dropout 0.1"):
        check_family(tiny_text_config("qwen2", vocab_size=10, attention_dropout=0.1))


def test_known_families_are_known_and_others_need_the_self_check():
    assert all(check_family(tiny_text_config(f, vocab_size=10)) for f in ("qwen2", "qwen3", "qwen3_moe", "llama"))
    assert check_family(AutoConfig.for_model("mistral")) is False


def test_rotary_tables_that_depend_on_the_row_limit_the_segments(tokenizer):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    packed = tiny_packed(tokenizer, "qwen2", rope_parameters=rope, max_position_embeddings=20)
    with pytest.raises(UserError, match="lower --max_seq_length to 20"):
        packed(**packed_batch(mixed_segments(tokenizer)))


def test_attention_must_be_ours(tokenizer):
    packed = tiny_packed(tokenizer)
    packed.model.set_attn_implementation({"text_config": "sdpa"})
    with pytest.raises(ValueError, match="the language model's attention is 'sdpa'"):
        PackedModel(packed.model)


# --- LoRA -----------------------------------------------------------------------------------------


def test_lora_without_peft_names_the_extra(checkpoint, tokenizer, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"--use_llm_lora needs peft: pip install 'internvl-pack\[lora\]'"):
        build(checkpoint, tokenizer, use_llm_lora=4)


@pytest.mark.slow
def test_lora_trains_its_own_weights_and_saves_an_ordinary_checkpoint(checkpoint, tokenizer, tmp_path):
    pytest.importorskip("peft")
    packed = build(checkpoint, tokenizer, use_llm_lora=4, use_backbone_lora=2, freeze_mlp=True, grad_checkpoint=True)
    names = [name for name, p in packed.named_parameters() if p.requires_grad]
    assert names and all(".lora_" in name for name in names)
    packed.train()
    batch = packed_batch(mixed_segments(tokenizer))
    with torch.no_grad():
        for name, parameter in packed.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    packed(**batch).loss.backward()
    assert all(p.grad.any() for p in packed.parameters() if p.requires_grad)
    packed.save_pretrained(tmp_path)
    merged = build(tmp_path, tokenizer)
    assert merged(**batch).loss.item() == pytest.approx(packed(**batch).loss.item(), rel=1e-5)
    assert merged(**batch).loss.item() != pytest.approx(build(checkpoint, tokenizer)(**batch).loss.item(), rel=1e-4)


def test_stochastic_depth_grows_along_the_tower_and_rests_in_evaluation(checkpoint, tokenizer):
    from internvl_pack.model.vision.drop_path import DropPath

    plain, deep = build(checkpoint, tokenizer), build(checkpoint, tokenizer, drop_path_rate=0.5)
    assert {module.training for module in deep.model.modules()} == {False}, "as loaded, with what was put in"
    assert deep.state_dict().keys() == plain.state_dict().keys()
    found = [1 - module.keep.item() for module in deep.modules() if isinstance(module, DropPath)]
    assert found == [0.0, 0.0, 0.5, 0.5], "two layers of two branches"
    tiles = torch.rand(64, 3, 56, 56)
    towers = [packed.vision_modules[0] for packed in (plain, deep)]
    with torch.no_grad():
        expected, same = (tower.eval()(tiles).last_hidden_state for tower in towers)
        assert torch.equal(same, expected)
        differs = (towers[1].train()(tiles).last_hidden_state - expected).abs().amax(dim=(1, 2)) > 1e-6
    assert 0.9 < differs.float().mean() <= 1.0, "what is kept is scaled up"


def test_stochastic_depth_drops_whole_tiles_and_keeps_the_mean():
    from internvl_pack.model.vision.drop_path import DropPath

    torch.manual_seed(0)
    out = DropPath(0.25)(torch.ones(4000, 3, 2))
    per_tile = out.flatten(1)
    assert (per_tile == per_tile[:, :1]).all()
    assert out.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert out.mean().item() == pytest.approx(1.0, abs=0.03)


def test_parameters_that_zero3_has_taken_apart_are_counted_whole(checkpoint, tokenizer):
    packed = build(checkpoint, tokenizer, freeze_llm=True)
    whole, trained = packed.num_parameters(), packed.num_parameters(only_trainable=True)
    for parameter in packed.model.parameters():  # as DeepSpeed leaves them: empty, with their size beside
        parameter.ds_numel = parameter.numel()
        parameter.data = parameter.data.new_empty(0)
    assert (packed.num_parameters(), packed.num_parameters(only_trainable=True)) == (whole, trained)
    assert 0 < trained < whole
