"""`--grad_checkpoint auto`: as many layers as fit keep their activations, the others compute them again.

What a layer keeps is measured, not estimated: a full row goes once through the model with every layer checkpointed,
and once with one layer of each kind that is not. The rest is arithmetic: what is free at the peak, over what a layer
keeps. The kind that has most to compute for a byte comes first. The same layers are kept on every rank: with ZeRO-3 a
layer that computes again also gathers again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from internvl_pack.model.flops import flop_counts
from internvl_pack.model.parts import decoder_layers
from internvl_pack.model.sharded import own_part

from .warm_up import forward_and_backward, made_up_row

if TYPE_CHECKING:
    from .trainer import PackTrainer

logger = logging.getLogger(__name__)

# Of the card's memory that stays free: rows differ, and an allocator loses some between blocks.
MARGIN = 0.06


@dataclass(frozen=True)
class Kind:
    """Layers of one kind.

    Attributes:
        layers: how many there are.
        bytes_kept: what one of them keeps of a full row beyond its input.
        flops: operations that one of them computes again where it keeps nothing.
    """

    name: str
    layers: int
    bytes_kept: int
    flops: float


def layers_that_fit(free: int, kinds: Sequence[Kind]) -> dict[str, int]:
    """Layers of each kind that keep their activations, by name.

    Args:
        free: bytes at the peak of a full row with every layer checkpointed.

    >>> kinds = [Kind("vision", 24, 200, 1e9), Kind("decoder", 28, 100, 4e9)]
    >>> layers_that_fit(3000, kinds)
    {'decoder': 28, 'vision': 1}
    """
    kept = {}
    for kind in sorted(kinds, key=lambda k: k.flops / max(1, k.bytes_kept), reverse=True):
        kept[kind.name] = kind.layers if kind.bytes_kept <= 0 else min(kind.layers, max(0, free) // kind.bytes_kept)
        free -= kept[kind.name] * max(0, kind.bytes_kept)
    return kept


def keep_activations(layers: Iterable[Any], count: int) -> None:
    """Let the first `count` layers keep their activations, the others compute them again."""
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number >= count


class CheckpointByMemory(TrainerCallback):
    """Decides when model and optimizer are ready, before the warm-up.

    Args:
        max_tokens, max_tiles: of a full row.
    """

    def __init__(self, trainer: PackTrainer, max_tokens: int, max_tiles: int) -> None:
        self.trainer, self.budget = trainer, (max_tokens, max_tiles)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if args.device.type != "cuda":
            logger.info("checkpointing: every layer, as memory is measured on CUDA devices only")
            return
        trainer, model = self.trainer, self.trainer.packed_model
        tokens, tiles = self.budget
        groups = {"decoder": decoder_layers(model.language_model)}
        if model.tower is not None:
            tiles = min(tiles, tokens // model.tokens_per_tile)
            groups["vision"] = model.tower.layers
        row = made_up_row(tokens, tiles, tokens // 2, model)
        self._tried(row)
        kept_by_none, peak = self._tried(row)  # the first has also compiled
        kinds = []
        for name, layers in groups.items():
            keep_activations(layers, 1)
            self._tried(row)
            kept_by_one = self._tried(row)[0]
            keep_activations(layers, 0)
            kinds.append(
                Kind(name, len(layers), kept_by_one - kept_by_none, self._flops(name, tokens, tiles, len(layers)))
            )
        chosen = layers_that_fit(self._free(peak), kinds)
        counts = trainer.ranks.all_reduce(torch.tensor([chosen[name] for name in groups]), dist.ReduceOp.MIN)
        for count, layers in zip(counts.tolist(), groups.values(), strict=True):
            keep_activations(layers, count)
        peak = self._tried(row)[1]
        what = " and ".join(
            f"{n} of {len(groups[name])} {name} layers" for name, n in zip(groups, counts.tolist(), strict=True)
        )
        total = torch.cuda.get_device_properties(args.device).total_memory
        logger.info(
            "checkpointing: %s keep their activations; a full row peaks at %.1f of %.1f GB",
            what,
            peak / 1e9,
            total / 1e9,
        )

    def _tried(self, row: dict[str, Any]) -> tuple[int, int]:
        """Bytes allocated after forward, and at the peak."""
        device, kept = self.trainer.args.device, []
        torch.cuda.reset_peak_memory_stats(device)
        forward_and_backward(self.trainer, row, lambda: kept.append(torch.cuda.memory_allocated(device)))
        return kept[0], torch.cuda.max_memory_allocated(device)

    def _free(self, peak: int) -> int:
        """Bytes that activations may take beyond a peak of so many."""
        device = self.trainer.args.device
        unused, total = torch.cuda.mem_get_info(device)
        ours = unused + torch.cuda.memory_reserved(device)  # the rest is the driver's, and other processes'
        return ours - peak - int(MARGIN * total) - self._yet_to_come()

    def _yet_to_come(self) -> int:
        """Bytes that a step takes beside forward and backward: buckets of gradients, states not made yet."""
        zero = getattr(self.trainer.model_wrapped, "optimizer", None)
        bucket = getattr(zero, "reduce_bucket_size", 0)
        if bucket:
            return int(bucket) * 2 * (2 if getattr(zero, "overlap_comm", False) else 1)
        return sum(2 * 4 * own_part(p).numel() for p in self.trainer.packed_model.parameters() if p.requires_grad)

    def _flops(self, name: str, tokens: int, tiles: int, layers: int) -> float:
        """Of one layer's forward pass on a full row; attention of a decoder layer left out."""
        counts = flop_counts(self.trainer.packed_model.config)
        return (counts.per_tile * tiles if name == "vision" else counts.per_token * tokens) / 3 / layers
