"""The local order: every row in its proportion, near its neighbours, resumable like any other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from helpers.factory import TINY, write_shards
from helpers.loaders import resume, samples_of, saved, steps_of, stream_loaders
from hypothesis import given, settings
from hypothesis import strategies as st

from internvl_pack.config import PackingConfig
from internvl_pack.errors import UserError
from internvl_pack.order.local_order import CHUNK_ROWS, BlockWalk, Interleaved
from internvl_pack.order.mixture import Mixture, MixturePart
from internvl_pack.stream.dataset import PackedDataset


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=12).filter(any), st.integers(1, 90), st.integers(0, 2**32))
def test_interleaving_gives_every_item_once_and_in_proportion(counts, window, seed):
    order = Interleaved(counts, window, seed)
    total = sum(counts)
    items = [order[k] for k in range(total)]
    assert Counter(items) == Counter((d, j) for d, count in enumerate(counts) for j in range(count))
    for start in range(0, total, window):  # each window holds each dataset's share of it
        stop = min(start + window, total)
        seen = Counter(d for d, _ in items[start:stop])
        for dataset, count in enumerate(counts):
            assert abs(seen[dataset] - count * (stop - start) / total) <= len(counts) / 2 + 2


def test_one_dataset_comes_window_by_window():
    order = Interleaved([10_000], 100, seed=1)
    for start in range(0, 10_000, 100):
        items = [order[k][1] for k in range(start, start + 100)]
        assert sorted(items) == list(range(start, start + 100))
        assert items != sorted(items)


def test_a_seek_costs_no_walk():
    order = Interleaved([3 * 10**11, 7 * 10**11, 5], 1000, seed=1)
    assert order[10**12 - 1] != order[10**12 - 2]
    dataset, item = order[5 * 10**11]
    share = (3 * 10**11, 7 * 10**11, 5)[dataset]
    assert abs(item / share - 0.5) < 1e-6 or dataset == 2


def test_a_walk_takes_whole_shards_in_another_order_each_pass():
    starts = [0, 5, 5, 12, 30]
    walk = BlockWalk(starts, seed=4)
    orders = set()
    for number in range(6):
        rows = [walk[number * 30 + k] for k in range(30)]
        assert sorted(rows) == list(range(30))
        jumps = [b for a, b in zip([-1, *rows], rows, strict=False) if b != a + 1]
        assert set(jumps) <= set(starts)
        orders.add(tuple(rows))
    assert len(orders) > 1


@pytest.mark.slow
def test_half_of_one_file_is_not_its_head():
    n = 40 * CHUNK_ROWS
    part = MixturePart(name="a", num_rows=n, repeat_time=0.5)
    halves = []
    for epoch in range(2):
        mixture = Mixture([part], seed=1, epoch=epoch, shuffle_buffer_size=500)
        halves.append({mixture.locate(k)[1] for k in range(len(mixture))})
    assert len(halves[0]) == n // 2 and len(halves[0] | halves[1]) == n
    assert 0.2 < sum(row < n // 2 for row in halves[0]) / len(halves[0]) < 0.8


CONFIG = PackingConfig(max_packed_tokens=400, max_buffer_size=4, seed=3, shuffle_buffer_size=20)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards"), 240, per_shard=40)


def ranks_of(meta, tokenizer, ranks: int):
    """Loaders of a step of four packs."""
    return stream_loaders(meta, tokenizer, ranks, config=CONFIG, accumulation=4 // ranks)


def ids_of(ranks) -> list[str]:
    """Sample ids in the order of steps."""
    return [name for step in samples_of(ranks) for name, _ in step]


@pytest.mark.slow
def test_training_reads_few_shards_at_a_time_and_every_sample_once(shards, tokenizer):
    """The pool of packs is larger than this data: the order of packs before it tells what is read together."""

    def shards_read(config: PackingConfig) -> list[str]:
        dataset = PackedDataset.from_meta(shards, tokenizer, config, encode=TINY)
        packs, mixture = dataset.pack_sequence(0), dataset.mixture(0)
        positions = [f.position for pack in iter(packs.next_pack, None) for f in pack.fragments if f.index == 0]
        ids = [dataset.samples.sample_id(*mixture.locate(position)) for position in positions]
        assert len(ids) == len(set(ids)) == 240
        return [name.split("/")[1] for name in ids]

    def open_at_once(read: list[str]) -> int:
        return max(len(set(read[k : k + 20])) for k in range(220))

    assert open_at_once(shards_read(CONFIG)) <= 3 < open_at_once(shards_read(replace(CONFIG, shuffle_buffer_size=None)))
    ids = ids_of(ranks_of(shards, tokenizer, 2))
    assert len(ids) == len(set(ids)) == 240


@pytest.mark.slow
def test_it_goes_on_after_a_stop_on_another_number_of_ranks(shards, tokenizer):
    expected = ids_of(ranks_of(shards, tokenizer, 1))
    two = ranks_of(shards, tokenizer, 2)
    begun = steps_of(two, 4)
    four = ranks_of(shards, tokenizer, 4)
    resume(four, saved(two))
    rest = ids_of(four)
    assert len(begun) == 4 and 0 < len(rest) < len(expected) and rest == expected[-len(rest) :]


def test_options_that_contradict_it_are_refused():
    with pytest.raises(UserError, match="shuffle_buffer_size is 0"):
        PackingConfig(shuffle_buffer_size=0)
    with pytest.raises(UserError, match="shuffle_buffer_size with replacement"):
        PackingConfig(shuffle_buffer_size=10, replacement=True)
