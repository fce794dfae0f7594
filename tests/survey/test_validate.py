"""`internvl-pack validate`: its verdicts are training's, and it finds exactly what is damaged."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pytest
from helpers.factory import TINY, write_jsonl, write_meta, write_shards
from PIL import Image

from internvl_pack import PackedDataset, PackingConfig, UserError, build_loader
from internvl_pack.cli import main
from internvl_pack.samples import Samples
from internvl_pack.survey.survey import Survey
from internvl_pack.survey.validate import Checker, Report, validate

SMALL = ["--force_image_size", "56", "--max_dynamic_patch", "6", "--workers", "0"]


def run(capsys, meta, *options: str) -> tuple[int, dict, str]:
    """(exit code, the JSON object of the last line, all of standard output)."""
    code = main(["validate", str(meta), "--json", *SMALL, *options])
    out = capsys.readouterr().out
    return code, json.loads(out.splitlines()[-1]), out


def picture(kind: str, seed: int) -> bytes:
    """A picture with enough in it that cuts fall into pixels."""
    rng = random.Random(seed)
    image = Image.effect_noise((rng.randint(40, 160), rng.randint(40, 160)), 60).convert("RGB")
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


def write_pictures(folder: Path, count: int) -> Path:
    """A meta file over `count` samples of one picture each, JPEG, PNG and WebP in turn."""
    (folder / "images").mkdir()
    with open(folder / "made.jsonl", "w", encoding="utf-8") as lines:
        for i in range(count):
            kind = ("JPEG", "PNG", "WEBP")[i % 3]
            name = f"{i:04d}.{kind.lower()}"
            (folder / "images" / name).write_bytes(picture(kind, i))
            turns = [{"from": "human", "value": f"<image>\nWhat is picture {i}?"}, {"from": "gpt", "value": "Noise."}]
            lines.write(json.dumps({"id": f"s{i}", "image": name, "conversations": turns}) + "\n")
    return write_meta(folder, {"made": {"root": "images", "annotation": "made.jsonl"}})


def damage(data: bytes, rng: random.Random, kind: str) -> bytes:
    if kind == "cut":
        return data[: rng.randrange(1, len(data) - 30)]
    if kind == "cut in the header":
        return data[: rng.randrange(1, 12)]
    if kind == "emptied":
        return b""
    if kind == "an error page":
        return b"<!DOCTYPE html><title>503 Service Unavailable</title>"
    at = len(data) // 2
    return data[:at] + bytes(200) + data[at + 200 :]


HEADER_SHOWS = {"cut in the header", "emptied", "an error page", "removed"}


@pytest.mark.slow
def test_two_per_cent_of_the_files_damaged_at_random_are_found_and_nothing_else(tmp_path, capsys):
    meta = write_pictures(tmp_path, 300)
    assert run(capsys, meta, "--decode")[0] == 0
    rng = random.Random(0)
    kinds = ["cut", "cut in the header", "emptied", "an error page", "blanked in the middle", "removed"]
    damaged = dict(zip(rng.sample(sorted((tmp_path / "images").iterdir()), 6), kinds, strict=True))
    for path, kind in damaged.items():
        if kind == "removed":
            path.unlink()
        else:
            path.write_bytes(damage(path.read_bytes(), rng, kind))
    ids = {f"s{int(path.stem)}": kind for path, kind in damaged.items()}

    code, found, _ = run(capsys, meta, "--decode")
    assert code == 1 and (found["samples"], found["good"]) == (300, 294)
    assert {bad["id"] for bad in found["bad_samples"]} == set(ids)
    code, found, _ = run(capsys, meta)
    assert code == 1
    assert {bad["id"] for bad in found["bad_samples"]} == {i for i, kind in ids.items() if kind in HEADER_SHOWS}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_every_cut_of_random_files_is_found(tmp_path, capsys, seed):
    meta = write_pictures(tmp_path, 60)
    rng = random.Random(seed)
    paths = rng.sample(sorted((tmp_path / "images").iterdir()), 20)
    for path in paths:
        path.write_bytes(damage(path.read_bytes(), rng, "cut"))
    _, found, _ = run(capsys, meta, "--decode")
    assert {bad["index"] for bad in found["bad_samples"]} == {int(path.stem) for path in paths}


# --- what is reported


def test_a_clean_data_set_has_exit_code_0(tmp_path, capsys):
    code, found, out = run(capsys, write_jsonl(tmp_path, 12))
    assert code == 0
    assert found == {
        **{"samples": 12, "good": 12, "reasons": {}, "bad_samples": []},
        **{"unknown_fields": {}, "warnings": []},
    }
    assert "12 samples: 12 good, 0 bad" in out and "No --tokenizer" in out


def broken_lines(folder: Path) -> Path:
    """Row 3 cut, row 5 without a picture, row 7 without an answer and without an id; a blank line before them."""
    meta = write_jsonl(folder, 20)
    path = folder / "made.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[5]["image"] = "nowhere.png"
    records[5]["conversations"][0]["value"] = "q"
    records[5]["id"] = 17
    records[7] = {"conversations": [{"from": "human", "value": "q"}]}
    lines = [json.dumps(record) for record in records]
    lines[3] = lines[3][:40]
    path.write_text("\n" + "\n".join(lines) + "\n")
    return meta


def test_bad_samples_are_named_by_id_row_and_line(tmp_path, capsys):
    meta = broken_lines(tmp_path)
    code, found, out = run(capsys, meta, "--quarantine", str(tmp_path / "bad.jsonl"))
    assert code == 1
    assert found["samples"] == 20 and found["good"] == 17
    assert found["reasons"] == {"invalid_json": 1, "image_missing": 1, "no_trained_token": 1}
    lines = tmp_path / "made.jsonl"
    shown = [(b["dataset"], b["id"], b["index"], b["source"], b["reason"]) for b in found["bad_samples"]]
    assert shown == [
        ("made", None, 3, f"{lines}:line 5", "invalid_json"),
        ("made", 17, 5, f"{lines}:line 7", "image_missing"),
        ("made", None, 7, f"{lines}:line 9", "no_trained_token"),
    ]
    assert all("key" not in bad for bad in found["bad_samples"])
    written = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert written == found["bad_samples"]
    assert "invalid_json" in out and "nowhere.png" in out


def test_bad_samples_of_shards_are_named_by_key_and_byte(tmp_path, capsys):
    meta = write_shards(tmp_path, 40, per_shard=20)
    shard = tmp_path / "made-0001.tar"
    data = bytearray(shard.read_bytes())
    at = data.index(b'{"id": "s25"')
    data[at : at + 3] = b"###"
    shard.write_bytes(data[: data.index(b"00038.") + 600])
    code, found, _ = run(capsys, meta)
    assert code == 1
    first, second = sorted(found["bad_samples"], key=lambda bad: bad["key"])
    assert (first["key"], first["reason"], first["id"]) == ("00025", "invalid_json", None)
    assert first["source"] == f"{shard}:00025@{at - 512}" and first["sample_id"] == "made/made-0001/00025"
    assert (second["key"], second["reason"]) == ("00038", "shard_cut")
    assert second["source"].startswith(f"{shard}:00038@") and "index" not in second
    assert found["samples"] == 39 and found["good"] == 37, "sample 39 is beyond the cut: nobody knows of it"


def test_the_table_shows_three_examples_a_reason(tmp_path, capsys):
    meta = write_jsonl(tmp_path, 40)
    for path in sorted((tmp_path / "images").iterdir()):
        path.unlink()
    code = main(["validate", str(meta), *SMALL])
    out = capsys.readouterr().out
    assert code == 1
    assert out.count("there is no file") == 3
    assert not out.rstrip().endswith("}"), "JSON comes by --json only"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "shards"])
def test_workers_do_not_change_the_result(tmp_path, capsys, kind, monkeypatch):
    monkeypatch.setattr("internvl_pack.survey.validate.CHUNK_ROWS", 7)
    meta = broken_lines(tmp_path) if kind == "jsonl" else write_shards(tmp_path, 40)
    if kind == "shards":
        shard = tmp_path / "made-0000.tar"
        shard.write_bytes(shard.read_bytes().replace(b'"conversations": [{', b'"conversation_": [{', 5))
    alone = run(capsys, meta)
    assert alone[0] == 1
    assert run(capsys, meta, "--workers", "2") == alone


# --- verdicts are training's


def test_validation_and_training_leave_out_the_same_samples(tmp_path, tokenizer):
    meta = broken_lines(tmp_path)
    pictures = sorted((tmp_path / "images").iterdir())
    pictures[0].write_bytes(pictures[0].read_bytes()[:-20])
    pictures[4].write_bytes(b"")
    dataset = PackedDataset.from_meta(meta, tokenizer, PackingConfig(max_packed_tokens=400), encode=TINY)
    checker = Checker(dataset.samples, dataset.config, decode=True)
    report, found = Report(), {}
    for count, bad in validate(checker):
        report.count(count, bad)
        found |= {sample.sample_id: sample.reason for sample in bad}
    loader = build_loader(dataset)
    for _ in loader:
        pass
    assert {event["id"]: event["reason"] for event in loader.take_events()} == found
    assert loader.ledger.quarantined == report.reasons and report.reasons.total() == 5


@pytest.mark.slow
def test_budgets_count_by_option(tmp_path, capsys, tokenizer):
    meta = write_jsonl(tmp_path, 20)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    by = ["--tokenizer", str(tmp_path / "tokenizer")]
    assert run(capsys, meta, *by)[0] == 0
    code, found, out = run(capsys, meta, *by, "--max-packed-tokens", "70", "--oversize", "drop")
    assert code == 1 and set(found["reasons"]) == {"oversized_dropped"} and "No --tokenizer" not in out
    assert run(capsys, meta, *by, "--max_packed_tokens", "70")[0] == 0, "they are split"
    assert run(capsys, meta, "--num_images_expected", "1")[0] == 0, "one tile an image"
    code, found, _ = run(capsys, meta, "--num_images_expected", "1", "--dynamic_image_size", "True")
    assert code == 1 and set(found["reasons"]) == {"image_exceeds_budget"}


@pytest.mark.parametrize("make", [write_jsonl, write_shards])
def test_what_is_checked_need_not_be_measured_again(tmp_path, tokenizer, monkeypatch, make):
    """By the run that follows; a second check looks at images again that lie beside the data, and at nothing else."""
    samples, root = Samples.from_meta(make(tmp_path, 20), tokenizer, TINY), tmp_path / "survey"
    assert not [bad for _, part in validate(Checker(samples, root=root)) for bad in part]
    assert Survey(samples, PackingConfig().room, root).num_known == samples.num_rows
    read = []
    encode = Samples.encode
    monkeypatch.setattr(Samples, "encode", lambda self, d, r: read.append(r) or encode(self, d, r))
    list(validate(Checker(samples, root=root)))
    with_images = [row for row in range(20) if encode(samples, 0, row).record.num_tiles]
    assert read == (with_images if make is write_jsonl else []) and 0 < len(with_images) < 20


def test_an_image_that_has_gone_since_the_survey_is_found(tmp_path, tokenizer):
    samples, root = Samples.from_meta(write_jsonl(tmp_path, 20), tokenizer, TINY), tmp_path / "survey"
    list(validate(Checker(samples, root=root)))
    gone = sorted((tmp_path / "images").iterdir())[0]
    gone.unlink()
    (bad,) = [bad for _, part in validate(Checker(samples, root=root)) for bad in part]
    assert (bad.index, bad.reason) == (int(gone.name[:5]), "image_missing")


def test_options_of_images_are_the_runs(tmp_path, capsys):
    meta = write_pictures(tmp_path, 6)
    path = tmp_path / "images" / "0000.jpeg"
    path.write_bytes(path.read_bytes()[:-100])
    assert run(capsys, meta, "--decode")[1]["reasons"] == {"image_truncated": 1}
    assert run(capsys, meta, "--decode", "--allow_truncated_images")[0] == 0
    assert run(capsys, meta, "--max_image_pixels", "100")[1]["reasons"] == {"image_too_large": 6}


# --- users' mistakes


@pytest.mark.parametrize(
    "options, words",
    [
        (["--workers", "-1"], ["--workers"]),
        (["--tokenizer", "/nowhere"], ["--tokenizer", "/nowhere"]),
        (["--quarantine", "/nowhere/bad.jsonl"], ["--quarantine", "/nowhere/bad.jsonl"]),
        (["--oversize", "drop"], ["--oversize", "--tokenizer"]),
        (["--oversize", "sqeeze"], ["oversize", "sqeeze", "split"]),
        (["--conv_style", "pirate"], ["conv_style", "internvl2_5"]),
        (["--force_image_size", "450"], ["force_image_size 450"]),
        (["--max_image_pixels", "0"], ["max_image_pixels"]),
        (["--max_packed_tokens", "0"], ["max_packed_tokens"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, capsys, options, words):
    meta = write_jsonl(tmp_path, 3)
    assert main(["validate", str(meta), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in words)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", "{", '{"a": {"annotation": "gone.jsonl"}}', '{"a": {"annotation": "array.json"}}']
)
def test_a_meta_file_that_cannot_be_used_is_exit_code_2(tmp_path, capsys, content):
    (tmp_path / "array.json").write_text('[{"id": 1}, {"id": 2}]')
    (tmp_path / "meta.json").write_text(content)
    assert main(["validate", str(tmp_path / "meta.json"), "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and str(tmp_path) in captured.err.splitlines()[-1]


def test_a_file_that_changes_meanwhile_ends_the_check(tmp_path, tokenizer):
    meta = write_jsonl(tmp_path, 20)
    checker = Checker(Samples.from_meta(meta, tokenizer, TINY))
    with open(tmp_path / "made.jsonl", "a") as lines:
        lines.write("{}\n")
    with pytest.raises(UserError, match=r"made\.jsonl changed"):
        list(validate(checker))


def test_real_data_is_clean(shared_dir, capsys):
    code, found, _ = run(capsys, shared_dir / "data" / "demo" / "meta.json", "--decode")
    assert code == 0 and found["samples"] == 52
