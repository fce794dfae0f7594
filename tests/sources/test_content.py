"""Content marks: data that differs in text or order has another mark, moved or indexed data has the same."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from hashlib import blake2b
from pathlib import Path

import pytest

from internvl_pack.sources import jsonl, shard_index
from internvl_pack.sources.base import RawSample, Source
from internvl_pack.sources.content import PIECE_BYTES
from internvl_pack.sources.files import stamp_of
from internvl_pack.sources.hf import DatasetSource
from internvl_pack.sources.image_refs import FolderResolver
from internvl_pack.sources.jsonl import JsonlSource
from internvl_pack.sources.shards import ShardSource

LINES = [b'{"id": "a%04d"}\n' % row for row in range(2000)]
SWAPPED = [*LINES[:700], LINES[701], LINES[700], *LINES[702:]]


def jsonl_source(folder: Path, content: bytes, name: str = "rows.jsonl") -> JsonlSource:
    (folder / name).write_bytes(content)
    return JsonlSource("set", str(folder / name))


def test_two_rows_of_equal_lengths_that_change_places_change_the_mark(tmp_path):
    assert jsonl_source(tmp_path, b"".join(LINES)).content != jsonl_source(tmp_path, b"".join(SWAPPED)).content


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf", b"\xef\xbb", b"\n"])
@pytest.mark.parametrize("chunk", [999, PIECE_BYTES])
def test_the_mark_of_a_source_is_that_of_its_files_bytes(tmp_path, monkeypatch, start, chunk):
    monkeypatch.setattr(jsonl, "CHUNK_BYTES", chunk)
    for content in (b"", b"{}\n", b"".join(LINES * 40), b"x" * (2 * PIECE_BYTES - len(start))):
        source = jsonl_source(tmp_path, start + content)
        data = (tmp_path / "rows.jsonl").read_bytes()
        pieces = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]
        marks = [len(data).to_bytes(8, "little"), *(blake2b(piece, digest_size=16).digest() for piece in pieces)]
        assert source.content == blake2b(b"".join(marks), digest_size=16).hexdigest()


def test_the_mark_is_the_same_from_an_index_made_in_parts_and_after_a_move(tmp_path):
    alone = jsonl_source(tmp_path, b"".join(LINES * 100)).content
    path = str(tmp_path / "rows.jsonl")
    stamp = stamp_of(path)
    with jsonl.JsonlIndexWriter(path, stamp) as writer:
        for start in range(0, stamp.size, PIECE_BYTES):
            writer.add(jsonl.scan_part(path, start, min(start + PIECE_BYTES, stamp.size), stamp.size))
        writer.finish()
    source = JsonlSource("set", path)
    assert source._index.from_file
    assert source.content == alone
    shutil.copy(path, tmp_path / "moved.jsonl")
    assert JsonlSource("set", str(tmp_path / "moved.jsonl")).content == alone


def archive(path: Path, records: list[bytes], image: bytes = b"pixels") -> str:
    with tarfile.open(path, "w") as tar:
        for row, record in enumerate(records):
            for ending, data in (("jpg", image), ("json", record)):
                info = tarfile.TarInfo(f"{row:04d}.{ending}")
                info.size, info.mtime = len(data), os.getpid()
                tar.addfile(info, io.BytesIO(data))
    return str(path)


def test_shards_are_told_apart_by_records_and_members(tmp_path):
    a = archive(tmp_path / "a.tar", LINES[:9])
    marks = [
        ShardSource("set", [a]).content,
        ShardSource("set", [archive(tmp_path / "b.tar", SWAPPED[700:709])]).content,
        ShardSource("set", [archive(tmp_path / "c.tar", [*LINES[1::-1], *LINES[2:9]])]).content,
        ShardSource("set", [archive(tmp_path / "d.tar", LINES[:9], b"pixel")]).content,
        ShardSource("set", [a, str(tmp_path / "d.tar")]).content,
        ShardSource("set", [str(tmp_path / "d.tar"), a]).content,
    ]
    assert len(set(marks)) == len(marks)


def test_a_shards_mark_is_the_same_by_its_index_and_leaves_out_image_bytes(tmp_path):
    path = archive(tmp_path / "a.tar", LINES[:9])
    alone = ShardSource("set", [path]).content
    assert ShardSource("set", [archive(tmp_path / "b.tar", LINES[:9], b"PIXELS")]).content == alone
    shard_index.write_index(path)
    source = ShardSource("set", [path])
    assert source._shards[0].index is None
    assert source.content == alone


def test_records_longer_than_the_window_and_a_piece_are_marked_to_their_end(tmp_path):
    for size in (5000, PIECE_BYTES + 5000):
        one, other = ([b"x" * size + end] for end in (b"1", b"2"))
        paths = archive(tmp_path / "a.tar", one), archive(tmp_path / "b.tar", other)
        assert ShardSource("set", [paths[0]]).content != ShardSource("set", [paths[1]]).content


def row(text: str, image: bytes = b"pixels") -> dict:
    return {
        "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": text[::-1]}],
        "n": None if "3" in text else len(text),
        "image": {"bytes": image, "path": None},
    }


def test_a_saved_dataset_is_marked_by_its_values_however_it_is_stored(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [row(f"turn {number}") for number in range(40)]
    whole = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())
    mark = DatasetSource("set", whole).content
    whole.save_to_disk(tmp_path / "saved", num_shards=3)
    halves = datasets.concatenate_datasets([whole.select(range(17)), whole.select(range(17, 40))])
    for same in (datasets.load_from_disk(tmp_path / "saved"), halves, whole.with_format("numpy")):
        assert DatasetSource("set", same).content == mark
    swapped = datasets.Dataset.from_list([*rows[1::-1], *rows[2:]]).cast_column("image", datasets.Image())
    longer = datasets.Dataset.from_list([*rows[:-1], row("turn 39", b"pixels.")]).cast_column("image", datasets.Image())
    others = [swapped, longer, whole.shuffle(seed=1), whole.select(range(39))]
    marks = {DatasetSource("set", other).content for other in others}
    assert len(marks | {mark}) == 1 + len(others)


def test_other_rows_are_marked_by_their_number_and_samples_of_them():
    rows = [row(f"turn {number}") for number in range(16)]
    mark = DatasetSource("set", rows).content
    assert DatasetSource("set", [dict(each) for each in rows]).content == mark
    for other in (rows[::-1], rows[:-1], [*rows[:-1], row("another")]):
        assert DatasetSource("set", other).content != mark


class Toy(Source):
    name, fingerprint = "toy", "1"  # type: ignore[assignment]

    def __len__(self) -> int:
        return 100

    def read(self, row: int) -> RawSample:
        assert row % 2, "a row that cannot be read"
        return RawSample(self.sample_id(row), None, "", {"conversations": [str(row)]}, FolderResolver(""))

    def sample_id(self, row: int) -> str:
        return f"{self.name}/{row}"

    origin = sample_id


def test_a_kind_of_ones_own_has_a_mark_by_its_fingerprint_and_rows():
    one, other = Toy(), Toy()
    other.fingerprint = "2"
    assert one.content == Toy().content != other.content
    assert len(bytes.fromhex(one.content)) == 16
