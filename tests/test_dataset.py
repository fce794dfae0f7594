"""From sources to batches in one process: the global order on every topology, exactly once, resume."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import factory
import pytest
import torch
from factory import TINY, write_jsonl, write_meta, write_shards

from internvl_pack.config import PackingConfig, auto_lanes
from internvl_pack.dataset import PackedDataset
from internvl_pack.encode.sample import Encoder
from internvl_pack.errors import UserError
from internvl_pack.loader import PackLoader, build_loader, merge_states
from internvl_pack.materialise import materialise
from internvl_pack.planning import plan_preset
from internvl_pack.preset_dataset import PresetDataset
from internvl_pack.sources import load_meta, open_source
from internvl_pack.validate import Checker, validate

COUNT = 240
CONFIG = PackingConfig(max_packed_tokens=400, num_images_expected=16, max_buffer_size=8, num_lanes=64, seed=3)


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("jsonl"), COUNT)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards"), COUNT)


def loaders(meta, tokenizer, ranks=1, workers=0, config=CONFIG, packs_per_batch=1) -> list[PackLoader]:
    """A loader a rank, workers run in this process where `workers` is 0."""
    return [
        build_loader(
            PackedDataset.from_meta(meta, tokenizer, config, encode=TINY, rank=rank, world_size=ranks),
            num_workers=workers,
            packs_per_batch=packs_per_batch,
        )
        for rank in range(ranks)
    ]


def fingerprint(batch: dict[str, Any]) -> str:
    """Ids and every tensor of a batch."""
    h = hashlib.sha256(json.dumps([batch["sample_ids"], batch["fragments"]]).encode())
    for key in ("input_ids", "labels", "position_ids", "loss_weight", "cu_seqlens", "pixel_values", "image_offsets"):
        h.update(batch[key].numpy().tobytes())
    return h.hexdigest()[:16]


def grid_sequence(meta, tokenizer, ranks: int, workers: int, config=CONFIG) -> list[str]:
    """The global sequence of packs as a grid of readers hands them out, each reader driven by hand."""
    from internvl_pack.collate import packed_collate_fn
    from internvl_pack.lanes import Topology

    topology = Topology(num_lanes=config.num_lanes, num_ranks=ranks, num_workers=workers)
    readers = {}
    for rank in range(ranks):
        dataset = PackedDataset.from_meta(meta, tokenizer, config, encode=TINY, rank=rank, world_size=ranks)
        for worker in range(topology.num_readers):
            readers[rank, worker] = dataset.read_lanes(topology.reader_lanes(rank, worker), 0, {})
    out, ended = [], set()
    step = 0
    while len(ended) < len(readers):
        for rank in range(ranks):
            row = next(readers[rank, step % topology.num_readers])
            if row.exhausted:
                ended.add((rank, step % topology.num_readers))
            out.append(fingerprint(packed_collate_fn([row], image_size=56)) if row.segments else "-")
        step += 1
    while out[-1] == "-":
        out.pop()
    return out


@pytest.mark.parametrize("kind", ["jsonl", "shards"])
def test_every_grid_of_ranks_and_workers_gives_one_global_sequence(kind, tokenizer, request):
    meta = request.getfixturevalue(kind)
    expected = grid_sequence(meta, tokenizer, 1, 1)
    assert len([x for x in expected if x != "-"]) > 40
    for ranks, workers in ((1, 4), (2, 2), (4, 2), (8, 8), (64, 1)):
        assert grid_sequence(meta, tokenizer, ranks, workers) == expected, (ranks, workers)


@pytest.mark.parametrize("kind", ["jsonl", "shards"])
def test_two_ranks_with_two_workers_see_each_sample_once_an_epoch(kind, tokenizer, request):
    meta = request.getfixturevalue(kind)
    sequences = []
    for epoch in range(2):
        seen: Counter[str] = Counter()
        for loader in loaders(meta, tokenizer, ranks=2, workers=2):
            loader.set_epoch(epoch)
            for batch in loader:
                seen.update(i for i in batch["sample_ids"] if not i.startswith("<"))
            loader.ledger.check()
        assert len(seen) == COUNT
        assert set(seen.values()) == {1}
        sequences.append(list(seen))
    assert sequences[0] != sequences[1]


def test_plain_dataloaders_see_each_sample_once_too(jsonl, tokenizer):
    from torch.utils.data import DataLoader

    from internvl_pack import packed_collate_fn

    seen: Counter[str] = Counter()
    for rank in range(2):
        dataset = PackedDataset.from_meta(jsonl, tokenizer, CONFIG, encode=TINY, rank=rank, world_size=2)
        for batch in DataLoader(dataset, batch_size=2, num_workers=2, collate_fn=packed_collate_fn):
            seen.update(batch["sample_ids"])
    assert len(seen) == COUNT and set(seen.values()) == {1}


def test_real_workers_give_the_sequence_of_the_main_process(jsonl, tokenizer):
    expected = [fingerprint(b) for b in loaders(jsonl, tokenizer)[0]]
    for workers in (1, 4):
        assert [fingerprint(b) for b in loaders(jsonl, tokenizer, workers=workers)[0]] == expected


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


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_resume_after_seven_packs_continues_with_the_next(workers, jsonl, tokenizer):
    expected = [fingerprint(b) for b in loaders(jsonl, tokenizer, workers=workers)[0]]
    first = loaders(jsonl, tokenizer, workers=workers)[0]
    iterator = iter(first)
    for _ in range(7):
        next(iterator)
    state = json.loads(json.dumps(first.state_dict()))
    second = loaders(jsonl, tokenizer, workers=workers)[0]
    second.load_state_dict(state)
    assert [fingerprint(b) for b in second] == expected[7:]
    second.ledger.check()
    assert second.ledger.state_dict() == _drained(jsonl, tokenizer).ledger.state_dict()


def _drained(meta, tokenizer) -> PackLoader:
    loader = loaders(meta, tokenizer)[0]
    for _ in loader:
        pass
    return loader


@pytest.mark.parametrize("when", ["before the first pack", "after the last", "after a restore", "twice in a row"])
def test_states_saved_at_the_edges_restore(when, jsonl, tokenizer):
    expected = [fingerprint(b) for b in loaders(jsonl, tokenizer)[0]]
    loader = loaders(jsonl, tokenizer)[0]
    done = 0
    if when == "after the last":
        done = sum(1 for _ in loader)
    elif when == "twice in a row":
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        assert loader.state_dict() == loader.state_dict()
        done = 5
    elif when == "after a restore":
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        again = loaders(jsonl, tokenizer)[0]
        again.load_state_dict(loader.state_dict())
        assert again.state_dict() == loader.state_dict()
        loader, done = again, 5
    restored = loaders(jsonl, tokenizer)[0]
    restored.load_state_dict(loader.state_dict())
    assert [fingerprint(b) for b in restored] == expected[done:]
    restored.set_epoch(1)
    fresh = loaders(jsonl, tokenizer)[0]
    fresh.set_epoch(1)
    assert [fingerprint(b) for b in restored] == [fingerprint(b) for b in fresh]


def in_step(ranks: list[PackLoader], steps: int | None = None) -> list[str]:
    """Global packs as ranks in lockstep train them; ranks that have ended give fillers."""
    iterators = [iter(loader) for loader in ranks]
    out: list[str] = []
    for step in range(10**6):
        if step == steps:
            break
        batches = [next(it, None) for it in iterators]
        if all(b is None for b in batches):
            break
        for loader, batch in zip(ranks, batches, strict=True):
            batch = batch if batch is not None else loader.filler_batch()
            out.append(fingerprint(batch) if batch["num_samples"] or batch["num_segments"] else "-")
    while out and steps is None and out[-1] == "-":
        out.pop()
    return out


@pytest.mark.parametrize(("ranks", "workers"), [(4, 2), (1, 4), (2, 0), (8, 1), (1, 0)])
@pytest.mark.parametrize("steps", [3, 22])
def test_a_state_of_two_ranks_goes_on_with_any_other_count_and_back(ranks, workers, steps, jsonl, tokenizer):
    config = PackingConfig(max_packed_tokens=400, num_images_expected=16, max_buffer_size=8, num_lanes=8, seed=3)
    expected = in_step(loaders(jsonl, tokenizer, config=config))
    first = loaders(jsonl, tokenizer, ranks=2, config=config)
    head = in_step(first, steps=steps)
    second = loaders(jsonl, tokenizer, ranks=ranks, workers=workers, config=config)
    resume(second, saved(first))
    middle = in_step(second, steps=8 // ranks)
    third = loaders(jsonl, tokenizer, ranks=2, config=config)
    resume(third, saved(second))
    assert head + middle + in_step(third) == expected
    totals = [loader.ledger for loader in third]
    totals[0].merged(totals[1]).check()
    assert totals[0].merged(totals[1]).samples_packed == COUNT


def saved(ranks: list[PackLoader]) -> dict[str, Any]:
    return json.loads(json.dumps(merge_states([loader.state_dict() for loader in ranks])))


def resume(ranks: list[PackLoader], state: dict[str, Any]) -> None:
    for loader in ranks:
        loader.load_state_dict(state)


def test_reader_counts_that_do_not_divide_the_lanes_are_refused_before_the_first_batch(jsonl, tokenizer):
    with pytest.raises(UserError, match=r"num_lanes 64 is not divisible by 2 ranks x 3 workers.*1, 2, 4, 8"):
        loaders(jsonl, tokenizer, ranks=2, workers=3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 4}, "seed"),
        ({"max_packed_tokens": 401}, "max_packed_tokens"),
        ({"num_images_expected": 17}, "num_images_expected"),
        ({"num_lanes": 32}, "num_lanes"),
    ],
)
def test_resume_with_other_options_is_refused_by_name(change, named, jsonl, tokenizer):
    from dataclasses import replace

    loader = loaders(jsonl, tokenizer)[0]
    next(iter(loader))
    other = loaders(jsonl, tokenizer, config=replace(CONFIG, **change))[0]
    with pytest.raises(UserError, match=f"resume: {named} was"):
        other.load_state_dict(loader.state_dict())


def waiting_samples(state: dict[str, Any]) -> set[int]:
    """Positions of the samples that wait in a saved state."""
    packers = [lane["packer"] for lane in state["lanes"].values()]
    held = [entry["keys"] for p in packers for entry in p["reservoir"]]
    return {key[0] for keys in (*(p["waiting"] for p in packers), *held) for key in keys}


def stopped_run(folder, tokenizer, config: PackingConfig) -> tuple[list[dict[str, Any]], dict[str, Any], list[int]]:
    """(batches after the stop, state at the stop, rows of samples with an image that waited in it)."""
    meta = write_jsonl(folder, 120)
    (whole,) = loaders(meta, tokenizer, config=config)
    iterator = iter(whole)
    for _ in range(5):
        next(iterator)
    state = json.loads(json.dumps(whole.state_dict()))
    mixture = whole.packed_dataset.mixture(0)
    rows = sorted(mixture.locate(position)[1] for position in waiting_samples(state))
    return list(iterator), state, [row for row in rows if (folder / "images" / f"{row:05d}_0.png").exists()]


SMALL = replace(CONFIG, max_packed_tokens=600, num_lanes=2)


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, balance_reservoir=3)], ids=["plain", "reservoir"])
def test_a_waiting_sample_that_vanished_leaves_and_the_packs_to_come_stay(config, tokenizer, tmp_path):
    expected, state, rows = stopped_run(tmp_path, tokenizer, config)
    gone = next(r for r in rows if all(len(b["sample_ids"]) > 1 for b in expected if f"made/{r}" in b["sample_ids"]))
    (tmp_path / "images" / f"{gone:05d}_0.png").unlink()
    (loader,) = loaders(tmp_path / "meta.json", tokenizer, config=config)
    loader.load_state_dict(state)
    names = [list(zip(b["sample_ids"], b["fragments"], strict=True)) for b in expected]
    left = [[entry for entry in pack if entry[0] != f"made/{gone}"] for pack in names]
    assert sum(map(len, left)) < sum(map(len, names))
    assert [list(zip(b["sample_ids"], b["fragments"], strict=True)) for b in loader] == [pack for pack in left if pack]
    loader.ledger.check()
    assert loader.ledger.samples_quarantined == 1
    (event,) = {event["id"]: event for event in loader.take_events()}.values()
    assert event["id"] == f"made/{gone}" and event["reason"] == "image_missing"


def test_a_waiting_sample_that_vanished_or_changed_is_refused_where_it_cannot_be_made_good(tokenizer, tmp_path):
    _, state, rows = stopped_run(tmp_path, tokenizer, SMALL)
    image = tmp_path / "images" / f"{rows[0]:05d}_0.png"
    image.rename(tmp_path / "kept.png")
    (loader,) = loaders(tmp_path / "meta.json", tokenizer, config=replace(SMALL, on_error="stop"))
    loader.load_state_dict(state)
    with pytest.raises(UserError, match=f"resume: made/{rows[0]} waited in the saved state"):
        next(iter(loader))
    (tmp_path / "kept.png").rename(image)
    lines = (tmp_path / "made.jsonl").read_text().splitlines(keepends=True)
    lines[rows[0]] = lines[rows[0]].replace('"gpt", "value": "', '"gpt", "value": "more ')
    (tmp_path / "made.jsonl").write_text("".join(lines))
    (loader,) = loaders(tmp_path / "meta.json", tokenizer, config=SMALL)
    loader.load_state_dict(state)
    with pytest.raises(UserError, match=f"resume: made/{rows[0]} has changed since"):
        next(iter(loader))


def test_resume_with_other_data_is_refused(jsonl, tokenizer, tmp_path):
    loader = loaders(jsonl, tokenizer)[0]
    other = loaders(write_jsonl(tmp_path, COUNT - 1), tokenizer)[0]
    with pytest.raises(UserError, match="resume: meta was"):
        other.load_state_dict(loader.state_dict())


@pytest.mark.parametrize("change", [{"max_dynamic_patch": 1}, {"data_augment": True}, {"annotation": "other.jsonl"}])
def test_resume_with_another_meta_file_over_as_many_rows_is_refused(change, tokenizer, tmp_path):
    meta = write_jsonl(tmp_path, 20)
    (loader,) = loaders(meta, tokenizer)
    (tmp_path / "other.jsonl").write_bytes((tmp_path / "made.jsonl").read_bytes())
    content = json.loads(meta.read_text())
    content["made"] |= change
    meta.write_text(json.dumps(content))
    (other,) = loaders(meta, tokenizer)
    with pytest.raises(UserError, match="resume: meta was"):
        other.load_state_dict(loader.state_dict())


def test_more_readers_than_shards_share_the_samples(tokenizer, tmp_path):
    meta = write_shards(tmp_path, 15, per_shard=5)
    config = PackingConfig(max_packed_tokens=400, num_images_expected=16, num_lanes=8)
    seen: Counter[str] = Counter()
    steps = []
    for loader in loaders(meta, tokenizer, ranks=2, workers=4, config=config):
        batches = list(loader)
        steps.append(len(batches))
        seen.update(i for b in batches for i in b["sample_ids"] if not i.startswith("<"))
    assert len(seen) == 15 and set(seen.values()) == {1}


def test_a_dataset_that_has_ended_an_epoch_saves_nothing_of_it_for_the_next(jsonl, tokenizer):
    dataset = PackedDataset.from_meta(jsonl, tokenizer, CONFIG, encode=TINY)
    assert list(dataset)
    dataset.set_epoch(1)
    state = json.loads(json.dumps(dataset.state_dict()))
    restored = PackedDataset.from_meta(jsonl, tokenizer, CONFIG, encode=TINY)
    restored.load_state_dict(state)
    assert [[s.sample_id for s in row.segments] for row in restored] == [
        [s.sample_id for s in row.segments] for row in dataset
    ]


def test_persistent_workers_hear_of_the_next_epoch(jsonl, tokenizer):
    orders = []
    for _ in range(2):
        dataset = PackedDataset.from_meta(jsonl, tokenizer, CONFIG, encode=TINY)
        loader = build_loader(dataset, num_workers=2, persistent_workers=True)
        for epoch in range(2):
            loader.set_epoch(epoch)
            orders.append([fingerprint(b) for b in loader])
    assert orders[0] == orders[2] and orders[1] == orders[3] and orders[0] != orders[1]


def test_samples_with_bad_images_leave_by_id_and_the_rest_of_the_pack_goes_on(tokenizer, tmp_path):
    meta = write_jsonl(tmp_path, 40)
    images = sorted((tmp_path / "images").iterdir())
    cut, gone = images[3], images[9]
    cut.write_bytes(cut.read_bytes()[:-30])
    gone.unlink()
    dataset = PackedDataset.from_meta(
        meta, tokenizer, PackingConfig(max_packed_tokens=400, num_images_expected=16), encode=TINY
    )
    loader = build_loader(dataset)
    seen = Counter(i for b in loader for i in b["sample_ids"])
    bad = {f"made/{int(p.name[:5])}" for p in (cut, gone)}
    assert set(seen) == {f"made/{i}" for i in range(40)} - bad
    events = loader.take_events()
    assert {e["id"] for e in events} == bad
    assert all(str(tmp_path) in e["detail"] for e in events)
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
    specs = load_meta((write_jsonl if kind == "lines" else write_shards)(tmp_path, 20))
    sources = [open_source(spec) for spec in specs]
    encoder, config = Encoder(tokenizer, TINY), PackingConfig(num_lanes=1)

    def places(left) -> dict[str, str]:
        return {detail.replace(f"{tmp_path}/", ""): source.replace(f"{tmp_path}/", "") for detail, source in left}

    loader = build_loader(PackedDataset(sources, encoder, config, specs=specs))
    assert sum(batch["num_samples"] for batch in loader) == 17
    assert places((event["detail"], event["source"]) for event in loader.take_events()) == LEFT[kind]
    checker = Checker(sources, specs, encoder, decode=True)
    assert places((bad.detail, bad.source) for _, part in validate(checker) for bad in part) == LEFT[kind]
    preset = plan_preset(tmp_path / "preset", specs, sources, encoder, config)
    loader = build_loader(PresetDataset(preset, sources, encoder, specs=specs))
    assert sum(batch["num_samples"] for batch in loader) == 17
    assert places((event["detail"], event["source"]) for event in loader.take_events()) == LEFT[kind]
    assert list(materialise(preset, sources, specs, encoder))
    loader = build_loader(PresetDataset(preset, None, encoder))  # which knows the places of planning alone
    assert sum(batch["num_samples"] for batch in loader) == 17
    stored = places((event["detail"], event["source"]) for event in loader.take_events())
    assert dict([*LEFT[kind].items()][1:]).items() <= stored.items()


@pytest.mark.parametrize("stage", ["planned", "decoded"])
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
    reason = "image_missing" if stage == "planned" else "image_truncated"
    assert str(error.value).startswith(f"made/{row}: {reason}: {tmp_path}/made.jsonl:line {row + 1}: ")
    assert str(error.value).count("made.jsonl") == 1


def test_a_dataset_in_which_nothing_loads_stops_the_run(tokenizer, tmp_path):
    meta = write_jsonl(tmp_path, 100)
    for path in (tmp_path / "images").iterdir():
        path.write_bytes(b"<html>not found</html>")
    lines = [json.loads(line) for line in (tmp_path / "made.jsonl").read_text().splitlines()]
    kept = [r for r in lines if "image" in r]
    (tmp_path / "made.jsonl").write_text("".join(json.dumps(r) + "\n" for r in kept))
    dataset = PackedDataset.from_meta(meta, tokenizer, PackingConfig(), encode=TINY)
    with pytest.raises(UserError, match="dataset 'made': none of its first 32 samples can be used"):
        list(build_loader(dataset, num_workers=1))


def test_a_long_sample_is_split_and_its_targets_are_all_trained(tokenizer, tmp_path):
    answer = " ".join(f"word{i}" for i in range(400))
    record = {"conversations": [{"from": "human", "value": "go"}, {"from": "gpt", "value": answer}]}
    (tmp_path / "long.jsonl").write_text(json.dumps(record) + "\n")
    meta = write_meta(tmp_path, {"long": {"root": "", "annotation": "long.jsonl"}})
    for repeat in (False, True):
        config = PackingConfig(max_packed_tokens=200, repeat_system_prompt=repeat)
        dataset = PackedDataset.from_meta(meta, tokenizer, config, encode=TINY)
        raw = dataset.sources[0].read(0)
        encoded = dataset.encoder.encode(raw, dataset.specs[0])
        batches = list(build_loader(dataset, loss_reduction="sample"))
        assert len(batches) > 3
        assert sum(b["num_loss_tokens"] for b in batches) == encoded.record.num_loss_tokens
        assert sum(float(b["loss_weight"].sum()) for b in batches) == pytest.approx(1.0, rel=1e-5)
        trained = [t for b in batches for t in b["labels"][b["labels"] != -100].tolist()]
        assert trained == encoded.labels[encoded.labels != -100].tolist()
        assert sum(b["num_samples"] for b in batches) == 1


def test_auto_lanes_follow_the_data_and_fit_the_readers():
    assert [auto_lanes(n) for n in (1, 511, 1024, 5000, 10**6)] == [1, 1, 2, 8, 64]
    assert auto_lanes(100, 2, 3) == 6
    assert auto_lanes(10**6, 8, 8) == 64
    assert auto_lanes(10**6, 3) == 66


def test_too_large_a_share_of_bad_samples_stops_the_run(tokenizer, tmp_path):
    meta = write_jsonl(tmp_path, 60)
    for path in sorted((tmp_path / "images").iterdir())[:12]:
        path.write_bytes(path.read_bytes()[:40])
    config = PackingConfig(max_packed_tokens=400, num_images_expected=16, max_bad_fraction=0.5)
    list(build_loader(PackedDataset.from_meta(meta, tokenizer, config, encode=TINY)))
    config = PackingConfig(max_packed_tokens=400, num_images_expected=16, max_bad_fraction=0.05)
    with pytest.raises(UserError, match=r"max_bad_fraction 0.05: \d+ of 60 samples read are bad \(\d+ image_"):
        list(build_loader(PackedDataset.from_meta(meta, tokenizer, config, encode=TINY)))


def test_a_truncated_sample_weighs_as_a_whole_one(tokenizer, tmp_path):
    answer = " ".join(f"word{i}" for i in range(400))
    record = {"conversations": [{"from": "human", "value": "go"}, {"from": "gpt", "value": answer}]}
    (tmp_path / "long.jsonl").write_text(json.dumps(record) + "\n")
    meta = write_meta(tmp_path, {"long": {"root": "", "annotation": "long.jsonl"}})
    config = PackingConfig(max_packed_tokens=200, oversize="truncate")
    dataset = PackedDataset.from_meta(meta, tokenizer, config, encode=TINY)
    loader = build_loader(dataset, loss_reduction="sample")
    (batch,) = list(loader)
    assert batch["num_tokens"] == 200 and 0 < batch["num_loss_tokens"] < 100
    assert float(batch["loss_weight"].sum()) == pytest.approx(1.0, rel=1e-5)
    loader.ledger.check()
    assert loader.ledger.counts["tokens_cut_off"] > 1000
