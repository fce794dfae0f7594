"""Presets for tests: planned in a line, loaders of them and of the stream, and what tells batches apart."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers.factory import TINY
from internvl_pack.config import PackingConfig
from internvl_pack.ledger import Losses
from internvl_pack.plan.preset import Preset
from internvl_pack.plan.write_preset import plan_preset
from internvl_pack.samples import Samples
from internvl_pack.stream.dataset import PackedDataset
from internvl_pack.stream.loader import PackLoader, build_loader
from internvl_pack.stream.preset_dataset import PresetDataset

if "INTERNVL_PACK_CACHE" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="internvl-pack-tests-")
    atexit.register(_cache.cleanup)
    os.environ["INTERNVL_PACK_CACHE"] = _cache.name

CONFIG = PackingConfig(max_packed_tokens=300, num_images_expected=9, max_buffer_size=8, seed=3)
TENSORS = ("input_ids", "labels", "position_ids", "loss_weight", "cu_seqlens", "pixel_values", "image_offsets")


def planned(meta: Path, out: Path, tokenizer: Any, config: PackingConfig = CONFIG, **options: Any) -> Preset:
    return plan_preset(out, Samples.from_meta(meta, tokenizer, TINY), config, **options)


def stream_loader(
    meta: Path, tokenizer: Any, config: PackingConfig = CONFIG, rank: int = 0, world_size: int = 1, **options: Any
) -> PackLoader:
    dataset = PackedDataset.from_meta(meta, tokenizer, config, encode=TINY, rank=rank, world_size=world_size)
    return build_loader(dataset, **options)


def preset_loaders(
    preset: Path, meta: Path | None, tokenizer: Any, ranks: int = 1, config: PackingConfig = CONFIG, **options: Any
) -> list[PackLoader]:
    return [
        build_loader(
            PresetDataset.open(preset, meta, tokenizer, config, encode=TINY, rank=rank, world_size=ranks), **options
        )
        for rank in range(ranks)
    ]


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
    for loader in loaders:
        for batch in loader:
            step = steps.setdefault(batch["progress"].step, [])
            step += zip(batch["sample_ids"], batch["fragments"], strict=True)
    return [sorted(segment for segment in steps[step] if segment[0] != "<filler>") for step in sorted(steps)]


def saved(loaders: Sequence[PackLoader]) -> dict[str, Any]:
    """The run's state as a checkpoint has it."""
    state = json.loads(json.dumps(loaders[0].state_dict()))
    return state | {"losses": Losses.merged([loader.losses.state_dict() for loader in loaders]).state_dict()}


def resume(loaders: Sequence[PackLoader], state: dict[str, Any]) -> None:
    for loader in loaders:
        loader.load_state_dict(state)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
