"""Data by address, against a server that is slow, drops connections, refuses ranges and answers with error pages."""

from __future__ import annotations

import http.server
import json
import multiprocessing
import os
import re
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest
from helpers.factory import TINY, png, write_jsonl, write_meta, write_shards
from PIL import Image

from internvl_pack import PackedDataset, PackingConfig, SampleError, UserError, build_loader
from internvl_pack.cli import main
from internvl_pack.estimate.epochs import estimate_epochs
from internvl_pack.samples import Samples
from internvl_pack.sources import load_meta, open_source, remote
from internvl_pack.sources.files import Stamp
from internvl_pack.sources.image_refs import RemoteRef, SliceRef
from internvl_pack.sources.remote import RemoteError, copy_of, fetch
from internvl_pack.survey.validate import Checker, validate

pytest.importorskip("requests")
pytest.importorskip("fsspec")


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder, with faults.

    Attributes:
        faults: {part of a path: [kind of fault, ...]}; each request takes the next, none are left: it is served.
        ranges: whether ranges are honoured; heads: whether HEAD is.
        requests: how often each "METHOD path" came.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.faults: dict[str, list[str]] = {}
        self.ranges = self.heads = True
        self.requests: Counter[str] = Counter()
        self.sent = 0

    def handle_error(self, request, client_address) -> None:
        pass

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def do_HEAD(self) -> None:
        self.serve(body=False)

    def do_GET(self) -> None:
        self.serve(body=True)

    def serve(self, body: bool) -> None:
        server = self.server
        server.requests[f"{self.command} {self.path}"] += 1
        if not body and not server.heads:
            return self.answer(405, b"")
        fault = next((f.pop(0) for part, f in server.faults.items() if part in self.path and f and body), None)
        if fault == "refuse":
            self.close_connection = True
            return self.connection.close()
        if fault and fault.isdigit():
            return self.answer(int(fault), b"<html>An error page</html>")
        if fault == "page":
            return self.answer(200, b"<html>Please log in</html>")
        path = server.folder / unquote(self.path.lstrip("/").split("?")[0])
        if not path.is_file():
            return self.answer(404, b"<html>404</html>")
        data, status, extra = path.read_bytes(), 200, {}
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if found and server.ranges:
            start, stop = int(found[1]), int(found[2] or len(data) - 1) + 1
            if start >= len(data):
                return self.answer(416, b"")
            extra["Content-Range"] = f"bytes {start}-{min(stop, len(data)) - 1}/{len(data)}"
            data, status = data[start:stop], 206
        self.send_response(status)
        extra |= {"Content-Length": str(len(data)), "ETag": f'"{path.stat().st_mtime_ns}"'}
        for name, value in extra.items():
            self.send_header(name, value)
        self.end_headers()
        if not body:
            return None
        if fault == "drop":
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            self.wfile.flush()
            return self.connection.close()
        if fault == "stall":
            time.sleep(2.5)
        if fault == "slow":
            for at in range(0, len(data), max(1, len(data) // 5)):
                self.wfile.write(data[at : at + max(1, len(data) // 5)])
                self.wfile.flush()
                time.sleep(0.05)
            return None
        server.sent += len(data)
        self.wfile.write(data)
        return None

    def answer(self, status: int, page: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page)


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "served").mkdir()
    return tmp_path / "served"


@pytest.fixture
def server(folder):
    server = Server(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    """Short pauses, and a folder of copies of the test's own, which is not for images."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("INTERNVL_PACK_CACHE", "INTERNVL_PACK_CACHE_GB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("INTERNVL_PACK_RETRIES", "3")
    monkeypatch.setenv("INTERNVL_PACK_TIMEOUT", "1.5")
    monkeypatch.setattr(remote, "FIRST_PAUSE_SECONDS", 0.001)
    return tmp_path / "home" / ".cache" / "internvl_pack"


CONTENT = bytes(range(256)) * 40_000  # 10 MB


@pytest.fixture
def file(folder, server) -> str:
    (folder / "a b.bin").write_bytes(CONTENT)
    return f"{server.address}/a b.bin"


# --- one address


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("start, stop", [(0, None), (0, 10), (5_000_000, 5_000_100), (10_239_990, 11_000_000), (7, 7)])
def test_parts_are_read_with_and_without_ranges(file, server, ranges, start, stop):
    server.ranges = ranges
    assert fetch(file, start, stop) == CONTENT[start:stop]
    if ranges and stop is not None:
        assert server.sent <= stop - start, "no byte more than asked for"


FAULTS = [["drop"], ["drop", "drop"], ["503", "429", "500"], ["stall"], ["slow"], ["refuse"], ["drop", "503", "slow"]]


@pytest.mark.slow
@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("faults", FAULTS, ids="-".join)
def test_what_may_pass_is_tried_again(file, server, faults, ranges):
    server.ranges = ranges
    server.faults["bin"] = list(faults)
    assert fetch(file) == CONTENT
    server.faults["bin"] = list(faults)
    assert Path(copy_of(file)).read_bytes() == CONTENT


def test_a_copy_goes_on_where_it_broke_off(file, server):
    server.faults["bin"] = ["drop", "drop"]
    copy_of(file)
    assert server.sent <= len(CONTENT) // 4 + (1 << 18), "a half, then a half of the rest, then what is left"


def test_what_does_not_pass_is_said_by_address_and_number_of_tries(file, server):
    server.faults["bin"] = ["503"] * 9
    with pytest.raises(RemoteError, match=r"a b\.bin: the server answered 503.*tried 4 times"):
        fetch(file)
    assert server.requests["GET /a%20b.bin"] == 4


@pytest.mark.parametrize("status, kind", [("404", "gone"), ("410", "gone"), ("403", ""), ("401", "")])
def test_what_will_not_pass_is_not_tried_again(file, server, status, kind):
    server.faults["bin"] = [status] * 9
    with pytest.raises(RemoteError, match=f"answered {status}") as error:
        fetch(file)
    assert error.value.kind == kind and server.requests.total() == 1


def test_nobody_listens(monkeypatch):
    monkeypatch.setenv("INTERNVL_PACK_RETRIES", "1")
    with pytest.raises(RemoteError, match=r"127\.0\.0\.1:9/x.*tried 2 times"):
        fetch("http://127.0.0.1:9/x")


# --- the folder of copies


def test_a_copy_is_made_once_and_renewed_when_the_file_changes(file, server, folder):
    path = copy_of(file)
    assert copy_of(file, check=True) == path and server.requests["GET /a%20b.bin"] == 1
    (folder / "a b.bin").write_bytes(b"new")
    assert Path(copy_of(file)).read_bytes() == CONTENT, "a run does not ask again"
    assert Path(copy_of(file, check=True)).read_bytes() == b"new"


def test_a_server_without_head_is_copied_from(file, server):
    server.heads = False
    assert Path(copy_of(file)).read_bytes() == CONTENT


def test_the_folder_keeps_to_its_size(server, folder, quick, monkeypatch):
    monkeypatch.setenv("INTERNVL_PACK_CACHE_GB", "0.0000025")  # 2,500 bytes
    for name in "abcd":
        (folder / name).write_bytes(name.encode() * 1000)
        copy_of(f"{server.address}/{name}")
        time.sleep(0.02)
        remote.cached(f"{server.address}/a")
        time.sleep(0.02)
    kept = [name for name in "abcd" if remote.cached(f"{server.address}/{name}")]
    assert kept == ["a", "d"], "what was not used for longest goes first"
    assert sum(p.stat().st_size for p in quick.iterdir() if "." not in p.name) <= 2500


def test_processes_copy_once(file, server):
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert len(set(pool.map(copy_of, [file] * 6))) == 1
    assert server.requests["GET /a%20b.bin"] == 1


@pytest.mark.parametrize("name, value", [("INTERNVL_PACK_CACHE_GB", "many"), ("INTERNVL_PACK_RETRIES", "-1")])
def test_impossible_settings_are_named(file, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=name):
        copy_of(file)


# --- data sets


def everything(meta, tokenizer) -> dict[str, tuple]:
    dataset = PackedDataset.from_meta(meta, tokenizer, PackingConfig(), encode=TINY)
    found = {}
    for batch in build_loader(dataset):
        offsets = batch["segment_tile_offsets"].tolist()
        for sample_id, start, stop in zip(batch["sample_ids"], offsets, offsets[1:], strict=False):
            found[sample_id] = int(batch["pixel_values"][start:stop].sum())
    return found


def remote_meta(tmp_path, folder, server, kind: str) -> tuple[Path, Path]:
    """(a local meta file, one that names the same data by address)"""
    here = write_jsonl(folder, 20) if kind == "jsonl" else write_shards(folder, 20, per_shard=10)
    meta = json.loads(here.read_text())["made"]
    if kind == "jsonl":
        meta |= {"root": f"{server.address}/images", "annotation": f"{server.address}/made.jsonl"}
    else:
        meta |= {"shards": f"{server.address}/made-{{0000..0001}}.tar"}
    return here, write_meta(tmp_path, {"made": meta})


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True], ids=["", "folder named"])
@pytest.mark.parametrize("kind", ["jsonl", "shards"])
def test_data_by_address_is_the_same_data(tmp_path, folder, server, tokenizer, kind, named, monkeypatch):
    if named:
        monkeypatch.setenv("INTERNVL_PACK_CACHE", str(tmp_path / "copies"))
    here, there = remote_meta(tmp_path, folder, server, kind)
    expected = everything(here, tokenizer)
    server.faults = {"made": ["drop", "503"], "00003_0": ["503", "slow"], "00005_0": ["drop"], "00007_0": ["refuse"]}
    assert everything(there, tokenizer) == expected and len(expected) == 20
    before = server.requests.total()
    assert everything(there, tokenizer) == expected
    assert server.requests.total() - before <= 4, "copies serve again"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_the_survey_and_training_fetch_an_image_once_together(tmp_path, folder, server, tokenizer, workers):
    _, there = remote_meta(tmp_path, folder, server, "jsonl")
    config = PackingConfig(max_packed_tokens=300, num_images_expected=9)
    dataset = PackedDataset.from_meta(there, tokenizer, config, encode=TINY)
    batches = list(build_loader(dataset, num_workers=workers, timeout=60 * bool(workers)))
    assert len(batches) > 3 and sum(batch["num_samples"] for batch in batches) == 20
    fetched = {path: n for path, n in server.requests.items() if path.startswith("GET /images/")}
    assert len(fetched) == len(list((folder / "images").iterdir())) and set(fetched.values()) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True], ids=["", "folder named"])
def test_a_later_run_asks_once_whether_its_images_changed_unless_the_folder_was_named(
    tmp_path, folder, server, tokenizer, named, monkeypatch
):
    if named:
        monkeypatch.setenv("INTERNVL_PACK_CACHE", str(tmp_path / "copies"))
    _, there = remote_meta(tmp_path, folder, server, "jsonl")
    first = everything(there, tokenizer)
    image = min((folder / "images").iterdir())
    with Image.open(image) as picture:
        size = picture.size
    image.write_bytes(png(*size, shade=255))
    server.requests.clear()
    later = time.time()
    monkeypatch.setattr(remote, "_STARTED", later)
    for copy in remote_copies():
        os.utime(copy, (later - 9, later - 9))
    second = everything(there, tokenizer)
    changed = {name for name in first if first[name] != second[name]}
    asked = {path: n for path, n in server.requests.items() if "/images/" in path}
    if named:
        assert not changed and not asked
        return
    assert changed == {f"made/{int(image.name[:5])}"}
    assert asked.pop(f"GET /images/{image.name}") == 1 and asked.pop(f"HEAD /images/{image.name}") == 2
    assert set(asked.values()) == {1} and all(path.startswith("HEAD") for path in asked)


def remote_copies() -> list[Path]:
    """What is noted of the copies."""
    return list(Path(remote.cache_folder()).glob("*.json"))


@pytest.mark.slow
def test_images_that_have_to_leave_the_folder_are_fetched_again(tmp_path, folder, server, tokenizer, monkeypatch):
    here, there = remote_meta(tmp_path, folder, server, "jsonl")
    monkeypatch.setenv("INTERNVL_PACK_CACHE_GB", "0")
    assert everything(there, tokenizer) == everything(here, tokenizer)
    assert sum(n for path, n in server.requests.items() if path.startswith("GET /images/")) > 20
    assert len(remote_copies()) == 1
    assert (Path(remote.cache_folder()) / "survey").is_dir(), "which lies in the same folder"


def test_a_shard_that_left_the_folder_is_read_by_ranges(tmp_path, folder, server, tokenizer, monkeypatch):
    _, there = remote_meta(tmp_path, folder, server, "shards")
    monkeypatch.setenv("INTERNVL_PACK_CACHE_GB", "0")
    (spec,) = load_meta(there)
    source = open_source(spec)
    first = server.requests.total()
    assert source.read(3).own_id == "s3", "of the first shard, which made room for the second"
    assert server.requests.total() > first
    assert server.requests["GET /made-0000.tar"] > 1 and server.sent < 200_000


def test_epochs_of_shards_that_were_copied_are_counted_and_those_of_images_far_away_are_not(
    tmp_path, folder, server, tokenizer
):
    config = PackingConfig()
    for kind, counted in (("shards", True), ("jsonl", False)):
        here, there = remote_meta(tmp_path, folder, server, kind)
        near, far = (PackedDataset.from_meta(meta, tokenizer, config, encode=TINY) for meta in (here, there))
        before = server.requests.total()
        plan = estimate_epochs(far, 4, 1)
        assert plan.exact == counted == (server.requests.total() == before)
        if counted:
            (one,), (other,) = plan.epochs, estimate_epochs(near, 4, 1).epochs
            assert replace(one, plan_seconds=0) == replace(other, plan_seconds=0)


def test_a_part_of_a_shard_that_cannot_be_fetched_names_its_address_once(monkeypatch):
    def gone(address, *_, **__):
        raise RemoteError(address, "the server answered 403 Forbidden")

    monkeypatch.setattr(remote, "fetch", gone)
    ref = SliceRef("https://far.example/0.tar", 0, 9, Stamp(99, 0), "1.png")
    with pytest.raises(SampleError) as error:
        ref.read()
    assert error.value.detail == "'https://far.example/0.tar:1.png': the server answered 403 Forbidden"


def test_images_that_cannot_be_fetched_cost_their_sample(tmp_path, folder, server, tokenizer):
    _, there = remote_meta(tmp_path, folder, server, "jsonl")
    names = sorted(p.name for p in (folder / "images").iterdir())
    first_of = {name[:5]: name for name in reversed(names)}
    gone, page, busy = list(first_of.values())[:3]
    (folder / "images" / gone).unlink()
    server.faults, server.heads = {page: ["page"] * 99, busy: ["503"] * 99}, False
    checker = Checker(Samples.from_meta(there, tokenizer, TINY), decode=True)
    bad = {sample.id: sample for _, part in validate(checker) for sample in part}
    assert {i: sample.reason for i, sample in bad.items()} == {
        f"s{int(gone[:5])}": "image_missing",
        f"s{int(page[:5])}": "image_not_an_image",
        f"s{int(busy[:5])}": "image_unreachable",
    }
    assert all(f"{server.address}/images/" in sample.detail for sample in bad.values())
    assert f"s{int(gone[:5])}" in bad and len(everything(there, tokenizer)) == 17


@pytest.mark.parametrize(
    "kind, fault, words",
    [
        ("jsonl", "404", ["404"]),
        ("jsonl", "503", ["503", "tried"]),
        ("jsonl", "page", ["web page"]),  # no row in it can be one; a bad shard costs itself
        ("shards", "404", ["404"]),
        ("shards", "503", ["503", "tried"]),
    ],
)
def test_data_that_cannot_be_opened_is_one_line(tmp_path, folder, server, kind, fault, words, capsys):
    _, there = remote_meta(tmp_path, folder, server, kind)
    server.heads = False
    server.faults = {"made": [fault] * 99}
    assert main(["validate", str(there), "--workers", "0"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert all(word in line for word in [*words, server.address, "made"])


def test_a_page_instead_of_a_shard_is_that_shards_fault(tmp_path, folder, server, capsys):
    _, there = remote_meta(tmp_path, folder, server, "shards")
    server.heads = False
    server.faults = {"made": ["page"] * 99}
    assert main(["validate", str(there), "--workers", "0"]) == 1
    assert "shard_not_tar" in capsys.readouterr().out


@pytest.mark.slow
def test_workers_fetch_beside_each_other(tmp_path, folder, server, tokenizer):
    here, there = remote_meta(tmp_path, folder, server, "jsonl")
    dataset = PackedDataset.from_meta(there, tokenizer, PackingConfig(), encode=TINY)
    dataset.encoder.encode(dataset.samples.sources[0].read(0), dataset.samples.specs[0])  # a connection before the fork
    loader = build_loader(dataset, num_workers=2, timeout=60)
    delivered = {i for batch in loader for i in batch["sample_ids"]}
    assert len(delivered) == 20 and len(everything(here, tokenizer)) == 20


# --- other schemes


def test_fsspec_addresses(tmp_path, folder, tokenizer):
    fsspec = pytest.importorskip("fsspec")
    here = write_shards(folder, 6)
    store = fsspec.filesystem("memory")
    for path in folder.glob("*.tar"):
        store.pipe(f"/data/{path.name}", path.read_bytes())
    store.pipe("/data/x.jpg", b"abc" * 1000)
    assert everything(write_meta(tmp_path, {"made": {"shards": "memory://data/made-0000.tar"}}), tokenizer) == (
        everything(here, tokenizer)
    )
    assert fetch("memory://data/x.jpg", 3, 8) == b"abcab"
    assert RemoteRef("memory://data/x.jpg").head(4) == b"abca"
    with pytest.raises(SampleError, match=r"image_missing: memory://data/gone\.jpg"):
        RemoteRef("memory://data/gone.jpg").read()
    with pytest.raises(SampleError, match="remote_not_supported: nowhere://x"):
        RemoteRef("nowhere://x").read()


def test_without_the_extra_the_cure_is_said(tmp_path, monkeypatch):
    import sys

    remote._sessions.clear()
    for name in ("requests", "fsspec"):
        monkeypatch.setitem(sys.modules, name, None)
    for address in ("http://host/a.jsonl", "memory://a.jsonl"):
        meta = write_meta(tmp_path, {"made": {"annotation": address}})
        with pytest.raises(UserError, match=r"pip install internvl-pack\[remote\]"):
            open_source(load_meta(meta)[0])
    assert os.path.isdir(tmp_path)
