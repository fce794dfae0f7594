"""The survey: lengths measured once, kept on disk, the same for all readers, and never believed when damaged."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from helpers.factory import TINY, write_jsonl

from internvl_pack.config import PackingConfig
from internvl_pack.errors import SampleError, UserError
from internvl_pack.packing.budget import Room
from internvl_pack.records import Branch, Record, Span
from internvl_pack.samples import Samples
from internvl_pack.survey.exchange import Exchange, local_store
from internvl_pack.survey.survey import PART, Survey
from internvl_pack.survey.table import (
    CUTTABLE,
    MAX_TILES,
    MAX_TOKENS,
    MISSING,
    PLAIN,
    REFUSED,
    TREE,
    Measured,
    Note,
    SurveyKey,
    SurveyTable,
    root_of,
)

KEY = SurveyKey("some data/set", 1000, {"content": "abc", "encode": {"image_size": 56}})
ROOM = Room(400, 16)


@pytest.fixture
def table(tmp_path) -> SurveyTable:
    return SurveyTable(tmp_path, KEY)


def some_rows() -> tuple[list[int], list[Measured]]:
    spans = (Span(300, ends_turn=True), Span(202, 3))
    long = Measured.of_record(Record("a", 502, 3, spans=spans, num_system_tokens=7), cuttable=True)
    bad = Measured.of_error(SampleError("image_truncated", "the image is cut", "file:line 3"))
    return [3, 0, 999, 17], [Measured(123, 4, PLAIN), Measured(MAX_TOKENS, MAX_TILES, PLAIN), long, bad]


def everything(table: SurveyTable) -> list[tuple[int, int, int]]:
    return list(zip(*(column.tolist() for column in table.lengths(np.arange(1000))[:3]), strict=True))


def test_a_table_gives_back_what_was_put_in_also_to_the_next_process(table, tmp_path):
    rows, measured = some_rows()
    table.put(rows, measured)
    for again in (table, SurveyTable(tmp_path, KEY), pickle.loads(pickle.dumps(table))):
        found = everything(again)
        assert [found[row] for row in rows] == [(m.num_tokens, m.num_tiles, m.verdict) for m in measured]
        assert sum(verdict != MISSING for *_, verdict in found) == 4 == again.num_known
        assert [again.note(row) for row in rows] == [m.note for m in measured]
    assert (tmp_path / KEY.folder / "lengths.npy").stat().st_size == 8 * 1000 + 128


def test_trees_are_noted_whatever_their_size(table, tmp_path):
    branches = (Branch(9, 8), Branch(4, 3, 0.5))
    record = Record("a", 40, 2, 11, branches=branches, is_pair=True)
    table.put([7], [Measured.of_record(record, cuttable=False)])
    assert everything(table)[7] == (40, 2, TREE)
    note = SurveyTable(tmp_path, KEY).note(7)
    assert note is not None and note.branches == ((9, 8), (4, 3)) and note.record("a", 40, 2).num_prefix_tokens == 27
    assert Measured(40, 2, TREE, note).fits_note() and not Measured(13, 2, TREE, note).fits_note()
    assert not Measured(40, 2, TREE, note._replace(branches=())).fits_note()
    assert not Measured(40, 2, CUTTABLE, note).fits_note()
    for kind in ({"is_pair": True}, {"is_joined": True}, {}):
        one = note._replace(is_pair=False)._replace(**kind)
        again = Note.from_json(one.to_json())
        assert again == one and again.record("a", 40, 2).is_joined == one.is_joined


def test_tables_of_other_data_or_options_are_other_tables(table, tmp_path):
    rows, measured = some_rows()
    table.put(rows, measured)
    for facts in ({"content": "abd", "encode": {"image_size": 56}}, {"content": "abc", "encode": {"image_size": 448}}):
        assert SurveyTable(tmp_path, SurveyKey("some data/set", 1000, facts)).num_known == 0


def test_entries_of_another_table_or_row_count_as_missing(table, tmp_path):
    table.put(*some_rows())
    other = SurveyTable(tmp_path, SurveyKey("other", 1000, {}))
    other._entries[:] = table._entries
    assert other.num_known == 0
    entry = int(table._entries[3])
    table._entries[4:100] = entry
    assert {v for *_, v in everything(table)[4:100]} <= {MISSING, REFUSED}  # row 17 was refused before


def test_flipped_bits_are_noticed_and_cost_the_row_only(table):
    _, measured = some_rows()
    rng = np.random.default_rng(0)
    believed = 0
    for _ in range(4000):
        table._entries[:] = 0
        table.put([3], [measured[0]])
        table._entries[3] ^= np.uint64(1) << np.uint64(rng.integers(64))
        believed += int(table.lengths(np.array([3]))[2][0]) != MISSING
    assert believed <= 2, "a check of 16 bits misses one in 65,536"


@pytest.mark.parametrize("damage", ["cut", "shape", "type", "text", "notes"])
def test_damaged_files_are_made_anew(table, tmp_path, damage):
    table.put(*some_rows())
    folder = tmp_path / KEY.folder
    if damage == "cut":
        with open(folder / "lengths.npy", "r+b") as file:
            file.truncate(1000)
    elif damage == "shape":
        np.save(folder / "lengths.npy", np.zeros(10, np.uint64))
    elif damage == "type":
        np.save(folder / "lengths.npy", np.zeros(1000, np.float64))
    elif damage == "text":
        (folder / "lengths.npy").write_text("no array")
    else:
        (folder / "notes.sqlite").write_bytes(b"no database" * 1000)
    again = SurveyTable(tmp_path, KEY)
    if damage == "notes":
        assert again.note(17) is None, "a row without its note is measured again"
    else:
        assert again.num_known == 0
    again.put(*some_rows())
    assert again.num_known == 4


@pytest.mark.parametrize("header", ["bracket", "version"])
def test_a_damaged_header_is_made_anew(header, table, tmp_path):
    path = tmp_path / KEY.folder / "lengths.npy"
    data = bytearray(path.read_bytes())
    if header == "bracket":
        data[data.index(b"}")] = ord("{")
    else:
        data[6] = 7
    table.put(*some_rows())
    path.write_bytes(data)
    assert SurveyTable(tmp_path, KEY).num_known == 0


@pytest.mark.parametrize("damage", ["page", "columns", "no text", "schema"])
def test_notes_of_a_damaged_database_are_measured_again(damage, table, tmp_path):
    """Damage inside the file, which opening it does not meet."""
    table.put(*some_rows())
    path = tmp_path / KEY.folder / "notes.sqlite"
    if damage == "page":
        data = path.read_bytes()
        path.write_bytes(data[:4096] + b"\xff" * (len(data) - 4096))
    elif damage == "schema":
        path.write_bytes(path.read_bytes().replace(b"CREATE TABLE", b"CREA\x8c\xff TABL"))
    else:
        with sqlite3.connect(path) as connection:
            if damage == "columns":
                connection.execute("ALTER TABLE notes RENAME COLUMN row TO place")
            else:
                connection.execute("UPDATE notes SET note = CAST(x'fffe5b' AS TEXT)")
        connection.close()
    again = SurveyTable(tmp_path, KEY)
    again.forget_refusals()
    assert again.note(999) is None
    again.put(*some_rows())
    assert SurveyTable(tmp_path, KEY).note(999) == some_rows()[1][2].note


@pytest.mark.parametrize("text", ["[[[1e400,1,true]],0,null]", "[[],1e400,null]", "[" * 100_000, "NaN", "5"])
def test_a_note_that_is_none_is_measured_again(text, table, tmp_path):
    table.put(*some_rows())
    with sqlite3.connect(tmp_path / KEY.folder / "notes.sqlite") as connection:
        connection.execute("UPDATE notes SET note = ?", (text,))
    connection.close()
    assert SurveyTable(tmp_path, KEY).note(999) is None


def test_notes_that_another_process_holds_are_left_to_it(table, tmp_path, monkeypatch, caplog):
    table.put(*some_rows())
    path = tmp_path / KEY.folder / "notes.sqlite"
    monkeypatch.setattr("internvl_pack.survey.table._WAIT", 0.1)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        busy = SurveyTable(tmp_path, KEY)
        assert busy.note(999) is None
        busy.put(*some_rows())
        assert busy.note(999) == some_rows()[1][2].note
        other.execute("DELETE FROM notes WHERE row = 17")
        other.execute("COMMIT")
    assert "cannot be used" in caplog.text
    after = SurveyTable(tmp_path, KEY)
    assert after.note(999) is not None and after.note(17) is None, "what the other process wrote is there"


def test_a_table_of_another_user_is_read_and_not_written(table, tmp_path, monkeypatch):
    rows, measured = some_rows()
    table.put(rows[:2], measured[:2])
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as a user who may write everywhere
    other = SurveyTable(tmp_path, KEY)
    assert other.num_known == 2
    other.put(rows[:3], measured[:3])
    assert other.num_known == 3 and table.num_known == 2


def test_a_folder_named_from_the_working_folder_stays_where_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = root_of("surveys")
    monkeypatch.chdir("/")
    assert root == tmp_path / "surveys"
    monkeypatch.setenv("INTERNVL_PACK_CACHE", "cache")
    assert root_of(None).is_absolute()


def test_a_pickled_array_is_never_unpickled(table, tmp_path):
    np.save(tmp_path / KEY.folder / "lengths.npy", np.array([{"a": 1}] * 1000, dtype=object), allow_pickle=True)
    assert SurveyTable(tmp_path, KEY).num_known == 0


def test_a_folder_that_cannot_be_written_is_said_and_does_without(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    table = SurveyTable(tmp_path / "file", KEY)
    table.put(*some_rows())
    assert table.num_known == 4
    assert "cannot be kept" in caplog.text


def test_refused_rows_are_tried_again_by_the_next_run(table, tmp_path):
    table.put(*some_rows())
    again = SurveyTable(tmp_path, KEY)
    again.forget_refusals()
    assert everything(again)[17][2] == MISSING and again.note(17) is None
    assert again.num_known == 3 and again.note(999) is not None


def test_notes_that_do_not_belong_to_their_row_are_measured_again():
    spans = (Span(300, ends_turn=True), Span(202, 3))
    assert Measured(502, 3, CUTTABLE, Note(spans)).fits_note()
    assert not Measured(503, 3, CUTTABLE, Note(spans)).fits_note()
    assert not Measured(502, 3, CUTTABLE, Note((Span(600), Span(-98, 3)))).fits_note()
    assert not Measured(502, 3, CUTTABLE, None).fits_note()
    assert not Measured(0, 0, REFUSED, Note(spans)).fits_note()


# -- along the order -----------------------------------------------------------------------------------


class Counting:
    """Samples that count how often a row is encoded."""

    def __init__(self, samples: Samples) -> None:
        self.__dict__.update(samples=samples, encoded=[])

    def __getattr__(self, name):
        return getattr(self.samples, name)

    def encode(self, dataset, row):
        self.encoded.append((dataset, row))
        return self.samples.encode(dataset, row)


@pytest.fixture(scope="module")
def meta(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data"), 300)


def parts(survey: Survey, samples: Samples, epoch: int = 0) -> list[tuple[list[int], list[int], dict]]:
    mixture = samples.mixture(PackingConfig(), epoch)
    found = [survey.part(mixture, number) for number in range(-(-len(mixture) // PART))]
    return [(part.tokens.tolist(), part.tiles.tolist(), dict(part.notes)) for part in found]


def test_every_row_is_encoded_once_and_the_next_run_encodes_none(meta, tokenizer, tmp_path):
    samples = Samples.from_meta(meta, tokenizer, TINY)
    counting = Counting(samples)
    found = parts(Survey(counting, ROOM, tmp_path), samples)
    assert sorted(counting.encoded) == [(0, row) for row in range(300)]
    mixture = samples.mixture(PackingConfig(), 0)
    for position in range(300):
        _, row = mixture.locate(position)
        record = samples.encode(0, row).record
        tokens, tiles, _ = found[position // PART]
        assert (tokens[position % PART], tiles[position % PART]) == (record.num_tokens, record.num_tiles)
    again = Counting(samples)
    assert parts(Survey(again, ROOM, tmp_path), samples) == found and not again.encoded
    assert parts(Survey(again, ROOM, tmp_path), samples, epoch=3) != found and not again.encoded


@pytest.mark.slow
def test_a_smaller_budget_asks_for_the_cuts_of_what_no_longer_fits_and_no_more(meta, tokenizer, tmp_path):
    samples = Samples.from_meta(meta, tokenizer, TINY)
    parts(Survey(samples, ROOM, tmp_path), samples)
    longer = [row for row in range(300) if samples.encode(0, row).record.num_tokens > 150]
    again = Counting(samples)
    found = parts(Survey(again, Room(150, 16), tmp_path), samples)
    assert sorted(row for _, row in again.encoded) == longer and longer
    assert sum(len(notes) for *_, notes in found) == len(longer)


def test_the_first_reader_that_publishes_a_part_decides_for_all(meta, tokenizer, tmp_path):
    """A row that fails on one machine only cannot give readers different plans."""

    class Failing(Counting):
        def encode(self, dataset, row):
            if row % 7 == 0:
                raise SampleError("unreadable", "the disk was away for a moment")
            return super().encode(dataset, row)

    samples = Samples.from_meta(meta, tokenizer, TINY)
    store = local_store()
    surveys = [Survey(each, ROOM, tmp_path / str(n)) for n, each in enumerate((samples, Failing(samples), samples))]
    for reader, survey in enumerate(surveys):
        survey.share(Exchange(store.host, store.port, "test/"), reader=reader, num_readers=3)
    found = [parts(survey, samples) for survey in (surveys[1], surveys[0], surveys[2])]
    assert found[0] == found[1] == found[2]
    assert sum(len(notes) for *_, notes in found[0]) == 43, "what the first one could not read is refused for all"


def test_readers_share_the_work_of_a_block(meta, tokenizer, tmp_path):
    samples = Samples.from_meta(meta, tokenizer, TINY)
    store = local_store()
    counting = [Counting(samples) for _ in range(3)]
    surveys = [Survey(each, ROOM, tmp_path / str(n)) for n, each in enumerate(counting)]
    mixture = samples.mixture(PackingConfig(), 0)
    for reader, survey in enumerate(surveys):
        survey.share(Exchange(store.host, store.port, "shared/"), reader=reader, num_readers=3)
    for number in (0, 1, 2):
        surveys[number].exchange.publish(
            f"0/{number}",
            __import__("internvl_pack.survey.survey", fromlist=["_packed"])._packed(
                surveys[number].measured(surveys[number]._located(mixture, number))
            ),
        )
    for survey in surveys:
        parts(survey, samples)
    assert sorted(row for each in counting for _, row in each.encoded) == list(range(300))


def test_a_run_with_no_room_for_its_survey_says_how_much_is_free(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(UserError, match=r"no room for 8,000 bytes \([\d,]+ are free\)"):
        SurveyTable(tmp_path, KEY)


def test_the_note_of_a_row_is_json_that_anybody_can_read():
    note = Note((Span(3, 1, True),), 2, 1)
    assert json.loads(note.to_json()) == [[[3, 1, 1]], 2, 1, None] and Note.from_json(note.to_json()) == note
