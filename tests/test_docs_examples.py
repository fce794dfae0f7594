"""The Python blocks of the pages run as they stand, those of a page one after the other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(?:<!-- not run: (?P<why>[^>]+) -->\n)?^```(?P<kind>\w+)\n(?P<code>.*?)^```$", re.M | re.S)
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
RUN = ["docs/library.md"]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")


def blocks(page: str, kind: str) -> list[tuple[str | None, str]]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [(m["why"], m["code"]) for m in BLOCK.finditer(text) if m["kind"] == kind]


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_are_python(page):
    for _, code in blocks(page, "python"):
        compile(code, page, "exec")


@pytest.mark.parametrize("page", RUN)
def test_python_blocks_run(page, tmp_path):
    code = [code for why, code in blocks(page, "python") if why is None]
    assert len(code) >= 5
    script = tmp_path / "page.py"
    script.write_text("\n".join(code), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        assert (ROOT / page).parent.joinpath(target).exists(), target
