"""Tar shards: keys and members, hostile names, damage named once, what can be delivered is delivered."""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import os
import pickle
import random
import resource
import tarfile
import time
from functools import lru_cache
from pathlib import Path

import pytest

from internvl_pack.errors import SampleError, UserError
from internvl_pack.sources import DatasetSpec, SliceRef, open_source, shard_index
from internvl_pack.sources import shards as shards_module
from internvl_pack.sources.index import SUFFIX
from internvl_pack.sources.shard_index import MAX_DAMAGE, scan_shard
from internvl_pack.sources.shards import ShardSource


def record(own_id: str, **more) -> bytes:
    return json.dumps({"id": own_id, "conversations": [], **more}).encode()


def add(tar, name, data=b"", **changes):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in changes.items():
        setattr(info, key, value)
    tar.addfile(info, io.BytesIO(data))


def archive(members, *, format=tarfile.USTAR_FORMAT) -> bytes:
    """A tar of (name, bytes) or (name, bytes, changes of its header)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, data, *changes in members:
            add(tar, name, data, **(changes[0] if changes else {}))
    return buffer.getvalue()


def pair(key: str, image=b"pixels", **more) -> list[tuple[str, bytes]]:
    base = key.rpartition("/")[2]
    return [(f"{key}.jpg", image), (f"{key}.json", record(base, image=f"{base}.jpg", **more))]


def make(tmp_path, content, name="shard.tar") -> str:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else archive(content))
    return str(path)


def open_one(tmp_path, content) -> ShardSource:
    return ShardSource("set", [make(tmp_path, content)])


def verdicts(source) -> dict[str, str]:
    """{key: own id and its images' bytes, or the reason it is rejected for}; whole ids as keys for several shards."""
    found = {}
    for row in range(len(source)):
        sample_id = source.sample_id(row)
        key = sample_id.split("/", 2)[2] if len(source.block_starts) == 2 else sample_id
        assert key not in found
        try:
            sample = source.read(row)
            assert sample.sample_id == sample_id
            assert sample.origin == source.origin(row)
            names = sample.data.get("image", [])
            names = [names] if isinstance(names, str) else names
            images = [sample.resolve(name).read().decode() for name in names]
            found[key] = " ".join([str(sample.own_id), *images])
        except SampleError as error:
            found[key] = error.reason
    return found


def reasons(source) -> list[str]:
    return [error.reason for error in source.damage]


# --- keys and members -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_shard_is_read_in_every_format(tmp_path, format):
    keys = ["k0", "folder/k1", "x" * 90, "d" * 120 + "/k3"]
    if format != tarfile.USTAR_FORMAT:
        keys += ["y" * 95, "y" * 96, "z" * 180, "long/" * 60 + "k5", "bücher/图片"]
    content = archive([member for key in keys for member in pair(key)], format=format)
    source = open_one(tmp_path, content)
    assert list(verdicts(source)) == keys
    assert all(verdict.endswith(" pixels") for verdict in verdicts(source).values())
    assert not source.damage
    assert not source.warnings


def test_a_sample_says_where_it_is(tmp_path):
    source = open_one(tmp_path, [*pair("a"), *pair("b", b"more pixels")])
    sample = source.read(1)
    assert sample.sample_id == "set/shard/b"
    assert sample.own_id == "b"
    assert sample.origin == f"{tmp_path}/shard.tar:b@3072"
    ref = sample.resolve("b.jpg")
    assert isinstance(ref, SliceRef)
    assert ref.name == f"{tmp_path}/shard.tar:b.jpg"
    assert ref.read() == b"more pixels"
    assert ref.head(4) == b"more"
    assert ref.head(99) == b"more pixels"
    assert pickle.loads(pickle.dumps(sample)) == sample


@pytest.mark.parametrize("row", [-1, 2])
def test_a_row_that_is_not_there_is_an_index_error(tmp_path, row):
    with pytest.raises(IndexError):
        open_one(tmp_path, [*pair("a"), *pair("b")]).read(row)


def test_keys_follow_webdatasets_rule(tmp_path):
    base_plus_ext = pytest.importorskip("webdataset.tariterators").base_plus_ext
    names = ["a.jpg", "a.b/c.jpg", "a.b/c.d.jpg", "a/b/c.JPG", "c", ".hidden", "a.", "a..jpg", "./a.jpg"]
    for name in names:
        key, ending = base_plus_ext(name)
        content = [(name, b"pixels"), ("z.json", record("z"))]
        rows = verdicts(open_one(tmp_path, content))
        expected = {"z": "z"}
        if key is not None and ending:
            expected[key.removeprefix("./")] = "record_missing"
        assert rows == expected, name


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["k.json", "k.jpg"], {"k": ["jpg"]}),
        (["k.0.jpg", "k.1.jpg", "k.json"], {"k": ["0.jpg", "1.jpg"]}),
        (["k.json", "k.meta.json", "k.jpg"], {"k": ["meta.json", "jpg"]}),
        (["k.seg.png", "k.json", "k.jpg", "k.cls"], {"k": ["seg.png", "jpg", "cls"]}),
        (["22.05.jpg", "22.05.json", "22.06.jpg", "22.06.json"], {"22.05": ["jpg"], "22.06": ["jpg"]}),
        (["22.jpg", "22.json", "22.05.jpg", "22.05.json"], {"22": ["jpg"], "22.05": ["jpg"]}),
        (["v1.2/22.05.json", "v1.2/22.05.0.png", "v1.2/22.05.1.png"], {"v1.2/22.05": ["0.png", "1.png"]}),
        (["a.b.c.json", "a.b.json", "a.b.c.jpg", "a.b.jpg"], {"a.b.c": ["jpg"], "a.b": ["jpg"]}),
        (["k.JSON", "k.Jpeg"], {"k": ["jpeg"]}),
        (["./k.jpg", "k.json"], {"k": ["jpg"]}),
        ([".//d/./k.jpg", "d/k.json"], {"d/k": ["jpg"]}),
        (["d/k.json", "k.json"], {"d/k": [], "k": []}),
        (["K.json", "k.json"], {"K": [], "k": []}),
    ],
)
def test_members_go_with_the_record_of_their_key(tmp_path, names, expected):
    source = open_one(tmp_path, [(name, record("r") if name.lower().endswith("json") else b"x") for name in names])
    found = {}
    for row in range(len(source)):
        key = source.sample_id(row).split("/", 2)[2]
        found[key] = [member.ending for member in source.read(row).resolver.members]
    assert found == expected


