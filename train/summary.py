"""`train_summary.json` and the lines at the end of a run: what was trained, how full rows were, how fast."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from internvl_pack.ledger import Ledger

FILE_NAME = "train_summary.json"
LAST_STEPS = 10  # steps whose mean is the last loss: single steps differ by what is in them
WARM_UP_STEPS = 2  # steps left out of the speed: allocation, compilation, first reads


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


def summarise(trainer: Any, ledger: Ledger, *, zero_stage: int, attn_kernel: str) -> dict[str, Any]:
    """The run's figures as JSON values. All counts are over all ranks; fills are shares of the budgets used."""
    total = trainer.metrics.total
    max_tokens, max_tiles = trainer.loader.budget
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    packs = total.get("num_packs", 0.0)
    return {
        "packed": trainer.loader.packing_mode != "padded",
        "packing": trainer.loader.packing_mode,
        "ranks": trainer.ranks.processes,
        "sequence_parallel_size": trainer.ranks.sequence_parallel_size,
        "zero_stage": zero_stage,
        "device": str(trainer.args.device.type),
        "dtype": "bfloat16" if trainer.args.bf16 else "float16" if trainer.args.fp16 else "float32",
        "attn_kernel": attn_kernel,
        "steps": trainer.state.global_step,
        "steps_over_bound": steps_over_bound(trainer),
        "steps_empty": trainer.steps_without_samples,
        "epochs": trainer.earlier_epochs + len(trainer.epoch_ledgers),
        "max_packed_tokens": max_tokens,
        "num_images_expected": max_tiles,
        "packs": int(packs),
        "num_real_tokens": int(total.get("num_real_tokens", 0)),
        "num_tokens": int(total.get("num_tokens", 0)),
        "num_loss_tokens": int(total.get("num_loss_tokens", 0)),
        "num_tiles": int(total.get("num_tiles", 0)),
        "token_fill": _share(total.get("num_real_tokens", 0), total.get("capacity", 0)),
        "tile_fill": _share(total.get("num_tiles", 0), packs * max_tiles),
        "samples_per_pack": _share(total.get("num_samples", 0), packs),
        "samples_in": ledger.samples_in,
        "samples_packed": ledger.samples_packed,
        "samples_dropped": ledger.samples_dropped,
        "samples_quarantined": ledger.samples_quarantined,
        "samples_waiting": ledger.samples_waiting,
        "loss_first": losses[0] if losses else None,
        "loss_last": statistics.fmean(losses[-LAST_STEPS:]) if losses else None,
        "tokens_per_s": tokens_per_second(trainer.metrics.step_times),
        "ledger": ledger.state_dict(),
    }


def steps_over_bound(trainer: Any) -> float | None:
    """Optimizer steps of the whole epochs against those that full packs would take; None before an epoch has ended.

    The bound is that of the sums of real tokens and tiles: ceil(packs / packs a step) for each epoch.
    """
    epochs = trainer.earlier_epochs + len(trainer.epoch_ledgers)
    total, (max_tokens, max_tiles) = trainer.metrics.total, trainer.loader.budget
    full = max(total.get("num_real_tokens", 0) / max_tokens, total.get("num_tiles", 0) / max(1, max_tiles))
    if not epochs or not full:
        return None
    return trainer.state.global_step / (epochs * math.ceil(full / epochs / trainer.loader.packs_per_step))


def write(summary: dict[str, Any], output_dir: str | Path) -> Path:
    path = Path(output_dir) / FILE_NAME
    path.write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def lines(summary: dict[str, Any], ledger: Ledger) -> list[str]:
    """The summary as people read it at the end of a run."""
    speed = summary["tokens_per_s"]
    way = f"packed ({summary['packing']})" if summary["packed"] else "padded"
    shared = summary["sequence_parallel_size"]
    ranks = f"{summary['ranks']} ranks" + (f", {shared} a row" if shared > 1 else "")
    return [
        f"{summary['steps']} optimizer steps on {ranks}, {way}, {summary['packs']:,} rows of "
        f"{summary['samples_per_pack']:.1f} samples, token fill {summary['token_fill']:.1%}, "
        f"tile fill {summary['tile_fill']:.1%}" + (f", {speed:,.0f} useful tokens/s" if speed else ""),
        *ledger.lines(),
    ]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
