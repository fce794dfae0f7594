"""What a picture costs in a tower that sees all of it: the square of its tiles, in packs, parts and tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from internvl_pack.config import PackingConfig
from internvl_pack.estimate.epochs import follow_plan
from internvl_pack.estimate.simulate import LengthTable
from internvl_pack.packing.balance import UNIT, Balance
from internvl_pack.packing.budget import Budget
from internvl_pack.packing.cost import CostModel
from internvl_pack.packing.split import split
from internvl_pack.plan.groups import StepPlan
from internvl_pack.plan.online import OnlinePacks
from internvl_pack.records import Record, Span, whole
from internvl_pack.survey.table import PLAIN, Measured, SurveyKey, SurveyTable, crowd_of, crowds_of, tile_pairs

TEXT = {"hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144, "num_attention_heads": 16}
TEXT |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
VISION = {"hidden_size": 1024, "depth": 24, "intermediate_size": 4096, "num_heads": 16, "patch_size": 16}
VISION |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "deepstack_visual_indexes": [5, 11, 17]}
QWEN3_VL_2B = {"text_config": TEXT, "vision_config": VISION}


def test_what_a_picture_costs_counted_by_hand():
    cost = CostModel.from_config(QWEN3_VL_2B)
    assert cost.picture == 6 * 24 * 2 * 1024 * 4 * 4, "4 patches a tile, of which each sees those of every tile"
    windows = VISION | {"window_size": 128, "fullatt_block_indexes": [7, 15, 23]}
    assert CostModel.from_config({"text_config": TEXT, "vision_config": windows}).picture == cost.picture // 8
    internvl = CostModel.from_name("1B")
    assert internvl.picture == 0 and internvl.numbers() == [internvl.token, internvl.attention, internvl.tile]
    assert cost.of(10, 6, 0, 20) - cost.of(10, 6) == 20 * cost.picture
    balance = Balance(Budget(64, 64), CostModel(token=2, attention=0, tile=1, picture=3))
    assert balance.sizes(whole(0, 10, 6, 20)) == (10, 6, 30 * UNIT, 100)


@pytest.mark.parametrize("tiles", [[5], [7, 7], [1] * 8, [1200, 30], [4, 900, 17, 80], [1] * 150])
def test_a_table_has_the_pairs_of_any_pictures_to_a_tenth(tiles, tmp_path):
    exact, crowd = sum(n * n for n in tiles), crowd_of(tiles)
    table = SurveyTable(tmp_path, SurveyKey("some", 9, {}))
    table.put([3], [Measured(sum(tiles) + 9, sum(tiles), PLAIN, None, crowd)])
    found = table.lengths(np.array([3]))
    assert (found.verdicts[0], found.crowds[0]) == (PLAIN, crowd)
    kept = tile_pairs(int(found.tiles[0]), int(found.crowds[0]))
    assert kept == pytest.approx(exact, rel=0.1)
    if len(set(tiles)) == 1 and len(tiles) in (1, 2, 8):
        assert kept == exact and crowds_of(np.array([len(tiles)])) == crowd
    assert crowd_of([]) == 0 == tile_pairs(7, 0)


def test_parts_of_a_sample_have_the_pairs_of_their_own_pictures():
    spans = (Span(10), Span(22, 20), Span(10), Span(42, 40), Span(10))
    record = Record("a", 94, 60, spans=spans, num_tile_pairs=1)
    assert [(f.num_tiles, f.num_tile_pairs) for f in split(record, 0, Budget(50, 64))] == [
        (20, 400),
        (40, 1600),
        (0, 0),
    ]
    plain = replace(record, num_tile_pairs=0)
    assert [f.num_tile_pairs for f in split(plain, 0, Budget(50, 64))] == [0, 0, 0]


@pytest.mark.slow
def test_packs_of_pictures_of_many_sizes_are_even_by_what_they_cost():
    """Counted as if each had 256 tiles, the dearest pack of a step keeps the others waiting for longer."""
    rng = np.random.default_rng(0)
    tiles = np.exp(rng.normal(5.5, 1.3, 3000)).clip(64, 3500).astype(np.int64)
    tiles[rng.random(3000) < 0.3] = 0
    tokens = tiles + rng.integers(40, 600, 3000)
    crowds = np.where(tiles > 0, 1, 0).astype(np.uint8)
    exact = CostModel.from_config(QWEN3_VL_2B)
    flat = replace(exact, tile=exact.tile + 256 * exact.picture, picture=0)
    config = PackingConfig(max_packed_tokens=4096, num_images_expected=4096)
    found = {}
    for name, cost in (("exact", exact), ("flat", flat)):
        lengths = LengthTable(tokens, tiles, crowds=crowds)
        plan = StepPlan(OnlinePacks(lengths, lengths.mixture(), config, cost), 8, seed=0, epoch=0)
        followed = follow_plan(plan, config.budget(), exact, num_ranks=8, policy="subset_sum")
        found[name] = followed.rank_efficiency
    assert found["exact"] > 0.97 and found["flat"] < 0.95, found
