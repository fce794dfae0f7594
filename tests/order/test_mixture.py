"""Order: the permutation and the mixture."""

from __future__ import annotations

from collections import Counter

import pytest

from internvl_pack.errors import UserError
from internvl_pack.order.mixture import Mixture, MixturePart, mixture_counts
from internvl_pack.order.permutation import Permutation, derive_seed


def test_permutation_is_a_bijection_for_every_size_to_2000():
    for n in range(1, 2001):
        permutation = Permutation(n, seed=n * 7 + 1)
        assert sorted(permutation[k] for k in range(n)) == list(range(n)), n


def test_permutation_of_a_billion_has_no_collision_in_a_sample_and_spreads():
    n = 10**9
    permutation = Permutation(n, seed=5)
    values = [permutation[k] for k in range(0, n, 20_011)]
    assert len(set(values)) == len(values)
    assert all(0 <= v < n for v in values)
    tenths = Counter(v * 10 // n for v in values)
    expected = len(values) / 10
    assert all(abs(tenths[t] - expected) < 6 * expected**0.5 for t in range(10))


def test_permutation_changes_with_the_seed_and_is_the_same_for_the_same_seed():
    orders = {tuple(Permutation(1000, seed)[k] for k in range(20)) for seed in range(50)}
    assert len(orders) == 50
    assert [Permutation(1000, 3)[k] for k in range(1000)] == [Permutation(1000, 3)[k] for k in range(1000)]


def test_permutation_values_are_fixed_for_good():
    """A saved run must find its order again in any later version."""
    assert [Permutation(10, 1)[k] for k in range(10)] == [8, 6, 9, 0, 7, 3, 5, 2, 4, 1]
    assert [Permutation(1000, 1)[k] for k in range(6)] == [992, 203, 456, 266, 692, 32]


def test_small_permutations_reach_every_order():
    orders = {tuple(Permutation(4, seed)[k] for k in range(4)) for seed in range(1000)}
    assert len(orders) == 24


@pytest.mark.parametrize("k", [-1, 10])
def test_permutation_refuses_positions_outside(k):
    with pytest.raises(IndexError):
        Permutation(10, 0)[k]


def test_derive_seed_depends_on_order_and_kind():
    seeds = {
        derive_seed(1, 2),
        derive_seed(2, 1),
        derive_seed("1", 2),
        derive_seed(12),
        derive_seed("12"),
        derive_seed(),
    }
    assert len(seeds) == 6


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
