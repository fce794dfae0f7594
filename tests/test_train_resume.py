"""Runs that are killed and go on, on the same and on other numbers of ranks: a real DeepSpeed run on CPU."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from factory import write_jsonl
from launched import losses, made_in, steps_made

from internvl_pack.cli import main as internvl_pack
from train.sample_log import read_sample_log

ROOT = Path(__file__).resolve().parents[1]
COUNT = 150
PACKS_PER_STEP = 4

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer) -> Path:
    return made_in(tmp_path_factory.mktemp("resume"), tokenizer, COUNT)


SHAPE = ("--force_image_size", "56", "--dynamic_image_size", "True", "--max_packed_tokens", "520")
SHAPE += ("--num_images_expected", "24")
STREAM = ("--use_packed_ds", "True", "--num_lanes", "4")


def start(
    made: Path, out: Path, ranks: int, extra: Sequence[str] = (), packing: Sequence[str] = STREAM
) -> subprocess.Popen:
    """A run over one epoch that resumes from its last complete checkpoint; the same step on any number of ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [str(ROOT / "train" / "finetune.py"), "--model_name_or_path", str(made / "model")]
    command += ["--meta_path", str(made / "meta.json"), "--output_dir", str(out), *SHAPE, *packing]
    command += ["--deepspeed", "zero_stage1"]
    command += ["--gradient_accumulation_steps", str(PACKS_PER_STEP // ranks), "--num_train_epochs", "1"]
    command += ["--learning_rate", "1e-3", "--lr_scheduler_type", "linear", "--save_strategy", "steps"]
    command += ["--save_steps", "2", "--save_total_limit", "2", "--resume_from_checkpoint", "auto"]
    command += ["--log_sample_ids", "True", "--check_isolation", "False", "--grad_checkpoint", "False"]
    command += ["--report_to", "none", "--use_cpu", "True", *extra]
    env = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    log = open(out.with_suffix(".log"), "ab")  # noqa: SIM115
    return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)


def wait_for_end(run: subprocess.Popen, out: Path) -> None:
    code = run.wait(timeout=300)
    assert code == 0, out.with_suffix(".log").read_text()[-4000:]


def kill_after(run: subprocess.Popen, out: Path, step: int, delay: float) -> None:
    """Kill -9 the launcher and every rank once `step` was made, `delay` seconds later."""
    deadline = time.monotonic() + 240
    while steps_made(out) < step and time.monotonic() < deadline:
        assert run.poll() is None, out.with_suffix(".log").read_text()[-4000:]
        time.sleep(0.05)
    time.sleep(delay)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    subprocess.run(["pkill", "-9", "-f", f"output_dir {out} "], check=False)  # ranks have sessions of their own


@pytest.fixture(scope="module")
def uninterrupted(made, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    wait_for_end(start(made, out, 2), out)
    assert len(losses(out)) >= 12
    return out


def killed_run(
    made: Path, out: Path, ranks: list[int], last_step: int, seed: int, packing: Sequence[str] = STREAM
) -> Path:
    """Runs with each number of ranks in turn, all but the last killed at a random moment."""
    rng = random.Random(seed)
    for number, count in enumerate(ranks):
        run = start(made, out, count, packing=packing)
        if number == len(ranks) - 1:
            wait_for_end(run, out)
        else:
            reached = steps_made(out) if number else 0
            step = min(last_step - 2, max(reached - 1, 0) + rng.randint(2, 4))
            kill_after(run, out, step, rng.uniform(0.0, 0.6))
    return out


def trained_ids(out: Path) -> Counter:
    return Counter(i for ids in read_sample_log(out).values() for i in ids)


def test_a_run_killed_twice_gives_the_uninterrupted_runs_losses_and_samples(made, uninterrupted, tmp_path):
    out = killed_run(made, tmp_path / "run", [2, 2, 2], len(losses(uninterrupted)), seed=1)
    assert read_sample_log(out) == read_sample_log(uninterrupted)
    expected = losses(uninterrupted)
    assert losses(out).keys() == expected.keys()
    assert all(abs(losses(out)[step] - expected[step]) <= 1e-6 * expected[step] for step in expected)


def test_a_run_killed_three_times_on_changing_ranks_trains_every_sample_once(made, uninterrupted, tmp_path):
    out = killed_run(made, tmp_path / "run", [2, 1, 4, 2], len(losses(uninterrupted)), seed=2)
    seen = trained_ids(out)
    assert set(seen.values()) == {1}
    assert {i.split("#")[0] for i in seen} == {f"made/{i}" for i in range(COUNT)}
    expected = read_sample_log(uninterrupted)
    got = read_sample_log(out)
    assert {step: sorted(ids) for step, ids in got.items()} == {step: sorted(ids) for step, ids in expected.items()}
    for step, loss in losses(uninterrupted).items():
        assert losses(out)[step] == pytest.approx(loss, rel=1e-4)


def test_a_run_on_a_preset_that_is_killed_trains_its_packs_on_other_ranks(made, tmp_path):
    """Four lanes, planned before: step n has turn n of each lane, whoever trains it."""
    pq = pytest.importorskip("pyarrow.parquet")
    argv = ["plan", str(made / "meta.json"), "--out", str(tmp_path / "preset"), "--tokenizer", str(made / "model")]
    argv += ["--num_lanes", "4", "--packing_policy", "first_fit_shuffle", "--workers", "0"]
    assert internvl_pack([*argv, *SHAPE]) == 0
    expected: dict[int, list[str]] = {}
    for pack in pq.read_table(tmp_path / "preset" / "packs.parquet").to_pylist():
        expected.setdefault(pack["turn"] + 1, []).extend(pack["sample_ids"])
    assert len(expected) >= 10

    packing = ("--packing", "preset", "--preset_path", str(tmp_path / "preset"))
    out = killed_run(made, tmp_path / "run", [2, 4], len(expected), seed=3, packing=packing)
    trained = {step: [i.split("#")[0] for i in ids] for step, ids in read_sample_log(out).items()}
    assert {step: sorted(ids) for step, ids in trained.items()} == {s: sorted(ids) for s, ids in expected.items()}
    assert set(trained_ids(out).values()) == {1}


def test_a_reader_that_is_killed_ends_every_rank_with_its_name_within_a_minute(made, tmp_path):
    out = tmp_path / "run"
    command_extra = ["--dataloader_num_workers", "2", "--num_train_epochs", "50", "--save_strategy", "no"]
    run = start(made, out, 2, extra=command_extra)
    deadline = time.monotonic() + 200
    while steps_made(out) < 2 and time.monotonic() < deadline:
        assert run.poll() is None, out.with_suffix(".log").read_text()[-4000:]
        time.sleep(0.1)
    readers = subprocess.run(["pgrep", "-f", f"output_dir {out} "], capture_output=True, text=True, check=True)
    ranks = [int(pid) for pid in readers.stdout.split() if _is_reader(int(pid))]
    assert len(ranks) == 4, "two readers for each of two ranks"
    os.kill(ranks[-1], signal.SIGKILL)
    killed = time.monotonic()
    assert run.wait(timeout=100) != 0
    assert time.monotonic() - killed < 60
    log = out.with_suffix(".log").read_text()
    named = [line for line in log.splitlines() if "cannot read its data" in line and str(ranks[-1]) in line]
    assert {line.split("]:")[0] for line in named} == {"[rank0", "[rank1"}


def _is_reader(pid: int) -> bool:
    """Whether a process is a DataLoader worker: its parent runs the same command line."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return Path(f"/proc/{stat[1]}/cmdline").read_bytes() == Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


def test_a_rank_without_any_data_makes_the_steps_of_the_others(made, tmp_path, tokenizer):
    """One sample, two ranks, sharded weights: the second rank never has a real row."""
    write_jsonl(tmp_path, 1)
    out = tmp_path / "run"
    extra = ["--meta_path", str(tmp_path / "meta.json"), "--deepspeed", "zero_stage3", "--num_lanes", "2"]
    wait_for_end(start(made, out, 2, extra=[*extra, "--gradient_accumulation_steps", "1"]), out)
    assert list(losses(out)) == [1]
    assert read_sample_log(out) == {1: ["made/0"]}
