"""One survey for all readers of a run: the first reader that publishes a part decides what is in it.

Readers on several machines may read a file that fails once on one of them. Plans are functions of the survey, so it
has to be the same everywhere. `Exchange` keeps the parts in the TCP store by which the run's processes found each
other (or one of this process's own); reader processes connect to it by themselves, so nobody has to come together.
"""

from __future__ import annotations

import base64
import logging
import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import TCPStore

logger = logging.getLogger(__name__)


@dataclass
class Exchange:
    """Parts of the survey by name, the same for all readers, in a TCP store. Picklable.

    Attributes:
        host, port: of the store.
        prefix: of the names, different for other data.
    """

    host: str
    port: int
    prefix: str
    _client: tuple[int, Any] | None = field(default=None, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_client": None}

    def _store(self) -> Any:
        """This process's own connection."""
        if self._client is None or self._client[0] != os.getpid():
            from torch.distributed import TCPStore  # two seconds, which workers that only measure do not need

            store = TCPStore(
                self.host, self.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
            )
            self._client = (os.getpid(), store)
        return self._client[1]

    def get(self, name: str) -> bytes | None:
        """The part, or None while nobody has published it."""
        store, key = self._store(), self.prefix + name
        return base64.b64decode(store.get(key)) if store.check([key]) else None

    def publish(self, name: str, part: bytes) -> bytes:
        """Offer a part; returns the one that counts, this or the one that another reader published earlier."""
        # Sets the key if there is none; gives back what it holds then.
        agreed = self._store().compare_set(self.prefix + name, "", base64.b64encode(part).decode())
        return base64.b64decode(agreed)


def local_store() -> TCPStore:
    """A TCP store of this process for its own readers, at its `host` and `port`; lives as long as this object."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def store_of_the_run() -> tuple[str, int] | None:
    """(host, port) of the store that the run's processes met at; None for a process that is alone."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        return None  # the processes met by other means than torchrun's environment
    return host, int(port)
