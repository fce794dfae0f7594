"""The losses of preference pairs against their formulas written out, and their parts against the whole."""

from __future__ import annotations

import math

import pytest
import torch

from internvl_pack.model.loss.preference import Pairs, PreferenceLoss, RunningMean, branch_sums

BETA, SMOOTHING, DELTA = 0.3, 0.1, -0.7
MPO = {"sigmoid": 0.8, "bco_pair": 0.2}


def some_pairs(count=7):
    torch.manual_seed(0)
    logprobs = (-torch.rand(count, 2, dtype=torch.float64) * 30).requires_grad_()
    return Pairs(logprobs, -torch.rand(count, 2, dtype=torch.float64) * 30, torch.randint(1, 40, (count, 2)))


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def by_hand(name: str, chosen: float, rejected: float, lengths: tuple[int, int]) -> float:
    """chosen, rejected: log-probabilities less the reference's."""
    if name == "bco_pair":
        return -log_sigmoid(BETA * chosen - DELTA) - log_sigmoid(-(BETA * rejected - DELTA))
    if name == "sigmoid_norm":
        chosen, rejected = chosen / lengths[0], rejected / lengths[1]
    margin = BETA * (chosen - rejected)
    return -log_sigmoid(margin) * (1 - SMOOTHING) - log_sigmoid(-margin) * SMOOTHING


@pytest.mark.parametrize("weights", [{"sigmoid": 1.0}, {"sigmoid_norm": 1.0}, {"bco_pair": 1.0}, MPO], ids="+".join)
def test_a_step_is_the_mean_over_pairs_and_chosen_tokens(weights):
    pairs = some_pairs()
    loss = PreferenceLoss(weights, BETA, SMOOTHING, sft_weight=0.5)
    chosen_tokens = int(pairs.num_tokens[:, 0].sum())
    out = loss.of(pairs, DELTA, len(pairs.logprobs), chosen_tokens)

    ratios = (pairs.logprobs - pairs.reference).tolist()
    lengths = pairs.num_tokens.tolist()
    means = {
        name: sum(by_hand(name, *ratio, n) for ratio, n in zip(ratios, lengths, strict=True)) / len(ratios)
        for name in weights
    }
    sft = -sum(c for c, _ in pairs.logprobs.tolist()) / chosen_tokens
    assert out.loss.item() == pytest.approx(sum(w * means[n] for n, w in weights.items()) + 0.5 * sft, rel=1e-12)
    assert {n: out.sums[n].item() / 7 for n in weights} == pytest.approx(means, rel=1e-12)
    assert out.sums["sft"].item() / chosen_tokens == pytest.approx(sft, rel=1e-12)
    assert out.sums["rewards_chosen"].item() == pytest.approx(BETA * sum(c for c, _ in ratios), rel=1e-12)
    assert out.sums["rewards_rejected"].item() == pytest.approx(BETA * sum(r for _, r in ratios), rel=1e-12)
    assert out.sums["accuracy"].item() == sum(c > r for c, r in ratios)


def test_parts_of_a_step_add_up_with_their_gradients():
    pairs = some_pairs()
    loss = PreferenceLoss(MPO, BETA, SMOOTHING, sft_weight=1.0)
    step = (DELTA, 7, float(pairs.num_tokens[:, 0].sum()))
    whole = loss.of(pairs, *step)
    (expected,) = torch.autograd.grad(whole.loss, pairs.logprobs)
    parts = [
        loss.of(Pairs(*(values[rows] for values in pairs)), *step) for rows in (slice(0, 3), slice(3, 7), slice(0, 0))
    ]
    total = sum(part.loss for part in parts)
    (gradient,) = torch.autograd.grad(total, pairs.logprobs)
    assert total.item() == pytest.approx(whole.loss.item(), rel=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)
    for name, value in whole.sums.items():
        assert sum(part.sums[name].item() for part in parts) == pytest.approx(value.item(), rel=1e-12), name


def test_sums_are_those_of_each_segment():
    logprobs = torch.tensor([-1.0, -2.0, -4.0, -8.0], requires_grad=True)
    sums, counts = branch_sums(logprobs, torch.tensor([1, 2, 7, 8]), torch.tensor([0, 2, 5, 7, 9], dtype=torch.int32))
    assert sums.tolist() == [-1.0, -2.0, 0.0, -12.0] and counts.tolist() == [1, 1, 0, 2]
    (gradient,) = torch.autograd.grad(sums @ torch.tensor([1.0, 2, 3, 4], dtype=torch.float64), logprobs)
    assert gradient.tolist() == [1, 2, 4, 4]


def test_the_running_mean_is_of_all_rewards_so_far():
    mean, steps = RunningMean(), []
    for total, pairs in ((3.0, 1), (-1.0, 3), (float("nan"), 2)):
        assert mean.value == (sum(t for t, _ in steps) / sum(2 * n for _, n in steps) if steps else 0)
        found = {"rewards_chosen": total - 1, "rewards_rejected": 1.0, "num_pairs": float(pairs)}
        mean.add({name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()})
        steps.append((total, pairs))
    assert mean.value == 0.25 and RunningMean(state=mean.state()).state() == [2.0, 8.0]
