"""Annotation files: rows and line numbers, what is rejected, the index in memory and on disk, images by name."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
import resource
import subprocess
import sys
import time
from functools import lru_cache
from itertools import chain, pairwise

import pytest

from internvl_pack.errors import SampleError, UserError
from internvl_pack.sources import DatasetSpec, FileRef, ImageRef, files, image_refs, jsonl, open_source
from internvl_pack.sources.files import stamp_of
from internvl_pack.sources.image_refs import FolderResolver
from internvl_pack.sources.index import SUFFIX, index_path
from internvl_pack.sources.jsonl import JsonlSource


def good(own_id: str, **more) -> bytes:
    return json.dumps({"id": own_id, "conversations": [], **more}, ensure_ascii=False).encode()


A, B, C = good("a"), good("b"), good("c")


def make(tmp_path, content: bytes, name="rows.jsonl") -> str:
    path = tmp_path / name
    path.write_bytes(content)
    return str(path)


def verdicts(source) -> list[str]:
    """Of each row: its own id, or the reason it is rejected for; with `@` and its line."""
    found = []
    for row in range(len(source)):
        line = source.origin(row).rpartition(":line ")[2]
        try:
            sample = source.read(row)
            assert sample.origin == source.origin(row)
            assert sample.sample_id == source.sample_id(row) == f"{source.name}/{row}"
            found.append(f"{sample.own_id}@{line}")
        except SampleError as error:
            assert error.source == source.origin(row)
            found.append(f"{error.reason}@{line}")
    return found


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"\xef\xbb\xbf", []),
        (b"\n \t\r\n\r\n", []),
        (A, ["a@1"]),
        (A + b"\n", ["a@1"]),
        (A + b"\r\n" + B, ["a@1", "b@2"]),
        (b"\xef\xbb\xbf" + A + b"\n" + B + b"\n", ["a@1", "b@2"]),
        (b"\xef\xbb\xbf\n\n" + A, ["a@3"]),
        (b"\n\n" + A + b"\n   \n\t\n" + B + b"\n\n" + C, ["a@3", "b@6", "c@8"]),
        (A + b"\n" + b" " * 5000 + b"\n" + B, ["a@1", "b@3"]),
        (b"  " + A + b"  \n\t" + B + b"\r\n", ["a@1", "b@2"]),
        (A + b"\n\xef\xbb\xbf" + B + b"\n", ["a@1", "b@2"]),  # files with a mark each, one after another
        (good("a", text="x\u2028y\u2029z\x85w") + b"\n" + B, ["a@1", "b@2"]),
        (A + b"\n" + B[:20] + b"\n" + C, ["a@1", "invalid_json@2", "c@3"]),
        (A + b"\n" + B[:20], ["a@1", "invalid_json@2"]),
        (A + b"\n" + B[:20] + C + b"\n" + B, ["a@1", "invalid_json@2", "b@3"]),
        (A + b",\n" + B, ["invalid_json@1", "b@2"]),
        (A + b"\n" + b'{"id": "\xe6\xff"}\n' + C, ["a@1", "invalid_utf8@2", "c@3"]),
        (A + b"\n" + b'{"id": "caf\xe9"}\n' + C, ["a@1", "invalid_utf8@2", "c@3"]),
        (A + b"\n" + b'{"id": "\xed\xa0\x80"}\n' + C, ["a@1", "invalid_utf8@2", "c@3"]),
        (A + b'\n{"id": "x\ty"}\n' + C, ["a@1", "invalid_json@2", "c@3"]),
        (A + b'\n{"id": "x\0y"}\n' + C, ["a@1", "invalid_json@2", "c@3"]),
        (A + b"\n" + bytes(600) + b"\n" + C, ["a@1", "invalid_json@2", "c@3"]),
        (A + b"\n" + bytes(600), ["a@1", "invalid_json@2"]),
        (A + b'\n{"x": NaN}\n{"x": -Infinity}\n' + C, ["a@1", "invalid_json@2", "invalid_json@3", "c@4"]),
        (A + b'\n{"x": 1e999}\n{"x": 1e-999}', ["a@1", "invalid_json@2", "None@3"]),
        (A + b'\n{"x": ' + b"9" * 5000 + b"}\n" + C, ["a@1", "invalid_json@2", "c@3"]),
        (A + b'\n{"x": ' + b"[" * 200_000 + b"}\n" + C, ["a@1", "json_too_deep@2", "c@3"]),
        (A + b'\n[1]\nnull\n"text"\n3\ntrue\n' + C, ["a@1"] + [f"not_an_object@{n}" for n in range(2, 7)] + ["c@7"]),
        (b"[1, 2]\n" + A + b"\n[3]\n", ["not_an_object@1", "a@2", "not_an_object@3"]),
        (A + b'\n{"id": "\\ud83d\\ude00"}\n{"id": "\\ud83d"}\n{"\\udc00": 1}',
         ["a@1", "\U0001f600@2", "lone_surrogate@3", "lone_surrogate@4"]),
        (b'{"id": 12}\n{"id": 1.5}\n{"id": null}\n{"id": true}\n{"id": ""}',
         ["12@1", "None@2", "None@3", "None@4", "@5"]),
    ],
)  # fmt: skip
def test_rows_and_lines(tmp_path, content, expected):
    assert verdicts(JsonlSource("set", make(tmp_path, content))) == expected


def test_a_record_is_delivered_as_it_was_written(tmp_path):
    path = make(tmp_path, good("a", text="x\u2028y", nested={"n": [1, 2.5, None, True]}))
    sample = JsonlSource("set", path).read(0)
    assert sample.data == {"id": "a", "conversations": [], "text": "x\u2028y", "nested": {"n": [1, 2.5, None, True]}}
    assert pickle.loads(pickle.dumps(sample)) == sample


@pytest.mark.parametrize("row", [-1, 2])
def test_a_row_that_is_not_there_is_an_index_error(tmp_path, row):
    with pytest.raises(IndexError):
        JsonlSource("set", make(tmp_path, A + b"\n" + B)).read(row)


def test_an_empty_file_is_one_warning(tmp_path, caplog):
    path = make(tmp_path, b"\n \n")
    source = open_source(DatasetSpec(name="set", annotation=path))
    assert len(source) == 0
    assert [record.message for record in caplog.records] == [f"dataset 'set': annotation {path} holds no record"]


def test_a_line_without_end_is_refused_unread(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "MAX_RECORD_BYTES", 1000)
    long = b'{"x": "' + b"y" * 1000 + b'"}'
    path = make(tmp_path, A + b"\n" + long + b"\n" + B + b"\n" * 5000 + long)
    assert verdicts(JsonlSource("set", path)) == ["a@1", "record_too_long@2", "b@3", "record_too_long@5003"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[" + A + b", " + B + b"]", "JSON array"),
        (b"\xef\xbb\xbf\n [" + A + b", " + B + b"]\n\n", "JSON array"),
        (b"[\n" + A + b",\n" + B + b"\n]\n", "JSON array"),
        (b"[" + A + b",\n" + B + b"]", "JSON array"),
        (b"[" + A + b",\n " + B[:9], "JSON array"),
        (b"[]", "JSON array"),
        (b"[" + b",\n".join([A] * 5000) + b"]", "JSON array"),
        (b"[" + b", ".join([A] * 5000) + b"]\n", "JSON array"),
        (json.dumps([json.loads(A)] * 3, indent=1).encode(), "JSON array"),
        (json.dumps({"data": [json.loads(A)]}, indent=2).encode(), "one JSON object written over several lines"),
        (b'{"data": [\n' + A + b",\n" + B + b"\n]}\n", "one JSON object written over several lines"),
        (b"\x1f\x8b\x08\0", "gunzip"),
        (b"\x28\xb5\x2f\xfd\0", "zstd -d"),
        (A.decode().encode("utf-16"), "UTF-16"),
        (b"PAR1....PAR1", "Parquet"),
        (b"PK\x03\x04....", "zip-compressed"),
        (bytes(257) + b"ustar\x0000" + bytes(1000), "tar archive: name it under 'shards'"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_the_cure(tmp_path, content, words):
    for name in ("rows.json", "rows.jsonl"):
        path = make(tmp_path, content, name)
        with pytest.raises(UserError) as error:
            JsonlSource("set", path)
        assert path in str(error.value)
        assert words in str(error.value)


@pytest.mark.parametrize(
    "first", [b"[1, 2]", b'{"id": "x", "conversations": [', b'[{"id": "x"', b"{", b'{"id": {', b"\0\0", b"]"]
)
def test_a_bad_first_line_does_not_cost_the_rest(tmp_path, first):
    source = JsonlSource("set", make(tmp_path, first + b"\n" + A + b"\n" + B + b"\n"))
    assert [verdict.partition("@")[0] for verdict in verdicts(source)][1:] == ["a", "b"]
    assert len(source) == 3


# --- the index --------------------------------------------------------------------------------------------------


def naive(content: bytes) -> list[tuple[int, int]]:
    """(offset, line) of each row, by the rule's own words."""
    offset = 3 if content.startswith(b"\xef\xbb\xbf") else 0
    rows = []
    for number, line in enumerate(content[offset:].split(b"\n"), 1):
        if line.strip(b" \t\r"):
            rows.append((offset, number))
        offset += len(line) + 1
    return rows


