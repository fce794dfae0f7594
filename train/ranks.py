"""Which process this is, and which rows it trains.

    processes                 0   1   2   3   4   5   6   7      8 of them, 2 share a row (sequence_parallel_size)
    data rank                 0   0   1   1   2   2   3   3      reads rows; world // 2 of them
    sequence rank             0   1   0   1   0   1   0   1      which part of the row
    leads                     x       x       x       x          counts what the row holds, writes its books

Neighbours share a row, so that its exchanges stay on one machine. Collectives go over all processes, and optimizer
states are sharded over all of them; packs and samples belong to data ranks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from internvl_pack.errors import UserError
from internvl_pack.parallel.checks import check_world

_T = TypeVar("_T")


@contextlib.contextmanager
def others_answer(seconds: float) -> Iterator[None]:
    """A collective on the CPU: that a rank does not come to it is said in words.

    Args:
        seconds: the time-out of its group.

    Raises:
        RuntimeError: a rank was stopped or hangs.
    """
    started = time.monotonic()
    try:
        yield
    except RuntimeError as error:  # torch has no kind of its own for it
        waited = time.monotonic() - started
        if waited < 0.9 * seconds:
            raise
        raise RuntimeError(
            f"another rank did not come to the end of the step within --ddp_timeout {seconds:g} s: it was stopped or "
            "hangs; what it printed last tells more"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Places in a run; see the picture above.

    Raises:
        UserError: the processes cannot be parted into groups of `sequence_parallel_size`.
    """

    process: int = 0
    processes: int = 1
    sequence_parallel_size: int = 1

    def __post_init__(self) -> None:
        check_world(self.processes, self.sequence_parallel_size)

    @classmethod
    def here(cls, sequence_parallel_size: int = 1) -> Ranks:
        """The place of this process in torch.distributed's world, or alone."""
        if not dist.is_initialized():
            return cls(sequence_parallel_size=sequence_parallel_size)
        return cls(
            process=dist.get_rank(),
            processes=dist.get_world_size(),
            sequence_parallel_size=sequence_parallel_size,
        )

    @property
    def data_rank(self) -> int:
        return self.process // self.sequence_parallel_size

    @property
    def data_ranks(self) -> int:
        return self.processes // self.sequence_parallel_size

    @property
    def sequence_rank(self) -> int:
        return self.process % self.sequence_parallel_size

    @property
    def leads(self) -> bool:
        """Whether this process speaks for those that it shares its rows with."""
        return not self.sequence_rank

    @property
    def is_first(self) -> bool:
        return not self.process

    def from_first(self, make: Callable[[], _T], group: dist.ProcessGroup | None = None) -> _T:
        """What `make` gives on the first process, everywhere; all processes call it together.

        Raises:
            what `make` raised, on the first process; on the others UserError with its message, or RuntimeError.
        """
        if self.processes == 1:
            return make()
        told: list[Any] = [None, None, None]  # value, the error's class, its message
        error: Exception | None = None
        if self.is_first:
            try:
                told[0] = make()
            except Exception as problem:  # whatever it is: the others wait
                error = problem
                told[1:] = [type(error).__name__, str(error)]
        dist.broadcast_object_list(told, src=0, group=group)
        if error is not None:
            raise error
        value, kind, message = told
        if kind is None:
            return value
        if kind == UserError.__name__:
            raise UserError(message)
        raise RuntimeError(f"rank 0 cannot read its data: {kind}: {message}")

    def gather(self, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """The value of each process, everywhere; all processes call it together."""
        values: list[Any] = [value]
        if self.processes > 1:
            values = [None] * self.processes
            dist.all_gather_object(values, value, group=group)
        return values

    def gather_books(self, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """The value of each data rank, once; all processes call it together, those that do not lead for nothing."""
        return self.gather(value if self.leads else None, group)[:: self.sequence_parallel_size]
