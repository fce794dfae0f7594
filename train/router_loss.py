"""`--router_loss_coef`: the balance loss of a mixture of experts, over the whole optimizer step.

For each layer, with E experts, of which every token goes to k, over all T real tokens of a step:

    E * sum over experts of (tokens sent there / T) * (sum of its probabilities / T)

averaged over the layers; k where experts are used alike. Counts and probabilities are summed over micro-batches and
ranks before they meet: of a mean of each sample's, row's or rank's loss every one would be another number for another
mode of packing. Pads count nowhere.

The counts must be known before the first micro-batch's backward pass. With one micro-batch a step they are those of its
forward; with gradient accumulation all micro-batches of the step are run forward once more before, without gradients
and without the head: about a quarter more time. Random draws (stochastic depth) are the same both times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


class RouterLoss:
    """The balance loss, a step at a time.

    Args:
        coefficient: what it is multiplied by.
        processes: ranks over which gradients are averaged afterwards.
    """

    def __init__(self, coefficient: float, processes: int) -> None:
        self.coefficient, self.processes = coefficient, processes
        self._batches: Sequence[Any] = ()
        self._num_tokens = 0.0
        self._counts: torch.Tensor | None = None
        self._last: torch.Tensor | None = None

    def begin_step(self, batches: Sequence[Any], num_tokens: float) -> None:
        """A step of these micro-batches of this rank, with so many real tokens over all ranks."""
        self._batches, self._num_tokens, self._counts, self._last = batches, max(1.0, num_tokens), None, None

    def before_forward(self, model: Any, prepare: Callable[[Any], Any]) -> None:
        """Before each micro-batch's forward: the first of several counts for all of them.

        Args:
            model: as it is called in training, a `PackedModel` with `balance_routers` within.
            prepare: micro-batch to keyword arguments.
        """
        if len(self._batches) < 2 or self._counts is not None:
            return
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.no_grad(), torch.random.fork_rng(devices):
            counts = sum(model(**prepare(batch), routing_only=True).router_counts for batch in self._batches)
        self._counts = self._over_ranks(counts)

    def of(self, outputs: Any) -> torch.Tensor:
        """What one micro-batch adds to the loss that is differentiated; the parts add up over ranks and micro-batches.

        Multiplied by the ranks, over which gradients are averaged.
        """
        if self._counts is None:
            self._counts = self._over_ranks(outputs.router_counts)
        layers, experts = self._counts.shape
        part = (self._counts * outputs.router_probabilities).sum() * (experts / layers / self._num_tokens**2)
        self._last = part.detach() if self._last is None else self._last + part.detach()
        return self.coefficient * self.processes * part

    def last(self) -> float | None:
        """The last step's, over all ranks; every rank asks."""
        return None if self._last is None else float(self._over_ranks(self._last))

    def _over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        total = values.detach().clone()
        if self.processes > 1:
            dist.all_reduce(total)
        return total