def rows_of(index) -> list[tuple[int, int]]:
    return [(index.start(row), index.line(row)) for row in range(len(index))]


def random_content(rng: random.Random) -> bytes:
    pieces = [
        b"\n",
        b"\n",
        b"\r\n",
        b" ",
        b"\t",
        b"   \n",
        b"x",
        b"{}",
        b"a long piece of text",
        b"\xe2\x80\xa8",
        b"\0",
    ]
    start = rng.choice([b"", b"", b"\xef\xbb\xbf"])
    return start + b"".join(rng.choices(pieces, k=rng.randint(0, 60)))


def damaged(content: bytes, rng: random.Random) -> bytes:
    """The content with bytes flipped, cut out, moved, or with something hostile written in between."""
    a, b = sorted(rng.choices(range(len(content) + 1), k=2))
    hostile = rng.choice(
        [b"[" * 100_000, b'{"a":' * 50_000, b"9" * 50_000, b'"' + b"\\" * 99_999, b"\0" * 100_000, b"\xff" * 9]
    )
    return rng.choice(
        [
            content[:a] + bytes(rng.randrange(256) for _ in range(min(9, b - a))) + content[a + min(9, b - a) :],
            content[:a] + content[b:],
            content[b:] + content[:a],
            content[:a] + hostile + content[a:],
        ]
    )


