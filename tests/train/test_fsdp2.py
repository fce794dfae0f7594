"""`--sharding fsdp2`: pairs, shared rows, held-out data, checkpoints; test_sharding.py has the rest."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from helpers.launched import losses, made_in
from helpers.pairs import write_pairs
from helpers.ranks import Run, start
from helpers.stepping import OPTIONS, run_ranks

from train.checkpoint import find_checkpoint, folders_of
from train.finetune import main

pytestmark = pytest.mark.slow

FEW, SAVED = 6, 3
COMMON = {"max_steps": FEW, "lr_scheduler_type": "constant", "learning_rate": 1e-3, "adam_epsilon": 1e-3}
COMMON |= {"check_isolation": True, "max_grad_norm": 0.5, "optim": "adamw_torch_fused"}
FSDP2, ZERO1 = {"sharding": "fsdp2"}, {"deepspeed": "zero_stage1"}
SHARDING = {"fsdp2": FSDP2, "zero1": ZERO1}  # in this order: accelerate does not leave DeepSpeed again


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer):
    return made_in(tmp_path_factory.mktemp("made"), tokenizer, 60)


def test_pairs_with_a_frozen_copy_and_shared_rows(made, tokenizer, tmp_path):
    """And held-out data between steps, after which a checkpoint is written."""
    pairs = {"meta_path": write_pairs(tmp_path / "pairs", 12), "objective": "dpo"}
    ways = {
        "pairs": pairs,
        "shared rows": {"sequence_parallel_size": 2},
        "held out": {"eval_meta_path": made / "meta.json", "eval_strategy": "steps", "eval_steps": 2}
        | {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1},
    }
    few = COMMON | {"max_steps": 4}
    every = {f"{name}, {way}": few | ways[way] | own for name, own in SHARDING.items() for way in ways}
    seen = run_ranks(made, every)
    for way in ways:
        ours, theirs = (seen[f"{name}, {way}"][0] for name in SHARDING)
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5), way
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-4), way


# --- checkpoints

SAVING = COMMON | FSDP2 | {"save_strategy": "steps", "save_steps": SAVED}
ALONE = {"gradient_accumulation_steps": 2}  # the same packs a step


@pytest.fixture(scope="module")
def resumed(made):
    """Whole runs on 2 processes and on 1, and from the checkpoint of each runs on 2 and on 1."""
    found = {}
    for processes, own in ((2, {}), (1, ALONE)):
        found |= run_ranks(made, {f"whole {processes}": SAVING | own}, processes=processes)
    for processes, own in ((2, {}), (1, ALONE)):
        runs = {}
        for before in (2, 1):
            checkpoint = made / f"whole {before}" / f"checkpoint-{SAVED}"
            more = {"save_strategy": "no", "resume_from_checkpoint": checkpoint}
            runs[f"{before} to {processes}"] = SAVING | own | more
        found |= run_ranks(made, runs, processes=processes)
    return found


@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize("before", [1, 2])
def test_a_run_goes_on_on_as_many_processes_and_on_others(before, after, resumed):
    whole, rest = resumed[f"whole {before}"][0], resumed[f"{before} to {after}"][0]
    assert len(rest["steps"]) == FEW - SAVED
    tolerance = 1e-6 if before == after else 1e-5
    assert rest["losses"][-len(rest["steps"]) :] == pytest.approx(whole["losses"][SAVED:], rel=tolerance)


def begin(
    made: Path, out: Path, options: dict[str, Any], function: str = "train.finetune:main", processes: int = 2
) -> Run:
    places = {"model_name_or_path": made / "model", "meta_path": made / "meta.json", "output_dir": out}
    words = [str(word) for key, value in (options | places).items() for word in (f"--{key}", value)]
    return start(function, words, processes, out.with_suffix(".log"))


def killed_while_saving(argv: list[str]) -> int:
    """A run that dies at its second checkpoint, with the shards of one rank written."""
    save, saves = dcp.FileSystemWriter.write_data, []

    def write_data(self, *args, **kwargs):
        saves.append(1)
        if len(saves) == 2 and os.environ["RANK"] == "1":
            os.killpg(0, signal.SIGKILL)
        return save(self, *args, **kwargs)

    dcp.FileSystemWriter.write_data = write_data
    return main(argv)


def test_a_run_killed_while_it_saves_goes_on_from_the_checkpoint_before(made, resumed, tmp_path):
    out, options = tmp_path / "run", OPTIONS | SAVING | {"save_total_limit": 1}
    run = begin(made, out, options, f"{__file__}:killed_while_saving")
    assert run.wait(timeout=300) != 0
    assert [folder.name for folder in folders_of(out)] == ["checkpoint-3", "checkpoint-6"]
    assert find_checkpoint("auto", out) == out / "checkpoint-3"
    run = begin(made, out, options)
    assert run.wait(timeout=300) == 0, run.told()[-3000:]
    assert list(losses(out).values()) == pytest.approx(resumed["whole 2"][0]["losses"], rel=1e-6)
    assert [folder.name for folder in folders_of(out)] == ["checkpoint-6"]


def test_another_way_of_training_is_refused_in_one_line(made, resumed, tmp_path):
    for sharding, more, processes, told in (
        (FSDP2, {"freeze_backbone": True}, 2, "was trained with other options"),
        # Refused before ranks meet: another rank would wait for the first one's line, as torchrun ends them all.
        ({}, {}, 1, "it was written with --sharding fsdp2: give it again"),
    ):
        every = OPTIONS | COMMON | sharding | more
        every |= {"resume_from_checkpoint": made / "whole 2" / f"checkpoint-{SAVED}"}
        run = begin(made, tmp_path / f"run{processes}", every, processes=processes)
        assert run.wait(timeout=300) == 2
        assert told in next(line for line in run.told().splitlines() if "error:" in line)


def test_lora_of_another_rank_is_refused_in_one_line(made, tmp_path):
    every = OPTIONS | SAVING | {"max_steps": 1, "save_steps": 1, "use_llm_lora": 4}
    assert begin(made, tmp_path / "run", every).wait(timeout=300) == 0
    run = begin(made, tmp_path / "run", every | {"max_steps": 2, "use_llm_lora": 2})
    assert run.wait(timeout=300) == 2
    told = [line for line in run.told().splitlines() if "error:" in line]
    assert "was trained with other options" in told[0] and "lora_A" in told[0]
