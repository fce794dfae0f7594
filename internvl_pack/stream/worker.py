"""Reader processes: what they inherit, which signals they obey, and how they end."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
from contextlib import suppress

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

GRACE = 1.0  # seconds that readers have to end by themselves

_threads: dict[int, threading.Thread] = {}  # by process: a fork has none


class ReaderProcesses(_MultiProcessingDataLoaderIter):
    """torch's iterator over batches of reader processes, ended without waiting for what they are doing.

    torch tells all of them to end, and then waits 5 s for one after the other: a reader that measures or decodes looks
    at no message meanwhile, and eight of them would keep a run that a mistake has ended for 40 s.
    """

    def _shutdown_workers(self) -> None:
        if self._shutdown:  # its readers had no more to give
            return
        if sys.is_finalizing():  # multiprocessing has ended them; the start of a thread would be waited for for ever
            return
        timer = threading.Timer(GRACE, self._terminate)
        timer.daemon = True
        with suppress(RuntimeError):  # no thread begins while the interpreter ends
            timer.start()
        super()._shutdown_workers()
        timer.cancel()

    def _terminate(self) -> None:
        for process in self._workers:
            process.terminate()


def release_free_memory() -> None:
    """Give freed memory back to the system before processes are forked from this one; some 50 ms.

    glibc keeps what was freed, and loading a tokenizer frees 100 MB: every reader process would start with it in its
    resident size. Does nothing on systems with another C library.
    """
    gc.collect()
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(0)


def begin_reader() -> None:
    """What a reader process does first. Safe to repeat."""
    obey_only_the_parent()
    if not gc.get_freeze_count():
        gc.freeze()  # the collector writes into all it looks at: 50 MB of the parent's objects copied for nothing


def obey_only_the_parent() -> None:
    """Ignore SIGINT, SIGUSR1 and SIGHUP, and SIGTERM from anybody but the parent.

    A terminal, a launcher or Slurm sends signals to every process of a rank, its readers included; without them the
    rank could not finish its step. A handler in Python does not learn who sent a signal, `sigwaitinfo` does: SIGTERM is
    blocked, a thread waits for it.
    """
    if os.getpid() in _threads or not hasattr(signal, "sigwaitinfo"):
        return
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    _threads[os.getpid()] = threading.Thread(target=_wait_for_the_parent, args=(os.getppid(),), daemon=True)
    _threads[os.getpid()].start()


def _wait_for_the_parent(parent: int) -> None:
    while True:
        sender = signal.sigwaitinfo({signal.SIGTERM}).si_pid
        if sender == parent or os.getppid() != parent:
            os._exit(0)  # as torch's own handler in readers does
