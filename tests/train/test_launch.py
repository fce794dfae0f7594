"""The launcher's Ctrl-C: handed on once, the second ends the ranks wherever they are."""

from __future__ import annotations

import signal

from train import launch


def test_the_first_ctrl_c_is_handed_on_and_the_second_kills(monkeypatch):
    sent, clock = [], iter([10.0, 10.0, 10.1, 10.1, 12.0, 12.0])
    monkeypatch.setattr(launch, "hand_on", lambda number, frame, readers=False: sent.append((number, readers)))
    monkeypatch.setattr(launch.time, "monotonic", lambda: next(clock))
    interrupts = launch.Interrupts()
    interrupts(signal.SIGINT, None)
    interrupts(signal.SIGINT, None)  # the script's, beside the terminal's
    assert sent == [(signal.SIGINT, False)] * 2 and not interrupts.ended_the_run
    interrupts(signal.SIGINT, None)
    assert sent[2:] == [(signal.SIGKILL, True)] and interrupts.ended_the_run
