"""Exact subset sums in two dimensions, on Python's big integers.

One integer holds every reachable pair (tokens, tiles): bit `row * width + column`, where a row is `step` tokens and a
column `tile_step` tiles, 1 up to COLUMNS of them (sizes are rounded to the nearest row and column, true sizes are
checked afterwards). Adding an item is one shift, one mask and one or. `width` leaves room beside the tile limit for one
item's tiles, so that what exceeds the limit falls into bits that the mask clears instead of into the next row.

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
COLUMNS = 256  # of tiles up to which each is a column of its own; the price grows with columns
COARSE_COLUMNS = 64  # resolution of the tile axis beyond that: 512 give as many packs at five times the price


@lru_cache(maxsize=1024)
def _masks(width: int, num_rows: int, last_column: int) -> tuple[int, int]:
    """(bits of column 0, bits of all columns up to `last_column`) in every row."""
    first_column = ((1 << (width * num_rows)) - 1) // ((1 << width) - 1)
    return first_column, first_column * ((1 << (last_column + 1)) - 1)


class SubsetSums:
    """All (tokens, tiles) sums of subsets of `items` within the limits, and a subset for each.

    Price: 1 us an item at 256 rows and 40 tiles.
    """

    def __init__(self, items: Sequence[tuple[int, int]], max_tokens: int, max_tiles: int) -> None:
        """`items` are (tokens, tiles), each within the limits; earlier ones are preferred in the subsets."""
        self.step = step = -(-max_tokens // ROWS) or 1
        self.tile_step = tile_step = 1 if max_tiles <= COLUMNS else -(-max_tiles // COARSE_COLUMNS)
        self._last_column = last_column = max_tiles // tile_step
        half_tiles = tile_step // 2
        self.width = width = last_column + 1 + (max(tiles for _, tiles in items) + half_tiles) // tile_step
        self.num_rows = num_rows = max_tokens // step + 1
        self._row = (1 << (last_column + 1)) - 1
        self._first_column, mask = _masks(width, num_rows, last_column)
        half = step // 2
        reached = 1
        self._reached = [reached]
        self._shifts = []
        for tokens, tiles in items:
            shift = (tokens + half) // step * width + (tiles + half_tiles) // tile_step
            reached |= (reached << shift) & mask
            self._shifts.append(shift)
            self._reached.append(reached)
        self._all = reached

    def subset(self, row: int, column: int) -> list[int]:
        """Places of the items of one subset that reaches this state, latest first."""
        bit = row * self.width + column
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
        """Reachable states (row, column): those of the fullest row and `slack` below, nearest to `tiles` first;
        then one of each lower row."""
        tiles /= self.tile_step
        top = (self._all.bit_length() - 1) // self.width
        fullest = []
        for row in range(top, max(-1, top - slack - 1), -1):
            bits = self._all >> (row * self.width) & self._row
            if bits:
                fullest.append((row, bits))
        below = max(-1, min(self._last_column, int(tiles) if tiles >= 0 else -1))
        above = below + 1
        while below >= 0 or above <= self._last_column:
            if above > self._last_column or (below >= 0 and tiles - below <= above - tiles):
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
        """In row `top` and in each of `rows` below it, (row, column) with the most tiles up to `most_tiles`."""
        mask = (1 << (min(most_tiles // self.tile_step, self._last_column) + 1)) - 1
        for row in range(top, max(-1, top - rows - 1), -1):
            bits = self._all >> (row * self.width) & mask
            if bits:
                yield row, bits.bit_length() - 1

    def full_columns(self, tokens: float, most: int) -> Iterator[tuple[int, int]]:
        """Reachable states (row, column): of the most tiles first, in each column up to `most` nearest to `tokens`."""
        wanted = min(self.num_rows - 1, max(0, int(tokens / self.step)))
        split = (wanted + 1) * self.width
        below = (1 << split) - 1
        for column in range(self._last_column, -1, -1):
            reached = self._all & (self._first_column << column)
            if not reached:
                continue
            rows: list[int] = []
            low, high = reached & below, reached >> split
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
                yield row, column
