"""Runs that are killed and go on, on the same and on other numbers of ranks: a real DeepSpeed run on CPU."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
from deepspeed.runtime import lr_schedules
from helpers.factory import write_jsonl
from helpers.launched import losses, made_in, steps_made
from helpers.pairs import write_pairs
from helpers.ranks import Run
from helpers.ranks import start as begin
from transformers import AutoTokenizer, get_scheduler

from internvl_pack import PresetDataset
from internvl_pack.cli import main as internvl_pack
from train.accounting import read_sample_log
from train.checkpoint import load_packing_state
from train.resume import move_back

COUNT = 150
PACKS_PER_STEP = 12  # on 1, 2, 3 or 4 ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer) -> Path:
    return made_in(tmp_path_factory.mktemp("resume"), tokenizer, COUNT)


SHAPE = ("--force_image_size", "56", "--dynamic_image_size", "True", "--max_packed_tokens", "520")
SHAPE += ("--num_images_expected", "24")
STREAM = ("--use_packed_ds", "True")


def start(made: Path, out: Path, ranks: int, extra: Sequence[str] = (), packing: Sequence[str] = STREAM) -> Run:
    """A run over two epochs that resumes from its last complete checkpoint; the same steps on any number of ranks."""
    argv = ["--model_name_or_path", str(made / "model"), "--meta_path", str(made / "meta.json")]
    argv += ["--output_dir", str(out), *SHAPE, *packing, "--deepspeed", "zero_stage1", "--num_train_epochs", "2"]
    argv += ["--gradient_accumulation_steps", str(PACKS_PER_STEP // ranks)]
    argv += ["--learning_rate", "1e-4", "--lr_scheduler_type", "linear", "--save_strategy", "steps"]
    argv += ["--save_steps", "1", "--save_total_limit", "2", "--resume_from_checkpoint", "auto"]
    argv += ["--log_sample_ids", "True", "--check_isolation", "False", "--grad_checkpoint", "False"]
    argv += ["--report_to", "none", "--use_cpu", "True", *extra]
    return begin("train.finetune:main", argv, ranks, out.with_suffix(".log"))


def wait_for_end(run: Run) -> None:
    assert run.wait(timeout=300) == 0, run.told()[-4000:]


def wait_for_step(run: Run, out: Path, step: int) -> None:
    deadline = time.monotonic() + 240
    while steps_made(out) < step and time.monotonic() < deadline:
        assert run.poll() is None, run.told()[-4000:]
        time.sleep(0.05)


def kill_after(run: Run, out: Path, step: int, delay: float) -> None:
    """Kill -9 every rank once `step` was made, `delay` seconds later."""
    wait_for_step(run, out, step)
    time.sleep(delay)
    run.kill()
    run.wait(timeout=60)


@pytest.fixture(scope="module")
def uninterrupted(made, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    wait_for_end(start(made, out, 2))
    assert len(losses(out)) >= 10 and len(losses(out)) % 2 == 0
    return out


def test_a_run_killed_on_changing_ranks_and_workers_makes_the_steps_of_one_that_was_not(made, uninterrupted, tmp_path):
    """Kills at random moments, at the end of the first epoch and in the second."""
    out = tmp_path / "run"
    expected, rng = losses(uninterrupted), random.Random(1)
    of_an_epoch = len(expected) // 2
    for ranks, workers, step, delay in (
        (3, 1, rng.randint(1, of_an_epoch - 2), rng.uniform(0.0, 0.6)),
        (1, 3, of_an_epoch, 0.0),
        (4, 0, rng.randint(of_an_epoch + 1, len(expected) - 2), rng.uniform(0.0, 0.6)),
    ):
        kill_after(start(made, out, ranks, ["--dataloader_num_workers", str(workers)]), out, step, delay)
    wait_for_end(start(made, out, 2, ["--dataloader_num_workers", "2"]))
    ids, whole = read_sample_log(out), read_sample_log(uninterrupted)
    assert {step: sorted(names) for step, names in ids.items()} == {s: sorted(names) for s, names in whole.items()}
    trained = Counter(name for names in ids.values() for name in names)
    assert set(trained.values()) == {2} and {n.split("#")[0] for n in trained} == {f"made/{i}" for i in range(COUNT)}
    assert losses(out).keys() == expected.keys()
    for step, loss in expected.items():
        assert losses(out)[step] == pytest.approx(loss, rel=1e-6), step


def test_a_run_on_a_preset_that_is_killed_trains_its_packs_on_other_ranks(made, tmp_path):
    argv = ["plan", str(made / "meta.json"), "--out", str(tmp_path / "preset"), "--tokenizer", str(made / "model")]
    argv += ["--packing_policy", "first_fit_shuffle", "--workers", "0"]
    assert internvl_pack([*argv, *SHAPE]) == 0
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    dataset = PresetDataset.open(tmp_path / "preset", made / "meta.json", tokenizer)
    expected = {}
    for step in dataset.step_plan(0, PACKS_PER_STEP):
        fragments = [fragment for pack in step.packs for fragment in pack.fragments]
        expected[step.number + 1] = sorted(dataset.segment_source(0).name(fragment) for fragment in fragments)

    packing = ("--packing", "preset", "--preset_path", str(tmp_path / "preset"))
    out, one_epoch = tmp_path / "run", ("--num_train_epochs", "1")
    kill_after(start(made, out, 2, one_epoch, packing=packing), out, 2, 0.2)
    wait_for_end(start(made, out, 4, one_epoch, packing=packing))
    trained = read_sample_log(out)
    assert {step: sorted(i.split("#")[0] for i in ids) for step, ids in trained.items()} == expected
    assert set(Counter(i for ids in trained.values() for i in ids).values()) == {1}


def test_a_reader_that_is_killed_ends_every_rank_with_its_name_within_a_minute(made, tmp_path):
    out = tmp_path / "run"
    command_extra = ["--dataloader_num_workers", "2", "--num_train_epochs", "50", "--save_strategy", "no"]
    run = start(made, out, 2, extra=command_extra)
    wait_for_step(run, out, 2)
    readers = [reader for rank in psutil.Process(run.pid).children() for reader in rank.children()]
    assert len(readers) == 4, "two readers for each of two ranks"
    pid = readers[-1].pid
    readers[-1].kill()
    killed = time.monotonic()
    assert run.wait(timeout=100) != 0
    assert time.monotonic() - killed < 60
    named = [line for line in run.told().splitlines() if "cannot read its data" in line and str(pid) in line]
    assert {line.split("]:")[0] for line in named} == {"[rank0", "[rank1"}


def test_a_rank_without_any_data_makes_the_steps_of_the_others(made, tmp_path, tokenizer):
    """One sample, two ranks, sharded weights: the second rank never has a real row."""
    write_jsonl(tmp_path, 1)
    out = tmp_path / "run"
    extra = ["--meta_path", str(tmp_path / "meta.json"), "--deepspeed", "zero_stage3", "--num_train_epochs", "1"]
    wait_for_end(start(made, out, 2, extra=[*extra, "--gradient_accumulation_steps", "1"]))
    assert list(losses(out)) == [1]
    assert read_sample_log(out) == {1: ["made/0"]}


PAIRS, PACKS_OF_PAIRS = 40, 6  # packs a step, on 1, 2 or 3 ranks
MPO = ("--objective", "mpo", "--learning_rate", "1e-2", "--adam_epsilon", "1e-2", "--max_grad_norm", "0")


def start_pairs(made: Path, pairs: Path, out: Path, ranks: int) -> Run:
    accumulation = ("--gradient_accumulation_steps", str(PACKS_OF_PAIRS // ranks), "--logging_steps", "1")
    return start(made, out, ranks, ["--meta_path", str(pairs), *MPO, *accumulation])


def logged(out: Path) -> dict[int, dict[str, float]]:
    """By step what a run on pairs logged of it, but for what depends on its ranks."""
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return {e["step"]: {k: v for k, v in e.items() if k == "loss" or "/" in k} for e in history if "loss" in e}


def test_mpo_that_is_killed_has_the_steps_and_the_running_mean_of_a_run_that_was_not(made, tmp_path):
    """ZeRO-1 on two ranks, then on one, then on three."""
    pairs, whole, out = write_pairs(tmp_path / "pairs", PAIRS), tmp_path / "whole", tmp_path / "run"
    wait_for_end(start_pairs(made, pairs, whole, 2))
    expected = logged(whole)
    kill_after(start_pairs(made, pairs, out, 2), out, 2, 0.1)
    kill_after(start_pairs(made, pairs, out, 1), out, 5, 0.2)
    wait_for_end(start_pairs(made, pairs, out, 3))
    assert out.with_suffix(".log").read_text().count("resume: going on from") == 2
    found = logged(out)
    assert found.keys() == expected.keys() and len(expected) > 6
    for step, figures in expected.items():
        assert found[step] == pytest.approx(figures, rel=1e-5, abs=1e-6), step
    ids, of_whole = read_sample_log(out), read_sample_log(whole)
    assert {step: sorted(names) for step, names in ids.items()} == {s: sorted(n) for s, n in of_whole.items()}
    ends = [load_packing_state(folder / f"checkpoint-{len(expected)}")["objective"] for folder in (whole, out)]
    assert ends[0]["rewards"] == pytest.approx(ends[1]["rewards"], rel=1e-6)
    total, count = ends[0]["rewards"]
    assert count == 2 * 2 * PAIRS and total != 0


@pytest.mark.parametrize("name", ["linear", "cosine", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_a_schedule_is_moved_with_the_rate_of_its_place(name):
    """transformers' and those of a DeepSpeed config, within the warm-up and behind it."""

    def rates(steps: Sequence[int], moves: dict[int, int]) -> list[float]:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
        if name.islower():
            made = get_scheduler(name, optimizer, num_warmup_steps=8, num_training_steps=20)
        else:
            total = {} if name == "WarmupLR" else {"total_num_steps": 20}
            made = getattr(lr_schedules, name)(optimizer, warmup_num_steps=8, **total)
            made.step()  # as the engine does
        found = []
        for step in steps:
            found += [group["lr"] for group in optimizer.param_groups]
            made.step()
            if step in moves:
                assert move_back(made, moves[step])
        return found

    through = rates(range(20), {})
    assert rates(range(20), {4: 3}) == pytest.approx([*through[:5], *through[2:17]])
    assert rates(range(10), {6: -5}) == pytest.approx([*through[:7], *through[12:15]])
    assert rates(range(6), {2: 9}) == pytest.approx([*through[:3], *through[:3]]), "at most to its begin"


def test_a_schedule_by_held_out_data_stays_where_it_is():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    assert not move_back(get_scheduler("reduce_lr_on_plateau", optimizer), 3)
