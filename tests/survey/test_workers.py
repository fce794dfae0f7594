"""Worker processes: results in order, one that is killed is one line, and a survey that goes on where it ended."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from helpers.factory import TINY, write_jsonl

from internvl_pack.cli import main
from internvl_pack.encode.sample import Encoder
from internvl_pack.errors import UserError
from internvl_pack.packing.budget import Room
from internvl_pack.samples import Samples
from internvl_pack.sources import load_meta, open_source
from internvl_pack.survey import workers
from internvl_pack.survey.survey import Survey
from internvl_pack.survey.table import CUTTABLE, PLAIN, REFUSED
from internvl_pack.survey.workers import in_order, measure_all

pytestmark = pytest.mark.slow

ROOM = Room(250, 4)


@pytest.fixture
def samples(tmp_path, tokenizer) -> Samples:
    (spec,) = load_meta(write_jsonl(tmp_path, 40))
    return Samples.of([open_source(spec)], Encoder(tokenizer, TINY), [spec])


def half(number: int) -> float:
    if number == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    return number / 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_results_come_in_the_order_of_the_tasks(num_workers):
    tasks = [(number,) for number in range(12)]
    assert list(in_order(half, tasks, num_workers)) == [((number,), number / 2) for number in range(12)]


def test_a_worker_that_is_killed_is_one_line():
    with pytest.raises(UserError, match=r"^a worker of --workers was killed .*start again$"):
        list(in_order(half, [(13,)], 1))


def test_a_survey_of_two_workers_is_that_of_one_process(samples, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "BLOCK_ROWS", 7)
    alone, shared = (Survey(samples, ROOM, tmp_path / name) for name in ("alone", "shared"))
    assert list(measure_all(alone)) == [7, 7, 7, 7, 7, 5]
    assert sum(measure_all(shared, 2)) == 40
    rows = np.arange(40)
    found = [survey.tables[0].lengths(rows) for survey in (alone, shared)]
    assert all((one == other).all() for one, other in zip(*found, strict=True))
    assert set(found[0].verdicts.tolist()) == {PLAIN, CUTTABLE}
    for row in np.flatnonzero(found[0].verdicts == CUTTABLE).tolist():
        assert alone.tables[0].note(row) == shared.tables[0].note(row)
    assert alone.num_known == shared.num_known == 40


def test_a_survey_that_was_stopped_measures_what_is_missing(samples, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "BLOCK_ROWS", 7)
    steps = measure_all(Survey(samples, ROOM, tmp_path / "kept"))
    next(steps)
    next(steps)
    steps.close()
    survey = Survey(samples, ROOM, tmp_path / "kept")
    measured = []
    monkeypatch.setattr(
        Survey, "measure", lambda self, dataset, row, of=Survey.measure: measured.append(row) or of(self, dataset, row)
    )
    done = list(measure_all(survey))
    assert done[0] >= 7 and sum(done) == 40
    assert measured == list(range(done[0], 40))
    assert list(measure_all(survey)) == [40]


def test_rows_that_cannot_be_used_are_known_as_well(tmp_path, tokenizer):
    meta = write_jsonl(tmp_path, 10)
    for image in (tmp_path / "images").iterdir():
        image.unlink()
    (spec,) = load_meta(meta)
    survey = Survey(Samples.of([open_source(spec)], Encoder(tokenizer, TINY), [spec]), ROOM, tmp_path / "kept")
    assert sum(measure_all(survey)) == 10
    assert REFUSED in survey.tables[0].lengths(np.arange(10)).verdicts
    assert survey.num_known == 10


def test_index_with_lengths_makes_the_survey_that_runs_find(tmp_path, tokenizer, capsys):
    tokenizer.save_pretrained(tmp_path / "model")
    options = ["--tokenizer", str(tmp_path / "model"), "--workers", "0", "--survey_dir", str(tmp_path / "kept")]
    meta = write_jsonl(tmp_path, 12)
    assert main(["index", str(meta), "--lengths", *options]) == 0
    assert "surveyed 12 samples" in capsys.readouterr().out
    assert main(["index", str(meta), "--lengths", *options]) == 0
    assert "surveyed 0 samples in" in (out := capsys.readouterr().out) and "12 were known" in out


def test_index_with_lengths_asks_for_the_tokenizer(tmp_path, capsys):
    assert main(["index", str(write_jsonl(tmp_path, 2)), "--lengths"]) == 2
    assert "--tokenizer" in capsys.readouterr().err
