"""A finite, unshuffled, packed pass over held-out data: each sample once, the same figures on any ranks.

The loss of every sample is summed in float64 by its id and the sums are added up in the order of ids, so
the figures do not depend on ranks, workers or budgets beyond what float32 rounds inside a row. A sample
longer than the budget is split, and its later parts see less context: give budgets that hold the samples.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from internvl_pack.batch.collate import NO_SAMPLES, row_boundaries
from internvl_pack.model.packed import PackedOutput
from internvl_pack.stream.loader import PackLoader

from .step_sync import Batch, StepSync

logger = logging.getLogger(__name__)

MAX_NAMED = 20  # samples that are named in the log

SampleSums = dict[str, tuple[float, int]]  # sample id -> (sum of cross-entropy in nats, number of targets)


def sample_losses(loader: PackLoader, forward: Callable[[Batch], PackedOutput], sync: StepSync) -> SampleSums:
    """One pass over the loader, of what this rank reads; all ranks call it together.

    Args:
        forward: the model in evaluation, called equally often on every rank: sharded weights need all of them.
    """
    sums: SampleSums = {}
    with torch.no_grad():
        for batch in sync.batches(loader):
            outputs = forward(batch)
            assert outputs.target_losses is not None and outputs.target_positions is not None, "given with labels"
            add_sample_losses(sums, batch, outputs.target_losses, outputs.target_positions)
    return sums


def add_sample_losses(sums: SampleSums, batch: Batch, losses: torch.Tensor, positions: torch.Tensor) -> None:
    """Add a row's target losses (M,) at flat positions (M,) to the sums of their samples."""
    cu_seqlens = row_boundaries(batch).to(torch.int64).cpu()
    segments = torch.bucketize(positions.cpu(), cu_seqlens, right=True) - 1
    count = len(cu_seqlens) - 1
    totals = torch.zeros(count, dtype=torch.float64).index_add_(0, segments, losses.double().cpu())
    targets = torch.bincount(segments, minlength=count)
    for sample_id, total, number in zip(batch["sample_ids"], totals.tolist(), targets.tolist(), strict=True):
        if sample_id not in NO_SAMPLES:
            _add(sums, sample_id, total, number)


def merge_sums(parts: Iterable[SampleSums]) -> SampleSums:
    """The ranks' sums as one: fragments of a sample may have been on several."""
    merged: SampleSums = {}
    for part in parts:
        for sample_id, (total, number) in part.items():
            _add(merged, sample_id, total, number)
    return merged


def _add(sums: SampleSums, sample_id: str, total: float, number: int) -> None:
    before = sums.get(sample_id, (0.0, 0))
    sums[sample_id] = (before[0] + total, before[1] + number)


def figures(sums: SampleSums, datasets: Sequence[str], prefix: str = "eval") -> dict[str, float]:
    """Mean loss a token and a sample, and a token by dataset.

    Returns:
        {prefix}_loss: nats a supervised token; {prefix}_loss_per_sample: mean over samples of their
        mean; {prefix}_loss_{dataset}; {prefix}_samples; {prefix}_tokens.
    """
    ordered = [(sample_id, *sums[sample_id]) for sample_id in sorted(sums) if sums[sample_id][1]]
    out = {
        f"{prefix}_loss": _mean((total, number) for _, total, number in ordered),
        f"{prefix}_loss_per_sample": _mean((total / number, 1) for _, total, number in ordered),
        f"{prefix}_samples": float(len(ordered)),
        f"{prefix}_tokens": float(sum(number for _, _, number in ordered)),
    }
    for name in datasets:
        own = ((total, number) for sample, total, number in ordered if _dataset_of(sample, datasets) == name)
        out.setdefault(f"{prefix}_loss_{name}", _mean(own))
    return out


def log_left_out(events: Sequence[Mapping[str, Any]]) -> None:
    """Say which held-out samples are in no figure, and why: the first of them by name."""
    for event in events[:MAX_NAMED]:
        what = (event["id"], event["reason"], event["source"], event["detail"])
        logger.warning("held-out sample %s is left out: %s: %s: %s", *what)
    if len(events) > MAX_NAMED:
        logger.warning("and %d more held-out samples", len(events) - MAX_NAMED)


def _dataset_of(sample_id: str, datasets: Sequence[str]) -> str | None:
    """The dataset whose name an id begins with: of `web` and `web/en`, the longer one that fits."""
    return max((name for name in datasets if sample_id.startswith(f"{name}/")), key=len, default=None)


def _mean(pairs: Iterable[tuple[float, int]]) -> float:
    pairs = list(pairs)
    number = sum(n for _, n in pairs)
    return math.fsum(total for total, _ in pairs) / number if number else 0.0
