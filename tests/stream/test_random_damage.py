"""1,000 random cuts and bit flips of good files, read to the last pixel: no crash, no hang, no neighbour lost."""

from __future__ import annotations

import io
import json
import random
import tarfile

import pytest
from helpers.encode_samples import file_of, smooth_pixels
from helpers.factory import TINY, write_meta

from internvl_pack import Encoder, PackedDataset, PackingConfig, UserError, build_loader
from internvl_pack.samples import Samples
from internvl_pack.sources import load_meta
from internvl_pack.survey.validate import Checker, validate

CASES = 250  # of each of the four kinds
ROWS = 6
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def encoder(tokenizer) -> Encoder:
    return Encoder(tokenizer, TINY)


def hurt(rng: random.Random, data: bytes) -> tuple[bytes, int, int]:
    """(cut or with one bit flipped, first and last + 1 byte that may differ)."""
    at = rng.randrange(len(data))
    if rng.random() < 0.5:
        return data[:at], at, len(data)
    flipped = bytearray(data)
    flipped[at] ^= 1 << rng.randrange(8)
    return bytes(flipped), at, at + 1


def picture(kind: str, seed: int) -> bytes:
    pixels = smooth_pixels(60 + seed, 50)
    return file_of(pixels, kind, **({"progressive": seed % 2 == 1} if kind == "JPEG" else {}))


def record(row: int, image: str) -> bytes:
    turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": f"Number {row}."}]
    return json.dumps({"id": f"r{row}", "image": image, "conversations": turns}).encode()


def verdicts(meta, encoder) -> tuple[dict[str, str | None], dict[str, str]]:
    """({good sample ids: own id}, {bad ones: reason}) by the validator, pixels decoded."""
    samples = Samples.from_specs(load_meta(meta), encoder)
    checker = Checker(samples, decode=True)
    bad = {str(sample.sample_id): sample.reason for _, part in validate(checker) for sample in part}
    rows = [(source, row) for source in samples.sources for row in range(len(source))]
    good = {i: s.read(r).own_id for s, r in rows if (i := s.sample_id(r)) not in bad}
    return good, bad


def check_training(meta, encoder, good: dict[str, str | None], bad: dict[str, str]) -> None:
    """What the loader delivers is what the validator calls good."""
    dataset = PackedDataset(Samples.from_specs(load_meta(meta), encoder), config=PackingConfig(max_packed_tokens=300))
    loader = build_loader(dataset)
    delivered = [i for batch in loader for i in batch["sample_ids"] if not i.startswith("<")]
    assert sorted(delivered) == sorted(good)
    assert sorted(event["reason"] for event in loader.take_events()) == sorted(bad.values())
    loader.ledger.check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_images(tmp_path, encoder, kind):
    rng = random.Random(kind)
    pictures = [picture(kind, row) for row in range(ROWS)]
    for row, data in enumerate(pictures):
        (tmp_path / f"{row}.img").write_bytes(data)
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(record(row, f"{row}.img") for row in range(ROWS)))
    meta = write_meta(tmp_path, {"set": {"root": ".", "annotation": "rows.jsonl"}})
    for case in range(CASES):
        row = rng.randrange(ROWS)
        damaged, start, stop = hurt(rng, pictures[row])
        (tmp_path / f"{row}.img").write_bytes(damaged)
        good, bad = verdicts(meta, encoder)
        assert set(good) >= {f"set/{other}" for other in range(ROWS) if other != row}
        if stop - start > 1 or kind == "PNG":
            assert set(bad) == {f"set/{row}"}, f"{len(pictures[row])} bytes, damaged from {start} to {stop}"
        assert all(reason.startswith("image_") for reason in bad.values())
        if case % 10 == 0:
            check_training(meta, encoder, good, bad)
        (tmp_path / f"{row}.img").write_bytes(pictures[row])


@pytest.mark.slow
def test_annotation_files(tmp_path, encoder):
    rng = random.Random("jsonl")
    (tmp_path / "a.img").write_bytes(picture("JPEG", 0))
    meta = write_meta(tmp_path, {"set": {"root": ".", "annotation": "rows.jsonl"}})
    records = [record(row, "a.img") for row in range(ROWS)]
    content = b"\n".join(records) + b"\n"
    starts = [sum(len(r) + 1 for r in records[:row]) for row in range(ROWS)]
    for case in range(CASES):
        damaged, start, stop = hurt(rng, content)
        (tmp_path / "rows.jsonl").write_bytes(damaged)
        try:
            good, bad = verdicts(meta, encoder)
        except UserError:
            assert start == 0, "only the first byte tells another kind of file"
            continue
        untouched = {
            f"r{row}"
            for row, first in enumerate(starts)
            if stop <= first - 1 or (first == 0 and stop <= 0) or first + len(records[row]) < start
        }
        assert untouched <= set(good.values())
        if case % 10 == 0 and good:
            check_training(meta, encoder, good, bad)


@pytest.mark.slow
def test_shards(tmp_path, encoder):
    rng = random.Random("tar")
    buffer, spans = io.BytesIO(), []
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for row in range(ROWS):
            first = tar.offset
            members = {"img.jpg": picture("JPEG", row), "json": record(row, "img.jpg")}
            for ending, data in members.items():
                info = tarfile.TarInfo(f"k{row}.{ending}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            spans.append((first, tar.offset))
    content = buffer.getvalue()
    meta = write_meta(tmp_path, {"set": {"shards": "shard.tar"}})
    for case in range(CASES):
        damaged, start, stop = hurt(rng, content)
        (tmp_path / "shard.tar").write_bytes(damaged)
        good, bad = verdicts(meta, encoder)
        untouched = {f"r{row}" for row, (first, last) in enumerate(spans) if stop <= first or last <= start}
        assert untouched <= set(good.values())
        if stop - start > 1 and start < spans[-1][1] - 512:
            assert len(good) + len(bad) >= len(untouched) + (start not in {first for first, _ in spans})
        if case % 10 == 0 and good:
            check_training(meta, encoder, good, bad)
