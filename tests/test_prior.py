"""What lanes begin with: the same everywhere, exact after a resume, and nothing where it would not help."""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from factory import TINY, png, write_jsonl

from internvl_pack import prior as prior_module
from internvl_pack.collate import FILLER_ID
from internvl_pack.config import PackingConfig
from internvl_pack.dataset import PackedDataset
from internvl_pack.encode.sample import Encoder
from internvl_pack.errors import SampleError, UserError
from internvl_pack.loader import build_loader
from internvl_pack.packing.balance import prior_figures
from internvl_pack.plan import plan_epochs
from internvl_pack.planning import plan_preset
from internvl_pack.preset_dataset import PresetDataset
from internvl_pack.prior import has_images_by_address, shares_a_prior
from internvl_pack.sources import DatasetSpec, load_meta, open_source, remote
from internvl_pack.sources.hf import DatasetSource
from internvl_pack.stream import plan_sample
from train.ranks import Ranks
from train.trainer import PackTrainer

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


# --- images far away ----------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch) -> Counter:
    """How often each address was fetched; all hold a picture."""
    found: Counter = Counter()

    def fetch(address, *_, **__):
        found[address] += 1
        return png(112, 56, 7)

    monkeypatch.setenv("INTERNVL_PACK_ALLOW_REMOTE", "far.example")
    monkeypatch.setattr(remote, "fetch", fetch)
    monkeypatch.setattr(remote, "copy_of", lambda *_, **__: pytest.fail("copied"))
    return found


def with_far(folder: Path, field: str = "image", row: int = 20) -> Path:
    """Local samples in a local file, one of which names an address."""
    meta = write_jsonl(folder, 40)
    lines = (folder / "made.jsonl").read_text().splitlines()
    turns = [{"from": "human", "value": f"<{field}>\na"}, {"from": "gpt", "value": "b"}]
    lines[row] = json.dumps({field: "https://far.example/1.png", "conversations": turns})
    (folder / "made.jsonl").write_text("\n".join(lines))
    return meta


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("field", ["image", "video"])
def test_a_server_is_not_asked_for_what_lanes_begin_with(field, kept, tokenizer, tmp_path, asked, monkeypatch):
    if field == "video":
        pytest.importorskip("av")
    if kept:
        monkeypatch.setenv("INTERNVL_PACK_CACHE", str(tmp_path / "copies"))
    dataset = dataset_of(with_far(tmp_path, field), tokenizer)
    assert shares_a_prior(CONFIG, 4, dataset.specs), "told by the records alone"
    assert dataset.prior() is None and not asked
    assert has_images_by_address(dataset.sources, dataset.mixture(0)) and not asked
    near = dataset_of(write_jsonl(tmp_path / "near", 40), tokenizer)
    assert near.prior() is not None and not has_images_by_address(near.sources, near.mixture(0))


def test_packs_of_images_far_away_are_planned_as_they_are_streamed(tokenizer, tmp_path, asked):
    meta = with_far(tmp_path)
    streamed = ids(build_loader(dataset_of(meta, tokenizer)))
    assert asked, "when it is its turn"
    specs = load_meta(meta)
    preset = plan_preset(tmp_path / "preset", specs, [open_source(s) for s in specs], Encoder(tokenizer, TINY), CONFIG)
    planned = PresetDataset.open(preset.folder, meta, tokenizer, CONFIG, encode=TINY)
    assert ids(build_loader(planned)) == streamed


# --- ranks --------------------------------------------------------------------------------------------


def on_rank(rank: int, meta: Path, tokenizer, folder: Path) -> None:
    """What one of two ranks of a run finds and raises, as JSON."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    ranks = Ranks(process=rank, processes=2)

    def begun(fault: Exception | None = None, state: dict | None = None) -> PackedDataset:
        dataset = dataset_of(meta, tokenizer, rank=rank, world_size=2)
        load, calls = dataset.encoder.load, Counter()

        def unreliable(source, row, spec):
            calls["read"] += 1
            if rank == 0 and fault is not None:
                raise fault
            if rank == 1 and row % 3:
                raise SampleError("image_unreadable", "the file system failed here")
            return load(source, row, spec)

        dataset.encoder.load = unreliable
        found["own"] = dataset_of(meta, tokenizer).prior() if rank == 0 else dataset.prior()
        dataset.adopt_prior(state or {})  # without one it is asked for again
        calls.clear()
        PackTrainer._share_prior(
            SimpleNamespace(loader=SimpleNamespace(packed_dataset=dataset), ranks=ranks, _cpu_group=lambda: None)
        )
        found["read"] = calls["read"]
        return dataset

    found: dict = {}
    out = []
    dataset = begun()
    out.append(found | {"prior": dataset.prior(), "state": build_loader(dataset).state_dict()["prior"]})
    for state in ({"options": dataset.fingerprint(), "prior": {"mine": 1}}, {"options": dataset.fingerprint()}):
        out.append({"prior": begun(state=state).prior(), "read": found["read"]})
    for fault in (UserError("made.jsonl changed while it was in use"), ImportError("no decoder")):
        try:
            begun(fault)
        except Exception as error:
            out.append([type(error).__name__, str(error)])
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(out))


def test_what_the_first_rank_reads_is_what_all_begin_with(data, tokenizer, tmp_path):
    processes = [
        multiprocessing.get_context("fork").Process(target=on_rank, args=(rank, data, tokenizer, tmp_path))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    prior = first[0]["own"]
    assert second[0]["own"] != prior is not None, "which this test is about"
    for told in (first, second):
        assert told[0]["prior"] == told[0]["state"] == prior
        assert told[1] == {"prior": {"mine": 1}, "read": 0}, "of the checkpoint that the run goes on from"
        assert told[2]["prior"] == prior, "its checkpoint is an older one, or of other options"
    assert first[0]["read"] and first[2]["read"] and not second[0]["read"] and not second[2]["read"]
    assert first[3:] == [["UserError", "made.jsonl changed while it was in use"], ["ImportError", "no decoder"]]
    assert second[3:] == [first[3], ["RuntimeError", "rank 0 cannot read its data: ImportError: no decoder"]]
