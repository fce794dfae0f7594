"""Loaders for tests, a rank each, their steps and states, and what tells batches apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers.factory import TINY
from internvl_pack.config import PackingConfig
from internvl_pack.ledger import Losses
from internvl_pack.stream.dataset import PackedDataset
from internvl_pack.stream.loader import PackLoader, build_loader

TENSORS = ("input_ids", "labels", "position_ids", "loss_weight", "cu_seqlens", "pixel_values", "image_offsets")


def stream_loader(
    meta: Path, tokenizer: Any, rank: int = 0, world_size: int = 1, *, config: PackingConfig, **options: Any
) -> PackLoader:
    dataset = PackedDataset.from_meta(meta, tokenizer, config, encode=TINY, rank=rank, world_size=world_size)
    return build_loader(dataset, **options)


def stream_loaders(meta: Path, tokenizer: Any, ranks: int = 1, **options: Any) -> list[PackLoader]:
    return [stream_loader(meta, tokenizer, rank, ranks, **options) for rank in range(ranks)]


def segments_of(batch: dict[str, Any]) -> list[tuple[str, tuple[int, int]]]:
    """(sample id, fragment) of the segments that are of samples."""
    pairs = zip(batch["sample_ids"], batch["fragments"], strict=True)
    return [(name, fragment) for name, fragment in pairs if not name.startswith("<")]


def fingerprint(batch: dict[str, Any]) -> str:
    """Ids and every tensor of a batch."""
    told = hashlib.sha256(json.dumps([batch["sample_ids"], batch["fragments"]]).encode())
    for key in TENSORS:
        told.update(batch[key].numpy().tobytes())
    return told.hexdigest()[:16]


def steps_of(loaders: Sequence[PackLoader], stop: int | None = None) -> list[list[str]]:
    """The batches of each optimizer step as ranks in lockstep train them, until `stop` steps are done."""
    iterators = [iter(loader) for loader in loaders]
    steps: list[list[str]] = []
    batches: list[str] = []
    while stop is None or len(steps) < stop:
        found = [next(each, None) for each in iterators]
        if found[0] is None:
            assert found == [None] * len(loaders) and not batches, "all ranks end together, with a whole step"
            break
        batches += [fingerprint(batch) for batch in found if batch is not None]
        if found[0]["progress"].ends_step:
            assert all(batch is not None and batch["progress"].ends_step for batch in found)
            steps.append(batches)
            batches = []
    return steps


def samples_of(loaders: Sequence[PackLoader]) -> list[list[tuple[str, Any]]]:
    """Of each rest of an epoch, step after step, sorted: (sample id, fragment) of the step's segments."""
    steps: dict[int, list[tuple[str, Any]]] = {}
    batches = []  # of each rank
    for loader in loaders:
        batches.append([])
        for batch in loader:
            batches[-1].append(batch["progress"].step)
            steps.setdefault(batch["progress"].step, []).extend(segments_of(batch))
    assert all(each == batches[0] for each in batches), "ranks differ in their batches"
    return [sorted(steps[step]) for step in sorted(steps)]


def saved(loaders: Sequence[PackLoader]) -> dict[str, Any]:
    """The run's state as a checkpoint has it."""
    state = json.loads(json.dumps(loaders[0].state_dict()))
    return state | {"losses": Losses.merged([loader.losses.state_dict() for loader in loaders]).state_dict()}


def resume(loaders: Sequence[PackLoader], state: dict[str, Any]) -> None:
    for loader in loaders:
        loader.load_state_dict(state)
