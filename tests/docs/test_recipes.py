"""The tables of docs/recipes.md are those that the estimate gives now."""

from __future__ import annotations

import runpy
from pathlib import Path

MAKER = runpy.run_path(str(Path(__file__).resolve().parents[2] / "docs" / "make_recipes.py"))


def test_the_tables_are_current():
    assert MAKER["PAGE"].read_text(encoding="utf-8") == MAKER["page"](), "run python docs/make_recipes.py"


def test_adapters_need_little_beside_the_weights():
    row = MAKER["choice"]("8B", 1, 48, True)
    assert "auto" in row and MAKER["choice"]("8B", 1, 48, False) is None
