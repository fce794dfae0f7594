"""Figures of the optimizer steps: what rows held, how fast, and how evenly ranks worked. docs/reports.md lists them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from internvl_pack.config import PackingConfig
from internvl_pack.errors import UserError
from internvl_pack.model.flops import FlopCounts, flop_counts, peak_flops, trained_parts
from internvl_pack.model.packed import PackedModel

logger = logging.getLogger(__name__)

WARM_UP_STEPS = 2  # steps left out of the speed: allocation, compilation, first reads


class StepMetrics:
    """Figures of the steps since the last log, summed over data ranks; `..._per_gpu` is divided by all ranks.

    Args:
        config: of the packs.
        max_tiles: tiles that a row may hold.
        model: the packed model, for its operations.
        world_size: ranks, those that share rows included.

    Attributes:
        total: sums over the whole run, kept in checkpoints.
        here: the same since this process began or went on.
        step_times: (end of the step in seconds, its real tokens).
    """

    def __init__(
        self, config: PackingConfig, max_tiles: int, model: PackedModel, device: torch.device, world_size: int
    ) -> None:
        self._config = config
        self._max_tiles = max_tiles
        self._on_cuda = device.type == "cuda"
        self._peak_flops = peak_flops(torch.cuda.get_device_name(device)) if self._on_cuda else None
        try:
            self._flops = flop_counts(model.config, **trained_parts(model))
        except UserError as error:  # of a family that is tried
            logger.warning("operations are not counted, and no mfu is told: %s", error)
            self._flops, self._peak_flops = FlopCounts(), None
        self._world_size = world_size
        self._now: dict[str, float] = {}
        self._sums: dict[str, float] = {}
        self._steps = 0
        self._started = time.perf_counter()
        self.total: dict[str, float] = {}
        self.here: dict[str, float] = {}
        self.step_times: list[tuple[float, float]] = []

    def capacity(self, batches: Sequence[dict[str, Any]]) -> float:
        """Tokens that the step's rows could have held."""
        if self._config.packing:
            return float(sum(b["num_packs"] for b in batches) * self._config.max_packed_tokens)
        return float(sum(b["num_tokens"] for b in batches))

    def cost(self, batches: Sequence[dict[str, Any]]) -> float:
        """What a data rank computes in a step: floating-point operations (docs/performance.md has the formula)."""
        return float(sum(self._flops.of(b) for b in batches))

    def fills(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Shares of the budgets that rows held, and samples a row, by sums over steps."""
        packs = sums.get("num_packs", 0.0)
        return {
            "token_fill": sums.get("num_real_tokens", 0.0) / max(1.0, sums.get("capacity", 0.0)),
            "tile_fill": sums.get("num_tiles", 0.0) / max(1.0, packs * self._max_tiles),
            "samples_per_pack": sums.get("num_samples", 0.0) / max(1.0, packs),
        }

    def begin_step(self, sums: dict[str, float], waited: float) -> None:
        """A step of these figures over all ranks (step_sync.py), whose data was waited for so many seconds."""
        self._now = sums | {"data_wait_s": waited}

    def end_step(self) -> None:
        """The step is made: it counts."""
        for counts in (self._sums, self.total, self.here):
            for key, value in self._now.items():
                counts[key] = counts.get(key, 0.0) + value
        self._steps += 1
        self.step_times.append((time.perf_counter(), self._now["num_real_tokens"]))

    def since_last_log(self) -> dict[str, float]:
        """Means of the steps since the last call; nothing where there were none."""
        if not self._steps:
            return {}
        elapsed = time.perf_counter() - self._started
        sums, steps = self._sums, self._steps
        self._sums, self._steps, self._started = {}, 0, time.perf_counter()
        flops_per_s = sums["flops"] / elapsed / self._world_size
        logs = {
            "tokens_per_s": sums["num_real_tokens"] / elapsed,
            "tokens_per_s_per_gpu": sums["num_real_tokens"] / elapsed / self._world_size,
            "samples_per_s": sums["num_samples"] / elapsed,
            "tiles_per_s": sums["num_tiles"] / elapsed,
            **self.fills(sums),
            "loss_tokens_per_step": sums["num_loss_tokens"] / steps,
            "data_wait": sums["data_wait_s"] / elapsed,
            "rank_balance": sums["balance"] / steps,
            "tflops_per_s_per_gpu": flops_per_s / 1e12,
        }
        if self._peak_flops is not None:
            logs["mfu"] = flops_per_s / self._peak_flops
        if self._on_cuda:
            logs["memory_peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        return logs


def tokens_per_second(step_times: Sequence[tuple[float, float]], warm_up: int = WARM_UP_STEPS) -> float | None:
    """Real tokens of all ranks per second of training, without set-up and the first steps.

    Args:
        step_times: (end of the step in seconds, its real tokens), in order.

    Returns:
        None where fewer than two steps are left to measure.
    """
    if len(step_times) < warm_up + 2:
        warm_up = 1
    timed = step_times[warm_up:]
    if not timed or len(step_times) < 2:
        return None
    seconds = timed[-1][0] - step_times[warm_up - 1][0]
    return sum(tokens for _, tokens in timed) / seconds if seconds > 0 else None
