"""Which process this is, which rows it trains, and small collectives on the CPU.

    rank                      0   1   2   3   4   5   6   7      of a world of 8, 2 share a row (sequence_parallel_size)
    data rank                 0   0   1   1   2   2   3   3      reads rows; world // 2 of them
    is_group_leader           x       x       x       x          counts what the row holds, writes its ledger

Neighbours share a row, so that its exchanges stay on one machine. Collectives go over all ranks, and optimizer states
are sharded over all of them; packs and samples belong to data ranks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from internvl_pack.errors import UserError
from internvl_pack.parallel.agreement import OtherRankFailed
from internvl_pack.parallel.checks import check_world

if TYPE_CHECKING:
    from .arguments import PackTrainingArguments

_T = TypeVar("_T")


def lay_out_gradients(model: torch.nn.Module) -> None:
    """Give gradients of one row the strides of their parameters, as DDP's buckets have them; DDP warns of others.

    The class token's gradient is a slice of the images' where a row has one tile. That of the position embeddings is
    then all of it: each gets memory of its own, since the gradients of later rows are added in place.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dim() > 1 and parameter.shape[0] == 1:
            parameter.register_hook(lambda gradient: gradient.clone(memory_format=torch.contiguous_format))


@contextlib.contextmanager
def others_answer(seconds: float) -> Iterator[None]:
    """A collective on the CPU: if a rank does not come to it, the error says so in words.

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
            "hangs; its last output shows more"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Places in a run; see the picture above. All ranks call its collectives together.

    Args:
        timeout: how long a collective waits for the other ranks; None takes torch's own.

    Raises:
        UserError: the ranks cannot be parted into groups of `sequence_parallel_size`.
    """

    rank: int = 0
    world_size: int = 1
    sequence_parallel_size: int = 1
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        check_world(self.world_size, self.sequence_parallel_size)

    @classmethod
    def of(cls, args: PackTrainingArguments) -> Ranks:
        """The place of this process in torch.distributed's world, or alone."""
        return cls(
            rank=args.process_index,
            world_size=args.world_size,
            sequence_parallel_size=args.sequence_parallel_size,
            timeout=args.ddp_timeout_delta,
        )

    @property
    def data_rank(self) -> int:
        return self.rank // self.sequence_parallel_size

    @property
    def data_ranks(self) -> int:
        return self.world_size // self.sequence_parallel_size

    @property
    def is_group_leader(self) -> bool:
        """Whether this rank speaks for those that it shares its rows with."""
        return self.rank % self.sequence_parallel_size == 0

    @property
    def is_first(self) -> bool:
        return not self.rank

    @cached_property
    def cpu_group(self) -> dist.ProcessGroup | None:
        """A gloo group of all ranks, whose small reductions do not wait for the device; None for one alone."""
        if self.world_size == 1:
            return None
        # A rank that is stopped, not dead, is noticed by this group's time-out alone.
        return dist.new_group(backend="gloo", timeout=self.timeout)

    def all_reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """`values`, a tensor on the CPU, reduced in place over all ranks.

        Raises:
            RuntimeError: a rank did not come.
        """
        if self.world_size > 1:
            seconds = float("inf") if self.timeout is None else self.timeout.total_seconds()
            with others_answer(seconds):
                dist.all_reduce(values, op=op, group=self.cpu_group)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier(group=self.cpu_group)

    def from_first(self, make: Callable[[], _T]) -> _T:
        """What `make` gives on the first rank, on all of them.

        Raises:
            UserError, RuntimeError: as `fail_together`, where `make` has failed.
        """
        value, error = None, None
        if self.is_first:
            try:
                value = make()
            except Exception as problem:  # whatever it is: the others wait
                error = problem
        self.fail_together(error)
        return self.gather(value)[0]  # type: ignore[return-value]  # the first rank has made it

    def fail_together(self, error: Exception | None) -> None:
        """End every rank with the message of those that cannot read on, instead of waiting for them.

        Args:
            error: this rank's; None for none.

        Raises:
            UserError: bad data on any rank.
            RuntimeError: another error on any rank.
        """
        own = (
            None if error is None else (isinstance(error, OtherRankFailed), self.rank, type(error).__name__, str(error))
        )
        failed = [found for found in self.gather(own) if found is not None]
        if not failed:
            return
        _, rank, kind, message = min(failed)  # the first that has a reason of its own
        if kind == UserError.__name__:
            raise UserError(message) from error
        raise RuntimeError(f"rank {rank} cannot read its data: {kind}: {message}") from error

    def gather(self, value: _T) -> list[_T]:
        """The value of each rank, on all of them."""
        values: list[Any] = [value]
        if self.world_size > 1:
            values = [None] * self.world_size
            dist.all_gather_object(values, value, group=self.cpu_group)
        return values

    def gather_from_leaders(self, value: _T) -> list[_T]:
        """The value of each data rank, once, on all ranks; of those that share a row the leader's counts."""
        values: list[Any] = self.gather(value if self.is_group_leader else None)
        return values[:: self.sequence_parallel_size]
