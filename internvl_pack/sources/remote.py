"""Annotation files, shards, images and videos by address: http(s) by requests, other schemes by fsspec.

    annotation file, shard ──> copied once into a local folder of bounded size, then read by position like any file;
                               a part of one that had to leave the folder is fetched by range
    image, video ───────────> copied into that folder, too: the survey reads the header of what training decodes later,
                               and one request serves both. Where INTERNVL_PACK_CACHE does not name the folder, a
                               later run asks the server whether its copies are still what it has

Not by fsspec's own http: its event loop lives in a thread, which forked workers lose. A request that fails by itself
(connection refused, dropped or slow, status 408, 429 or 5xx, a body shorter than announced) is made again, after
0.5, 1, 2 ... seconds; a copy goes on where it broke off when the server takes ranges. Nothing is executed, and what
comes is judged by its contents, so that an error page is no image and no shard.

docs/data.md lists the environment variables.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote, urljoin

from ..errors import UserError
from .reach import ALLOW_REMOTE, host_of, may_be_passed_on_to

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 16
_FSSPEC_BYTES = 8 << 20
FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 30.0
_STARTED = time.time()  # of this process, or of the one it was forked from
MAX_REDIRECTS = 20
# An attempt that brings less, over as many seconds as INTERNVL_PACK_TIMEOUT says, has failed.
MIN_BYTES_PER_SECOND = 1 << 10
# Times INTERNVL_PACK_TIMEOUT, attempts and pauses included, that an image or a part of a shard may take.
MAX_TIMEOUTS = 10
_SAFE = "%:/?&=#+,;@!$'()*~[]"
_RETRIED = frozenset((408, 425, 429, 500, 502, 503, 504))
_T = TypeVar("_T")


class RemoteError(OSError):
    """An address that could not be read. The message names it.

    Attributes:
        kind: "gone" of what does not exist, "tired" where all attempts failed, "large" of more bytes than were allowed,
            "" of anything else.
    """

    def __init__(self, address: str, what: str, kind: str = "") -> None:
        super().__init__(f"{address}: {what}")
        self.strerror = f"{address}: {what}"
        self.address, self.what, self.kind = address, what, kind

    def __reduce__(self) -> tuple[Any, tuple[str, str, str]]:  # errors of workers are pickled
        return RemoteError, (self.address, self.what, self.kind)


class NoStoreError(UserError):
    """The package that reads addresses of a scheme is not installed, or there is none."""


class _TryAgainError(Exception):
    """A failure that may pass."""


# --- options


def _setting(name: str, default: float) -> float:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UserError(f"{name}={text!r} in the environment: give a number of at least 0")
    return value


def cache_folder() -> str:
    return os.environ.get("INTERNVL_PACK_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "internvl_pack")


def retrying(address: str, attempt: Callable[[], _T]) -> _T:
    """Call `attempt` until it does not raise `_TryAgainError`.

    Raises:
        RemoteError: the last attempt failed.
    """
    retries = int(_setting("INTERNVL_PACK_RETRIES", 5))
    pause = FIRST_PAUSE_SECONDS
    for left in range(retries, -1, -1):
        try:
            return attempt()
        except _TryAgainError as error:
            if not left:
                raise RemoteError(address, f"{error} (tried {retries + 1} times)", "tired") from None
            logger.info("%s: %s; trying again in %.1f s", address, error, pause)
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)
    raise AssertionError("the last attempt returns or raises")


# --- stores of bytes


# A store is one address. `version()` is its size and marks, as far as the server says: they differ once its bytes do.
# `chunks(start, stop, known)` are its bytes in order; `known` are the marks of what was read before, filled in where it
# is empty. Both raise RemoteError, or _TryAgainError for what may pass.

Version = dict[str, Any]

_sessions: dict[int, Any] = {}  # by process: a forked child must not write into its parent's connections


def _session() -> Any:
    found = _sessions.get(os.getpid())
    if found is None:
        try:
            import requests
        except ImportError:
            raise NoStoreError("addresses need requests and fsspec: pip install internvl-pack[remote]") from None
        _sessions.clear()
        found = _sessions[os.getpid()] = requests.Session()
        found.headers["Accept-Encoding"] = "identity"  # sizes and ranges count the file's own bytes
    return found


@dataclass(frozen=True)
class HttpStore:
    """An address of http(s)."""

    address: str

    def _request(self, method: str, **headers: str) -> Any:
        session = _session()
        import requests

        timeout = _setting("INTERNVL_PACK_TIMEOUT", 30)
        url = quote(self.address, safe=_SAFE)
        try:
            for _ in range(MAX_REDIRECTS):
                answer = session.request(
                    method, url, headers=headers, timeout=timeout, stream=True, allow_redirects=False
                )
                if not answer.is_redirect:
                    break
                answer.close()
                target = quote(urljoin(url, answer.headers["location"]), safe=_SAFE)
                if host_of(target) != host_of(url) and not may_be_passed_on_to(target):
                    raise RemoteError(
                        self.address,
                        f"passed on to {target:.200}, which is not public; {ALLOW_REMOTE} may name its host",
                    )
                url = target
            else:
                raise RemoteError(self.address, "redirected without end")
        except (requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema, UnicodeError) as error:
            raise RemoteError(self.address, f"no address: {error}", "gone") from None
        except requests.exceptions.RequestException as error:
            raise _TryAgainError(_short(error)) from None
        if answer.status_code in _RETRIED:
            answer.close()
            raise _TryAgainError(f"the server answered {answer.status_code} {answer.reason}")
        if answer.status_code not in (200, 206, 416):
            answer.close()
            kind = "gone" if answer.status_code in (404, 410) else ""
            raise RemoteError(self.address, f"the server answered {answer.status_code} {answer.reason}", kind)
        return answer

    def version(self) -> Version:
        with self._request("HEAD") as answer:
            headers = answer.headers
            length = headers.get("Content-Length", "")
            marks = {name: headers[name] for name in ("ETag", "Last-Modified") if name in headers}
            return Version(size=int(length) if length.isdigit() else None, **marks)

    def chunks(self, start: int, stop: int | None, known: Version) -> Iterator[bytes]:
        import requests
        import urllib3

        headers = {}
        if start or stop is not None:
            headers["Range"] = f"bytes={start}-{stop - 1 if stop is not None else ''}"
        with self._request("GET", **headers) as answer:
            if answer.status_code == 416:  # nothing there
                return
            self._check_version(answer.headers, known)
            if answer.status_code == 206:
                self._check_range(answer.headers, start)
            skip = start if answer.status_code == 200 else 0  # this server knows no ranges
            left = stop - start if stop is not None else None
            announced, seen = answer.headers.get("Content-Length", ""), 0
            try:
                for chunk in _as_they_come(answer.raw, CHUNK_BYTES if stop is None else min(CHUNK_BYTES, stop)):
                    seen += len(chunk)
                    chunk, skip = chunk[skip:], max(0, skip - len(chunk))
                    if left is not None:
                        chunk = chunk[:left]
                        left -= len(chunk)
                    if chunk:
                        yield chunk
                    if left == 0:
                        return
            except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
                raise _TryAgainError(f"the connection broke after {seen} bytes: {_short(error)}") from None
            if announced.isdigit() and seen < int(announced):
                raise _TryAgainError(f"the connection ended after {seen} of {announced} bytes")

    def _check_version(self, headers: Mapping[str, str], known: Version) -> None:
        """Refuse bytes of another version of the file than the earlier ones: the two must not be joined."""
        for name in ("ETag", "Last-Modified"):
            if name in headers and known.setdefault(name, headers[name]) != headers[name]:
                raise RemoteError(self.address, f"it changed while it was read ({name})")

    def _check_range(self, headers: Mapping[str, str], start: int) -> None:
        given = headers.get("Content-Range", "nothing of it")
        first = given.removeprefix("bytes ").partition("-")[0].strip()
        if first != str(start):
            raise RemoteError(self.address, f"bytes from {start} were asked for, the server says {given[:60]!r}")


def _as_they_come(raw: Any, num_bytes: int) -> Iterator[bytes]:
    """The body of an answer in pieces of at most `num_bytes`, each as soon as it is there.

    Raises _TryAgainError below MIN_BYTES_PER_SECOND: the socket's own time-out counts from byte to byte only.
    """
    seconds = _setting("INTERNVL_PACK_TIMEOUT", 30)
    started, got = time.monotonic(), 0
    while data := raw.read1(num_bytes, decode_content=False):
        got += len(data)
        yield data
        if (passed := time.monotonic() - started) > seconds:
            if got < passed * MIN_BYTES_PER_SECOND:
                raise _TryAgainError(f"{got} bytes came in {passed:.0f} s")
            started, got = time.monotonic(), 0


@dataclass(frozen=True)
class FsspecStore:
    """An address of any other scheme that fsspec knows (s3, gs, hf, memory, ...)."""

    address: str

    def _filesystem(self) -> tuple[Any, str]:
        try:
            import fsspec
        except ImportError:
            raise NoStoreError(f"{self.address}: addresses need fsspec: pip install internvl-pack[remote]") from None
        with self._failures():  # some stores connect here
            try:
                return fsspec.core.url_to_fs(self.address)
            except ImportError as error:
                raise NoStoreError(f"{self.address}: {error}") from None
            except ValueError as error:
                raise NoStoreError(f"{self.address}: no store of this kind is known: {error}") from None

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except (RemoteError, UserError, _TryAgainError):
            raise
        except FileNotFoundError:
            raise RemoteError(self.address, "there is no such file", "gone") from None
        except IsADirectoryError:
            raise RemoteError(self.address, "it is a folder") from None
        except PermissionError as error:
            raise RemoteError(self.address, f"permission denied: {_short(error)}") from None
        except Exception as error:  # each store raises its own
            raise _TryAgainError(_short(error)) from None

    def _info(self, filesystem: Any, path: str) -> dict[str, Any]:
        info = filesystem.info(path)
        if info.get("type") == "directory":
            raise RemoteError(self.address, "it is a folder")
        return info

    def version(self) -> Version:
        filesystem, path = self._filesystem()
        with self._failures():
            info = self._info(filesystem, path)
            marks = {k: str(info[k]) for k in ("ETag", "etag", "mtime", "LastModified", "created") if k in info}
            return Version(size=info.get("size"), **marks)

    def chunks(self, start: int, stop: int | None, known: Version) -> Iterator[bytes]:
        filesystem, path = self._filesystem()
        with self._failures():
            size = self._info(filesystem, path).get("size")
            end = stop if size is None or (stop is not None and stop < size) else size
            if end is None:
                yield filesystem.cat_file(path, start=start)
                return
            for at in range(start, end, _FSSPEC_BYTES):
                yield filesystem.cat_file(path, start=at, end=min(end, at + _FSSPEC_BYTES))


def store_of(address: str) -> HttpStore | FsspecStore:
    scheme = address.split("://", 1)[0].lower()
    return HttpStore(address) if scheme in ("http", "https") else FsspecStore(address)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


# --- reading


def fetch(address: str, start: int = 0, stop: int | None = None, *, limit: int | None = None) -> bytes:
    """Bytes [start, stop) of an address, fewer only at its end.

    Raises:
        RemoteError: it cannot be read, has more than `limit` bytes, or takes too long.
    """
    if stop is not None and stop <= start:
        return b""
    got = io.BytesIO()
    _download(
        store_of(address), got, Version(), start, stop, limit, MAX_TIMEOUTS * _setting("INTERNVL_PACK_TIMEOUT", 30)
    )
    return got.getvalue()


def _download(
    store: HttpStore | FsspecStore,
    file: BinaryIO,
    known: Version,
    start: int = 0,
    stop: int | None = None,
    limit: int | None = None,
    seconds: float = math.inf,
) -> None:
    """Write bytes [start, stop) of a store into an empty file; an attempt goes on where the one before broke off."""
    started = time.monotonic()

    def attempt() -> None:
        for chunk in store.chunks(start + file.tell(), stop, known):
            file.write(chunk)
            if time.monotonic() - started > seconds:
                what = f"{file.tell()} bytes came in {seconds:.0f} s, which is all it may take"
                raise RemoteError(store.address, what, "tired")
            if limit is not None and file.tell() > limit:
                raise RemoteError(store.address, f"more than {limit} bytes", "large")

    retrying(store.address, attempt)


def _place(address: str) -> str:
    digest = hashlib.blake2b(address.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return os.path.join(cache_folder(), digest)


def cached(address: str) -> str | None:
    """The path of the local copy, if there is one; marks it as used."""
    path = _place(address)
    try:
        os.utime(path)
    except OSError:
        return None
    return path


def image_copy_of(address: str, *, limit: int | None = None) -> str:
    """As `copy_of`, of an image or video: in the default folder an earlier run's copy is checked once a run."""
    check = False
    if not os.environ.get("INTERNVL_PACK_CACHE"):
        with contextlib.suppress(FileNotFoundError):
            check = os.stat(_place(address) + ".json").st_mtime < _STARTED
    return copy_of(address, check=check, limit=limit)


