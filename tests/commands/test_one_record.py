"""Every command on data of one record, without a meta file: it is read, and counted in the singular."""

from __future__ import annotations

import json
import re

import pytest

from internvl_pack.cli import main
from internvl_pack.options import count

TURNS = [{"from": "human", "value": "Which colour is the sky?"}, {"from": "gpt", "value": "Blue."}]
PLURALS = re.compile(r"\b1 (?:[a-z]+ )?(?:sample|pack|step|rank|row|segment|file|epoch|record|shard|tile)s\b")


@pytest.fixture
def data(tmp_path, tokenizer):
    (tmp_path / "one.jsonl").write_text(json.dumps({"conversations": TURNS}) + "\n")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ("stats",),
        ("preview", "--out", "{folder}/page.html"),
        ("validate",),
        ("index",),
        ("shard", "--out", "{folder}/data-%d.tar"),
        ("simulate", "--ranks", "1", "--tokenizer", "{folder}/tokenizer"),
        ("simulate", "--ranks", "1", "--tokenizer", "{folder}/tokenizer", "--suggest"),
        ("plan", "--tokenizer", "{folder}/tokenizer", "--out", "{folder}/preset"),
    ],
    ids=" ".join,
)
def test_one_record_is_no_plural(words, data, capsys):
    command, *options = (word.format(folder=data) for word in words)
    assert main([command, str(data / "one.jsonl"), *options]) == 0
    out, err = capsys.readouterr()
    assert not PLURALS.findall(out + err), out + err


def test_counts():
    assert [count(n, "optimizer steps") for n in (0, 1, 2048)] == [
        "0 optimizer steps",
        "1 optimizer step",
        "2,048 optimizer steps",
    ]
