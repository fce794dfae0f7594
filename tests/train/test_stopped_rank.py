"""A rank that is stopped, not dead: the others do not wait for it for ever. Real ranks on CPU."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers.launched import made_in, steps_made

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 15

pytestmark = pytest.mark.slow


def test_a_rank_that_is_stopped_ends_the_run_within_the_time_out(tmp_path, tokenizer):
    made, out = made_in(tmp_path / "made", tokenizer, 300), tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(ROOT / "train" / "finetune.py"), "--model_name_or_path", str(made / "model")]
    command += ["--meta_path", str(made / "meta.json"), "--output_dir", str(out), "--ddp_timeout", str(TIMEOUT)]
    command += ["--force_image_size", "56", "--use_packed_ds", "True", "--max_packed_tokens", "520"]
    command += ["--max_steps", "100000", "--save_strategy", "no", "--log_sample_ids", "True", "--use_cpu", "True"]
    command += ["--check_isolation", "False", "--grad_checkpoint", "False", "--report_to", "none"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    log = tmp_path / "log"
    with log.open("wb") as file:
        run = subprocess.Popen(command, env=env, stdout=file, stderr=file)
    ranks: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 240
        while steps_made(out) < 2 and time.monotonic() < deadline:
            assert run.poll() is None, log.read_text()[-3000:]
            time.sleep(0.1)
        ranks = [each for each in psutil.Process(run.pid).children() if "finetune.py" in " ".join(each.cmdline())]
        assert len(ranks) == 2
        ranks[1].send_signal(signal.SIGSTOP)
        started = time.monotonic()
        told = ("another rank did not come", "Timed out waiting")
        while not any(words in log.read_text() for words in told) and time.monotonic() < started + 4 * TIMEOUT:
            time.sleep(0.2)
        assert any(words in log.read_text() for words in told), "rank 0 waits on"
        assert time.monotonic() - started < 3 * TIMEOUT
    finally:
        for process in [*ranks, *psutil.Process(run.pid).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        run.kill()
        run.wait()
