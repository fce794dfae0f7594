"""What is said of an epoch before its first step is what comes: counted exactly, estimated closely."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers.factory import TINY, write_jsonl

from internvl_pack.config import PackingConfig
from internvl_pack.encode.sample import Encoder
from internvl_pack.estimate import epochs as estimate
from internvl_pack.estimate.epochs import estimate_epochs
from internvl_pack.samples import Samples
from internvl_pack.sources import load_meta, open_source
from internvl_pack.sources.addresses import check_remote_read
from internvl_pack.stream.dataset import PackedDataset
from internvl_pack.stream.loader import build_loader
from internvl_pack.survey.workers import measure_all

COUNT = 60


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
