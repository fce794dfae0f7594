"""Ranks of training runs, forked from one process that has imported everything, which is most of the time of a start.

`start` has a run made by a server, one for each process of the tests: it forks a leader in a session of its own, which
forks the ranks and ends with the largest exit code of them. Launchers themselves are tested in tests/shell.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GRACE = 30  # seconds that ranks have to end once another has failed
LATE = (
    "transformers.models.internvl.modeling_internvl",
    "transformers.models.qwen2.modeling_qwen2",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # imports torch's compiler
    "internvl_pack.stream.loader",
    "internvl_pack.model.build",
    "train.finetune",
    "train.options",
    "train.trainer",
)


class Run:
    """A run's ranks, as much of subprocess.Popen as the tests need.

    Attributes:
        pid: of the leader, the parent of the ranks.
        log: the file with what the ranks print.
    """

    def __init__(self, connection: socket.socket, log: Path) -> None:
        self._connection, self._lines = connection, connection.makefile("r")
        self.log = log
        self.pid = int(self._lines.readline())
        self._status: int | None = None

    def wait(self, timeout: float) -> int:
        """The largest exit code of the ranks; -9 after kill().

        Raises:
            TimeoutError: the ranks have not ended after so many seconds.
        """
        if self._status is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise TimeoutError(f"the ranks run on after {timeout} s: {self.told()[-3000:]}")
            line = self._lines.readline()
            self._status = int(line) if line else -signal.SIGKILL
        return self._status

    def poll(self) -> int | None:
        """As wait, but None while the ranks run."""
        with contextlib.suppress(TimeoutError):
            return self.wait(0)
        return None

    def kill(self) -> None:
        """Kill -9 the leader, every rank and their readers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def told(self) -> str:
        """What the ranks have printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")


def start(function: str, argument: Any, ranks: int, log: Path, **env: str) -> Run:
    """Begin `function(argument)` on each of so many ranks of a world, in this process's folder.

    Args:
        function: "module:name" or "file.py:name"; what it returns is the rank's exit code, None for 0.
        argument: what JSON can hold.
        ranks: how many.
        log: where they print; appended to.
        env: over this process's environment.
    """
    log.touch()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(_server())
    own = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCHER}
    request = {"function": function, "argument": argument, "ranks": ranks, "log": str(log.absolute())}
    request |= {"folder": os.getcwd(), "env": own | env}
    connection.sendall(json.dumps(request).encode() + b"\n")
    return Run(connection, log)


def run(function: str, argument: Any, ranks: int, log: Path, timeout: float = 300, **env: str) -> Run:
    """`start`, and wait for a good end."""
    made = start(function, argument, ranks, log, **env)
    assert made.wait(timeout) == 0, made.told()[-5000:]
    return made


@cache
def _server() -> str:
    """The address of the server, which is started once and ends with this process."""
    folder = tempfile.mkdtemp(prefix="ranks-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    env = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCHER}
    env |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    command = [sys.executable, "-c", "from helpers.ranks import serve; serve()", f"{folder}/socket"]
    server = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    atexit.register(server.kill)
    assert server.stdout is not None and server.stdout.readline() == b"ready\n", "it tells why on stderr"
    return f"{folder}/socket"


# --- in the server --------------------------------------------------------------------------------


def serve() -> None:
    """Fork a leader for each connection, until the process that started this one ends."""
    import_all()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for leaders
    os.write(1, b"ready\n")
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            lead(connection)
        connection.close()


def import_all() -> None:
    """What a run imports, once for all. Nothing of it may start a thread or look for its rank."""
    for name in LATE:
        importlib.import_module(name)
    import torch

    from train.environment import prepare_deepspeed_on_cpu

    torch.set_num_threads(1)
    prepare_deepspeed_on_cpu()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def lead(connection: socket.socket) -> None:
    """Fork the ranks of the run that is asked for, and say how they ended; does not return."""
    status = 1
    try:
        os.setsid()
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection.sendall(f"{os.getpid()}\n".encode())
        request = json.loads(connection.makefile("r").readline())
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["folder"])
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        status = forked(found(request["function"]), request["argument"], request["ranks"])
    except BaseException:
        sys.excepthook(*sys.exc_info())
    connection.sendall(f"{status}\n".encode())
    os._exit(status)


def found(function: str) -> Callable[[Any], int | None]:
    module, _, name = function.rpartition(":")
    if not module.endswith(".py"):
        return getattr(importlib.import_module(module), name)
    return runpy.run_path(module)[name]


def die_with_parent() -> None:
    """So that no run outlives tests that are killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def forked(function: Callable[[Any], int | None], argument: Any, ranks: int) -> int:
    """The largest exit code of `function(argument)` on so many ranks."""
    import torch

    from train.environment import free_port

    port = free_port()
    children = []
    for rank in range(ranks):
        if not (pid := os.fork()):
            die_with_parent()
            torch.set_num_threads(1)  # makes torch's own pool anew: threads that do it at the same time can fail
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in place.items()})
            os._exit(status_of(function, argument))
        children.append(pid)
    return worst_status(children)


def worst_status(children: list[int]) -> int:
    """The largest exit code of these processes; once one has failed, the others have GRACE seconds to end."""
    worst = 0
    signal.signal(signal.SIGALRM, lambda *_: [os.kill(pid, signal.SIGKILL) for pid in children])
    while children:
        pid, status = os.wait()
        children.remove(pid)
        worst = max(worst, abs(os.waitstatus_to_exitcode(status)))
        if worst:
            signal.alarm(signal.alarm(0) or GRACE)
    return worst


def status_of(function: Callable[[Any], int | None], argument: Any) -> int:
    try:
        return function(argument) or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
