"""Presets: planned packs are the stream's, go on after a kill, and are refused when they no longer fit."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pytest
from helpers.factory import TINY, png, write_jsonl, write_meta, write_shards
from helpers.loaders import fingerprint, resume, samples_of, saved, steps_of, stream_loader, stream_loaders
from helpers.native_samples import native_tokenizer
from helpers.presets import CONFIG, files, planned, preset_loaders

from internvl_pack.batch.collate import FILLER_ID
from internvl_pack.checkpoints.encoding import encode_config
from internvl_pack.cli import main
from internvl_pack.errors import UserError
from internvl_pack.packing.budget import Budget
from internvl_pack.packing.offline import first_fit_decreasing, first_fit_shuffle
from internvl_pack.plan import write_preset
from internvl_pack.plan.groups import StepPlan
from internvl_pack.plan.preset import PACKS_PER_GROUP, Preset, PresetPacks, file_facts
from internvl_pack.records import whole
from internvl_pack.samples import Samples
from internvl_pack.stream.dataset import PackedDataset
from internvl_pack.stream.preset_dataset import PresetDataset
from internvl_pack.survey import workers
from internvl_pack.survey.survey import Survey
from internvl_pack.testing.tiny import save_tiny_checkpoint

pytest.importorskip("pyarrow")

COUNT = 160
GOOD = COUNT + 6 - 1
CUT = replace(CONFIG, oversize="truncate")  # tokens are cut off


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A meta file whose samples are partly split (an image of 9 tiles a pack, answers of 60 words), one of them bad."""
    folder = tmp_path_factory.mktemp("data")
    meta = write_jsonl(folder, COUNT)
    sorted((folder / "images").iterdir())[5].write_bytes(b"not an image")
    with open(folder / "made.jsonl", "a", encoding="utf-8") as lines:
        for i in range(6):
            turns = [{"from": "human", "value": "long"}, {"from": "gpt", "value": f"{i} of the rows " * 120}]
            lines.write(json.dumps({"conversations": turns}) + "\n")
    return meta


@pytest.fixture(scope="module")
def preset(data, tokenizer, tmp_path_factory):
    out = tmp_path_factory.mktemp("preset")
    planned(data, out, tokenizer)
    return out


@pytest.fixture(scope="module")
def two_epochs(data, tokenizer, tmp_path_factory):
    """Two planned epochs in which long samples are cut off."""
    out = tmp_path_factory.mktemp("two")
    planned(data, out, tokenizer, CUT, epochs=2)
    return out


# -- what is planned -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_preset_trains_the_very_batches_of_the_stream(data, preset, tokenizer):
    stream, (loader,) = stream_loader(data, tokenizer, config=CONFIG), preset_loaders(preset, data, tokenizer)
    assert [fingerprint(b) for b in loader] == [fingerprint(b) for b in stream]
    assert loader.ledger.state_dict() == stream.ledger.state_dict()
    told = [[(e["id"], e["source"], e["reason"], e["step"]) for e in each.take_events()] for each in (loader, stream)]
    assert told[0] == told[1] and len(told[0]) == 1
    loader.ledger.check()
    assert loader.ledger.counts["samples_split"] >= 6


