"""Losses of preference pairs: DPO, and MPO as the weighted sum of three of them.

With c and r the log-probabilities of a pair's chosen and rejected answer, sums over their tokens, less those that the
reference gives them; beta the strength; n the tokens of an answer:

    sigmoid       -log sigmoid(beta (c - r))                               Rafailov et al., 2305.18290
    sigmoid_norm  the same of c / n_chosen - r / n_rejected                a mean over tokens instead of the sum
    bco_pair      -log sigmoid(beta c - delta) - log sigmoid(delta - beta r)     Jung et al., 2404.04656
    sft           minus the log-probability of the chosen answer, a token

The first three are means over the pairs of an optimizer step, the last over its chosen tokens. A micro-batch gives its
sums over those numbers of the whole step: its parts add up, whatever the packing, the ranks and the accumulation. For
the same reason delta, the mean of all rewards (beta c and beta r) so far, is that of the steps before: a `RunningMean`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LOSS_TYPES = ("sigmoid", "sigmoid_norm", "bco_pair")


class BranchSums(NamedTuple):
    """Of each segment of a row (of a padded batch: of each row) the sum over its trained tokens, and their number.

    Attributes:
        logprobs: float64 (S,), with their gradient where the targets' have one.
        num_tokens: int64 (S,).
    """

    logprobs: Tensor
    num_tokens: Tensor


def branch_sums(target_logprobs: Tensor, target_positions: Tensor, boundaries: Tensor) -> BranchSums:
    """Sums by segment, in float64: their order does not show.

    Args:
        target_logprobs, target_positions: (M,), as `PackedOutput` has them with `return_logprobs`.
        boundaries: (S+1,) of the segments: `cu_seqlens` of a packed row.
    """
    ends = boundaries[1:].to(target_positions.device, torch.int64)
    segment = torch.bucketize(target_positions, ends, right=True)
    zeros = torch.zeros(len(ends), dtype=torch.float64, device=target_positions.device)
    sums = zeros.index_add(0, segment, target_logprobs.double())
    return BranchSums(sums, torch.bincount(segment, minlength=len(ends)))


class Pairs(NamedTuple):
    """The pairs of a micro-batch: columns are the chosen and the rejected answer.

    Attributes:
        logprobs: (P, 2), of the model that is trained.
        reference: (P, 2), of the model that it began with, without a gradient.
        num_tokens: (P, 2), of the answers.
    """

    logprobs: Tensor
    reference: Tensor
    num_tokens: Tensor


class PairLosses(NamedTuple):
    """What a micro-batch adds to the loss of its step, and what is logged of it.

    Attributes:
        loss: scalar, with its gradient.
        sums: by name a detached sum over the pairs: `rewards_chosen`, `rewards_rejected`, `accuracy` (pairs whose
            chosen answer has the larger reward), `num_pairs`, `sft` and `num_chosen_tokens` (over those tokens), and a
            loss by its name, unweighted.
    """

    loss: Tensor
    sums: dict[str, Tensor]


@dataclass(frozen=True)
class PreferenceLoss:
    """A weighted sum of the losses above.

    Attributes:
        weights: of each loss by its name, one of LOSS_TYPES.
        beta: how strongly differences from the reference count; rewards are beta times them.
        label_smoothing: probability that a pair's answers are the wrong way round, of sigmoid and sigmoid_norm.
        sft_weight: of the chosen answers' own loss.
    """

    weights: Mapping[str, float]
    beta: float = 0.1
    label_smoothing: float = 0.0
    sft_weight: float = 0.0

    def of(self, pairs: Pairs, delta: float | Tensor, num_pairs: float, num_chosen_tokens: float) -> PairLosses:
        """The part of one micro-batch in the loss of its step.

        Args:
            pairs: of the micro-batch; there may be none.
            delta: the mean of all rewards before this step.
            num_pairs, num_chosen_tokens: of the whole step, on all ranks; divided by the ranks where gradients are
                averaged over them afterwards.
        """
        rewards = self.beta * (pairs.logprobs - pairs.reference)
        totals = {}
        for name in self.weights:
            if name == "bco_pair":
                totals[name] = bco_pair(rewards, delta).sum()
            else:
                scaled = rewards / pairs.num_tokens if name == "sigmoid_norm" else rewards
                totals[name] = sigmoid(scaled[:, 0] - scaled[:, 1], self.label_smoothing).sum()
        sft = -pairs.logprobs[:, 0].sum()
        loss = self.sft_weight * sft / num_chosen_tokens
        for name, total in totals.items():
            loss = loss + self.weights[name] * total / num_pairs
        with torch.no_grad():
            chosen, rejected = rewards.detach().unbind(1)
            sums = {
                "rewards_chosen": chosen.sum(),
                "rewards_rejected": rejected.sum(),
                "accuracy": (chosen > rejected).sum(),
                "num_pairs": rewards.new_tensor(len(rewards)),
                "sft": sft.detach(),
                "num_chosen_tokens": pairs.num_tokens[:, 0].sum(),
            }
        return PairLosses(loss, sums | {name: total.detach() for name, total in totals.items()})


def sigmoid(margins: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """margins (P,): by how much each chosen answer's reward is larger; the losses (P,)."""
    return -(1 - label_smoothing) * F.logsigmoid(margins) - label_smoothing * F.logsigmoid(-margins)


def bco_pair(rewards: Tensor, delta: float | Tensor) -> Tensor:
    """rewards (P, 2) of the chosen and the rejected answers; the losses (P,)."""
    return -F.logsigmoid(rewards[:, 0] - delta) - F.logsigmoid(delta - rewards[:, 1])


class RunningMean:
    """The mean of all rewards so far, both answers of every pair; 0 before the first. Kept where they are made."""

    def __init__(self, device: torch.device | str = "cpu", state: Sequence[float] = (0.0, 0.0)) -> None:
        self._state = torch.tensor(state, dtype=torch.float64, device=device)  # their sum and their number

    @property
    def value(self) -> Tensor:
        """A scalar."""
        return self._state[0] / self._state[1].clamp(min=1)

    def add(self, sums: Mapping[str, Tensor]) -> None:
        """A step's pairs, from `PairLosses.sums`; those of a step with one that is not finite are left out."""
        step = torch.stack([sums["rewards_chosen"] + sums["rewards_rejected"], 2 * sums["num_pairs"]])
        self._state += torch.where(step.isfinite().all(), step, torch.zeros_like(step))

    def state(self) -> list[float]:
        """The sum and the number, for a `RunningMean` that goes on."""
        return self._state.tolist()
