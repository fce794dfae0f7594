"""`internvl-pack simulate` on files that are no lengths, or lengths that no sample has."""

from __future__ import annotations

import json

import pytest

from internvl_pack.cli import main


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
