"""The packer's contract: budgets, nothing lost, bounded wait, determinism, and packs near the bound."""

from __future__ import annotations

import csv
import json
import random
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from internvl_pack.errors import SampleError
from internvl_pack.packing.bounds import LowerBounds
from internvl_pack.packing.budget import Budget
from internvl_pack.packing.knapsack import SubsetSums
from internvl_pack.packing.packer import Packer
from internvl_pack.packing.policies import POLICIES
from internvl_pack.packing.split import EXACT_FRAGMENTS, split
from internvl_pack.records import Fragment, Record, Span, whole

PACKERS = sorted(POLICIES.keys() - {"single"})
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Item:
    key: tuple[int, int]
    num_tokens: int
    num_tiles: int = 0
    num_unseen_pairs: int = 0
    num_tile_pairs: int = 0


def items(*sizes: tuple[int, int] | int) -> list[Item]:
    pairs = [(size, 0) if isinstance(size, int) else size for size in sizes]
    return [Item((i, 0), tokens, tiles) for i, (tokens, tiles) in enumerate(pairs)]


def pack_all(stream: list[Item], budget: Budget, **options) -> list[list[Item]]:
    """Every pack of a finite stream, driven as a plan drives it."""
    packer: Packer[Item] = Packer(budget, **options)
    packs, feed = [], iter(stream)
    more = True
    while True:
        while more and not packer.full:
            item = next(feed, None)
            if item is None:
                more = False
            else:
                packer.add(item)
        if not packer.waiting:
            return packs
        packs.append(packer.pop()[1])


def keys(packs: list[list[Item]]) -> list[list[int]]:
    return [sorted(item.key[0] for item in pack) for pack in packs]


# -- tables --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", PACKERS)
@pytest.mark.parametrize(
    ("sizes", "budget", "count"),
    [
        ([], Budget(10, 9), 0),
        ([3], Budget(10, 9), 1),
        ([1] * 10, Budget(10, 99), 1),
        ([(10, 2), (10, 2)], Budget(20, 4), 1),
        ([6] * 10, Budget(10, 9), 10),  # just above half: none can share
        ([5] * 10, Budget(10, 9), 5),  # exactly half
        ([(256, 1)] * 100, Budget(10_000, 10), 10),  # only tiles bind
        ([7] * 100, Budget(70, 9), 10),
        ([1000] + [1] * 1000, Budget(1000, 9), 2),
    ],
)
def test_streams_with_a_known_number_of_packs(policy, sizes, budget, count):
    packs = pack_all(items(*sizes), budget, policy=policy)
    assert len(packs) == count
    assert sorted(k for pack in keys(packs) for k in pack) == list(range(len(sizes)))


@pytest.mark.parametrize("policy", ["subset_sum", "greedy"])
def test_pairs_that_fill_a_pack_exactly_are_found(policy):
    packs = keys(pack_all(items(60, 60, 60, 30, 30, 30), Budget(100, 99), policy=policy))
    assert len(packs) == 3
    assert keys(pack_all(items(10, 4, 6, 10), Budget(10, 99), policy=policy)) == [[0], [1, 2], [3]]


def test_the_policy_for_padded_batches_packs_nothing_together():
    assert keys(pack_all(items(1, 2, 3), Budget(100, 9), policy="single")) == [[0], [1], [2]]


def test_alignment_counts_inside_the_budget():
    packs = pack_all(items(5, 5, 5), Budget(16, 9, pad_to_multiple_of=8))
    assert [len(pack) for pack in packs] == [2, 1]


def test_the_attention_budget_limits_the_squares():
    packs = pack_all(items(*[10] * 8), Budget(1000, 9, max_attention_cost=200))
    assert [len(pack) for pack in packs] == [2, 2, 2, 2]


def test_an_empty_fragment_is_refused_and_one_over_the_budget_too():
    packer = Packer(Budget(10, 2))
    with pytest.raises(SampleError, match="sample_empty"):
        packer.add(Item((0, 0), 0))
    for size in ((11, 0), (1, 3)):
        with pytest.raises(SampleError, match="oversized"):
            packer.add(Item((0, 0), *size))


def vectors(shared: Path) -> list[dict]:
    return json.loads((shared / "cases" / "vectors" / "packing.json").read_text())


