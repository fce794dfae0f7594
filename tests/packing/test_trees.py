"""What a prefix tree costs: the pairs of tokens that see each other, counted one by one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from internvl_pack.packing.budget import Budget
from internvl_pack.packing.cost import CostModel
from internvl_pack.packing.offline import first_fit_shuffle
from internvl_pack.packing.packer import Packer
from internvl_pack.packing.policies import POLICIES
from internvl_pack.packing.split import split
from internvl_pack.records import Branch, Fragment, Record, whole

COST = CostModel(token=1000, attention=7, tile=90_000)


def tree(prefix: int, *branches: int, tiles: int = 1) -> Record:
    found = tuple(Branch(n, n - 1) for n in branches)
    return Record("t", prefix + sum(branches), tiles, sum(branches), branches=found)


def seen_pairs(prefix: int, *branches: int) -> int:
    """Pairs of tokens, in both orders, of which neither is in another branch than the other."""
    of = np.repeat(np.arange(len(branches) + 1), [prefix, *branches])
    same = of[:, None] == of[None]
    return int((same | (of == 0)[:, None] | (of == 0)[None]).sum())


@pytest.mark.parametrize("lengths", [(9, 4, 5), (1, 1), (20, 3, 1, 7, 2), (3, 30, 30)])
def test_a_tree_costs_what_its_tokens_see(lengths):
    prefix, *branches = lengths
    (fragment,) = split(tree(*lengths), 0, Budget(100, 1))
    pairs = seen_pairs(*lengths)
    assert pairs == prefix**2 + sum(a * (2 * prefix + a) for a in branches)
    assert fragment.num_tokens**2 - fragment.num_unseen_pairs == pairs
    assert COST.of(fragment.num_tokens, 1, fragment.num_unseen_pairs) == 1000 * sum(lengths) + 7 * pairs + 90_000
    alone = sum(prefix + a for a in branches)
    assert fragment.num_tokens + fragment.num_saved_tokens == alone and fragment.num_branches == len(branches)


def test_parts_of_a_tree_count_their_own_branches():
    branches = (5, 6, 3, 9, 2)
    parts = split(tree(10, *branches), 0, Budget(22, 1))
    of_parts = [(5, 6), (3, 9), (2,)]
    assert [f.num_tokens**2 - f.num_unseen_pairs for f in parts] == [seen_pairs(10, *each) for each in of_parts]
    assert [(f.num_branches, f.num_saved_tokens) for f in parts] == [(2, 10), (2, 10), (1, 0)]
    for (_, before), (after, _) in pairwise((f.token_start, f.token_stop) for f in parts):
        assert before == after


def as_fragment(position: int, record: Record, budget: Budget) -> Fragment:
    (fragment,) = split(record, position, budget)
    return fragment


@pytest.mark.parametrize("policy", POLICIES)
def test_packs_of_trees_cost_less_than_text_of_their_length(policy):
    budget = Budget(64, 4)
    trees = [as_fragment(n, tree(8, 4 + n % 3, 5, 6), budget) for n in range(20)]
    texts = [whole(n, f.num_tokens, f.num_tiles) for n, f in enumerate(trees)]
    packers = [Packer[Fragment](budget, policy=policy, buffer_size=20, cost=COST) for _ in range(2)]
    for packer, fragments in zip(packers, (trees, texts), strict=True):
        for fragment in fragments:
            packer.add(fragment)
    while packers[0].waiting:
        packer = Packer[Fragment](budget, policy=policy, buffer_size=20, cost=COST)
        packer.load_state_dict(packers[0].state_dict(), packers[0].waiting)
        cost, pack = packers[0].pop()
        assert packer.pop() == (cost, pack)
        exact = COST.of_pack((f.num_tokens, f.num_tiles, f.num_unseen_pairs) for f in pack)
        assert cost == pytest.approx(1024 * exact / COST.token, abs=2 * len(pack))
        assert exact < COST.of_pack((f.num_tokens, f.num_tiles) for f in pack)


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"single"}))
def test_the_attention_budget_counts_what_a_tree_sees(policy):
    pairs = seen_pairs(8, 4, 5)
    budget = Budget(1000, 100, max_attention_cost=2 * pairs)
    fragments = [as_fragment(n, tree(8, 4, 5), budget) for n in range(6)]
    packer: Packer[Fragment] = Packer(budget, policy=policy, buffer_size=6)
    for fragment in fragments:
        packer.add(fragment)
    sizes = []
    while packer.waiting:
        sizes.append(len(packer.pop()[1]))
    assert sizes == [2, 2, 2] == list(map(len, first_fit_shuffle(fragments, budget)))
