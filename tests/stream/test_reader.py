"""What a reader makes of its packs: rows within both budgets, whole samples in parts, and what leaves them by id."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import factory
from helpers import native_samples as native
from helpers.factory import TINY, write_jsonl, write_meta, write_shards
from helpers.loaders import fingerprint, resume, saved, segments_of, steps_of, stream_loaders
from PIL import Image

from internvl_pack import PackedDataset, PackingConfig, UserError, build_loader
from internvl_pack.checkpoints.encoding import encode_config
from internvl_pack.encode.sample import Encoder
from internvl_pack.plan.write_preset import plan_preset
from internvl_pack.samples import Samples
from internvl_pack.sources import load_meta
from internvl_pack.stream.preset_dataset import PresetDataset
from internvl_pack.stream.stored import materialise
from internvl_pack.survey.validate import Checker, validate

COUNT = 240
CONFIG = PackingConfig(max_packed_tokens=400, num_images_expected=16, max_buffer_size=8, seed=3)
loaders = partial(stream_loaders, config=CONFIG)


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("jsonl"), COUNT)


@pytest.mark.slow
def test_packs_keep_both_budgets_and_the_batch_contract(jsonl, tokenizer):
    for batch in loaders(jsonl, tokenizer)[0]:
        n = batch["num_tokens"]
        assert n <= CONFIG.max_packed_tokens and batch["num_tiles"] <= CONFIG.num_images_expected
        for key in ("input_ids", "labels", "position_ids", "loss_weight"):
            assert batch[key].shape == (1, n)
        cu = batch["cu_seqlens"]
        assert cu.dtype == torch.int32 and cu[0] == 0 and cu[-1] == n and bool((cu.diff() > 0).all())
        assert type(batch["max_seqlen"]) is int and batch["max_seqlen"] == int(cu.diff().max())
        starts = cu[:-1].long()
        assert bool((batch["labels"][0, starts] == -100).all())
        assert bool((batch["position_ids"][0, starts] == 0).all())
        assert bool(((batch["loss_weight"] == 0) == (batch["labels"] == -100)).all())
        assert batch["pixel_values"].shape == (batch["num_tiles"], 3, 56, 56)
        assert int(batch["image_offsets"][-1]) == int(batch["segment_tile_offsets"][-1]) == batch["num_tiles"]
        context = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
        assert int((batch["input_ids"] == context).sum()) == 4 * batch["num_tiles"]


# -- states ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("done", [0, 5])
def test_a_state_is_the_same_when_asked_twice_and_after_it_was_restored(done, jsonl, tokenizer):
    expected = [fingerprint(batch) for batch in loaders(jsonl, tokenizer)[0]]
    (loader,) = loaders(jsonl, tokenizer)
    iterator = iter(loader)
    for _ in range(done):
        next(iterator)
    state = json.dumps(loader.state_dict())
    assert json.dumps(loader.state_dict()) == state
    (again,) = loaders(jsonl, tokenizer)
    again.load_state_dict(json.loads(state))
    assert json.dumps(again.state_dict()) == state
    assert [fingerprint(batch) for batch in again] == expected[done:]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "workers"), [(4, 2), (1, 4), (8, 0)])
@pytest.mark.parametrize("stop", [1, 4])
def test_a_run_goes_to_other_ranks_and_back(ranks, workers, stop, jsonl, tokenizer):
    def made(count, num_workers=0):
        return loaders(jsonl, tokenizer, count, accumulation=8 // count, num_workers=num_workers)

    expected = [sorted(step) for step in steps_of(made(2))]
    first, second, third = made(2), made(ranks, workers), made(2)
    steps = steps_of(first, stop)
    resume(second, saved(first))
    steps += steps_of(second, 2)
    resume(third, saved(second))
    steps += steps_of(third)
    assert [sorted(step) for step in steps] == expected
    third[0].ledger.check()
    assert third[0].ledger.samples_packed == COUNT


def test_resume_with_other_data_is_refused(jsonl, tokenizer, tmp_path):
    (loader,) = loaders(jsonl, tokenizer)
    (other,) = loaders(write_jsonl(tmp_path, COUNT - 1), tokenizer)
    with pytest.raises(UserError, match="resume: meta was"):
        other.load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    "change", [{"max_dynamic_patch": 1}, {"data_augment": True}, {"repeat_time": 2}, {"weight": 0.5}]
)
def test_resume_with_another_meta_file_over_the_same_rows_is_refused(change, tokenizer, tmp_path):
    meta = write_jsonl(tmp_path, 20)
    (loader,) = loaders(meta, tokenizer)
    content = json.loads(meta.read_text())
    content["made"] |= change
    meta.write_text(json.dumps(content))
    (other,) = loaders(meta, tokenizer)
    with pytest.raises(UserError, match="resume: meta was"):
        other.load_state_dict(loader.state_dict())


# -- samples that leave ----------------------------------------------------------------------------------


def stopped_run(meta: Path, tokenizer, config: PackingConfig):
    """(ids of the batches after the stop, state at the stop, rows with an image that are in packs after it)."""
    (loader,) = loaders(meta, tokenizer, config=config, accumulation=2)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    packs = [segments_of(batch) for batch in iterator]
    waiting = state["plan"]["ledger"]["counts"]
    assert waiting["fragments_in"] > waiting["fragments_packed"], "samples wait in the state"
    images = meta.parent / "images"
    rows = [int(name.split("/")[1]) for pack in packs for name, _ in pack if len(pack) > 1]
    return packs, state, [row for row in rows if (images / f"{row:05d}_0.png").exists()]


@pytest.mark.slow
def test_a_waiting_sample_that_vanished_leaves_and_the_packs_to_come_stay(tokenizer, tmp_path):
    config = replace(CONFIG, max_packed_tokens=600)
    packs, state, rows = stopped_run(write_jsonl(tmp_path, 120), tokenizer, config)
    gone = rows[0]  # of the next pack: it waited
    (tmp_path / "images" / f"{gone:05d}_0.png").unlink()
    (loader,) = loaders(tmp_path / "meta.json", tokenizer, config=config, accumulation=2)
    loader.load_state_dict(state)
    expected = [[pair for pair in pack if pair[0] != f"made/{gone}"] for pack in packs]
    assert sum(map(len, expected)) < sum(map(len, packs))
    assert [segments_of(batch) for batch in loader] == expected
    loader.ledger.check()
    assert loader.ledger.samples_quarantined == 1
    (event,) = loader.take_events()
    assert (event["id"], event["reason"]) == (f"made/{gone}", "image_missing")

    (strict,) = loaders(tmp_path / "meta.json", tokenizer, config=replace(config, on_error="stop"), accumulation=2)
    strict.load_state_dict(state)
    with pytest.raises(UserError, match=f"made/{gone}: image_missing: "):
        list(strict)


def test_samples_with_bad_images_leave_by_id_and_the_rest_of_the_pack_goes_on(tokenizer, tmp_path):
    meta = write_jsonl(tmp_path, 40)
    images = sorted((tmp_path / "images").iterdir())
    cut, gone = images[3], images[9]
    cut.write_bytes(cut.read_bytes()[:-30])
    gone.unlink()
    (loader,) = loaders(meta, tokenizer)
    seen = Counter(name for batch in loader for name, _ in segments_of(batch))
    bad = {f"made/{int(path.name[:5])}" for path in (cut, gone)}
    assert set(seen) == {f"made/{row}" for row in range(40)} - bad
    events = loader.take_events()
    assert {event["id"] for event in events} == bad
    assert all(str(tmp_path) in event["detail"] for event in events)
    loader.ledger.check()


LEFT = {  # detail: source
    "lines": {
        "images/00000_0.png: the file ends before the picture does": "made.jsonl:line 1",
        "images/00001_0.png ends within its header": "made.jsonl:line 2",
        "'images/00002_0.png' has 0 bytes": "made.jsonl:line 3",
    },
    "shards": {
        "made-0000.tar:00000.0.png: the file ends before the picture does": "made-0000.tar:00000@0",
        "made-0000.tar:00001.0.png ends within its header": "made-0000.tar:00001@2048",
        "made-0000.tar:00002.0.png has 0 bytes": "made-0000.tar:00002@4096",
    },
}


@pytest.mark.parametrize("kind", LEFT)
def test_a_sample_that_leaves_names_its_record_and_its_image_once_each(kind, tokenizer, tmp_path, monkeypatch):
    made = iter(range(999))

    def cut(*size, keep=factory.png, **shade):
        data = keep(*size, **shade)
        return {0: data[:-40], 1: data[:20], 2: b""}.get(next(made), data)

    monkeypatch.setattr(factory, "png", cut)
    tmp_path /= "a: b"  # a path that holds what divides a message
    encoder, config = Encoder(tokenizer, TINY), PackingConfig()
    samples = Samples.from_specs(load_meta((write_jsonl if kind == "lines" else write_shards)(tmp_path, 20)), encoder)

    def places(left) -> dict[str, str]:
        return {detail.replace(f"{tmp_path}/", ""): source.replace(f"{tmp_path}/", "") for detail, source in left}

    def left_of(dataset: PackedDataset) -> dict[str, str]:
        loader = build_loader(dataset)
        assert sum(batch["num_samples"] for batch in loader) == 17
        return places((event["detail"], event["source"]) for event in loader.take_events())

    assert left_of(PackedDataset(samples, config=config)) == LEFT[kind]
    checker = Checker(samples, decode=True)
    assert places((bad.detail, bad.source) for _, part in validate(checker) for bad in part) == LEFT[kind]
    preset = plan_preset(tmp_path / "preset", samples, config)
    assert left_of(PresetDataset(preset, samples)) == LEFT[kind]
    assert list(materialise(preset, samples))
    stored = left_of(PresetDataset(preset, Samples((), (), encoder)))  # which knows the places of planning alone
    assert dict([*LEFT[kind].items()][1:]).items() <= stored.items()


@pytest.mark.parametrize("stage", ["surveyed", "decoded"])
def test_on_error_stop_ends_with_the_samples_name_and_place(stage, tokenizer, tmp_path):
    meta = write_jsonl(tmp_path, 20)
    image = min((tmp_path / "images").iterdir())
    content = image.read_bytes()
    image.unlink()
    if stage == "decoded":
        image.write_bytes(content[:-40])
    dataset = PackedDataset.from_meta(meta, tokenizer, PackingConfig(on_error="stop"), encode=TINY)
    with pytest.raises(UserError) as error:
        list(build_loader(dataset))
    row = int(image.name[:5])
    reason = "image_missing" if stage == "surveyed" else "image_truncated"
    assert str(error.value).startswith(f"made/{row}: {reason}: {tmp_path}/made.jsonl:line {row + 1}: ")
    assert str(error.value).count("made.jsonl") == 1


@pytest.mark.parametrize("has_meta_file", [True, False])
def test_where_no_image_is_found_the_folder_and_its_cure_are_named(has_meta_file, tokenizer, tmp_path):
    meta = write_jsonl(tmp_path, 40, root="imgaes")
    lines = (tmp_path / "made.jsonl").read_text().splitlines()
    (tmp_path / "made.jsonl").write_text("\n".join(line for line in lines if '"image"' in line))
    path, root = (meta, tmp_path / "imgaes") if has_meta_file else (tmp_path / "made.jsonl", tmp_path)
    (loader,) = loaders(path, tokenizer)
    with pytest.raises(UserError) as error:
        list(loader)
    cure = f"image names are joined to {root}; if they lie elsewhere, give that folder as 'root' in a meta file"
    assert str(error.value).count(cure) == 1 and "there is no file" in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["no picture", "cut"])
def test_a_dataset_in_which_nothing_loads_stops_the_run(fault, tokenizer, tmp_path):
    """Whether headers tell it, and nothing can be planned, or pixels do, when all of it is planned."""
    meta = write_jsonl(tmp_path, 100)
    for path in (tmp_path / "images").iterdir():
        path.write_bytes(b"<html>not found</html>" if fault == "no picture" else path.read_bytes()[:-40])
    lines = [json.loads(line) for line in (tmp_path / "made.jsonl").read_text().splitlines()]
    kept = [record for record in lines if "image" in record]
    (tmp_path / "made.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))
    (loader,) = loaders(meta, tokenizer, config=PackingConfig(), num_workers=1)
    with pytest.raises(UserError, match="dataset 'made': none of its first 32 samples can be used"):
        list(loader)


def test_the_share_of_bad_samples_is_of_those_lost_at_either_stage(tokenizer, tmp_path):
    meta = write_jsonl(tmp_path, 60)
    for path in sorted((tmp_path / "images").iterdir())[:12]:
        path.write_bytes(path.read_bytes()[:40])
    list(loaders(meta, tokenizer, config=replace(CONFIG, max_bad_fraction=0.5))[0])
    with pytest.raises(UserError, match=r"max_bad_fraction 0.05: \d+ of \d+ samples read are bad \(\d+ image_"):
        list(loaders(meta, tokenizer, config=replace(CONFIG, max_bad_fraction=0.05))[0])


# -- samples in parts ------------------------------------------------------------------------------------


@pytest.fixture
def long_sample(tmp_path):
    answer = " ".join(f"word{i}" for i in range(400))
    record = {"conversations": [{"from": "human", "value": "go"}, {"from": "gpt", "value": answer}]}
    (tmp_path / "long.jsonl").write_text(json.dumps(record) + "\n")
    return write_meta(tmp_path, {"long": {"root": "", "annotation": "long.jsonl"}})


@pytest.mark.parametrize("repeat", [False, True])
def test_a_long_sample_is_split_and_its_targets_are_all_trained(repeat, long_sample, tokenizer):
    config = PackingConfig(max_packed_tokens=200, repeat_system_prompt=repeat)
    dataset = PackedDataset.from_meta(long_sample, tokenizer, config, encode=TINY)
    encoded = dataset.samples.encode(0, 0)
    batches = list(build_loader(dataset, loss_reduction="sample"))
    assert len(batches) > 3
    assert sum(batch["num_loss_tokens"] for batch in batches) == encoded.record.num_loss_tokens
    assert sum(float(batch["loss_weight"].sum()) for batch in batches) == pytest.approx(1.0, rel=1e-5)
    by_part = sorted(batches, key=lambda batch: batch["fragments"][0])
    trained = [token for batch in by_part for token in batch["labels"][batch["labels"] != -100].tolist()]
    assert trained == encoded.labels[encoded.labels != -100].tolist()
    assert sum(batch["num_samples"] for batch in batches) == 1


def test_a_truncated_sample_weighs_as_a_whole_one(long_sample, tokenizer):
    config = PackingConfig(max_packed_tokens=200, oversize="truncate")
    (loader,) = loaders(long_sample, tokenizer, config=config, loss_reduction="sample")
    (batch,) = list(loader)
    assert batch["num_tokens"] == 200 and 0 < batch["num_loss_tokens"] < 100
    assert float(batch["loss_weight"].sum()) == pytest.approx(1.0, rel=1e-5)
    loader.ledger.check()
    assert loader.ledger.counts["tokens_cut_off"] > 1000


def test_so_does_one_with_a_picture_of_native_resolution(tmp_path):
    """Of which the survey knows what its pictures cost, and the encoder does not."""
    Image.new("RGB", (96, 64)).save(tmp_path / "a.png")
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "one two three " * 40}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"image": "a.png", "conversations": turns}) + "\n")
    (tmp_path / "meta.json").write_text(json.dumps({"a": {"root": "", "annotation": "a.jsonl"}}))
    encode = encode_config({"min_pixels": 1024}, native.checkpoint("qwen3_vl"))
    config = PackingConfig(max_packed_tokens=250, num_images_expected=60, oversize="truncate")
    tokenizer = native.native_tokenizer()
    dataset = PackedDataset.from_meta(str(tmp_path / "meta.json"), tokenizer, config, encode=encode)
    (batch,) = list(build_loader(dataset))
    assert (batch["num_tokens"], batch["image_grids"]) == (250, [(2, 3)])
