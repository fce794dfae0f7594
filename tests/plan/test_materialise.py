"""Presets that hold their data: text-only data to packed parquet and back, images in WebDataset shards."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.factory import TINY, png, write_jsonl, write_meta
from helpers.loaders import fingerprint, resume, samples_of, saved, steps_of, stream_loader
from helpers.presets import CONFIG, files, planned, preset_loaders

from internvl_pack.batch.collate import FILLER_ID
from internvl_pack.cli import main
from internvl_pack.errors import UserError
from internvl_pack.plan.preset import Preset
from internvl_pack.samples import Samples
from internvl_pack.stream import stored
from internvl_pack.stream.loader import build_loader
from internvl_pack.stream.preset_dataset import PresetDataset
from internvl_pack.testing.tiny import WORDS

pq = pytest.importorskip("pyarrow.parquet")
COUNT = 120


@pytest.fixture(autouse=True, scope="module")
def small_parts():
    """Several parts and shards in little data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "PART_PACKS", 2 * stored.PACKS_PER_GROUP)
        yield


def filled(meta: Path, out: Path, tokenizer, **options) -> Preset:
    preset = planned(meta, out, tokenizer, **options)
    for _ in stored.materialise(preset, Samples.from_meta(meta, tokenizer, TINY)):
        pass
    return Preset(out)


def stored_loaders(preset: Path, tokenizer, ranks: int = 1, **options):
    return preset_loaders(preset, None, tokenizer, ranks=ranks, **options)


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
    stream = stream_loader(meta, tokenizer, config=CONFIG)
    expected = [fingerprint(b) for b in stream]
    shutil.move(folder / "data", folder / "elsewhere")
    return folder / "preset", expected, stream.ledger, folder / "elsewhere" / "meta.json"


@pytest.mark.slow
def test_text_to_packed_parquet_and_back_every_token_accounted_for(text, tokenizer):
    meta, preset = text
    dataset = PresetDataset.open(preset, meta, tokenizer)
    whole = {}
    for row in range(COUNT):
        encoded = dataset.samples.encode(0, row)
        whole[encoded.record.sample_id] = encoded
    parts = defaultdict(dict)
    plans = pq.read_table(preset / "packs.parquet").to_pylist()
    for plan, row in zip(plans, pq.read_table(preset / "tokens.parquet").to_pylist(), strict=True):
        assert [plan[k] for k in ("pack", "epoch")] == [row[k] for k in ("pack", "epoch")]
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


@pytest.mark.slow
def test_a_text_preset_trains_without_its_data_as_streaming_does_with_it(text, tokenizer):
    meta, preset = text
    stream, (loader,) = stream_loader(meta, tokenizer, config=CONFIG), stored_loaders(preset, tokenizer)
    assert [fingerprint(b) for b in loader] == [fingerprint(b) for b in stream]
    assert loader.ledger.state_dict() == stream.ledger.state_dict()
    assert not list(preset.glob("*.tar"))


@pytest.mark.slow
def test_images_stay_compressed_in_shards_and_train_the_very_batches_of_streaming(images, tokenizer):
    preset, expected, ledger, _ = images
    (loader,) = stored_loaders(preset, tokenizer)
    assert [fingerprint(b) for b in loader] == expected
    assert loader.ledger.state_dict() == ledger.state_dict()


@pytest.mark.slow
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


@pytest.mark.slow
def test_repeated_epochs_of_stored_data_are_those_of_data_that_is_read(images, tokenizer):
    preset, _, _, meta = images
    (loader,), (reading,) = stored_loaders(preset, tokenizer), preset_loaders(preset, meta, tokenizer)
    for epoch in (1, 2):
        loader.set_epoch(epoch)
        reading.set_epoch(epoch)
        assert [fingerprint(b) for b in loader] == [fingerprint(b) for b in reading]
        assert loader.ledger.state_dict() == reading.ledger.state_dict()


@pytest.mark.slow
def test_reader_processes_and_copies_of_the_dataset_read_stored_data(images, tokenizer):
    preset, expected, _, _ = images
    (loader,) = stored_loaders(preset, tokenizer, num_workers=2)
    assert [fingerprint(b) for b in loader] == expected
    dataset = pickle.loads(pickle.dumps(loader.packed_dataset))
    assert [fingerprint(b) for b in build_loader(dataset)] == expected


