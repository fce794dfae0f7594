"""Samples longer than a row, trained in fragments: nothing of them is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.factory import TINY, write_meta

from internvl_pack import PackedDataset, PackingConfig, build_loader
from internvl_pack.model.attention import register_packed_attention
from internvl_pack.model.packed import PackedModel
from internvl_pack.testing.tiny import tiny_internvl

BUDGET = 1024


def long_records(shared: Path, count: int) -> list[dict]:
    """Real sections of textbooks, with several images and far more text than a row holds."""
    records = []
    for line in (shared / "data" / "open" / "openstax.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        text = sum(len(turn["value"]) for turn in record["conversations"])
        images = record.get("image")
        if isinstance(images, list) and len(images) >= 2 and text > 10_000:
            records.append(record)
    assert len(records) >= count
    return records[:count]


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["token", "sample", "square"])
def test_fragments_of_real_sections_train_as_many_tokens_as_the_whole_sample(
    reduction, shared_dir, tokenizer, tmp_path
):
    records = long_records(shared_dir, 3)
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    root = str(shared_dir / "data" / "open" / "images")
    meta = write_meta(tmp_path, {"long": {"root": root, "annotation": "long.jsonl"}})
    config = PackingConfig(max_packed_tokens=BUDGET, num_images_expected=24)
    dataset = PackedDataset.from_meta(meta, tokenizer, config, encode=TINY)
    source, spec = dataset.samples.sources[0], dataset.samples.specs[0]
    whole = [dataset.encoder.encode(source.read(row), spec) for row in range(len(records))]
    assert all(encoded.record.num_tokens > 2 * BUDGET for encoded in whole)

    inner = tiny_internvl(tokenizer)
    inner.set_attn_implementation({"text_config": register_packed_attention("sdpa")})
    model = PackedModel(inner)
    targets = weights = 0.0
    fragments: dict[str, int] = {}
    tiles = 0
    for batch in build_loader(dataset, loss_reduction=reduction):
        output = model(**batch)
        output.loss.backward()
        assert torch.isfinite(output.loss)
        targets += int(output.num_targets)
        weights += float(output.weight_sum)
        tiles += batch["num_tiles"]
        for sample_id in batch["sample_ids"]:
            fragments[sample_id] = fragments.get(sample_id, 0) + 1
    assert all(count > 2 for count in fragments.values()) and len(fragments) == len(records)
    numbers = [encoded.record.num_loss_tokens for encoded in whole]
    assert targets == sum(numbers)
    assert tiles == sum(encoded.record.num_tiles for encoded in whole)
    expected = {"token": sum(numbers), "sample": len(numbers), "square": sum(n**0.5 for n in numbers)}
    assert weights == pytest.approx(expected[reduction], rel=1e-5)
