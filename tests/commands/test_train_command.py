"""`internvl-pack train`: what it hands on to training in this process, and to the launcher of several."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from internvl_pack.cli import main
from internvl_pack.commands import train
from internvl_pack.errors import UserError
from train.options import Parser, parse

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "internvl-pack train"
RUN = ["run.json", "--meta_path", "a.jsonl", "--nproc_x", "-1", "--bf16"]


@pytest.fixture
def called(monkeypatch) -> list:
    """Modules of training, and the words that they were called with."""
    found: list = []

    def import_module(name):
        return SimpleNamespace(
            main=lambda *given: found.append((name.rpartition(".")[2], *map(list, given[:1]), *given[1:])) or 7
        )

    monkeypatch.setattr(train, "import_module", import_module)
    monkeypatch.delenv("RANK", raising=False)
    return found


def test_one_process_trains_here(called):
    assert main(["train", *RUN]) == 7
    assert called == [("finetune", RUN, PROGRAM)]


def test_several_are_started_by_the_launcher(called):
    assert main(["train", *RUN[:3], "--nproc", "4", *RUN[3:]]) == 7
    ranks = ["--standalone", "--nproc_per_node", "4", "--module", "internvl_pack.cli", "train"]
    assert called == [("launch", [*ranks, *RUN])]


def test_a_process_that_torchrun_started_trains_itself(called, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "--nproc", "4", *RUN]) == 7
    assert called == [("finetune", RUN, PROGRAM)]


def test_help_and_mistakes_name_the_command(called):
    shown = Parser(PROGRAM).format_help()
    assert shown.startswith("usage: internvl-pack train [--nproc N] [FILE.json|FILE.yaml]")
    assert "finetune.py" not in shown
    with pytest.raises(UserError, match="unknown option '--hepl': internvl-pack train --help lists them all"):
        parse(["--hepl"], PROGRAM)
    for word, meant in {
        "--lr": "--learning_rate or",
        "--epochs": "--num_train_epochs?",
        "--metapath": "--meta_path?",
    }.items():
        with pytest.raises(UserError, match=f"unknown option '{word}': did you mean .*{re.escape(meant)}"):
            parse([word, "1"], PROGRAM)


def test_usage_says_that_there_are_options(capsys):
    with pytest.raises(SystemExit):
        main(["preview", "--help"])
    assert capsys.readouterr().out.startswith("usage: internvl-pack preview --out FILE [options] meta\n")


def test_no_process_is_refused(called, capsys):
    assert main(["train", "--nproc", "0"]) == 2
    assert "--nproc 0: give at least 1" in capsys.readouterr().err and not called


def test_the_wheel_has_all_packages_and_no_train_of_its_own(monkeypatch):
    kept: dict = {}
    monkeypatch.setattr("setuptools.setup", kept.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "internvl_pack").rglob("__init__.py")}
    assert set(kept["packages"]) == folders | {"internvl_pack.train"}
    assert kept["package_dir"] == {"internvl_pack.train": "train"}
