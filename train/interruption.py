"""Save and stop: a run that gets a signal to end first writes a checkpoint to resume from.

SIGTERM, SIGUSR1 (what Slurm sends before a time limit, `--signal=B:USR1@120`), SIGHUP (a terminal that is closed;
ignored where it was ignored at the start, as by nohup) and Ctrl-C, or a file named STOP in the output folder for those
who can send no signal. The step that runs is finished, all ranks agree, a full checkpoint is written, and the process
exits with status 75 (`INTERRUPTED`): started again with `--resume_from_checkpoint auto` it goes on with the next pack.

A second Ctrl-C ends the run at once, without a checkpoint. So does a second SIGTERM where a run makes no step any more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .environment import KEYBOARD_INTERRUPT

logger = logging.getLogger(__name__)

STOP_FILE = "STOP"
SIGNALS = ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")
# What can ask for it; the place in the list travels over the ranks.
REASONS = ("", *SIGNALS, f"the file {STOP_FILE}")
PATIENCE_SECONDS = 10.0
# A run makes no progress where its last step ended longer ago than PATIENCE_SECONDS and than this many of its longest
# steps. Signals that a scheduler and a launcher both send come closer together.
PATIENCE_STEPS = 3
# One Ctrl-C, which a terminal and a launcher both send, is closer together.
SECONDS_BETWEEN_INTERRUPTS = 0.5
TERMINATED = 128 + signal.SIGTERM  # exit code


class StopRequest:
    """Whether this run was asked to save and stop. Every rank has one; `agreed` is the same on all of them.

    Args:
        output_dir: where the file STOP is looked for, by the first rank.
        rank: of this process.
    """

    def __init__(self, output_dir: str | Path, rank: int) -> None:
        self.file = Path(output_dir) / STOP_FILE
        self.rank = rank
        self._asked = 0
        self._interrupted = 0.0  # when, by the clock
        self.agreed = ""
        self._progress = Progress()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Signals are noted, not obeyed, within; afterwards they do what they did before."""
        if threading.current_thread() is not threading.main_thread():  # Python hands signals to that one only
            yield
            return
        names = [name for name in SIGNALS if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN]
        self._progress = Progress()
        with _told_at_once(self._heard):
            before = {name: signal.signal(getattr(signal, name), self._note) for name in names}
            try:
                yield
            finally:
                for name, handler in before.items():
                    signal.signal(getattr(signal, name), handler)

    def _note(self, number: int, frame: Any) -> None:
        self._asked = REASONS.index(signal.Signals(number).name)

    def _heard(self, number: int) -> None:
        """In a thread, even while the main one waits in a collective: end a run that hangs, or at a second Ctrl-C."""
        if number == signal.SIGINT:
            before, self._interrupted = self._interrupted, time.monotonic()
            if before and self._interrupted - before > SECONDS_BETWEEN_INTERRUPTS:
                os._exit(KEYBOARD_INTERRUPT)
            if not before and not self.rank:
                line = "Ctrl-C: the run saves a checkpoint at the end of this step and stops; once more quits at once"
                print(line, file=sys.stderr, flush=True)
        if number != signal.SIGTERM or self.agreed or not self._progress.asked_in_vain():
            return
        line = (
            f"SIGTERM again, and no step for {self._progress.idle():.0f} s: rank {self.rank} ends without a checkpoint"
        )
        print(line, file=sys.stderr, flush=True)
        os._exit(TERMINATED)

    def agree(self, group: dist.ProcessGroup | None) -> str:
        """What asked any of the ranks, or nothing; all ranks call it together, at the end of a step.

        Args:
            group: of the ranks, on the CPU; None where there is one rank.
        """
        if not self._asked and self.rank == 0 and self.file.exists():
            self._asked = len(REASONS) - 1
        asked = torch.tensor([self._asked])
        if group is not None:
            dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=group)
        self.agreed = REASONS[int(asked)]
        self._progress.step()
        if self.agreed and self.rank == 0:
            self.file.unlink(missing_ok=True)  # so that the resumed run does not stop at once
        return self.agreed


def defer_worker_death() -> None:
    """Let a reader process that died be noticed where its data is missed, not in the middle of a collective.

    torch raises from a SIGCHLD handler, wherever the main thread is: other ranks would then wait in the
    all-reduce that this one never joins. Without the handler the loader itself notices within seconds.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGCHLD) is not signal.SIG_DFL:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


class Progress:
    """How long ago the last step ended, and how long steps take; seconds by `clock`."""

    def __init__(self, clock: Any = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._longest = 0.0
        self._asked = False

    def step(self) -> None:
        """A step has ended."""
        now = self._clock()
        self._longest = max(self._longest, now - self._last)
        self._last = now

    def idle(self) -> float:
        return self._clock() - self._last

    def asked_in_vain(self) -> bool:
        """Called for each request to end: whether it is not the first one, and no step ends any more."""
        before, self._asked = self._asked, True
        return before and self.idle() > max(PATIENCE_SECONDS, PATIENCE_STEPS * self._longest)


@contextlib.contextmanager
def _told_at_once(heard: Any) -> Iterator[None]:
    """`heard(number)` is called in a thread for each signal that has a handler in Python.

    The handler itself runs only once the main thread is back in Python, which one that waits in a collective is not.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        while numbers := os.read(reader, 64):
            for number in numbers:
                heard(number)
        os.close(reader)

    threading.Thread(target=listen, name="signals", daemon=True).start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)  # ends the thread
