"""Ranks that share rows: what they compare, and what happens where they differ. Two ranks are two threads."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from internvl_pack.batch.collate import packed_collate_fn
from internvl_pack.batch.row import PackRow, Segment
from internvl_pack.parallel.agreement import Agreement, OtherRankFailed, difference, digest
from internvl_pack.parallel.group import SequenceGroup
from internvl_pack.records import whole
from internvl_pack.stream.reader import Progress
from train.ranks import Ranks


def batch(
    ids=(5, 6, 7), labels=(-100, 6, 7), sample_id="a/0", events=(), step=3, shade=0, **progress
) -> dict[str, Any]:
    """A batch of one segment with one tile; `events` are (id, reason, detail)."""
    tiles = np.full((1, 3, 4, 4), shade, dtype=np.uint8)
    segment = Segment(sample_id, (0, 1), np.array(ids, np.int32), np.array(labels, np.int32), tiles, (1,), 2)
    left = [{"id": i, "reason": reason, "detail": detail} for i, reason, detail in events]
    return packed_collate_fn([PackRow([segment])], image_size=4) | {"progress": Progress(step, events=left, **progress)}


LOST = ("a/9", "image_unreadable")


@pytest.mark.parametrize(
    "other",
    [
        batch(ids=(5, 6, 8)),
        batch(labels=(-100, 6, -100)),
        batch(sample_id="a/1"),
        batch(events=[(*LOST, "")]),
        batch(step=4),
        batch(micro_batch=1),
        batch(ends_step=True),
        batch(lost=[(whole(7, 3, 1), "image_unreadable")]),
        batch(fatal="made/9: image_missing"),
        None,
    ],
    ids=["ids", "labels", "sample", "a sample that left", "step", "micro-batch", "step's end", "loss", "stop", "end"],
)
def test_batches_that_differ_in_what_counts_have_other_digests(other):
    assert digest(other) != digest(batch())


def test_a_digest_is_of_the_rows_and_not_of_the_words_about_them():
    assert digest(batch()) == digest(batch())
    one, other = (batch(events=[(*LOST, f"<_io.BytesIO object at {place}>")]) for place in ("0x7f01", "0x7f02"))
    assert digest(one) == digest(other)
    assert digest(batch(sample_id="a/\ud800")) >= 0, "any text"


class Together:
    """What `Agreement` sends, between threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


def group_of(rank: int, size: int) -> SequenceGroup:
    ranks = tuple(range(size))
    return SequenceGroup(process_group=None, rank=rank, size=size, mode="ring", ranks=ranks, dp_rank=0, dp_world=1)


def of_rank(rank: int, together: Together) -> Agreement:
    class Here(Agreement):
        def __init__(self) -> None:
            self.group = group_of(rank, together.size)
            self._reported = False

        def _gather(self, value):
            return together.gather(rank, value)

        def _gather_objects(self, value):
            return together.gather(rank, value)

        def _broadcast(self, value):
            return together.gather(rank, value)[0]

    return Here()


def read(*batches_of_ranks) -> list[tuple[list[Any], Exception | None]]:
    """What each rank's loader gives, and what it raises, from what each has read."""
    together = Together(len(batches_of_ranks))
    found: list[Any] = [None] * together.size

    def run(rank: int) -> None:
        given, error = [], None
        try:
            given.extend(of_rank(rank, together).on(source(batches_of_ranks[rank])))
        except Exception as problem:
            error = problem
        found[rank] = (given, error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(together.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return found


def source(batches):
    for one in batches:
        if isinstance(one, Exception):
            raise one
        yield one


def test_ranks_that_read_the_same_keep_what_they_read():
    first, second = [batch(), batch(step=4)], [batch(shade=1), batch(step=4, shade=1)]
    (given, _), (other, error) = read(first, second)
    assert [id(b) for b in given] == [id(b) for b in first]
    assert [id(b) for b in other] == [id(b) for b in second], "nothing was sent"
    assert error is None


def test_where_ranks_differ_all_get_the_first_ones_batch_and_one_line_is_logged(caplog):
    first = [batch(), batch(step=4), batch(step=5)]
    second = [batch(), batch(step=4, sample_id="a/1", events=[(*LOST, "")]), batch(step=6)]
    (_, _), (given, _) = read(first, second)
    assert [id(b) for b in given] == [id(second[0]), id(first[1]), id(first[2])]
    (line,) = caplog.messages
    assert "a/9: image_unreadable on rank 1, not on all" in line
    assert "all train what rank 0 read" in line


def test_a_rank_whose_rows_end_early_goes_on_with_the_first_ones():
    (first, _), (second, _) = read([batch(), batch(step=4)], [batch()])
    assert len(first) == len(second) == 2


def test_no_rank_waits_for_one_that_cannot_read_on():
    (given, error), (others, reason) = read([batch(), batch(step=4)], [batch(), OSError("no such device")])
    assert (len(given), len(others)) == (1, 1)
    assert isinstance(error, OtherRankFailed) and "rank 1" in str(error)
    assert isinstance(reason, OSError)


def test_rows_that_differ_without_a_sample_that_left_are_logged_too():
    assert "(their rows differ)" in difference([{}, {}], (2, 3))


# --- places of processes --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_processes_are_parted_into_neighbours_that_share_rows(size):
    places = [Ranks(rank=p, world_size=8, sequence_parallel_size=size) for p in range(8)]
    assert {r.data_ranks for r in places} == {8 // size}
    assert [r.data_rank for r in places] == [p // size for p in range(8)]
    assert [r.data_rank for r in places if r.is_group_leader] == list(range(8 // size)), "one speaks for each"
    assert [r.is_first for r in places] == [True] + [False] * 7


def test_ranks_wait_for_each_others_rows_as_long_as_the_run_says(monkeypatch):
    made = []
    monkeypatch.setattr("torch.distributed.new_group", lambda *given: made.append(given))
    for timeout in (timedelta(hours=3), None):
        Agreement(group_of(0, 2), timeout)
    assert made == [([0, 1], timedelta(hours=3), "gloo"), ([0, 1], None, "gloo")]
