"""In-batch packing, alignment, and the three ways to pack on the same samples."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers.factory import TINY, write_jsonl, write_meta
from helpers.model_samples import (
    SIZE,
    gradients,
    mixed_segments,
    packed_batch,
    padded_batch,
    text_segments,
    tiny_packed,
)

from internvl_pack.batch.collate import FILLER_ID, packed_collate_fn, row_boundaries
from internvl_pack.batch.in_batch import in_batch_collate_fn, sample_segment
from internvl_pack.batch.row import PackRow, Segment
from internvl_pack.config import PackingConfig
from internvl_pack.errors import UserError
from internvl_pack.plan.write_preset import plan_preset
from internvl_pack.samples import Samples
from internvl_pack.stream.dataset import PackedDataset
from internvl_pack.stream.loader import PackLoader, build_loader
from internvl_pack.stream.preset_dataset import PresetDataset


def as_dict(segment: Segment) -> dict:
    """A segment as an ordinary dataset would give it."""
    sample = {"input_ids": segment.input_ids.tolist(), "labels": torch.from_numpy(segment.labels)}
    sample |= {"sample_id": segment.sample_id}
    if len(segment.tiles):
        sample |= {"pixel_values": torch.from_numpy(segment.tiles), "tiles_per_image": segment.tiles_per_image}
    return sample


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other[key]), key
        elif key not in ("rows", "num_packs"):
            assert value == other[key], key


# -- in-batch ------------------------------------------------------------------------------------------


def test_the_row_is_that_of_the_packed_collator(tokenizer):
    segments = mixed_segments(tokenizer)
    expected = packed_batch(segments)
    assert_same(in_batch_collate_fn(segments, image_size=SIZE), expected)
    assert_same(in_batch_collate_fn([PackRow([s]) for s in segments], image_size=SIZE), expected)
    assert_same(in_batch_collate_fn([as_dict(s) for s in segments], image_size=SIZE), expected)


@pytest.mark.parametrize("kind", ["map-style with a sampler", "iterable"])
def test_ordinary_datasets_and_samplers_feed_it(kind, tokenizer):
    from torch.utils.data import DataLoader, IterableDataset, RandomSampler

    samples = [as_dict(s) for s in mixed_segments(tokenizer)]

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(samples)

    collate = partial(in_batch_collate_fn, image_size=SIZE, max_packed_tokens=200, num_images_expected=12)
    if kind == "iterable":
        loader = DataLoader(Stream(), batch_size=3, collate_fn=collate)
    else:
        loader = DataLoader(samples, batch_size=3, sampler=RandomSampler(samples), collate_fn=collate)
    batches = list(loader)
    assert sorted(i for b in batches for i in b["sample_ids"]) == sorted(s["sample_id"] for s in samples)
    assert [b["num_segments"] for b in batches] == [3, 3, 1]
    assert all(b["input_ids"].shape == (1, b["num_real_tokens"]) for b in batches)


def test_a_text_only_transformers_model_trains_on_it_as_on_padded_rows(tokenizer):
    from transformers import AutoModelForCausalLM

    from internvl_pack.model.attention import register_packed_attention
    from internvl_pack.model.packed import PackedModel
    from internvl_pack.testing.tiny import tiny_text_config

    torch.manual_seed(0)
    inner = AutoModelForCausalLM.from_config(tiny_text_config("llama", vocab_size=len(tokenizer)))
    inner.set_attn_implementation(register_packed_attention("sdpa", "cpu", torch.float32))
    model = PackedModel(inner)
    segments = text_segments(tokenizer)
    batch = in_batch_collate_fn([as_dict(s) for s in segments], loss_reduction="sample")
    packed, padded = model(**batch).loss, model(**padded_batch(segments, loss_reduction="sample")).loss
    assert torch.allclose(packed, padded, atol=1e-6)


REFUSED = [
    ({"labels": [1]}, ValueError, "'input_ids' is missing"),
    ({"input_ids": [1, 2], "labels": [1]}, ValueError, "of one length"),
    ({"input_ids": [[1, 2]], "labels": [[1, 2]]}, ValueError, r"must be \(n,\)"),
    ({"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 0]}, ValueError, "attention_mask masks tokens"),
    (
        {"input_ids": [1, 2], "labels": [1, 2], "pixel_values": np.zeros((1, 3, 4, 4), np.float32)},
        ValueError,
        "pixel_values is float32",
    ),
    (
        {
            "input_ids": [1, 2],
            "labels": [1, 2],
            "pixel_values": np.zeros((2, 3, 4, 4), np.uint8),
            "tiles_per_image": [1],
        },
        ValueError,
        "sums to 1, pixel_values has 2",
    ),
    ({"input_ids": [], "labels": []}, ValueError, "has no tokens"),
]


@pytest.mark.parametrize(("sample", "kind", "message"), REFUSED)
def test_what_is_no_sample_is_refused_by_name(sample, kind, message):
    with pytest.raises(kind, match=f"q7.*{message}"):
        in_batch_collate_fn([sample | {"sample_id": "q7"}], image_size=4)


def test_budgets_are_checked_and_packs_are_not_packed_again(tokenizer):
    segments = mixed_segments(tokenizer)
    tokens, tiles = sum(len(s.input_ids) for s in segments), sum(len(s.tiles) for s in segments)
    collate = partial(in_batch_collate_fn, segments, image_size=SIZE)
    collate(max_packed_tokens=tokens, num_images_expected=tiles)
    with pytest.raises(
        UserError, match=rf"max_packed_tokens {tokens - 1}: a micro-batch of 7 samples has {tokens} tok"
    ):
        collate(max_packed_tokens=tokens - 1)
    with pytest.raises(UserError, match=rf"num_images_expected {tiles - 1}: .*the largest is several images with 3"):
        collate(num_images_expected=tiles - 1)
    with pytest.raises(UserError, match="max_packed_tokens"):
        collate(max_packed_tokens=tokens, pad_seq_to_mult=8)
    with pytest.raises(UserError, match="a row of 7 samples: the data is packed already"):
        in_batch_collate_fn([PackRow(segments)], image_size=SIZE)


def test_the_first_token_of_a_sample_is_nobodys_target():
    segment = sample_segment({"input_ids": [5, 6, 7], "labels": [5, -100, 7]})
    assert segment.num_loss_tokens == 1
    batch = in_batch_collate_fn([segment], loss_reduction="sample")
    assert batch["loss_weight"].tolist() == [[0, 0, 1]]


# -- alignment -----------------------------------------------------------------------------------------


def text_segment(length: int, name: str = "s") -> Segment:
    ids = np.arange(10, 10 + length, dtype=np.int32)
    return Segment(name, (0, 1), ids, ids.copy(), np.empty((0, 3, 8, 8), np.uint8), (), length - 1)


ALIGNED = [
    # lengths, multiple, pad_to, cu_seqlens, cu_seqlens_padded
    ([5, 6], 8, None, [0, 5, 11], [0, 8, 16]),
    ([8, 16], 8, None, [0, 8, 24], [0, 8, 24]),
    ([5, 6], 8, 24, [0, 5, 11, 19], [0, 8, 16, 24]),
    ([5, 6], 8, 16, [0, 5, 11], [0, 8, 16]),
    ([1, 1], 4, None, [0, 1, 2], [0, 4, 8]),
    ([], 4, None, [0, 2], [0, 4]),
]


@pytest.mark.parametrize(("lengths", "multiple", "pad_to", "real", "padded"), ALIGNED)
def test_segments_are_padded_to_a_multiple_with_both_boundaries_in_the_batch(lengths, multiple, pad_to, real, padded):
    rows = [PackRow([text_segment(n, f"s{n}") for n in lengths])]
    batch = packed_collate_fn(rows, pad_seq_to_mult=multiple, pad_to=pad_to, pad_token_id=3, image_size=8)
    assert batch["cu_seqlens"].tolist() == real and batch["cu_seqlens_padded"].tolist() == padded
    assert batch["cu_seqlens"].dtype == batch["cu_seqlens_padded"].dtype == torch.int32
    assert row_boundaries(batch) is batch["cu_seqlens_padded"]
    assert batch["num_tokens"] == padded[-1] == batch["input_ids"].shape[1]
    assert batch["num_real_tokens"] == sum(lengths)
    assert batch["max_seqlen"] == max(b - a for a, b in pairwise(padded))
    for start, length in zip(padded, lengths, strict=False):
        stop = start - start % multiple + -(-length // multiple) * multiple
        assert batch["input_ids"][0, start : start + length].tolist() == list(range(10, 10 + length))
        assert batch["input_ids"][0, start + length : stop].tolist() == [3] * (stop - start - length)
        assert batch["position_ids"][0, start:stop].tolist() == list(range(stop - start))
        assert batch["labels"][0, start + length : stop].eq(-100).all()
    assert batch["num_loss_tokens"] == sum(n - 1 for n in lengths)


def test_the_case_of_real_and_physical_boundaries(shared_dir):
    cases = json.loads((shared_dir / "cases" / "vectors" / "cu_seqlens.json").read_text())
    (case,) = [c for c in cases if "segment_multiple" in c]
    batch = packed_collate_fn(
        [PackRow([text_segment(n) for n in case["lengths"]])], pad_seq_to_mult=case["segment_multiple"], image_size=8
    )
    assert (batch["cu_seqlens"].tolist(), batch["cu_seqlens_padded"].tolist()) == ([0, 5, 11], [0, 8, 16])
    assert batch["num_tokens"] == case["tensor_len"]


def test_without_a_multiple_there_is_one_kind_of_boundaries():
    batch = packed_collate_fn([PackRow([text_segment(5), text_segment(6)])], image_size=8)
    assert "cu_seqlens_padded" not in batch and "cu_seqlens_static" not in batch
    assert row_boundaries(batch) is batch["cu_seqlens"]


def test_boundaries_of_a_constant_count_repeat_the_last_one():
    rows = [PackRow([text_segment(5), text_segment(6)])]
    batch = packed_collate_fn(rows, pad_cu_seqlens_to=6, pad_to=16, image_size=8)
    assert batch["cu_seqlens_static"].tolist() == [0, 5, 11, 16, 16, 16]
    assert batch["cu_seqlens"].tolist() == [0, 5, 11, 16]
    batch = packed_collate_fn(rows, pad_cu_seqlens_to=4, pad_to=16, pad_seq_to_mult=8, image_size=8)
    assert batch["cu_seqlens_static"].tolist() == [0, 8, 16, 16]
    with pytest.raises(ValueError, match="needs 4 boundaries: raise pad_cu_seqlens_to from 3"):
        packed_collate_fn(rows, pad_cu_seqlens_to=3, pad_to=16, image_size=8)


@pytest.mark.parametrize(
    ("options", "rows"), [({"pad_seq_to_mult": 8}, 1), ({"pad_seq_to_mult": 16, "pad_to": 256}, 1)]
)
def test_alignment_changes_neither_loss_nor_gradients(options, rows, tokenizer):
    segments = mixed_segments(tokenizer)
    model = tiny_packed(tokenizer)
    results = []
    for extra in ({}, options):
        model.zero_grad()
        out = model(**packed_batch(segments, loss_reduction="square", **extra))
        out.loss.backward()
        results.append((out.loss.item(), out.target_losses.detach(), gradients(model)))
    (loss, targets, grads), (aligned_loss, aligned_targets, aligned_grads) = results
    assert aligned_loss == pytest.approx(loss, rel=1e-6)
    assert torch.allclose(targets, aligned_targets, atol=1e-5)
    for name, grad in grads.items():
        assert torch.allclose(grad, aligned_grads[name], atol=1e-5), name


def test_aligned_rows_keep_the_budget_and_the_evaluation_finds_its_samples(tokenizer, tmp_path):
    from train.evaluation import add_sample_losses

    config = PackingConfig(max_packed_tokens=320, num_images_expected=16, pad_to_multiple_of=16)
    dataset = PackedDataset.from_meta(write_jsonl(tmp_path, 30), tokenizer, config, encode=TINY)
    sums: dict = {}
    tokens = 0
    for batch in build_loader(dataset, pad_seq_to_mult=16):
        assert batch["num_tokens"] <= 320 and batch["num_tokens"] % 16 == 0
        positions = (batch["labels"][0] != -100).nonzero()[:, 0] - 1
        add_sample_losses(sums, batch, torch.ones(len(positions)), positions)
        tokens += batch["num_loss_tokens"]
    assert sum(n for _, n in sums.values()) == tokens and len(sums) == 30
    with pytest.raises(UserError, match="pad_seq_to_mult 32 does not divide pad_to_multiple_of 16"):
        build_loader(dataset, pad_seq_to_mult=32)


# -- the three ways ------------------------------------------------------------------------------------

ROW = {"max_packed_tokens": 2048, "num_images_expected": 40}


def batches_of(way: str, meta, tokenizer, folder, encode, row):
    """All batches of an epoch by one way of packing; no sample is so long that it would be split."""
    config = PackingConfig(**row, seed=1)
    if way == "preset":
        pytest.importorskip("pyarrow")
        samples = Samples.from_meta(meta, tokenizer, encode)
        plan_preset(folder / "preset", samples, config, policy="first_fit_decreasing")
        dataset = PresetDataset.open(folder / "preset", meta, tokenizer, config, encode=encode)
        return build_loader(dataset, loss_reduction="square")
    if way == "stream":
        dataset = PackedDataset.from_meta(meta, tokenizer, config, encode=encode)
        return build_loader(dataset, loss_reduction="square")
    share = {name: value // 4 for name, value in row.items()}
    config = PackingConfig(**share, seed=1, packing=False)
    dataset = PackedDataset.from_meta(meta, tokenizer, config, encode=encode)
    collate = partial(
        in_batch_collate_fn,
        **row,
        loss_reduction="square",
        image_size=encode.image_size,
        pad_token_id=dataset.encoder.pad_token_id,
        image_token_id=dataset.encoder.image_context_id,
    )
    return PackLoader(dataset, packs_per_batch=4, collate_fn=collate)


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_of_the_packages_own_loader_are_the_samples_of_the_epoch_in_its_order(ranks, tokenizer, tmp_path):
    meta = write_jsonl(tmp_path, 50)
    config = PackingConfig(max_packed_tokens=512, num_images_expected=16, seed=1, packing=False)
    samples = Samples.from_meta(meta, tokenizer, TINY)
    mixture = samples.mixture(config, 0)
    expected = [samples.sample_id(*mixture.locate(position)) for position in range(50)]
    collate = partial(in_batch_collate_fn, image_size=TINY.image_size, max_packed_tokens=2048)
    rows = []
    for rank in range(ranks):
        dataset = PackedDataset(samples, config=config, rank=rank, world_size=ranks)
        rows.append([batch["sample_ids"] for batch in PackLoader(dataset, packs_per_batch=4, collate_fn=collate)])
    assert len({len(each) for each in rows}) == 1, "all ranks have as many rows"
    # Two samples are left for the last step: where there are three ranks, one has nothing.
    steps = [sorted(i for row in step for i in row if i != FILLER_ID) for step in zip(*rows, strict=True)]
    size = 4 * ranks
    assert steps == [sorted(expected[start : start + size]) for start in range(0, 50, size)]
    assert all(len(row) == 4 for each in rows for row in each[:-1])


def trained(model, batches):
    """(ids, sum of weighted losses / sum of weights, gradients of it) over a whole epoch, summed in float64."""
    model.zero_grad()
    ids, losses, weights = [], [], []
    for batch in batches:
        ids += [i for i in batch["sample_ids"] if not i.startswith("<")]
        out = model(**batch, loss_normalizer=1.0)
        out.loss.backward()
        losses.append(out.weighted_sum.double())
        weights.append(out.weight_sum.double())
    total = torch.stack(weights).sum()
    grads = {name: grad.double() / total for name, grad in gradients(model).items()}
    return sorted(ids), (torch.stack(losses).sum() / total).item(), grads


def assert_one_training(model, meta, tokenizer, tmp_path, encode, row, count):
    expected = trained(model, batches_of("stream", meta, tokenizer, tmp_path, encode, row))
    assert len(expected[0]) == len(set(expected[0])) == count, "no sample is split"
    for way in ("in_batch", "preset"):
        ids, loss, grads = trained(model, batches_of(way, meta, tokenizer, tmp_path, encode, row))
        assert ids == expected[0], way
        assert loss == pytest.approx(expected[1], abs=1e-6), way
        for name, grad in grads.items():
            assert torch.allclose(grad, expected[2][name], rtol=0, atol=1e-5), (way, name)


@pytest.mark.slow
def test_all_three_packing_modes_train_the_same_samples_with_the_same_loss_and_gradients(tokenizer, tmp_path):
    meta = write_jsonl(tmp_path, 100)
    assert_one_training(tiny_packed(tokenizer), meta, tokenizer, tmp_path, TINY, ROW, 100)


@pytest.mark.slow
def test_all_three_packing_modes_agree_on_the_demo_data(tokenizer, tmp_path, demo_dir):
    row = {"max_packed_tokens": 8192, "num_images_expected": 40}
    assert_one_training(tiny_packed(tokenizer), demo_dir / "meta.json", tokenizer, tmp_path, TINY, row, 52)


def write_real(shared_dir, folder, tokenizer, count):
    """A meta file over the first `count` of the real samples that are short enough for a quarter of a row."""
    samples, meta = Samples.from_meta(shared_dir / "data" / "open" / "meta.json", tokenizer, TINY), {}
    for dataset, (spec, source) in enumerate(zip(samples.specs, samples.sources, strict=True)):
        fitting = [row for row in range(len(source)) if samples.encode(dataset, row).record.num_tokens <= 1500]
        short = [source.read(row).data for row in fitting[:count]]
        count -= len(short)
        path = folder / f"{spec.name}.jsonl"
        path.write_text("".join(json.dumps(data) + "\n" for data in short), encoding="utf-8")
        meta[spec.name] = {"root": spec.root, "annotation": path.name}
    return write_meta(
        folder, {name: entry for name, entry in meta.items() if (folder / f"{name}.jsonl").stat().st_size}
    )


@pytest.mark.slow
def test_all_three_packing_modes_agree_on_500_real_samples(tokenizer, tmp_path, shared_dir):
    meta = write_real(shared_dir, tmp_path, tokenizer, 500)
    row = {"max_packed_tokens": 6144, "num_images_expected": 160}
    small = {"hidden_size": 32, "vision_hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    assert_one_training(tiny_packed(tokenizer, **small), meta, tokenizer, tmp_path, TINY, row, 500)
