"""One small all-reduce a step, on the CPU, before the step: what all ranks have to know of each other.

    loss_weight            sum of the step's loss weights: the normaliser, exact over ranks and accumulation
    has_data, failed       whether any rank has a batch, and whether any could not read on: all then end together
    capacity, num_...      figures of the metrics
    flops, balance         operations of all data ranks, and the mean rank's share of the dearest one's

It is the only collective that training on packs adds to the optimizer's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from internvl_pack.stream.loader import PackLoader

from .metrics import StepMetrics
from .ranks import Ranks

OF_PAIRS = ("num_pairs", "num_chosen_tokens")  # in batches of pairs
COUNTS = ("num_samples", "num_packs", "num_real_tokens", "num_tokens", "num_tiles", "num_loss_tokens", *OF_PAIRS)
_SUMMED = ("loss_weight", "has_data", "failed", "capacity", *COUNTS)

Batch = dict[str, Any]  # of packed_collate_fn


class StepSync:
    """Reads steps so that all ranks make each of them, or fail, together.

    Args:
        over_all_ranks: normalise by the loss weights of all ranks; False: by each rank's own.
    """

    def __init__(self, ranks: Ranks, metrics: StepMetrics, *, over_all_ranks: bool = True) -> None:
        self.ranks, self.metrics, self.over_all_ranks = ranks, metrics, over_all_ranks

    def next_step(self, batches: Iterator[Batch]) -> tuple[list[Batch], dict[str, float]]:
        """This rank's micro-batches of the next step, and the figures of all ranks; all call it together.

        Returns:
            No micro-batches, and `has_data` 0, at the end of the epoch.

        Raises:
            UserError: bad data on any rank.
            RuntimeError: a rank cannot read on for another reason.
        """
        step: list[Batch] = []
        error: Exception | None = None
        try:
            for batch in batches:
                step.append(batch)
                if batch["progress"].ends_step:
                    break
        except Exception as problem:  # whatever it is: the others wait
            error = problem
        sums = self._reduce(step, failed=error is not None)
        if sums["failed"]:
            self.ranks.fail_together(error)
        return step, sums

    def batches(self, loader: PackLoader) -> Iterator[Batch]:
        """One pass over a loader, equally long on every rank: one without a batch left gets fillers.

        Raises:
            UserError, RuntimeError: as `next_step`.
        """
        batches = iter(loader)
        while True:
            batch, error = None, None
            try:
                batch = next(batches, None)
            except Exception as problem:
                error = problem
            flags = self.ranks.all_reduce(torch.tensor([batch is not None, error is not None], dtype=torch.int64))
            more, failed = flags.tolist()
            if failed:
                self.ranks.fail_together(error)
            if not more:
                return
            yield loader.filler_batch() if batch is None else batch

    def normalizer(self, sums: dict[str, float], key: str = "loss_weight") -> float:
        """What each rank divides its weighted loss by, or another sum.

        Gradients are averaged over all ranks afterwards, and ranks that share a row each have a part of its sum: hence
        the division. A step in which nothing is supervised has a zero sum: any normaliser gives zero.
        """
        if self.over_all_ranks:
            weights, averaged = sums[key], self.ranks.world_size
        else:
            weights, averaged = sums[f"own_{key}"], self.ranks.sequence_parallel_size
        return weights / averaged if weights > 0 else 1.0

    def _reduce(self, batches: list[Batch], *, failed: bool) -> dict[str, float]:
        """Sums over the data ranks, and the dearest one's modelled cost against the mean."""
        ranks = self.ranks
        own = {key: float(sum(b.get(key, 0) for b in batches)) for key in COUNTS}
        own["loss_weight"] = sum(float(b["loss_weight"].sum(dtype=torch.float64)) for b in batches)
        own["has_data"] = float(bool(batches))
        own["capacity"] = self.metrics.capacity(batches)
        vector = torch.zeros(len(_SUMMED) + ranks.data_ranks, dtype=torch.float64)
        if ranks.is_group_leader:  # what a row holds counts once, however many share it
            vector[: len(_SUMMED)] = torch.tensor([own.get(key, 0.0) for key in _SUMMED], dtype=torch.float64)
            vector[len(_SUMMED) + ranks.data_rank] = self.metrics.cost(batches)
        vector[_SUMMED.index("failed")] = failed
        values = ranks.all_reduce(vector).tolist()
        sums, costs = dict(zip(_SUMMED, values, strict=False)), values[len(_SUMMED) :]
        sums["flops"] = sum(costs)
        sums["balance"] = sum(costs) / len(costs) / max(costs) if max(costs) > 0 else 1.0
        sums |= {f"own_{key}": own[key] for key in ("loss_weight", *OF_PAIRS)}
        return sums
