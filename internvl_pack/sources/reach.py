"""What a row may name: files below its dataset's root, and addresses of hosts that the user has named.

A meta file is written by whoever starts the run; rows often come from elsewhere. So a row reaches the hosts that the
meta file names, and those of `INTERNVL_PACK_ALLOW_REMOTE`; a server may pass a request on to any public host, but into
a private network only to one that is named. docs/remote.md has the rules.
"""

from __future__ import annotations

import ipaddress
import os
import posixpath
import socket
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

from ..errors import SampleError
from .addresses import is_remote

ALLOW_REMOTE = "INTERNVL_PACK_ALLOW_REMOTE"
ALLOW_OUTSIDE_ROOT = "INTERNVL_PACK_ALLOW_OUTSIDE_ROOT"
ANY, NONE = "any", "none"


def allow(*, remote: str | None = None, outside_root: bool | None = None) -> None:
    """Set the two variables, for this process and its readers; None leaves one as it is."""
    if remote is not None:
        os.environ[ALLOW_REMOTE] = remote
    if outside_root is not None:
        os.environ[ALLOW_OUTSIDE_ROOT] = str(int(outside_root))


def host_of(address: str) -> str:
    """`host` or `host:port` of http and https; `s3://bucket` of other schemes. In lower case."""
    scheme, _, rest = address.partition("://")
    netloc = rest.partition("/")[0].partition("?")[0].rpartition("@")[2].lower()
    return netloc if scheme.lower() in ("http", "https") else f"{scheme.lower()}://{netloc}"


def hosts_of(addresses: Iterable[str | None]) -> frozenset[str]:
    return frozenset(host_of(address) for address in addresses if address and is_remote(address))


def _allowed_by_user() -> frozenset[str] | None:
    """The words of INTERNVL_PACK_ALLOW_REMOTE; None where it is not set."""
    text = os.environ.get(ALLOW_REMOTE)
    return None if text is None else frozenset(word.strip().lower() for word in text.split(",") if word.strip())


def _is_named(host: str, names: Collection[str]) -> bool:
    return host in names or ("://" not in host and (urlsplit(f"//{host}").hostname or "") in names)


def check_address(address: str, hosts: frozenset[str]) -> None:
    """Check that a row may name this address.

    Args:
        hosts: those that the meta file names.

    Raises:
        SampleError: `remote_not_allowed`.
    """
    host, allowed = host_of(address), _allowed_by_user()
    if allowed is None:
        allowed = hosts
    elif NONE not in allowed:
        allowed |= hosts
    if _is_named(host, allowed - {ANY, NONE}):
        return
    if ANY in allowed and "://" not in host and not _is_private(host):
        return
    why = "is in a private network" if ANY in allowed and "://" not in host else "is not named in the meta file"
    raise SampleError(
        "remote_not_allowed", f"{address:.300}: {host!r} {why}; to allow it set {ALLOW_REMOTE} to a list with it"
    )


def may_be_passed_on_to(address: str) -> bool:
    """Whether a server may redirect a request to this address: a public host, or one that the user has named."""
    host = host_of(address)
    return "://" not in host and (_is_named(host, _allowed_by_user() or ()) or not _is_private(host))


def _is_private(host: str) -> bool:
    """Whether any address of a host is not of the public internet. A name that nobody knows is left to the request."""
    name = urlsplit(f"//{host}").hostname or ""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(not ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_global for entry in found)


def check_inside(root: str, name: str) -> None:
    """Check that a name stays inside `root`, a folder or an address.

    It is judged by its letters: links inside are the user's own. An empty root holds everything.

    Raises:
        SampleError: `image_outside_root`.
    """
    if not root or not (name.startswith("/") or ".." in name):
        return
    if os.environ.get(ALLOW_OUTSIDE_ROOT, "0") not in ("", "0"):
        return
    path = posixpath.join(root, name)
    if is_remote(root):
        inside = is_remote(path) and not _leads_out(_path_of(root), _path_of(path))
    else:
        inside = not _leads_out(root, path)
    if not inside:
        raise SampleError(
            "image_outside_root",
            f"{path!r:.300} leads out of the root {root!r:.300}; to allow it set {ALLOW_OUTSIDE_ROOT}=1",
        )


def _leads_out(folder: str, path: str) -> bool:
    return posixpath.relpath(path, folder).split("/")[0] == ".."


def _path_of(address: str) -> str:
    return "/" + address.split("://", 1)[1].partition("/")[2].partition("?")[0]