@pytest.mark.slow
def test_the_command_writes_the_data_and_tells_how_full_the_packs_are(text, tokenizer, tmp_path, capsys):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    command = ["plan", str(text[0]), "--out", str(tmp_path / "preset"), "--tokenizer", str(tmp_path / "tokenizer")]
    assert main([*command, "--workers", "0", "--max_packed_tokens", "300", "--materialise"]) == 0
    figures = Preset(tmp_path / "preset").content["statistics"]
    told = capsys.readouterr().out
    assert f"120 samples in {figures['packs']} packs of 300 tokens" in told and "refused: none" in told
    loader = build_loader(PresetDataset.open(tmp_path / "preset", None, tokenizer))
    assert sum(batch["num_real_tokens"] for batch in loader) == figures["tokens"]
    assert main([*command, "--packing_policy", "none"]) == 2
    assert "--packing_policy 'none' is unknown" in capsys.readouterr().err


@pytest.mark.slow
def test_augmented_images_and_parts_of_samples_are_those_of_the_stream(tokenizer, tmp_path):
    pytest.importorskip("simplejpeg")
    meta = write_jsonl(tmp_path / "data", 30, data_augment=True)
    config = {"num_images_expected": 7, "max_packed_tokens": 100}  # samples of two images are split
    config = replace(CONFIG, **config)
    filled(meta, tmp_path / "preset", tokenizer, config=config)
    stream = stream_loader(meta, tokenizer, config=config)
    (loader,) = stored_loaders(tmp_path / "preset", tokenizer, config=config)
    assert [fingerprint(b) for b in loader] == [fingerprint(b) for b in stream]
    assert loader.ledger.counts["samples_split"] > 5


@pytest.mark.slow
def test_events_name_the_samples_that_left_and_their_places(images, tokenizer):
    preset, _, _, meta = images
    (loader,), stream = stored_loaders(preset, tokenizer), stream_loader(meta, tokenizer, config=CONFIG)
    for each in (loader, stream):
        list(each)
    (event,), (expected,) = loader.take_events(), stream.take_events()
    assert str(meta.parent / event.pop("source")) == expected.pop("source")
    assert expected.pop("detail").endswith(event.pop("detail"))
    assert event == expected


@pytest.mark.slow
def test_a_stored_run_goes_on_with_other_ranks_and_from_the_one_that_reads_the_data(images, tokenizer):
    preset, _, _, meta = images

    def sets(steps):
        return [sorted(step) for step in steps]

    expected = sets(steps_of(stored_loaders(preset, tokenizer, accumulation=4)))
    reading = preset_loaders(preset, meta, tokenizer, ranks=2, accumulation=2)
    head = steps_of(reading, stop=4)
    single = stored_loaders(preset, tokenizer, accumulation=4)
    resume(single, saved(reading))
    assert sets(head + steps_of(single)) == expected
    four = stored_loaders(preset, tokenizer, ranks=4)
    resume(four, saved(reading))
    assert samples_of(four) == samples_of(stored_loaders(preset, tokenizer, accumulation=4))[4:]


def test_writing_the_data_goes_on_where_it_was_stopped_and_is_the_same_to_the_byte(
    images, tokenizer, tmp_path, monkeypatch
):
    preset, _, _, meta = images
    write_part, done = stored._write_part, []

    def stopped(preset, samples, work, epoch, part):
        if len(done) == 1:
            raise KeyboardInterrupt
        write_part(preset, samples, work, epoch, part)
        done.append(part)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stored, "_write_part", stopped)
        filled(meta, tmp_path / "again", tokenizer)
    assert done == [0] and (tmp_path / "again" / "work").is_dir()

    def counted(*args):
        write_part(*args)
        done.append(args[-1])

    monkeypatch.setattr(stored, "_write_part", counted)
    filled(meta, tmp_path / "again", tokenizer)
    assert done == list(range(-(-Preset(preset).num_packs(0) // stored.PART_PACKS))) and len(done) > 1
    assert files(tmp_path / "again") == files(preset)


def test_samples_that_changed_since_the_plan_leave_when_they_are_stored(tokenizer, tmp_path):
    meta = write_jsonl(tmp_path, 20)
    preset = planned(meta, tmp_path / "preset", tokenizer)
    path = sorted((tmp_path / "images").iterdir())[0]
    path.write_bytes(png(56, 336, 9))
    for _ in stored.materialise(preset, Samples.from_meta(meta, tokenizer, TINY)):
        pass
    (loader,) = stored_loaders(tmp_path / "preset", tokenizer)
    seen = {i for batch in loader for i in batch["sample_ids"]} - {FILLER_ID}
    assert f"made/{int(path.name[:5])}" not in seen and len(seen) == 19
    loader.ledger.check()
    (event,) = loader.take_events()
    assert event["reason"] == "changed_since_survey" and str(tmp_path) not in event["detail"]


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
