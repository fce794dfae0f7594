"""`finetune.py` end to end in this process: what it writes, counts, resumes and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.runs import summary_of, weights

from train.accounting import Quarantine
from train.ranks import Ranks

pytestmark = pytest.mark.slow

COUNT = 24
ROOT = Path(__file__).resolve().parents[2]


def quarantined(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()]


def test_packed_and_padded_train_the_same_samples_to_the_last_epoch(train, tmp_path):
    packed, padded = tmp_path / "packed", tmp_path / "padded"
    epochs = ("--num_train_epochs", "2", "--save_strategy", "no")
    assert train("--use_packed_ds", "True", *epochs, out=packed) == 0
    assert train("--use_packed_ds", "False", "--per_device_train_batch_size", "4", *epochs, out=padded) == 0
    one, other = summary_of(packed), summary_of(padded)
    for run in (one, other):
        assert (run["samples_in"], run["samples_packed"]) == (2 * COUNT, 2 * COUNT - 2)
        assert (run["samples_quarantined"], run["samples_dropped"], run["samples_waiting"]) == (2, 0, 0)
    assert one["num_real_tokens"] == other["num_real_tokens"]
    assert one["num_tiles"] == other["num_tiles"]
    assert one["num_tokens"] == one["num_real_tokens"] < other["num_tokens"]
    assert one["packs"] < other["packs"] == 2 * COUNT - 2
    assert 0 < one["token_fill"] <= 1 and 0 < one["tile_fill"] <= 1
    assert one["loss_last"] < one["loss_first"]
    assert one["tokens_per_s"] > 0
    section = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8").partition("### train_summary.json")[2]
    keys = [key for line in re.findall(r"^\| (`.*?) \|", section, re.M) for key in re.findall(r"`(\w+)`", line)]
    assert sorted(keys) == sorted(one), "docs/reports.md explains every key"


def test_samples_that_cannot_be_used_are_listed_with_their_reason_once_an_epoch(train, tmp_path):
    assert train("--use_packed_ds", "True", "--num_train_epochs", "2", "--save_strategy", "no") == 0
    events = quarantined(tmp_path)
    assert [event["epoch"] for event in events] == [0, 1]
    assert len({event["id"] for event in events}) == 1
    assert all(event["id"].startswith("made/") and "image" in event["reason"] for event in events)


def test_a_bad_sample_stops_the_run_where_that_is_asked_for(train, capsys, tmp_path):
    assert train("--use_packed_ds", "True", "--on_error", "stop", "--max_steps", "50") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("finetune: error")]
    assert "made/" in line and "image" in line
    assert not (tmp_path / "model.safetensors").exists()


def test_going_on_from_a_checkpoint_ends_at_the_same_weights(train, tmp_path):
    through, halted = tmp_path / "through", tmp_path / "halted"
    steps = ("--use_packed_ds", "True", "--max_steps", "8", "--save_steps", "4", "--lr_scheduler_type", "constant")
    assert train(*steps, "--resume_from_checkpoint", "auto", out=through) == 0, "nothing to resume from: a fresh start"
    assert train(*steps, "--max_steps", "4", out=halted) == 0
    assert train(*steps, "--resume_from_checkpoint", "auto", out=halted) == 0
    assert summary_of(halted)["steps"] == 8
    expected, resumed = weights(through), weights(halted)
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    assert len(quarantined(halted)) == len(quarantined(through)), "no sample is listed twice"


def test_going_on_from_the_very_end_of_an_epoch_trains_the_next_one_in_full(train, tmp_path):
    through, halted = tmp_path / "through", tmp_path / "halted"
    options = ("--use_packed_ds", "True", "--save_steps", "1", "--save_total_limit", "1")
    options += ("--lr_scheduler_type", "constant", "--resume_from_checkpoint", "auto")
    assert train(*options, "--num_train_epochs", "2", out=through) == 0
    assert train(*options, "--num_train_epochs", "1", out=halted) == 0
    assert train(*options, "--num_train_epochs", "2", out=halted) == 0
    assert summary_of(halted)["steps"] == summary_of(through)["steps"]
    expected, resumed = weights(through), weights(halted)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


def test_on_other_packs_a_step_the_learning_rate_goes_on_by_the_share_of_samples(train, tmp_path):
    """A run that goes on with two packs a step instead of one, and is resumed once more without a change."""
    options = ("--use_packed_ds", "True", "--num_train_epochs", "4", "--save_steps", "1")

    def rates(name: str, packs: int, *more: str) -> dict[int, float]:
        assert train(*options, "--gradient_accumulation_steps", str(packs), *more, out=tmp_path / name) == 0
        history = json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"]
        steps = [entry for entry in history if "loss" in entry]
        epochs = [entry["epoch"] for entry in steps]
        assert epochs == sorted(set(epochs)) and epochs[-1] == 4, "which grows with the samples, too"
        return {entry["step"]: entry["learning_rate"] for entry in steps}

    one, two = rates("one", 1), rates("two", 2)
    assert len(one) > 1.5 * len(two), "fewer steps with two packs each"
    at = len(one) // 2 + 2  # within an epoch
    moved = rates("moved", 2, "--resume_from_checkpoint", str(tmp_path / "one" / f"checkpoint-{at}"))
    assert moved[at] == one[at]
    rest = [moved[step] for step in range(at + 1, len(moved) + 1)]
    assert abs(len(moved) - at - len(two) / 2) <= 1, "half of the steps were to come"
    assert rest == pytest.approx(list(two.values())[-len(rest) :], rel=1e-6), "and have the last rates of such a run"
    again = rates("again", 2, "--resume_from_checkpoint", str(tmp_path / "moved" / f"checkpoint-{at + 2}"))
    assert again == moved


@pytest.mark.parametrize(("length", "steps"), [(("--max_steps", "2"), 2), (("--num_train_epochs", "1"), None)])
def test_resuming_a_run_that_had_ended_says_so_and_changes_nothing(train, tmp_path, capfd, length, steps):
    options = ("--use_packed_ds", "True", *length, "--save_steps", "2", "--resume_from_checkpoint", "auto")
    assert train(*options) == 0
    before, summary = weights(tmp_path), summary_of(tmp_path)
    steps = steps or summary["steps"]
    said = capfd.readouterr().err
    assert "--max_steps" in length or f"{steps} optimizer steps in 1 epoch (counted), 1 pack a step\n" in said
    assert f"step {steps}/{steps}: " in said and f"step {steps}/{steps + 1}" not in said
    assert said.splitlines()[-1].endswith(f" in {tmp_path}")
    assert train(*options) == 0
    said = capfd.readouterr().err
    assert f"the run is complete: all {steps} steps are trained" in said and "single sample" not in said
    after = weights(tmp_path)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert summary_of(tmp_path) == summary


def test_a_checkpoint_of_other_options_is_refused_by_the_name_of_the_option(train, capsys, tmp_path):
    steps = ("--use_packed_ds", "True", "--save_steps", "2")
    assert train(*steps, "--max_steps", "2") == 0
    changed = (*steps, "--max_steps", "3", "--resume_from_checkpoint", "auto", "--max_buffer_size", "8")
    assert train(*changed) == 2
    assert "max_buffer_size was 64" in capsys.readouterr().err
    assert train(*changed, "--resume_ignore_options", "True") == 0


def test_strict_rows_all_have_the_budget_for_length_and_train_the_same(train, tmp_path):
    loose, strict = tmp_path / "loose", tmp_path / "strict"
    steps = ("--use_packed_ds", "True", "--max_steps", "3", "--save_strategy", "no")
    assert train(*steps, out=loose) == 0
    assert train(*steps, "--strict_mode", "True", out=strict) == 0
    one, other = summary_of(loose), summary_of(strict)
    assert other["num_tokens"] == 3 * 512
    assert one["num_real_tokens"] == other["num_real_tokens"]
    assert other["loss_last"] == pytest.approx(one["loss_last"], rel=1e-5)


def test_isolation_is_proved_before_the_first_step_where_that_is_asked_for(train, capsys):
    assert train("--use_packed_ds", "True", "--max_steps", "1", "--save_strategy", "no", "--check_isolation") == 0
    assert "isolation" in capsys.readouterr().err


def test_tiles_of_another_size_than_the_model_s_resize_its_positions(train, capsys):
    assert train("--force_image_size", "28", "--max_steps", "1", "--save_strategy", "no") == 0
    assert "position embeddings resized from tiles of 56 to 28 pixels" in "".join(capsys.readouterr())


# --- quarantine.jsonl -----------------------------------------------------------------------------


class OneRank:
    rank = 0


class FakeLoader:
    packed_dataset = OneRank

    def __init__(self, events):
        self.events = events

    def take_events(self):
        events, self.events = self.events, []
        return events


def event(name: str, epoch: int = 0) -> dict:
    return {"id": name, "reason": "image_missing", "detail": "d", "epoch": epoch, "step": 1}


def test_a_resumed_run_adds_only_what_is_new(tmp_path):
    Quarantine(FakeLoader([event("a"), event("b")]), tmp_path, Ranks(), resumed=False).flush()
    with open(tmp_path / "quarantine.jsonl", "a") as file:
        file.write('{"id": "cut off')
    Quarantine(FakeLoader([event("b"), event("c"), event("b", 1)]), tmp_path, Ranks(), resumed=True).flush()
    assert [json.loads(line)["id"] for line in (tmp_path / "quarantine.jsonl").open()] == ["a", "b", "c", "b"]


def test_a_run_that_ends_by_an_error_keeps_what_was_written_before(tmp_path):
    first, second = (
        Quarantine(FakeLoader([event(name)]), tmp_path, Ranks(rank=rank, world_size=2), resumed=False)
        for rank, name in enumerate("ab")
    )
    for quarantine in (first, second, first):
        quarantine.flush_alone()
    assert [e["id"] for e in quarantined(tmp_path)] == ["a", "b"]


def test_a_fresh_run_begins_the_list_anew(tmp_path):
    Quarantine(FakeLoader([event("a")]), tmp_path, Ranks(), resumed=False).flush()
    Quarantine(FakeLoader([event("b")]), tmp_path, Ranks(), resumed=False).flush()
    assert [e["id"] for e in quarantined(tmp_path)] == ["b"]


def test_a_held_out_sample_that_cannot_be_used_is_named(train, made, tmp_path, capsys):
    options = ("--use_packed_ds", "True", "--max_steps", "1", "--save_strategy", "no", "--do_eval", "True")
    assert train(*options, "--eval_meta_path", str(made / "meta.json")) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("held-out sample")]
    assert line.startswith(f"held-out sample {quarantined(tmp_path)[0]['id']} is left out: image_not_an_image: ")


def test_a_checkpoint_of_the_model_alone_is_not_gone_on_from(train, tmp_path, capsys):
    options = ("--use_packed_ds", "True", "--save_steps", "1", "--save_only_model")
    assert train(*options, "True", "--max_steps", "1") == 0
    checkpoint = tmp_path / "checkpoint-1"
    assert (checkpoint / "model.safetensors").exists() and not (checkpoint / "packing_state.json").exists()
    assert train(*options, "False", "--max_steps", "2", "--resume_from_checkpoint", str(checkpoint)) == 2
    assert "packing_state.json is missing" in capsys.readouterr().err


def test_push_to_hub_uploads_the_whole_output_folder(train, tmp_path, monkeypatch):
    sent = []

    class Hub:
        def create_repo(self, name, **_):
            return SimpleNamespace(repo_id=f"me/{name}")

        def upload_folder(self, folder_path, ignore_patterns, **_):
            sent.append(({path.name for path in Path(folder_path).iterdir()}, ignore_patterns))

    monkeypatch.setattr("transformers.trainer.hf_api", Hub)
    options = ("--use_packed_ds", "True", "--max_steps", "1", "--save_strategy", "no", "--check_isolation", "False")
    assert train(*options, "--push_to_hub", "True", "--hub_model_id", "run") == 0
    ((files, left_out),) = sent
    assert {"model.safetensors", "config.json", "tokenizer.json", "processor_config.json", "README.md"} <= files
    assert "checkpoint-*" in left_out


def test_an_upload_that_fails_is_a_line_and_loses_nothing(train, tmp_path, monkeypatch, capsys):
    class Hub:
        def create_repo(self, name, **_):
            return SimpleNamespace(repo_id=f"me/{name}")

        def upload_folder(self, **_):
            raise OSError("Connection reset by peer")

    monkeypatch.setattr("transformers.trainer.hf_api", Hub)
    options = ("--use_packed_ds", "True", "--max_steps", "1", "--save_strategy", "no", "--check_isolation", "False")
    assert train(*options, "--push_to_hub", "True") == 0
    said = capsys.readouterr().err
    assert "--push_to_hub True: the upload failed: Connection reset by peer; the output is whole in" in said
    assert "Traceback" not in said
    assert (tmp_path / "model.safetensors").exists() and (tmp_path / "train_summary.json").exists()


def test_a_hub_out_of_reach_is_one_line_before_the_first_step(train, tmp_path, monkeypatch, capsys):
    from huggingface_hub.errors import HfHubHTTPError

    unreachable = next(kind for kind in HfHubHTTPError.__bases__ if not issubclass(kind, OSError))

    class Hub:
        def create_repo(self, name, **_):
            raise unreachable("Name or service not known")

    monkeypatch.setattr("transformers.trainer.hf_api", Hub)
    assert train("--use_packed_ds", "True", "--max_steps", "1", "--push_to_hub", "True") == 2
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line for line in lines if line.startswith("finetune: error")]
    assert lines[-1] == line and "--push_to_hub True" in line and "Name or service not known" in line
    assert not (tmp_path / "model.safetensors").exists()
