"""A rank that is stopped, not dead: the others do not wait for it for ever. Real ranks on CPU."""

from __future__ import annotations

import signal
import time

import psutil
import pytest
from helpers.launched import made_in, steps_made
from helpers.ranks import start

TIMEOUT = 10

pytestmark = pytest.mark.slow


def test_a_rank_that_is_stopped_ends_the_run_within_the_time_out(tmp_path, tokenizer):
    made, out = made_in(tmp_path / "made", tokenizer, 300), tmp_path / "run"
    argv = ["--model_name_or_path", str(made / "model"), "--meta_path", str(made / "meta.json")]
    argv += ["--output_dir", str(out), "--ddp_timeout", str(TIMEOUT), "--force_image_size", "56"]
    argv += ["--use_packed_ds", "True", "--max_packed_tokens", "520", "--max_steps", "100000", "--save_strategy", "no"]
    argv += ["--log_sample_ids", "True", "--use_cpu", "True", "--check_isolation", "False"]
    argv += ["--grad_checkpoint", "False", "--report_to", "none"]
    run = start("train.finetune:main", argv, 2, tmp_path / "log")
    try:
        deadline = time.monotonic() + 240
        while steps_made(out) < 2 and time.monotonic() < deadline:
            assert run.poll() is None, run.told()[-3000:]
            time.sleep(0.1)
        _, second = psutil.Process(run.pid).children()
        second.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        words = ("another rank did not come", "Timed out waiting")
        while not any(each in run.told() for each in words) and time.monotonic() < started + 4 * TIMEOUT:
            time.sleep(0.2)
        assert any(each in run.told() for each in words), "rank 0 waits on"
        assert time.monotonic() - started < 3 * TIMEOUT
    finally:
        run.kill()
