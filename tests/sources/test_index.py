"""Index files: what was written is read back, and nothing else ever is, whatever lies beside the data."""

from __future__ import annotations

import json
import os
import random
import resource
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from internvl_pack.errors import SampleError, UserError
from internvl_pack.sources import index, jsonl, members, shard_index
from internvl_pack.sources.content import new_hash
from internvl_pack.sources.files import Stamp, stamp_of
from internvl_pack.sources.index import BadIndexError, IndexWriter, index_path, is_increasing, read_index
from internvl_pack.sources.jsonl import JsonlSource
from internvl_pack.sources.shards import ShardSource

STAMP = Stamp(1000, 12345)
COLUMNS = {"a": "u4", "b": "u8", "c": "u1"}
VALUES = {"a": np.arange(70), "b": np.array([], np.uint64), "c": np.arange(9)}
MARK = new_hash().hexdigest()


def write(path: str, kind="toy", stamp=STAMP, columns=COLUMNS, values=VALUES, notes=None, content=MARK) -> Path:
    with IndexWriter(path, kind, stamp, columns) as writer:
        for name in columns:
            for part in np.array_split(np.asarray(values[name]), 3):
                writer.append(name, part)
        writer.finish(notes if notes is not None else {"said": ["ü", None, 1]}, content=content)
    return Path(index_path(path))


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "data")


def same(found: index.IndexFile) -> bool:
    return (
        found.notes == {"said": ["ü", None, 1]}
        and found.content == MARK
        and set(found.columns) == set(COLUMNS)
        and all(np.array_equal(found.columns[name], VALUES[name]) for name in COLUMNS)
        and all(found.columns[name].dtype == dtype for name, dtype in COLUMNS.items())
    )


def test_what_is_written_is_mapped_not_copied(path):
    before = pa.total_allocated_bytes()
    write(path, values={**VALUES, "b": np.arange(1 << 20)})
    found = read_index(path, "toy", STAMP, COLUMNS)
    assert pa.total_allocated_bytes() - before < 1 << 20
    assert np.array_equal(found.columns["b"], np.arange(1 << 20))
    assert not found.columns["b"].flags.writeable


def test_any_reader_of_arrow_files_opens_an_index(path):
    with pa.ipc.open_file(write(path)) as file:
        assert file.read_all().to_pydict() == {name: [list(values)] for name, values in VALUES.items()}


