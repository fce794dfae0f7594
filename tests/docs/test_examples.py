"""The commands and the code of the pages: run on the demo data where that is cheap, else checked word by word.

A fenced block of bash or Python is run as it stands, a page's Python blocks one after the other, in a folder that looks
like the repository. One that needs a GPU, a checkpoint, a cluster or the network has a line before it that says so,

    <!-- not run: needs a checkpoint -->

and is checked instead: its syntax, and that the programs, scripts, options, extras and names in it exist. So are the
commands within the text.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers.factory import write_jsonl
from helpers.ranks import run as run_on_ranks

from internvl_pack.cli import command_helps
from internvl_pack.testing.tiny import save_tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
BLOCK = re.compile(r"(?:^<!-- not run: (?P<why>[^>\n]+) -->\n)?^```(?P<kind>\w*)\n(?P<code>.*?)^```$", re.M | re.S)
INLINE = re.compile(r"`((?:python|torchrun|deepspeed|bash|sbatch|pip|internvl-pack) [^`]+)`")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)|<img src=\"([^\"]+)")
SEPARATORS = {"&&", "||", "|", ";", "&"}


class Block(NamedTuple):
    page: str
    line: int
    kind: str
    code: str
    why: str | None  # it is not run

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = text_of(page)
        for m in BLOCK.finditer(text):
            yield Block(page, text.count("\n", 0, m.start("kind")) + 1, m["kind"], m["code"], m["why"])


BLOCKS = list(blocks())
SHELL_RUN = [b for b in BLOCKS if b.kind == "bash" and b.why is None]
PYTHON_RUN = {page: [b for b in BLOCKS if (b.page, b.kind, b.why) == (page, "python", None)] for page in PAGES}
PYTHON_RUN = {page: found for page, found in PYTHON_RUN.items() if found}


# -- run -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A folder with the repository's files in it, that may be written to."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("benchmarks", "docs", "internvl_pack", "shell", "train"):
        (folder / name).symlink_to(ROOT / name)
    programs = folder / "bin"
    programs.mkdir()
    for name, words in {"python": "", "internvl-pack": "-m internvl_pack.cli"}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (programs / name).chmod(0o755)
    return folder


def run(checkout: Path, *command: str | Path) -> None:
    home = checkout / "home"
    home.mkdir(exist_ok=True)
    env = {
        "PATH": f"{checkout / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("block", SHELL_RUN, ids=str)
def test_commands_run(block, checkout):
    run(checkout, "bash", "-euo", "pipefail", "-c", block.code)


@pytest.mark.slow
@pytest.mark.parametrize("page", PYTHON_RUN)
def test_python_blocks_run(page, checkout, tmp_path, monkeypatch):
    script = checkout / "page.py"
    script.write_text("\n".join(block.code for block in PYTHON_RUN[page]), encoding="utf-8")
    monkeypatch.chdir(checkout)
    run_on_ranks("helpers.page_loops:run_program", str(script), 1, tmp_path / "log", HOME=str(tmp_path))


@pytest.mark.slow
def test_the_loop_of_the_readme_trains_a_small_checkpoint_by_its_name_alone(tokenizer, tmp_path):
    folder, meta = save_tiny_checkpoint(tmp_path / "tiny", tokenizer), write_jsonl(tmp_path, 12)
    (code,) = [b.code for b in BLOCKS if (b.page, b.kind) == ("README.md", "python") and "build_loader" in b.code]
    changes = {"OpenGVLab/InternVL3-1B-hf": folder, "meta.json": meta, ".cuda()": "", "num_workers=4": "num_workers=0"}
    for written, here in changes.items():
        assert code.count(written) == 1
        code = code.replace(written, str(here))
    names: dict[str, Any] = {}
    exec(code, names)
    before = names["build_model"](folder, tokenizer=tokenizer, dtype=torch.float32).state_dict()
    assert not any(torch.equal(before[name], value) for name, value in names["model"].state_dict().items())


@pytest.mark.parametrize("ranks", [2, 3])
def test_loops_for_several_ranks_end_together(ranks, tmp_path):
    """With packs that do not come out even: 11 on 2 and on 3 ranks."""
    page = "docs/library.md"
    setup, loop = [block.code for block in PYTHON_RUN[page][:2]]
    loops = [block.code for block in BLOCKS if block.page == page and block.why and "2 and 3 ranks" in block.why]
    loop = loop.replace("max_packed_tokens=2048", "max_packed_tokens=1200").replace("assert samples == 2 * 52", "")
    loop = loop.replace("num_workers=2", "num_workers=0")  # the same batches, sooner
    assert "1200" in loop and len(loops) == 2
    code = [setup, loop, "from internvl_pack import estimate_epochs", *loops]
    out = tmp_path / "seen"
    run_on_ranks("helpers.page_loops:run_all", {"code": code, "out": str(out)}, ranks, tmp_path / "log")
    seen = [json.loads((tmp_path / f"seen.{rank}").read_text()) for rank in range(ranks)]
    for epoch in zip(*seen, strict=True):
        assert len({len(batches) for batches in epoch}) == 1 and len(epoch[0]) > 2  # as many steps on every rank
        assert sum(map(sum, epoch)) == 52 and len({tuple(batches) for batches in epoch}) > 1
    assert len(seen[0]) == 2 + len(loops)


def test_the_pages_have_examples_that_run():
    assert len(SHELL_RUN) >= 2 and len(PYTHON_RUN["docs/library.md"]) >= 6


# -- checked ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_every_fence_is_a_block_of_a_known_kind(page):
    found = [block for block in BLOCKS if block.page == page]
    assert len(re.findall(r"^\s*```", text_of(page), re.M)) == 2 * len(found)
    assert {block.kind for block in found} <= {"", "bash", "json", "python"}
    for block in found:
        assert block.kind or not INLINE.match(f"`{block.code.strip()}`"), f"{block}: commands in a fence without bash"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.kind == "bash"], ids=str)
def test_commands_name_what_there_is(block):
    subprocess.run(["bash", "-n", "-c", block.code], check=True)
    assert list(problems(block.code)) == []


@pytest.mark.parametrize("page", PAGES)
def test_commands_within_the_text_name_what_there_is(page):
    text = BLOCK.sub("", text_of(page))
    assert [p for command in INLINE.findall(text) for p in problems(command.replace("\n", " "))] == []


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_are_indented_name_what_there_is(page):
    """Usage lines too, whose optional parts stand in brackets."""
    lines = re.findall(
        r"^    ((?:internvl-pack|python|torchrun|bash|pip) .*(?:\\\n.*)*)$", BLOCK.sub("", text_of(page)), re.M
    )
    assert [p for line in lines for p in problems(re.sub(r"[\[\]]", " ", line))] == []


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.kind == "python" and b.why], ids=str)
def test_names_imported_exist(block):
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("internvl_pack", "train"):
            module = importlib.import_module(node.module)
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.kind == "json"], ids=str)
def test_json_is_json(block):
    text = re.sub(r",\s*\.\.\.", "", block.code)  # what is left out
    try:
        json.loads(text)
    except json.JSONDecodeError:
        assert all(json.loads(line) is not None for line in text.splitlines()), "neither JSON nor JSON lines"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for targets in LINK.findall(text_of(page)):
        target = "".join(targets)
        assert (ROOT / page).parent.joinpath(target).exists(), target


@pytest.mark.parametrize(
    "command, problem",
    [
        ("internvl-pack statistics META", "no command 'statistics'"),
        ("internvl-pack stats META --packed_tokens 3", "internvl-pack stats has no option --packed_tokens"),
        ("python train/fine_tune.py", "no script train/fine_tune.py"),
        ("A=1 torchrun --nproc_per_node 8 train/finetune.py --meta x", "train/finetune.py has no option --meta"),
        ("python benchmarks/packing.py --no_such 1", "benchmarks/packing.py has no option --no_such"),
        ("cd x && bash shell/quickstarts.sh", "no script shell/quickstarts.sh"),
        ("pip install '.[everything]'", "no extra 'everything'"),
        ("make install", "unknown program 'make'"),
    ],
)
def test_what_there_is_not_is_found(command, problem):
    assert list(problems(command)) == [problem]


def problems(code: str) -> Iterator[str]:
    """What the commands of a block name that does not exist."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        start = 0
        for end in [*(i for i, word in enumerate(words) if word in SEPARATORS), len(words)]:
            yield from _problems_of(words[start:end])
            start = end + 1


