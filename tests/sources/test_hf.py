"""Sources that are no files: Hugging Face datasets and lists, in workers, over resumes and in every command."""

from __future__ import annotations

import io
import json
import pickle
import sys
from dataclasses import replace

import numpy as np
import pytest
from helpers.factory import TINY
from PIL import Image

from internvl_pack import (
    DatasetSource,
    Encoder,
    PackedDataset,
    PackingConfig,
    SampleError,
    UserError,
    build_loader,
)
from internvl_pack.cli import main
from internvl_pack.encode.images import header_of
from internvl_pack.sources import FileRef, load_meta, open_source
from internvl_pack.sources.hf import _RowImage

TURN = ("from", "value")
ENCODE = replace(TINY, max_dynamic_patch=4)
CONFIG = PackingConfig(max_packed_tokens=256, num_images_expected=8)


def picture(number: int) -> Image.Image:
    return Image.fromarray(np.full((40 + number, 60, 3), 5 * number, np.uint8))


def png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


class FakeFile:
    """An image reference to bytes at hand."""

    name = "bytes"

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self) -> bytes:
        return self.data

    def head(self, num_bytes: int) -> bytes:
        return self.data[:num_bytes]


def rows(count: int = 24) -> list[dict]:
    turns = [{"from": "human", "value": "<image>\nWhich?"}, {"from": "gpt", "value": "This one."}]
    return [{"image": picture(n), "conversations": turns} for n in range(count)]


def dataset_of(source, tokenizer, **options):
    return PackedDataset([source], Encoder(tokenizer, ENCODE), CONFIG, **options)


def ids_and_pixels(loader) -> list[tuple]:
    return [(b["sample_ids"], b["pixel_values"].numpy().tobytes()) for b in loader]


@pytest.mark.slow
def test_pil_images_bytes_dicts_paths_and_datasets_give_the_same_batches(tokenizer, tmp_path):
    datasets = pytest.importorskip("datasets")
    plain = rows()
    for number, row in enumerate(plain):
        row["image"].save(tmp_path / f"{number}.png")
    forms = {
        "bytes": [{**row, "image": png(row["image"])} for row in plain],
        "dict": [{**row, "image": {"bytes": png(row["image"]), "path": None}} for row in plain],
        "path": [{**row, "image": f"{n}.png"} for n, row in enumerate(plain)],
        "Path": [{**row, "image": tmp_path / f"{n}.png"} for n, row in enumerate(plain)],
        "list": [{"images": [row["image"]], "conversations": row["conversations"]} for row in plain],
        "datasets": datasets.Dataset.from_list(plain),
        "torch tensors": datasets.Dataset.from_list(plain).with_format("torch"),
        "lists of a dataset": datasets.Dataset.from_list(
            [{"images": [row["image"]], "conversations": row["conversations"]} for row in plain]
        ),
        "transform": datasets.Dataset.from_list([{"number": n} for n in range(24)]).with_transform(
            lambda batch: {name: [plain[n][name] for n in batch["number"]] for name in plain[0]}
        ),
        "struct of lists": datasets.Dataset.from_list(
            [
                {**row, "conversations": {name: [turn[name] for turn in row["conversations"]] for name in TURN}}
                for row in plain
            ]
        ),
    }
    want = ids_and_pixels(build_loader(dataset_of(DatasetSource("d", plain), tokenizer)))
    assert sum(len(ids) for ids, _ in want) == 24
    for form, data in forms.items():
        source = DatasetSource("d", data, root=str(tmp_path))
        assert ids_and_pixels(build_loader(dataset_of(source, tokenizer))) == want, form


@pytest.mark.slow
def test_workers_and_a_resume_on_other_ranks_give_the_same_packs(tokenizer):
    datasets = pytest.importorskip("datasets")
    source = DatasetSource("d", datasets.Dataset.from_list(rows(40)))
    whole = ids_and_pixels(build_loader(dataset_of(source, tokenizer), accumulation=2))
    first = build_loader(dataset_of(source, tokenizer), accumulation=2, num_workers=2)
    assert ids_and_pixels(first) == whole
    batches = iter(first)
    taken = [next(batches)["sample_ids"] for _ in range(2)]
    state = json.loads(json.dumps(first.state_dict()))
    ranks = [
        build_loader(dataset_of(pickle.loads(pickle.dumps(source)), tokenizer, rank=r, world_size=2)) for r in (0, 1)
    ]
    for loader in ranks:
        loader.load_state_dict(state)
    rest = [b["sample_ids"] for pair in zip(*ranks, strict=True) for b in pair if b["num_samples"]]
    assert len(rest) > 2 and taken + rest == [ids for ids, _ in whole]