def test_random_damage_costs_the_rows_that_it_hits(tmp_path):
    """Whatever stands in the file, a row is read or refused by a reason, in bounded time and memory."""
    rng, rows = random.Random(3), [good(f"row {k}", text="some words of text " * 9) for k in range(40)]
    content, read, refused, files = b"\n".join(rows), 0, 0, 0
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    for trial in range(60):
        path = make(tmp_path, damaged(content, rng), f"{trial}.jsonl")
        try:
            found = verdicts(open_source(DatasetSpec(name="set", annotation=path)))
        except UserError:  # no JSON lines at all
            files += 1
            continue
        unharmed = sum(verdict.startswith("row ") for verdict in found)
        read, refused = read + unharmed, refused + len(found) - unharmed
    assert read > 60 * 10 and refused > 30 and files < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "kB"
    assert time.process_time() - begun < 10


@pytest.mark.slow
def test_the_index_is_the_same_whatever_the_size_of_the_chunks(tmp_path, monkeypatch):
    rng = random.Random(1)
    for case in range(150):
        content = random_content(rng)
        path = make(tmp_path, content, f"{case}.jsonl")
        for chunk in (1, 2, 7, 1 << 20):
            monkeypatch.setattr(jsonl, "CHUNK_BYTES", chunk)
            assert rows_of(jsonl.build_index(path, stamp_of(path))) == naive(content), (content, chunk)


