"""The package's pool of worker processes, and the survey of all rows that it makes beforehand."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from ..errors import UserError
from .survey import Survey

# Rows that a worker measures at a time: 0.2 s, and what a killed survey loses of each worker.
BLOCK_ROWS = 512
_TASKS_A_WORKER = 3  # handed out ahead
_SCANNED_ROWS = 1 << 20  # looked up in a table at a time

Task = TypeVar("Task", bound=tuple[Any, ...])
_call: Callable[..., Any] | None = None  # of a worker process


def in_order(call: Callable[..., Any], tasks: Iterable[Task], num_workers: int = 0) -> Iterator[tuple[Task, Any]]:
    """(task, `call(*task)`) of every task, in their order; few are in progress at a time, so memory stays flat.

    Args:
        call: picklable; each process gets its own copy of the object that it is bound to.
        num_workers: processes; 0 works in this one.

    Raises:
        UserError: a process was killed; and whatever `call` raises.
    """
    if num_workers == 0:
        for task in tasks:
            yield task, call(*task)
        return
    context = multiprocessing.get_context("spawn")  # takes over nothing of this process, such as threads
    tasks = iter(tasks)
    waiting: deque[tuple[Task, Future]] = deque()
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start, initargs=(call,)) as pool:
        try:
            while True:
                for task in islice(tasks, _TASKS_A_WORKER * num_workers - len(waiting)):
                    waiting.append((task, pool.submit(_run, task)))
                if not waiting:
                    return
                task, future = waiting.popleft()
                yield task, future.result()
        except BrokenProcessPool:
            raise UserError("a worker of --workers was killed (out of memory?): use fewer, and start again") from None
        finally:
            for _, future in waiting:
                future.cancel()


def _start(call: Callable[..., Any]) -> None:
    global _call
    _call = call


def _run(task: tuple[Any, ...]) -> Any:
    assert _call is not None, "_start has run"
    return _call(*task)


def measure_all(survey: Survey, num_workers: int = 0) -> Iterator[int]:
    """Measure every row that is not known yet into the survey's tables.

    Rows are kept block by block: a survey that was killed goes on with what is missing.

    Args:
        num_workers: processes; 0 measures in this one.

    Yields:
        rows done since the last time, which add up to all rows; those found done come first.

    Raises:
        UserError: reading cannot continue, or a worker was killed.
    """
    blocks = list(_missing_blocks(survey))
    known = survey.samples.num_rows - sum(len(rows) for _, rows in blocks)
    if known:
        yield known
    for (_, rows), _ in in_order(survey.measure_rows, blocks, num_workers):
        yield len(rows)


def _missing_blocks(survey: Survey) -> Iterator[tuple[int, np.ndarray]]:
    """(dataset, rows) of all rows that are not known, int64 of up to BLOCK_ROWS."""
    for dataset, start, stop in survey.samples.chunks(_SCANNED_ROWS):
        rows = survey.missing(dataset, np.arange(start, stop))
        for at in range(0, len(rows), BLOCK_ROWS):
            yield dataset, rows[at : at + BLOCK_ROWS]