@pytest.mark.slow
@pytest.mark.parametrize(("config", "packs_per_step"), [(CONFIG, 1), (CONFIG, 6), (CONFIG, 35), (CUT, 4)])
def test_steps_ledgers_and_states_are_those_of_the_stream(config, packs_per_step, data, tokenizer, tmp_path):
    planned(data, tmp_path / "preset", tokenizer, config, epochs=2)
    stream = PackedDataset.from_meta(data, tokenizer, config, encode=TINY)
    dataset = PresetDataset.open(tmp_path / "preset", data, tokenizer, config, encode=TINY)
    for epoch in (0, 1):
        expected, plan = (each.step_plan(epoch, packs_per_step) for each in (stream, dataset))
        num_steps = 0
        while (step := expected.next_step()) is not None:
            got = plan.next_step()
            assert got.packs == step.packs
            assert [r[:2] for r in got.refused] == [r[:2] for r in step.refused]
            states = [each.state_dict() for each in (plan, expected)]
            assert states[0]["sequence"].keys() == {"next"}
            for state in states:
                del state["sequence"]
            assert repr(states[0]) == repr(states[1])
            num_steps += 1
        assert plan.next_step() is None
        assert num_steps == -(-dataset.preset.num_packs(epoch) // packs_per_step)
        plan.ledger.check()
        assert bool(plan.ledger.counts["tokens_cut_off"]) == (config is CUT)


@pytest.mark.slow
def test_pictures_of_native_resolution_are_in_the_preset_as_in_the_stream(data, tmp_path):
    """Some of the samples are cut; costs are of a model whose tower sees whole pictures."""
    tokenizer = native_tokenizer()
    folder = save_tiny_checkpoint(tmp_path / "model", tokenizer, family="qwen3_vl")
    checkpoint = json.loads((folder / "config.json").read_text())
    encode = encode_config({"conv_style": "chat_template", "min_pixels": 1024, "max_pixels": 30_000}, checkpoint)
    config = replace(CONFIG, num_images_expected=CONFIG.max_packed_tokens, cost_model=str(folder))
    write_preset.plan_preset(tmp_path / "preset", Samples.from_meta(data, tokenizer, encode), config)
    stream = PackedDataset.from_meta(data, tokenizer, config, encode=encode)
    dataset = PresetDataset.open(tmp_path / "preset", data, tokenizer, config, encode=encode)
    expected, plan = (each.step_plan(0, 4) for each in (stream, dataset))
    pictures = Counter()
    while (step := expected.next_step()) is not None:
        assert plan.next_step().packs == step.packs
        for pack in step.packs:
            pictures.update(f.count > 1 for f in pack.fragments if f.num_tile_pairs)
            assert all((f.num_tile_pairs > 0) == (f.num_tiles > 0) for f in pack.fragments)
    assert plan.next_step() is None and pictures[False], pictures


@pytest.mark.parametrize("epoch", [0, 1, 2, 3])
@pytest.mark.parametrize("stop", [0, 1, 5])
def test_a_plan_goes_on_from_the_state_of_any_step(epoch, stop, data, tokenizer, tmp_path_factory, request):
    folder = request.getfixturevalue("two_epochs")
    dataset = PresetDataset.open(folder, data, tokenizer, CUT, encode=TINY)
    whole_run, plan = dataset.step_plan(epoch, 4), dataset.step_plan(epoch, 4)
    for _ in range(stop):
        assert whole_run.next_step() == plan.next_step()
    plan = dataset.step_plan(epoch, 4, plan.state_dict())
    while (step := whole_run.next_step()) is not None:
        assert plan.next_step() == step
        assert plan.ledger.state_dict() == whole_run.ledger.state_dict()
    assert plan.next_step() is None
    plan.ledger.check()
    assert plan.ledger.samples_packed == GOOD and plan.ledger.samples_quarantined == 1
    assert plan.ledger.counts["tokens_cut_off"] > 0


@pytest.mark.parametrize("number", [-1, 10**9])
def test_a_state_at_a_pack_that_is_not_there_is_refused(number, preset):
    plan = StepPlan(PresetPacks(Preset(preset), 0), 2, seed=0, epoch=0)
    plan.next_step()
    state = plan.state_dict() | {"sequence": {"next": number}}
    with pytest.raises(UserError, match="the plan of the saved state is damaged"):
        StepPlan(PresetPacks(Preset(preset), 0), 2, seed=0, epoch=0).load_state_dict(state)


def test_an_epoch_may_hold_refused_samples_only_which_are_told_once(tokenizer, tmp_path):
    (tmp_path / "images").mkdir()
    write_meta(tmp_path, {"made": {"root": "images", "annotation": "made.jsonl", "repeat_time": 0.5}})
    good = {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]}
    (tmp_path / "made.jsonl").write_text(json.dumps(good) + "\n[]\n")
    preset = planned(tmp_path / "meta.json", tmp_path / "preset", tokenizer, epochs=2)
    assert sorted(preset.packs_of_epochs) == [0, 1]
    for epoch in range(4):
        packs = PresetPacks(preset, epoch)
        count = preset.num_packs(epoch)
        assert [packs.next_pack() is not None for _ in range(3)] == [True] * count + [False] * (3 - count)
        assert len(packs.take_refused()) == 1 - count
        assert packs.ledger.samples_quarantined == 1 - count and packs.ledger.samples_in == 1
        again = PresetPacks(preset, epoch)
        again.load_state_dict(packs.state_dict())
        assert again.next_pack() is None and again.take_refused() == []