def copy_of(address: str, *, check: bool = False, limit: int | None = None) -> str:
    """The path of a local copy, made where there is none.

    Args:
        check: ask the server whether a copy from an earlier run is still what it has.
        limit: bytes above which nothing is copied.

    Raises:
        RemoteError: the address cannot be read, or has more than `limit` bytes.
        UserError: the folder of copies cannot be written.
    """
    path = _place(address)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path + ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process copies, others wait
            if cached(address) is not None and not (check and _is_stale(address, path)):
                return path
            _copy(address, path, limit)
            _make_room(os.path.dirname(path), keep=path)
    except RemoteError:
        raise
    except OSError as error:
        raise UserError(
            f"{address} cannot be copied to {os.path.dirname(path)} (INTERNVL_PACK_CACHE): {error.strerror or error}"
        ) from None
    return path


def _is_stale(address: str, path: str) -> bool:
    try:
        with open(path + ".json", encoding="utf-8") as file:
            known = json.load(file)
        now = retrying(address, store_of(address).version)
    except (RemoteError, ValueError, FileNotFoundError):
        return True
    if any(known.get(name) != value for name, value in now.items() if value is not None):
        return True
    os.utime(path + ".json")  # was asked about
    return False


def _copy(address: str, path: str, limit: int | None) -> None:
    store = store_of(address)
    beside = path + ".part"
    try:
        version = retrying(address, store.version)
    except RemoteError as error:
        if error.kind:
            raise
        version = Version(size=None)  # some servers refuse HEAD
    known = {name: mark for name, mark in version.items() if name != "size"}
    with open(beside, "wb") as file:
        _download(store, file, known, limit=limit)
        size = file.tell()
    if version["size"] is not None and size != version["size"]:
        os.unlink(beside)
        raise RemoteError(address, f"{size} bytes came, {version['size']} were announced: does it change?")
    with open(path + ".json", "w", encoding="utf-8") as notes:
        json.dump({**version, "size": size, "address": address}, notes)
    os.replace(beside, path)


