"""The pages name options that exist; the page of options is made from their declarations."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import runpy
from pathlib import Path

import pytest

from internvl_pack import EncodeConfig
from internvl_pack.cli import command_helps
from internvl_pack.encode.formats import known_templates
from internvl_pack.options import Option, declared_option
from train.options import ALIASES, DROPPED, GONE, RENAMED, Parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
MAKER = runpy.run_path(str(ROOT / "docs" / "make_options.py"))

# Of other programs that the pages call.
FOREIGN = {
    "--gres",
    "--index-url",
    "--mixed_precision",
    "--multi_gpu",
    "--nproc_per_node",
    "--ntasks-per-node",
    "--shutdown-timeout",
    "--signal",
}


def known_options() -> set[str]:
    """All that finetune.py, its programs and the commands of internvl-pack take, and what of InternVL's is answered."""
    parsers: list[argparse.ArgumentParser] = [Parser()]
    for name in command_helps():
        command = argparse.ArgumentParser()
        importlib.import_module(f"internvl_pack.commands.{name.replace('-', '_')}").configure(command)
        parsers.append(command)
    found = {word for p in parsers for action in p._actions for word in action.option_strings}
    found |= {f"--{name}" for name in (*ALIASES, *DROPPED, *GONE, *RENAMED)}
    for script in [*(ROOT / "benchmarks").glob("*.py"), ROOT / "train" / "make_tiny_model.py"]:
        found |= set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', script.read_text(encoding="utf-8")))
    return found


@pytest.fixture(scope="module")
def known() -> set[str]:
    return known_options()


@pytest.mark.parametrize("page", PAGES)
def test_options_named_exist(page, known):
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", text))
    assert sorted(named - known - FOREIGN) == []


def test_the_page_of_options_is_that_of_their_declarations():
    assert MAKER["PAGE"].read_text(encoding="utf-8") == MAKER["page"](), "run python docs/make_options.py"


def test_the_page_shows_unit_default_choices_and_where_more_is():
    said = Option(help="What --other_option leaves.", unit="rows", choices=("a", "b"), page="data.md")
    assert MAKER["row"]("name", 1, said) == (
        "| `name` | 1 row | What `other_option` leaves. One of a, b. [More](data.md). |"
    )
    assert MAKER["row"]("name", None, Option(help="Text.")) == "| `name` | none | Text. |"


def test_every_chat_format_is_named():
    said = declared_option(EncodeConfig.__dataclass_fields__["conv_style"])
    assert [name for name in known_templates() if name not in said.help] == []


def test_figures_of_the_readme_stand_in_the_pages():
    """Every number of its tables of figures is one of the page that the table links to."""
    figures = (ROOT / "README.md").read_text(encoding="utf-8").split("## Speed")[1].split("\n## ")[0]
    pages = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("packing.md", "measurements.md"))
    cells = [cell for line in figures.splitlines() if line.startswith("| ") for cell in line.split("|")[2:-1]]
    numbers = {cell.strip(" *") for cell in cells if re.fullmatch(r"[ *]*\d[\d.,]+[ *]*", cell)}
    assert len(numbers) >= 10
    assert sorted(number for number in numbers if number not in pages) == []


def test_every_page_can_be_reached_from_the_readme():
    reached, waiting = set(), ["README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        text = (ROOT / page).read_text(encoding="utf-8")
        targets = [(ROOT / page).parent / t for t in re.findall(r"\]\((?!https?:)([^)#\s]+)", text)]
        waiting += [str(t.resolve().relative_to(ROOT)) for t in targets if t.suffix == ".md"]
    assert sorted(set(PAGES) - reached) == []


@pytest.mark.parametrize("page", PAGES)
def test_links_to_headings_lead_to_one(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target, heading in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", text):
        other = (ROOT / page).parent / target if target else ROOT / page
        titles = re.findall(r"^#+ (.+)$", other.read_text(encoding="utf-8"), re.M)
        anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
        assert heading in anchors, f"{target}#{heading}"


def messages_of_the_code() -> list[str]:
    """Every string of the programs, … where something is filled in."""
    found = []
    for path in (p for folder in ("internvl_pack", "train") for p in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sd]|%\.\d+f", "…", node.value))
    for path in (ROOT / "shell").glob("*.sh"):
        found += [re.sub(r"\$\{[^}]*\}|\$\w+", "…", line) for line in path.read_text(encoding="utf-8").splitlines()]
    return found


@pytest.mark.slow
def test_messages_that_are_explained_exist():
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    explained = re.findall(r"^`([^`]+)`", text, re.M)
    code = messages_of_the_code()
    assert len(explained) > 30
    gone = []
    for message in explained:
        parts = [part.strip() for part in message.split("…") if len(part.strip()) > 3]
        if not any(all(part in line for part in parts) for line in code):
            gone.append(message)
    assert gone == []


@pytest.mark.parametrize("page", sorted(set(PAGES) - {"docs/comparison.md", "docs/migration.md"}))
def test_files_of_ours_that_are_named_are_there(page):
    """Those with a folder; the two pages left out name files of other projects."""
    named = re.findall(
        r"(?<![\w/.<>-])((?:[\w-]+/)+[\w-]+\.(?:py|sh|json))\b", (ROOT / page).read_text(encoding="utf-8")
    )
    homes = (ROOT, ROOT / "internvl_pack", ROOT / "internvl_pack" / "model")
    ours = {path.name for home in homes for path in home.iterdir() if path.is_dir()} - {"data"}
    there = [name for name in named if name.split("/")[0] in ours]
    assert [name for name in there if not any((home / name).exists() for home in homes)] == []


def test_the_stages_name_classes_that_exist():
    """Each name of the table's third column is one of a module of its row's folder."""
    rows = [line.split("|") for line in (ROOT / "docs/how-it-works.md").read_text(encoding="utf-8").splitlines()]
    stages = [(row[2].strip(" `"), re.findall(r"`([\w.]+)", row[3])) for row in rows if len(row) == 6]
    missing, count = [], 0
    for place, names in stages[2:]:
        top = "" if place == "train/" else "internvl_pack/"
        files = [ROOT / top / place] if place.endswith(".py") else (ROOT / top / place).rglob("*.py")
        text = "\n".join(path.read_text(encoding="utf-8") for path in files)
        for name in names:
            count += 1
            defined = [re.search(rf"^ *(?:class|def) {part}\b", text, re.M) for part in name.split(".")]
            if not all(defined) and not (ROOT / top / place / name).exists():
                missing.append(name)
    assert count > 15 and missing == []
