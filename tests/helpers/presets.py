"""Presets for tests: planned in a line, and loaders of them."""

from __future__ import annotations

import atexit
import os
import tempfile
from pathlib import Path
from typing import Any

from helpers.factory import TINY
from internvl_pack.config import PackingConfig
from internvl_pack.plan.preset import Preset
from internvl_pack.plan.write_preset import plan_preset
from internvl_pack.samples import Samples
from internvl_pack.stream.loader import PackLoader, build_loader
from internvl_pack.stream.preset_dataset import PresetDataset

if "INTERNVL_PACK_CACHE" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="internvl-pack-tests-")
    atexit.register(_cache.cleanup)
    os.environ["INTERNVL_PACK_CACHE"] = _cache.name

CONFIG = PackingConfig(max_packed_tokens=300, num_images_expected=9, max_buffer_size=8, seed=3)


def planned(meta: Path, out: Path, tokenizer: Any, config: PackingConfig = CONFIG, **options: Any) -> Preset:
    return plan_preset(out, Samples.from_meta(meta, tokenizer, TINY), config, **options)


def preset_loaders(
    preset: Path, meta: Path | None, tokenizer: Any, ranks: int = 1, config: PackingConfig = CONFIG, **options: Any
) -> list[PackLoader]:
    return [
        build_loader(
            PresetDataset.open(preset, meta, tokenizer, config, encode=TINY, rank=rank, world_size=ranks), **options
        )
        for rank in range(ranks)
    ]


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
