"""`internvl-pack simulate` on files that are no lengths, or lengths that no sample has."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from internvl_pack.cli import main
from internvl_pack.packing import simulate
from internvl_pack.packing.budget import Budget


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(["simulate", *argv, "--ranks", "1"])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("content", [b"\xff\xfe1\x00", b"num_tokens,num_tiles\n5,1\n\xe9,1\n"])
def test_a_file_that_is_not_utf8_is_one_line_that_names_it(content, tmp_path, capsys):
    path = tmp_path / "lengths.csv"
    path.write_bytes(content)
    code, _, err = run(capsys, str(path))
    assert code == 2
    assert err.count("\n") == 1 and "lengths.csv" in err and "UTF-8" in err


def test_a_field_without_end_is_one_line_that_names_the_file(tmp_path, capsys):
    path = tmp_path / "lengths.csv"
    path.write_text('num_tokens,num_tiles\n"' + "1" * 200_000, encoding="utf-8")
    code, _, err = run(capsys, str(path))
    assert code == 2
    assert err.count("\n") == 1 and "lengths.csv" in err


@pytest.mark.parametrize("oversize", ["split", "truncate", "drop"])
def test_a_row_of_more_tiles_than_tokens_is_dropped_and_counted(oversize, tmp_path, capsys):
    path = tmp_path / "lengths.csv"
    path.write_text("num_tokens,num_tiles,num_images\n5,200,1\n700,2,1\n", encoding="utf-8")
    code, out, _ = run(capsys, str(path), "--json", "--oversize", oversize)
    report = json.loads(out)
    assert code == 0
    assert (report["samples"], report["packs"], report["dropped"]) == (2, 1, 1)


def test_a_negative_reservoir_is_refused(tmp_path, capsys):
    path = tmp_path / "lengths.csv"
    path.write_text("num_tokens,num_tiles\n700,2\n", encoding="utf-8")
    code, _, err = run(capsys, str(path), "--reservoir", "-1")
    assert code == 2
    assert "--reservoir" in err


@pytest.mark.parametrize(("rows", "even"), [("10,0\n", True), ("10,0\n" * 400, True), ("10,0\n30,0\n" * 200, False)])
def test_ranks_of_very_short_samples_are_compared_on_fewer_packs(rows, even, monkeypatch):
    """At 32,768 tokens a pack holds thousands of them."""
    read = []
    cut = simulate.Cutter.cut
    monkeypatch.setattr(simulate.Cutter, "cut", lambda self, *args: read.append(args) or cut(self, *args))
    lines = io.StringIO("num_tokens,num_tiles\n" + rows)
    found = simulate.simulate(
        simulate.read_lengths(lines, "lengths"), Budget(32768, 96), num_ranks=2, policy="next_fit"
    )
    assert found.rank_efficiency == 1.0 if even else 0.99 < found.rank_efficiency < 1.0
    assert len(read) < 500 if even else len(read) < 2 * 2 * 2 * simulate.MAX_SAMPLES_A_RANK


def test_tiles_of_a_meta_file_are_those_of_the_options(tmp_path, capsys, tokenizer):
    meta = Path(__file__).resolve().parents[1] / "shell" / "data" / "demo" / "meta.json"
    tokenizer.save_pretrained(tmp_path)
    found = {}
    for cut in ("True", "False"):
        options = ("--tokenizer", str(tmp_path), "--dynamic_image_size", cut, "--use_thumbnail", cut, "--json")
        code, out, _ = run(capsys, str(meta), *options)
        assert code == 0
        found[cut] = json.loads(out)
    assert found["True"]["samples"] == found["False"]["samples"] > 0
    assert found["True"]["lower_bound"] > found["False"]["lower_bound"]
