"""What rows may reach, and how long a server may take: hosts, redirects, roots, ranges, trickles."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable

import pytest

from internvl_pack.errors import SampleError
from internvl_pack.sources import load_meta, open_source, remote
from internvl_pack.sources.image_refs import FileRef, FolderResolver, RemoteRef
from internvl_pack.sources.reach import ALLOW_OUTSIDE_ROOT, ALLOW_REMOTE, allow, host_of
from internvl_pack.sources.remote import RemoteError, copy_of, fetch

pytest.importorskip("requests")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, tmp_path):
    for name in (ALLOW_REMOTE, ALLOW_OUTSIDE_ROOT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("INTERNVL_PACK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "FIRST_PAUSE_SECONDS", 0.01)


@pytest.fixture
def serve():
    """Starts servers on loopback whose every answer to GET is `answer(handler)`; gives their addresses."""
    servers = []

    def start(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer(self)

            def do_HEAD(self) -> None:
                self.send_error(405)

            def log_message(self, *_) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        server.handle_error = lambda *_: None
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def send(handler, body: bytes, status: int = 200, **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"Content_Length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def reason(resolve: FolderResolver, name: str) -> str | None:
    try:
        resolve(name)
    except SampleError as error:
        return error.reason
    return None


# --- hosts


@pytest.mark.parametrize(
    "address, host",
    [
        ("https://Host/a/b.jpg", "host"),
        ("http://user:word@host:8080/a@b", "host:8080"),
        ("http://host?x=1", "host"),
        ("s3://Bucket/a.jpg", "s3://bucket"),
        ("file:///etc/passwd", "file://"),
    ],
)
def test_hosts_as_they_are_compared(address, host):
    assert host_of(address) == host


@pytest.mark.parametrize(
    "allowed, refused",
    [
        (None, {"other.example", "s3", "file", "loopback"}),
        (
            "",
            {"named.example", "root.example", "other.example", "s3", "file", "loopback"}
            - {"named.example", "root.example"},
        ),
        ("none", {"named.example", "root.example", "other.example", "s3", "file", "loopback"}),
        ("other.example, s3://bucket", {"file", "loopback"}),
        ("any", {"s3", "file", "loopback"}),
        ("any,127.0.0.1", {"s3", "file"}),
    ],
)
def test_rows_reach_the_hosts_that_the_user_has_named(monkeypatch, allowed, refused):
    if allowed is not None:
        monkeypatch.setenv(ALLOW_REMOTE, allowed)
    resolve = FolderResolver("https://root.example/images", frozenset({"named.example"}))
    rows = {f"{name}.example": f"https://{name}.example/a.jpg" for name in ("named", "root", "other")}
    rows |= {"s3": "s3://bucket/a.jpg", "file": "file:///etc/passwd", "loopback": "http://127.0.0.1:9/a.jpg"}
    monkeypatch.setattr(
        "socket.getaddrinfo",
        lambda host, *_, **__: [(0, 0, 0, "", (host if host[0].isdigit() else "93.184.216.34", 0))],
    )
    found = {name: reason(resolve, address) for name, address in rows.items()}
    assert {name for name, why in found.items() if why} == refused
    assert set(found.values()) <= {None, "remote_not_allowed"}


def test_the_hosts_of_a_meta_file_are_those_of_all_its_datasets(tmp_path, serve):
    turns = [{"from": "human", "value": "<image>\nq"}, {"from": "gpt", "value": "a"}]
    address = serve(lambda handler: send(handler, b"pixels"))
    rows = [f"{address}/a.jpg", "https://elsewhere.example/a.jpg"]
    text = "".join(json.dumps({"image": image, "conversations": turns}) + "\n" for image in rows)
    (tmp_path / "a.jsonl").write_text(text)
    meta = {
        "local": {"root": "", "annotation": "a.jsonl"},
        "far": {"root": f"{address}/images", "annotation": "a.jsonl"},
    }
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    source = open_source(load_meta(tmp_path / "meta.json")[0])
    assert source.read(0).resolve(rows[0]).read() == b"pixels"
    with pytest.raises(SampleError, match=f"remote_not_allowed: .*elsewhere.example.*{ALLOW_REMOTE}"):
        source.read(1).resolve(rows[1])


def test_options_of_a_run_take_the_place_of_the_environment(monkeypatch):
    monkeypatch.setenv(ALLOW_REMOTE, "a.example")
    monkeypatch.setenv(ALLOW_OUTSIDE_ROOT, "0")
    allow()
    assert reason(FolderResolver("/root"), "https://b.example/x.jpg") == "remote_not_allowed"
    allow(remote="b.example", outside_root=True)
    assert reason(FolderResolver("/root"), "https://b.example/x.jpg") is None
    assert reason(FolderResolver("/root"), "/etc/hostname") is None


# --- redirects


def test_a_server_may_not_pass_a_request_on_into_a_private_network(serve, monkeypatch):
    inner = serve(lambda handler: send(handler, b"secret"))
    outer = serve(lambda handler: send(handler, b"", 302, Location=f"{inner}/a.jpg"))
    with pytest.raises(SampleError, match=f"image_unreachable: {outer}/a.jpg: passed on to {inner}.*not public"):
        RemoteRef(f"{outer}/a.jpg").read()
    monkeypatch.setenv(ALLOW_REMOTE, host_of(inner))
    assert RemoteRef(f"{outer}/a.jpg").read() == b"secret"


def test_a_redirect_on_the_same_host_and_one_without_end(serve):
    def answer(handler) -> None:
        if handler.path == "/a.jpg":
            return send(handler, b"", 302, Location="/b%20c.jpg")
        if handler.path == "/b%20c.jpg":
            return send(handler, b"pixels")
        return send(handler, b"", 302, Location=handler.path)

    address = serve(answer)
    assert fetch(f"{address}/a.jpg") == b"pixels"
    with pytest.raises(RemoteError, match="redirected without end"):
        fetch(f"{address}/loop")


# --- roots


@pytest.mark.parametrize("name", ["../outside.jpg", "a/../../outside.jpg", "/etc/hostname", "../root2/a.jpg", ".."])
def test_a_row_names_no_file_outside_its_root(tmp_path, name, monkeypatch):
    (tmp_path / "outside.jpg").write_bytes(b"x")
    resolve = FolderResolver(str(tmp_path / "root"))
    with pytest.raises(SampleError, match=f"image_outside_root: .*{ALLOW_OUTSIDE_ROOT}=1"):
        resolve(name)
    monkeypatch.setenv(ALLOW_OUTSIDE_ROOT, "1")
    assert isinstance(resolve(name), FileRef)


@pytest.mark.parametrize("name", ["a.jpg", "a/../b.jpg", "./a.jpg", "..a.jpg", "a/..b/c.jpg"])
@pytest.mark.parametrize(
    "root",
    ["/data/images", "/data/images/", "images", "./images", ".", "./", "..", "../images", "/", "https://host/images"],
)
def test_names_below_the_root_are_read(root, name):
    FolderResolver(root)(name)


@pytest.mark.parametrize("root", [".", "./", "..", "../images", "images", "/data"])
def test_a_relative_root_is_led_out_of_as_any_other(root):
    assert reason(FolderResolver(root), "../../x.jpg") == reason(FolderResolver(root), "/etc/x") == "image_outside_root"


def test_absolute_names_below_the_root_are_read_and_without_a_root_all_are(tmp_path):
    assert reason(FolderResolver(str(tmp_path)), str(tmp_path / "a.jpg")) is None
    assert reason(FolderResolver(""), "/anywhere/a.jpg") is reason(FolderResolver(""), "../a.jpg") is None


def test_a_name_leads_out_of_a_root_by_address_no_more(serve):
    assert reason(FolderResolver("https://host/images"), "../secret.jpg") == "image_outside_root"
    assert reason(FolderResolver("https://host/images"), "/secret.jpg") == "image_outside_root"


# --- transfers


def test_a_trickle_ends(serve, monkeypatch):
    """A byte now and then keeps the socket's own time-out from ever passing."""
    monkeypatch.setenv("INTERNVL_PACK_TIMEOUT", "0.3")
    monkeypatch.setenv("INTERNVL_PACK_RETRIES", "1")

    def answer(handler) -> None:
        send(handler, b"", Content_Length="100000")
        for _ in range(400):
            handler.wfile.write(b"x")
            time.sleep(0.05)

    started = time.monotonic()
    with pytest.raises(RemoteError, match=r"bytes came in .*tried 2 times"):
        fetch(f"{serve(answer)}/a.jpg")
    assert time.monotonic() - started < 5


