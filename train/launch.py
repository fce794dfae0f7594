"""torchrun, for runs that may get a signal to stop: the same options, another ending.

    python -m train.launch --standalone --nproc_per_node 8 train/finetune.py ...

* SIGTERM, SIGUSR1, SIGHUP and Ctrl-C are handed on to the ranks, which save a checkpoint and end in their own time.
  torchrun dies of SIGUSR1 and leaves its ranks behind; on the others it kills them 30 s later, however far the
  checkpoint is.
* The exit status is the ranks': 2 for a mistake of the user, 75 for a run that stopped at a checkpoint, 130 after a
  second Ctrl-C, without torchrun's own report, which says nothing that the rank has not said. Any other failure is
  reported as torchrun does.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: find the packages without an installation
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    __package__ = "train"

from internvl_pack.errors import UserError

from .environment import INTERRUPTED, KEYBOARD_INTERRUPT, USER_ERROR, telling_of_ports
from .interruption import SECONDS_BETWEEN_INTERRUPTS

HANDED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
ENDS_THE_RUN = "SIGQUIT"  # what torchrun is left to handle
SECONDS_TO_END = 10  # of the other ranks, after one has failed


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks, wait for them. Returns the exit status."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    args = parse_args(list(sys.argv[1:] if argv is None else argv))
    args.signals_to_handle = ENDS_THE_RUN
    if getattr(args, "shutdown_timeout", 0) is None:  # not in torch 2.10
        args.shutdown_timeout = SECONDS_TO_END
    interrupts = Interrupts()
    signal.signal(signal.SIGINT, interrupts)  # a script's background job is started without it
    for number in HANDED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, hand_on)
    # Its agent logs every rank that fails; what is worth reading is in the report that is raised.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        with telling_of_ports():
            run(args)
    except UserError as error:
        print(f"launch: error: {error}", file=sys.stderr, flush=True)
        return USER_ERROR
    except ChildFailedError as error:
        if interrupts.ended_the_run:
            return KEYBOARD_INTERRUPT
        statuses = {failure.exitcode for failure in error.failures.values()}
        for said in (USER_ERROR, INTERRUPTED, KEYBOARD_INTERRUPT):
            if said in statuses:
                return said
        print(error, file=sys.stderr, flush=True)
        status = error.get_first_failure()[1].exitcode
        return status if status > 0 else 128 - status
    return 0


def hand_on(number: int, frame: Any, *, readers: bool = False) -> None:
    """Send the signal to the ranks, the children of this process; those that have ended are past it.

    Args:
        readers: and to what descends from them.
    """
    import psutil

    for child in psutil.Process().children(recursive=readers):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(number)


class Interrupts:
    """Hands the first Ctrl-C on; the second kills the ranks, wherever they are."""

    def __init__(self) -> None:
        self.first = math.inf
        self.ended_the_run = False

    def __call__(self, number: int, frame: Any) -> None:
        self.first = min(self.first, time.monotonic())
        self.ended_the_run |= time.monotonic() - self.first > SECONDS_BETWEEN_INTERRUPTS
        if self.ended_the_run:
            hand_on(signal.SIGKILL, frame, readers=True)
        else:
            hand_on(number, frame)


if __name__ == "__main__":
    sys.exit(main())
