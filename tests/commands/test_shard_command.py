"""`internvl-pack shard`: the shards read back what was read, sample for sample, and come whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.factory import TINY, png, samples, write_jsonl, write_meta, write_shards

from internvl_pack.cli import main
from internvl_pack.encode.conversation import image_names_of
from internvl_pack.encode.sample import Encoder
from internvl_pack.encode.video import video_of
from internvl_pack.sources import Source, load_meta, open_source
from internvl_pack.sources.index import SUFFIX


def run(meta: Path, out: Path | str, *options: str) -> int:
    return main(["shard", str(meta), "--out", str(out), *options])


def opened(meta: Path) -> list[Source]:
    return [open_source(spec) for spec in load_meta(meta)]


def everything(source: Source) -> list[tuple[dict[str, Any], list[bytes]]]:
    """Of each row the record without the names of its images, and their bytes."""
    out = []
    for row in range(len(source)):
        sample = source.read(row)
        names = image_names_of(sample.data)
        video = video_of(sample.data)
        contents = [sample.resolve(name).read() for name in names]
        if video is not None:
            with sample.resolve(video[0]).open() as file:
                contents.append(file.read())
        record = {key: value for key, value in sample.data.items() if key not in ("image", "video")}
        out.append((record | {"names": len(names)}, contents))
    return out


@pytest.fixture
def data(tmp_path) -> Path:
    return write_jsonl(tmp_path / "in", 60)


def test_samples_read_back_equal_with_the_same_ids_and_tiles(data, tmp_path, tokenizer, capsys):
    assert run(data, tmp_path / "out" / "data-%04d.tar", "--max-count", "25") == 0
    meta = tmp_path / "out" / "data.json"
    assert set(os.listdir(tmp_path / "out")) == {"data.json"} | {
        f"data-{number:04d}.tar{end}" for number in range(3) for end in ("", SUFFIX)
    }
    assert json.loads(meta.read_text()) == {"made": {"shards": "data-{0000..0002}.tar"}}
    (before,), (after,) = opened(data), opened(meta)
    assert all(shard.index is None for shard in after._shards), "the indexes beside the shards are used"
    expected = everything(before)
    assert everything(after) == expected
    assert {len(contents) for _, contents in expected} == {0, 1, 2}, "text only, one image, several"
    encoder = Encoder(tokenizer, TINY)
    specs = load_meta(data), load_meta(meta)
    for row in range(60):
        one, other = (encoder.load(source, row, spec[0]) for source, spec in zip((before, after), specs, strict=True))
        assert np.array_equal(one.input_ids, other.input_ids) and np.array_equal(one.labels, other.labels)
    assert "60 samples in 3 shards" in capsys.readouterr().out


def test_shards_are_the_same_bytes_each_time_and_can_be_sharded_again(data, tmp_path):
    for name in ("a", "b"):
        assert run(data, tmp_path / name / "%03d.tar") == 0
    assert run(tmp_path / "a" / "meta.json", tmp_path / "c" / "%03d.tar") == 0
    contents = [(tmp_path / name / "000.tar").read_bytes() for name in "abc"]
    assert contents[0] == contents[1] == contents[2]


def test_a_shard_that_has_reached_its_size_is_closed(data, tmp_path):
    assert run(data, tmp_path / "out" / "s-%02d.tar", "--max-size", "4kB") == 0
    paths = sorted((tmp_path / "out").glob("*.tar"))
    assert len(paths) > 3
    assert everything(opened(tmp_path / "out" / "s.json")[0]) == everything(opened(data)[0])


def test_datasets_of_a_meta_file_keep_their_options(tmp_path):
    write_jsonl(tmp_path, 5, name="a")
    write_shards(tmp_path, 7, seed=1, name="b")
    meta = write_meta(
        tmp_path,
        {
            "a": {"root": "images", "annotation": "a.jsonl", "repeat_time": 0.5, "data_augment": True},
            "b c": {"shards": "b-0000.tar", "weight": 2.0, "max_dynamic_patch": 3},
        },
    )
    assert run(meta, tmp_path / "out" / "%d.tar") == 2
    assert run(meta, tmp_path / "out" / "{name}" / "part-%d.tar", "--max-count", "4") == 0
    found = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert found == {
        "a": {"shards": "a/part-{0..1}.tar", "repeat_time": 0.5, "data_augment": True},
        "b c": {"shards": "b_c/part-{0..1}.tar", "weight": 2.0, "max_dynamic_patch": 3},
    }
    for before, after in zip(opened(meta), opened(tmp_path / "out" / "meta.json"), strict=True):
        assert everything(after) == everything(before)


def test_rows_of_the_datasets_library_are_written(tmp_path):
    datasets = pytest.importorskip("datasets")
    made = samples(12)
    rows = [
        {
            "conversations": record["conversations"],
            "images": [{"bytes": each, "path": None} for each in images.values()],
        }
        for record, images in made
    ]
    found = datasets.Dataset.from_list(rows).cast_column("images", datasets.Sequence(datasets.Image()))
    found.save_to_disk(tmp_path / "saved")
    meta = write_meta(tmp_path, {"d": {"source": "datasets", "options": {"path": "saved"}}})
    assert run(meta, tmp_path / "out-%06d.tar") == 0
    (after,) = opened(tmp_path / "out.json")
    assert [contents for _, contents in everything(after)] == [list(images.values()) for _, images in made]
    assert [record["conversations"] for record, _ in everything(after)] == [each["conversations"] for each in rows]
    names = [name for row in range(12) for name in image_names_of(after.read(row).data)]
    assert all(name.endswith(".png") for name in names), "by the image's format"


def jsonl(folder: Path, records: list[Any], files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    lines = [each if isinstance(each, str) else json.dumps(each) for each in records]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return write_meta(folder, {"d": {"root": ".", "annotation": "rows.jsonl"}})


TURNS = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "…\u2028\U0001f600"}]


def test_what_only_training_can_judge_is_written_as_it_is(tmp_path):
    records = [
        {"conversations": TURNS, "image": "strange", "n": [1, 2.5, None, True, {"x": 1e-300}]},
        {"conversations": TURNS, "image": ["a.jpg", "a.jpg", "no_suffix"]},
        {"conversations": "no turns", "image": []},
        {"conversations": TURNS, "image": ""},
        {"conversations": TURNS, "video": "clip.mkv", "clip": [0, 1]},
        {"conversations": TURNS, "video": ["clip.mkv"]},
    ]
    files = {"strange": b"no image", "a.jpg": b"nor this", "no_suffix": png(8, 8, 1), "clip.mkv": b"a video" * 999}
    meta = jsonl(tmp_path / "in", records, files)
    assert run(meta, tmp_path / "out-%06d.tar") == 0
    (before,), (after,) = opened(meta), opened(tmp_path / "out.json")
    assert everything(after) == everything(before)
    named = [after.read(row).data.get("image", after.read(row).data.get("video")) for row in range(6)]
    assert named == ["0.img", ["1.0.jpg", "1.1.jpg", "1.2.png"], [], "", "4.mkv", ["5.mkv"]]


BAD = [
    {"conversations": TURNS, "image": "a.png"},
    {"conversations": TURNS, "image": ["a.png", "gone.png"]},
    "{broken",
    {"conversations": TURNS, "image": "empty.png"},
    {"conversations": TURNS, "image": 7},
    {"conversations": TURNS},
]


def test_a_sample_that_cannot_be_read_is_named_counted_and_left_out(tmp_path, capsys):
    meta = jsonl(tmp_path / "in", BAD, {"a.png": png(8, 8, 1), "empty.png": b""})
    assert run(meta, tmp_path / "out-%06d.tar") == 0
    out = capsys.readouterr().out
    for number, reason in ((2, "image_missing"), (3, "invalid_json"), (4, "image_empty"), (5, "image_field")):
        assert any(f"rows.jsonl:line {number}" in line and reason in line for line in out.splitlines())
        assert f"1 {reason}" in out
    assert "2 samples in 1 shard" in out
    (after,) = opened(tmp_path / "out.json")
    assert [after.sample_id(row) for row in range(len(after))] == ["d/out-000000/0", "d/out-000000/5"]


def test_on_error_stop_ends_it_and_nothing_is_left(tmp_path, capsys):
    meta = jsonl(tmp_path / "in", BAD, {"a.png": png(8, 8, 1), "empty.png": b""})
    assert run(meta, tmp_path / "out-%06d.tar", "--on_error", "stop") == 2
    error = capsys.readouterr().err
    assert "rows.jsonl:line 2" in error and "image_missing" in error
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_half_written_is_left_after_a_failure(data, tmp_path, monkeypatch, capsys, fault):
    from webdataset.writer import TarWriter

    write, calls = TarWriter.write, []

    def fail(self, sample):
        calls.append(sample)
        if len(calls) > 30:
            raise fault
        return write(self, sample)

    monkeypatch.setattr(TarWriter, "write", fail)
    assert run(data, tmp_path / "out-%06d.tar", "--max-count", "10") in (2, 130)
    assert os.listdir(tmp_path) == ["in"]
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_files_that_come_to_exist_meanwhile_are_kept_and_the_rest_is_taken_back(data, tmp_path, monkeypatch, capsys):
    from internvl_pack.commands import shard

    report = shard._report

    def meanwhile(*args):
        report(*args)
        (tmp_path / "out-000003.tar").write_bytes(b"mine")

    monkeypatch.setattr(shard, "_report", meanwhile)
    assert run(data, tmp_path / "out-%06d.tar", "--max-count", "10") == 2
    assert "out-000003.tar has come to exist" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["in", "out-000003.tar"]


@pytest.mark.parametrize("there", ["out-000007.tar", "out.json", "out-0.tar"])
def test_an_output_that_exists_is_refused_before_anything_is_read(data, tmp_path, capsys, there):
    (tmp_path / there).write_bytes(b"mine")
    assert run(data, tmp_path / "out-%06d.tar") == 2
    assert f"{there} exists" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["in", there]


def test_other_shards_in_the_folder_are_in_nobodys_way(data, tmp_path):
    for name in ("out-x.tar", "my-000000.tar", "out-000000.tar.gz"):
        (tmp_path / name).write_bytes(b"mine")
    assert run(data, tmp_path / "out-%06d.tar") == 0
    assert run(data, tmp_path / "%06d.tar") == 0


@pytest.mark.parametrize(
    ("out", "options", "words"),
    [
        ("out.tar", [], "give one number such as %06d"),
        ("%06d-%06d.tar", [], "give one number"),
        ("%06d/out.tar", [], "give one number"),
        ("out-%06d.zip", [], "give one number"),
        ("out{1}-%06d.tar", [], "give one number"),
        ("out-%06d.tar", ["--max-size", "much"], "--max-size much"),
        ("out-%06d.tar", ["--max-size", "0"], "--max-size 0"),
        ("out-%06d.tar", ["--max-count", "0"], "--max-count must be at least 1"),
    ],
)
def test_a_mistake_is_one_line(data, tmp_path, capsys, out, options, words):
    assert run(data, tmp_path / out, *options) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1


def test_no_sample_at_all_is_an_error(tmp_path, capsys):
    meta = jsonl(tmp_path / "in", ["{broken"], {})
    assert run(meta, tmp_path / "out-%06d.tar") == 2
    assert "no sample of it could be written" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["in"]


def test_a_folder_with_a_percent_sign_and_letters_of_all_kinds(data, tmp_path, monkeypatch):
    folder = tmp_path / "50 % ünï"
    assert run(data, f"{folder}/x-%02d.tar") == 2, "one number only: the pattern is the user's"
    os.mkdir(folder)
    monkeypatch.chdir(folder)
    assert run(data, "x-%02d.tar") == 0
    assert len(opened(folder / "x.json")[0]) == 60