@pytest.mark.parametrize(
    ("names", "rejected"),
    [
        (["k.jpg"], ["k"]),
        (["22.05.jpg", "22.06.json", "22.06.jpg"], ["22"]),
        (["k.jpg", "k.meta.json"], ["k"]),
    ],
)
def test_members_without_a_record_are_a_rejected_row(tmp_path, names, rejected):
    source = open_one(tmp_path, [(name, record("r") if name.endswith("json") else b"x") for name in names])
    assert [key for key, verdict in verdicts(source).items() if verdict == "record_missing"] == rejected


def test_what_is_no_sample_is_passed_over(tmp_path):
    content = archive([
        ("folder", b"", {"type": tarfile.DIRTYPE}),
        ("folder/", b"", {"type": tarfile.AREGTYPE}),
        ("__meta__/info.json", b"{}"),
        ("folder/._k.jpg", b"mac"),
        *pair("folder/k"),
    ])  # fmt: skip
    source = open_one(tmp_path, content)
    assert verdicts(source) == {"folder/k": "k pixels"}
    assert not source.warnings
    assert not source.damage


def test_members_that_are_no_sample_by_name_are_one_warning(tmp_path):
    source = open_one(tmp_path, [("README", b"x"), ("LICENSE", b"y"), *pair("k")])
    assert verdicts(source) == {"k": "k pixels"}
    assert len(source.warnings) == 1
    assert "not used: 2 members, first 'README' at byte 0" in source.warnings[0]


# --- how a record names its images ------------------------------------------------------------------------------

