"""Self-contained pages from the templates beside this module: one file, no network, whatever the text in them.

Text is escaped by Jinja. Before that, `visible` writes characters that cannot be seen as their code points.
"""

from __future__ import annotations

import base64
import hashlib
import unicodedata
from collections.abc import Sequence
from functools import cache
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

_FOLDER = Path(__file__).resolve().parent

# Control characters that are text.
SHOWN = {"\n": "\n", "\t": "\t"}


def render(template: str, title: str, *, styles: Sequence[str], script: str = "", **values: Any) -> str:
    """A whole page. Its content policy forbids anything but its own styles, its own script and pictures within it.

    Args:
        template: a file of `templates`, which extends `page.html`.
        styles, script: names of style sheets and of a script that lie beside this module.
        values: what the template names.
    """
    css = "\n".join(_asset(name) for name in ("page.css", *styles))
    code = _asset(script) if script else ""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    if script:
        policy += f"; script-src 'sha256-{_base64(hashlib.sha256(code.encode()).digest())}'"
    page = {"title": title, "policy": policy, "css": Markup(css), "script": Markup(code)}
    return _environment().get_template(template).render(page | values)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _asset(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        finalize=visible,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = {
        "n": lambda number: f"{number:,}",
        "pct": lambda share: f"{share:.1%}",
        "g": lambda number: f"{number:.4g}",
        "base64": _base64,
        "marked": marked,
        "short": short,
        "cut": cut,
    }
    environment.filters |= filters
    return environment


def visible(value: Any) -> Any:
    """A text with code points for characters that cannot be seen, or turn others round; anything else as it is."""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return "".join(f"[U+{ord(c):04X}]" if _hidden(c) else c for c in value)


def marked(value: str) -> Markup:
    """A text for element content: what cannot be seen stands as a small mark, runs of it as one."""
    out: list[str] = []
    for c, run in groupby(value):
        count = len(list(run))
        if _hidden(c):
            name = unicodedata.name(c, "control character").lower()
            times = f" &times;{count:,}" if count > 1 else ""
            out.append(f'<span class="ctl" title="{escape(name)}">U+{ord(c):04X}{times}</span>')
        else:
            out.append(escape(c * count))
    return Markup("".join(out))


def short(name: str, limit: int = 28) -> str:
    """A name without its end and without control characters."""
    name = "".join(c if c.isprintable() else "?" for c in name)
    return name if len(name) <= limit else f"{name[: limit - 1]}…"


def cut(name: str, limit: int = 100) -> str:
    """A long name without its middle: what distinguishes samples stands at its end."""
    return name if len(name) <= limit else f"{name[: limit // 2]}…{name[-limit // 2 :]}"


def _hidden(c: str) -> bool:
    """Controls, formats (bidi overrides, zero widths), surrogates, private and unassigned; not the joiners of emoji."""
    return c not in SHOWN and c != "\u200d" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
