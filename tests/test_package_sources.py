"""Sources that are no files: Hugging Face datasets, lists, registered kinds; in workers and over resumes."""

from __future__ import annotations

import io
import json
import pickle

import numpy as np
import pytest
from PIL import Image

from internvl_pack import DatasetSource, EncodeConfig, Encoder, PackedDataset, PackingConfig, UserError, build_loader
from internvl_pack.errors import SampleError
from internvl_pack.sources import load_meta, open_source

ENCODE = EncodeConfig(image_size=56, tokens_per_tile=4, max_dynamic_patch=4)
CONFIG = PackingConfig(max_packed_tokens=256, num_images_expected=8, num_lanes=4)


def picture(number: int) -> Image.Image:
    return Image.fromarray(np.full((40 + number, 60, 3), 5 * number, np.uint8))


def png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def rows(count: int = 24) -> list[dict]:
    turns = [{"from": "human", "value": "<image>\nWhich?"}, {"from": "gpt", "value": "This one."}]
    return [{"image": picture(n), "conversations": turns} for n in range(count)]


def dataset_of(source, tokenizer, **options):
    return PackedDataset([source], Encoder(tokenizer, ENCODE), CONFIG, **options)


def ids_and_pixels(loader) -> list[tuple]:
    return [(b["sample_ids"], b["pixel_values"].numpy().tobytes()) for b in loader]


def test_pil_images_bytes_dicts_paths_and_datasets_give_the_same_batches(tokenizer, tmp_path):
    datasets = pytest.importorskip("datasets")
    plain = rows()
    for number, row in enumerate(plain):
        row["image"].save(tmp_path / f"{number}.png")
    forms = {
        "bytes": [{**row, "image": png(row["image"])} for row in plain],
        "dict": [{**row, "image": {"bytes": png(row["image"]), "path": None}} for row in plain],
        "path": [{**row, "image": f"{n}.png"} for n, row in enumerate(plain)],
        "list": [{"images": [row["image"]], "conversations": row["conversations"]} for row in plain],
        "datasets": datasets.Dataset.from_list(plain),
    }
    want = ids_and_pixels(build_loader(dataset_of(DatasetSource("d", plain), tokenizer)))
    assert sum(len(ids) for ids, _ in want) == 24
    for form, data in forms.items():
        source = DatasetSource("d", data, root=str(tmp_path))
        assert ids_and_pixels(build_loader(dataset_of(source, tokenizer))) == want, form


def test_workers_and_a_resume_on_other_ranks_give_the_same_packs(tokenizer):
    datasets = pytest.importorskip("datasets")
    source = DatasetSource("d", datasets.Dataset.from_list(rows(40)))
    whole = ids_and_pixels(build_loader(dataset_of(source, tokenizer)))
    assert ids_and_pixels(build_loader(dataset_of(source, tokenizer), num_workers=2)) == whole
    first = build_loader(dataset_of(source, tokenizer), num_workers=2)
    batches = iter(first)
    taken = [next(batches)["sample_ids"] for _ in range(2)]
    state = json.loads(json.dumps(first.state_dict()))
    ranks = [
        build_loader(dataset_of(pickle.loads(pickle.dumps(source)), tokenizer, rank=r, world_size=2)) for r in (0, 1)
    ]
    for loader in ranks:
        loader.load_state_dict(state)
    rest = [b["sample_ids"] for pair in zip(*ranks, strict=True) for b in pair if b["num_samples"]]
    assert taken + rest == [ids for ids, _ in whole]


def test_a_resume_over_other_rows_is_refused(tokenizer):
    loader = build_loader(dataset_of(DatasetSource("d", rows()), tokenizer))
    next(iter(loader))
    changed = rows()
    changed[0] = {
        **changed[0],
        "conversations": [{"from": "human", "value": "Else?"}, {"from": "gpt", "value": "Yes."}],
    }
    other = build_loader(dataset_of(DatasetSource("d", changed), tokenizer))
    with pytest.raises(UserError, match="files"):
        other.load_state_dict(loader.state_dict())


def test_a_bad_row_costs_itself_and_is_named(tokenizer):
    data = rows()
    data[3] = {**data[3], "image": 7}
    data[4] = "no dict"
    loader = build_loader(dataset_of(DatasetSource("d", data), tokenizer))
    assert sum(b["num_samples"] for b in loader) == 22
    assert {(e["id"], e["reason"]) for e in loader.take_events()} == {("d/3", "image_field"), ("d/4", "not_an_object")}


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


def test_a_meta_file_names_a_registered_kind_of_a_plugin(tmp_path, monkeypatch, tokenizer):
    (tmp_path / "my_plugin.py").write_text(
        "from internvl_pack import ChatML, DatasetSource, register_source, register_template\n"
        "@register_source('mine')\n"
        "def mine(name, answer):\n"
        "    turns = [{'from': 'human', 'value': 'Hi.'}, {'from': 'gpt', 'value': answer}]\n"
        "    return DatasetSource(name, [{'conversations': turns}] * 3)\n"
        "@register_template('my_style')\n"
        "def style(tokenizer):\n"
        "    return ChatML(tokenizer, None, 'my_style')\n"
    )
    meta = tmp_path / "meta.json"
    meta.write_text(json.dumps({"a": {"source": "mine", "options": {"answer": "Ho."}, "repeat_time": 2}}))
    (spec,) = load_meta(meta)
    with pytest.raises(UserError, match=r"source 'mine' is unknown.*INTERNVL_PACK_PLUGINS"):
        open_source(spec)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("INTERNVL_PACK_PLUGINS", "my_plugin")
    encode = EncodeConfig(conv_style="my_style", tokens_per_tile=4)
    dataset = PackedDataset.from_meta(meta, tokenizer, CONFIG, encode=encode)
    assert sum(b["num_samples"] for b in build_loader(dataset)) == 6
    meta.write_text(json.dumps({"a": {"source": "mine", "options": {"anser": "Ho."}}}))
    with pytest.raises(UserError, match="anser"):
        open_source(load_meta(meta)[0])
    monkeypatch.setenv("INTERNVL_PACK_PLUGINS", "no_such_plugin")
    with pytest.raises(UserError, match="no module 'no_such_plugin'"):
        Encoder(tokenizer, EncodeConfig(conv_style="unheard of"))


def test_a_meta_file_names_a_saved_dataset(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(rows(5))
    data.save_to_disk(str(tmp_path / "saved"))
    data.to_parquet(str(tmp_path / "rows.parquet"))
    meta = tmp_path / "meta.json"
    entries = {"a": {"path": "saved"}, "b": {"path": "rows.parquet"}}
    meta.write_text(json.dumps({name: {"source": "datasets", "options": o} for name, o in entries.items()}))
    for spec in load_meta(meta):
        source = open_source(spec)
        assert len(source) == 5
        assert source.read(2).resolve("#0").read()
        with pytest.raises(SampleError):
            source.read(2).resolve("missing.png").read()


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
