"""Samples and images in memory, for the tests of encoding."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image

from internvl_pack.errors import SampleError
from internvl_pack.sources.base import RawSample
from internvl_pack.sources.meta import DatasetSpec

SPEC = DatasetSpec(name="test")


@dataclass(frozen=True)
class BytesRef:
    """An image reference over bytes."""

    name: str
    data: bytes

    def read(self) -> bytes:
        return self.data

    def head(self, num_bytes: int) -> bytes:
        return self.data[:num_bytes]

    def open(self) -> io.BytesIO:
        return io.BytesIO(self.data)


def smooth_pixels(width: int, height: int, channels: int = 3) -> np.ndarray:
    """(height, width, channels) uint8: gradients and a soft ring, like a photograph's large forms."""
    y, x = np.mgrid[0:height, 0:width]
    ring = 127 * np.sin(np.hypot(x - width / 3, y - height / 2) / max(width, height) * 20)
    planes = [(x * 255 / max(1, width - 1)), (y * 255 / max(1, height - 1)), 128 + ring, 255 - ring / 2 - 64]
    return np.clip(np.stack(planes[:channels], axis=2), 0, 255).astype(np.uint8)


def file_of(image: Image.Image | np.ndarray, kind: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(out, kind, **options)
    return out.getvalue()


@lru_cache
def jpeg(width: int = 60, height: int = 40) -> bytes:
    return file_of(smooth_pixels(width, height), "JPEG", quality=90)


def raw_sample(conversation, images: dict[str, bytes] | None = None, **fields) -> RawSample:
    """A sample whose images lie in memory. `conversation`: pairs (from, value), or the field itself."""
    if isinstance(conversation, list) and conversation and isinstance(conversation[0], tuple):
        conversation = [{"from": role, "value": value} for role, value in conversation]
    images = images or {}
    data = {"conversations": conversation, **({"image": list(images)} if images else {}), **fields}

    def resolve(name: str) -> BytesRef:
        if name not in images:
            raise SampleError("image_missing", name)
        return BytesRef(name, images[name])

    return RawSample("test/0", None, "test.jsonl:line 1", data, resolve)


def case_samples(shared_dir, name: str) -> dict[str, RawSample]:
    """The rows of a file of hostile cases, by their ids."""
    folder = shared_dir / "cases"

    def resolve(image: str) -> BytesRef:
        return BytesRef(image, (folder / "images" / image).read_bytes())

    rows = [json.loads(line) for line in (folder / "jsonl" / name).read_text(encoding="utf-8").splitlines()]
    return {
        row["id"]: RawSample(f"test/{number}", row["id"], f"{name}:line {number + 1}", row, resolve)
        for number, row in enumerate(rows)
    }


def expected(tokenizer, *runs: str | list[str]) -> tuple[list[int], list[int]]:
    """(ids, labels) of runs of text, each read by itself; a run that is a list is trained."""
    ids, labels = [], []
    for run in runs:
        text = run[0] if isinstance(run, list) else run
        found = tokenizer(text, add_special_tokens=False).input_ids
        ids += found
        labels += found if isinstance(run, list) else [-100] * len(found)
    return ids, labels


def assert_branches_are_the_answers(tree, alone):
    """Every branch with the prefix before it has the ids and labels that its answer has alone."""
    prefix = tree.record.num_prefix_tokens
    at = prefix
    assert len(tree.branches) == len(alone)
    for branch, one in zip(tree.branches, alone, strict=True):
        part = slice(at, at + branch.num_tokens)
        for mine, theirs in ((tree.input_ids, one.input_ids), (tree.labels, one.labels)):
            np.testing.assert_array_equal(np.concatenate([mine[:prefix], mine[part]]), theirs)
        assert tree.labels[at] == -100 and branch.num_loss_tokens == one.record.num_loss_tokens
        at += branch.num_tokens
    assert at == tree.record.num_tokens == len(tree.input_ids)
    assert sum(span.num_tokens for span in tree.record.spans) == at
    assert tree.images == alone[0].images and tree.record.num_tiles == alone[0].record.num_tiles


def trained_text(tokenizer, encoded) -> list[str]:
    """The runs of trained tokens, decoded."""
    trained = encoded.labels != -100
    borders = np.flatnonzero(np.diff(np.concatenate(([False], trained, [False])).astype(int)))
    return [tokenizer.decode(encoded.input_ids[a:b]) for a, b in borders.reshape(-1, 2)]
