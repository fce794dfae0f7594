"""Presets that hold their data: text-only data to packed parquet and back, images in WebDataset shards."""

from __future__ import annotations

import json
import random
import shutil
from collections import defaultdict
from pathlib import Path

import pytest
from factory import TINY, WORDS, write_jsonl, write_meta
from test_dataset import fingerprint, in_step, resume, saved
from test_preset import CONFIG, files, planned, stream_loader

from internvl_pack.encode.sample import Encoder
from internvl_pack.errors import UserError
from internvl_pack.loader import build_loader
from internvl_pack.materialise import LaneWriter, materialise
from internvl_pack.preset import Preset
from internvl_pack.preset_dataset import PresetDataset
from internvl_pack.sources import load_meta, open_source

pq = pytest.importorskip("pyarrow.parquet")
COUNT = 120


def filled(meta: Path, out: Path, tokenizer, config=CONFIG, **options) -> Preset:
    planned(meta, out, tokenizer, config)
    specs = load_meta(meta)
    for _ in materialise(Preset(out), [open_source(s) for s in specs], specs, Encoder(tokenizer, TINY), **options):
        pass
    return Preset(out)


def stored_loaders(preset: Path, tokenizer, ranks: int = 1):
    return [
        build_loader(PresetDataset.open(preset, None, tokenizer, CONFIG, rank=rank, world_size=ranks))
        for rank in range(ranks)
    ]


def write_text(folder: Path, count: int = COUNT) -> Path:
    """Conversations without images, some longer than a row."""
    rng = random.Random(1)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "text.jsonl", "w", encoding="utf-8") as lines:
        for i in range(count):
            turns = []
            for _ in range(rng.randint(1, 4)):
                turns.append({"from": "human", "value": " ".join(rng.choices(WORDS, k=rng.randint(1, 20)))})
                turns.append({"from": "gpt", "value": " ".join(rng.choices(WORDS, k=rng.randint(1, 120)))})
            lines.write(json.dumps({"id": i, "conversations": turns}) + "\n")
    return write_meta(folder, {"text": {"root": "", "annotation": "text.jsonl"}})


