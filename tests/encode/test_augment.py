"""`data_augment` from the meta file to the batch: applied, seeded by sample and epoch, the same after a resume."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.encode_samples import file_of, smooth_pixels
from helpers.factory import TINY, write_meta

from internvl_pack import PackedDataset, PackingConfig, build_loader

COUNT = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One annotation file, named by two datasets: one re-compressed, one not."""
    folder = tmp_path_factory.mktemp("augmented")
    with open(folder / "rows.jsonl", "w", encoding="utf-8") as lines:
        for i in range(COUNT):
            (folder / f"{i}.png").write_bytes(file_of(smooth_pixels(56 + 13 * (i % 4), 70)))
            turns = [{"from": "human", "value": "<image>\nq"}, {"from": "gpt", "value": "a" * (i + 1)}]
            lines.write(json.dumps({"image": f"{i}.png", "conversations": turns}) + "\n")
    spec = {"root": ".", "annotation": "rows.jsonl"}
    write_meta(folder, {"changed": spec | {"data_augment": True}, "plain": spec})
    return folder


def loader_of(folder, tokenizer, workers: int = 0):
    config = PackingConfig(max_packed_tokens=200, max_buffer_size=4)
    return build_loader(
        PackedDataset.from_meta(folder / "meta.json", tokenizer, config, encode=TINY), num_workers=workers
    )


def tiles_of(batches) -> dict[str, torch.Tensor]:
    tiles = {}
    for batch in batches:
        offsets = batch["segment_tile_offsets"].tolist()
        for number, sample_id in enumerate(batch["sample_ids"]):
            tiles[sample_id] = batch["pixel_values"][offsets[number] : offsets[number + 1]].clone()
    return tiles


def test_only_the_dataset_that_asks_for_it_is_changed(folder, tokenizer):
    tiles = tiles_of(loader_of(folder, tokenizer))
    assert len(tiles) == 2 * COUNT
    for i in range(COUNT):
        changed, plain = tiles[f"changed/{i}"].int(), tiles[f"plain/{i}"].int()
        assert 0 < (changed - plain).abs().float().mean() < 8


@pytest.mark.slow
def test_epochs_differ_and_repeat(folder, tokenizer):
    loader = loader_of(folder, tokenizer)
    epochs = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        epochs.append(tiles_of(loader))
    for i in range(COUNT):
        assert torch.equal(epochs[0][f"plain/{i}"], epochs[1][f"plain/{i}"])
        assert torch.equal(epochs[0][f"changed/{i}"], epochs[2][f"changed/{i}"])
    assert any(not torch.equal(epochs[0][f"changed/{i}"], epochs[1][f"changed/{i}"]) for i in range(COUNT))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_sees_the_same_pixels(folder, tokenizer, workers):
    whole = loader_of(folder, tokenizer)
    whole.set_epoch(3)
    expected = tiles_of(whole)
    first = loader_of(folder, tokenizer)
    first.set_epoch(3)
    batches = iter(first)
    before = tiles_of([next(batches), next(batches)])
    resumed = loader_of(folder, tokenizer, workers)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    after = tiles_of(resumed)
    assert before.keys().isdisjoint(after) and before.keys() | after.keys() == expected.keys()
    for sample_id, tiles in (before | after).items():
        assert torch.equal(tiles, expected[sample_id])
