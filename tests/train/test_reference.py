"""Stored log-probabilities: written by any ranks, gone on with, and trained on as on a frozen copy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.pairs import write_pairs
from helpers.ranks import run as start

from internvl_pack.errors import UserError
from train.reference import MARKS, RECORD, check_marks, read_parts
from train.write_reference import main

pytestmark = pytest.mark.slow

COUNT = 9
ROWS = ("--use_packed_ds", "True", "--max_packed_tokens", "900", "--num_images_expected", "60", "--objective", "dpo")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs"), COUNT)


@pytest.fixture
def words(made, pairs, tmp_path):
    given = {"model_name_or_path": made / "model", "meta_path": pairs, "output_dir": tmp_path / "out"}
    given |= {"force_image_size": 56, "use_cpu": True, "reference_path": tmp_path / "table"}
    return [str(word) for name, value in given.items() for word in (f"--{name}", value)] + list(ROWS)


def write(words: list[str]) -> int:
    """For `ranks.run`."""
    return main(words, "internvl-pack reference")


def by_key(folder: Path) -> dict[bytes, float]:
    return {record["key"].tobytes(): float(record["logprob"]) for record in read_parts(folder)}


def margins(out: Path) -> list[float]:
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [entry["rewards/margins"] for entry in history if "rewards/margins" in entry]


def test_a_table_of_two_ranks_is_trained_on_as_a_copy_is(words, train, pairs, tmp_path):
    start(f"{__file__}:write", words, 2, tmp_path / "log.txt")
    table = tmp_path / "table"
    whole = by_key(table)
    assert len(whole) == 2 * COUNT and len(list(table.glob("part-*.bin"))) == 2

    # Stopped in the middle of a record, and gone on with by one process.
    part = table / "part-00000.bin"
    part.write_bytes(part.read_bytes()[: 3 * RECORD.itemsize + 5])
    (table / "part-00001.bin").unlink()
    before = part.read_bytes()
    assert write(words) == 0
    assert part.read_bytes().startswith(before[: 3 * RECORD.itemsize])
    again = by_key(table)
    assert again.keys() == whole.keys() and all(again[k] == pytest.approx(whole[k], rel=1e-6) for k in whole)

    common = ("--meta_path", str(pairs), *ROWS, "--num_train_epochs", "2", "--check_isolation", "False")
    common += ("--save_strategy", "no", "--report_to", "none")
    assert train(*common, "--reference_path", str(table), out=tmp_path / "stored") == 0
    assert train(*common, out=tmp_path / "copy") == 0
    stored, copied = margins(tmp_path / "stored"), margins(tmp_path / "copy")
    assert stored == pytest.approx(copied, rel=1e-4, abs=1e-5) and stored[-1] > stored[0]


def test_a_table_of_another_run_is_refused(words, train, made, pairs, tmp_path, capfd, tokenizer):
    from internvl_pack.testing.tiny import save_tiny_checkpoint

    assert write(words) == 0
    common = ("--meta_path", str(pairs), *ROWS, "--reference_path")
    save_tiny_checkpoint(tmp_path / "other", tokenizer, seed=1)
    for options, message in (
        ((str(tmp_path / "nowhere"),), "no table there: internvl-pack reference writes it"),
        ((str(tmp_path / "table"), "--model_name_or_path", str(tmp_path / "other")), "it was made with another model"),
        (
            (str(tmp_path / "table"), "--conv_style", "Hermes-2"),
            "it was made with another conv_style (internvl2_5, now",
        ),
        ((str(tmp_path / "table"), "--bf16", "True"), "it was made with another dtype (float32, now bfloat16)"),
    ):
        assert train(*common, *options, out=tmp_path / "out") == 2
        assert message in capfd.readouterr().err
    more = write_pairs(tmp_path / "more", COUNT + 1)
    assert train("--meta_path", str(more), *common[2:], str(tmp_path / "table"), out=tmp_path / "out") == 2
    assert "an answer of this run is not in it" in capfd.readouterr().err


def test_a_table_that_is_not_finished_is_refused(words, tmp_path, train, pairs, capfd, monkeypatch):
    def stopped(*_):
        raise UserError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr("train.write_reference.write_rows", stopped)
        assert write(words) == 2
    common = ("--meta_path", str(pairs), *ROWS, "--reference_path", str(tmp_path / "table"))
    assert train(*common, out=tmp_path / "out") == 2
    assert "it is not finished: run internvl-pack reference again" in capfd.readouterr().err


@pytest.mark.parametrize("content", ["[1", "[1]", "3"])
def test_marks_that_are_none_are_no_table(tmp_path, content):
    (tmp_path / MARKS).write_text(content)
    with pytest.raises(UserError, match="no table there"):
        check_marks(tmp_path, {})


def test_what_a_reference_does_not_need_is_refused(words, capfd):
    for options, message in (
        (
            (*words, "--deepspeed", "zero_stage1"),
            "each process computes its part of a reference by itself; leave it out",
        ),
        ((*words, "--objective", "sft"), "/table is of pairs of answers: give --objective dpo or mpo"),
    ):
        assert write(list(options)) == 2
        assert message in capfd.readouterr().err
