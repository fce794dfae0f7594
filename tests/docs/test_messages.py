"""The messages that the pages quote are those that the code prints, and every reason of a bad sample is explained."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from train.options import DROPPED, GONE, REFUSED, RENAMED, option_names

ROOT = Path(__file__).resolve().parents[2]
QUOTE = re.compile(r"^(?:\* )?`([^`]*)` ", re.MULTILINE)
MIGRATION = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
QUOTED = QUOTE.findall((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
EXPRESSION = re.compile(r"\$\(\(.*\)\)|\$\{[^}]*\}|\$\w+")


def printed() -> list[str]:
    """Every text in the code, what it fills in shown as `…`."""
    texts = []
    for path in [*(ROOT / "internvl_pack").rglob("*.py"), *(ROOT / "train").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%\.?\d*[sdf](%%)?", "…", node.value))
    texts += [EXPRESSION.sub("…", path.read_text(encoding="utf-8")) for path in (ROOT / "shell").glob("*.sh")]
    return texts


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return printed()


def test_the_page_quotes_messages():
    assert len(QUOTED) >= 30


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_exists(message, texts):
    assert any(message in text for text in texts), f"no text of the code reads {message!r}"


def test_a_message_that_is_nowhere_is_found_out(texts):
    assert not any("--meta_path …: no such folder" in text for text in texts)


def test_every_reason_is_explained():
    pages = "".join(
        (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("reasons.md", "encoding.md", "data.md")
    )
    reasons = {
        constant.value
        for path in (ROOT / "internvl_pack").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "SampleError" and node.args
        for constant in ast.walk(node.args[0])
        if isinstance(constant, ast.Constant) and re.fullmatch("[a-z0-9]+(_[a-z0-9]+)+", str(constant.value))
    }
    assert len(reasons) > 50
    assert sorted(reason for reason in reasons if f"`{reason}`" not in pages) == []


def test_migration_names_every_flag_that_is_renamed_left_out_or_refused():
    for name in (*RENAMED, *DROPPED, *REFUSED, *GONE):
        assert f"`{name}" in MIGRATION, name


def test_migration_gives_the_reasons_that_the_log_gives():
    plain = MIGRATION.replace("`", "")
    for name, why in DROPPED.items():
        assert why in plain, name


def test_flags_said_to_mean_the_same_are_options_here():
    section = MIGRATION.partition("## Flags that mean the same")[2].partition("## Flags with a difference")[0]
    names = re.findall(r"`([a-z_0-9]+)`", section)
    assert len(names) > 40
    assert set(names) <= set(option_names())