def test_a_resume_over_other_rows_is_refused(tokenizer):
    loader = build_loader(dataset_of(DatasetSource("d", rows()), tokenizer))
    next(iter(loader))
    changed = rows()
    changed[0] = {
        **changed[0],
        "conversations": [{"from": "human", "value": "Else?"}, {"from": "gpt", "value": "Yes."}],
    }
    other = build_loader(dataset_of(DatasetSource("d", changed), tokenizer))
    with pytest.raises(UserError, match="resume: meta was"):
        other.load_state_dict(loader.state_dict())


def test_a_bad_row_costs_itself_and_is_named(tokenizer):
    data = rows()
    data[3] = {**data[3], "image": 7}
    data[4] = "no dict"
    loader = build_loader(dataset_of(DatasetSource("d", data), tokenizer))
    assert sum(b["num_samples"] for b in loader) == 22
    assert {(e["id"], e["reason"]) for e in loader.take_events()} == {("d/3", "image_field"), ("d/4", "not_an_object")}


def test_a_row_is_read_once_for_all_its_images():
    read = []

    class Counted(list):
        def __getitem__(self, row):
            read.append(row)
            return super().__getitem__(row)

    turns = [{"from": "human", "value": "<image><image>Which?"}, {"from": "gpt", "value": "This one."}]
    source = DatasetSource("d", Counted([{"images": [png(picture(1)), picture(2)], "conversations": turns}]))
    raw = source.read(0)
    refs = [raw.resolve(name) for name in raw.data["image"]]
    assert [header_of(ref).upright_size for ref in refs] == [(60, 41), (60, 42)]
    assert all(ref.read() for ref in refs)
    assert read == [0]
    assert source.__getstate__()["_last"] is None  # workers get no pixels with it


def test_sizes_of_pillow_images_cost_no_pixels():
    for mode in ("RGB", "L", "P", "RGBA", "CMYK", "F"):
        image = Image.new(mode, (3000, 20))
        image.getexif()[0x0112] = 6
        ref = DatasetSource("d", [{"image": image, "conversations": []}]).read(0).resolve("#0")
        assert header_of(ref) == header_of(FakeFile(ref.read())), mode
        assert header_of(ref).upright_size == (20, 3000)
        assert len(ref.head(1 << 16)) < 200


def test_pillow_images_that_nobody_has_read_are_files(tmp_path):
    picture(3).save(tmp_path / "a.png")
    for image, kind in ((Image.open(tmp_path / "a.png"), FileRef), (picture(3), _RowImage)):
        ref = DatasetSource("d", [{"image": image, "conversations": []}]).read(0).resolve("#0")
        assert type(ref) is kind
        assert Image.open(io.BytesIO(ref.read())).tobytes() == picture(3).tobytes()


def test_photographs_are_turned_upright():
    image = picture(0)
    image.getexif()[0x0112] = 6
    source = DatasetSource("d", [{"image": image, "conversations": []}])
    with Image.open(io.BytesIO(source.image_bytes(0, 0))) as stored:
        assert stored.getexif()[0x0112] == 6


@pytest.mark.parametrize("data", [{"train": [], "test": []}, iter(())])
def test_what_has_no_rows_by_number_is_refused(data):
    with pytest.raises(UserError, match="dataset 'd'"):
        DatasetSource("d", data)


def written(path, entries) -> str:
    path.write_text(json.dumps(entries))
    return str(path)


def save(folder, count: int = 24):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(rows(count))
    data.save_to_disk(str(folder))
    return data


def saved(path: str, **options) -> dict:
    return {"source": "datasets", "options": {"path": path, **options}}


def test_a_meta_file_names_a_saved_dataset(tmp_path):
    data = save(tmp_path / "saved", 5)
    data.to_parquet(str(tmp_path / "rows.parquet"))
    data.train_test_split(2).save_to_disk(str(tmp_path / "splits"))
    entries = {
        "a": saved("saved"),
        "b": saved("rows.parquet"),
        "c": saved("splits", split="test"),
        "d": saved("splits"),
        "e": saved("splits", split="tests"),
        "f": saved("saved", split="test"),
    }
    specs = load_meta(written(tmp_path / "meta.json", entries))
    for spec, count in zip(specs, (5, 5, 2), strict=False):
        source = open_source(spec)
        assert len(source) == count
        assert source.read(1).resolve("#0").read()
        with pytest.raises(SampleError):
            source.read(1).resolve("missing.png").read()
    for spec, message in zip(specs[3:], ("train, test: choose one", "has train, test", "is not split"), strict=True):
        with pytest.raises(UserError, match=message):
            open_source(spec)