@pytest.mark.slow
def test_shards_are_planned_as_annotation_files_are(tokenizer, tmp_path):
    meta = write_shards(tmp_path, 60)
    planned(meta, tmp_path / "preset", tokenizer)
    (loader,) = preset_loaders(tmp_path / "preset", meta, tokenizer)
    assert [fingerprint(b) for b in loader] == [fingerprint(b) for b in stream_loader(meta, tokenizer, config=CONFIG)]


@pytest.mark.slow
def test_later_epochs_hold_the_same_packs_in_another_order(data, preset, tokenizer):
    (loader,) = preset_loaders(preset, data, tokenizer)
    orders = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        orders.append([tuple(b["sample_ids"]) for b in loader])
        loader.ledger.check()
        assert loader.ledger.samples_packed == GOOD
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert orders[0] != orders[1] != orders[2]


def test_the_order_of_later_epochs_reads_row_groups_one_after_the_other(preset):
    planned_preset = Preset(preset)
    planned_preset.packs_of_epochs = [5 * PACKS_PER_GROUP + 7]
    order = planned_preset.order(1)
    places = [order(place) for place in range(planned_preset.num_packs(1))]
    assert sorted(places) == list(range(len(places)))
    groups = [place // PACKS_PER_GROUP for place in places]
    assert sum(a != b for a, b in pairwise(groups)) == 5, "a group is read once"
    assert places != sorted(places) and places[:10] != [planned_preset.order(2)(place) for place in range(10)]


@pytest.mark.slow
def test_several_epochs_can_be_planned_each_as_streaming_would(data, tokenizer, two_epochs):
    (loader,) = preset_loaders(two_epochs, data, tokenizer, config=CUT)
    stream = stream_loader(data, tokenizer, config=CUT)
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        stream.set_epoch(epoch)
        assert [fingerprint(b) for b in loader] == [fingerprint(b) for b in stream]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["first_fit_decreasing", "first_fit_shuffle"])
def test_offline_policies_hold_each_sample_once_within_the_budgets(policy, data, tokenizer, tmp_path):
    planned(data, tmp_path / "preset", tokenizer, policy=policy)
    (loader,) = preset_loaders(tmp_path / "preset", data, tokenizer)
    seen: Counter[str] = Counter()
    for batch in loader:
        assert batch["num_tokens"] <= CONFIG.max_packed_tokens and batch["num_tiles"] <= CONFIG.num_images_expected
        first = [i for i, (index, _) in zip(batch["sample_ids"], batch["fragments"], strict=True) if index == 0]
        seen.update(i for i in first if i != FILLER_ID)
    assert len(seen) == GOOD and set(seen.values()) == {1}
    loader.ledger.check()
    costs = [Preset(tmp_path / "preset").pack(0, number).cost for number in range(10)]
    assert costs != sorted(costs) and costs != sorted(costs, reverse=True), "packs come in a seeded order"


FIRST_FIT = [
    # policy, budget, sizes (tokens, tiles), packs of their numbers
    (first_fit_shuffle, Budget(10, 4), [(6, 0), (5, 0), (4, 0), (5, 0)], [[0, 2], [1, 3]]),
    (first_fit_decreasing, Budget(10, 4), [(4, 0), (5, 0), (5, 0), (6, 0)], [[3, 0], [1, 2]]),
    (first_fit_shuffle, Budget(10, 4), [(3, 3), (3, 2), (3, 1), (3, 2)], [[0, 2], [1, 3]]),
    (first_fit_decreasing, Budget(10, 4), [(1, 1), (1, 4), (9, 0)], [[1, 2], [0]]),
    (first_fit_shuffle, Budget(10, 4, pad_to_multiple_of=4), [(3, 0), (3, 0), (3, 0)], [[0, 1], [2]]),
    (first_fit_shuffle, Budget(10, 4, max_attention_cost=40), [(5, 0), (5, 0), (3, 0)], [[0, 2], [1]]),
    (first_fit_decreasing, Budget(10, 0), [], []),
]


@pytest.mark.parametrize(("policy", "budget", "sizes", "packs"), FIRST_FIT)
def test_first_fit(policy, budget, sizes, packs):
    fragments = [whole(i, tokens, tiles) for i, (tokens, tiles) in enumerate(sizes)]
    assert [[f.position for f in pack] for pack in policy(fragments, budget)] == packs