def _problems_of(words: list[str]) -> Iterator[str]:
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if not words or words[0] in ("cd", "export", "mkdir", "cp"):
        return
    program = words[0].removeprefix(".venv/bin/")
    if program == "internvl-pack":
        name = words[1]
        if name in command_helps():
            yield from _unknown(f"internvl-pack {name}", words[2:], command_options(name))
        elif not name.startswith("-"):
            yield f"no command {name!r}"
    elif program in ("python", "torchrun", "deepspeed", "bash", "sbatch"):
        at = next((i for i, word in enumerate(words) if word.endswith((".py", ".sh"))), None)
        if at is None:
            if "-m" in words:
                yield from _module(words[words.index("-m") + 1])
            return
        script = words[at]
        if not (ROOT / script).is_file():
            yield f"no script {script}"
        elif script.endswith(".py"):
            yield from _unknown(script, words[at + 1 :], script_options(script))
    elif program == "pip":
        for extras in re.findall(r"(?:internvl-pack|\.)\[([\w,]+)\]", " ".join(words)):
            yield from (f"no extra {name!r}" for name in extras.split(",") if name not in extras_there())
    else:
        yield f"unknown program {program!r}"


def _unknown(program: str, words: list[str], options: set[str]) -> Iterator[str]:
    for word in words:
        name = word.split("=")[0]
        if name.startswith("--") and name not in options:
            yield f"{program} has no option {name}"


def _module(name: str) -> Iterator[str]:
    if importlib.util.find_spec(name) is None:
        yield f"no module {name}"


@cache
def command_options(name: str) -> set[str]:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"internvl_pack.commands.{name.replace('-', '_')}").configure(parser)
    found = {option for action in parser._actions for option in action.option_strings}
    return found | script_options("train/finetune.py") if name in ("train", "reference") else found


@cache
def script_options(script: str) -> set[str]:
    if script == "train/finetune.py":
        from train.options import Parser

        return {"--data"} | {option for action in Parser()._actions for option in action.option_strings}
    text = (ROOT / script).read_text(encoding="utf-8")
    rest = script_options("train/finetune.py") if "parse_known_args" in text else set()  # which it hands on
    for module in re.findall(r"^from benchmarks\.(\w+) import .*\bparser_of_", text, re.M):  # which makes its parser
        rest = rest | script_options(f"benchmarks/{module}.py")
    return {"--help", *re.findall(r'"(--[a-z][\w-]*)"', text), *rest}


@cache
def extras_there() -> set[str]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    return set(re.findall(r"^([\w-]+) = \[", section, re.M))
