"""Arrays that are used again: never while anyone still looks at them."""

from __future__ import annotations

import numpy as np
import torch
from helpers.factory import TINY, write_jsonl

from internvl_pack import PackedDataset, PackingConfig, build_loader
from internvl_pack.batch.collate import packed_collate_fn
from internvl_pack.batch.row import PackRow, Segment
from internvl_pack.stream.buffers import TileBuffers

SHAPE = (6, 3, 8, 8)


def address(array) -> int:
    return array.__array_interface__["data"][0]


def test_a_buffer_is_used_again_when_nobody_holds_it():
    pool = TileBuffers()
    first = pool.take(SHAPE)
    place = address(first)
    del first
    assert address(pool.take(SHAPE)) == place
    assert address(pool.take((4, 3, 8, 8))) == place, "for fewer tiles too"


def row_of(tiles: np.ndarray) -> PackRow:
    ids = np.arange(5, dtype=np.int32)
    return PackRow([Segment("a/0", (0, 1), ids, ids, tiles, (len(tiles),), 4)], tiles)


def test_views_and_tensors_keep_it():
    pool = TileBuffers()
    holders = {
        "a slice": lambda array: array[2:3],
        "a slice of a slice": lambda array: array[2:5][:1],
        "a tensor": torch.from_numpy,
        "a slice of a tensor": lambda array: torch.from_numpy(array)[1:2],
        "the batch of a row": lambda array: packed_collate_fn([row_of(array)], image_size=8)["pixel_values"],
    }
    for name, hold in holders.items():
        held = hold(pool.take(SHAPE))
        held[:] = 7
        other = pool.take(SHAPE)
        other[:] = 9
        assert (np.asarray(held) == 7).all(), name
        del held, other


def test_few_are_kept_and_larger_ones_take_their_place():
    pool = TileBuffers(max_kept=2)
    held = [pool.take((n, 3, 8, 8)) for n in (1, 2, 3, 4, 5)]
    assert [len(buffer) // 192 for buffer in pool._kept] == [4, 5]
    assert len({address(array) for array in held}) == 5


def test_batches_that_the_user_keeps_stay_as_they_are(tmp_path, tokenizer):
    dataset = PackedDataset.from_meta(
        write_jsonl(tmp_path, 60), tokenizer, PackingConfig(max_packed_tokens=150), encode=TINY
    )
    kept, copies = [], []
    for batch in build_loader(dataset):
        kept.append(batch["pixel_values"])
        copies.append(batch["pixel_values"].clone())
    assert len(kept) > 10
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
