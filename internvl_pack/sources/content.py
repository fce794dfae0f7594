"""Content marks: a short hash that differs between files whose rows differ only in text or order.

Size and number of rows do not: rows of equal lengths may change places. A file's mark is the hash of its size and of
the hashes of its pieces, so that several workers may hash one file.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

PIECE_BYTES = 1 << 20
_DIGEST_BYTES = 16


def new_hash() -> blake2b:
    return blake2b(digest_size=_DIGEST_BYTES)


class PieceHashes:
    """Hashes of the pieces of a file, from bytes given in order. A part of a file must start where a piece does.

    Args:
        position: where the first byte stands in the file.
    """

    def __init__(self, position: int) -> None:
        self._left = PIECE_BYTES - position % PIECE_BYTES
        self._hash = new_hash()
        self._done: list[bytes] = []

    def update(self, data: memoryview) -> None:
        while len(data) >= self._left:
            self._hash.update(data[: self._left])
            data = data[self._left :]
            self._done.append(self._hash.digest())
            self._left, self._hash = PIECE_BYTES, new_hash()
        self._hash.update(data)
        self._left -= len(data)

    def digest(self) -> bytes:
        """The hashes of the pieces one behind the other, an unfinished one last."""
        last = [self._hash.digest()] if self._left < PIECE_BYTES else []
        return b"".join([*self._done, *last])


def mark_of_pieces(size: int, pieces: Iterable[bytes]) -> str:
    """The mark of a file of `size` bytes, in hex, from the `digest` of each of its parts."""
    digest = new_hash()
    digest.update(size.to_bytes(8, "little"))
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