@pytest.fixture(scope="module")
def text(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("text")
    meta = write_text(folder)
    filled(meta, folder / "preset", tokenizer)
    return meta, folder / "preset"


@pytest.fixture(scope="module")
def images(tmp_path_factory, tokenizer):
    """A preset with images whose data is gone, and what streaming trained on it before."""
    folder = tmp_path_factory.mktemp("images")
    meta = write_jsonl(folder / "data", COUNT)
    sorted((folder / "data" / "images").iterdir())[5].write_bytes(b"not an image")
    filled(meta, folder / "preset", tokenizer)
    stream = stream_loader(meta, tokenizer)
    expected = [fingerprint(b) for b in stream]
    shutil.move(folder / "data", folder / "elsewhere")
    return folder / "preset", expected, stream.ledger, folder / "elsewhere" / "meta.json"


def test_text_to_packed_parquet_and_back_every_token_accounted_for(text, tokenizer):
    meta, preset = text
    dataset = PresetDataset.open(preset, meta, tokenizer)
    whole = {}
    for row in range(COUNT):
        encoded = dataset.encoder.encode(dataset.sources[0].read(row), dataset.specs[0])
        whole[encoded.record.sample_id] = encoded
    parts = defaultdict(dict)
    plans = pq.read_table(preset / "packs.parquet").to_pylist()
    for plan, row in zip(plans, pq.read_table(preset / "tokens.parquet").to_pylist(), strict=True):
        assert [plan[k] for k in ("pack", "epoch", "lane", "turn")] == [
            row[k] for k in ("pack", "epoch", "lane", "turn")
        ]
        assert row["cu_seqlens"] == plan["cu_seqlens"] and row["cu_seqlens"][-1] == len(row["input_ids"]) <= 300
        for i, sample_id in enumerate(row["sample_ids"]):
            place = slice(row["cu_seqlens"][i], row["cu_seqlens"][i + 1])
            again = plan["num_prefix_tokens"][i] + plan["num_context_tokens"][i]
            ids, labels = row["input_ids"][place], row["labels"][place]
            assert labels[:again] == [-100] * again, "repeated tokens are not trained again"
            parts[sample_id][plan["index"][i]] = (ids[again:], labels[again:])
    assert parts.keys() == whole.keys()
    assert any(len(of_sample) > 1 for of_sample in parts.values())
    for sample_id, encoded in whole.items():
        joined = [parts[sample_id][i] for i in range(len(parts[sample_id]))]
        assert [i for ids, _ in joined for i in ids] == encoded.input_ids.tolist()
        assert [i for _, labels in joined for i in labels] == encoded.labels.tolist()


def test_efficiency_is_real_tokens_over_capacity(text):
    _, preset = text
    statistics = Preset(preset).content["statistics"]
    rows = pq.read_table(preset / "tokens.parquet").to_pylist()
    assert statistics["tokens"] == sum(len(r["input_ids"]) for r in rows)
    assert statistics["token_fill"] == pytest.approx(statistics["tokens"] / (len(rows) * 300), abs=1e-6)


def test_a_text_preset_trains_without_its_data_as_streaming_does_with_it(text, tokenizer):
    meta, preset = text
    stream, (loader,) = stream_loader(meta, tokenizer), stored_loaders(preset, tokenizer)
    assert [fingerprint(b) for b in loader] == [fingerprint(b) for b in stream]
    assert loader.ledger.state_dict() == stream.ledger.state_dict()
    assert not list(preset.glob("*.tar"))


def test_images_stay_compressed_in_shards_and_train_the_very_batches_of_streaming(images, tokenizer):
    preset, expected, ledger, _ = images
    (loader,) = stored_loaders(preset, tokenizer)
    assert [fingerprint(b) for b in loader] == expected
    assert loader.ledger.state_dict() == ledger.state_dict()


def test_the_shards_are_webdataset_shards_that_hold_the_files_as_they_were(images):
    webdataset = pytest.importorskip("webdataset")
    preset, _, _, meta = images
    contents = [p.read_bytes() for p in (meta.parent / "images").iterdir()]
    originals = set(contents)
    records = [json.loads(line) for line in (meta.parent / "made.jsonl").read_text().splitlines()]
    seen = 0
    for shard in sorted(preset.glob("*.tar")):
        for sample in webdataset.WebDataset(str(shard), shardshuffle=False, empty_check=False):
            about = json.loads(sample["json"])
            assert sample["__key__"] == f"{about['pack']:012d}"
            for segment in about["segments"]:
                for member in segment["images"]:
                    data = sample[member.split(".", 1)[1]]
                    assert data in originals
                    seen += 1
    assert seen == len(contents) - sum(len(r["image"]) for r in records if "image" in r and _is_bad(r, meta))


def _is_bad(record: dict, meta: Path) -> bool:
    return any((meta.parent / "images" / name).read_bytes() == b"not an image" for name in record["image"])


def test_a_stored_run_goes_on_with_other_ranks_and_from_the_one_that_reads_the_data(images, tokenizer):
    preset, _, _, meta = images
    expected = in_step(stored_loaders(preset, tokenizer))
    reading = [
        build_loader(PresetDataset.open(preset, meta, tokenizer, CONFIG, rank=rank, world_size=2)) for rank in range(2)
    ]
    head = in_step(reading, steps=6)
    stored = stored_loaders(preset, tokenizer, ranks=4)
    resume(stored, saved(reading))
    assert head + in_step(stored) == expected


def test_writing_the_data_goes_on_where_it_was_stopped_and_is_the_same_to_the_byte(
    images, tokenizer, tmp_path, monkeypatch
):
    preset, _, _, meta = images
    write_lane, done = LaneWriter.write_lane, []

    def stopped(self, epoch, lane):
        if lane == 5 and len(done) == 5:
            raise KeyboardInterrupt
        done.append(lane)
        return write_lane(self, epoch, lane)

    monkeypatch.setattr(LaneWriter, "write_lane", stopped)
    with pytest.raises(KeyboardInterrupt):
        filled(meta, tmp_path / "again", tokenizer)
    done.append("stop")
    filled(meta, tmp_path / "again", tokenizer)
    assert done == [0, 1, 2, 3, 4, "stop", 5, 6, 7]
    assert files(tmp_path / "again") == files(preset)


def test_a_preset_without_data_needs_its_meta_file(tokenizer, tmp_path):
    planned(write_text(tmp_path, 5), tmp_path / "preset", tokenizer)
    with pytest.raises(UserError, match="holds no data of its own: give its --meta_path"):
        PresetDataset.open(tmp_path / "preset", None, tokenizer)


def test_a_stored_image_that_is_damaged_costs_its_sample_only(images, tokenizer, tmp_path):
    preset = Path(shutil.copytree(images[0], tmp_path / "preset"))
    shard = sorted(preset.glob("*.tar"))[0]
    data = bytearray(shard.read_bytes())
    at = data.index(b"IDAT")
    data[at : at + 20] = bytes(20)
    shard.write_bytes(data)
    (loader,) = stored_loaders(preset, tokenizer)
    list(loader)
    loader.ledger.check()
    assert loader.ledger.samples_quarantined == images[2].samples_quarantined + 1
