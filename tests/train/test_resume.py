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
from helpers.factory import write_jsonl
from helpers.launched import losses, made_in, steps_made
from transformers import AutoTokenizer

from internvl_pack import PresetDataset
from internvl_pack.cli import main as internvl_pack
from train.sample_log import read_sample_log

ROOT = Path(__file__).resolve().parents[2]
COUNT = 400
PACKS_PER_STEP = 12  # on 1, 2, 3 or 4 ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer) -> Path:
    return made_in(tmp_path_factory.mktemp("resume"), tokenizer, COUNT)


SHAPE = ("--force_image_size", "56", "--dynamic_image_size", "True", "--max_packed_tokens", "520")
SHAPE += ("--num_images_expected", "24")
STREAM = ("--use_packed_ds", "True")


def start(
    made: Path, out: Path, ranks: int, extra: Sequence[str] = (), packing: Sequence[str] = STREAM
) -> subprocess.Popen:
    """A run over two epochs that resumes from its last complete checkpoint; the same steps on any number of ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [str(ROOT / "train" / "finetune.py"), "--model_name_or_path", str(made / "model")]
    command += ["--meta_path", str(made / "meta.json"), "--output_dir", str(out), *SHAPE, *packing]
    command += ["--deepspeed", "zero_stage1"]
    command += ["--gradient_accumulation_steps", str(PACKS_PER_STEP // ranks), "--num_train_epochs", "2"]
    command += ["--learning_rate", "1e-4", "--lr_scheduler_type", "linear", "--save_strategy", "steps"]
    command += ["--save_steps", "1", "--save_total_limit", "2", "--resume_from_checkpoint", "auto"]
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
    wait_for_end(start(made, out, 2, ["--dataloader_num_workers", "2"]), out)
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
    wait_for_end(start(made, out, 4, one_epoch, packing=packing), out)
    trained = read_sample_log(out)
    assert {step: sorted(i.split("#")[0] for i in ids) for step, ids in trained.items()} == expected
    assert set(Counter(i for ids in trained.values() for i in ids).values()) == {1}


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
    extra = ["--meta_path", str(tmp_path / "meta.json"), "--deepspeed", "zero_stage3", "--num_train_epochs", "1"]
    wait_for_end(start(made, out, 2, extra=[*extra, "--gradient_accumulation_steps", "1"]), out)
    assert list(losses(out)) == [1]
    assert read_sample_log(out) == {1: ["made/0"]}
