"""Tables of the commands on standard output: plain text, whole lines in files and pipes."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[int] = (0,)) -> str:
    """Aligned columns under a ruled header. A cell may have several lines.

    Args:
        left: columns that are text, aligned to the left; the others to the right. The last of a row may be long.
    """
    cells = [[_printable(cell).split("\n") for cell in row] for row in (header, *rows)]
    widths = [max(_width(line) for row in cells for line in row[n]) for n in range(len(header))]
    cells.insert(1, [["-" * min(width, 40)] for width in widths])
    lines = []
    for row in cells:
        for number in range(max(map(len, row))):
            fields = [_aligned(cell[number] if number < len(cell) else "", width, n in left)
                      for n, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
            lines.append("  ".join(fields).rstrip())
    return "\n".join(lines)


def _printable(cell: str) -> str:
    """Without what a terminal would obey."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in cell)


def _width(line: str) -> int:
    """Places on a terminal: two for wide letters, none for combining ones."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in line)


def _aligned(line: str, width: int, left: bool) -> str:
    space = " " * (width - _width(line))
    return line + space if left else space + line
