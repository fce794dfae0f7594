"""Whatever is raised while one sample is read, encoded or decoded costs that sample, and is named."""

from __future__ import annotations

import errno
import json
import struct

import numpy as np
import pytest
from helpers.factory import TINY, png, write_jsonl, write_meta

from internvl_pack import PackedDataset, PackingConfig, UserError, build_loader
from internvl_pack.encode import sample as encode_sample
from internvl_pack.errors import SampleError, isolate_sample_errors
from internvl_pack.sources.jsonl import JsonlSource
from internvl_pack.survey.table import REFUSED
from internvl_pack.survey.validate import Checker, validate
from internvl_pack.survey.workers import measure_all

ROWS = 12
BAD = 7  # the row that has the fault

FAULTS = {
    "memory": (MemoryError(), "out_of_memory", "MemoryError"),
    "file system": (OSError(errno.EIO, "Input/output error"), "unreadable", "Input/output error"),
    "unicode": (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates"), "unexpected_error", "UnicodeEncodeError"),
    "recursion": (RecursionError("maximum recursion depth"), "unexpected_error", "RecursionError: maximum recursion"),
    "struct": (struct.error("unpack requires 4 bytes"), "unexpected_error", "error: unpack requires 4 bytes"),
    "a bug": (KeyError("colour"), "unexpected_error", "KeyError: 'colour'"),
    "our invariant": (AssertionError("a fragment"), "unexpected_error", "AssertionError: a fragment"),
}


def faulty_read(monkeypatch, fault, row: int = BAD) -> None:
    whole = JsonlSource.read

    def read(self, number):
        if number == row:
            raise fault
        return whole(self, number)

    monkeypatch.setattr(JsonlSource, "read", read)


def faulty_encode(monkeypatch, fault) -> None:
    whole = encode_sample.turns_of

    def turns_of(data, roles, **options):
        if data["id"] == f"s{BAD}":
            raise fault
        return whole(data, roles, **options)

    monkeypatch.setattr(encode_sample, "turns_of", turns_of)


def faulty_decode(monkeypatch, fault) -> None:
    whole = encode_sample.decode_tiles

    def decode_tiles(ref, *args, **options):
        if f"{BAD:05d}_0" in ref.name:
            raise fault
        return whole(ref, *args, **options)

    monkeypatch.setattr(encode_sample, "decode_tiles", decode_tiles)
    pixels = encode_sample.decode_pixels

    def decode_pixels(ref, *args, **options):
        if f"{BAD:05d}_0" in ref.name:
            raise fault
        return pixels(ref, *args, **options)

    monkeypatch.setattr(encode_sample, "decode_pixels", decode_pixels)


STAGES = {"read": faulty_read, "encode": faulty_encode, "decode": faulty_decode}


@pytest.fixture(scope="module")
def meta(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    path = write_jsonl(folder, ROWS, seed=1)
    assert (folder / "images" / f"{BAD:05d}_0.png").exists(), "the bad row needs an image"
    return path


def dataset_of(meta, tokenizer, **config) -> PackedDataset:
    options = PackingConfig(max_packed_tokens=512, num_images_expected=24, **config)
    return PackedDataset.from_meta(meta, tokenizer, options, encode=TINY)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_costs_its_sample_and_no_other(kind, stage, meta, tokenizer, monkeypatch):
    fault, reason, words = FAULTS[kind]
    dataset = dataset_of(meta, tokenizer)
    STAGES[stage](monkeypatch, fault)
    loader = build_loader(dataset)
    delivered = {i for batch in loader for i in batch["sample_ids"]}
    assert delivered == {f"made/{row}" for row in range(ROWS) if row != BAD}
    loader.ledger.check()
    assert dict(loader.ledger.quarantined) == {reason: 1}
    (event,) = loader.take_events()
    assert (event["id"], event["reason"]) == (f"made/{BAD}", reason)
    assert words in event["detail"] and event["source"].endswith(f"line {BAD + 1}")
    json.dumps(event).encode()

    checker = Checker(dataset.samples, dataset.config, decode=True)
    (bad,) = [bad for _, part in validate(checker) for bad in part]
    assert (bad.index, bad.reason) == (BAD, reason) and words in bad.detail


def test_the_survey_made_beforehand_refuses_it_as_a_run_does(meta, tokenizer, monkeypatch):
    survey = dataset_of(meta, tokenizer).survey
    faulty_read(monkeypatch, KeyError("colour"))
    assert sum(measure_all(survey)) == ROWS
    verdicts = survey.tables[0].lengths(np.arange(ROWS)).verdicts.tolist()
    assert [row for row, verdict in enumerate(verdicts) if verdict == REFUSED] == [BAD]
    assert survey.tables[0].note(BAD).error[0] == "unexpected_error"


@pytest.mark.parametrize(
    "fault",
    [
        KeyboardInterrupt(),
        SystemExit(1),
        OSError(errno.EMFILE, "Too many open files"),
        ImportError("no module named 'avif'"),
        UserError("the file changed"),
    ],
)
def test_what_concerns_all_samples_is_passed_on(fault, meta, tokenizer, monkeypatch):
    dataset = dataset_of(meta, tokenizer)
    faulty_read(monkeypatch, fault)
    with pytest.raises(type(fault)):
        list(build_loader(dataset))


def test_a_fault_in_every_sample_stops_the_run_with_the_first(tmp_path, tokenizer, monkeypatch):
    dataset = dataset_of(write_jsonl(tmp_path, 100), tokenizer)

    def turns_of(data, roles, **options):
        raise ZeroDivisionError("a template's bug")

    monkeypatch.setattr(encode_sample, "turns_of", turns_of)
    with pytest.raises(UserError, match=r"none of its first .* ZeroDivisionError: a template's bug"):
        list(build_loader(dataset))


def test_the_traceback_of_a_bug_is_logged(caplog):
    with pytest.raises(SampleError, match=r"x\.png: ValueError"), isolate_sample_errors("x.png"):
        raise ValueError
    assert "x.png" in caplog.text and "Traceback" in caplog.text


# --- split samples


def test_a_split_sample_that_loses_an_image_trains_its_other_parts_and_counts_as_quarantined(tmp_path, tokenizer):
    """Packs are fixed before pixels are decoded: what was planned beside the lost part stays where it is."""
    (tmp_path / "images").mkdir()
    turns = []
    for number in range(6):
        data = png(112, 112, 40 * number)
        (tmp_path / "images" / f"{number}.png").write_bytes(data[:-20] if number in (2, 3) else data)
        turns += [
            {"from": "human", "value": f"<image>\nwhat is picture {number}?"},
            {"from": "gpt", "value": "red " * 9},
        ]
    good = {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "good day"}]}
    rows = [{"id": "long", "image": [f"{n}.png" for n in range(6)], "conversations": turns}, good]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    meta = write_meta(tmp_path, {"made": {"root": "images", "annotation": "rows.jsonl"}})
    config = PackingConfig(max_packed_tokens=128, num_images_expected=2)
    loader = build_loader(PackedDataset.from_meta(meta, tokenizer, config, encode=TINY))
    parts = [
        f for batch in loader for i, f in zip(batch["sample_ids"], batch["fragments"], strict=True) if i == "made/0"
    ]
    count = parts[0][1]
    ledger = loader.ledger
    ledger.check()
    assert 1 < len(parts) < count
    assert ledger.counts["fragments_lost"] == count - len(parts)
    assert (ledger.samples_in, ledger.samples_packed, ledger.samples_quarantined) == (2, 1, 1)
    assert ledger.counts["samples_trained_in_part"] == 1
    assert any("trained in part" in line for line in ledger.lines())
    (event,) = loader.take_events()
    assert event["reason"] == "image_truncated" and f"of {count} of this sample" in event["detail"]
