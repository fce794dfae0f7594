"""Which folders of the model side may import which; imports within functions count."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import internvl_pack

PACKAGE = Path(internvl_pack.__file__).parent


def imports_of(folder: str) -> dict[str, set[str]]:
    """Of each file under a folder of the package, the modules it imports and the names it takes of them."""
    found = {}
    for file in sorted((PACKAGE / folder).rglob("*.py")):
        place = [PACKAGE.name, *file.relative_to(PACKAGE).parts[:-1]]
        names = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                start = place[: len(place) + 1 - node.level] if node.level else []
                module = ".".join([*start, *([node.module] if node.module else [])])
                names |= {f"{module}.{alias.name}" for alias in node.names}
        found[str(file.relative_to(PACKAGE))] = names
    assert found
    return found


def below(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


@pytest.mark.parametrize("folder", ["parallel", "checkpoints"])
def test_what_the_model_stands_on_does_not_know_it(folder):
    for file, names in imports_of(folder).items():
        assert not {name for name in names if below(name, "internvl_pack.model")}, file


@pytest.mark.slow
def test_the_vision_layers_are_reached_through_their_door():
    door = "internvl_pack.model.vision"
    modules = {file.stem for file in (PACKAGE / "model" / "vision").glob("*.py")}
    for file, names in imports_of(".").items():
        if not file.startswith("model/vision/"):
            inner = {
                name for name in names if below(name, door) and name.removeprefix(door + ".").split(".")[0] in modules
            }
            assert not inner, file