@pytest.mark.slow
def test_a_transfer_that_always_begins_again_ends(serve, monkeypatch):
    monkeypatch.setenv("INTERNVL_PACK_TIMEOUT", "0.1")

    def answer(handler) -> None:
        send(handler, b"", Content_Length="100000000")
        for _ in range(200):
            handler.wfile.write(bytes(1000))
            time.sleep(0.02)

    with pytest.raises(RemoteError, match="which is all it may take"):
        fetch(f"{serve(answer)}/a.jpg")


@pytest.mark.parametrize("given", ["bytes 0-9/100", "bytes 51-99/100", "nonsense", None])
def test_another_range_than_was_asked_for_is_refused(serve, given):
    headers = {} if given is None else {"Content_Range": given}
    address = serve(lambda handler: send(handler, bytes(10), 206, **headers))
    with pytest.raises(RemoteError, match="bytes from 50 were asked for"):
        fetch(f"{address}/a.tar", 50, 60)


def test_a_file_that_changes_while_it_is_copied_is_not_joined_of_two(serve):
    """The connection breaks half-way; what goes on is of another version."""
    asked = []

    def answer(handler) -> None:
        asked.append(handler.headers.get("Range"))
        if len(asked) == 1:
            return send(handler, b"a" * 500, Content_Length="1000", ETag='"1"')
        return send(handler, b"b" * 500, 206, Content_Range="bytes 500-999/1000", ETag='"2"')

    with pytest.raises(RemoteError, match="changed while it was read"):
        copy_of(f"{serve(answer)}/a.jsonl")
    assert asked == [None, "bytes=500-"]


def test_a_store_that_fails_as_it_is_opened_is_tried_again_and_named(monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    tried = []

    def url_to_fs(address, **_):
        tried.append(address)
        raise ConnectionResetError("no route")

    monkeypatch.setattr(fsspec.core, "url_to_fs", url_to_fs)
    monkeypatch.setenv("INTERNVL_PACK_RETRIES", "2")
    with pytest.raises(SampleError, match=r"image_unreachable: ftp://host/a.jpg: no route .tried 3 times"):
        RemoteRef("ftp://host/a.jpg").read()
    assert len(tried) == 3
