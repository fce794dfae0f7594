"""Data by the addresses of fsspec's stores (s3, gs, ...): here its memory store, and one that fails as stores do.

The stores' own packages need an account; what they share with these two is fsspec's interface, and its loop in a
thread, which a forked worker must not inherit.
"""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest
from helpers.factory import TINY, write_jsonl, write_meta, write_shards

from internvl_pack import PackedDataset, PackingConfig, SampleError, UserError, build_loader
from internvl_pack.cli import main
from internvl_pack.sources import load_meta, open_source, remote
from internvl_pack.sources.image_refs import RemoteRef
from internvl_pack.sources.remote import RemoteError, fetch

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("requests")
from fsspec.asyn import AsyncFileSystem  # noqa: E402

ROWS = 12


class FlakyStore(AsyncFileSystem):
    """Serves a folder as s3fs serves a bucket, and raises what it is told to.

    Attributes:
        faults: {end of a path: [exceptions]}; each call takes the next, none are left: it is served.
    """

    protocol = "flaky"
    cachable = True
    folder: Path
    faults: ClassVar[dict[str, list[Exception]]] = {}
    calls: ClassVar[Counter[str]] = Counter()

    def _place(self, path: str) -> Path:
        path = self._strip_protocol(path)
        type(self).calls[path] += 1
        for end, faults in self.faults.items():
            if path.endswith(end) and faults:
                raise faults.pop(0)
        return self.folder / path.split("/", 1)[1]

    async def _info(self, path, **_):
        place = self._place(path)
        if place.is_dir():
            return {"name": path, "size": 0, "type": "directory"}
        found = place.stat()
        return {"name": path, "size": found.st_size, "type": "file", "ETag": f'"{found.st_mtime_ns}"'}

    async def _cat_file(self, path, start=None, end=None, **_):
        return self._place(path).read_bytes()[start:end]


