"""LoRA on both parts: what is trained, packed against unpacked, checkpoints of it, merged and alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from helpers.factory import write_jsonl
from helpers.model_samples import mixed_segments, packed_batch, padded_batch, relative_error
from helpers.original_samples import VISION_6B, chat_config, chat_logits, chat_weights, write_chat_checkpoint
from helpers.ranks import run
from safetensors.torch import load_file
from transformers import InternVLForConditionalGeneration

from internvl_pack.checkpoints import lora
from internvl_pack.checkpoints.internvl_format_files import chat_style, config_of
from internvl_pack.checkpoints.weight_files import LazyWeights
from internvl_pack.errors import UserError
from internvl_pack.model.build import build_model
from train import finetune
from train.saving import ADAPTER, Saving

pytest.importorskip("peft")

BOTH = {"use_llm_lora": 4, "use_backbone_lora": 2}
COUNT = 16


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer) -> Path:
    """A tiny InternVLChatModel, the same natively, and data."""
    from internvl_pack.cli import main as cli

    folder = tmp_path_factory.mktemp("made")
    write_jsonl(folder, COUNT)
    config = chat_config(tokenizer, "qwen2")
    write_chat_checkpoint(folder / "original", config, chat_weights(config), tokenizer)
    config = chat_config(tokenizer, "internlm2", VISION_6B)
    write_chat_checkpoint(folder / "internlm2", config, chat_weights(config), tokenizer)
    assert cli(["convert", str(folder / "original"), str(folder / "native"), "--to", "hf"]) == 0
    return folder


def build(folder, tokenizer, **options):
    return build_model(folder, tokenizer=tokenizer, **({"device": "cpu", "dtype": torch.float32} | options))


def awake(packed):
    """The second matrices of LoRA start at zero: away from there, so that LoRA does something."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in packed.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return packed


# --- the model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [BOTH, {"use_llm_lora": 4, "freeze_backbone": True}, {"use_backbone_lora": 2}])
def test_a_pack_has_the_gradients_of_its_samples_one_by_one(options, made, tokenizer):
    packed = awake(build(made / "native", tokenizer, **options)).train()
    segments = mixed_segments(tokenizer)
    found = []
    for batches in ([packed_batch(segments)], [padded_batch(segments)], [packed_batch([s]) for s in segments]):
        packed.zero_grad()
        normalizer = sum(float(b["loss_weight"].sum()) for b in batches)
        for batch in batches:
            packed(**batch, loss_normalizer=normalizer).loss.backward()
        found.append({name: p.grad.clone() for name, p in packed.named_parameters() if p.grad is not None})
    trained = {name for name, p in packed.named_parameters() if p.requires_grad}
    assert trained and any(".lora_A." in name for name in trained)
    for other in found[1:]:
        assert other.keys() == found[0].keys() == trained
        for name, gradient in found[0].items():
            assert relative_error(other[name], gradient) < 2e-4, name


def test_only_linear_layers_of_attention_and_mlp_have_lora_and_the_rest_of_their_part_is_frozen(made, tokenizer):
    packed = build(made / "native", tokenizer, **BOTH)
    layers = lora.lora_layers(packed.model)
    kinds = {path.rpartition(".")[2] for path in layers}
    assert kinds == {*lora.VISION_TARGETS, *lora.LANGUAGE_TARGETS} - {"gate_up_proj"}  # of GLM-4V
    assert len(layers) == 3 * 6 + 2 * 7
    ranks = {(path.split(".")[1], layer.r["default"], layer.scaling["default"]) for path, layer in layers.items()}
    assert ranks == {("vision_tower", 2, 2.0), ("language_model", 4, 2.0)}
    trained = {n for n, p in packed.named_parameters() if p.requires_grad and ".lora_" not in n}
    assert trained and all("multi_modal_projector" in name for name in trained)


