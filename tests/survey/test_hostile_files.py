"""Hostile files from end to end: the validator's verdicts, and what training delivers beside them.

Every case goes through `validate --decode` and through the loader, which must agree; the tables give the verdicts.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tarfile
import time
from pathlib import Path

import pytest
from helpers.factory import TINY, png, write_jsonl, write_meta, write_shards

from internvl_pack import PackedDataset, PackingConfig, UserError, build_loader
from internvl_pack.cli import main
from internvl_pack.survey.validate import Checker, validate

PROMPT = 20.0  # seconds within which anything here ends, on a busy machine


def outcome(meta: Path, tokenizer, **config) -> tuple[set[str], dict[str, str]]:
    """({what training delivered}, {what the validator calls bad: its reason}), by own id, else by key or row."""
    dataset = PackedDataset.from_meta(meta, tokenizer, PackingConfig(**config), encode=TINY)
    checker = Checker(dataset.samples, dataset.config, decode=True)
    found = [bad for _, part in validate(checker) for bad in part]
    names = {}
    for source in dataset.samples.sources:
        for row in range(len(source)):
            sample_id = source.sample_id(row)
            names[sample_id] = sample_id.rpartition("/")[2]
            with contextlib.suppress(ValueError):
                names[sample_id] = source.read(row).own_id or names[sample_id]
    bad = {str(sample.id or sample.key or sample.index or 0): sample.reason for sample in found}
    assert len(bad) == len(found), "each is named once"

    loader = build_loader(dataset)
    delivered = set()
    for batch in loader:
        delivered |= {names[i] for i in batch["sample_ids"] if not i.startswith("<")}
    loader.ledger.check()
    events = loader.take_events()
    left_out = sorted((event["source"], event["reason"]) for event in events)
    assert left_out == sorted((sample.source, sample.reason) for sample in found)
    assert delivered == set(names.values()) - {names[s.sample_id] for s in found if s.sample_id}
    return delivered, bad


def over(folder: Path, **spec) -> Path:
    return write_meta(folder, {"set": spec})


# --- annotation files

MISMATCH = "placeholder_mismatch"
ANNOTATIONS = {
    "bom_crlf_blank_nofinalnewline.jsonl": ("g0 g1 g2 g3", {}),
    "half_written_line_middle.jsonl": ("g0 g2 g3", {"1": "invalid_json"}),
    "half_written_last_line.jsonl": ("g0 g1 g2", {"3": "invalid_json"}),
    "invalid_utf8_line2.jsonl": ("g0 g2", {"1": "invalid_utf8"}),
    "raw_tab_in_string.jsonl": ("g0 g2", {"1": "invalid_json"}),
    "nan_and_top_level_not_object.jsonl": (
        "g0 g1",
        {"1": "not_an_object", "2": "not_an_object", "3": "not_an_object", "4": "invalid_json"},
    ),
    "placeholder_count_mismatch.jsonl": (
        "g0 m3_0ph_1img_list m4_0ph_1img_string m5_0ph_2img m10_ph_in_second_turn m11_same_image_twice g1",
        {
            "m1_3ph_2img": MISMATCH,
            "m2_1ph_2img": MISMATCH,
            "m6_ph_no_image_key": MISMATCH,
            "m7_ph_empty_list": MISMATCH,
            "m8_ph_empty_string": MISMATCH,
            "m9_ph_null": MISMATCH,
        },
    ),
    "literal_placeholder_in_text.jsonl": (
        "l1_in_answer l2_text_only g0",
        {"l3_quoted_in_question_plus_real": MISMATCH},
    ),
    "conversation_shapes.jsonl": (
        "c1_starts_gpt c2_two_humans c6_number_answer c7_openai_keys c8_mixed_keys c11_system_first "
        "c13_whitespace_turns c14_one_char g0",
        {
            "c3_no_answer": "no_trained_token",
            "c4_empty_answer": "no_trained_token",
            "c5_null_answer": "turn_value_not_text",
            "c9_empty_conversations": "no_conversation",
            "c10_no_conversations": "no_conversation",
            "c12_unknown_role": "unknown_role",
        },
    ),
    "image_field_shapes.jsonl": (
        "s1_string s2_list1 s3_dict s4_images_key",
        {
            "s5_list_with_null": "image_field",
            "s6_int": "image_field",
        },
    ),
    "wrong_width_height.jsonl": ("w1_ok w2_swapped w3_stale_small w4_zero w5_strings w6_exif_rotated", {}),
    "long_text_with_late_image.jsonl": ("x1", {}),
}


@pytest.mark.parametrize("name", ANNOTATIONS)
def test_an_annotation_file(shared_dir, tokenizer, tmp_path, name):
    cases = shared_dir / "cases"
    meta = over(tmp_path, root=str(cases / "images"), annotation=str(cases / "jsonl" / name))
    delivered, bad = outcome(meta, tokenizer)
    good, expected = ANNOTATIONS[name]
    assert (delivered, bad) == (set(good.split()), expected)


def test_samples_stay_within_the_budgets_whatever_their_record_says(shared_dir, tokenizer, tmp_path):
    cases = shared_dir / "cases"
    meta = over(tmp_path, root=str(cases / "images"), annotation=str(cases / "jsonl" / "wrong_width_height.jsonl"))
    config = PackingConfig(max_packed_tokens=120, num_images_expected=6)
    for batch in build_loader(PackedDataset.from_meta(meta, tokenizer, config, encode=TINY)):
        assert batch["num_tokens"] <= 120 and batch["num_tiles"] <= 6
        assert batch["pixel_values"].shape == (batch["num_tiles"], 3, 56, 56)


def test_long_text_is_cut_outside_its_images_and_all_of_it_is_trained(shared_dir, tokenizer, tmp_path):
    cases = shared_dir / "cases"
    meta = over(
        tmp_path, root=str(cases / "images"), annotation=str(cases / "jsonl" / "long_text_with_late_image.jsonl")
    )
    dataset = PackedDataset.from_meta(meta, tokenizer, PackingConfig(max_packed_tokens=500), encode=TINY)
    loader, tiles = build_loader(dataset), 0
    for batch in loader:
        ids = batch["input_ids"][0]
        starts, ends = (ids == dataset.encoder.family.start_id), (ids == dataset.encoder.family.end_id)
        assert int(starts.sum()) == int(ends.sum()) == len(batch["image_offsets"]) - 1
        assert batch["num_image_tokens"] == batch["num_tiles"] * TINY.tokens_per_tile
        tiles += batch["num_tiles"]
    whole = dataset.encoder.encode(dataset.samples.sources[0].read(0), dataset.samples.specs[0]).record
    assert tiles == whole.num_tiles and loader.ledger.counts["samples_split"] == 1
    loader.ledger.check()


def test_each_image_of_the_cases_as_a_sample(shared_dir, tokenizer, tmp_path):
    images = shared_dir / "cases" / "images"
    rejected = {
        "truncated_60pct.jpg": "image_truncated",
        "truncated_60pct.png": "image_truncated",
        "truncated_header_only.jpg": "image_truncated",
        "bomb_14000x14000_1bit.png": "image_too_large",
        "zero_bytes.jpg": "image_empty",
        "html_error_page.jpg": "image_not_an_image",
    }
    names = sorted(path.name for path in images.iterdir())
    turns = [{"from": "human", "value": "<image>\nq"}, {"from": "gpt", "value": "a"}]
    rows = [json.dumps({"id": name, "image": name, "conversations": turns}) for name in names]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    delivered, bad = outcome(over(tmp_path, root=str(images), annotation="rows.jsonl"), tokenizer)
    assert bad == rejected
    assert delivered == set(names) - set(rejected)


# --- shards

SHARDS = {
    "good_5": ("k0 k1 k2 k3 k4", {}),
    "duplicate_member": ("k0 k2", {"k1": "duplicate_member"}),
    "interleaved_by_extension": ("k0 k1 k2 k3", {}),
    "dots_in_names": ("k0 k1 k2 k3", {}),
    "uppercase_extension": ("k0 k1", {}),
    "missing_partner": ("k0 k3", {"k1": "image_missing", "k2": "record_missing"}),
    "zero_byte_members": ("k0 k3", {"k1": "image_empty", "k2": "record_empty"}),
    "bad_json_and_bad_image": ("k0 k3", {"k1": "image_truncated", "k2": "invalid_json"}),
    "truncated_mid_member": ("k0 k1", {"k2": "shard_cut"}),
    "empty_archive": ("", {}),
    "zero_bytes": ("", {"0": "shard_empty"}),
    "html_instead_of_tar": ("", {"0": "shard_not_tar"}),
}


@pytest.mark.parametrize("name", SHARDS)
def test_a_shard_beside_a_good_one(shared_dir, tokenizer, tmp_path, name):
    write_shards(tmp_path, 8, name="fine")
    shards = [str(shared_dir / "cases" / "tar" / f"{name}.tar"), "fine-0000.tar"]
    delivered, bad = outcome(over(tmp_path, shards=shards), tokenizer)
    good, expected = SHARDS[name]
    assert bad == expected
    fine = {f"s{i}" for i in range(8)}
    assert fine <= delivered, "the next shard goes on"
    assert {own_id.rpartition("/")[2] for own_id in delivered - fine} == set(good.split())


@pytest.mark.parametrize("name, code", [("good_5", 0), ("empty_archive", 0), ("zero_bytes", 1), ("missing_partner", 1)])
def test_a_shard_alone_is_validated(shared_dir, tmp_path, capsys, name, code):
    meta = over(tmp_path, shards=str(shared_dir / "cases" / "tar" / f"{name}.tar"))
    assert main(["validate", str(meta), "--json", "--workers", "0"]) == code
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["samples"] == found["good"] + len(found["bad_samples"])


# --- meta files


@pytest.mark.parametrize(
    "name, code, words",
    [
        ("missing_repeat_time", 1, []),
        ("length_field_wrong", 1, ["999", "6 rows", "'a'"]),
        ("missing_annotation_file", 2, ["'gone'", "nope.jsonl", "does not exist"]),
        ("annotation_is_json_not_jsonl", 2, ["records_array.json", "JSON array"]),
    ],
)
def test_a_meta_file(shared_dir, tmp_path, capsys, caplog, name, code, words):
    for folder in ("images", "jsonl"):
        shutil.copytree(shared_dir / "cases" / folder, tmp_path / folder)
    meta = shutil.copy(shared_dir / "cases" / "meta" / f"{name}.json", tmp_path / "meta.json")
    assert main(["validate", str(meta), "--json", "--workers", "0"]) == code
    captured = capsys.readouterr()
    if code == 1:
        found = json.loads(captured.out.splitlines()[-1])
        assert (found["samples"], found["good"], found["reasons"]) == (6, 4, {"image_field": 2})
    assert all(word in captured.err + caplog.text for word in words)


# --- nothing loads, or nothing at first


def bad_then_good(folder: Path, num_bad: int, num_good: int) -> Path:
    """Rows without a picture, then rows with one."""
    (folder / "good.png").write_bytes(png(60, 60, 9))
    turns = [{"from": "human", "value": "<image>\nq"}, {"from": "gpt", "value": "a"}]
    names = ["gone.png"] * num_bad + ["good.png"] * num_good
    rows = [{"id": f"r{i}", "image": name, "conversations": turns} for i, name in enumerate(names)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return over(folder, root=".", annotation="rows.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_twelve_bad_then_good_delivers_the_good(tmp_path, tokenizer, workers):
    config = PackingConfig(shuffle=False)
    dataset = PackedDataset.from_meta(bad_then_good(tmp_path, 12, 3), tokenizer, config, encode=TINY)
    start = time.monotonic()
    loader = build_loader(dataset, num_workers=workers, timeout=60 if workers else 0)
    delivered = [i for batch in loader for i in batch["sample_ids"]]
    assert delivered == ["set/12", "set/13", "set/14"]
    assert loader.ledger.quarantined == {"image_missing": 12}
    assert time.monotonic() - start < PROMPT


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_of_eighteen_bad_rows_ends_with_eighteen_rejects(shared_dir, tokenizer, tmp_path, workers):
    cases = shared_dir / "cases"
    meta = over(tmp_path, root=str(cases / "images"), annotation=str(cases / "jsonl" / "every_image_bad.jsonl"))
    start = time.monotonic()
    loader = build_loader(
        PackedDataset.from_meta(meta, tokenizer, PackingConfig(), encode=TINY),
        num_workers=workers,
        timeout=60 if workers else 0,
    )
    with pytest.raises(UserError, match=r"no sample of epoch 0 can be trained on \(\d+ .*; set/\d+: .*every_image_bad"):
        list(loader)
    assert loader.ledger.samples_quarantined == loader.ledger.samples_in == 18
    assert len(loader.take_events()) == 18
    assert time.monotonic() - start < PROMPT


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_large_dataset_in_which_nothing_loads_stops_with_the_first_real_error(tmp_path, tokenizer, workers):
    meta = bad_then_good(tmp_path, 5000, 0)
    start = time.monotonic()
    loader = build_loader(
        PackedDataset.from_meta(meta, tokenizer, PackingConfig(), encode=TINY),
        num_workers=workers,
        timeout=60 if workers else 0,
    )
    with pytest.raises(UserError, match=r"dataset 'set'.*image_missing.*gone\.png"):
        list(loader)
    assert time.monotonic() - start < PROMPT


@pytest.mark.slow
def test_the_validator_counts_them_all(tmp_path, capsys):
    meta = bad_then_good(tmp_path, 3000, 1)
    assert main(["validate", str(meta), "--json", "--workers", "0"]) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["reasons"] == {"image_missing": 3000} and found["good"] == 1


# --- more of the same kinds

GOOD = '{"id": "%s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}'
LINES = {
    "two records on one line": (GOOD % "x" + GOOD % "y", "invalid_json"),
    "a trailing comma": (GOOD % "x" + ",", "invalid_json"),
    "a Python dict": (str(json.loads(GOOD % "x")), "invalid_json"),
    "a line of zeros": ("\0" * 50, "invalid_json"),
    "an escaped half of a pair": (GOOD % r"\ud800", "lone_surrogate"),
    "a number beyond floats": ((GOOD % "x")[:-1] + ', "score": 1e999}', "invalid_json"),
    "minus infinity": ((GOOD % "x")[:-1] + ', "score": -Infinity}', "invalid_json"),
    "5000 digits": ((GOOD % "x")[:-1] + f', "score": {"9" * 5000}}}', "invalid_json"),
    "nested 200,000 deep": ("[" * 200_000, "json_too_deep"),
    "true": ("true", "not_an_object"),
    "a csv header": ("id,image,question,answer", "invalid_json"),
    "merge conflict": ("<<<<<<< HEAD", "invalid_json"),
    "only a brace": ("{", "invalid_json"),
    "an empty object": ("{}", "no_conversation"),
    "conversations as a string": ('{"id": "x", "conversations": "hello"}', "no_conversation"),
    "conversations as an object": ('{"id": "x", "conversations": {"from": "gpt", "value": "a"}}', "no_conversation"),
    "a turn that is a string": ('{"id": "x", "conversations": ["q", "a"]}', "turn_not_object"),
    "a list as a text": ('{"id": "x", "conversations": [{"from": "gpt", "value": ["a"]}]}', "turn_value_not_text"),
    "no from": ('{"id": "x", "conversations": [{"value": "a"}]}', "unknown_role"),
    "a name with a zero byte": ((GOOD % "x")[:-1] + r', "image": "a\u0000b.png"}', "image_missing"),
    "a very long name": ((GOOD % "x")[:-1] + f', "image": "{"a" * 5000}.png"}}', "image_field"),
    "a folder as image": ((GOOD % "x")[:-1] + ', "image": "."}', "image_not_a_file"),
    "a device as image": ((GOOD % "x")[:-1] + ', "image": "/dev/zero"}', "image_outside_root"),
    "a link to itself": ((GOOD % "x")[:-1] + ', "image": "loop.png"}', "image_unreadable"),
    "a name below a file": ((GOOD % "x")[:-1] + ', "image": "rows.jsonl/a.png"}', "image_missing"),
    "text as image": ((GOOD % "x")[:-1] + ', "image": "rows.jsonl"}', "image_not_an_image"),
}


@pytest.mark.parametrize("kind", LINES)
def test_a_bad_line_costs_itself(tmp_path, tokenizer, kind):
    line, reason = LINES[kind]
    (tmp_path / "rows.jsonl").write_text(f"{GOOD % 'before'}\n{line}\n{GOOD % 'after'}\n")
    os.symlink("loop.png", tmp_path / "loop.png")
    delivered, bad = outcome(over(tmp_path, root=".", annotation="rows.jsonl"), tokenizer)
    assert delivered == {"before", "after"}
    assert list(bad.values()) == [reason]


ENDS = {
    "form feeds between": (lambda good: good.replace("\n", "\n\f\n"), {"r0", "r1", "r2"}, ["invalid_json"] * 3),
    "a byte order mark on each line": (lambda good: good.replace("{\"id", "\ufeff{\"id"), {"r0", "r1", "r2"}, []),
    "a file cut and written on": (lambda good: good[: len(good) - 40] + good, {"r0", "r1"}, ["invalid_json"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", ENDS)
def test_odd_line_ends(tmp_path, tokenizer, kind):
    change, good, reasons = ENDS[kind]
    (tmp_path / "rows.jsonl").write_bytes(change("".join(GOOD % f"r{i}" + "\n" for i in range(3))).encode())
    dataset_meta = over(tmp_path, root=".", annotation="rows.jsonl")
    code = main(["validate", str(dataset_meta), "--workers", "0"])
    assert code == (1 if reasons else 0)
    if good and kind != "a file cut and written on":
        assert outcome(dataset_meta, tokenizer) == (good, dict(zip(("1", "3", "5"), reasons, strict=False)))


REFUSED = {
    "carriage returns alone": (lambda good: good.replace(b"\n", b"\r"), "carriage returns alone"),
    "UTF-16 without a mark": (lambda good: good.decode().encode("utf-16-be"), "UTF-16"),
    "UTF-32": (lambda good: good.decode().encode("utf-32"), "UTF-32"),
    "a pointer of Git LFS": (
        lambda _: b"version https://git-lfs.github.com/spec/v1\nsize 9\n",
        "lfs pull",
    ),
    "an error page": (lambda _: b"\n<html><body>403 Forbidden</body></html>\n", "web page"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_annotation_file_at_all_is_refused_with_the_cure(tmp_path, capsys, kind):
    change, words = REFUSED[kind]
    (tmp_path / "rows.jsonl").write_bytes(change("".join(GOOD % f"r{i}" + "\n" for i in range(3)).encode()))
    assert main(["validate", str(over(tmp_path, root=".", annotation="rows.jsonl")), "--workers", "0"]) == 2
    assert words in capsys.readouterr().err


def shard(folder: Path, members: list[tuple[str, bytes | str]]) -> str:
    """A tar shard; a string as content makes a symbolic link to it."""
    path = folder / "odd.tar"
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path.name


def record(own_id: str, **fields) -> bytes:
    return json.dumps(json.loads(GOOD % own_id) | fields).encode()


PICTURE = png(60, 60, 9)
MEMBERS = {
    "a link as image": ([("k.json", record("k", image="k.png")), ("k.png", "/etc/passwd")], "member_not_a_file"),
    "a link as record": ([("k.json", "/etc/passwd"), ("k.png", PICTURE)], "member_not_a_file"),
    "an absolute name": ([("/k.json", record("k"))], "unsafe_member_name"),
    "a name that leads out": ([("../k.json", record("k"))], "unsafe_member_name"),
    "a record that names a file outside": ([("k.json", record("k", image="/etc/passwd"))], "image_missing"),
    "a record that names another key's image": ([("k.json", record("k", image="g0.png"))], "image_missing"),
    "the record twice": ([("k.json", record("k")), ("k.json", record("k2"))], "duplicate_member"),
    "the image twice, in other case": (
        [("k.json", record("k")), ("k.jpg", PICTURE), ("k.JPG", PICTURE)],
        "duplicate_member",
    ),
    "a record that is an array": ([("k.json", b"[]"), ("k.png", PICTURE)], "not_an_object"),
    "an image that is text": ([("k.json", record("k", image="k.png")), ("k.png", b"hello")], "image_not_an_image"),
    "only an image": ([("k.png", PICTURE)], "record_missing"),
}


@pytest.mark.parametrize("kind", MEMBERS)
def test_odd_members_cost_their_sample(tmp_path, tokenizer, kind):
    members, reason = MEMBERS[kind]
    before = [("g0.json", record("g0", image="g0.png")), ("g0.png", PICTURE)]
    after = [("g1.png", PICTURE), ("g1.json", record("g1"))]
    name = shard(tmp_path, [*before, *members, *after])
    delivered, bad = outcome(over(tmp_path, shards=name), tokenizer)
    assert delivered == {"g0", "g1"}
    assert list(bad.values()) == [reason]


@pytest.mark.slow
def test_a_bad_sample_among_many_costs_no_other(tmp_path, tokenizer):
    meta = write_jsonl(tmp_path, 60)
    path = sorted((tmp_path / "images").iterdir())[7]
    path.write_bytes(path.read_bytes()[:60])
    delivered, bad = outcome(meta, tokenizer, max_packed_tokens=400)
    assert bad == {f"s{int(path.name[:5])}": "image_truncated"}
    assert len(delivered) == 59


def test_each_neighbour_keeps_its_own_pixels(tmp_path, tokenizer):
    meta = write_jsonl(tmp_path, 40)
    for path in sorted((tmp_path / "images").iterdir())[::5]:
        path.write_bytes(path.read_bytes()[:60])
    dataset = PackedDataset.from_meta(meta, tokenizer, PackingConfig(), encode=TINY)
    seen = 0
    for batch in build_loader(dataset, packs_per_batch=1):
        offsets = batch["segment_tile_offsets"].tolist()
        for sample_id, start, stop in zip(batch["sample_ids"], offsets, offsets[1:], strict=False):
            raw = dataset.samples.sources[0].read(int(sample_id.rpartition("/")[2]))
            tiles = dataset.encoder.decode(dataset.encoder.encode(raw, dataset.samples.specs[0]))
            assert (batch["pixel_values"][start:stop].numpy() == tiles).all()
            seen += stop - start
    assert seen > 40
