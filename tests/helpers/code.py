"""Statements of a Python file, without their expressions, which are nine tenths of a syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator

BODIES = ("body", "orelse", "handlers", "finalbody", "cases")


def within(node: ast.AST) -> Iterator[ast.AST]:
    """The statements, handlers and cases directly below a node."""
    for name in BODIES:
        yield from getattr(node, name, ())


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All of them, those within functions too."""
    for child in within(node):
        yield child
        yield from statements(child)
