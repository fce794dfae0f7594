"""`share_prefix` over a whole epoch: every row once with its ids and weight, the same loss, the same gradients."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from helpers.factory import TINY
from helpers.model_samples import LOSS_TOLERANCE, assert_same_gradients, gradients, tiny_packed
from helpers.rows_alike import BAD, JOINED, LONGEST, ROWS, as_table, write

from internvl_pack import PackedDataset, PackingConfig, build_loader, cli
from internvl_pack.batch.collate import PREFIX_ID
from internvl_pack.encode.sample import Encoder
from internvl_pack.errors import UserError
from internvl_pack.plan.write_preset import plan_preset
from internvl_pack.samples import Samples
from internvl_pack.sources.hf import DatasetSource
from internvl_pack.stream.preset_dataset import PresetDataset

BUDGET = {"max_packed_tokens": 250, "num_images_expected": 16, "max_buffer_size": 4, "seed": 3}


@pytest.fixture(scope="module", params=["jsonl", "shards", "table"])
def data(request, tmp_path_factory, tokenizer) -> Samples:
    encoder = Encoder(tokenizer, TINY)
    if request.param == "table":
        return Samples.of([DatasetSource("made", as_table())], encoder)
    return Samples.from_meta(write(tmp_path_factory.mktemp("data"), request.param), tokenizer, TINY)


def loaders(samples, ranks=1, *, share=True, num_workers=0, **changes):
    config = PackingConfig(**BUDGET | {"share_prefix": share} | changes)
    datasets = [PackedDataset(samples, config=config, rank=rank, world_size=ranks) for rank in range(ranks)]
    return [build_loader(dataset, num_workers=num_workers, loss_reduction="square") for dataset in datasets]


def rows_in(batches) -> Counter:
    """(sample, fragment, ids, labels, weights) of each row, with what it begins with."""
    seen: Counter = Counter()
    for batch in batches:
        bounds = batch["cu_seqlens"].tolist()
        columns = [batch[name][0].tolist() for name in ("input_ids", "labels", "loss_weight")]
        prefix_of = batch["prefix_of"].tolist() if "prefix_of" in batch else [-1] * len(batch["sample_ids"])
        for number, (name, place) in enumerate(zip(batch["sample_ids"], batch["fragments"], strict=True)):
            if name.startswith("<"):
                continue
            pieces = [number] if prefix_of[number] < 0 else [prefix_of[number], number]
            parts = [slice(bounds[at], bounds[at + 1]) for at in pieces]
            seen[(name, tuple(place), *(tuple(v for part in parts for v in column[part]) for column in columns))] += 1
    return seen


@pytest.mark.parametrize(("ranks", "num_workers"), [(1, 0), (3, 0)])
def test_every_row_comes_once_as_it_is_without_sharing(data, ranks, num_workers):
    (alone,) = loaders(data, share=False)
    shared = loaders(data, ranks, num_workers=num_workers)
    with_sharing = [batch for loader in shared for batch in loader]
    assert rows_in(with_sharing) == rows_in(alone)
    assert sum(batch["num_samples"] for batch in with_sharing) == len(ROWS) - 1  # one of them is bad
    assert any("prefix_of" in batch for batch in with_sharing)
    ledger = shared[0].ledger
    assert (ledger.samples_in, ledger.samples_packed) == (len(JOINED), len(JOINED) - 1)
    assert sum(loader.ledger.samples_quarantined for loader in shared) == ranks  # BAD, on every rank the same
    events = [event for loader in shared for event in loader.take_events()]
    assert [event["id"] for event in events] == [data.sample_id(0, BAD)]


@pytest.mark.slow
def test_the_loss_and_its_gradients_are_those_of_the_rows_alone(data, tokenizer):
    results = []
    for share in (True, False):
        packed = tiny_packed(tokenizer)
        batches = [batch for (loader,) in [loaders(data, share=share)] for batch in loader]
        weight = torch.cat([batch["loss_weight"].flatten() for batch in batches]).double().sum().float()
        loss = torch.zeros(())
        for batch in batches:
            out = packed(**{k: v for k, v in batch.items() if k != "progress"}, loss_normalizer=weight)
            out.loss.backward()
            loss = loss + out.loss.detach()
        results.append((loss.item(), gradients(packed)))
    (loss, mine), (expected, theirs) = results
    assert loss == pytest.approx(expected, rel=LOSS_TOLERANCE)
    assert_same_gradients(mine, theirs)


def test_an_epoch_goes_on_with_other_ranks(data):
    (whole,) = loaders(data)
    expected = rows_in(whole)
    first, batches = loaders(data, 2), []
    for loader in first:
        iterator = iter(loader)
        batches += [next(iterator), next(iterator)]
    state = first[0].state_dict()
    rest = loaders(data, 3)
    for loader in rest:
        loader.load_state_dict(state)
        batches += list(loader)
    assert rows_in(batches) == expected
    (other,) = loaders(data, share=False)
    with pytest.raises(UserError, match="share_prefix"):
        other.load_state_dict(state)


@pytest.mark.slow
def test_a_preset_decides_whether_prefixes_are_shared(data, tmp_path):
    config = PackingConfig(**BUDGET | {"share_prefix": True})
    preset = plan_preset(tmp_path / "shared", data, config)
    assert preset.settings["share_prefix"] is True
    (stream,) = loaders(data)
    expected = rows_in(stream)
    for run in (None, config, PackingConfig(**BUDGET)):
        assert rows_in(build_loader(PresetDataset(preset, data, run), loss_reduction="square")) == expected
    plain = plan_preset(tmp_path / "plain", data, PackingConfig(**BUDGET))
    assert "share_prefix" not in plain.settings
    with pytest.raises(UserError, match="was planned without share_prefix"):
        plain.config(config)
    trees = [
        sum(batch["sample_ids"].count(PREFIX_ID) for batch in build_loader(PresetDataset(each, data)))
        for each in (preset, plain)
    ]
    assert trees == [sum(len(rows) > 1 for rows in JOINED) + 2, 2]  # two records are trees by themselves


@pytest.mark.parametrize("oversize", ["split", "truncate", "drop", "error"])
def test_a_tree_over_the_budget_is_cut_whatever_becomes_of_long_rows(data, oversize):
    tokens = max(data.encode(0, row).record.num_tokens for row in range(len(ROWS)) if row not in (BAD, LONGEST))
    keep = {"max_packed_tokens": tokens, "oversize": oversize}
    if oversize == "error":
        with pytest.raises(UserError, match=f"made/.*{LONGEST}: oversized_error"):
            list(loaders(data, **keep)[0])
        return
    seen = [rows_in(loaders(data, share=share, **keep)[0]) for share in (True, False)]
    assert seen[0] == seen[1] and len({name for name, *_ in seen[0]}) == len(ROWS) - 1 - (oversize == "drop")


def test_a_damaged_image_takes_its_rows_along_by_id(tokenizer, tmp_path):
    meta = write(tmp_path, "jsonl")
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(whole[: len(whole) // 2])  # after the header: it is found when it is decoded
    (loader,) = loaders(Samples.from_meta(meta, tokenizer, TINY))
    seen = {name for name, *_ in rows_in(loader)}
    assert seen == {f"made/{row}" for row in range(len(ROWS)) if row not in (0, 1, 2, 4, BAD)}
    (event,) = [event for event in loader.take_events() if event["id"] == "made/0"]
    assert event["detail"].endswith("with it leave made/1, made/2 (share_prefix)")


def test_the_commands_take_it(tokenizer, tmp_path, capsys):
    meta, folder = write(tmp_path / "data", "jsonl"), tmp_path / "tokenizer"
    tokenizer.save_pretrained(folder)
    run = [str(meta), "--tokenizer", str(folder), "--force_image_size", "56", "--max_packed_tokens", "250"]
    run += ["--num_images_expected", "16", "--share_prefix", "True"]
    trees = sum(len(rows) > 1 for rows in JOINED) + 2  # two records are trees by themselves
    branches = sum(len(rows) for rows in JOINED if len(rows) > 1) + 4
    for command, shown in (
        (["stats"], f"{trees} prefix trees with {branches} branches save "),
        (["simulate", "--ranks", "1"], f"with {branches} branches; sharing saves "),
        (["plan", "--out", str(tmp_path / "plan")], "packs of 250 tokens and 16 tiles"),
    ):
        assert cli.main([command[0], *run, *command[1:]]) == 0
        assert shown in capsys.readouterr().out
    assert cli.main(["plan", *run, "--out", str(tmp_path / "other"), "--materialise"]) == 2
    assert "--materialise with --share_prefix True" in capsys.readouterr().err
