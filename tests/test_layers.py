"""The import graph of the package: no circles, and arrows down the stages only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from helpers.code import statements, within

ROOT = Path(__file__).resolve().parents[1]

# From the top down; a stage imports from those below it. Stages of one line stand side by side.
STAGES = (
    ("internvl_pack.cli", "internvl_pack.commands"),
    ("train",),
    ("internvl_pack",),  # its public names
    ("internvl_pack.trees",),
    ("internvl_pack.report",),
    ("internvl_pack.stream",),
    ("internvl_pack.estimate",),
    ("internvl_pack.plan",),
    ("internvl_pack.survey",),
    ("internvl_pack.model", "internvl_pack.testing"),
    ("internvl_pack.checkpoints", "internvl_pack.parallel"),
    ("internvl_pack.samples", "internvl_pack.batch"),
    ("internvl_pack.encode", "internvl_pack.config"),
    ("internvl_pack.order", "internvl_pack.packing"),
    ("internvl_pack.sources", "internvl_pack.ledger"),
    ("internvl_pack.plugins", "internvl_pack.records", "internvl_pack.options"),
    ("internvl_pack.errors",),
)


def modules() -> dict[str, Path]:
    """Files by the names that they are imported by; packages by their folder's."""
    found = {}
    for top in ("internvl_pack", "train"):
        for path in (ROOT / top).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of ours that this one imports, within functions too; not those that only annotations need."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in executed(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, (base, node.module)))
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= (names & known.keys()) or {base}
            if not names <= known.keys():  # a package's own names, too
                found.add(base)
    return (found & known.keys()) - {name}


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """All statements but those within `if TYPE_CHECKING`."""
    for child in within(node):
        yield child
        if isinstance(child, ast.If) and is_for_annotations(child.test):
            for other in child.orelse:
                yield other
                yield from executed(other)
        else:
            yield from executed(child)


def is_for_annotations(test: ast.expr) -> bool:
    return isinstance(test, ast.Name | ast.Attribute) and ast.unparse(test).endswith("TYPE_CHECKING")


@cache
def imports_in(folder: str) -> list[tuple[Path, ast.Import | ast.ImportFrom]]:
    """All imports in a folder's files, within functions too."""
    return [
        (path.relative_to(ROOT), node)
        for path in (ROOT / folder).rglob("*.py")
        for node in statements(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]


def stage_of(name: str) -> str:
    parts = name.split(".")
    return parts[0] if parts[0] == "train" else ".".join(parts[:2])


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The nodes of some circle, or nothing: what is left when all that import nothing (any more) are taken away."""
    graph = dict(graph)
    while leaves := [name for name, below in graph.items() if not below & graph.keys()]:
        for name in leaves:
            del graph[name]
    if not graph:
        return []
    way = [min(graph)]
    while way[-1] not in way[:-1]:
        way.append(min(graph[way[-1]] & graph.keys()))
    return way[way.index(way[-1]) :]


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: imported(name, path, known) for name, path in known.items()}


@pytest.fixture(scope="module")
def arrows(graph) -> dict[tuple[str, str], list[str]]:
    """Imports from one stage of another, each with its modules."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, below in graph.items():
        for other in below:
            if stage_of(name) != stage_of(other):
                found.setdefault((stage_of(name), stage_of(other)), []).append(f"{name} -> {other}")
    return found


def test_modules_import_each_other_in_no_circle(graph):
    assert not circle(graph)


def test_every_module_belongs_to_a_stage(graph):
    assert {stage_of(name) for name in graph} == {stage for line in STAGES for stage in line}


def test_stages_import_from_those_below_them_only(arrows):
    height = {stage: -place for place, line in enumerate(STAGES) for stage in line}
    upwards = {arrow: names for arrow, names in arrows.items() if height[arrow[0]] <= height[arrow[1]]}
    assert upwards == {}


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["internvl_pack", "train", "benchmarks", "tests"])
def test_modules_of_ours_that_are_imported_are_there(folder):
    """Within functions too, where an import of a module that has moved shows only when the function runs."""
    there = modules().keys()
    missing = [
        f"{path}:{node.lineno} {node.module}"
        for path, node in imports_in(folder)
        if isinstance(node, ast.ImportFrom) and not node.level and node.module
        if node.module.split(".")[0] in ("internvl_pack", "train") and node.module not in there
    ]
    assert missing == []


@pytest.mark.slow
def test_nothing_imports_from_a_test():
    """What several tests need stands in tests/helpers or in a conftest.py."""
    found = [
        f"{path} {name}"
        for path, node in imports_in("tests")
        for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        if any(part == "conftest" or part.startswith("test_") for part in name.split("."))
    ]
    assert found == []


def test_tests_lie_in_the_folders_that_they_test():
    for path in (ROOT / "tests").rglob("test_*.py"):
        folder = path.parent.relative_to(ROOT / "tests")
        assert folder.parts[:1] in ((), ("docs",), ("shell",), ("train",)) or (ROOT / "internvl_pack" / folder).is_dir()


def test_the_graph_sees_imports_within_functions_and_circles(tmp_path):
    known = dict.fromkeys(("a", "a.b", "a.c", "a.d", "a.e", "d"), tmp_path)
    (tmp_path / "b.py").write_text(
        "from typing import TYPE_CHECKING\nimport d\nif TYPE_CHECKING:\n    from . import e\n"
        "def f():\n    from .c import x\n    from . import d as y\n"
    )
    assert imported("a.b", tmp_path / "b.py", known) == {"a.c", "a.d", "d"}
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
