"""Weights of the loss, and its normalisation over a whole optimizer step."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest
import torch

from internvl_pack.batch.loss_weights import IGNORE_INDEX, normalized, token_weights
from internvl_pack.errors import UserError

# Two ranks, two accumulation steps: per step the samples as (losses of the targets, which are supervised).
ORACLE = {
    "rank0": [
        [([4, 2, 1], [0, 1, 1]), ([8], [1])],
        [([1, 1, 1, 1, 1], [0, 0, 0, 0, 1])],
    ],
    "rank1": [
        [([6, 6], [0, 0])],
        [([2, 2, 2, 2], [0, 1, 1, 1]), ([3, 5], [0, 1])],
    ],
}
EXPECTED = {"token": float(Fraction(23, 8)), "sample": 3.5, "square": 3.186557}


def sums_of(step, loss_reduction):
    """(sum of w * ce, sum of w) of one rank's micro-batch."""
    weighted = total = 0.0
    for losses, supervised in step:
        labels = np.where(np.array(supervised) == 1, 7, IGNORE_INDEX)
        weights = token_weights(labels, loss_reduction)
        weighted += float((weights * np.array(losses)).sum())
        total += float(weights.sum())
    return weighted, total


@pytest.mark.parametrize("loss_reduction", EXPECTED)
def test_two_ranks_and_two_steps_give_the_loss_worked_by_hand(loss_reduction):
    steps = [sums_of(step, loss_reduction) for rank in ORACLE.values() for step in rank]
    normalizer = sum(total for _, total in steps)
    # As in training: each rank divides its micro-batches by (normalizer / ranks), ranks are averaged.
    per_rank = [steps[:2], steps[2:]]
    losses = [sum(normalized(weighted, normalizer / 2) for weighted, _ in rank) for rank in per_rank]
    assert sum(losses) / 2 == pytest.approx(EXPECTED[loss_reduction], abs=1e-6)


def test_the_example_is_the_published_one(shared_dir):
    vector = json.loads((shared_dir / "cases" / "vectors" / "loss.json").read_text())
    assert vector["data"] == json.loads(json.dumps(ORACLE))
    for key, name in (("token", "token_average"), ("sample", "sample_average"), ("square", "square_average")):
        assert (
            f"{EXPECTED[key]:.6f}" in vector["expected"][name]
            or str(Fraction(EXPECTED[key])) in vector["expected"][name]
        )


@pytest.mark.parametrize(
    ("loss_reduction", "num_targets", "weight"),
    [
        ("token", None, 1.0),
        ("sample", None, 1 / 2),
        ("square", None, 2**-0.5),
        ("sample", 8, 1 / 8),
        ("square", 16, 1 / 4),
    ],
)
def test_a_fragment_weighs_by_its_whole_sample(loss_reduction, num_targets, weight):
    labels = [IGNORE_INDEX, 5, IGNORE_INDEX, 6]
    for array in (np.array(labels), torch.tensor(labels)):
        weights = token_weights(array, loss_reduction, num_targets)
        assert str(weights.dtype).endswith("float32")
        assert weights.tolist() == pytest.approx([0.0, weight, 0.0, weight])


def test_nothing_supervised_weighs_nothing_and_its_loss_is_zero():
    weights = token_weights(np.array([IGNORE_INDEX, IGNORE_INDEX]), "sample", 0)
    assert weights.tolist() == [0.0, 0.0]
    assert normalized(0.0, 0.0) == 0.0
    assert normalized(torch.tensor(0.0), torch.tensor(0.0)).item() == 0.0


def test_mistakes_are_named():
    with pytest.raises(UserError, match="loss_reduction 'mean' is unknown: use token, sample, square"):
        token_weights(np.array([1]), "mean")
    with pytest.raises(ValueError, match="2 supervised targets of a sample that has 1"):
        token_weights(np.array([1, 2]), "token", 1)
