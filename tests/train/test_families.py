"""`finetune.py` with models of native resolution: ranks, ZeRO, restarts, packed and padded rows, what is saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.clips import clip
from helpers.factory import write_jsonl
from helpers.launched import losses
from helpers.native_samples import native_tokenizer
from helpers.ranks import run
from transformers import AutoModelForImageTextToText

from internvl_pack.encode.families.native import CLIP, HALVES
from internvl_pack.testing.tiny import save_tiny_checkpoint

pytestmark = pytest.mark.slow

STATISTICS = {"qwen2_5_vl": CLIP, "qwen3_vl": HALVES, "qwen3_5": HALVES, "glm4v": CLIP}
PACKED = ("--use_packed_ds", "True")
MAX_PIXELS = 9216


@pytest.fixture(scope="module", params=sorted(STATISTICS))
def made(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    write_jsonl(folder, 60)
    (folder / "images" / "v.mp4").write_bytes(clip(8))
    turns = [{"from": "human", "value": "<video>\none"}, {"from": "gpt", "value": "two three"}]
    with open(folder / "made.jsonl", "a", encoding="utf-8") as lines:
        lines.writelines(json.dumps({"video": "v.mp4", "conversations": turns}) + "\n" for _ in range(12))
    save_tiny_checkpoint(folder / "model", native_tokenizer(request.param), family=request.param)
    return folder


def train(made: Path, out: Path, *options: str, ranks: int = 1) -> dict[int, float]:
    """Losses by step of a run over the made data, four packs a step."""
    argv = ["--model_name_or_path", str(made / "model"), "--meta_path", str(made / "meta.json")]
    argv += ["--output_dir", str(out), "--max_packed_tokens", "256", "--min_pixels", "1024"]
    argv += ["--max_pixels", str(MAX_PIXELS), "--learning_rate", "1e-2", "--adam_epsilon", "1e-2", "--max_steps", "4"]
    argv += ["--lr_scheduler_type", "constant", "--logging_steps", "1", "--report_to", "none", "--use_cpu", "True"]
    argv += ["--optim", "adamw_torch", "--save_strategy", "no", "--check_isolation", "False", *options]
    if "--per_device_train_batch_size" not in options:
        argv += ["--gradient_accumulation_steps", str(4 // ranks)]
    ended = run("train.finetune:main", argv, ranks, out.with_suffix(".log"))
    assert ended.poll() == 0, ended.told()[-4000:]
    return losses(out)


@pytest.fixture(scope="module")
def alone(made, tmp_path_factory):
    """One rank, without DeepSpeed or checkpointing."""
    out = tmp_path_factory.mktemp("alone") / "run"
    return out, train(made, out, *PACKED, "--grad_checkpoint", "False")


@pytest.mark.parametrize(
    ("made", "zero"), [("qwen3_vl", 2), *((family, 3) for family in STATISTICS)], indirect=["made"]
)
def test_zero_on_two_ranks_trains_what_one_rank_trains(made, alone, tmp_path, zero):
    """Rows of text alone are among them, and activations are computed again."""
    found = train(made, tmp_path / "run", *PACKED, "--deepspeed", f"zero_stage{zero}", ranks=2)
    assert found == pytest.approx(alone[1], rel=1e-5)


def test_a_run_goes_on_with_another_number_of_ranks(made, alone, tmp_path):
    options = (*PACKED, "--save_strategy", "steps", "--save_steps", "2")
    train(made, tmp_path / "run", *options, "--max_steps", "2", ranks=2)
    found = train(made, tmp_path / "run", *options, "--resume_from_checkpoint", "auto", ranks=1)
    assert found == pytest.approx(alone[1], rel=1e-5)


@pytest.mark.parametrize("made", ["qwen3_vl"], indirect=True)
def test_packed_samples_train_as_the_same_ones_padded(made, tmp_path):
    batches = ("--per_device_train_batch_size", "4", "--max_packed_tokens", "2048", "--max_seq_length", "512")
    packed = train(made, tmp_path / "packed", "--packing", "in_batch", *batches)
    padded = train(made, tmp_path / "padded", "--use_packed_ds", "False", *batches)
    assert len(packed) == 4
    assert packed == pytest.approx(padded, rel=1e-5)


def test_what_is_saved_loads_and_prepares_pictures_as_they_were_trained(made, alone):
    out, _ = alone
    family = json.loads((made / "model" / "config.json").read_text())["model_type"]
    assert AutoModelForImageTextToText.from_pretrained(out).config.model_type == family
    content = json.loads((out / "preprocessor_config.json").read_text())
    frames = 2 if family == "glm4v" else 1
    assert content["size"] == {"shortest_edge": frames * 1024, "longest_edge": frames * MAX_PIXELS}
    assert (content["image_mean"], content["image_std"]) == tuple(map(list, STATISTICS[family]))
    video = json.loads((out / "video_preprocessor_config.json").read_text())
    assert (video["fps"], video["do_sample_frames"]) == (2, True)
    assert family == "glm4v" or (video["min_frames"], video["max_frames"]) == (8, 32)


@pytest.mark.parametrize("made", ["qwen2_5_vl"], indirect=True)
def test_lora_and_frozen_parts_train(made, tmp_path):
    adapted = train(made, tmp_path / "lora", *PACKED, "--use_backbone_lora", "2", "--use_llm_lora", "2")
    frozen = train(made, tmp_path / "frozen", *PACKED, "--freeze_backbone", "True", "--freeze_mlp", "True")
    assert adapted[1] == pytest.approx(frozen[1], rel=1e-5)
    assert adapted[4] < adapted[1] and frozen[4] < frozen[1]
