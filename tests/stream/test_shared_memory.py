"""Space for the batches in flight is counted before the first one, not missed at some later one."""

from __future__ import annotations

import resource

import numpy as np
import pytest

from internvl_pack.errors import UserError
from internvl_pack.stream import shared_memory
from internvl_pack.stream.shared_memory import HELD_BATCHES, bytes_of_batch, fitting_prefetch, free_bytes

MB = 1 << 20
BATCH = bytes_of_batch(16384, 48, 448)


def test_a_batch_is_mostly_its_tiles():
    assert pytest.approx(np.zeros((48, 3, 448, 448), np.uint8).nbytes, rel=0.03) == BATCH


@pytest.mark.parametrize(
    "workers, prefetch, free, processes, expected",
    [
        (4, 2, 1024 * MB, 1, 2),
        (4, 2, None, 1, 2),
        (4, 2, 6 * BATCH, 1, 1),
        (4, 4, 14 * BATCH, 1, 3),
        (4, 4, 14 * BATCH, 2, 1),
        (2, 2, 4 * BATCH, 1, 1),
    ],
)
def test_fewer_batches_are_in_flight_where_not_all_fit(workers, prefetch, free, processes, expected):
    found = fitting_prefetch(BATCH, workers, prefetch, free, processes)
    assert found == expected
    assert free is None or processes * BATCH * (workers * found + HELD_BATCHES) <= free


def test_a_container_of_64_mb_is_told_with_the_cure():
    with pytest.raises(UserError, match=r"/dev/shm has 67 MB free.*--shm-size 1g.*--dataloader_num_workers"):
        fitting_prefetch(BATCH, 4, 2, 64 * MB)


def test_free_space_is_asked_of_the_system(tmp_path):
    assert free_bytes(str(tmp_path)) > 0
    assert free_bytes(str(tmp_path / "nowhere")) is None


@pytest.mark.parametrize("hard, expected", [(4096, 4096), (1 << 20, 1 << 16), (resource.RLIM_INFINITY, 1 << 16)])
def test_the_soft_limit_of_open_files_is_raised(monkeypatch, hard, expected):
    found = []
    monkeypatch.setattr(shared_memory.resource, "getrlimit", lambda _: (1024, hard))
    monkeypatch.setattr(shared_memory.resource, "setrlimit", lambda _, limits: found.append(limits))
    shared_memory.allow_many_open_files()
    assert found == [(expected, hard)]
    monkeypatch.setattr(shared_memory.resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    shared_memory.allow_many_open_files()
    assert len(found) == 1, "it is never lowered"