def test_parts_of_a_file_join_to_the_whole(tmp_path, monkeypatch):
    rng = random.Random(2)
    monkeypatch.setattr(jsonl, "CHUNK_BYTES", 5)
    for case in range(40):
        content = random_content(rng)
        path = make(tmp_path, content, f"{case}.jsonl")
        stamp = stamp_of(path)
        size = rng.randint(1, 12)
        with jsonl.JsonlIndexWriter(path, stamp) as writer:
            for start in range(0, max(1, len(content)), size):
                writer.add(jsonl.scan_part(path, start, min(start + size, len(content)), len(content)))
            writer.finish()
        index = jsonl.load_index(path, stamp)
        assert index.from_file
        assert rows_of(index) == naive(content), (content, size)


def test_offsets_beyond_four_gigabytes(tmp_path):
    """A sparse file with rows on both sides of 4 and 8 GiB; only the ranges with rows are scanned."""
    path = str(tmp_path / "sparse.jsonl")
    four = 1 << 32
    places = [four - 50, four - 2, four, four + 3, 2 * four - 7, 2 * four + 9]
    with open(path, "wb") as file:
        for place in places:
            file.seek(place - 1)
            file.write(b"\n{")
        file.truncate(2 * four + 1000)
    size = 2 * four + 1000
    bounds = [four - 100, four, four + 100, 2 * four - 100, 2 * four, size]
    parts = [jsonl.scan_part(path, start, stop, size) for start, stop in pairwise(bounds)
             if stop - start < 2000]  # fmt: skip
    with jsonl.JsonlIndexWriter(path, stamp_of(path)) as writer:
        for part in parts:
            writer.add(part)
        writer.finish()
    index = jsonl.load_index(path, stamp_of(path))
    assert [index.start(row) for row in range(len(index) + 1)] == [*places, size]


def test_an_index_takes_four_bytes_a_row(tmp_path):
    path = make(tmp_path, b"{}\n" * 100_000)
    index = jsonl.build_index(path, stamp_of(path))
    assert sum(array.nbytes for array in (index.low, index.high, index.blank)) == 4 * 100_000


@pytest.fixture
def indexed(tmp_path) -> str:
    path = make(tmp_path, b"\xef\xbb\xbf\n" + A + b"\n\n" + B[:9] + b"\r\n \n" + C)
    write_index(path)
    return path


def write_index(path):
    stamp = stamp_of(path)
    with jsonl.JsonlIndexWriter(path, stamp) as writer:
        writer.add(jsonl.scan_part(path, 0, stamp.size, stamp.size))
        writer.finish()


EXPECTED = ["a@2", "invalid_json@4", "c@6"]


def test_an_index_file_is_mapped_and_says_the_same(indexed, caplog):
    source = JsonlSource("set", indexed)
    assert source._index.from_file
    assert verdicts(source) == EXPECTED
    assert not caplog.records


def test_a_stale_index_is_left_aside_with_a_warning(indexed, caplog):
    with open(indexed, "ab") as file:
        file.write(b"\n" + A)
    assert verdicts(JsonlSource("set", indexed)) == [*EXPECTED, "a@7"]
    assert "has changed since" in caplog.text
    assert index_path(indexed) in caplog.text


@pytest.mark.parametrize("content", [b"", b"MMIDIDX\0\0" + bytes(100), bytes(5000)])
def test_an_index_of_another_program_is_left_aside(indexed, content, caplog):
    with open(indexed + SUFFIX, "wb") as file:
        file.write(content)
    assert verdicts(JsonlSource("set", indexed)) == EXPECTED
    assert "not used" in caplog.text