@pytest.mark.slow
@pytest.mark.parametrize("save_format", ["hf", "internvl"])
def test_merged_it_has_the_logits_of_the_adapters(save_format, made, tokenizer, tmp_path):
    packed = awake(build(made / "original", tokenizer, **BOTH)).eval()
    batch = packed_batch(mixed_segments(tokenizer))
    with torch.no_grad():
        expected = packed(**batch, return_logits=True).logits
        plain = build(made / "original", tokenizer).eval()(**batch, return_logits=True).logits
        assert (plain - expected).abs().max() > 0.5  # LoRA does something
        Saving(save_format, source=str(made / "original")).write(packed, tmp_path, None, tokenizer)
        merged = build(tmp_path, tokenizer).eval()(**batch, return_logits=True).logits
    assert (merged - expected).abs().max() < 5e-5
    assert (
        json.loads((tmp_path / "config.json").read_text())["model_type"]
        == {
            "hf": "internvl",
            "internvl": "internvl_chat",
        }[save_format]
    )


@pytest.mark.slow
def test_the_adapters_alone_load_with_peft(made, tokenizer, tmp_path):
    from peft import PeftModel

    packed = awake(build(made / "native", tokenizer, **BOTH)).eval()
    with torch.no_grad():
        for parameter in packed.vision_modules[1].parameters():
            parameter.add_(0.1)  # the projector is trained as a whole
    Saving(merge_lora=False, source=str(made / "native")).write(packed, tmp_path, None, tokenizer)
    assert not list(tmp_path.glob("model*.safetensors"))
    base = InternVLForConditionalGeneration.from_pretrained(made / "native", dtype=torch.float32)
    by_peft = PeftModel.from_pretrained(base, tmp_path).eval()
    ids = torch.arange(20)[None]
    ids[0, 2:6] = packed.config.image_token_id
    pixels = torch.randn(1, 3, 56, 56, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        got = by_peft(input_ids=ids, pixel_values=pixels, use_cache=False).logits
        packed.model.set_attn_implementation("sdpa")
        expected = packed.model(input_ids=ids, pixel_values=pixels, use_cache=False).logits
    assert (got - expected).abs().max() < 2e-5


@pytest.mark.slow
def test_adapters_of_other_options_are_not_taken(made, tokenizer, tmp_path):
    Saving().write(build(made / "native", tokenizer, use_llm_lora=4), tmp_path, None, tokenizer)
    other = build(made / "native", tokenizer, use_llm_lora=8)
    with pytest.raises(UserError, match=r"was trained with other options \(--use_llm_lora.* more differ"):
        Saving().read(other, tmp_path)
    with torch.no_grad():
        other = build(made / "native", tokenizer, use_llm_lora=4)
        Saving().read(other, tmp_path)
        other.language_model.norm.weight.add_(0.5)
    with pytest.raises(UserError, match="was trained on other frozen weights: give the --model_name_or_path"):
        Saving().read(other, tmp_path)
    with pytest.raises(UserError, match=r"no adapter_model.safetensors there: LoRA was not trained"):
        Saving().read(other, made / "native")


def test_experts_of_a_mixture_get_no_lora_and_that_is_said(tokenizer, tmp_path, caplog):
    config = chat_config(tokenizer, "qwen3_moe")
    folder = write_chat_checkpoint(tmp_path, config, chat_weights(config), tokenizer)
    packed = awake(build(folder, tokenizer, use_llm_lora=2))
    assert "LoRA is on attention alone" in caplog.text
    Saving("internvl", source=str(folder)).write(packed, tmp_path / "out", None, tokenizer)
    stored = LazyWeights(tmp_path / "out")
    changed = {name for name, tensor in chat_weights(config).items() if not torch.equal(stored[name], tensor)}
    assert changed and all("self_attn" in name for name in changed)


# --- training -------------------------------------------------------------------------------------


@pytest.fixture
def train(made, tmp_path):
    """main() with tiny options -> its exit code; the environment is put back afterwards."""
    saved = os.environ.copy()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)

    def call(*options: str, out: Path = tmp_path / "out", model: str = "original") -> int:
        return finetune.main([*command_line(made, out, model), *options])

    yield call
    os.environ.clear()
    os.environ.update(saved)