_unseen: dict[int, float] = {}  # by process: bytes copied since it last looked through the folder


def _make_room(folder: str, keep: str) -> None:
    """Remove the copies that were not used for longest until the rest fits.

    Looks through the folder, which may hold a million images, when a process has copied a hundredth of its size.
    """
    allowed = _setting("INTERNVL_PACK_CACHE_GB", 50) * 1e9
    unseen = _unseen.get(os.getpid(), allowed) + os.path.getsize(keep)
    _unseen[os.getpid()] = unseen if unseen < allowed / 100 else 0
    if unseen < allowed / 100:
        return
    copies = []
    for entry in os.scandir(folder):
        if "." not in entry.name and entry.is_file():  # the surveys' folder lies here, too
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat()
                copies.append((found.st_mtime_ns, found.st_size, entry.path))
    total = sum(size for _, size, _ in copies)
    for _, size, path in sorted(copies):
        if total <= allowed:
            return
        if path != keep:
            for ending in ("", ".json", ".lock"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path + ending)
            total -= size


def mark_of(address: str) -> int:
    """A number that changes when the server says that the file has; 0 where it says nothing."""
    with open(_place(address) + ".json", encoding="utf-8") as file:
        known = json.load(file)
    marks = sorted((k, v) for k, v in known.items() if k not in ("size", "address"))
    return int.from_bytes(hashlib.blake2b(repr(marks).encode(), digest_size=7).digest(), "little") if marks else 0