def test_a_file_changed_in_place_is_noticed(tmp_path):
    path = make(tmp_path, A + b"\n" + B + b"\n")
    source = JsonlSource("set", path)
    with open(path, "r+b") as file:
        file.write(b'{"id":\n\n')
        file.seek(len(A) - 3)
        file.write(b"xxxxxx")
    with pytest.raises(UserError, match="changed in place"):
        source.read(1)


def test_a_file_of_another_size_is_not_reopened(tmp_path):
    path = make(tmp_path, A + b"\n" + B + b"\n")
    source = pickle.loads(pickle.dumps(JsonlSource("set", path)))
    with open(path, "ab") as file:
        file.write(C)
    with pytest.raises(UserError, match="changed while it was in use"):
        source.read(0)


def test_a_file_that_is_gone_is_the_rows_error(tmp_path):
    path = make(tmp_path, A)
    source = JsonlSource("set", path)
    os.unlink(path)
    with pytest.raises(SampleError, match="record_unreadable"):
        source.read(0)


# --- processes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_index", [False, True])
def test_a_source_survives_pickling(indexed, with_index):
    if not with_index:
        os.unlink(indexed + SUFFIX)
    source = JsonlSource("set", indexed)
    copy = pickle.loads(pickle.dumps(source))
    assert copy._index.from_file == with_index
    assert verdicts(copy) == verdicts(source) == EXPECTED


def test_a_mapped_index_is_not_pickled(tmp_path):
    path = make(tmp_path, b"{}\n" * 10_000)
    write_index(path)
    assert len(pickle.dumps(JsonlSource("set", path))) < 2000


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_beside_each_other(tmp_path, method):
    path = make(tmp_path, b"\n".join(good(f"r{row}", text="x" * row) for row in range(500)))
    source = JsonlSource("set", path)
    assert source.read(0).own_id == "r0"  # the parent has the file open when workers start
    with multiprocessing.get_context(method).Pool(2) as pool:
        found = pool.starmap(_own_ids, [(source, range(start, 500, 4)) for start in range(4)])
    assert sorted(chain.from_iterable(found)) == sorted(f"r{row}" for row in range(500))


def _own_ids(source, rows):
    return [source.read(row).own_id for row in rows]


def test_few_files_stay_open(tmp_path, monkeypatch):
    assert files._descriptor.cache_parameters()["maxsize"] == files.MAX_OPEN_FILES
    monkeypatch.setattr(files, "_descriptor", lru_cache(maxsize=4)(files._descriptor.__wrapped__))
    before = len(os.listdir("/proc/self/fd"))
    sources = [JsonlSource("set", make(tmp_path, good(f"r{number}"), f"{number}.jsonl")) for number in range(20)]
    for _ in range(2):
        assert [source.read(0).own_id for source in sources] == [f"r{number}" for number in range(20)]
    assert len(os.listdir("/proc/self/fd")) <= before + 4


def test_names_outside_ascii_under_lang_c(tmp_path):
    folder = tmp_path / "Bücher 图"
    folder.mkdir()
    (folder / "é.jpg").write_bytes(b"bytes")
    path = make(folder, good("ü", image="é.jpg"), "zeilen-ß.jsonl")
    program = (
        "import sys; from internvl_pack.sources.jsonl import JsonlSource\n"
        "source = JsonlSource('set', sys.argv[1], root=sys.argv[2])\n"
        "sample = source.read(0)\n"
        "assert sample.own_id == '\\xfc', sample\n"
        "assert sample.resolve(sample.data['image']).read() == b'bytes'\n"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG"))}
    env = {**clean, "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", program, path, str(folder)], env=env, check=True)


# --- images by name ---------------------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path):
    (tmp_path / "root" / "sub").mkdir(parents=True)
    (tmp_path / "root" / "a.jpg").write_bytes(b"0123456789")
    (tmp_path / "root" / "empty.jpg").write_bytes(b"")
    (tmp_path / "outside.jpg").write_bytes(b"outside")
    os.mkfifo(tmp_path / "root" / "pipe.jpg")
    return tmp_path