TILES = ("--force_image_size", "56", "--dynamic_image_size", "True", "--max_dynamic_patch", "4")
BUDGETS = ("--max_packed_tokens", "256", "--num_images_expected", "8")


@pytest.mark.slow
def test_every_command_takes_a_registered_source(tmp_path, tokenizer, capsys):
    save(tmp_path / "saved")
    meta = written(tmp_path / "meta.json", {"d": saved("saved")})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    model = ("--tokenizer", str(tmp_path / "tokenizer"))
    here = ("--workers", "0")

    def said(*argv) -> str:
        assert main(argv) == 0, argv
        return capsys.readouterr().out

    assert "24 samples: 24 good" in said("validate", meta, "--decode", *TILES, *BUDGETS, *here)
    stats = json.loads(said("stats", meta, "--json", *model, *TILES, *BUDGETS, *here).splitlines()[-1])
    assert stats["datasets"][0]["rows"] == 24 and stats["datasets"][0]["tiles"]["max"] == 1
    page = ("preview", meta, "--out", str(tmp_path / "page.html"), "--packs", "99", "--json")
    assert json.loads(said(*page, *model, *TILES, *BUDGETS).splitlines()[-1])["segments"] == 24
    assert "samples                        24" in said("simulate", meta, *model, *TILES, *BUDGETS)
    assert "source 'datasets' needs no index" in said("index", meta, *here)
    plan = ("plan", meta, "--out", str(tmp_path / "preset"), "--materialise", *model, *TILES, *BUDGETS, *here)
    assert "24 samples" in said(*plan)
    assert (tmp_path / "preset" / "tokens.parquet").is_file()


def test_a_preset_gives_the_packs_that_streaming_gives_and_knows_other_rows(tmp_path, tokenizer):
    from internvl_pack import PresetDataset
    from internvl_pack.plan.write_preset import plan_preset

    data = rows()
    streamed = dataset_of(DatasetSource("d", data), tokenizer)
    plan_preset(tmp_path / "preset", streamed.samples, CONFIG)
    planned = PresetDataset(tmp_path / "preset", streamed.samples, CONFIG)
    assert ids_and_pixels(build_loader(planned)) == ids_and_pixels(build_loader(streamed))
    other = dataset_of(DatasetSource("d", [{**data[0], "conversations": []}, *data[1:]]), tokenizer)
    with pytest.raises(UserError, match="content of dataset 'd'"):
        PresetDataset(tmp_path / "preset", other.samples, CONFIG)


@pytest.mark.parametrize(
    "entry, message",
    [
        ({"source": "x", "annotation": "a.jsonl"}, "'source' stands alone"),
        ({"source": "x", "options": []}, "'options' must be an object"),
        ({"options": {}, "annotation": "a.jsonl"}, "'options' belong to a 'source'"),
    ],
)
def test_entries_with_a_source_are_checked(tmp_path, entry, message):
    meta = tmp_path / "meta.json"
    meta.write_text(json.dumps({"a": entry}))
    with pytest.raises(UserError, match=message):
        load_meta(meta)


def test_a_table_without_the_library_says_what_reads_it(monkeypatch, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "datasets", None)
    (spec,) = load_meta(tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"'a': Parquet, .* need the datasets library: pip install '.*\[datasets\]'"):
        open_source(spec)


def test_a_table_of_pairs_has_no_column_of_turns():
    datasets = pytest.importorskip("datasets")

    def source(rejected: str) -> DatasetSource:
        row = {
            "question": "What is it?",
            "chosen": "A crane.",
            "rejected": rejected,
            "image": {"bytes": png(picture(1))},
        }
        return DatasetSource("pairs", datasets.Dataset.from_list([row] * 3))

    data = source("A dog.").read(1).data
    assert (data["chosen"], data["rejected"], data["image"]) == ("A crane.", "A dog.", ["#0"])
    assert source("A dog.").fingerprint == source("A dog.").fingerprint != source("A cat.").fingerprint