def record_of(sample: dict) -> Record:
    parts = sample.get("parts")
    if parts is None:
        return Record(sample["id"], sample["tokens"], sample["tiles"])
    spans = tuple(Span(part[1], part[2] if part[0] == "image" else 0) for part in parts)
    return Record(sample["id"], sum(s.num_tokens for s in spans), sum(s.num_tiles for s in spans), spans=spans)


@pytest.mark.parametrize("policy", ["subset_sum", "greedy"])
def test_vectors_of_public_bug_reports(policy, shared_dir):
    """Every entry: what must come out, by its id; oversized samples leave with a reason, the others are packed once."""
    expected_packs = {"P01": 3, "P02": 3, "P05": 1, "P07": 2, "P12": 1, "P13": 1, "P15": 2, "P16": 1, "P18": 3}
    seen = set()
    for entry in vectors(shared_dir):
        budget = Budget(
            entry["token_budget"], entry["tile_budget"], pad_to_multiple_of=entry.get("segment_multiple", 1)
        )
        fragments, refused, ids = [], {}, [sample["id"] for sample in entry["samples"]]
        for position, sample in enumerate(entry["samples"]):
            try:
                fragments += split(record_of(sample), position, budget, oversize="drop")
            except SampleError as error:
                refused[sample["id"]] = error.reason
        packs = pack_all(fragments, budget, policy=policy, buffer_size=entry.get("buffer", 64))
        name = entry["id"]
        seen.add(name)
        packed = [ids[f.position] for pack in packs for f in pack]
        assert sorted([*packed, *refused]) == sorted(ids), name
        for pack in packs:
            assert pack, name
            assert sum(budget.aligned(f.num_tokens) for f in pack) <= budget.max_tokens, name
            assert sum(f.num_tiles for f in pack) <= budget.max_tiles, name
        if name in expected_packs:
            assert len(packs) == expected_packs[name], name
        by_name = [sorted(ids[f.position] for f in pack) for pack in packs]
        if name == "P02":
            assert ["a"] in by_name and ["d"] in by_name and ["b", "c"] in by_name
        if name == "P04":
            assert by_name == [["f", "g", "h"]] and len(refused) == 5
        if name == "P07":
            assert ["a", "b"] in by_name
        if name in ("P08", "P16"):
            assert by_name == [["b"]] and set(refused) == {"a"}
        if name == "P13":
            assert refused == {"a": "sample_empty"} and by_name == [["b"]]
        if name.startswith("P10"):
            fewest = 20 if entry["token_budget"] < 10_000 else 10
            assert fewest <= len(packs) < 30, name
    assert len(seen) == 15
    counts = {}
    for entry in vectors(shared_dir):
        if entry["id"].startswith("P10"):
            stream = items(*[s["tokens"] for s in entry["samples"]])
            counts[entry["token_budget"]] = len(pack_all(stream, Budget(entry["token_budget"], 999), policy=policy))
    assert counts[8193] <= counts[8192] and counts[16385] <= counts[16384]


# -- properties ------------------------------------------------------------------------------------------

budgets = st.builds(
    Budget,
    st.integers(16, 300),
    st.integers(1, 12),
    st.one_of(st.none(), st.integers(300, 40_000)),
    st.sampled_from([1, 1, 4, 8]),
)