def test_no_index_is_none(path):
    assert read_index(path, "toy", STAMP, COLUMNS) is None


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({"kind": "tar"}, "was built for 'tar', not toy"),
        ({"stamp": Stamp(1000, 12346)}, "has changed since"),
        ({"stamp": Stamp(1001, 12345)}, "has changed since"),
        ({"columns": {"a": "u4", "b": "u8"}}, "is damaged"),
        ({"columns": {"b": "u8", "a": "u4", "c": "u1"}}, "is damaged"),
        ({"columns": COLUMNS | {"a": "i4"}}, "is damaged"),
        ({"columns": COLUMNS | {"b": "f8"}}, "is damaged"),
        ({"content": "x"}, "is damaged"),
        ({"notes": {"much": "x" * (4 << 20)}}, "is damaged"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(path, written, words):
    write(path, **written)
    with pytest.raises(BadIndexError, match=words):
        read_index(path, "toy", STAMP, COLUMNS)


@pytest.mark.parametrize(
    "content", [b"", b"ARROW1", b"ARROW1\0\0ARROW1", b"INTERNVLPACK\0\1\r\n" + bytes(200), bytes(99)]
)
def test_what_is_no_index_is_refused(path, content):
    Path(index_path(path)).write_bytes(content)
    with pytest.raises(BadIndexError):
        read_index(path, "toy", STAMP, COLUMNS)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_folder_or_pipe_by_its_name_is_refused(path, make):
    make(index_path(path))
    with pytest.raises(BadIndexError):
        read_index(path, "toy", STAMP, COLUMNS)


def attempts(whole: bytes, rng: random.Random) -> Iterator[bytes]:
    """Every cut, every byte changed, and numbers written over places at random."""
    for position in range(len(whole)):
        yield whole[:position]
        yield whole[:position] + bytes([whole[position] ^ 0x11]) + whole[position + 1 :]
    for position in range(8, 128):  # the type of the first message among them, which Arrow does not check by itself
        for byte in range(6):
            yield whole[:position] + bytes([byte]) + whole[position + 1 :]
    for _ in range(1000):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            number = rng.choice([0, 1, 2, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, rng.getrandbits(64)])
            form = rng.choice(["<I", "<Q", "<H"])
            struct.pack_into(
                form, damaged, rng.randrange(len(whole) - 8), number & ((1 << 8 * struct.calcsize(form)) - 1)
            )
        yield bytes(damaged)
    for _ in range(300):
        a, b = sorted(rng.sample(range(len(whole)), 2))
        yield whole[:a] + whole[b:]
        yield whole[:b] + whole[a:]


@pytest.mark.slow
def test_a_damaged_index_is_refused_or_says_the_same(path):
    file = write(path)
    whole = file.read_bytes()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for damaged in attempts(whole, random.Random(0)):
        file.write_bytes(damaged)
        try:
            found = read_index(path, "toy", STAMP, COLUMNS)
        except BadIndexError:
            refused += 1
        else:
            assert same(found)
    assert refused > len(whole)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200_000, "kB"


def sealed(file: Path, columns: dict[str, pa.Array], *, options: pa.ipc.IpcWriteOptions | None = None) -> None:
    """An index of these columns with the head that belongs to other ones."""
    with pa.ipc.open_file(file) as old:
        metadata = old.schema.metadata
    batch = pa.record_batch(
        list(columns.values()), schema=pa.schema([(n, c.type) for n, c in columns.items()], metadata)
    )
    with pa.ipc.new_file(file, batch.schema, options=options) as writer:
        writer.write_batch(batch)


def lists(**changes) -> dict[str, pa.Array]:
    columns = {
        name: pa.array([VALUES[name].tolist()], pa.large_list(pa.from_numpy_dtype(np.dtype(dtype))))
        for name, dtype in COLUMNS.items()
    }
    return columns | changes


@pytest.mark.parametrize(
    "offsets", [(0, 1 << 40), (60, 10), (-5, 10), (1, 70), (0, 69), (0, 71), (1 << 62, (1 << 62) + 70)]
)
def test_forged_offsets_of_a_column_are_refused(path, offsets):
    file = write(path)
    whole = file.read_bytes()
    place = whole.rindex(struct.pack("<qq", 0, 70))
    file.write_bytes(whole[:place] + struct.pack("<qq", *offsets) + whole[place + 16 :])
    with pytest.raises(BadIndexError):
        read_index(path, "toy", STAMP, COLUMNS)


@pytest.mark.parametrize(
    "columns",
    [
        lists(a=pa.array([None], pa.large_list(pa.uint32()))),
        lists(a=pa.array([[*range(69), None]], pa.large_list(pa.uint32()))),
        {name: pa.concat_arrays([column, column]) for name, column in lists().items()},
        {name: column[:0] for name, column in lists().items()},
        lists(a=lists()["c"].cast(pa.large_list(pa.uint32()))),
        lists(a=pa.array([["x"]], pa.large_list(pa.string()))),
        lists(a=pa.array(["x"])),
    ],
)
def test_forged_columns_are_refused(path, columns):
    file = write(path)
    sealed(file, lists())
    assert same(read_index(path, "toy", STAMP, COLUMNS)), "the forger's own way of writing is not what is refused"
    sealed(file, columns)
    with pytest.raises(BadIndexError):
        read_index(path, "toy", STAMP, COLUMNS)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_columns_are_refused_unpacked_by_nobody(path, codec):
    file = write(path)
    zeros = pa.LargeListArray.from_arrays([0, 1 << 26], pa.array(np.zeros(1 << 26, np.uint32)))
    sealed(file, lists(a=zeros), options=pa.ipc.IpcWriteOptions(compression=codec))
    del zeros
    before = pa.default_memory_pool().bytes_allocated()
    with pytest.raises(BadIndexError):
        read_index(path, "toy", STAMP, COLUMNS)
    assert pa.default_memory_pool().bytes_allocated() - before < 1 << 20
    assert file.stat().st_size < 2 << 20


def test_nothing_is_left_without_finish(path):
    with pytest.raises(ZeroDivisionError), IndexWriter(path, "toy", STAMP, COLUMNS):
        raise ZeroDivisionError
    assert not os.listdir(os.path.dirname(path))


@pytest.mark.parametrize("block", [1, 2, 3, 100])
def test_rising_numbers_are_told_from_falling_ones(monkeypatch, block):
    monkeypatch.setattr(index, "_BLOCK", block)
    for values, expected in (
        ([], (True, True)),
        ([5], (True, True)),
        ([1, 2, 3, 9], (True, True)),
        ([1, 2, 2, 9], (True, False)),
        ([1, 2, 3, 2], (False, False)),
        ([3, 2, 3, 4], (False, False)),
    ):
        array = np.array(values, np.uint64)
        assert (is_increasing(array), is_increasing(array, strictly=True)) == expected


# --- forgeries that pass as whole, of both kinds ------------------------------------------------------------------


def mutated(columns: dict[str, np.ndarray], rng: random.Random) -> dict[str, np.ndarray]:
    """Some columns with numbers changed, dropped, added, turned round or exchanged."""
    columns = {name: array.copy() for name, array in columns.items()}
    for name in rng.sample(sorted(columns), rng.randint(1, 2)):
        values = columns[name].tolist()
        how = rng.randrange(6)
        if how == 0 and values:
            values[rng.randrange(len(values))] = rng.choice([0, 1, 255, rng.randrange(1 << 8)])
        elif how == 1 and values:
            values[rng.randrange(len(values))] = int(np.iinfo(columns[name].dtype).max) - rng.randrange(2)
        elif how == 2 and values:
            del values[rng.randrange(len(values))]
        elif how == 3:
            values.insert(rng.randint(0, len(values)), rng.randrange(1 << 8))
        elif how == 4:
            values.reverse()
        else:
            other = columns[rng.choice(sorted(columns))]
            values = other.astype(columns[name].dtype).tolist()  # large ones wrap round
        columns[name] = np.array(values, columns[name].dtype)
    return columns


def everything(source) -> list[str]:
    """Of each row its id or what is wrong; what a damaged source may do is raise UserError."""
    out = []
    for row in range(len(source)):
        try:
            source.sample_id(row), source.origin(row)
            out.append(str(source.read(row).own_id))
        except SampleError as error:
            out.append(error.reason)
    return out


@pytest.mark.slow
def test_forged_rows_of_a_jsonl_file_are_refused_or_lines_of_it(tmp_path):
    path = str(tmp_path / "rows.jsonl")
    Path(path).write_bytes(b"".join(b'{"id": "r%d"}\n%s' % (row, b"\n" * (row % 3)) for row in range(12)))
    stamp, rng = stamp_of(path), random.Random(0)
    built = jsonl.build_index(path, stamp)
    real = {name: getattr(built, name) for name in jsonl.COLUMNS}
    expected = everything(JsonlSource("set", path))
    refused = misplaced = 0
    for _ in range(600):
        columns = mutated(real, rng)
        write(path, jsonl.KIND, stamp, jsonl.COLUMNS, columns, {}, built.content)
        try:
            source = JsonlSource("set", path)
            refused += not source._index.from_file
            found = everything(source)
        except UserError as error:
            assert "does not start where the index says" in str(error)
            misplaced += 1
            continue
        assert set(found) <= {*expected}
    assert refused > 200 and misplaced > 3


@pytest.mark.parametrize("row", [1, 5, 11])
def test_an_index_that_leaves_a_row_out_is_noticed(tmp_path, row):
    path = str(tmp_path / "rows.jsonl")
    Path(path).write_bytes(b"".join(b'{"id": "r%d"}\n' % row for row in range(12)))
    stamp = stamp_of(path)
    built = jsonl.build_index(path, stamp)
    columns = {"low": np.delete(built.low, row), "high": built.high, "blank": built.blank}
    write(path, jsonl.KIND, stamp, jsonl.COLUMNS, columns, {}, built.content)
    source = JsonlSource("set", path)
    assert source._index.from_file
    with pytest.raises(UserError, match="does not start where the index says"):
        source.read(row - 1)


@pytest.mark.slow
def test_forged_rows_of_a_shard_are_refused_or_samples_of_it(tmp_path):
    import io
    import tarfile

    path = str(tmp_path / "s.tar")
    with tarfile.open(path, "w") as tar:
        for row in range(6):
            for ending, data in (("jpg", b"pixels"), ("json", b'{"id": "r%d"}' % row)):
                info = tarfile.TarInfo(f"k{row}.{ending}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    built, rng = shard_index.scan_shard(path), random.Random(1)
    real = {name: getattr(built, name) for name in shard_index.COLUMNS}
    notes = {"damage": [], "warnings": []}
    refused = 0
    for _ in range(600):
        write(path, shard_index.KIND, built.stamp, shard_index.COLUMNS, mutated(real, rng), notes, built.content)
        try:
            source = ShardSource("set", [path])
            refused += bool(source.warnings)
            found = everything(source)
        except UserError as error:
            assert "not what it was when it was indexed" in str(error)
            continue
        rejected = {reason for reason, _ in members.REASONS.values()} | {"invalid_json", "invalid_utf8"}
        assert set(found) <= {f"r{row}" for row in range(6)} | rejected
    assert refused > 200


@pytest.mark.parametrize(
    "notes",
    [
        {},
        {"damage": [], "warnings": None},
        {"damage": {}, "warnings": []},
        {"damage": [], "warnings": [1]},
        {"damage": [["cut", 1.5, "", None, []]], "warnings": []},
        {"damage": [["cut", True, "", None, []]], "warnings": []},
        {"damage": [["cut", 1, "", None, [None]]], "warnings": []},
        {"damage": [["cut", 1, ""]], "warnings": []},
    ],
)
def test_forged_notes_of_a_shard_are_refused(tmp_path, notes):
    path = str(tmp_path / "s.tar")
    Path(path).write_bytes(bytes(10240))
    stamp = stamp_of(path)
    values = {"first": [0], "member": [], "status": [], "hashes": []}
    columns = shard_index.COLUMNS
    write(path, shard_index.KIND, stamp, columns, values, {"damage": [], "warnings": ["{path}"]})
    assert shard_index.load_index(path, stamp).warnings == (path,)
    write(path, shard_index.KIND, stamp, columns, values, notes)
    with pytest.raises(BadIndexError, match="damaged"):
        shard_index.load_index(path, stamp)


def test_a_head_that_is_deeply_nested_is_refused(path):
    file = write(path)
    with pa.ipc.open_file(file) as old:
        head = json.loads(old.schema.metadata[b"internvl_pack"])
        schema = old.schema
    text = json.dumps(head).replace('"said"', '"deep": ' + "[" * 100_000 + "]" * 100_000 + ', "said"')
    with pa.ipc.new_file(file, schema.with_metadata({b"internvl_pack": text.encode()})) as writer:
        writer.write_batch(pa.record_batch(list(lists().values()), schema=schema))
    with pytest.raises(BadIndexError):
        read_index(path, "toy", STAMP, COLUMNS)
