"""`overwrite_output_dir`: a run that finds checkpoints in its folder goes on from the newest, unless told not to."""

from __future__ import annotations

import json

import pytest
from helpers.runs import summary_of

from train.arguments import PackTrainingArguments
from train.options import parse


@pytest.mark.parametrize(
    "words, expected",
    [
        ([], "auto"),
        (["--overwrite_output_dir", "False"], "auto"),
        (["--overwrite_output_dir", "True"], None),
        (["--overwrite_output_dir", "True", "--resume_from_checkpoint", "run/checkpoint-4"], "run/checkpoint-4"),
        (["--resume_from_checkpoint", "False"], "False"),
        (["--save_only_model", "True"], None),
        (["--save_only_model", "True", "--resume_from_checkpoint", "False"], "False"),
    ],
)
def test_what_a_run_goes_on_from(words, expected, own_process, demo_dir):
    given = ["--model_name_or_path", "m", "--meta_path", str(demo_dir / "meta.json"), "--output_dir", "x"]
    *_, args = parse([*given, *words])
    assert args.resume_from_checkpoint == expected


def test_from_python_nothing_to_go_on_from_may_be_false(own_process):
    args = PackTrainingArguments(output_dir="x", use_cpu=True, save_only_model=True, resume_from_checkpoint=False)
    assert args.resume_from_checkpoint is False


def printed(capsys) -> str:
    return "".join(capsys.readouterr())


@pytest.mark.slow
def test_an_epoch_that_had_ended_in_the_checkpoint_is_counted_once(train, tmp_path):
    options = ("--use_packed_ds", "True", "--save_strategy", "epoch")
    assert train(*options, "--num_train_epochs", "1") == 0
    once = summary_of(tmp_path)
    assert train(*options, "--num_train_epochs", "2") == 0
    twice = summary_of(tmp_path)
    names = ("epochs", "samples_in", "samples_packed", "samples_quarantined")
    assert [twice[name] for name in names] == [2 * once[name] for name in names]


@pytest.mark.slow
def test_a_requeued_script_goes_on_and_one_that_overwrites_starts_anew(train, tmp_path, capsys):
    options = ("--use_packed_ds", "True", "--save_steps", "1", "--lr_scheduler_type", "constant")
    assert train(*options, "--max_steps", "1") == 0
    capsys.readouterr()
    assert train(*options, "--max_steps", "2") == 0
    told = printed(capsys)
    assert f"going on from {tmp_path / 'checkpoint-1'}" in told and "--overwrite_output_dir True starts anew" in told
    assert summary_of(tmp_path)["steps"] == 2
    history = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    assert [line["step"] for line in history if "loss" in line] == [1, 2]
    capsys.readouterr()
    (tmp_path / "checkpoint-1" / "of_another_rank.pt").touch()
    assert train(*options, "--max_steps", "1", "--overwrite_output_dir", "True") == 0
    assert not (tmp_path / "checkpoint-1" / "of_another_rank.pt").exists(), "no file of another run among this one's"
    assert "going on from" not in printed(capsys)
    assert summary_of(tmp_path)["steps"] == 1
