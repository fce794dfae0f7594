"""Weights on disk: shards read lazily, and written one at a time, without a model around them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError

SHARD_SIZE = "5GB"
_SINGLE = ("model.safetensors", "pytorch_model.bin")


class LazyWeights(Mapping[str, Tensor]):
    """The tensors of a checkpoint's folder by name, each mapped from its file when it is asked for.

    Safetensors, or else `.bin` files (read with `weights_only`), in one file or several with an index.

    Args:
        prefix: of the names to take; the other tensors are passed over.

    Raises:
        UserError: no weights there, a file that the index names is missing, or one that cannot be read.
    """

    def __init__(self, folder: str | Path, prefix: str = "") -> None:
        self.folder = Path(folder)
        self._open: dict[str, Any] = {}
        self._file_of = {n: file for file in self._files() for n in self._names(file) if n.startswith(prefix)}

    def __getitem__(self, name: str) -> Tensor:
        """Backed by the file: not to be written to; the memory it takes is the system's to take back."""
        weights = self._open[self._file_of[name]]
        return weights[name] if isinstance(weights, dict) else weights.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def _files(self) -> list[str]:
        for single in _SINGLE:
            index = self.folder / f"{single}.index.json"
            if index.is_file():
                try:
                    files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
                except (ValueError, KeyError, AttributeError) as error:
                    raise UserError(f"{index}: not an index of weights ({error})") from error
                if missing := [file for file in files if not (self.folder / file).is_file()]:
                    raise UserError(f"{self.folder}: {named(missing)} of {index.name} is not there")
                return files
            if (self.folder / single).is_file():
                return [single]
        raise UserError(f"{self.folder}: no weights there ({' or '.join(_SINGLE)}, or several with an index)")

    def _names(self, file: str) -> list[str]:
        path = self.folder / file
        try:
            if path.suffix == ".safetensors":
                from safetensors import safe_open

                self._open[file] = safe_open(path, framework="pt")
            else:
                self._open[file] = _load_bin(path)
            return list(self._open[file].keys())
        except Exception as error:  # a damaged file shows as many kinds of error
            raise UserError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from error


def indexed_names(folder: str | Path) -> list[str]:
    """Names of the weights by the index beside them, which is read without them; none where they are in one file."""
    for single in _SINGLE:
        index = Path(folder, f"{single}.index.json")
        if index.is_file():
            return list(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}))
    return []


def _load_bin(path: Path) -> dict[str, Tensor]:
    """Tensors alone: anything else that a pickle could hold is refused by torch."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # a file of before torch 1.6 cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True)


def write_weights(
    folder: str | Path, shapes: Mapping[str, Tensor], make: Callable[[str], Tensor], max_shard_size: str
) -> None:
    """Write safetensors, with an index where there are several; one shard is in memory at a time.

    Args:
        shapes: the tensors, on any device ("meta" does): their names, sizes and dtypes.
        make: gives a tensor by its name.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    plan = split_torch_state_dict_into_shards(dict(shapes), max_shard_size=max_shard_size)
    for file, names in plan.filename_to_tensors.items():
        save_file({n: make(n).contiguous() for n in names}, folder / file, metadata={"format": "pt"})
    for stale in folder.glob("model*.safetensors"):  # of an earlier save with other shards
        if stale.name not in plan.filename_to_tensors:
            stale.unlink()
    index = folder / "model.safetensors.index.json"
    if plan.is_sharded:
        content = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    else:
        index.unlink(missing_ok=True)


def named(names: list[str]) -> str:
    """The first of many names, and how many more."""
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + rest
