"""Exact subset sums in two dimensions, on Python's big integers.

One integer holds every reachable pair (tokens, tiles): bit `row * width + tiles`, where a row is `step` tokens (lengths
are rounded to the nearest row, true lengths are checked afterwards). Adding an item is one shift, one mask and one
or. `width` leaves room beside the tile limit for one item's tiles, so that what exceeds the limit falls into bits
that the mask clears instead of into the next row.

             tiles 0 1 2 3 | room        items: (2 rows, 1 tile), (1 row, 2 tiles)
    row 3            . . . x | . .
    row 2            . x . . | . .
    row 1            . . x . | . .
    row 0            x . . . | . .
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

ROWS = 256  # resolution of the token axis


@lru_cache(maxsize=1024)
def _masks(width: int, num_rows: int, max_tiles: int) -> tuple[int, int]:
    """(bits of column 0, bits of all columns up to `max_tiles`) in every row."""
    first_column = ((1 << (width * num_rows)) - 1) // ((1 << width) - 1)
    return first_column, first_column * ((1 << (max_tiles + 1)) - 1)


class SubsetSums:
    """All (tokens, tiles) sums of subsets of `items` within the limits, and a subset for each.

    Price: 1 us an item at 256 rows and 40 tiles.
    """

    def __init__(self, items: Sequence[tuple[int, int]], max_tokens: int, max_tiles: int) -> None:
        """`items` are (tokens, tiles), each within the limits; earlier ones are preferred in the subsets."""
        self.step = step = -(-max_tokens // ROWS) or 1
        self.max_tiles = max_tiles
        self.width = width = max_tiles + 1 + max(tiles for _, tiles in items)
        self.num_rows = num_rows = max_tokens // step + 1
        self._row = (1 << (max_tiles + 1)) - 1
        self._first_column, mask = _masks(width, num_rows, max_tiles)
        half = step // 2
        reached = 1
        self._reached = [reached]
        self._shifts = []
        for tokens, tiles in items:
            shift = (tokens + half) // step * width + tiles
            reached |= (reached << shift) & mask
            self._shifts.append(shift)
            self._reached.append(reached)
        self._all = reached

    def subset(self, row: int, tiles: int) -> list[int]:
        """Places of the items of one subset that reaches this state, latest first."""
        bit = row * self.width + tiles
        reached, shifts = self._reached, self._shifts
        chosen = []
        last = len(shifts)  # the state is reached with the first `last` items
        half = self._all.bit_length() // 2
        while bit:
            first = 0  # and not with the first `first`: what is reached stays reached, so bisect
            if bit > half:  # asked for by the operation that copies less of the integer
                while last - first > 1:
                    middle = (first + last) // 2
                    if reached[middle] >> bit & 1:
                        last = middle
                    else:
                        first = middle
            else:
                mask = 1 << bit
                while last - first > 1:
                    middle = (first + last) // 2
                    if reached[middle] & mask:
                        last = middle
                    else:
                        first = middle
            last = first
            chosen.append(first)
            bit -= shifts[first]
        return chosen

    def full_rows(self, slack: int, tiles: float) -> Iterator[tuple[int, int]]:
        """Reachable states (row, tiles): those of the fullest row and `slack` below, nearest to `tiles` first;
        then one of each lower row."""
        top = (self._all.bit_length() - 1) // self.width
        fullest = []
        for row in range(top, max(-1, top - slack - 1), -1):
            bits = self._all >> (row * self.width) & self._row
            if bits:
                fullest.append((row, bits))
        below = max(-1, min(self.max_tiles, int(tiles) if tiles >= 0 else -1))
        above = below + 1
        while below >= 0 or above <= self.max_tiles:
            if above > self.max_tiles or (below >= 0 and tiles - below <= above - tiles):
                column, below = below, below - 1
            else:
                column, above = above, above + 1
            for row, bits in fullest:
                if bits >> column & 1:
                    yield row, column
        for row in range(top - slack - 1, -1, -1):
            bits = self._all >> (row * self.width) & self._row
            if bits:
                yield row, bits.bit_length() - 1

    def lower_rows(self, top: int, rows: int, most_tiles: int) -> Iterator[tuple[int, int]]:
        """Of row `top` and `rows` below the reachable state (row, tiles) of the most tiles up to `most_tiles`."""
        mask = (1 << (min(most_tiles, self.max_tiles) + 1)) - 1
        for row in range(top, max(-1, top - rows - 1), -1):
            bits = self._all >> (row * self.width) & mask
            if bits:
                yield row, bits.bit_length() - 1

    def full_columns(self, tokens: float, most: int) -> Iterator[tuple[int, int]]:
        """Reachable states (row, tiles): of the most tiles first, in each column up to `most` nearest to `tokens`."""
        wanted = min(self.num_rows - 1, max(0, int(tokens / self.step)))
        split = (wanted + 1) * self.width
        below = (1 << split) - 1
        for tiles in range(self.max_tiles, -1, -1):
            column = self._all & (self._first_column << tiles)
            if not column:
                continue
            rows: list[int] = []
            low, high = column & below, column >> split
            while low and len(rows) < most:
                bit = low.bit_length() - 1
                rows.append(bit // self.width)
                low ^= 1 << bit
            for _ in range(most // 2):
                if not high:
                    break
                lowest = high & -high
                rows.append(wanted + 1 + (lowest.bit_length() - 1) // self.width)
                high ^= lowest
            rows.sort(key=lambda row: abs(row - wanted))
            for row in rows[:most]:
                yield row, tiles
