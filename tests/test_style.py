"""What the house writes one way and ruff cannot hold: imports, comments on constants, errors in docstrings."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from helpers.code import statements

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    path.relative_to(ROOT): path.read_text(encoding="utf-8")
    for top in ("internvl_pack", "train")
    for path in sorted((ROOT / top).rglob("*.py"))
}


@pytest.fixture(scope="module")
def nodes() -> dict[Path, list[ast.AST]]:
    """Each file's module and statements."""
    trees = {path: ast.parse(text) for path, text in FILES.items()}
    return {path: [tree, *statements(tree)] for path, tree in trees.items()}


def test_imports_within_the_package_are_relative(nodes):
    absolute = [
        f"{path}:{node.lineno}"
        for path, found in nodes.items()
        if path.parts[0] == "internvl_pack"
        for node in found
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "internvl_pack"
    ]
    assert absolute == []


def test_constants_are_explained_by_comments(nodes):
    below = [
        f"{path}:{node.lineno}"
        for path, found in nodes.items()
        for parent in found
        if isinstance(parent, ast.Module | ast.ClassDef)
        for node in parent.body[1:]
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    marked = [str(path) for path, text in FILES.items() if re.search(r"^\s*#:", text, re.M)]
    assert below + marked == []


def test_docstrings_list_their_errors_under_raises(nodes):
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    within = [
        f"{path}: {doc[:60]}"
        for path, found in nodes.items()
        for node in found
        if isinstance(node, kinds) and (doc := ast.get_docstring(node)) and re.search(r"Raises [`A-Z]", doc)
    ]
    assert within == []
