"""The plan: packs in step groups of like cost, exactly once, and from any saved state on as if nothing had happened."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from internvl_pack.config import PackingConfig
from internvl_pack.errors import UserError
from internvl_pack.order.mixture import Mixture, MixturePart
from internvl_pack.packing.cost import CostModel
from internvl_pack.plan.groups import GROUPS, OVERDUE, Step, StepPlan, deal, parted
from internvl_pack.plan.online import ALL_BAD_ROWS, OnlinePacks
from internvl_pack.plan.packed_state import from_json, to_json
from internvl_pack.plan.sequence import PlannedPack
from internvl_pack.records import Fragment, Span, whole
from internvl_pack.survey.survey import PART, Part
from internvl_pack.survey.table import Note

CONFIG = PackingConfig(max_packed_tokens=400, num_images_expected=16, max_buffer_size=8, seed=3)
COST = CostModel.from_name("1B")


class Lengths:
    """A survey of given lengths; rows above the room have turns of 100 tokens, rows of 0 tokens are refused."""

    def __init__(self, sizes: list[tuple[int, int]]) -> None:
        self.sizes = np.array(sizes, np.int64).reshape(-1, 2)

    def where_images_are(self, dataset: int) -> str:
        return ""

    def sample_id(self, dataset: int, row: int) -> str:
        return f"a/{row}"

    def part(self, mixture: Mixture, number: int) -> Part:
        start = number * PART
        datasets, rows = mixture.locate_range(start, min(start + PART, len(mixture)))
        tokens, tiles = self.sizes[rows].T
        notes = {}
        for place, (t, v) in enumerate(zip(tokens.tolist(), tiles.tolist(), strict=True)):
            if not t:
                notes[place] = Note(error=("image_truncated", "the image is cut", "here"))
            elif t > 400:
                spans = tuple(Span(min(100, t - at), ends_turn=True) for at in range(0, t, 100))
                notes[place] = Note(spans)
                assert not v
        return Part(datasets, rows, tokens, tiles, notes)


def sizes_of(count: int, seed: int = 0) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    return [rng.choice([(rng.randint(5, 390), rng.randint(0, 8)), (rng.randint(5, 60), 0)]) for _ in range(count)]


def make_plan(sizes, packs_per_step, config=CONFIG, epoch=0, balanced=True) -> StepPlan:
    mixture = Mixture([MixturePart(name="a", num_rows=len(sizes))], seed=config.seed, epoch=epoch)
    packs = OnlinePacks(Lengths(sizes), mixture, config, COST)
    return StepPlan(packs, packs_per_step, seed=config.seed, epoch=epoch, balanced=balanced)


def contents(steps) -> list[list[tuple[Fragment, ...]]]:
    return [[pack.fragments for pack in step.packs] for step in steps]


@pytest.mark.parametrize("packs_per_step", [1, 2, 7, 24, 64, 1000])
def test_every_sample_once_every_step_full_but_the_last_none_empty(packs_per_step):
    sizes = sizes_of(700)
    plan = make_plan(sizes, packs_per_step)
    steps = list(plan)
    seen = Counter(f.position for step in steps for pack in step.packs for f in pack.fragments)
    assert seen == Counter(range(700))
    assert all(len(step.packs) == packs_per_step for step in steps[:-1])
    assert 1 <= len(steps[-1].packs) <= packs_per_step
    for step in steps:
        for pack in step.packs:
            assert sum(f.num_tokens for f in pack.fragments) <= 400 and sum(f.num_tiles for f in pack.fragments) <= 16
    plan.ledger.check()


def test_the_sequence_of_packs_does_not_depend_on_the_packs_of_a_step():
    sizes = sizes_of(500)
    packs = [Counter(p for step in contents(make_plan(sizes, n)) for p in step) for n in (1, 3, 16)]
    assert packs[0] == packs[1] == packs[2]


@pytest.mark.slow
def test_steps_are_of_like_cost_and_come_in_no_order_of_cost():
    sizes = sizes_of(12_000)
    steps = list(make_plan(sizes, 16))[:-1]
    even = [sum(p.cost for p in step.packs) / len(step.packs) / max(p.cost for p in step.packs) for step in steps]
    apart = [p.cost for step in make_plan(sizes, 16, balanced=False) for p in step.packs]
    runs = [apart[at : at + 16] for at in range(0, len(apart) - 16, 16)]
    unbalanced = [sum(run) / len(run) / max(run) for run in runs]
    assert sum(even) / len(even) > 0.93 > sum(unbalanced) / len(unbalanced)
    means = [sum(p.cost for p in step.packs) for step in steps]
    rising = sum(a < b for a, b in pairwise(means)) / (len(means) - 1)
    assert 0.3 < rising < 0.7


@pytest.mark.slow
def test_no_pack_waits_longer_than_the_pool_allows():
    plan = make_plan(sizes_of(9_000), 4)
    came: dict[int, int] = {}
    longest = 0
    for step in plan:
        for pooled in plan._pool:
            came.setdefault(pooled.number, pooled.came)
        for pack in step.packs:
            longest = max(longest, step.number - came.get(pack.number, step.number))
    assert 0 < longest <= (OVERDUE + 1) * GROUPS


@pytest.mark.parametrize("packs_per_step", [1, 5, 32])
@pytest.mark.parametrize("stop", [1, 4, 9])
def test_a_plan_goes_on_from_its_state_as_if_it_had_not_stopped(packs_per_step, stop):
    rng = random.Random(7)
    sizes = [*sizes_of(900), *((rng.randint(410, 2000), 0) for _ in range(60)), *((0, 0) for _ in range(20))]
    whole_plan = make_plan(sizes, packs_per_step)
    expected = list(whole_plan)
    first = make_plan(sizes, packs_per_step)
    done = [first.next_step() for _ in range(min(stop, len(expected)))]
    state = json.loads(json.dumps(to_json(first.state_dict())))
    second = make_plan(sizes, packs_per_step)
    second.load_state_dict(from_json(state))
    assert [*done, *second] == expected
    assert second.ledger.state_dict() == whole_plan.ledger.state_dict()
    second.ledger.check()


def test_other_packs_a_step_go_on_from_a_state_with_the_rest_of_the_samples():
    sizes = sizes_of(900)
    first = make_plan(sizes, 6)
    seen = Counter(f.position for _ in range(5) for pack in first.next_step().packs for f in pack.fragments)
    second = make_plan(sizes, 4)
    second.load_state_dict(from_json(to_json(first.state_dict())))
    steps = list(second)
    seen.update(f.position for step in steps for pack in step.packs for f in pack.fragments)
    assert seen == Counter(range(900))
    assert all(len(step.packs) == 4 for step in steps[:-1])


@pytest.mark.slow
def test_a_state_at_sixty_four_packs_a_step_is_some_hundred_kilobytes():
    plan = make_plan(sizes_of(30_000), 64)
    for _ in range(3):
        plan.next_step()
    assert len(plan._pool) == (GROUPS - 1) * 64
    assert len(json.dumps(to_json(plan.state_dict()))) < 120_000


def test_a_damaged_state_is_refused_in_one_line():
    state = to_json(make_plan(sizes_of(300), 4).state_dict())
    for text in ("AAAA", "not base64!", state["pooled"]["table"][:-8]):
        with pytest.raises(UserError, match="is damaged"):
            from_json({**state, "pooled": {**state["pooled"], "table": text}})


def test_refused_samples_are_named_with_the_step_that_they_were_met_in():
    sizes = [(0, 0) if i % 10 == 3 else (100, 1) for i in range(400)]
    plan = make_plan(sizes, 4)
    steps = list(plan)
    refused = [r for step in steps for r in step.refused]
    assert len(refused) == 40 and {r.reason for r in refused} == {"image_truncated"}
    assert plan.ledger.quarantined == {"image_truncated": 40}
    plan.ledger.check()


def test_data_of_which_nothing_can_be_used_stops_the_plan_by_name():
    with pytest.raises(UserError, match=f"dataset 'a': none of its first {ALL_BAD_ROWS} samples can be used; a/"):
        make_plan([(0, 0)] * 100, 2).next_step()


def test_on_error_stop_ends_the_plan_with_the_sample():
    config = PackingConfig(max_packed_tokens=400, num_images_expected=16, on_error="stop")
    with pytest.raises(UserError, match="a/5: image_truncated: here: the image is cut"):
        list(make_plan([(0, 0) if i == 5 else (100, 1) for i in range(50)], 2, config))


def test_rows_that_are_not_packed_come_in_the_order_of_the_epoch():
    config = PackingConfig(max_packed_tokens=400, num_images_expected=16, packing=False)
    steps = contents(make_plan(sizes_of(50), 4, config, balanced=False))
    assert [f.position for step in steps for (f,) in step] == list(range(50))


# -- dealing -------------------------------------------------------------------------------------------


def packs_of(costs: list[int]) -> tuple[PlannedPack, ...]:
    at = iter(range(10_000))
    return tuple(
        PlannedPack(n, cost, tuple(whole(next(at), cost // 4 + 1, 0) for _ in range(4)))
        for n, cost in enumerate(sorted(costs, reverse=True))
    )


@pytest.mark.parametrize(
    ("costs", "ranks", "per_batch", "expected"),
    [
        ([9, 8, 7, 6], 2, 1, [[[9], [6]], [[8], [7]]]),
        ([9, 8, 7, 6], 2, 2, [[[9, 6]], [[8, 7]]]),
        ([9, 8, 7, 6], 4, 1, [[[9]], [[8]], [[7]], [[6]]]),
        ([9, 8, 7], 2, 1, [[[9], []], [[8], [7]]]),
        ([9, 8, 7], 1, 2, [[[9, 8], [7]]]),
    ],
)
def test_ranks_take_packs_to_and_fro_dearest_first(costs, ranks, per_batch, expected):
    dealt = deal(Step(0, packs_of(costs), []), ranks, per_batch)
    assert [[[pack.cost for pack in batch] for batch in rank] for rank in dealt] == expected


@pytest.mark.slow
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=40), st.integers(1, 12), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_dealing_gives_all_ranks_as_many_micro_batches_and_each_fragment_once(costs, ranks, per_batch):
    packs = packs_of(costs)
    dealt = deal(Step(0, packs, []), ranks, per_batch)
    assert len({len(rank) for rank in dealt}) == 1
    given_out = Counter(f for rank in dealt for batch in rank for pack in batch for f in pack.fragments)
    assert given_out == Counter(f for pack in packs for f in pack.fragments)
    assert all(len(batch) <= per_batch for rank in dealt for batch in rank)


def test_fewer_packs_than_ranks_are_parted_so_that_all_have_work():
    (parts,) = [parted(packs_of([100, 96]), 8)]
    assert len(parts) == 8 and all(len(part.fragments) == 1 for part in parts)
    assert len(parted(packs_of([100]), 8)) == 4, "no more parts than fragments"
    dealt = deal(Step(0, packs_of([100, 96]), []), 5)
    assert all(len(rank) == 1 and rank[0] for rank in dealt)


@pytest.mark.parametrize("sizes", [(5, 1), (1, 5), (3, 3), (1, 1, 1, 9), (2, 2, 2), (1, 2, 3), (7,)])
def test_no_rank_of_the_last_step_idles_while_another_has_fragments_to_spare(sizes):
    held = [[Fragment(10 * at + i, 0, 1, 0, 9 + i, 0, 0) for i in range(size)] for at, size in enumerate(sizes)]
    packs = [PlannedPack(at, 1000 - at, tuple(fragments)) for at, fragments in enumerate(held)]
    for ranks in range(len(sizes) + 1, sum(sizes) + 3):
        parts = parted(packs, ranks)
        assert len(parts) == min(ranks, sum(sizes))
        assert Counter(f for part in parts for f in part.fragments) == Counter(f for each in held for f in each)
