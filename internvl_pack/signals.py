"""Reader processes outlive the signals that tell a run to save and stop.

A launcher or Slurm sends them to every process of a rank, its readers included; without them the rank could not
finish its step. Readers end when their rank says so (by SIGTERM too), or is gone.
"""

from __future__ import annotations

import os
import signal
import threading

_threads: dict[int, threading.Thread] = {}  # by process: a fork has none


def obey_only_the_parent() -> None:
    """Ignore SIGUSR1 and SIGHUP, and SIGTERM from anybody but the parent. Safe to repeat.

    A handler in Python does not learn who sent a signal, `sigwaitinfo` does: SIGTERM is blocked, a thread waits for it.
    """
    if os.getpid() in _threads or not hasattr(signal, "sigwaitinfo"):
        return
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    _threads[os.getpid()] = threading.Thread(target=_wait_for_the_parent, args=(os.getppid(),), daemon=True)
    _threads[os.getpid()].start()


def _wait_for_the_parent(parent: int) -> None:
    while True:
        sender = signal.sigwaitinfo({signal.SIGTERM}).si_pid
        if sender == parent or os.getppid() != parent:
            os._exit(0)  # as torch's own handler in readers does
