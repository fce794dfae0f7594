"""What packing is said to do before the first step, what is logged while it does it, books that outlive a resume."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from factory import TINY, write_jsonl, write_meta

from internvl_pack import plan
from internvl_pack.config import PackingConfig
from internvl_pack.dataset import PackedDataset
from internvl_pack.plan import plan_epochs
from internvl_pack.sources import remote
from train import finetune
from train.arguments import DataTrainingArguments, ModelArguments
from train.callbacks import RunOptions
from train.forecast import Packing, forecast

COUNT = 60
FULL = {"packs": 100, "samples": 1200, "tokens": 100 * 16000, "tiles": 3000, "budget": (16384, 48), "lanes": 4}


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer) -> Path:
    from internvl_pack.tiny import save_tiny_checkpoint

    folder = tmp_path_factory.mktemp("forecast")
    write_jsonl(folder, COUNT)
    save_tiny_checkpoint(folder / "model", tokenizer)
    return folder


@pytest.fixture
def train(made, monkeypatch):
    saved = os.environ.copy()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)

    def call(out: Path, *options: str) -> int:
        argv = ["--model_name_or_path", str(made / "model"), "--meta_path", str(made / "meta.json"), "--output_dir"]
        argv += [str(out), "--force_image_size", "56", "--max_packed_tokens", "512", "--num_images_expected", "16"]
        argv += ["--use_packed_ds", "True", "--use_cpu", "True", "--grad_checkpoint", "False", "--warmup_steps", "0"]
        return finetune.main([*argv, "--check_isolation", "False", *options])

    yield call
    os.environ.clear()
    os.environ.update(saved)


# --- the forecast ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 4])
def test_the_forecast_is_what_the_epoch_holds(made, tokenizer, lanes):
    config = PackingConfig(max_packed_tokens=512, num_images_expected=16, num_lanes=lanes)
    dataset = PackedDataset.from_meta(made / "meta.json", tokenizer, config, encode=TINY, rank=0, world_size=1)
    counted = forecast(dataset, plan_epochs(dataset, 1))
    rows = list(dataset)
    assert counted.exact and counted.packs == len(rows)
    assert counted.samples == sum(len(row.segments) for row in rows) == COUNT
    assert counted.tokens == sum(len(s.input_ids) for row in rows for s in row.segments)
    assert counted.tiles == sum(len(s.tiles) for row in rows for s in row.segments)
    estimated = forecast(dataset, None)
    assert not estimated.exact
    assert estimated.packs == pytest.approx(counted.packs, rel=0.12)


TROUBLES = [
    ({}, None),
    ({"tiles": 4700, "tokens": 100 * 9000, "samples": 470}, "tiles fill rows first (10.0 in a sample of 1,915 tokens)"),
    ({"tiles": 4700, "tokens": 100 * 9000, "samples": 470}, "--num_images_expected from 48 to about 86"),
    (
        {"samples": 110, "tokens": 100 * 10000, "tiles": 300},
        "samples have 9,091 of a row's 16,384 tokens: raise --max_packed_tokens",
    ),
    ({"samples": 130, "tokens": 100 * 14000}, "1.3 samples a pack, token fill 85%"),
    ({"packs": 20, "lanes": 16, "samples": 90, "tokens": 20 * 9000, "tiles": 100}, "each of 16 lanes ends the epoch"),
    ({"tokens": 100 * 12000, "policy": "next_fit"}, "next_fit ends a row"),
    ({"tokens": 100 * 12000}, "few samples fit what is left of a row"),
]


@pytest.mark.parametrize(("changes", "expected"), TROUBLES)
def test_packing_that_does_little_is_told_with_its_reason_and_what_to_change(changes, expected):
    trouble = Packing(**{**FULL, **changes}).trouble()
    if expected is None:
        assert trouble is None
    else:
        assert trouble is not None and expected in trouble and "\n" not in trouble


def test_one_line_says_what_packing_will_do():
    line = Packing(**FULL, exact=True).line(steps=25, packs_per_step=4)
    assert line == (
        "packing: rows of 16,384 tokens and 48 tiles, 4 lanes; counted: 100 packs and 25 steps an epoch of 4 packs, "
        "12.0 samples a pack, token fill 97.7%, tile fill 62.5%"
    )


def test_a_run_tells_its_packing_and_its_trouble(train, tmp_path, capsys):
    options = (
        "--max_steps",
        "4",
        "--log_freq",
        "2",
        "--save_strategy",
        "no",
        "--max_packed_tokens",
        "2048",
        "--num_images_expected",
        "2",
    )
    assert train(tmp_path, *options) == 0
    told = capsys.readouterr().err
    (line,) = [line for line in told.splitlines() if line.startswith("packing: rows of 2,048 tokens and 2 tiles")]
    assert "estimated" in line
    reports = [line for line in told.splitlines() if "rows so far" in line]
    assert [line.partition(" rows")[0] for line in reports] == ["step 2: 2", "step 4: 4"]
    assert "packing does little" in told and "raise --num_images_expected from 2" in told


def test_packs_that_are_not_as_foretold_are_told(train, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("train.forecast.FIRST_PACKS", 4)
    right = ("--max_steps", "6", "--save_strategy", "no")
    assert train(tmp_path, *right) == 0
    assert "were told" not in capsys.readouterr().err
    monkeypatch.setattr("train.trainer.foresee", lambda loader, plan: Packing(**{**FULL, "budget": (512, 16)}))
    assert train(tmp_path, *right) == 0
    assert "packing: the first 4 packs hold" in capsys.readouterr().err


# --- metrics --------------------------------------------------------------------------------------


def test_every_metric_reaches_tensorboard_by_name(train, tmp_path, monkeypatch):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    assert train(tmp_path, "--max_steps", "3", "--save_strategy", "no", "--report_to", "tensorboard") == 0
    board = event_accumulator.EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    names = "loss grad_norm learning_rate epoch tokens_per_s tokens_per_s_per_gpu samples_per_s tiles_per_s token_fill "
    names += "tile_fill samples_per_pack data_wait rank_balance tflops_per_s_per_gpu"
    assert {f"train/{name}" for name in names.split()} <= set(board.Tags()["scalars"])
    logged = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    for name in ("token_fill", "samples_per_pack"):
        assert [e.value for e in board.Scalars(f"train/{name}")] == pytest.approx(
            [e[name] for e in logged if name in e]
        )


def test_a_wandb_run_knows_the_options_of_packing(demo_dir, monkeypatch):
    seen = {}
    run = SimpleNamespace(config=SimpleNamespace(update=lambda options, **_: seen.update(options)))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    callback = RunOptions(
        ModelArguments(model_name_or_path="m"),
        DataTrainingArguments(meta_path=str(demo_dir / "meta.json"), max_packed_tokens=512),
    )

    def begin(report_to, is_world_process_zero=True):
        state = SimpleNamespace(is_world_process_zero=is_world_process_zero)
        callback.on_train_begin(SimpleNamespace(report_to=report_to), state, None)

    begin([])
    begin(["wandb"], False)
    assert not seen
    begin(["wandb"])
    assert seen["model_name_or_path"] == "m" and seen["max_packed_tokens"] == 512 and "oversize" in seen
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))
    begin(["wandb"])


def test_the_epoch_of_a_repeating_run_only_grows(train, tmp_path):
    steps = ("--save_steps", "7", "--lr_scheduler_type", "constant", "--resume_from_checkpoint", "auto")
    assert train(tmp_path, "--max_steps", "7", *steps) == 0
    assert train(tmp_path, "--max_steps", "60", *steps) == 0
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    epochs = [entry["epoch"] for entry in state["log_history"] if "loss" in entry]
    assert len(epochs) == 60 and epochs == sorted(epochs)
    assert epochs[-1] > 1.5, "the data is repeated"
    assert 0 < epochs[0] < 0.2


# --- books after a resume -------------------------------------------------------------------------


def test_the_summary_of_a_run_that_went_on_is_that_of_the_whole_run(train, tmp_path):
    epochs = ("--num_train_epochs", "2")
    whole, halted = tmp_path / "whole", tmp_path / "halted"
    assert train(whole, *epochs, "--save_strategy", "no") == 0
    books = json.loads((whole / "train_summary.json").read_text())
    assert (books["epochs"], books["samples_packed"]) == (2, 2 * COUNT)
    steps = str(books["steps"] - 2)
    assert train(halted, "--max_steps", steps, "--save_steps", steps) == 0
    assert train(halted, *epochs, "--save_strategy", "no", "--resume_from_checkpoint", "auto") == 0
    again = json.loads((halted / "train_summary.json").read_text())
    for run in (books, again):
        for measured in ("tokens_per_s", "loss_first", "loss_last"):  # schedules of learning rates differ
            del run[measured]
    assert again == books


# --- mistakes -------------------------------------------------------------------------------------


def test_a_place_to_report_to_that_is_not_there_is_one_line(train, tmp_path, capsys):
    for name, message in (("nowhere", "--report_to nowhere is unknown"), ("comet_ml", "comet_ml: it is not installed")):
        assert train(tmp_path, "--max_steps", "1", "--report_to", name) == 2
        assert message in capsys.readouterr().err


def test_a_failure_in_one_ranks_held_out_data_ends_the_run_with_its_message(train, made, tmp_path, monkeypatch):
    from internvl_pack.dataset import PackedDataset

    def broken(self, lanes, epoch, states):
        if self.config.shuffle:
            yield from read(self, lanes, epoch, states)
        raise OSError("the disk is gone")

    read = PackedDataset.read_lanes
    monkeypatch.setattr(PackedDataset, "read_lanes", broken)
    options = ("--max_steps", "1", "--save_strategy", "no", "--do_eval", "True")
    with pytest.raises(RuntimeError, match="rank 0 cannot read its data: OSError: the disk is gone"):
        train(tmp_path, *options, "--eval_meta_path", str(made / "meta.json"))


def test_a_part_of_the_data_is_enough_for_the_forecast(made, tokenizer, monkeypatch):
    config = PackingConfig(max_packed_tokens=1024, num_images_expected=16, num_lanes=1)
    dataset = PackedDataset.from_meta(made / "meta.json", tokenizer, config, encode=TINY, rank=0, world_size=1)
    packs = len(list(dataset))
    read = []
    encode = dataset.encoder.encode
    monkeypatch.setattr(dataset.encoder, "encode", lambda *given: read.append(1) or encode(*given))
    monkeypatch.setattr("train.forecast.SAMPLES", 30)
    part = forecast(dataset, None)
    assert len(read) == 30
    assert part.samples == COUNT and part.packs == pytest.approx(packs, rel=0.25)
    monkeypatch.setattr("train.forecast.SECONDS", -1.0)
    forecast(dataset, None)
    assert len(read) == 31, "what is far away is not waited for"


# --- data far away --------------------------------------------------------------------------------


def test_a_few_images_far_away_are_fetched_before_the_first_step(made, tokenizer, tmp_path, monkeypatch):
    asked: list[str] = []

    def fetch(address, *_, **__):
        asked.append(address)
        return (made / "images" / address.rpartition("/")[2]).read_bytes()

    monkeypatch.setattr(remote, "fetch", fetch)
    monkeypatch.setattr(plan, "FAR_SAMPLES", 20)
    annotation = str(made / "made.jsonl")
    meta = write_meta(tmp_path, {"made": {"root": "https://far.example/images", "annotation": annotation}})
    config = PackingConfig(max_packed_tokens=512, num_images_expected=16, num_lanes=4)
    dataset = PackedDataset.from_meta(meta, tokenizer, config, encode=TINY)
    near = plan_epochs(PackedDataset.from_meta(made / "meta.json", tokenizer, config, encode=TINY), 2)
    assert near.how == "counted" and not asked
    for exact_samples in (plan.EXACT_SAMPLES, 0):  # few samples or many
        found = plan_epochs(dataset, 2, exact_samples=exact_samples)
        assert found.how == "estimated from 20 samples, since images are fetched by address"
        assert 10 < len(asked) <= 40, "of twenty samples, none of which has more than two"
        assert found.packs == pytest.approx(near.packs, rel=0.3)
        asked.clear()
    monkeypatch.setattr(plan, "FAR_SECONDS", -1.0)
    assert plan_epochs(dataset, 2).estimated_from == 1, "a slow server is not waited for"
    assert plan_epochs(dataset, 2, exact_samples=0).steps(4) > 0


def test_a_server_that_is_down_is_not_waited_for_by_the_forecast(made, tokenizer, tmp_path, monkeypatch):
    asked: list[str] = []

    def down(address, *_, **__):
        asked.append(address)
        raise remote.RemoteError(address, "connection refused", tired=True)

    monkeypatch.setattr(remote, "fetch", down)
    monkeypatch.setattr("train.forecast.SECONDS", -1.0)
    lines = [line for line in (made / "made.jsonl").read_text().splitlines() if "image" in json.loads(line)]
    (tmp_path / "far.jsonl").write_text("\n".join(lines))
    meta = write_meta(tmp_path, {"far": {"root": "https://far.example", "annotation": "far.jsonl"}})
    dataset = PackedDataset.from_meta(meta, tokenizer, PackingConfig(num_lanes=4), encode=TINY)
    assert forecast(dataset, None) is None and len(asked) == 1


def test_lanes_begin_alike_after_a_checkpoint_has_brought_what_it_brings(train, tmp_path, monkeypatch):
    from internvl_pack.loader import PackLoader
    from train.trainer import PackTrainer

    seen: list[str] = []

    def follow(owner: type, name: str) -> None:
        keep = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: seen.append(name) or keep(*args, **kwargs))

    follow(PackTrainer, "_share_prior")
    follow(PackLoader, "load_state_dict")
    follow(PackLoader, "__iter__")
    options = ("--save_steps", "1", "--resume_from_checkpoint", "auto")
    assert train(tmp_path, "--max_steps", "1", *options) == 0
    assert seen == ["_share_prior", "__iter__"]
    assert train(tmp_path, "--max_steps", "2", *options) == 0
    assert seen[2:] == ["load_state_dict", "_share_prior", "__iter__"]