@pytest.fixture(scope="module", autouse=True)
def registered():
    fsspec.register_implementation("flaky", FlakyStore, clobber=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    """The meta files of the same samples as jsonl with images and as shards."""
    folder = tmp_path_factory.mktemp("made")
    lines = write_jsonl(folder, ROWS)
    lines = lines.rename(folder / "lines.json")
    return lines, write_shards(folder, ROWS, per_shard=ROWS // 2)


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch, made):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("INTERNVL_PACK_CACHE", "INTERNVL_PACK_CACHE_GB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("INTERNVL_PACK_RETRIES", "3")
    monkeypatch.setattr(remote, "FIRST_PAUSE_SECONDS", 0.001)
    FlakyStore.folder, FlakyStore.faults = made[0].parent, {}
    FlakyStore.calls.clear()


def contents(meta: Path, tokenizer, num_workers: int = 0) -> dict[str, tuple]:
    """{end of the sample's id: its tokens and the sum of its pixels}"""
    config = PackingConfig(max_packed_tokens=256, num_images_expected=16)
    loader = build_loader(PackedDataset.from_meta(meta, tokenizer, config, encode=TINY), num_workers=num_workers)
    found = {}
    for batch in loader:
        ends = batch["cu_seqlens"].tolist()
        tiles = batch["segment_tile_offsets"].tolist()
        for i, name in enumerate(batch["sample_ids"]):
            ids = tuple(batch["input_ids"][0, ends[i] : ends[i + 1]].tolist())
            pixels = int(batch["pixel_values"][tiles[i] : tiles[i + 1]].sum())
            found[name.rpartition("/")[2]] = ids, pixels
    assert not loader.take_events()
    return found


@pytest.fixture(scope="module")
def expected(made, tokenizer) -> list[dict[str, tuple]]:
    """What the folder gives, as jsonl with images and as shards."""
    found = [contents(meta, tokenizer) for meta in made]
    assert [len(each) for each in found] == [ROWS] * 2
    return found


def by_address(tmp_path: Path, scheme: str, kind: str) -> Path:
    base = f"{scheme}://bucket"
    spec = {"annotation": f"{base}/made.jsonl", "root": f"{base}/images"}
    if kind == "shards":
        spec = {"shards": f"{base}/made-{{0000..0001}}.tar"}
    return write_meta(tmp_path, {"made": spec})


def into_memory(folder: Path) -> None:
    store = fsspec.filesystem("memory")
    for file in folder.rglob("*"):
        if file.is_file():
            store.pipe_file(f"/bucket/{file.relative_to(folder)}", file.read_bytes())


@pytest.mark.parametrize("kind", ["lines", "shards"])
@pytest.mark.parametrize("scheme", ["memory", "flaky"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_store_gives_the_same_data_as_a_folder(tmp_path, made, expected, tokenizer, scheme, kind, kept, monkeypatch):
    if kept:
        monkeypatch.setenv("INTERNVL_PACK_CACHE", str(tmp_path / "kept"))
    into_memory(made[0].parent)
    assert contents(by_address(tmp_path, scheme, kind), tokenizer) == expected[kind == "shards"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [OSError("slow down"), TimeoutError(), RuntimeError("ClientError 503"), ValueError()])
def test_what_may_pass_is_tried_again(tmp_path, made, expected, tokenizer, fault):
    names = ["made.jsonl", *(file.name for file in (made[0].parent / "images").iterdir())]
    FlakyStore.faults = {name: [fault] * 3 for name in names[:5]}
    assert contents(by_address(tmp_path, "flaky", "lines"), tokenizer) == expected[0]
    assert not any(FlakyStore.faults.values()), "all faults came"


def test_a_copy_goes_on_after_a_fault(tmp_path, monkeypatch):
    FlakyStore.folder = tmp_path
    (tmp_path / "a.tar").write_bytes(bytes(range(256)) * 400)
    monkeypatch.setattr(remote, "_FSSPEC_BYTES", 10_000)
    FlakyStore.faults = {"a.tar": [OSError(f"{n}") for n in range(3)]}
    assert Path(remote.copy_of("flaky://bucket/a.tar")).read_bytes() == bytes(range(256)) * 400
    assert fetch("flaky://bucket/a.tar", 255, 515) == bytes([255, *range(256), 0, 1, 2])


@pytest.mark.parametrize(
    "fault, words, calls",
    [
        (OSError("slow down"), r"slow down \(tried 4 times\)", 4),
        (PermissionError("403 Forbidden"), "permission denied: 403 Forbidden", 1),
        (FileNotFoundError("bucket/made.jsonl"), "there is no such file", 1),
    ],
)
@pytest.mark.parametrize("kind, file", [("lines", "made.jsonl"), ("shards", "made-0001.tar")])
def test_data_that_cannot_be_opened_is_one_line_with_its_address(tmp_path, capsys, kind, file, fault, words, calls):
    FlakyStore.faults = {file: [fault] * 50}
    meta = by_address(tmp_path, "flaky", kind)
    with pytest.raises(UserError, match=rf"flaky://bucket/{file}.*{words}") as error:
        [open_source(spec) for spec in load_meta(meta)]
    assert "\n" not in str(error.value)
    assert main(["validate", str(meta)]) == 2
    assert f"flaky://bucket/{file}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "fault, reason",
    [
        (OSError("slow down"), "image_unreachable"),
        (PermissionError("403"), "image_unreachable"),
        (FileNotFoundError(), "image_missing"),
    ],
)
def test_an_image_that_cannot_be_fetched_costs_its_sample(tmp_path, made, tokenizer, fault, reason):
    FlakyStore.faults = {"00003_0.png": [fault] * 1000}
    config = PackingConfig()
    meta = by_address(tmp_path, "flaky", "lines")
    loader = build_loader(PackedDataset.from_meta(meta, tokenizer, config, encode=TINY))
    assert len({name for batch in loader for name in batch["sample_ids"]}) == ROWS - 1
    (event,) = loader.take_events()
    assert event["reason"] == reason and "flaky://bucket/images/00003_0.png" in event["detail"]


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(RemoteError, match="flaky://bucket/images: it is a folder"):
        fetch("flaky://bucket/images")
    assert FlakyStore.calls == {"bucket/images": 1}
    with pytest.raises(SampleError, match=r"image_unreachable: .*it is a folder"):
        RemoteRef("flaky://bucket/images").read()
    with pytest.raises(UserError, match="it is a folder"):
        open_source(load_meta(write_meta(tmp_path, {"made": {"annotation": "flaky://bucket/images"}}))[0])


@pytest.mark.parametrize("spec", [{"annotation": "nosuch://b/a.jsonl"}, {"shards": "nosuch://b/a.tar"}])
def test_a_scheme_that_no_package_reads_is_said(tmp_path, spec):
    with pytest.raises(UserError, match="nosuch://b/a"):
        open_source(load_meta(write_meta(tmp_path, {"made": spec}))[0])


def test_a_missing_package_of_a_store_is_said(tmp_path, monkeypatch):
    def url_to_fs(address):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", url_to_fs)
    with pytest.raises(UserError, match=r"s3://bucket/a\.jsonl: Install s3fs"):
        open_source(load_meta(write_meta(tmp_path, {"made": {"annotation": "s3://bucket/a.jsonl"}}))[0])


@pytest.mark.slow
def test_forked_workers_have_a_loop_of_their_own(tmp_path, expected, tokenizer):
    """The parent has read the annotation file by the store's loop; the worker fetches images by the same store."""
    if multiprocessing.get_start_method() != "fork":
        pytest.skip("workers are not forked here")
    assert contents(by_address(tmp_path, "flaky", "lines"), tokenizer, num_workers=1) == expected[0]


def test_records_may_name_addresses_of_several_stores(tmp_path, made, expected, tokenizer, monkeypatch):
    monkeypatch.setenv("INTERNVL_PACK_ALLOW_REMOTE", "memory://bucket, flaky://bucket")
    into_memory(made[0].parent)
    lines = [json.loads(line) for line in (made[0].parent / "made.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        store = ("memory", "flaky")[number % 2]
        line["image"] = [f"{store}://bucket/images/{name}" for name in line.get("image", [])]
    (tmp_path / "made.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    meta = write_meta(tmp_path, {"made": {"root": "", "annotation": "made.jsonl"}})
    assert contents(meta, tokenizer) == expected[0]
