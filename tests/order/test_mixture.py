"""The mixture: what an epoch holds of each dataset, and in which order."""

from __future__ import annotations

from collections import Counter

import pytest

from internvl_pack.errors import UserError
from internvl_pack.order.mixture import Mixture, MixturePart, mixture_counts


def parts(*rows: int, **options) -> list[MixturePart]:
    return [MixturePart(name=f"d{i}", num_rows=n, **options) for i, n in enumerate(rows)]


def test_an_epoch_holds_every_row_once():
    for epoch in range(3):
        mixture = Mixture(parts(10, 300, 1), seed=4, epoch=epoch)
        seen = Counter(mixture.locate(k) for k in range(len(mixture)))
        assert len(mixture) == 311
        assert set(seen.values()) == {1}


def test_epoch_and_seed_change_the_order():
    orders = {
        tuple(Mixture(parts(300, 20), seed=seed, epoch=epoch).locate(k) for k in range(30))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


def test_half_a_repeat_is_a_seeded_half_and_two_epochs_are_the_whole():
    halves = []
    for epoch in range(2):
        mixture = Mixture(parts(100, repeat_time=0.5), seed=1, epoch=epoch)
        halves.append({mixture.locate(k)[1] for k in range(len(mixture))})
    assert [len(h) for h in halves] == [50, 50]
    assert halves[0] | halves[1] == set(range(100))
    assert halves[0] != set(range(50))


def test_one_and_a_half_repeats_give_each_row_once_or_twice():
    mixture = Mixture(parts(100, repeat_time=1.5), seed=1)
    seen = Counter(mixture.locate(k)[1] for k in range(len(mixture)))
    assert Counter(seen.values()) == {1: 50, 2: 50}


def test_weights_share_out_the_same_total_exactly():
    two = [MixturePart(name="a", num_rows=100, weight=3.0), MixturePart(name="b", num_rows=300, weight=1.0)]
    assert mixture_counts(two) == (300, 100)
    three = [MixturePart(name=n, num_rows=10, weight=1.0) for n in "abc"]
    assert sum(mixture_counts(three)) == 30
    assert mixture_counts(parts(100, 400), use_data_resampling=True) == (167, 333)


def test_weights_on_some_datasets_only_are_refused():
    some = [MixturePart(name="a", num_rows=1, weight=1.0), MixturePart(name="b", num_rows=1)]
    with pytest.raises(UserError, match="'b' has no 'weight'"):
        mixture_counts(some)


def test_replacement_draws_independently_in_proportion():
    mixture = Mixture(parts(1000, 3000), seed=2, replacement=True)
    seen = Counter(mixture.locate(k) for k in range(len(mixture)))
    assert 0.60 < len(seen) / 4000 < 0.66  # 1 - 1/e
    share = sum(n for (d, _), n in seen.items() if d == 0) / 4000
    assert 0.22 < share < 0.28


def test_without_shuffling_rows_come_in_file_order():
    mixture = Mixture(parts(3, 2), seed=9, shuffle=False)
    assert [mixture.locate(k) for k in range(5)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
