"""Exact, resumable sequence packing for vision-language training.

    from internvl_pack import PackedDataset, PackingConfig, build_loader

    dataset = PackedDataset.from_meta("meta.json", tokenizer, PackingConfig(max_packed_tokens=8192))
    for batch in build_loader(dataset, num_workers=4):
        ...

Names are loaded when they are first used: the packing core works without torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batch.collate import packed_collate_fn, padded_collate_fn
    from .batch.in_batch import in_batch_collate_fn
    from .checkpoints.encoding import encode_config_of
    from .config import PackingConfig
    from .encode.chat import ChatML, Frame, Framed, register_template
    from .encode.config import EncodeConfig
    from .encode.sample import Encoder
    from .errors import SampleError, UserError
    from .estimate.epochs import estimate_epochs
    from .sources import ImageRef, RawSample, Source, register_source
    from .sources.hf import DatasetSource
    from .stream.dataset import PackedDataset
    from .stream.loader import PackLoader, build_loader
    from .stream.preset_dataset import PresetDataset

__version__ = "0.1.0"

_HOMES = {
    "packed_collate_fn": "batch.collate",
    "padded_collate_fn": "batch.collate",
    "PackingConfig": "config",
    "PackedDataset": "stream.dataset",
    "EncodeConfig": "encode.config",
    "Encoder": "encode.sample",
    "encode_config_of": "checkpoints.encoding",
    "SampleError": "errors",
    "UserError": "errors",
    "PackLoader": "stream.loader",
    "build_loader": "stream.loader",
    "packed_collator": "stream.loader",
    "PresetDataset": "stream.preset_dataset",
    "in_batch_collate_fn": "batch.in_batch",
    "ChatML": "encode.chat",
    "Frame": "encode.chat",
    "Framed": "encode.chat",
    "estimate_epochs": "estimate.epochs",
    "register_template": "encode.chat",
    "DatasetSource": "sources.hf",
    "ImageRef": "sources",
    "RawSample": "sources",
    "Source": "sources",
    "register_source": "sources",
}

__all__ = [
    "ChatML",
    "DatasetSource",
    "EncodeConfig",
    "Encoder",
    "Frame",
    "Framed",
    "ImageRef",
    "PackLoader",
    "PackedDataset",
    "PackingConfig",
    "PresetDataset",
    "RawSample",
    "SampleError",
    "Source",
    "UserError",
    "build_loader",
    "encode_config_of",
    "estimate_epochs",
    "in_batch_collate_fn",
    "packed_collate_fn",
    "packed_collator",
    "padded_collate_fn",
    "register_source",
    "register_template",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _find_training() -> None:
    """`internvl_pack.train` is the folder `train` of a checkout; an installed package has it inside."""
    here = Path(__file__).resolve().parent
    beside = here.parent / "train"
    if (beside / "finetune.py").is_file() and not (here / "train").exists():
        spec = importlib.util.spec_from_file_location(
            f"{__name__}.train", beside / "__init__.py", submodule_search_locations=[str(beside)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules[spec.name] = globals()["train"] = found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)


_find_training()
