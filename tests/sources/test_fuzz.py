"""Random damage to good files: no crash, no hang, and every sample that the damage did not touch is delivered."""

from __future__ import annotations

import io
import json
import random
import tarfile

import pytest

from internvl_pack.errors import SampleError, UserError
from internvl_pack.sources import shard_index
from internvl_pack.sources.jsonl import JsonlSource
from internvl_pack.sources.shards import ShardSource

CASES = 300
WORDS = ["word", "naïve", "图片", "line\nbreak", "\u2028", '"quoted"', "{", "]", "tab\t", "😀"]
SIZES = [b"00000000000\0", b"00000001000\0", b"77777777777\0", b"garbage size", b"           \0", b"\xff" * 12]
SIZES += [b"\x80" + bytes(10) + b"\x05"]


def damage(rng: random.Random, content: bytes) -> tuple[bytes, int, int]:
    """(damaged content, first and last + 1 position that may differ from the original)."""
    kind = rng.randrange(4)
    at = rng.randrange(len(content))
    if kind == 0:
        return content[:at], at, len(content)
    if kind == 1:
        flipped = bytearray(content)
        flipped[at] ^= 1 << rng.randrange(8)
        return bytes(flipped), at, at + 1
    stop = min(len(content), at + rng.choice([1, 5, 100, 600]))
    if kind == 2:
        return content[:at] + rng.randbytes(stop - at) + content[stop:], at, stop
    return content[:at] + bytes(stop - at) + content[stop:], at, stop


def new_record(rng: random.Random, own_id: str, **more) -> bytes:
    text = " ".join(rng.choices(WORDS, k=rng.randint(0, 12)))
    turns = [{"from": "human", "value": text}, {"from": "gpt", "value": text}]
    return json.dumps({"id": own_id, "conversations": turns, **more}, ensure_ascii=rng.random() < 0.5).encode()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_every_untouched_line_is_delivered(tmp_path, seed):
    rng = random.Random(seed)
    path = tmp_path / "rows.jsonl"
    for _ in range(CASES):
        records = [new_record(rng, f"r{row}") for row in range(12)]
        content = rng.choice([b"", b"\xef\xbb\xbf"])
        spans = []
        for record in records:
            content += rng.choice([b"", b"", b"\n", b"  \r\n"])
            spans.append((len(content), len(content) + len(record)))
            content += record + rng.choice([b"\n", b"\r\n"])
        damaged, start, stop = damage(rng, content)
        path.write_bytes(damaged)
        found = []
        try:
            source = JsonlSource("set", str(path))
        except UserError:  # the start of the file now is another kind of file's
            assert start < 300
            continue
        for row in range(len(source)):
            try:
                found.append(source.read(row).data)
            except SampleError as error:
                assert error.source == source.origin(row)
        # the line end in front of a record and the one behind it are what makes it a line
        untouched = [
            json.loads(record)
            for record, (first, last) in zip(records, spans, strict=True)
            if stop <= first - 1 or last + 1 < start or (first == 0 and last + 1 < start)
        ]
        assert [record for record in found if record in untouched] == untouched


@pytest.mark.slow
@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_untouched_sample_of_a_shard_is_delivered(tmp_path, format):
    rng = random.Random(format)
    path = tmp_path / "shard.tar"
    prefix = "a/" * 40 if format == tarfile.USTAR_FORMAT else "folder/" * 20
    for _ in range(CASES):
        samples = []
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
            for row in range(8):
                key = rng.choice(["", "folder/", prefix]) + f"k{row}"
                image = rng.randbytes(rng.randint(1, 2000))
                first = tar.offset
                record = new_record(rng, f"k{row}", image=f"k{row}.jpg")
                for ending, data in rng.sample([("jpg", image), ("json", record)], 2):
                    info = tarfile.TarInfo(f"{key}.{ending}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
                samples.append((key, json.loads(record), image, first, tar.offset))
        damaged, start, stop = damage(rng, buffer.getvalue())
        path.write_bytes(damaged)
        source = ShardSource("set", [str(path)])
        found = {}
        for row in range(len(source)):
            key = source.sample_id(row).removeprefix("set/shard/")
            try:
                sample = source.read(row)
                names = sample.data.get("image")  # a list or nothing where the damage hit the field's name
                name = names[0] if isinstance(names, list) else names
                found[key] = (sample.data, sample.resolve(name).read())
            except SampleError as error:
                assert str(path) in str(error) or name is None
        untouched = [s for s in samples if stop <= s[3] or start >= s[4]]
        for key, record, image, *_ in untouched:
            assert found[key] == (record, image)
        touched = len(samples) - len(untouched)
        assert len(source) + len(source.damage) <= len(samples) + touched + 1


def test_rubbish_is_no_shard_and_no_crash(tmp_path):
    rng = random.Random(5)
    path = tmp_path / "shard.tar"
    pieces = [bytes(512), b"ustar", b"ustar\x0000", b"0000644\0", rng.randbytes(100), b"k.json\0", bytes(100)]
    for _ in range(CASES):
        path.write_bytes(b"".join(rng.choices(pieces, k=rng.randint(0, 60))))
        index = shard_index.scan_shard(str(path))
        assert len(index) == 0
        assert index.damage or index.warnings


@pytest.mark.slow
def test_hostile_headers_end_promptly(tmp_path):
    """Headers with right checksums and random fields: sizes that lie, every type, long names without an end."""
    rng = random.Random(6)
    path = tmp_path / "shard.tar"
    for _ in range(CASES):
        blocks = []
        for _ in range(rng.randint(1, 20)):
            header = bytearray(512)
            name = rng.choice([b"k.json", b"../k.jpg", b"/k.jpg", b"k" * 100, b"a.b.c.json", b"", b"./", b"\xff.jpg"])
            header[: len(name)] = name
            header[124:136] = rng.choice([*SIZES, b"\x80" + rng.randbytes(11)])
            header[156] = rng.choice(b"0\x0012345LKxgSMVZ")
            header[257:263] = rng.choice([b"ustar\0", b"ustar ", bytes(6)])
            header[482] = rng.randrange(2)
            header[148:156] = b" " * 8
            header[148:156] = b"%06o\0 " % sum(header)
            blocks.append(bytes(header))
            blocks.append(rng.choice([b"", bytes(512), b"11 path=k.j\n".ljust(512, b"\0"), rng.randbytes(512)]))
        path.write_bytes(b"".join(blocks))
        source = ShardSource("set", [str(path)])
        for row in range(len(source)):
            try:
                source.read(row)
            except SampleError as error:
                assert str(path) in error.source
