"""Pages: what a template names is text, whatever is in it."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import jinja2
import pytest

from internvl_pack.report import page
from internvl_pack.report.page import cut, marked, short, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain 图 é \u200d \n\t", "plain 图 é \u200d \n\t"),
        ("<b>&\"'", "<b>&\"'"),
        ("a\u202eb", "a[U+202E]b"),
        ("\x00\x1b[31m", "[U+0000][U+001B][31m"),
        ("\ud800 \ue000 \u2028", "[U+D800] [U+E000] [U+2028]"),
    ],
)
def test_what_cannot_be_seen_is_shown_by_its_code_point(text, shown):
    assert visible(text) == shown


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a <b> & c", "a &lt;b&gt; &amp; c"),
        ("a\u200bb", 'a<span class="ctl" title="zero width space">U+200B</span>b'),
        ("\x00\x00\x00", '<span class="ctl" title="control character">U+0000 &times;3</span>'),
        ("\n<\u200b", '\n&lt;<span class="ctl" title="zero width space">U+200B</span>'),
    ],
)
def test_what_cannot_be_seen_is_a_mark_in_texts(text, html):
    assert marked(text) == html


def test_names_are_shortened_where_it_hurts_least():
    assert short("a\x1bb" + "c" * 40, 10) == "a?bcccccc…"
    assert cut("a" * 100) == "a" * 100
    assert cut("a" * 70 + "b" * 70) == "a" * 50 + "…" + "b" * 50


@pytest.fixture
def toy(monkeypatch):
    """A page of one template, given as text."""

    def render(template: str, **values: object) -> str:
        loader = jinja2.DictLoader(
            {"toy.html": '{% extends "page.html" %}{% block main %}' + template + "{% endblock %}"}
        )
        environment = page._environment().overlay(loader=jinja2.ChoiceLoader([loader, page._environment().loader]))
        monkeypatch.setattr(page, "_environment", lambda: environment)
        return page.render("toy.html", "<T>\u202e", styles=["preview.css"], script="preview.js", **values)

    return render


def test_everything_that_a_template_names_is_escaped(toy):
    html = toy('<p title="{{ a }}">{{ a }}{{ a ~ "<" }}{{ [a] | join(a) }}</p>', a="<i>\"'\u202e")
    body = html[html.index("<p ") : html.index("</p>")]
    assert body.count("<") == 1 and "\u202e" not in html
    assert body.count("[U+202E]") == 4
    assert "<title>&lt;T&gt;[U+202E]</title>" in html


def test_a_name_that_is_not_given_is_an_error(toy):
    with pytest.raises(jinja2.UndefinedError):
        toy("{{ nobody }}")


def test_only_the_pages_own_script_runs(toy):
    html = toy("")
    script = re.search(r"<script>(.*)</script>", html, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"sha256-{digest}" in html
    assert script == (Path(page.__file__).parent / "preview.js").read_text()
