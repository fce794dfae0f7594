"""`internvl-pack index`: one index file beside each data file, the same whatever the workers."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from internvl_pack.cli import main
from internvl_pack.commands import index as command
from internvl_pack.sources import jsonl, load_meta, open_source
from internvl_pack.sources.content import PIECE_BYTES
from internvl_pack.sources.index import SUFFIX


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "a.jsonl").write_bytes(b'\n{"id": "x"}\n' * 2000)
    (tmp_path / "empty.jsonl").write_bytes(b"")
    for number in range(3):
        with tarfile.open(tmp_path / f"s-{number}.tar", "w") as tar:
            for row in range(5):
                info = tarfile.TarInfo(f"k{number}{row}.json")
                info.size = 2
                tar.addfile(info, io.BytesIO(b"{}"))
    content = {
        "a": {"annotation": "a.jsonl"},
        "again": {"annotation": "a.jsonl", "repeat_time": 2},
        "empty": {"annotation": "empty.jsonl"},
        "s": {"shards": "s-{0..2}.tar"},
    }
    (tmp_path / "meta.json").write_text(json.dumps(content))
    return tmp_path


def run(folder, *options) -> int:
    return main(["index", str(folder / "meta.json"), *options])


def index_files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*" + SUFFIX)}


def test_one_index_lies_beside_each_file_and_is_used(folder, capsys):
    assert run(folder, "--workers", "0") == 0
    assert set(index_files(folder)) == {
        f"{n}{SUFFIX}" for n in ("a.jsonl", "empty.jsonl", "s-0.tar", "s-1.tar", "s-2.tar")
    }
    output = capsys.readouterr()
    assert "indexed 2,015 samples in 5 files" in output.out
    assert output.err == ""  # no bar where no terminal is
    sources = [open_source(spec) for spec in load_meta(folder / "meta.json")]
    assert [len(source) for source in sources] == [2000, 2000, 0, 15]
    assert sources[0]._index.from_file
    assert all(shard.index is None for shard in sources[3]._shards)
    assert sources[0].read(1999).origin.endswith(":line 4000")


@pytest.mark.slow
def test_workers_and_pieces_do_not_change_the_files(folder, monkeypatch):
    (folder / "a.jsonl").write_bytes(b'\n{"id": "x"}\n' * 200_000)
    run(folder, "--workers", "0")
    alone = index_files(folder)
    monkeypatch.setattr(jsonl, "PART_BYTES", PIECE_BYTES)
    run(folder, "--workers", "0", "--force")
    assert index_files(folder) == alone
    run(folder, "--workers", "2", "--force")
    assert index_files(folder) == alone


def test_current_indexes_are_left_and_stale_ones_renewed(folder, capsys):
    run(folder, "--workers", "0")
    before = {path: os.stat(path).st_ino for path in folder.glob("*" + SUFFIX)}
    with open(folder / "a.jsonl", "ab") as file:
        file.write(b"{}\n")
    capsys.readouterr()
    run(folder, "--workers", "0")
    assert "indexed 2,001 samples in 1 file," in capsys.readouterr().out
    changed = [path.name for path, inode in before.items() if os.stat(path).st_ino != inode]
    assert changed == ["a.jsonl" + SUFFIX]


def test_damage_is_shown(folder, capsys):
    whole = (folder / "s-1.tar").read_bytes()
    (folder / "s-1.tar").write_bytes(whole[:1100])
    (folder / "s-2.tar").write_bytes(b"")
    assert run(folder, "--workers", "0") == 0
    output = capsys.readouterr().out
    assert "s-1.tar@1024: after key 'k10': the archive is cut inside a header" in output
    assert "shard_empty" in output


def test_nothing_half_done_is_left_behind(folder, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(jsonl, "scan_lines", fail)
    assert run(folder, "--workers", "0") == 2
    assert {path.name for path in folder.iterdir()} == {"a.jsonl", "empty.jsonl", "meta.json"} | {
        f"s-{number}.tar" for number in range(3)
    }


def test_a_file_that_grows_meanwhile_is_refused(folder, monkeypatch, capsys):
    scan = jsonl.scan_part

    def grow(path, *rest):
        part = scan(path, *rest)
        with open(path, "ab") as file:
            file.write(b"{}\n")
        return part

    monkeypatch.setattr(jsonl, "scan_part", grow)
    assert run(folder, "--workers", "0") == 2
    assert "changed while it was indexed" in capsys.readouterr().err
    assert not index_files(folder)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["gone.json"], "gone.json does not exist"),
        (["meta.json", "--workers", "-1"], "--workers is -1: give at least 0"),
    ],
)
def test_a_mistake_is_one_line(folder, capsys, monkeypatch, options, words):
    monkeypatch.chdir(folder)
    assert main(["index", *options]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


def test_a_folder_that_cannot_be_written_is_said(folder, monkeypatch, capsys):
    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    assert run(folder, "--workers", "0") == 2
    assert "cannot write an index beside" in capsys.readouterr().err


def test_each_file_is_indexed_once(folder):
    assert len(command.data_files(load_meta(folder / "meta.json"))) == 5
