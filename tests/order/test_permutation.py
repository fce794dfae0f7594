"""The permutation: a bijection that is random, fixed for good and costs no memory."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from internvl_pack.order.permutation import Permutation, derive_seed


@pytest.mark.slow
def test_permutation_is_a_bijection_for_every_size_to_2000():
    for n in range(1, 2001):
        permutation = Permutation(n, seed=n * 7 + 1)
        found = permutation.take(np.arange(n))
        assert np.array_equal(np.sort(found), np.arange(n)), n
        assert [permutation[k] for k in range(0, n, 41)] == found[::41].tolist(), "one by one as all at once"


@pytest.mark.slow
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
