"""The library's public names: documented, annotated, and announced to type checkers as such."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import internvl_pack

ROOT = Path(__file__).parents[1]


def public_callables() -> Iterator[tuple[str, Any]]:
    """Functions, classes and the classes' own public methods and properties, by name."""
    for name in internvl_pack.__all__:
        thing = getattr(internvl_pack, name)
        if not callable(thing) or getattr(thing, "_is_protocol", False):  # its methods are what others write
            continue
        yield name, thing
        for attribute, member in vars(thing).items() if inspect.isclass(thing) else ():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if inspect.isfunction(function) and not attribute.startswith("_"):
                yield f"{name}.{attribute}", function


def test_every_public_name_is_documented():
    classes = {name: thing for name, thing in public_callables() if inspect.isclass(thing)}
    bare = []
    for name, thing in public_callables():
        owner, _, method = name.partition(".")
        if not inspect.getdoc(getattr(classes[owner], method) if method else thing):
            bare.append(name)
    assert bare == []


def test_every_public_function_says_its_types():
    bare = []
    for name, thing in public_callables():
        function = thing.__init__ if inspect.isclass(thing) else thing
        if not inspect.isfunction(function):
            continue  # a class without a constructor of its own
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
        untyped = [p.name for p in parameters if p.annotation is p.empty]
        if untyped or inspect.signature(function).return_annotation is inspect.Signature.empty:
            bare.append(f"{name}({', '.join(untyped)})")
    assert bare == []


def test_the_package_tells_type_checkers_that_it_has_types():
    assert (ROOT / "internvl_pack" / "py.typed").is_file()
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (shipped,) = re.findall(r"^internvl_pack = (\[.*\])$", settings.split("[tool.setuptools.package-data]")[1], re.M)
    assert "py.typed" in ast.literal_eval(shipped)