@pytest.mark.slow
def test_the_preset_tells_its_fill_and_its_bound(data, preset, tokenizer):
    statistics = Preset(preset).content["statistics"]
    (loader,) = preset_loaders(preset, data, tokenizer)
    batches = [b for b in loader if b["num_segments"]]
    assert statistics["packs"] == len(batches) >= statistics["packs_bound"]
    assert statistics["tokens"] == sum(b["num_real_tokens"] for b in batches)
    assert statistics["tiles"] == sum(b["num_tiles"] for b in batches)
    assert statistics["token_fill"] == pytest.approx(statistics["tokens"] / (len(batches) * 300), abs=1e-6)
    assert statistics["segments"] == sum(b["num_segments"] for b in batches)
    assert sum(statistics["segment_tokens_by_power_of_two"].values()) == statistics["segments"]
    assert list(statistics["refused"].values()) == [1]


def test_fill_is_told_before_and_after_alignment(data, tokenizer, tmp_path):
    preset = planned(data, tmp_path / "preset", tokenizer, replace(CONFIG, pad_to_multiple_of=16))
    statistics = preset.content["statistics"]
    assert statistics["alignment_padding"] > 0
    assert statistics["token_fill"] < statistics["token_fill_with_alignment"] <= 1
    import pyarrow.parquet as pq

    for row in pq.read_table(tmp_path / "preset" / "packs.parquet").to_pylist():
        real, padded = row["cu_seqlens"], row["cu_seqlens_padded"]
        assert all(b % 16 == 0 for b in padded) and padded[-1] <= 300
        assert [b - a for a, b in pairwise(real)] == row["lengths"]


# -- order, resume, elasticity -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "options"), [(1, {}), (2, {"packs_per_batch": 2}), (3, {"accumulation": 2})])
def test_every_rank_trains_the_batches_that_the_stream_gives_it(ranks, options, data, preset, tokenizer):
    stream = stream_loaders(data, tokenizer, ranks, config=CONFIG, **options)
    assert steps_of(preset_loaders(preset, data, tokenizer, ranks=ranks, **options)) == steps_of(stream)