@st.composite
def streams(draw) -> tuple[Budget, list[Item]]:
    budget = draw(budgets)
    size = st.tuples(st.integers(1, budget.max_segment_tokens), st.integers(0, budget.max_tiles))
    if draw(st.booleans()):  # mostly small, as real streams are
        size = st.tuples(st.integers(1, max(1, budget.max_segment_tokens // 6)), st.integers(0, 2))
    sizes = draw(st.lists(size, max_size=60))
    return budget, [Item((i, 0), t, min(v, budget.max_tiles)) for i, (t, v) in enumerate(sizes)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", PACKERS)
@given(stream=streams(), buffer_size=st.integers(1, 20))
@settings(max_examples=700, deadline=None)
def test_no_budget_is_exceeded_nothing_lost_and_every_wait_bounded(policy, stream, buffer_size):
    budget, sizes = stream
    options = {"policy": policy, "buffer_size": buffer_size}
    packs = pack_all(sizes, budget, **options)
    assert sorted(item.key for pack in packs for item in pack) == [item.key for item in sizes]
    for pack in packs:
        lengths = [budget.aligned(item.num_tokens) for item in pack]
        assert pack and sum(lengths) <= budget.max_tokens
        assert sum(item.num_tiles for item in pack) <= budget.max_tiles
        if budget.max_attention_cost is not None:
            assert sum(n * n for n in lengths) <= budget.max_attention_cost
    assert pack_all(sizes, budget, **options) == packs, "the same input gives the same packs"
    bounds = LowerBounds(budget)
    for item in sizes:
        bounds.add(item.num_tokens, item.num_tiles)
    assert not sizes or bounds.best() <= len(packs)


@pytest.mark.slow
@given(stream=streams(), buffer_size=st.integers(1, 12), stop=st.integers(0, 30))
@settings(max_examples=300, deadline=None)
def test_a_state_through_json_goes_on_exactly(stream, buffer_size, stop):
    budget, sizes = stream
    packer: Packer[Item] = Packer(budget, buffer_size=buffer_size)
    feed = iter(sizes)
    packs: list[list[Item]] = []
    more = True
    while True:
        if len(packs) == stop:
            waiting, state = packer.waiting, json.loads(json.dumps(packer.state_dict()))
            packer = Packer(budget, buffer_size=buffer_size)
            packer.load_state_dict(state, waiting)
            assert packer.waiting == waiting and json.loads(json.dumps(packer.state_dict())) == state
        while more and not packer.full:
            item = next(feed, None)
            more = item is not None
            if more:
                packer.add(item)
        if not packer.waiting:
            break
        packs.append(packer.pop()[1])
    assert packs == pack_all(sizes, budget, buffer_size=buffer_size)


@pytest.mark.parametrize("policy", PACKERS)
def test_no_fragment_waits_longer_than_the_packer_says(policy):
    rng = random.Random(1)
    packer: Packer[Item] = Packer(Budget(8192, 40), policy=policy, buffer_size=16)
    born, popped, longest, most = {}, 0, 0, 0
    for number in range(4000):
        giant = rng.random() < 0.03
        item = Item(
            (number, 0), rng.randint(7000, 8192) if giant else rng.randint(60, 2500), rng.choice((0, 0, 1, 5, 13))
        )
        while packer.full:
            for done in packer.pop()[1]:
                longest = max(longest, popped - born.pop(done.key))
            popped += 1
        packer.add(item)
        most = max(most, len(packer.waiting))
        born[item.key] = popped
    assert 0 < longest <= 16 + max(16, most)


# -- splitting ---------------------------------------------------------------------------------------------


@st.composite
def records(draw) -> Record:
    spans = []
    for _ in range(draw(st.integers(1, 12))):
        if draw(st.integers(0, 2)) == 0:
            tiles = draw(st.integers(1, 4))
            spans.append(Span(4 * tiles + 2, tiles))
        else:
            spans.append(Span(draw(st.integers(1, 80)), 0, draw(st.booleans())))
    system = spans[0].num_tokens if spans[0].num_tiles == 0 and spans[0].ends_turn else 0
    total = sum(s.num_tokens for s in spans)
    return Record("r", total, sum(s.num_tiles for s in spans), total, tuple(spans), system)


@pytest.mark.slow
@given(
    record=records(),
    tokens=st.integers(24, 120),
    tiles=st.integers(4, 8),
    repeat=st.booleans(),
    exact=st.sampled_from((0, EXACT_FRAGMENTS)),
)
@settings(max_examples=1000, deadline=None)
def test_fragments_join_to_the_sample_and_never_cut_an_image(record, tokens, tiles, repeat, exact):
    budget = Budget(tokens, tiles)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("internvl_pack.packing.split.EXACT_FRAGMENTS", exact)  # 0: as samples of very many fragments
        fragments = split(record, 7, budget, repeat_system_prompt=repeat)
    assert [f.index for f in fragments] == list(range(len(fragments)))
    assert all(f.count == len(fragments) and f.position == 7 for f in fragments)
    assert fragments[0].token_start == fragments[0].tile_start == 0
    assert (fragments[-1].token_stop, fragments[-1].tile_stop) == (record.num_tokens, record.num_tiles)
    for a, b in pairwise(fragments):
        assert (a.token_stop, a.tile_stop) == (b.token_start, b.tile_start)
    largest = max(s.num_tokens if s.num_tiles else 0 for s in record.spans)
    start = tile = 0
    places = {0: (0, False)}  # token position -> tiles before, inside text?
    for span in record.spans:
        if not span.num_tiles:
            places.update({start + k: (tile, k > 0) for k in range(span.num_tokens)})
        start, tile = start + span.num_tokens, tile + span.num_tiles
        places[start] = (tile, False)
    for f in fragments:
        assert f.token_stop > f.token_start, "progress"
        assert budget.fits(f.num_tokens, f.num_tiles)
        assert f.token_start in places and f.token_stop in places, "an image's block is never cut"
        assert f.tile_start == places[f.token_start][0]
        inside_text = f.index > 0 and places[f.token_start][1]
        if largest < tokens:  # an image that takes the whole row leaves no room for a context token
            assert f.num_context_tokens == int(inside_text), "a cut inside text keeps its target"
        assert f.num_prefix_tokens in ((0, record.num_system_tokens) if repeat and f.index else (0,))


@pytest.mark.slow
def test_a_sample_of_a_hundred_thousand_fragments_is_cut_at_turns_in_reach():
    turns = (Span(600), Span(262, 1), Span(6000, ends_turn=True)) * 1000
    whole_turns = Record("r", 6862 * 1000, 1000, 0, turns)
    assert [f.num_tokens for f in split(whole_turns, 0, Budget(8192, 40))] == [6862] * 1000
    fragments = split(Record("r", 8191 * 100_000 + 1), 0, Budget(8192, 40))
    assert len(fragments) == 100_000 and fragments[-1].token_stop == 8191 * 100_000 + 1


@pytest.mark.slow
@given(record=records(), tokens=st.integers(24, 120))
@settings(max_examples=300, deadline=None)
def test_truncation_keeps_the_longest_prefix_that_fits(record, tokens):
    budget = Budget(tokens, 8)
    (fragment,) = split(record, 0, budget, oversize="truncate")
    assert isinstance(fragment, Fragment) and budget.fits(fragment.num_tokens, fragment.num_tiles)
    if record.num_tokens <= tokens and record.num_tiles <= 8:
        assert fragment == whole(0, record.num_tokens, record.num_tiles)
    else:
        assert fragment.token_stop < record.num_tokens


@pytest.mark.parametrize(
    ("oversize", "reason"), [("drop", "oversized_dropped"), ("error", "oversized_error"), ("split", "image_exceeds")]
)
def test_what_cannot_be_kept_leaves_with_its_reason(oversize, reason):
    record = Record("r", 3430, 13, spans=(Span(40), Span(3330, 13), Span(60)))
    with pytest.raises(SampleError, match=reason) as caught:
        split(record, 0, Budget(3000, 99), oversize=oversize)
    if reason == "image_exceeds":
        assert "sample r has an image or video of 3,330 tokens and 13 tiles" in str(caught.value)
        assert "a pack holds 3000 and 99: raise max_packed_tokens above 3330, or " in str(caught.value)
        # What makes a picture smaller depends on the family, which is not known here: both are named.
        assert "max_dynamic_patch" in str(caught.value) and "video_max_pixels" in str(caught.value)


# -- figures on real lengths ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_lengths() -> list[tuple[int, int]]:
    with open(ROOT / "benchmarks" / "real_mix_a.csv", encoding="utf-8") as file:
        return [(int(row["num_tokens"]), int(row["num_tiles"])) for row in csv.DictReader(file)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "tiles", "over_bound"), [(8192, 40, 1.004), (16384, 48, 1.010), (32768, 96, 1.004), (8192, 24, 1.04)]
)
def test_packs_on_real_lengths_are_near_the_bound(real_lengths, tokens, tiles, over_bound):
    budget, bounds = Budget(tokens, tiles), LowerBounds(Budget(tokens, tiles))
    stream = [Item((i, 0), t, v) for i, (t, v) in enumerate(real_lengths) if budget.fits(t, v)]
    for item in stream:
        bounds.add(item.num_tokens, item.num_tiles)
    packs = pack_all(stream, budget)
    assert bounds.best() <= len(packs) <= over_bound * bounds.best()


@pytest.mark.parametrize(("tokens", "tiles"), [(16384, 16384), (16384, 8192)])
def test_thousands_of_small_tiles_a_pack_are_searched_in_steps(real_lengths, tokens, tiles):
    """A tile of one token each, as of native resolution: in either budget near the bound, and within both."""
    budget, bounds = Budget(tokens, tiles), LowerBounds(Budget(tokens, tiles))
    sizes = [(max(t, 256 * v + 20), max(0, 256 * v - i % 37)) for i, (t, v) in enumerate(real_lengths[:3000])]
    stream = [Item((i, 0), t, v) for i, (t, v) in enumerate(sizes) if budget.fits(t, v)]
    for item in stream:
        bounds.add(item.num_tokens, item.num_tiles)
    packs = pack_all(stream, budget)
    assert sorted(k for pack in keys(packs) for k in pack) == [item.key[0] for item in stream]
    assert all(sum(i.num_tokens for i in pack) <= tokens and sum(i.num_tiles for i in pack) <= tiles for pack in packs)
    assert bounds.best() <= len(packs) <= 1.03 * bounds.best()


def test_subset_sums_give_the_nearest_of_the_fullest_rows_first():
    """Against every subset."""
    rng = random.Random(5)
    for _ in range(60):
        choices = [(rng.randint(1, 9), rng.randint(0, 3)) for _ in range(rng.randint(1, 8))]
        sums = SubsetSums(choices, 20, 5)
        reached = {(0, 0)}
        for tokens, tiles in choices:
            reached |= {(t + tokens, v + tiles) for t, v in reached}
        reached = {(t, v) for t, v in reached if t <= 20 and v <= 5}
        wanted, slack = rng.uniform(-1, 7), rng.randint(0, 3)
        top = max(t for t, _ in reached)
        near = sorted((abs(v - wanted), -t, v) for t, v in reached if t >= top - slack)
        found = list(sums.full_rows(slack, wanted))
        assert found[: len(near)] == [(-t, v) for _, t, v in near]
        assert [t for t, _ in found[len(near) :]] == sorted({t for t, _ in reached if t < top - slack}, reverse=True)
        most = {t: max(v for u, v in reached if u == t and v <= 2) for t, v in reached if v <= 2 and t >= top - 6}
        assert list(sums.lower_rows(top, 6, 2)) == sorted(most.items(), reverse=True)
        for row, column in found:
            subset = [choices[place] for place in sums.subset(row, column)]
            assert (sum(t for t, _ in subset), sum(v for _, v in subset)) == (row, column)


def test_lower_bounds_hold_against_the_best_packing_of_small_streams():
    """Exhaustive search over all ways to put up to six samples into packs."""
    rng = random.Random(3)
    for _ in range(150):
        budget = Budget(20, 4)
        sizes = [(rng.randint(1, 20), rng.randint(0, 4)) for _ in range(rng.randint(1, 6))]
        bounds = LowerBounds(budget)
        for size in sizes:
            bounds.add(*size)
        assert bounds.best() <= fewest_packs(sizes, budget)


def fewest_packs(sizes: list[tuple[int, int]], budget: Budget) -> int:
    def search(rest: list[tuple[int, int]], packs: list[tuple[int, int]]) -> int:
        if not rest:
            return len(packs)
        (t, v), after = rest[0], rest[1:]
        options = [search(after, [*packs, (t, v)])]
        for i, (pt, pv) in enumerate(packs):
            if pt + t <= budget.max_tokens and pv + v <= budget.max_tiles:
                options.append(search(after, [*packs[:i], (pt + t, pv + v), *packs[i + 1 :]]))
        return min(options)

    return search(sizes, [])


@pytest.mark.slow
def test_large_samples_find_short_ones_to_go_with():
    """Half of the samples need a partner below half a pack: packs exactly full of short ones would leave them alone."""
    rng = random.Random(0)
    lengths = [rng.randint(1, 4096) for _ in range(3000)]
    packs = pack_all(items(*lengths), Budget(4096, 8))
    greedy = pack_all(items(*lengths), Budget(4096, 8), policy="greedy")
    assert len(packs) <= 1.005 * len(greedy)  # 1.023 where the oldest go first
