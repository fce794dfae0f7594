"""Figures of an epoch's packs, and what is said of them."""

from __future__ import annotations

import pytest

from internvl_pack.estimate.figures import PackingEstimate, RunEstimate

FULL = {
    "packs": 100,
    "samples": 1200,
    "tokens": 100 * 16000,
    "tiles": 3000,
    "budget": (16384, 48),
    "bounds": {"tokens": 99, "tiles": 60},
    "steps": 25,
    "packs_per_step": 4,
    "num_ranks": 2,
    "rank_efficiency": 0.987,
}


@pytest.mark.parametrize(
    ("num_epochs", "steps"), [(1, 10), (2, 21), (3, 32), (0.5, 5), (1.5, 16), (1.25, 13), (2.1, 23), (0.0, 0)]
)
def test_the_steps_of_parts_of_epochs(num_epochs, steps):
    epochs = tuple(PackingEstimate(**{**FULL, "steps": n}) for n in (10, 11))
    assert RunEstimate(epochs, exact=True).total_steps(num_epochs) == steps


TROUBLES = [
    ({}, None),
    ({"tiles": 4700, "tokens": 100 * 9000, "samples": 470}, "tiles fill rows first (10.0 in a sample of 1,915 tokens)"),
    ({"tiles": 4700, "tokens": 100 * 9000, "samples": 470}, "--num_images_expected from 48 to about 86"),
    (
        {"samples": 110, "tokens": 100 * 10000, "tiles": 300},
        "samples have 9,091 of a row's 16,384 tokens: raise --max_packed_tokens",
    ),
    ({"samples": 130, "tokens": 100 * 14000}, "1.3 samples a pack, token fill 85%"),
    ({"tokens": 100 * 12000, "policy": "next_fit"}, "next_fit ends a row"),
    ({"tokens": 100 * 12000}, "few samples fit what is left of a row"),
    (
        {"steps": 2, "packs_per_step": 64, "num_ranks": 64},
        "the data is small for 64 packs a step on 64 ranks: 100 packs make 2 steps, in which 22% of the places stay "
        "empty: lower ranks x --gradient_accumulation_steps x --per_device_train_batch_size to 10 or less",
    ),
    ({"packs": 1, "steps": 1, "packs_per_step": 1, "tokens": 900, "samples": 3, "tiles": 3}, "fits into 1 row: "),
    (
        {"packs": 325, "samples": 130, "split": 130, "tokens": 27430, "tiles": 130, "budget": (100, 20)},
        "100% of the samples exceed a row of 100 tokens and 20 tiles and are cut, and parts may have nothing to train: "
        "raise --max_packed_tokens to 4,096 or more",
    ),
    (
        {"samples": 470, "split": 94, "tokens": 100 * 14000, "tiles": 4300},
        "20% of the samples exceed a row of 16,384 tokens and 48 tiles and are cut, and parts may have nothing to "
        "train: raise --num_images_expected to 96 or more",
    ),
    (
        {"packs": 3, "steps": 3, "packs_per_step": 1, "budget": (1024, 12), "samples": 24, "tokens": 1137, "tiles": 30},
        "tiles fill rows first (1.2 in a sample of 47 tokens): raise --num_images_expected from 12 to about 28",
    ),
    (
        {"packs": 3, "steps": 3, "packs_per_step": 1, "samples": 24, "tokens": 36000, "tiles": 30},
        "token fill 73%, because all of the data fits into 3 rows: train on more samples",
    ),
    (
        {"packs": 3, "steps": 3, "packs_per_step": 1, "samples": 24, "tokens": 24000, "tiles": 100},
        "token fill 49%, because all of the data fits into 3 rows: train on more samples",
    ),
]


@pytest.mark.parametrize(("changes", "expected"), TROUBLES)
def test_packing_that_does_little_is_reported_with_its_reason_and_what_to_change(changes, expected):
    trouble = PackingEstimate(**{**FULL, **changes}).trouble()
    if expected is None:
        assert trouble is None
    else:
        assert trouble is not None and expected in trouble and "\n" not in trouble


def test_one_line_says_what_packing_will_do():
    assert PackingEstimate(**FULL, exact=True).line() == (
        "packing: rows of 16,384 tokens and 48 tiles; an epoch has 25 steps of 4 packs (counted), 1.000 times the "
        "least possible; 100 packs, 12.0 samples a pack, token fill 97.7%, tile fill 62.5%, ranks 98.7% even"
    )
    estimated = PackingEstimate(**{**FULL, "num_ranks": 1}, num_planned=2000).line()
    assert "has about 25 steps of 4 packs (estimated from 2,000 samples)" in estimated and "even" not in estimated


def test_packs_that_hold_something_else_differ():
    estimated = PackingEstimate(**FULL)
    assert not estimated.differs(PackingEstimate(**{**FULL, "packs": 102}))
    assert estimated.differs(PackingEstimate(**{**FULL, "tokens": 100 * 15000}))
    assert estimated.differs(PackingEstimate(**{**FULL, "samples": 1000}))
