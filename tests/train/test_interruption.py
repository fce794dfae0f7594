"""Requests to stop: which signals count, and the end of a run that makes no step any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from train import interruption
from train.interruption import REASONS, TERMINATED, Progress, StopRequest
from train.ranks import others_answer

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT"])
def test_each_signal_asks_to_save_and_stop(tmp_path, name):
    request, number = StopRequest(tmp_path, 0), getattr(signal, name)
    before = signal.getsignal(number)
    with request.listening():
        os.kill(os.getpid(), number)
        assert request.agree(None) == name
    assert signal.getsignal(number) is before


def test_sighup_is_ignored_where_it_was_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        request = StopRequest(tmp_path, 0)
        with request.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            assert request.agree(None) == ""
    finally:
        signal.signal(signal.SIGHUP, before)


def test_reasons_fit_into_the_number_that_travels():
    assert REASONS[0] == "" and len(set(REASONS)) == len(REASONS) == 6


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    "step_seconds, asked_after, expected",
    [
        (1.0, [0.5, 9.0], [False, False]),  # both within the patience
        (1.0, [0.5, 11.0], [False, True]),
        (20.0, [5.0, 50.0], [False, False]),  # its steps take longer
        (20.0, [5.0, 61.0], [False, True]),
        (1.0, [600.0], [False]),  # the first one is a request to save
        (0.0, [1.0, 11.0], [False, True]),  # no step ever
    ],
)
def test_a_second_request_ends_a_run_without_progress_only(step_seconds, asked_after, expected):
    clock = Clock()
    progress = Progress(clock)
    for _ in range(3 if step_seconds else 0):
        clock.now += step_seconds
        progress.step()
    last, found = clock.now, []
    for after in asked_after:
        clock.now = last + after
        found.append(progress.asked_in_vain())
    assert found == expected


HANGING = """
import ctypes, sys
from train import interruption
interruption.PATIENCE_SECONDS = 0.2
request = interruption.StopRequest(sys.argv[1], 3)
with request.listening():
    print("ready", flush=True)
    for _ in range(20):
        ctypes.CDLL(None).sleep(1)
    print("gone on", flush=True)
"""


def test_sigterm_twice_ends_a_run_whose_main_thread_waits_in_native_code(tmp_path):
    run = subprocess.Popen(
        [sys.executable, "-c", HANGING, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None and run.stdout.readline() == "ready\n"
    run.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert run.poll() is None, "the first one asks to save"
    run.send_signal(signal.SIGTERM)
    out, told = run.communicate(timeout=10)
    assert run.returncode == TERMINATED == 143 and "gone on" not in out
    assert told.strip().splitlines()[-1].startswith("SIGTERM again, and no step for")


def test_the_second_ctrl_c_quits_at_once(tmp_path, monkeypatch, capsys):
    quits = []
    monkeypatch.setattr(interruption.os, "_exit", quits.append)
    request = StopRequest(tmp_path, 0)
    request._heard(signal.SIGINT)
    request._heard(signal.SIGINT)  # the launcher's, beside the terminal's
    assert capsys.readouterr().err.count("once more quits at once") == 1 and not quits
    monkeypatch.setattr(interruption, "SECONDS_BETWEEN_INTERRUPTS", 0.0)
    request._heard(signal.SIGINT)
    assert quits == [130]


def test_a_checkpoint_that_is_being_written_is_not_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(interruption.os, "_exit", lambda code: pytest.fail("ended"))
    request = StopRequest(tmp_path, 0)
    request._asked = 1
    assert request.agree(None) == "SIGTERM"
    request._progress._last -= 1000
    request._heard(signal.SIGTERM)
    request._heard(signal.SIGTERM)


def test_a_rank_that_does_not_answer_is_told_in_words():
    with pytest.raises(RuntimeError, match="another rank did not come"), others_answer(0.0):
        raise RuntimeError("[gloo] Timed out waiting 1000ms for recv operation to complete")
    with pytest.raises(RuntimeError, match="shapes"), others_answer(60):
        raise RuntimeError("tensors of other shapes")
