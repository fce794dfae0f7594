"""Steps of the trainer's objective of pairs, without the trainer."""

from __future__ import annotations

import torch

from internvl_pack.model.loss.preference import PreferenceLoss
from train.objective import FrozenCopy, PairObjective
from train.ranks import Ranks


def moved(packed, seed=2):
    """Another model: the same weights and noise."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in packed.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return packed


def objective_of(loss: PreferenceLoss, reference) -> PairObjective:
    return PairObjective(loss, FrozenCopy(reference), Ranks(), torch.device("cpu"))


def step(objective: PairObjective, packed, batch) -> torch.Tensor:
    """The loss of a step of one packed batch, its gradients in the model; the running mean goes on."""
    packed.zero_grad()
    objective.begin_step(batch["num_pairs"], batch["num_chosen_tokens"])
    loss, _ = objective.of(packed, batch)
    loss.backward()
    objective.on_step_end(None, None, None)
    return loss.detach()


def trained_gradients(got, expected):
    """Those of parameters that the other side has, too: a tower that saw no image has zeros, there none."""
    assert not any(got[name].any() for name in got.keys() - expected.keys())
    return {name: got[name] for name in expected}