TWO = [("d/k.0.jpg", b"zero"), ("d/k.1.PNG", b"one"), ("d/k.txt", b"text")]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("d/k.0.jpg", b"zero"),
        ("./d/k.0.jpg", b"zero"),
        ("k.0.jpg", b"zero"),
        ("0.jpg", b"zero"),
        (".0.jpg", b"zero"),
        ("1.png", b"one"),
        ("k.1.png", b"one"),
        ("1.PNG", b"one"),
        ("old/path/k.1.PNG", b"one"),
        ("/absolute/k.1.PNG", b"one"),
        ("txt", b"text"),
        ("jpg", None),
        ("k.2.jpg", None),
        ("/etc/passwd", None),
        ("../d/k.0.jpg", b"zero"),  # no way out: only the base name counts
        ("../../etc/passwd", None),
        ("https://host/x.jpg", None),
        ("", None),
        (None, None),
    ],
)
def test_a_name_is_a_path_a_base_name_or_an_ending(tmp_path, name, found):
    sample = open_one(tmp_path, [*TWO, ("d/k.json", record("r", image=[name, "other"]))]).read(0)
    if found is not None:
        assert sample.resolve(name).read() == found
        return
    with pytest.raises(SampleError) as error:
        sample.resolve(name)
    assert error.value.reason == "image_missing"


@pytest.mark.parametrize(
    ("image", "members", "verdict"),
    [
        ("train2017/000123.jpg", ["k.jpg"], "r k.jpg"),
        (["train2017/000123.jpg"], ["k.jpg"], "r k.jpg"),
        ("train2017/000123.jpg", ["k.jpg", "k.txt"], "r k.jpg"),
        ("train2017/000123.jpg", ["k.0.jpg", "k.1.jpg"], "image_missing"),
        (["x.jpg", "y.jpg"], ["k.jpg"], "image_missing"),
        ("x.jpg", ["k.txt"], "image_missing"),
        ("x.jpg", [], "image_missing"),
        ("k.jpg", ["k.png"], "r k.png"),
    ],
)
def test_the_only_image_goes_with_the_only_name(tmp_path, image, members, verdict):
    content = [(name, name.encode()) for name in members] + [("k.json", record("r", image=image))]
    assert verdicts(open_one(tmp_path, content)) == {"k": verdict}


@pytest.mark.parametrize(
    ("more", "images"),
    [
        ({}, ["k.b.png", "k.a.jpg"]),
        ({"image": []}, []),
        ({"image": None}, None),
        ({"image": "a.jpg"}, "a.jpg"),
        ({"video": "mp4"}, None),
    ],
)
def test_a_record_without_an_image_field_gets_the_images_in_member_order(tmp_path, more, images):
    content = [("k.b.png", b"b"), ("k.txt", b"t"), ("k.json", record("r", **more)), ("k.a.jpg", b"a")]
    assert open_one(tmp_path, content).read(0).data.get("image") == images


