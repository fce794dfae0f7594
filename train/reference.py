"""Stored log-probabilities of all answers, by the model that a run begins with: a table in a folder.

    reference.json        of which model, how samples are encoded, and in which numbers
    finished              where the command that writes it has gone through all data
    part-00000.bin        a file a rank; an answer's 16 bytes of key and its sum of log-probabilities, float64

The key is that of `packed_collate_fn`: token ids, what is trained, and pixels. `internvl-pack reference` writes it
(write_reference.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from internvl_pack.checkpoints.internvl_format_files import local_folder
from internvl_pack.errors import UserError
from internvl_pack.stream.dataset import PackedDataset

if TYPE_CHECKING:
    from .arguments import ModelArguments

RECORD = np.dtype([("key", "V16"), ("logprob", "<f8")])
MARKS = "reference.json"
FINISHED = "finished"
BLOCKS, BLOCK = 64, 1 << 16  # of a file of weights that tell it from another


class Table:
    """Stored log-probabilities by key.

    Args:
        folder: that `internvl-pack reference` wrote.
        marks: of this run, see `marks_of`.

    Raises:
        UserError: no such folder, one of another model or of other options, or one that is not finished.
    """

    def __init__(self, folder: str | Path, marks: dict[str, Any]) -> None:
        self.folder = Path(folder)
        check_marks(self.folder, marks)
        if not (self.folder / FINISHED).exists():
            raise UserError(
                f"--reference_path {folder}: it is not finished: run internvl-pack reference again, it goes on where "
                "it was stopped"
            )
        self._known = {record["key"].tobytes(): float(record["logprob"]) for record in read_parts(self.folder)}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, keys: Sequence[str]) -> list[float]:
        """The log-probabilities of answers by their keys; 0 for "", which is no answer.

        Raises:
            UserError: one is not there.
        """
        try:
            return [self._known[bytes.fromhex(key)] if key else 0.0 for key in keys]
        except KeyError:
            raise UserError(
                f"--reference_path {self.folder}: an answer of this run is not in it: the data has changed, or "
                "data_augment draws its pixels anew; run internvl-pack reference with the options of this run"
            ) from None


def marks_of(model_args: ModelArguments, dataset: PackedDataset, dtype: torch.dtype) -> dict[str, Any]:
    """What must be the same where a table is written and where it is read, as JSON values.

    Raises:
        UserError: a model that is put together of two, whose projector is new in each run.
    """
    if model_args.model_name_or_path is None:
        raise UserError("--reference_path needs --model_name_or_path: a new projector is another one in each run")
    encode = json.loads(json.dumps(dataset.encoder.fingerprint()))
    encode.pop("objective", None)  # dpo and mpo hold answers against the same
    dtype_name = str(dtype).removeprefix("torch.")
    return {"model": weights_mark(local_folder(model_args.model_name_or_path)), "dtype": dtype_name, **encode}


def weights_mark(folder: Path) -> str:
    """Of a checkpoint's config and weights: names, sizes, and blocks all over each file."""
    mark = blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = path.stat().st_size
        mark.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            for place in np.linspace(0, max(0, size - BLOCK), BLOCKS).astype(np.int64).tolist():
                file.seek(place)
                mark.update(file.read(BLOCK))
    return mark.hexdigest()


def check_marks(folder: Path, marks: dict[str, Any]) -> None:
    """Compare a table's with those of this run.

    Raises:
        UserError: there is no table, or it is of another model or of other options.
    """
    try:
        found = dict(json.loads((folder / MARKS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise UserError(f"--reference_path {folder}: no table there: internvl-pack reference writes it") from None
    for name in {**found, **marks}:
        if found.get(name) != marks.get(name):
            what = "another model" if name == "model" else f"another {name} ({found.get(name)}, now {marks.get(name)})"
            raise UserError(f"--reference_path {folder}: it was made with {what}: write one for this run, elsewhere")


def read_parts(folder: Path) -> np.ndarray:
    """All records of a table; what a stopped rank wrote of its last one is left out."""
    parts = [np.zeros(0, dtype=RECORD)]
    for path in sorted(folder.glob("part-*.bin")):
        content = path.read_bytes()
        parts.append(np.frombuffer(content[: len(content) - len(content) % RECORD.itemsize], dtype=RECORD))
    return np.concatenate(parts)