def command_line(made: Path, out: Path, model: str) -> list[str]:
    options = {
        "model_name_or_path": made / model,
        "meta_path": made / "meta.json",
        "output_dir": out,
        "force_image_size": 56,
        "use_packed_ds": True,
        "max_packed_tokens": 768,
        "max_seq_length": 768,
        "num_images_expected": 16,
        "use_cpu": True,
        "logging_steps": 1,
        "report_to": "none",
        "learning_rate": 1e-2,
        "optim": "adamw_torch",
        "save_strategy": "no",
    }
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


LORA = ("--use_llm_lora", "4", "--use_backbone_lora", "2")


def losses(folder: Path) -> list[float]:
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


@pytest.mark.slow
def test_a_run_trains_adapters_and_projector_alone_and_saves_either_format(train, made, tmp_path, tokenizer):
    internvl, hf, alone = tmp_path / "internvl", tmp_path / "hf", tmp_path / "alone"
    options = (*LORA, "--max_steps", "2")
    chat = ("--save_format", "internvl", "--max_dynamic_patch", "4")
    assert train(*options, *chat, out=internvl) == 0
    assert train(*options, "--max_dynamic_patch", "4", out=hf) == 0
    assert train(*options, "--merge_lora", "False", "--max_dynamic_patch", "4", out=alone) == 0
    assert losses(internvl) == losses(hf) == losses(alone)

    adapter = load_file(internvl / ADAPTER / lora.ADAPTER_FILE)
    assert all(torch.equal(t, adapter[n]) for n, t in load_file(alone / lora.ADAPTER_FILE).items())
    assert all(".lora_" in name or "multi_modal_projector" in name for name in adapter)
    before, after = LazyWeights(made / "original"), LazyWeights(internvl)
    assert set(before) == set(after)
    touched = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(name.startswith("mlp1.") for name in touched)
    kept = {name for name in before if "norm" in name or "embed" in name or name.endswith((".ls1", ".ls2", ".bias"))}
    assert not {name for name in touched & kept if not name.startswith("mlp1.")}
    # Merged in either format, and the adapters alone put on the base: one model.
    batch = packed_batch(mixed_segments(tokenizer))
    with torch.no_grad():
        logits = [build(f, tokenizer).eval()(**batch, return_logits=True).logits for f in (internvl, hf)]
        with_adapters = build(made / "original", tokenizer, **BOTH).eval()
        Saving().read(with_adapters, alone)
        logits.append(with_adapters(**batch, return_logits=True).logits)
    assert torch.equal(logits[0], logits[1])
    assert (logits[2] - logits[0]).abs().max() < 5e-5

    config = json.loads((internvl / "config.json").read_text())
    assert config == json.loads((made / "original" / "config.json").read_text()) | {
        "max_dynamic_patch": 4,
        "dynamic_image_size": False,
        "use_thumbnail": False,
    }
    assert (internvl / "modeling_internvl_chat.py").is_file()
    # The weights written compute by hand what the run's model does.
    ids = torch.arange(12)
    with torch.no_grad():
        by_hand = chat_logits(config, dict(after), ids, [], -1)
        native = InternVLForConditionalGeneration.from_pretrained(hf, dtype=torch.float32)
        assert (native(input_ids=ids[None], use_cache=False).logits[0] - by_hand).abs().max() < 5e-5


@pytest.mark.slow
def test_packed_and_padded_train_to_the_same_adapters(train, tmp_path):
    # One step over all samples; a large epsilon, as Adam's first steps are otherwise signs of gradients.
    epoch = (*LORA, "--num_train_epochs", "1", "--adam_epsilon", "1e-2", "--gradient_accumulation_steps", "8")
    assert train(*epoch, out=tmp_path / "packed") == 0
    assert train(*epoch, "--use_packed_ds", "False", "--per_device_train_batch_size", "8", out=tmp_path / "padded") == 0
    a, b = (load_file(tmp_path / way / ADAPTER / lora.ADAPTER_FILE) for way in ("packed", "padded"))
    assert len(losses(tmp_path / "packed")) == 1
    assert losses(tmp_path / "packed") == pytest.approx(losses(tmp_path / "padded"), rel=1e-5)
    assert a.keys() == b.keys()
    assert all((a[name] - b[name]).abs().max() < 1e-5 for name in a)


