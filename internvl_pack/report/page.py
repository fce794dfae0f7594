"""Self-contained pages: one file, no network, whatever the text in them."""

from __future__ import annotations

import base64
import hashlib
import unicodedata
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).resolve().parent

SHOWN = {"\n": "\n", "\t": "\t"}
"""Control characters that are text."""


def asset(name: str) -> str:
    """A style sheet or script that lies beside this module."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def document(title: str, body: str, *, styles: Sequence[str], script: str = "") -> str:
    """A whole page. Its content policy forbids anything but its own styles, its own script and pictures within it."""
    css = "\n".join(asset(name) for name in ("page.css", *styles))
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'"
    tail = f"<script>{script}</script>\n" if script else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">\n'
        f"<title>{text(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n{tail}"
        "</body>\n</html>\n"
    )


def text(value: object) -> str:
    """Escaped for text and attributes; characters that cannot be seen, or turn others round, as their code points."""
    return "".join(f"[U+{ord(c):04X}]" if _hidden(c) else escape(c) for c in str(value))


def marked(value: str) -> str:
    """As `text`, for element content: what cannot be seen stands as a small mark, runs of it as one."""
    out: list[str] = []
    position = 0
    while position < len(value):
        c = value[position]
        if not _hidden(c):
            out.append(escape(c))
            position += 1
            continue
        stop = position
        while stop < len(value) and value[stop] == c:
            stop += 1
        times = f" &times;{stop - position:,}" if stop - position > 1 else ""
        out.append(f'<span class="ctl" title="{escape(_name(c))}">U+{ord(c):04X}{times}</span>')
        position = stop
    return "".join(out)


def _hidden(c: str) -> bool:
    """Controls, formats (bidi overrides, zero widths), surrogates, private and unassigned; not the joiners of emoji."""
    return c not in SHOWN and c != "\u200d" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def _name(c: str) -> str:
    return unicodedata.name(c, "control character").lower()


def figures(pairs: Iterable[tuple[str, str, str]]) -> str:
    """Named numbers: (name, value, small print)."""
    items = "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)}{f' <small>{text(small)}</small>' if small else ''}</dd></div>"
        for name, value, small in pairs
    )
    return f'<dl class="figures">{items}</dl>'


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    label: str,
    strong: Sequence[int] = (),
    left: Sequence[int] = (),
) -> str:
    """Cells are text; a cell `(html,)` is HTML as it is. It scrolls within itself where it is too wide.

    Args:
        strong: rows in bold.
        left: columns whose headings stand at the left, as their cells do.
    """
    head = "".join(
        f'<th scope="col"{" class=left" if n in left else ""}>{text(name)}</th>' for n, name in enumerate(header)
    )
    body = "".join(
        f"<tr{' class=strong' if n in strong else ''}>"
        + "".join(cell[0] if isinstance(cell, tuple) else f"<td>{text(cell)}</td>" for cell in row)
        + "</tr>\n"
        for n, row in enumerate(rows)
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(label)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
