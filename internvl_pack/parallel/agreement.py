"""Keeps the batches of a sequence-parallel group identical when one rank fails to read a sample.

Every rank of a sequence group rebuilds the row by the same plan: order and packs are functions of the data, so
nothing is sent. What a rank reads of files may still differ: a file system that fails once on one machine costs that
rank a sample, and the others not. So the ranks compare a digest of each batch, 8 bytes over gloo. Where it differs all
take the first rank's batch, and its account of what left and why.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .group import SequenceGroup, group_ranks

logger = logging.getLogger(__name__)

_FAILED = -1  # instead of a digest
_ARRAYS = ("input_ids", "labels")
_NAMES = ("sample_ids", "fragments", "num_tiles")


class OtherRankFailed(RuntimeError):
    """A rank that shares this one's rows could not read on; it has the reason."""


class Agreement:
    """Makes a loader's batches those of the group's first rank. All processes of the run make one together.

    Args:
        group: the ranks that share rows.
        timeout: how long a rank waits for what the others read; None takes torch's own.
    """

    def __init__(self, group: SequenceGroup, timeout: timedelta | None = None) -> None:
        self.group = group
        groups = group_ranks(group.dp_world * group.size, group.size)
        self._cpu_group = [dist.new_group(list(ranks), timeout, "gloo") for ranks in groups][group.dp_rank]
        self._reported = False

    def on(self, batches: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """`batches`, each replaced by the first rank's where they differ; all ranks of the group iterate together.

        Raises:
            OtherRankFailed: another rank's reading failed; this rank's own error is raised as it is.
        """
        source = iter(batches)
        while True:
            batch, error = None, None
            try:
                batch = next(source, None)
            except Exception as problem:
                error = problem
            digests = self._gather(_FAILED if error is not None else digest(batch))
            if error is not None:
                raise error
            if _FAILED in digests:
                failed = self.group.ranks[digests.index(_FAILED)]
                raise OtherRankFailed(f"rank {failed}, which shares this rank's rows, cannot read its data")
            if len(set(digests)) > 1:
                batch = self._from_first(batch)
            if batch is None:
                return
            yield batch

    def _gather(self, value: int) -> list[int]:
        own = torch.tensor([value], dtype=torch.int64)
        everyones = [torch.empty_like(own) for _ in range(self.group.size)]
        dist.all_gather(everyones, own, group=self._cpu_group)
        return [int(one) for one in everyones]

    def _from_first(self, batch: dict[str, Any] | None) -> dict[str, Any] | None:
        events = batch["progress"].events if batch is not None else []
        seen = self._gather_objects(left(events))
        if not self._reported and not self.group.rank:
            self._reported = True
            logger.error(difference(seen, self.group.ranks))
        return self._broadcast(batch)

    def _gather_objects(self, value: Any) -> list[Any]:
        everyones: list[Any] = [None] * self.group.size
        dist.all_gather_object(everyones, value, group=self._cpu_group)
        return everyones

    def _broadcast(self, value: Any) -> Any:
        """The first rank's value."""
        sent = [value]
        dist.broadcast_object_list(sent, src=self.group.ranks[0], group=self._cpu_group)
        return sent[0]


def digest(batch: dict[str, Any] | None) -> int:
    """What a batch holds and what the ledger counts of it, in 63 bits: everything but its pixels."""
    if batch is None:
        return 0
    # Not the events' details: they are words, and may name a place in this process's memory.
    p = batch["progress"]
    about = (p.step, p.micro_batch, p.ends_step, bool(p.fatal), p.lost, left(p.events))
    words = repr([about, *(batch[name] for name in _NAMES)])
    found = hashlib.blake2b(words.encode("utf-8", "surrogatepass"), digest_size=8)
    for name in _ARRAYS:
        found.update(batch[name].numpy().data)
    return int.from_bytes(found.digest(), "little") >> 1


def left(events: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Samples that left, and why."""
    return {event["id"]: event["reason"] for event in events}


def difference(seen: list[dict[str, str]], ranks: tuple[int, ...]) -> str:
    """One line for people: what was read by some ranks and not by others."""
    ids = sorted({i for events in seen for i in events if any(other.get(i) != events[i] for other in seen)})
    what = "their rows differ"
    if ids:
        name = ids[0]
        found = [f"{events[name]} on rank {rank}" for rank, events in zip(ranks, seen, strict=True) if name in events]
        what = f"{name}: {', '.join(found)}, not on all"
    return (
        f"ranks {', '.join(map(str, ranks))} share rows and did not read the same ({what}): all train what rank "
        f"{ranks[0]} read, which is sent to the others; is the storage reliable?"
    )
