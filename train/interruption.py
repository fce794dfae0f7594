"""Save and stop: a run that is told to end first writes a checkpoint it can go on from.

SIGTERM and SIGUSR1 (what Slurm sends before a time limit, `--signal=B:USR1@120`), or a file named STOP in
the output folder for those who can send no signal. The step that runs is finished, all ranks agree, a full checkpoint
is written, and the process exits with status 75 (`INTERRUPTED`): started again with `--resume_from_checkpoint
auto` it goes on with the next pack.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

STOP_FILE = "STOP"
#: What can ask for it; the place in the list travels over the ranks.
REASONS = ("", "SIGTERM", "SIGUSR1", f"the file {STOP_FILE}")


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
        self.agreed = ""

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Signals are noted, not obeyed, within; afterwards they do what they did before.

        A signal that comes again is noted again: whoever cannot wait sends SIGKILL.
        """
        if threading.current_thread() is not threading.main_thread():  # Python hands signals to that one only
            yield
            return
        before = {name: signal.signal(getattr(signal, name), self._note) for name in REASONS[1:3]}
        try:
            yield
        finally:
            for name, handler in before.items():
                signal.signal(getattr(signal, name), handler)

    def _note(self, number: int, frame: Any) -> None:
        self._asked = REASONS.index(signal.Signals(number).name)

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
        if self.agreed and self.rank == 0:
            self.file.unlink(missing_ok=True)  # the run that goes on is not meant
        return self.agreed