@pytest.mark.slow
@pytest.mark.parametrize("epoch", [0, 1])
def test_workers_and_ranks_do_not_change_the_steps(epoch, data, preset, tokenizer):
    def at(ranks: int, accumulation: int, workers: int = 0):
        found = preset_loaders(preset, data, tokenizer, ranks=ranks, accumulation=accumulation, num_workers=workers)
        for loader in found:
            loader.set_epoch(epoch)
        return found

    expected = samples_of(at(1, 6))
    assert samples_of(at(2, 3, workers=2)) == samples_of(at(3, 2)) == samples_of(at(6, 1)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_a_saved_run_goes_on_with_other_ranks_at_the_next_step(epoch, data, preset, tokenizer):
    def at(ranks: int):
        loaders = preset_loaders(preset, data, tokenizer, ranks=ranks, accumulation=4 // ranks)
        for loader in loaders:
            loader.set_epoch(epoch)
        return loaders

    def sets(steps):
        return [sorted(step) for step in steps]

    expected = sets(steps_of(at(1)))
    first = at(2)
    head = steps_of(first, stop=3)
    second = at(4)
    resume(second, saved(first))
    middle = steps_of(second, stop=2)
    third = at(1)
    resume(third, saved(second))
    # The last step may be parted over more ranks than it has packs; here one rank takes it.
    assert sets(head + middle + steps_of(third)) == expected
    third[0].ledger.check()
    assert third[0].ledger.samples_packed == GOOD


def test_a_run_does_not_go_on_from_streaming_to_a_preset(data, preset, tokenizer):
    stream, (loader,) = stream_loader(data, tokenizer, config=CONFIG), preset_loaders(preset, data, tokenizer)
    next(iter(stream))
    with pytest.raises(UserError, match="resume: preset was None"):
        loader.load_state_dict(stream.state_dict())


# -- planning goes on, and is the same every time ------------------------------------------------------


@pytest.fixture
def no_survey(tmp_path, monkeypatch):
    """A user who has surveyed nothing yet."""
    monkeypatch.setenv("INTERNVL_PACK_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
def test_two_plans_are_the_same_to_the_byte_with_any_number_of_processes(data, preset, tokenizer, tmp_path, no_survey):
    planned(data, tmp_path / "again", tokenizer, num_workers=2)
    assert files(tmp_path / "again") == files(preset)


def test_data_that_has_been_moved_gives_the_same_preset(data, preset, tokenizer, tmp_path, monkeypatch):
    shutil.copytree(data.parent, tmp_path / "moved")
    planned(tmp_path / "moved" / "meta.json", tmp_path / "again", tokenizer)
    assert files(tmp_path / "again") == files(preset)
    monkeypatch.chdir(tmp_path / "moved")
    planned("meta.json", tmp_path / "near", tokenizer)
    assert files(tmp_path / "near") == files(preset)


@pytest.mark.parametrize("stage", ["measuring", "planning", "writing"])
def test_a_plan_that_was_stopped_goes_on(stage, data, preset, tokenizer, tmp_path, monkeypatch, no_survey):
    monkeypatch.setattr("internvl_pack.survey.workers.BLOCK_ROWS", 32)
    out = tmp_path / "preset"
    measured: Counter[int] = Counter()
    measure = Survey.measure

    def counted(self, dataset, row):
        measured[row] += 1
        return measure(self, dataset, row)

    def stopping(what, total, steps):
        for number, _ in enumerate(steps):
            if stage == what and number == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(Survey, "measure", counted)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if stage == "writing":
            patch.setattr(write_preset, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        planned(data, out, tokenizer, progress=stopping)
    with (
        pytest.raises(UserError, match="its planning has not been finished")
        if stage != "writing"
        else (pytest.raises(UserError, match=r"no preset.json there"))
    ):
        Preset(out)
    planned(data, out, tokenizer)
    assert len(measured) == COUNT + 6
    twice = [row for row, times in measured.items() if times > 1]
    assert len(twice) <= 1, "only the row that was refused is tried again"
    assert files(out) == files(preset)


def test_a_plan_that_was_killed_goes_on_from_its_survey(data, tokenizer, tmp_path, monkeypatch):
    """A forked process is killed on its way; this one goes on."""
    monkeypatch.setattr(workers, "BLOCK_ROWS", 16)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    options = ["plan", str(data), "--out", str(tmp_path / "preset"), "--tokenizer", str(tmp_path / "tokenizer")]
    options += ["--workers", "0", "--max_packed_tokens", "4096"]
    reading, writing = os.pipe()

    def slowly(survey, dataset, row, measure=Survey.measure):
        time.sleep(0.02)
        os.write(writing, f"{row}\n".encode())
        return measure(survey, dataset, row)

    with monkeypatch.context() as patched:
        patched.setattr(Survey, "measure", slowly)
        process = multiprocessing.get_context("fork").Process(target=main, args=(options,))
        process.start()
    os.close(writing)
    with open(reading, encoding="ascii") as rows:
        before = [int(row) for row in islice(rows, 60)]
        process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(before) == 60 and not (tmp_path / "preset" / "preset.json").exists()

    after: list[int] = []
    with monkeypatch.context() as patched:
        measure = Survey.measure
        patched.setattr(Survey, "measure", lambda self, d, row: after.append(row) or measure(self, d, row))
        assert main(options) == 0
    assert before[:48] == list(range(48))  # whole blocks
    assert len(set(after)) >= COUNT + 6 - 64 and set(before[:48]) - set(after) >= set(range(48)) - {5}
    monkeypatch.setenv("INTERNVL_PACK_CACHE", str(tmp_path / "of the whole"))
    options[3] = str(tmp_path / "whole")
    assert main(options) == 0
    assert files(tmp_path / "preset") == files(tmp_path / "whole")


def test_a_finished_preset_is_kept_and_one_of_other_options_is_not_overwritten(data, tokenizer, tmp_path, preset):
    shutil.copytree(preset, tmp_path / "preset")
    before = files(tmp_path / "preset")
    planned(data, tmp_path / "preset", tokenizer)
    for config, options in ((replace(CONFIG, seed=4), {}), (CONFIG, {"epochs": 2})):
        with pytest.raises(UserError, match="holds a preset of other data or options"):
            planned(data, tmp_path / "preset", tokenizer, config, **options)
    assert files(tmp_path / "preset") == before


def test_planning_makes_one_preset_whatever_stopped_before_it(tokenizer, tmp_path):
    def stop(what, total, steps):
        for _ in steps:
            pass
        if what == "measuring":
            raise KeyboardInterrupt

    meta = write_jsonl(tmp_path, 20)
    with pytest.raises(KeyboardInterrupt):
        planned(meta, tmp_path / "preset", tokenizer, progress=stop)
    write_jsonl(tmp_path, 20, seed=1)
    planned(meta, tmp_path / "preset", tokenizer)
    planned(meta, tmp_path / "fresh", tokenizer)
    assert files(tmp_path / "preset") == files(tmp_path / "fresh")


# -- refused when it does not fit ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_packed_tokens": 301}, "max_packed_tokens was 300 and is 301 now"),
        ({"num_images_expected": 10}, "num_images_expected was 9 and is 10 now"),
        ({"max_seq_length": 200}, "max_seq_length was None and is 200 now"),
        ({"oversize": "drop"}, "oversize was 'split' and is 'drop' now"),
        ({"pad_to_multiple_of": 8}, "pad_to_multiple_of was 1 and is 8 now"),
        ({"replacement": True}, "replacement was False and is True now"),
    ],
)
def test_other_budgets_than_the_planned_ones_are_refused_by_name(change, named, data, preset, tokenizer):
    with pytest.raises(UserError, match=named):
        PresetDataset.open(preset, data, tokenizer, replace(CONFIG, **change), encode=TINY)


def test_what_the_preset_decides_itself_need_not_be_given_again(data, preset, tokenizer):
    other = replace(CONFIG, seed=77, max_buffer_size=64, packing_policy="greedy", max_seq_length=300)
    dataset = PresetDataset.open(preset, data, tokenizer, other, encode=TINY)
    assert dataset.fingerprint() == PresetDataset.open(preset, data, tokenizer).fingerprint()
    assert dataset.config.seed == 3


def test_other_tiles_and_tokenizers_are_refused_by_name(data, preset, tokenizer):
    from internvl_pack.testing.tiny import tiny_tokenizer

    with pytest.raises(UserError, match="max_dynamic_patch was 6 and is 12 now"):
        PresetDataset.open(preset, data, tokenizer, CONFIG, encode=replace(TINY, max_dynamic_patch=12))
    with pytest.raises(UserError, match="tokenizer was"):
        PresetDataset.open(preset, data, tiny_tokenizer(["other words"]), CONFIG, encode=TINY)


@pytest.fixture
def moved(data, tmp_path) -> Path:
    return Path(shutil.copytree(data.parent, tmp_path / "moved")) / "meta.json"


CHANGES = [
    ({"repeat_time": 2}, "repeat_time of dataset 'made' was 1.0 and is 2.0 now"),
    ({"max_dynamic_patch": 3}, "max_dynamic_patch of dataset 'made' was None and is 3 now"),
]


@pytest.mark.parametrize(("entry", "named"), CHANGES)
def test_another_meta_file_is_refused_by_name(entry, named, moved, preset, tokenizer):
    write_meta(moved.parent, {"made": {"root": "images", "annotation": "made.jsonl"} | entry})
    with pytest.raises(UserError, match=named):
        PresetDataset.open(preset, moved, tokenizer, CONFIG, encode=TINY)


def test_changed_rows_and_other_datasets_are_refused_by_name(moved, preset, tokenizer):
    lines = (moved.parent / "made.jsonl").read_text().splitlines(keepends=True)
    (moved.parent / "made.jsonl").write_text("".join([*lines[:3], lines[3].replace("s3", "s9"), *lines[4:]]))
    with pytest.raises(UserError, match="content of dataset 'made' was"):
        PresetDataset.open(preset, moved, tokenizer, CONFIG, encode=TINY)
    write_meta(moved.parent, {"other": {"root": "images", "annotation": "made.jsonl"}})
    with pytest.raises(UserError, match="dataset 'made' was 'there' and is 'not there' now"):
        PresetDataset.open(preset, moved, tokenizer, CONFIG, encode=TINY)


@pytest.mark.slow
def test_a_sample_that_has_changed_leaves_its_pack_by_its_id(moved, preset, tokenizer):
    path = sorted((moved.parent / "images").iterdir())[0]
    path.write_bytes(png(56, 336, 9))
    (loader,) = preset_loaders(preset, moved, tokenizer)
    seen = {i for b in loader for i in b["sample_ids"]} - {FILLER_ID}
    changed = f"made/{int(path.name[:5])}"
    assert changed not in seen and len(seen) == GOOD - 1
    loader.ledger.check()
    assert {e["id"]: e["reason"] for e in loader.take_events()}[changed] == "changed_since_survey"


@pytest.mark.slow
def test_images_that_went_away_since_cost_their_samples_only(moved, preset, tokenizer):
    gone = sorted((moved.parent / "images").iterdir())[8]
    gone.unlink()
    (loader,) = preset_loaders(preset, moved, tokenizer)
    seen = {i for b in loader for i in b["sample_ids"]} - {FILLER_ID}
    assert f"made/{int(gone.name[:5])}" not in seen and len(seen) == GOOD - 1
    loader.ledger.check()
    assert loader.ledger.samples_quarantined == 2
    assert {e["id"] for e in loader.take_events()} >= {f"made/{int(gone.name[:5])}"}


def test_damaged_and_missing_presets_are_refused(data, preset, tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"no preset.json there: internvl-pack plan META"):
        PresetDataset.open(tmp_path, data, tokenizer)
    shutil.copytree(preset, tmp_path / "cut")
    packs = tmp_path / "cut" / "packs.parquet"
    packs.write_bytes(packs.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"packs.parquet has \d+ bytes, \d+ when it was planned"):
        PresetDataset.open(tmp_path / "cut", data, tokenizer)


def packs_of(folder: Path) -> list[tuple]:
    packs = PresetPacks(Preset(folder), 0)
    return [(pack.cost, pack.fragments) for pack in iter(packs.next_pack, None)]


@pytest.mark.slow
def test_flipped_and_forged_bytes_of_packs_are_refused_or_change_nothing(preset, tmp_path):
    expected, draw = packs_of(preset), random.Random(0)
    shutil.copytree(preset, tmp_path / "p")
    path = tmp_path / "p" / "packs.parquet"
    whole = path.read_bytes()
    content = json.loads((preset / "preset.json").read_text())
    for forged in [False] * 2 + [True] * 60:  # with a hash that says so, too
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        if forged:
            content["files"]["packs.parquet"] = file_facts(path)
            (tmp_path / "p" / "preset.json").write_text(json.dumps(content))
        try:
            found = packs_of(tmp_path / "p")
        except UserError as error:
            assert str(error).startswith("preset ") and "\n" not in str(error)
        else:
            assert forged and found == expected, "a pack was read that nobody planned"


def test_entries_of_a_preset_that_are_missing_or_of_another_type_are_told_in_one_line(preset, tmp_path):
    shutil.copytree(preset, tmp_path / "p")
    whole = json.loads((preset / "preset.json").read_text())
    for path in [(name,) for name in whole] + [("files", name) for name in whole["files"]] + [("packs", 0)]:
        for wrong in (None, "x", [], {}, -1, [1.5], ["x"]):
            content = json.loads(json.dumps(whole))
            holder = content
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = wrong
            (tmp_path / "p" / "preset.json").write_text(json.dumps(content))
            try:
                Preset(tmp_path / "p")
            except UserError as error:
                assert "\n" not in str(error)
            else:
                assert path[0] in ("data", "statistics"), (path, wrong)


def test_data_in_which_nothing_loads_and_runs_that_stop_are_told_when_planned(tokenizer, tmp_path):
    meta = write_jsonl(tmp_path, 3)
    for path in (tmp_path / "images").iterdir():
        path.write_bytes(b"no image")
    with pytest.raises(UserError, match=r"made/\d: image_"):
        planned(meta, tmp_path / "a", tokenizer, replace(CONFIG, on_error="stop"))
    (tmp_path / "made.jsonl").write_text("[]\n" * 40)
    with pytest.raises(UserError, match="dataset 'made': none of its first 32 samples can be used"):
        planned(meta, tmp_path / "b", tokenizer, CONFIG)
    (tmp_path / "made.jsonl").write_text("[]\n" * 4)
    with pytest.raises(UserError, match="no sample of the data can be trained on"):
        planned(meta, tmp_path / "c", tokenizer)
