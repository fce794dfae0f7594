"""What is said of an epoch before its first step is what comes: counted exactly, estimated closely."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers.factory import TINY, write_jsonl

from internvl_pack.config import PackingConfig
from internvl_pack.encode.sample import Encoder
from internvl_pack.estimate import epochs as estimate
from internvl_pack.estimate.epochs import PackingEstimate, RunEstimate, estimate_epochs
from internvl_pack.samples import Samples
from internvl_pack.sources import load_meta, open_source
from internvl_pack.sources.addresses import check_remote_read
from internvl_pack.stream.dataset import PackedDataset
from internvl_pack.stream.loader import build_loader
from internvl_pack.survey.workers import measure_all

COUNT = 60
FULL = {
    "packs": 100,
    "samples": 1200,
    "tokens": 100 * 16000,
    "tiles": 3000,
    "budget": (16384, 48),
    "bounds": {"tokens": 99, "tiles": 60},
    "steps": 25,
    "packs_per_step": 4,
    "num_ranks": 2,
    "rank_efficiency": 0.987,
}


@pytest.fixture(scope="module")
def samples(tmp_path_factory, tokenizer) -> Samples:
    (spec,) = load_meta(write_jsonl(tmp_path_factory.mktemp("made"), COUNT))
    return Samples.of([open_source(spec)], Encoder(tokenizer, TINY), [spec])


def dataset_of(samples: Samples, rank: int = 0, world_size: int = 1, **options) -> PackedDataset:
    config = PackingConfig(**{"max_packed_tokens": 768, "num_images_expected": 16, **options})
    return PackedDataset(samples, config=config, rank=rank, world_size=world_size)


@pytest.mark.parametrize(("num_ranks", "accumulation"), [(1, 1), (2, 3), (5, 1)])
def test_a_count_is_what_the_loaders_give(samples, num_ranks, accumulation):
    datasets = [dataset_of(samples, rank, num_ranks) for rank in range(num_ranks)]
    run = estimate_epochs(datasets[0], num_ranks * accumulation, 2)
    assert run.exact and run.how == "counted"
    for epoch in (0, 1):
        estimated, steps, held = run.epochs[epoch], set(), Counter()
        for dataset in datasets:
            loader = build_loader(dataset, accumulation=accumulation)
            loader.set_epoch(epoch)
            for batch in loader:
                steps.add(batch["progress"].step)
                held += Counter(tokens=batch["num_real_tokens"], tiles=len(batch["pixel_values"]))
                held["segments"] += batch["num_segments"]
        assert run.steps(epoch) == estimated.steps == len(steps)
        assert (estimated.tokens, estimated.tiles, estimated.segments) == (
            held["tokens"],
            held["tiles"],
            held["segments"],
        )
        assert estimated.samples == COUNT
        assert estimated.steps_empty == 0 and estimated.steps_not_full <= 1 and estimated.bound <= estimated.packs
        assert 0 < estimated.rank_efficiency <= 1.0 and (num_ranks > 1 or estimated.rank_efficiency == 1.0)


def test_samples_that_are_split_and_refused_are_counted(samples):
    split = estimate_epochs(dataset_of(samples, max_packed_tokens=256), 1, 1).first
    assert split.split > 10 and split.segments > split.samples == COUNT
    dropped = estimate_epochs(dataset_of(samples, max_packed_tokens=256, oversize="drop"), 1, 1).first
    assert dropped.samples + dropped.refused.total() == COUNT and dropped.refused


@pytest.mark.parametrize(
    "options", [{}, {"packing_policy": "next_fit"}, {"packing": False}, {"num_images_expected": 8}]
)
def test_an_estimate_is_close_to_the_count(samples, monkeypatch, options):
    dataset = dataset_of(samples, **options)
    counted = estimate_epochs(dataset, 2, 1).first
    monkeypatch.setattr(estimate, "EXACT_SECONDS", 0.0)
    monkeypatch.setattr(estimate, "KNOWN_SAMPLES", 45)
    run = estimate_epochs(dataset, 2, 1)
    estimated = run.first
    assert not run.exact and run.how == "estimated from 45 samples"
    assert estimated.packs == pytest.approx(counted.packs, rel=0.1) and estimated.samples == pytest.approx(COUNT)
    assert not estimated.differs(counted)
    assert estimated.steps == -(-estimated.packs // 2)


def test_what_is_not_known_is_estimated_from_few_and_measured_once(samples, monkeypatch):
    monkeypatch.setattr(estimate, "SURVEYED_A_SECOND", 1)
    monkeypatch.setattr(estimate, "SAMPLES", 20)
    read = Counter()
    encode = Samples.encode
    monkeypatch.setattr(Samples, "encode", lambda self, d, r: read.update([r]) or encode(self, d, r))
    dataset = dataset_of(samples)
    assert estimate_epochs(dataset, 2, 1).how == "estimated from 20 samples"
    assert len(read) == 20
    assert sum(measure_all(dataset.survey)) == COUNT
    assert set(read.values()) == {1} and len(read) == COUNT
    assert estimate_epochs(dataset, 2, 1).how == "counted"


def test_as_many_epochs_are_counted_as_there_is_time_for(samples, monkeypatch):
    dataset = dataset_of(samples)
    assert sum(measure_all(dataset.survey)) == COUNT
    monkeypatch.setattr(estimate, "PLANNED_A_SECOND", 3 * COUNT / estimate.EXACT_SECONDS)
    run = estimate_epochs(dataset, 1, 8)
    assert len(run.epochs) == 3 and not run.exact and run.how == "counted for 3 epochs, estimated beyond"
    assert run.steps(7) == run.steps(2)


def test_no_server_is_asked_for_more_than_a_few_samples(samples, monkeypatch):
    encode = Samples.encode
    asked = []

    def fetching(self, dataset, row):
        check_remote_read("https://somewhere/a.png")
        asked.append(row)
        return encode(self, dataset, row)

    monkeypatch.setattr(Samples, "encode", fetching)
    monkeypatch.setattr(estimate, "REMOTE_SAMPLES", 7)
    dataset = dataset_of(samples)
    run = estimate_epochs(dataset, 1, 1)
    assert run.how == "estimated from 7 samples, since images are fetched by address"
    assert len(asked) == 7
    monkeypatch.setattr(estimate, "REMOTE_SECONDS", -1.0)
    run = estimate_epochs(dataset_of(samples, survey_dir=None, max_packed_tokens=700), 1, 1)
    assert run.first.num_planned == 1 and len(asked) == 7  # what was fetched before is known


@pytest.mark.parametrize(
    ("num_epochs", "steps"), [(1, 10), (2, 21), (3, 32), (0.5, 5), (1.5, 16), (1.25, 13), (2.1, 23), (0.0, 0)]
)
def test_the_steps_of_parts_of_epochs(num_epochs, steps):
    epochs = tuple(PackingEstimate(**{**FULL, "steps": n}) for n in (10, 11))
    assert RunEstimate(epochs, exact=True).total_steps(num_epochs) == steps


TROUBLES = [
    ({}, None),
    ({"tiles": 4700, "tokens": 100 * 9000, "samples": 470}, "tiles fill rows first (10.0 in a sample of 1,915 tokens)"),
    ({"tiles": 4700, "tokens": 100 * 9000, "samples": 470}, "--num_images_expected from 48 to about 86"),
    (
        {"samples": 110, "tokens": 100 * 10000, "tiles": 300},
        "samples have 9,091 of a row's 16,384 tokens: raise --max_packed_tokens",
    ),
    ({"samples": 130, "tokens": 100 * 14000}, "1.3 samples a pack, token fill 85%"),
    ({"tokens": 100 * 12000, "policy": "next_fit"}, "next_fit ends a row"),
    ({"tokens": 100 * 12000}, "few samples fit what is left of a row"),
    (
        {"steps": 2, "packs_per_step": 64, "num_ranks": 64},
        "the data is small for 64 packs a step on 64 ranks: 100 packs make 2 steps, in which 22% of the places stay "
        "empty: lower ranks x --gradient_accumulation_steps x --per_device_train_batch_size to 10 or less",
    ),
    ({"packs": 1, "steps": 1, "packs_per_step": 1, "tokens": 900, "samples": 3, "tiles": 3}, "fits into 1 row: "),
    (
        {"packs": 325, "samples": 130, "split": 130, "tokens": 27430, "tiles": 130, "budget": (100, 20)},
        "100% of the samples exceed a row of 100 tokens and 20 tiles and are cut, and parts may have nothing to train: "
        "raise --max_packed_tokens to 4,096 or more",
    ),
    (
        {"samples": 470, "split": 94, "tokens": 100 * 9000, "tiles": 9400},
        "20% of the samples exceed a row of 16,384 tokens and 48 tiles and are cut, and parts may have nothing to "
        "train: raise --num_images_expected to 80 or more",
    ),
    (
        {"packs": 3, "steps": 3, "packs_per_step": 1, "budget": (1024, 12), "samples": 24, "tokens": 1137, "tiles": 30},
        "tiles fill rows first (1.2 in a sample of 47 tokens): raise --num_images_expected from 12 to about 28",
    ),
    (
        {"packs": 3, "steps": 3, "packs_per_step": 1, "samples": 24, "tokens": 36000, "tiles": 30},
        "token fill 73%, because all of the data fits into 3 rows: train on more samples",
    ),
    (
        {"packs": 3, "steps": 3, "packs_per_step": 1, "samples": 24, "tokens": 24000, "tiles": 100},
        "token fill 49%, because all of the data fits into 3 rows: train on more samples",
    ),
]


@pytest.mark.parametrize(("changes", "expected"), TROUBLES)
def test_packing_that_does_little_is_reported_with_its_reason_and_what_to_change(changes, expected):
    trouble = PackingEstimate(**{**FULL, **changes}).trouble()
    if expected is None:
        assert trouble is None
    else:
        assert trouble is not None and expected in trouble and "\n" not in trouble


def test_one_line_says_what_packing_will_do():
    assert PackingEstimate(**FULL, exact=True).line() == (
        "packing: rows of 16,384 tokens and 48 tiles; an epoch has 25 steps of 4 packs (counted), 1.000 times the "
        "least possible; 100 packs, 12.0 samples a pack, token fill 97.7%, tile fill 62.5%, ranks 98.7% even"
    )
    estimated = PackingEstimate(**{**FULL, "num_ranks": 1}, num_planned=2000).line()
    assert "has about 25 steps of 4 packs (estimated from 2,000 samples)" in estimated and "even" not in estimated


def test_packs_that_hold_something_else_differ():
    estimated = PackingEstimate(**FULL)
    assert not estimated.differs(PackingEstimate(**{**FULL, "packs": 102}))
    assert estimated.differs(PackingEstimate(**{**FULL, "tokens": 100 * 15000}))
    assert estimated.differs(PackingEstimate(**{**FULL, "samples": 1000}))
