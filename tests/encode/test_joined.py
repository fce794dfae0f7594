"""Neighbouring rows that begin alike become trees, and each row stays what it is alone."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from helpers.factory import TINY, write_shards
from helpers.rows_alike import BAD, JOINED, ROWS, as_table, write

from internvl_pack.config import PackingConfig
from internvl_pack.encode.joined import MAX_ROWS, JoinedSource
from internvl_pack.encode.sample import Encoder
from internvl_pack.errors import SampleError, UserError
from internvl_pack.samples import Samples
from internvl_pack.sources.hf import DatasetSource


def packing(tokens=250):
    return PackingConfig(max_packed_tokens=tokens, num_images_expected=16, share_prefix=True)


ROOM = packing()


def opened(kind, tokenizer, folder, **changes) -> Samples:
    encoder = Encoder(tokenizer, replace(TINY, **changes))
    if kind == "table":
        return Samples.of([DatasetSource("made", as_table())], encoder)
    return Samples.from_meta(write(folder, kind), tokenizer, replace(TINY, **changes))


def rows_of(source: JoinedSource) -> list[list[int]]:
    return [list(source.rows(row)) for row in range(len(source))]


@pytest.mark.parametrize("kind", ["jsonl", "shards", "table"])
def test_rows_are_joined_where_they_begin_alike(kind, tokenizer, tmp_path):
    samples = opened(kind, tokenizer, tmp_path)
    joined = samples.joined(ROOM, None)
    (source,) = joined.sources
    assert rows_of(source) == JOINED and joined.num_rows == len(JOINED)
    assert joined.joined(ROOM, None).sources == joined.sources
    for row, rows in enumerate(JOINED):
        assert joined.sample_id(0, row) == samples.sample_id(0, rows[0])
        assert joined.origin(0, row) == samples.origin(0, rows[0])
        if rows == [BAD]:
            with pytest.raises(SampleError, match="no_trained_token"):
                joined.encode(0, row)
            continue
        tree = joined.encode(0, row)
        if len(rows) == 1:
            np.testing.assert_array_equal(tree.input_ids, samples.encode(0, rows[0]).input_ids)
            continue
        alone = [samples.encode(0, each) for each in rows]
        assert [b.sample_id for b in tree.branches] == [one.record.sample_id for one in alone]
        assert [(b.weight, b.reward) for b in tree.branches] == [(1.0, None)] * len(rows)
        at = prefix = tree.record.num_prefix_tokens
        for branch, one in zip(tree.branches, alone, strict=True):
            part = slice(at, at := at + branch.num_tokens)
            for mine, theirs in ((tree.input_ids, one.input_ids), (tree.labels, one.labels)):
                np.testing.assert_array_equal(np.concatenate([mine[:prefix], mine[part]]), theirs)
            assert branch.num_loss_tokens == one.record.num_loss_tokens
        assert at == tree.record.num_tokens and not tree.record.is_pair
        tiles = [joined.encoder.decode(each) for each in (tree, *alone)]
        assert all((each == tiles[0]).all() for each in tiles)


def test_the_content_mark_says_which_rows_are_joined(tokenizer, tmp_path):
    samples = opened("jsonl", tokenizer, tmp_path)
    (plain,) = samples.sources
    (one,), (again,), (other,) = (samples.joined(room, None).sources for room in (ROOM, ROOM, packing(4096)))
    assert one.content == again.content == pickle.loads(pickle.dumps(one)).content
    assert len({plain.content, one.content, other.content}) == 3
    assert [17, 18, 19] in [rows[-3:] for rows in rows_of(other)]  # with room for the long one


def test_no_more_than_so_many_rows_are_joined_and_none_over_the_border_of_two_shards(tokenizer, tmp_path):
    table = [as_table()[0]] * (2 * MAX_ROWS + 3)
    encoder = Encoder(tokenizer, TINY)
    (source,) = Samples.of([DatasetSource("made", table)], encoder).joined(ROOM, None).sources
    assert list(map(len, rows_of(source))) == [MAX_ROWS, MAX_ROWS, 3]

    samples = Samples.from_meta(write_shards(tmp_path, 40, per_shard=10), tokenizer, TINY)
    (sharded,) = samples.joined(ROOM, None).sources
    starts = [rows[0] for rows in rows_of(sharded)]
    assert [starts[start] for start in sharded.block_starts[:-1]] == [0, 10, 20, 30]
    assert sharded.block_starts[-1] == len(sharded)


def test_what_was_found_is_kept_and_damage_is_found_anew(tokenizer, tmp_path, monkeypatch):
    samples = opened("jsonl", tokenizer, tmp_path / "data")
    cache = tmp_path / "cache"
    (found,) = samples.joined(ROOM, cache).sources
    (kept,) = (cache / "joined").iterdir()
    with monkeypatch.context() as patched:
        patched.setattr("internvl_pack.encode.joined._starts", None)  # nobody looks again
        (again,) = samples.joined(ROOM, cache).sources
        assert rows_of(again) == rows_of(found) == JOINED and again.content == found.content
        for other in ((packing(249), {}), (ROOM, {"use_thumbnail": False})):
            with pytest.raises(TypeError):
                opened("jsonl", tokenizer, tmp_path / "data", **other[1]).joined(other[0], cache)
    whole = kept.read_bytes()
    for damage in (b"", whole[:-8], whole[:-8] + b"\0" * 8, b"no array"):
        kept.write_bytes(damage)
        (again,) = samples.joined(ROOM, cache).sources
        assert rows_of(again) == JOINED and kept.read_bytes() == whole


def test_what_is_drawn_by_the_rows_id_is_not_joined(tokenizer, tmp_path):
    samples = opened("jsonl", tokenizer, tmp_path)
    augmented = replace(samples, specs=(replace(samples.specs[0], data_augment=True),))
    assert rows_of(augmented.joined(ROOM, None).sources[0]) == [[row] for row in range(len(ROWS))]


def test_a_row_that_cannot_be_encoded_names_those_that_leave_with_it(tokenizer, tmp_path):
    joined = opened("jsonl", tokenizer, tmp_path).joined(ROOM, None)
    (tmp_path / "a.png").unlink()
    with pytest.raises(SampleError, match=r"with it leave made/1, made/2 \(share_prefix\)") as caught:
        joined.encode(0, 0)
    assert caught.value.reason == "image_missing"
    for row, rows in enumerate(JOINED[:5]):
        if row in (0, 2):
            continue
        if rows != [4]:
            joined.encode(0, row)


def test_pairs_are_not_joined(tokenizer, tmp_path):
    with pytest.raises(UserError, match="share_prefix with objective 'dpo'"):
        opened("jsonl", tokenizer, tmp_path, objective="dpo").joined(ROOM, None)
