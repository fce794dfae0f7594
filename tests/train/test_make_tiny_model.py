"""`make_tiny_model`: it says what it wrote and what to do next, in a command that is one."""

from __future__ import annotations

import re
import shlex

import pytest
from helpers.factory import write_jsonl
from transformers import AutoModelForImageTextToText

from train.make_tiny_model import main
from train.options import parse


@pytest.mark.slow
def test_it_says_what_it_wrote_and_the_next_command(tmp_path, capsys):
    meta, folder = write_jsonl(tmp_path, 8), tmp_path / "a tiny one"
    assert main(["--meta_path", str(meta), "--output_dir", str(folder)]) == 0
    wrote, command = capsys.readouterr().out.splitlines()
    size = AutoModelForImageTextToText.from_pretrained(folder).num_parameters()
    assert wrote == f"wrote {folder}: a tiny InternVL ({size:,} parameters). To train it:"
    model, data, _ = parse(shlex.split(command)[2:])
    assert (model.model_name_or_path, data.meta_path) == (str(folder), str(meta))


def test_its_help_has_the_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    options = re.split(r"\n  --", capsys.readouterr().out)[3:]
    assert len(options) == 7 and all("default: " in " ".join(text.split()) for text in options)