def test_an_image_is_found_below_the_root(images):
    ref = FolderResolver(str(images / "root"))("a.jpg")
    assert isinstance(ref, ImageRef)
    assert ref == FileRef(str(images / "root" / "a.jpg"))
    assert ref.read() == b"0123456789"
    assert ref.head(4) == b"0123"
    assert ref.head(99) == b"0123456789"
    assert ref.name == str(images / "root" / "a.jpg")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gone.jpg", "image_missing"),
        ("a.jpg/b.jpg", "image_missing"),
        ("a\0.jpg", "image_missing"),
        ("x-" * 2500, "image_unreadable"),
        ("sub", "image_not_a_file"),
        ("pipe.jpg", "image_not_a_file"),
        ("/dev/zero", "image_outside_root"),
        ("empty.jpg", "image_empty"),
        ("", "image_missing"),
        (None, "image_missing"),
        ("nowhere://bucket/a.jpg", "remote_not_allowed"),
    ],
)
def test_an_image_that_cannot_be_read_costs_its_sample(images, name, reason):
    for read in (lambda ref: ref.read(), lambda ref: ref.head(8)):
        with pytest.raises(SampleError) as error:
            read(FolderResolver(str(images / "root"))(name))
        assert error.value.reason == reason


def test_a_huge_file_is_refused_unread(images, monkeypatch):
    monkeypatch.setattr(image_refs, "MAX_IMAGE_BYTES", 9)
    ref = FileRef(str(images / "root" / "a.jpg"))
    with pytest.raises(SampleError, match="image_too_many_bytes"):
        ref.read()
    assert ref.head(4) == b"0123"


def test_errors_of_the_machine_are_not_the_samples(images, monkeypatch):
    def too_many(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "open", too_many)
    with pytest.raises(OSError, match="Too many open files"):
        FileRef(str(images / "root" / "a.jpg")).read()


# --- the shared cases -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bom_crlf_blank_nofinalnewline", ["g0@1", "g1@3", "g2@5", "g3@7"]),
        ("half_written_line_middle", ["g0@1", "invalid_json@2", "g2@3", "g3@4"]),
        ("half_written_last_line", ["g0@1", "g1@2", "g2@3", "invalid_json@4"]),
        ("invalid_utf8_line2", ["g0@1", "invalid_utf8@2", "g2@3"]),
        ("raw_tab_in_string", ["g0@1", "invalid_json@2", "g2@3"]),
        (
            "nan_and_top_level_not_object",
            ["g0@1", "not_an_object@2", "not_an_object@3", "not_an_object@4", "invalid_json@5", "g1@6"],
        ),
        ("empty", []),
        ("every_image_bad", [f"b{number}@{number + 1}" for number in range(18)]),
    ],
)
def test_case(shared_dir, name, expected):
    assert verdicts(JsonlSource("set", str(shared_dir / "cases" / "jsonl" / f"{name}.jsonl"))) == expected


def test_case_every_image_bad_names_each_reason(shared_dir):
    cases = shared_dir / "cases"
    source = JsonlSource("set", str(cases / "jsonl" / "every_image_bad.jsonl"), root=str(cases / "images"))
    reasons = {}
    for row in range(6):
        sample = source.read(row)
        try:
            sample.resolve(sample.data["image"]).read()
        except SampleError as error:
            reasons[sample.own_id] = error.reason
    assert reasons == {
        "b1": "image_empty",
        "b3": "image_missing",
        "b4": "image_missing",  # `images`, which is not below images/
        "b5": "image_outside_root",
    }


def test_a_cut_record_is_told_in_plain_words(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"id": "a", "conversations": []}\n{"id": "b')
    with pytest.raises(SampleError, match=r"Unterminated string starting at character 7 \(a half-written record\?\)"):
        JsonlSource("a", str(path)).read(1)
