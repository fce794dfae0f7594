"""What lanes begin with: the same everywhere, exact after a resume, and nothing where it would not help."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from factory import TINY, write_jsonl

from internvl_pack import prior as prior_module
from internvl_pack.collate import FILLER_ID
from internvl_pack.config import PackingConfig
from internvl_pack.dataset import PackedDataset
from internvl_pack.encode.sample import Encoder
from internvl_pack.errors import UserError
from internvl_pack.loader import build_loader
from internvl_pack.packing.balance import prior_figures
from internvl_pack.plan import plan_epochs
from internvl_pack.planning import plan_preset
from internvl_pack.prior import shares_a_prior
from internvl_pack.sources import DatasetSpec, load_meta, open_source
from internvl_pack.sources.hf import DatasetSource
from internvl_pack.stream import plan_sample

COUNT = 90
CONFIG = PackingConfig(max_packed_tokens=300, num_images_expected=9, max_buffer_size=8, num_lanes=4, seed=3)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    meta = write_jsonl(folder, COUNT)
    sorted((folder / "images").iterdir())[3].write_bytes(b"not an image")
    return meta


def dataset_of(meta: Path, tokenizer, config=CONFIG, **place) -> PackedDataset:
    return PackedDataset.from_meta(meta, tokenizer, config, encode=TINY, **place)


def samples_in(dataset: PackedDataset) -> int:
    return len({segment.sample_id for row in dataset for segment in row.segments})


def ids(loader) -> list[tuple[str, ...]]:
    return [tuple(batch["sample_ids"]) for batch in loader]


def test_it_is_the_figures_of_the_first_samples_of_the_first_epoch(data, tokenizer, monkeypatch):
    for taken in (10, 5000):
        monkeypatch.setattr(prior_module, "PRIOR_SAMPLES", taken)
        dataset = dataset_of(data, tokenizer)
        sizes, mixture = [], dataset.mixture(0)
        for position in range(min(taken, COUNT)):
            try:
                fragments = plan_sample(dataset, mixture, position, CONFIG.budget())[1]
            except prior_module.SampleError:  # the broken one is left out
                continue
            sizes += [(f.num_tokens, f.num_tiles) for f in fragments]
        assert dataset.prior() == prior_figures(CONFIG.budget(), dataset.cost_model, sizes)


def test_all_ranks_and_epochs_and_planning_begin_alike(data, tokenizer, tmp_path):
    found = []
    for rank in range(4):
        dataset = dataset_of(data, tokenizer, rank=rank, world_size=4)
        dataset.set_epoch(rank)
        found.append(dataset.prior())
    assert found[0] is not None and found == [found[0]] * 4
    specs = load_meta(data)
    encoder = Encoder(tokenizer, TINY)
    seen = []
    keep = prior_module.prior_figures

    def prior_figures_seen(*given):
        seen.append(keep(*given))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prior_module, "prior_figures", prior_figures_seen)
        plan_preset(tmp_path / "preset", specs, [open_source(s) for s in specs], encoder, CONFIG)
    assert seen == found[:1], "made once for all lanes"


@pytest.mark.parametrize("reservoir", [0, 3])
def test_counted_packs_are_trained_and_a_resume_reads_no_sample_for_it(data, tokenizer, reservoir, monkeypatch):
    config = replace(CONFIG, balance_reservoir=reservoir)
    whole = build_loader(dataset_of(data, tokenizer, config))
    packs = ids(whole)
    full = [pack for pack in packs if pack != (FILLER_ID,)]
    assert plan_epochs(dataset_of(data, tokenizer, config), 1).packs == (len(full),)
    whole.set_epoch(1)
    second = ids(whole)
    stopped = build_loader(dataset_of(data, tokenizer, config))
    batches = iter(stopped)
    for _ in range(2):  # two of the four lanes have not begun
        next(batches)
    state = json.loads(json.dumps(stopped.state_dict()))
    assert state["prior"] == stopped.packed_dataset.prior()
    assert len(state["lanes"]) == 2
    (tmp := dataset_of(data, tokenizer, config)).adopt_prior(state)
    with monkeypatch.context() as patch:
        patch.setattr("internvl_pack.dataset.lanes_prior", lambda *_: pytest.fail("read again"))
        assert tmp.prior() == state["prior"]
        again = build_loader(dataset_of(data, tokenizer, config))
        again.load_state_dict(state)
        assert ids(again) == packs[2:]
        again.set_epoch(1)
        assert ids(again) == second


def test_an_older_state_and_one_of_other_options_bring_none(data, tokenizer):
    dataset = dataset_of(data, tokenizer)
    prior = dataset.prior()
    older = {key: value for key, value in dataset.state_dict().items() if key != "prior"}
    dataset.load_state_dict(older)
    assert dataset.known_prior is None and dataset.prior() == prior
    other = dataset_of(data, tokenizer, replace(CONFIG, max_packed_tokens=400))
    state = dataset.state_dict()
    with pytest.raises(UserError, match="max_packed_tokens"):
        other.load_state_dict(state)
    other.load_state_dict(state, check_options=False)
    assert other.known_prior is None and other.prior() != prior


def test_workers_are_forked_with_it(data, tokenizer):
    loader = build_loader(dataset_of(data, tokenizer), num_workers=2)
    found = ids(loader)
    assert loader.packed_dataset.known_prior is not None
    assert found == ids(build_loader(dataset_of(data, tokenizer)))


def test_a_handful_of_samples_and_none_that_can_be_used(tokenizer, tmp_path, monkeypatch):
    dataset = dataset_of(write_jsonl(tmp_path, 10), tokenizer)
    assert dataset.prior() is not None
    assert samples_in(dataset) == 10
    calls = []

    def nothing_to_use(*_):
        calls.append(1)

    monkeypatch.setattr("internvl_pack.dataset.lanes_prior", nothing_to_use)
    dataset = dataset_of(tmp_path / "meta.json", tokenizer)
    assert samples_in(dataset) == 10
    assert len(calls) == 1, "looked for once, not by every lane"


@pytest.mark.parametrize(
    "change",
    [
        {"num_lanes": 1},
        {"packing": False},
        {"packing_policy": "greedy"},
        {"packing_policy": "next_fit"},
        {"shuffle": False},
    ],
)
def test_runs_that_gain_nothing_read_nothing_for_it(change):
    config = replace(CONFIG, **change)
    assert shares_a_prior(CONFIG, 4, [DatasetSpec(name="a", root="/data")])
    assert not shares_a_prior(config, config.num_lanes or 0, [DatasetSpec(name="a", root="/data")])


@pytest.mark.parametrize(
    "far",
    [
        {"root": "s3://bucket/images"},
        {"annotation": "https://host/a.jsonl"},
        {"shards": ("https://h/0.tar",)},
        {"source": "datasets", "options": {"path": "/data/rows", "root": "s3://bucket/images"}},
        {"source": "mine", "options": {"count": 3, "parts": ["gs://bucket/0", "gs://bucket/1"]}},
    ],
)
def test_data_far_away_is_not_read_ahead(far):
    near = DatasetSpec(name="near", source="datasets", options={"path": "/data/rows", "count": 3, "parts": []})
    assert shares_a_prior(CONFIG, 4, [near])
    assert not shares_a_prior(CONFIG, 4, [near, DatasetSpec(name="far", **far)])


def test_a_fault_in_all_samples_is_told_by_the_lane_alone(tokenizer, caplog):
    class Broken(list):
        def __getitem__(self, row):
            raise KeyError(row)

    source = DatasetSource("broken", Broken(range(500)))
    with pytest.raises(UserError, match="none of its first 32 samples can be used"):
        next(iter(build_loader(PackedDataset([source], Encoder(tokenizer, TINY), CONFIG))))
    assert len([record for record in caplog.records if record.exc_info]) == 32
