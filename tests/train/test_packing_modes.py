"""`finetune.py --packing ...` end to end: what it trains, resumes and refuses."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers.factory import write_jsonl

from internvl_pack.cli import main as internvl_pack
from train import finetune

pytestmark = pytest.mark.slow

pytest.importorskip("pyarrow")

COUNT = 24
SHAPE = ("--force_image_size", "56", "--max_packed_tokens", "512", "--num_images_expected", "16")


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer) -> Path:
    """A tiny model, 24 samples and a preset of them."""
    from internvl_pack.testing.tiny import save_tiny_checkpoint

    folder = tmp_path_factory.mktemp("made")
    write_jsonl(folder, COUNT)
    save_tiny_checkpoint(folder / "model", tokenizer)
    argv = ["plan", str(folder / "meta.json"), "--out", str(folder / "preset"), "--tokenizer", str(folder / "model")]
    argv += ["--workers", "0", "--packing_policy", "first_fit_shuffle"]
    assert internvl_pack([*argv, *SHAPE]) == 0
    return folder


@pytest.fixture
def train(made, tmp_path):
    """main() with tiny options -> its exit code; the environment is put back afterwards."""
    saved = os.environ.copy()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)

    def call(*options: str, out: Path = tmp_path) -> int:
        argv = ["--model_name_or_path", str(made / "model"), "--meta_path", str(made / "meta.json"), *SHAPE]
        argv += ["--output_dir", str(out), "--use_cpu", "True", "--grad_checkpoint", "False", "--learning_rate", "1e-3"]
        argv += ["--optim", "adamw_torch", "--lr_scheduler_type", "constant"]
        return finetune.main([*argv, *options])

    yield call
    os.environ.clear()
    os.environ.update(saved)


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "train_summary.json").read_text(encoding="utf-8"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_the_three_ways_train_the_same_samples(train, made, tmp_path):
    found = {}
    epochs = ("--num_train_epochs", "2", "--save_strategy", "no")
    ways = {
        "stream": (),
        "in_batch": ("--per_device_train_batch_size", "4", "--max_packed_tokens", "2048"),  # 512 a sample
        "preset": ("--preset_path", str(made / "preset")),
    }
    for way, options in ways.items():
        assert train("--packing", way, *options, *epochs, out=tmp_path / way) == 0
        summary = found[way] = summary_of(tmp_path / way)
        assert summary["packing"] == way and summary["packed"]
        assert (summary["samples_in"], summary["samples_packed"]) == (2 * COUNT, 2 * COUNT)
        assert summary["num_tokens"] == summary["num_real_tokens"], "no padding"
    for key in ("num_real_tokens", "num_tiles", "num_loss_tokens"):
        assert len({summary[key] for summary in found.values()}) == 1, key
    assert found["in_batch"]["steps"] == found["in_batch"]["packs"] == 2 * COUNT // 4
    assert found["in_batch"]["max_packed_tokens"] == 2048


def test_a_run_on_a_preset_goes_on_to_the_same_weights(train, made, tmp_path):
    through, halted = tmp_path / "through", tmp_path / "halted"
    steps = ("--packing", "preset", "--preset_path", str(made / "preset"), "--save_steps", "4")
    steps += ("--resume_from_checkpoint", "auto")
    assert train(*steps, "--max_steps", "8", out=through) == 0
    assert train(*steps, "--max_steps", "4", out=halted) == 0
    assert train(*steps, "--max_steps", "8", out=halted) == 0
    expected, resumed = weights(through), weights(halted)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


def test_aligned_and_static_rows_train_as_plain_ones_do(train, tmp_path):
    plain, aligned = tmp_path / "plain", tmp_path / "aligned"
    steps = ("--packing", "stream", "--max_steps", "3", "--save_strategy", "no", "--pad_to_multiple_of", "16")
    assert train(*steps, out=plain) == 0
    static = ("--pad_seq_to_mult", "16", "--pad_to_max_length", "True", "--pad_cu_seqlens_to", "40")
    assert train(*steps, *static, out=aligned) == 0
    one, other = summary_of(plain), summary_of(aligned)
    assert other["num_tokens"] == 3 * 512 and one["num_real_tokens"] == other["num_real_tokens"]
    assert other["loss_last"] == pytest.approx(one["loss_last"], rel=1e-5)


REFUSED = [
    (("--packing", "packed"), "--packing 'packed' is unknown: use one of stream, in_batch, preset"),
    (("--packing", "in_batch"), "--per_device_train_batch_size 1"),
    (("--packing", "preset"), "--preset_path"),
    (("--packing", "preset", "--preset_path", "nowhere"), "/nowhere: no preset.json there"),
    (("--use_packed_ds", "True", "--preset_path", "nowhere"), "--preset_path with --packing stream"),
    (("--packing", "stream", "--pad_seq_to_mult", "0"), "--pad_seq_to_mult is 0"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_does_not_go_together_is_refused_at_start(options, message, train, capsys, tmp_path):
    assert train(*options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "train_summary.json").exists()


def test_a_preset_of_other_options_is_refused_at_start_by_their_name(train, made, capsys):
    options = ("--packing", "preset", "--preset_path", str(made / "preset"))
    assert train(*options, "--max_packed_tokens", "640") == 2
    assert "max_packed_tokens was 512 and is 640 now" in capsys.readouterr().err
    assert train(*options, "--dynamic_image_size", "True") == 2
    assert "dynamic_image_size was False and is True now" in capsys.readouterr().err


def test_a_preset_that_holds_its_data_trains_without_it(train, made, tmp_path):
    write_jsonl(tmp_path / "data", COUNT)
    argv = ["plan", str(tmp_path / "data" / "meta.json"), "--out", str(tmp_path / "preset"), "--materialise"]
    assert internvl_pack([*argv, "--tokenizer", str(made / "model"), "--workers", "2", *SHAPE]) == 0
    shutil.rmtree(tmp_path / "data")
    assert not (tmp_path / "preset" / "work").exists()
    options = ("--packing", "preset", "--preset_path", str(tmp_path / "preset"), "--num_train_epochs", "1")
    assert train(*options, "--meta_path", "", "--save_strategy", "no") == 0
    summary = summary_of(tmp_path)
    assert (summary["samples_in"], summary["samples_packed"]) == (COUNT, COUNT) and summary["num_tiles"] > 0
    assert train("--packing", "stream", "--meta_path", "") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--packing_policy", "best"), "--packing_policy 'best' is unknown: use one of"),
        (("--workers", "-1"), "--workers is -1: give at least 0"),
        (("--epochs", "0"), "--epochs is 0: give at least 1 epoch"),
        (("--tokenizer", "nowhere"), "--tokenizer nowhere: no such folder, and no hub name"),
    ],
)
def test_mistakes_of_planning_are_told_in_one_line(options, message, made, tmp_path, capsys):
    argv = ["plan", str(made / "meta.json"), "--out", str(tmp_path / "out"), "--tokenizer", str(made / "model")]
    assert internvl_pack([*argv, "--workers", "0", *options]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("internvl-pack: error")]
    assert message in line
    assert not (tmp_path / "out" / "preset.json").exists()