@pytest.mark.slow
def test_going_on_from_a_checkpoint_with_lora_ends_at_the_same_weights(train, tmp_path):
    steps = (*LORA, "--max_steps", "3", "--save_strategy", "steps", "--save_steps", "2", "--save_format", "internvl")
    assert train(*steps, out=tmp_path / "whole") == 0
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    assert train(*steps, "--resume_from_checkpoint", str(checkpoint), out=tmp_path / "rest") == 0
    a, b = (load_file(tmp_path / run / ADAPTER / lora.ADAPTER_FILE) for run in ("whole", "rest"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert losses(tmp_path / "whole") == losses(tmp_path / "rest")


@pytest.mark.slow
def test_going_on_from_a_checkpoint_in_internvl_s_format_ends_at_the_same_weights(train, tmp_path):
    steps = ("--save_format", "internvl", "--max_steps", "3", "--save_strategy", "steps", "--save_steps", "2")
    assert train(*steps, out=tmp_path / "whole") == 0
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    assert json.loads((checkpoint / "config.json").read_text())["model_type"] == "internvl_chat"
    assert train(*steps, "--resume_from_checkpoint", str(checkpoint), out=tmp_path / "rest") == 0
    a, b = (LazyWeights(tmp_path / run) for run in ("whole", "rest"))
    assert set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_two_ranks_of_zero3_train_and_write_internlm2_as_one_process_does(train, made, tmp_path):
    same = (*LORA, "--save_format", "internvl", "--max_steps", "2", "--check_isolation", "False")
    same += ("--adam_epsilon", "1e-2", "--lr_scheduler_type", "constant")
    assert train(*same, "--gradient_accumulation_steps", "2", out=tmp_path / "one", model="internlm2") == 0
    argv = [*command_line(made, tmp_path / "two", "internlm2"), *same, "--deepspeed", "zero_stage3"]
    run("train.finetune:main", argv, 2, tmp_path / "log", CXX="/nonexistent")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)
    one, two, before = (LazyWeights(f) for f in (tmp_path / "one", tmp_path / "two", made / "internlm2"))
    assert set(one) == set(two) == set(before)
    for name in before:
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=1e-6)
    wqkv = "language_model.model.layers.0.attention.wqkv.weight"
    assert not torch.equal(two[wqkv], before[wqkv])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--merge_lora", "False"), "--merge_lora False: there is no LoRA"),
        (
            (*LORA, "--merge_lora", "False", "--save_format", "internvl"),
            "--merge_lora False with --save_format internvl",
        ),
        ((*LORA, "--unfreeze_vit_layers", "-1", "--merge_lora", "False"), "trained besides its LoRA"),
        (("--save_format", "safetensors"), "--save_format"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_training(options, message, train, capsys):
    assert train(*options) == 2
    assert message in capsys.readouterr().err


def test_the_chat_format_is_the_checkpoint_s_unless_another_is_named(made, tokenizer, tmp_path, caplog):
    assert chat_style(None, config_of(made / "original")) == "internvl2_5"
    assert chat_style(None, config_of(made / "native")) == "internvl2_5"
    assert chat_style(None, config_of(None)) == chat_style(None, config_of(tmp_path)) == "internvl2_5"
    config = chat_config(tokenizer, template="vicuna_v1.1")
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match=r"--conv_style is missing: the checkpoint was trained with 'vicuna_v1.1'"):
        chat_style(None, config_of(tmp_path))
    assert chat_style("internvl2_5", config_of(tmp_path)) == "internvl2_5"
    assert "--conv_style internvl2_5: the checkpoint was trained with vicuna_v1.1" in caplog.text
