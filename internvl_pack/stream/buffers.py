"""Arrays for tiles that are used again once nobody holds them.

A fresh array of 29 MB costs the system 7,000 page faults, which take longer than copying the tiles into it. A buffer is
free when only the pool refers to it: views, tensors over them and batches all hold references to it while they live.
"""

from __future__ import annotations

import sys
import threading

import numpy as np

# Buffers kept of a process: one being filled, one with the user or on its way.
MAX_KEPT = 2


def _references(kept: list[np.ndarray], place: int) -> int:
    return sys.getrefcount(kept[place])


_FREE = _references([np.empty(1, dtype=np.uint8)], 0)  # of a buffer that nobody uses; Python versions count differently


class TileBuffers:
    """A pool of uint8 arrays. Thread-safe; a forked child starts from the parent's, copied when written."""

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self._max_kept = max_kept
        self._kept: list[np.ndarray] = []
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...]) -> np.ndarray:
        """A contiguous uint8 array of this shape with anything in it."""
        size = int(np.prod(shape))
        with self._lock:
            for place in range(len(self._kept)):
                if len(self._kept[place]) >= size and _references(self._kept, place) == _FREE:
                    return self._kept[place][:size].reshape(shape)
            buffer = np.empty(size, dtype=np.uint8)
            # A larger one takes the place of the smallest; that one lives on as long as it is used.
            self._kept = sorted([*self._kept, buffer], key=len)[-self._max_kept :]
            return buffer.reshape(shape)