# --- rows that are no samples -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "reason", "words"),
    [
        ([("k.json", record("r"))], None, ""),
        (
            [("k.jpg", b"x"), ("k.jpg", b"x"), ("k.json", record("r"))],
            "duplicate_member",
            "'k.jpg' at byte 1024 is there more",
        ),
        ([("k.jpg", b"x"), ("k.JPG", b"x"), ("k.json", record("r"))], "duplicate_member", "'k.JPG'"),
        ([("k.json", record("r")), ("k.json", record("r"))], "duplicate_member", "'k.json'"),
        ([("k.jpg", b"x")], "record_missing", "no .json member goes with 'k.jpg' at byte 0"),
        ([("k.json", b"")], "record_empty", "'k.json' has 0 bytes"),
        ([("k.json", b"{")], "invalid_json", "at character 1"),
        ([("k.json", b"[]")], "not_an_object", "the record is a list"),
        ([("k.json", b"\xff")], "invalid_utf8", "byte 0 of the record"),
        ([("k.json", b"\xef\xbb\xbf{}")], None, ""),
        (
            [("k.json", record("r")), ("k.jpg", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"})],
            "member_not_a_file",
            "is a link",
        ),
        (
            [("k.json", record("r")), ("k.jpg", b"", {"type": tarfile.LNKTYPE, "linkname": "k.json"})],
            "member_not_a_file",
            "is a link",
        ),
        ([("k.json", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"})], "member_not_a_file", "'k.json'"),
        ([("k.jpg", b"", {"type": tarfile.CHRTYPE}), ("k.json", record("r"))], "member_not_a_file", "device"),
        ([("k.jpg", b"", {"type": tarfile.FIFOTYPE}), ("k.json", record("r"))], "member_not_a_file", "device"),
        ([("../k.jpg", b"x"), ("../k.json", record("r"))], "unsafe_member_name", "'../k."),
        ([("a/../../k.json", record("r"))], "unsafe_member_name", "'..'"),
        ([("/etc/k.json", record("r"))], "unsafe_member_name", "absolute"),
        ([("k.jpg", b"x" * 512, {"type": b"S"}), ("k.json", record("r"))], "sparse_member", "'k.jpg'"),
    ],
)
def test_a_bad_sample_costs_itself_alone(tmp_path, members, reason, words):
    source = open_one(tmp_path, [*pair("a"), *members, *pair("z")])
    assert len(source) == 3
    assert not source.damage
    found = list(verdicts(source).values())
    assert (found[0], found[2]) == ("a pixels", "z pixels")
    if reason is None:
        source.read(1)
        return
    with pytest.raises(SampleError) as error:
        source.read(1)
    assert error.value.reason == reason
    assert error.value.source == source.origin(1)
    assert words in error.value.detail.replace("byte 2048", "byte 0").replace("byte 3072", "byte 1024")


def test_a_zero_byte_image_costs_its_sample(tmp_path):
    source = open_one(tmp_path, [*pair("a"), *pair("k", b""), *pair("z")])
    assert verdicts(source) == {"a": "a pixels", "k": "image_empty", "z": "z pixels"}


def test_a_link_without_a_key_is_warned_of(tmp_path):
    link = {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}
    source = open_one(tmp_path, [("evil", b"", link), ("../evil", b"", link), *pair("k")])
    assert verdicts(source) == {"k": "k pixels"}
    assert "not used: 2 members, first 'evil' at byte 0 (link or device)" in source.warnings[0]


def test_members_that_are_not_adjacent_are_joined_with_one_warning(tmp_path):
    keys = [f"k{number}" for number in range(50)]
    pairs = [pair(key, key.encode()) for key in keys]
    content = [image for image, _ in pairs] + [json_member for _, json_member in pairs]
    source = open_one(tmp_path, content)
    assert verdicts(source) == {key: f"{key} {key}" for key in keys}
    assert len(source.warnings) == 1
    for word in ("shard.tar", "'k0'", "bytes 0 and 51200", "50 such keys"):
        assert word in source.warnings[0]


def test_a_sample_that_stands_twice_is_ambiguous(tmp_path):
    source = open_one(tmp_path, [*pair("a"), *pair("k"), *pair("z"), *pair("k")])
    assert verdicts(source) == {"a": "a pixels", "k": "duplicate_member", "z": "z pixels"}


@pytest.mark.slow
def test_a_shard_whose_names_all_share_a_first_dot_is_quick(tmp_path):
    members = [member for number in range(5000) for member in pair(f"2024.01.{number}", b"x")]
    path = make(tmp_path, members)
    started = time.process_time()
    assert len(scan_shard(path)) == 5000
    assert time.process_time() - started < 5


# --- damage -----------------------------------------------------------------------------------------------------

KEYS = [f"k{number}" for number in range(6)]


def good_archive(format=tarfile.USTAR_FORMAT, keys=KEYS) -> bytes:
    rng = random.Random(0)
    members = [m for key in keys for m in pair(key, f"pixels of {key} {'.' * rng.randint(1, 1500)}".encode())]
    return archive(members, format=format)


def headers_of(content: bytes) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        return tar.getmembers()


def test_a_damaged_header_costs_one_sample_said_once(tmp_path):
    content = good_archive()
    for info in headers_of(content):
        for at in (0, 124, 148, 156, 200):
            damaged = bytearray(content)
            damaged[info.offset + at] ^= 0x41
            source = open_one(tmp_path, bytes(damaged))
            found = verdicts(source)
            key = info.name.partition(".")[0]
            others = [k for k in KEYS if k != key]
            assert [k for k, verdict in found.items() if verdict.startswith(k)] == others
            assert reasons(source) + [v for v in found.values() if " " not in v] == ["shard_damaged"]
            assert source.damage[0].source == f"{tmp_path}/shard.tar:{key}@{info.offset}"


@pytest.mark.slow
def test_a_shard_cut_anywhere_gives_what_is_whole(tmp_path):
    content = good_archive()
    infos = headers_of(content)
    end_of = {}
    for info in infos:
        end_of[info.name.partition(".")[0]] = info.offset_data + info.size
    end = infos[-1].offset_data + -(-infos[-1].size // 512) * 512
    for length in range(1, end + 1, 37):
        source = open_one(tmp_path, content[:length])
        whole = [key for key in KEYS if end_of[key] <= length]
        found = verdicts(source)
        assert list(found) == whole, length
        assert all(verdict.startswith(key) for key, verdict in found.items())
        assert len(source.damage) + len(source.warnings) == 1, (length, source.damage, source.warnings)


def test_a_cut_is_said_with_key_and_place(tmp_path):
    content = good_archive()
    info = headers_of(content)[4]
    source = open_one(tmp_path, content[: info.offset_data + 5])
    assert reasons(source) == ["shard_cut"]
    assert f"shard.tar:k2@{info.offset_data}: the archive is cut inside 'k2.jpg': 5 of {info.size}" in str(
        source.damage[0]
    )


def test_a_shard_without_end_mark_is_warned_of(tmp_path):
    content = good_archive()
    end = headers_of(content)[-1].offset_data + 512
    source = open_one(tmp_path, content[:end])
    assert len(source) == 6
    assert not source.damage
    assert "no end mark" in source.warnings[0]


@pytest.mark.parametrize("shift", [1, 100, 512, 700])
def test_bytes_put_in_or_taken_out_cost_one_sample(tmp_path, shift):
    content = good_archive()
    at = headers_of(content)[6].offset_data + 3  # k3.jpg
    for damaged in (content[:at] + bytes(shift) + content[at:], content[:at] + content[at + shift :]):
        found = verdicts(open_one(tmp_path, damaged))
        assert {key for key, verdict in found.items() if verdict.startswith(key)} >= set(KEYS) - {"k3"}


def test_a_member_that_promises_more_than_there_is_does_not_hide_the_rest(tmp_path):
    content = archive([*pair("a"), ("k.jpg", b""), *pair("z")])
    header = bytearray(content[1536 + 512 - 512 : 2048])
    at = headers_of(content)[2].offset
    header = bytearray(content[at : at + 512])
    header[124:136] = b"77777777777\0"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    source = open_one(tmp_path, content[:at] + bytes(header) + content[at + 512 :])
    assert verdicts(source) == {"a": "a pixels", "z": "z pixels"}
    assert reasons(source) == ["shard_cut"]
    assert "shard.tar:k@" in str(source.damage[0])


def test_archives_one_after_another_are_read_to_the_end(tmp_path):
    source = open_one(tmp_path, archive(pair("a")) + archive(pair("b")) + bytes(5000))
    assert verdicts(source) == {"a": "a pixels", "b": "b pixels"}
    assert not source.damage
    assert "there is more after the end mark" in source.warnings[0]


def test_rubbish_after_the_end_is_damage(tmp_path):
    source = open_one(tmp_path, archive(pair("a")) + b"<html>error</html>" * 100)
    assert verdicts(source) == {"a": "a pixels"}
    assert reasons(source) == ["shard_damaged"]


@pytest.mark.parametrize(
    ("content", "damage", "num_warnings"),
    [
        (b"", ["shard_empty"], 0),
        (b"\0" * 10240, [], 1),
        (b"\0" * 7, [], 1),
        (b"<html><body>503</body></html>", ["shard_not_tar"], 0),
        (b"<html><body>503</body></html>" * 100, ["shard_not_tar"], 0),
        (bytes(range(256)) * 40, ["shard_not_tar"], 0),
        (archive([]), [], 1),
    ],
)
def test_a_shard_without_samples_does_not_cost_the_next(tmp_path, content, damage, num_warnings):
    paths = [make(tmp_path, content, "bad.tar"), make(tmp_path, pair("k"), "good.tar")]
    source = ShardSource("set", paths)
    assert verdicts(source) == {"set/good/k": "k pixels"}
    assert reasons(source) == damage
    assert len(source.warnings) == num_warnings
    assert all("bad.tar" in str(said) for said in [*source.damage, *source.warnings])


def test_the_first_header_may_be_the_damaged_one(tmp_path):
    content = bytearray(good_archive())
    content[0] ^= 1
    source = open_one(tmp_path, bytes(content))
    assert list(verdicts(source)) == KEYS[1:]
    assert reasons(source) == ["shard_damaged"]


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_damaged_long_name_never_gives_a_wrong_one(tmp_path, format):
    keys = [f"{'folder/' * 30}k{number}" for number in range(3)]
    content = archive([member for key in keys for member in pair(key)], format=format)
    marks = [at for at in range(0, len(content), 512) if content[at + 257 : at + 262] == b"ustar"]
    for at in marks:
        damaged = bytearray(content)
        damaged[at + 149] ^= 1
        source = open_one(tmp_path, bytes(damaged))
        assert set(verdicts(source)) <= set(keys)
        assert sum(" " in verdict for verdict in verdicts(source).values()) == 2
        assert len(source.damage) == 1


def test_endless_damage_is_given_up(tmp_path):
    block = bytearray(archive([("k.jpg", b"")])[:512])
    content = b"".join(bytes(block) + b"\xff" * 512 for _ in range(MAX_DAMAGE + 50))
    source = open_one(tmp_path, content)
    assert len(source.damage) == MAX_DAMAGE + 1
    assert "too many damaged places" in str(source.damage[-1])


@pytest.mark.parametrize(
    ("pack", "cure"),
    [
        (gzip.compress, "gunzip"),
        (lambda data: b"\x28\xb5\x2f\xfd" + data, "zstd -d"),
        (lambda data: b"BZh" + data, "bunzip2"),
    ],
)
def test_a_compressed_shard_is_refused_by_name(tmp_path, pack, cure):
    path = make(tmp_path, pack(archive(pair("k"))), "shard.tar.gz")
    with pytest.raises(UserError) as error:
        ShardSource("set", [path])
    assert path in str(error.value)
    assert cure in str(error.value)


def test_damage_and_oddities_are_said_once_at_opening(tmp_path, caplog):
    good = make(tmp_path, [*pair("a"), *pair("b")])
    bad = make(tmp_path, b"", "empty.tar")
    open_source(DatasetSpec(name="set", shards=(good, bad)))
    assert [record.message for record in caplog.records] == [
        f"dataset 'set': shard_empty: {bad}@0: before the first key: the file has 0 bytes"
    ]


# --- several shards ---------------------------------------------------------------------------------------------


def test_shards_come_in_their_order(tmp_path):
    paths = [make(tmp_path, [*pair(f"{n}a"), *pair(f"{n}b")], f"s-{n}.tar") for n in (2, 0, 1)]
    source = ShardSource("set", paths)
    assert [source.sample_id(row) for row in range(6)] == [
        "set/s-2/2a", "set/s-2/2b", "set/s-0/0a", "set/s-0/0b", "set/s-1/1a", "set/s-1/1b",
    ]  # fmt: skip
    assert list(source.block_starts) == [0, 2, 4, 6]


def test_a_key_in_two_shards_is_two_samples_and_one_warning(tmp_path):
    paths = [make(tmp_path, [*pair("k0", b"%d" % n), *pair(f"u{n}")], f"s-{n}.tar") for n in range(3)]
    source = ShardSource("set", paths)
    ids = [source.sample_id(row) for row in range(len(source))]
    assert len(set(ids)) == 6
    sample = source.read(2)
    assert sample.resolve("k0.jpg").read() == b"1"
    assert len(source.warnings) == 1
    for word in ("'k0'", "s-0.tar at byte 1024", "s-1.tar at byte 1024", "2 such keys"):
        assert word in source.warnings[0]


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["a/0.tar", "b/1.tar"], ["0", "1"]),
        (["a/0.tar", "b/0.tar"], ["a/0", "b/0"]),
        (["0.tar", "b/0.tar"], ["0", "b/0"]),
        (["x.0.tar", "x.1.tar"], ["x.0", "x.1"]),
        (["0.tar", "0"], ["0.tar", "0"]),
    ],
)
def test_ids_name_each_shard_apart(tmp_path, names, labels):
    source = ShardSource("set", [make(tmp_path, pair("k"), name) for name in names])
    assert [source.sample_id(row) for row in range(len(names))] == [f"set/{label}/k" for label in labels]


# --- index files and processes ----------------------------------------------------------------------------------


def everything(source):
    rows = [(source.sample_id(row), source.origin(row)) for row in range(len(source))]
    return rows, verdicts(source), [str(error) for error in source.damage], list(source.warnings)


@pytest.fixture
def odd_shards(tmp_path) -> list[str]:
    damaged = bytearray(good_archive())
    damaged[headers_of(bytes(damaged))[4].offset] ^= 1
    interleaved = [member for pairs in zip(pair("x"), pair("y"), strict=True) for member in pairs]
    return [
        make(tmp_path, good_archive(), "s-0.tar"),
        make(tmp_path, bytes(damaged), "s-1.tar"),
        make(tmp_path, [*interleaved, ("k.jpg", b"x"), ("README", b"x")], "s-2.tar"),
        make(tmp_path, b"", "s-3.tar"),
    ]


def test_an_index_file_says_the_same(odd_shards, caplog):
    in_memory = everything(ShardSource("set", odd_shards))
    for path in odd_shards:
        shard_index.write_index(path)
    source = ShardSource("set", odd_shards)
    assert all(shard.index is None for shard in source._shards)
    assert everything(source) == in_memory
    assert not caplog.records


def test_an_index_goes_with_its_shard(odd_shards, tmp_path):
    for path in odd_shards:
        shard_index.write_index(path)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    paths = []
    for path in odd_shards:
        name = os.path.basename(path)
        os.rename(path, moved / name)
        os.rename(path + SUFFIX, moved / (name + SUFFIX))
        paths.append(str(moved / name))
    source = ShardSource("set", paths)
    assert all(shard.index is None for shard in source._shards)
    assert all(str(moved) in str(said) for said in [*source.damage, *source.warnings])


def test_a_stale_or_damaged_index_is_left_aside(odd_shards):
    path = odd_shards[0]
    shard_index.write_index(path)
    index = Path(path + SUFFIX)
    whole = index.read_bytes()
    index.write_bytes(whole[: len(whole) // 2])
    source = ShardSource("set", [path])
    assert len(source) == 6
    assert "not used: 1 index file (" in source.warnings[0]
    index.write_bytes(whole)
    os.utime(path, ns=(0, 12345))
    source = ShardSource("set", [path])
    assert len(source) == 6
    assert "has changed since" in source.warnings[0]


def test_few_index_files_stay_mapped(tmp_path, monkeypatch):
    assert shards_module._index_beside.cache_parameters()["maxsize"] == shards_module.MAX_MAPPED_SHARDS
    monkeypatch.setattr(shards_module, "_index_beside", lru_cache(maxsize=3)(shards_module._index_beside.__wrapped__))
    paths = [make(tmp_path, pair(f"k{number}"), f"s-{number}.tar") for number in range(12)]
    for path in paths:
        shard_index.write_index(path)
    source = ShardSource("set", paths)
    for _ in range(2):
        assert [source.read(row).own_id for row in range(12)] == [f"k{number}" for number in range(12)]
    assert shards_module._index_beside.cache_info().currsize <= 3


def test_an_index_that_goes_away_is_made_anew(tmp_path):
    path = make(tmp_path, good_archive())
    shard_index.write_index(path)
    source = ShardSource("set", [path])
    os.unlink(path + SUFFIX)
    assert source.read(3).own_id == "k3"


def test_a_shard_replaced_while_in_use_is_noticed(tmp_path):
    path = make(tmp_path, good_archive())
    source = pickle.loads(pickle.dumps(ShardSource("set", [path])))
    make(tmp_path, good_archive()[512:] + bytes(512))
    with pytest.raises(UserError, match=r"shard\.tar"):
        for row in range(6):
            source.read(row)


@pytest.mark.slow
@pytest.mark.parametrize("with_index", [False, True])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_beside_each_other(odd_shards, method, with_index):
    if with_index:
        for path in odd_shards:
            shard_index.write_index(path)
    source = ShardSource("set", odd_shards)
    expected = everything(source)
    with multiprocessing.get_context(method).Pool(2) as pool:
        for found in pool.map(everything, [source] * 3):
            assert found == expected


# --- the shared cases -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "good", "bad", "damage", "num_warnings"),
    [
        ("good_5", ["k0", "k1", "k2", "k3", "k4"], {}, [], 0),
        ("duplicate_member", ["k0", "k2"], {"k1": "duplicate_member"}, [], 0),
        ("interleaved_by_extension", ["k0", "k1", "k2", "k3"], {}, [], 1),
        ("dots_in_names", ["v1.2/k0", "v1.2/22.05", "v1.2/22.06", "k3"], {}, [], 0),
        ("uppercase_extension", ["k0", "k1"], {}, [], 0),
        ("missing_partner", ["k0", "k3"], {"k1": "image_missing", "k2": "record_missing"}, [], 0),
        ("zero_byte_members", ["k0", "k3"], {"k1": "image_empty", "k2": "record_empty"}, [], 0),
        ("bad_json_and_bad_image", ["k0", "k1", "k3"], {"k2": "invalid_json"}, [], 0),  # k1's image is the decoder's
        ("truncated_mid_member", ["k0", "k1"], {}, ["shard_cut"], 0),
        ("empty_archive", [], {}, [], 1),
        ("zero_bytes", [], {}, ["shard_empty"], 0),
        ("html_instead_of_tar", [], {}, ["shard_not_tar"], 0),
    ],
)
def test_case(shared_dir, name, good, bad, damage, num_warnings):
    source = ShardSource("set", [str(shared_dir / "cases" / "tar" / f"{name}.tar")])
    found = {}
    for row in range(len(source)):
        key = source.sample_id(row).split("/", 2)[2]
        try:
            sample = source.read(row)
            assert sample.resolve(sample.data["image"]).read()
            found[key] = "good"
        except SampleError as error:
            found[key] = error.reason
    assert [key for key, verdict in found.items() if verdict == "good"] == good
    assert {key: verdict for key, verdict in found.items() if verdict != "good"} == bad
    assert reasons(source) == damage
    assert len(source.warnings) == num_warnings


def header(name: str, size: bytes, kind: bytes = b"0") -> bytes:
    """A tar header of 512 bytes whose size field, 12 bytes, may say anything."""
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT)[:512])
    block[124:136], block[156:157], block[148:156] = size, kind, b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def empty_record(key: str) -> bytes:
    return header(f"{key}.json", b"%011o\0" % 2) + b"{}".ljust(512, b"\0")


FORGED = {
    "a size of 2^80": header("x.json", b"\x80" + (2**80).to_bytes(11, "big")),
    "a size of 8 GB": header("x.json", b"77777777777\0"),
    "a negative size": header("x.json", b"\xff" * 12),
    "a pax header of 2 GB": header("p", b"17777777777\0", b"x") + b"12 path=evil\n".ljust(512, b"\0"),
    "a pax record that is longer": header("p", b"%011o\0" % 512, b"x") + b"999999999 path=x\n".ljust(512, b"\0"),
    "a pax size below 0": header("p", b"%011o\0" % 512, b"x") + b"12 size=-10\n".ljust(512, b"\0") + empty_record("n"),
    "a name of 2 GB": header("././@LongLink", b"17777777777\0", b"L") + b"n" * 512,
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_headers_that_claim_more_than_there_is_cost_no_memory_and_no_earlier_sample(forged, tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(empty_record("a") + empty_record("b") + forged + empty_record("c") + bytes(1024))
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    source = ShardSource("d", [str(path)])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000, "kB"
    assert time.process_time() - begun < 5
    keys = [source.sample_id(row).rpartition("/")[2] for row in range(len(source))]
    assert keys[:2] == ["a", "b"] and source.read(0).data == {}
    assert set(keys) <= {"a", "b", "c", "n"} and (source.damage or "n" in keys)
