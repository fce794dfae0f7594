"""From data to batches: one sequence of steps on every topology, each sample once, a finite end, exact resume."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from helpers.factory import TINY, write_jsonl, write_shards
from helpers.loaders import fingerprint, resume, samples_of, segments_of, steps_of, stream_loader, stream_loaders
from torch.utils.data import DataLoader

from internvl_pack import PackedDataset, PackingConfig, UserError, build_loader, packed_collate_fn
from internvl_pack.ledger import Losses
from internvl_pack.stream.state import STATE_VERSION, make_state, read_state

COUNT = 132
CONFIG = PackingConfig(max_packed_tokens=400, num_images_expected=16, max_buffer_size=8, seed=3)
loader_of, loaders = (partial(make, config=CONFIG) for make in (stream_loader, stream_loaders))


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("jsonl"), COUNT)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards"), COUNT)


# Every two of ranks, accumulation and packs a batch with every other.
GRID = [(ranks, accumulation, 1 + (ranks + accumulation) % 3) for ranks in range(1, 6) for accumulation in range(1, 6)]


@pytest.fixture(scope="module")
def by_packs_per_step(jsonl, tokenizer) -> dict[int, list]:
    """The steps of one rank that makes all micro-batches itself."""
    wanted = sorted({r * a * b for r, a, b in GRID})
    return {n: samples_of(loaders(jsonl, tokenizer, accumulation=n)) for n in wanted}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "accumulation", "packs_per_batch"), GRID)
def test_every_grid_gives_the_same_steps_each_sample_once_none_empty(
    ranks, accumulation, packs_per_batch, jsonl, tokenizer, by_packs_per_step
):
    shape = {"accumulation": accumulation, "packs_per_batch": packs_per_batch}
    steps = samples_of(loaders(jsonl, tokenizer, ranks, **shape))
    assert steps == by_packs_per_step[ranks * accumulation * packs_per_batch]
    assert all(steps) and Counter(name for step in steps for name, _ in step) == Counter(
        f"made/{row}" for row in range(COUNT)
    )


@pytest.fixture(scope="module")
def without_workers(jsonl, tokenizer) -> dict[tuple[int, int, int], list[str]]:
    """The batches of (rank, ranks, accumulation)."""
    places = [(rank, ranks, n) for ranks, n in ((1, 1), (2, 3), (3, 2)) for rank in sorted({0, ranks - 1})]
    return {
        place: [fingerprint(batch) for batch in loader_of(jsonl, tokenizer, *place[:2], accumulation=place[2])]
        for place in places
    }


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_any_number_of_workers_gives_the_same_batches(workers, without_workers, jsonl, tokenizer):
    for (rank, ranks, accumulation), expected in without_workers.items():
        found = loader_of(jsonl, tokenizer, rank, ranks, accumulation=accumulation, num_workers=workers)
        assert [fingerprint(batch) for batch in found] == expected


@pytest.mark.slow
def test_shards_give_the_steps_of_the_same_samples_in_a_file(jsonl, shards, tokenizer):
    expected = samples_of(loaders(jsonl, tokenizer, 2, accumulation=2))
    found = samples_of(loaders(shards, tokenizer, 2, accumulation=2))
    assert [len(step) for step in found] == [len(step) for step in expected]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 3])
def test_plain_dataloaders_see_each_sample_once_and_end_together(workers, jsonl, tokenizer):
    seen: Counter[str] = Counter()
    lengths = []
    for rank in range(3):
        dataset = PackedDataset.from_meta(jsonl, tokenizer, CONFIG, encode=TINY, rank=rank, world_size=3)
        batches = list(DataLoader(dataset, batch_size=2, num_workers=workers, collate_fn=packed_collate_fn))
        lengths.append(sum(batch["num_packs"] for batch in batches))
        seen.update(name for batch in batches for name, _ in segments_of(batch))
    assert set(seen.values()) == {1} and len(seen) == COUNT
    assert len(set(lengths)) == 1


@pytest.mark.slow
def test_rank_and_world_size_come_from_the_environment(jsonl, tokenizer, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    dataset = PackedDataset.from_meta(jsonl, tokenizer, CONFIG, encode=TINY)
    expected = loader_of(jsonl, tokenizer, 2, 3)
    assert [fingerprint(b) for b in build_loader(dataset)] == [fingerprint(b) for b in expected]


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_rank_in_the_environment_that_is_no_number_is_told_by_its_name(name, jsonl, tokenizer, monkeypatch):
    monkeypatch.setenv(name, "x")
    with pytest.raises(UserError, match=f"environment variable {name}=x: give a whole number"):
        PackedDataset.from_meta(jsonl, tokenizer, CONFIG, encode=TINY)


@pytest.mark.parametrize("epoch", ["2", -1, 1.0, None, True])
def test_an_epoch_that_is_no_number_is_refused_and_changes_nothing(epoch, jsonl, tokenizer):
    loader = loader_of(jsonl, tokenizer)
    list(islice(loader, 3))
    with pytest.raises(UserError, match=r"set_epoch\(.*\): give a whole number"):
        loader.set_epoch(epoch)
    assert loader.epoch == 0 and loader.steps_done > 0


def test_rows_are_found_after_the_process_has_changed_its_folder(tokenizer, tmp_path, monkeypatch):
    meta = write_jsonl(tmp_path, 20)
    monkeypatch.chdir(meta.parent)
    loader = loader_of(meta.name, tokenizer)
    monkeypatch.chdir("/")
    assert sum(len(segments_of(batch)) for batch in loader) >= 20 and not loader.take_events()


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_is_none_of_the_world_is_refused(rank, world_size, jsonl, tokenizer):
    with pytest.raises(UserError, match=f"rank {rank} of world_size {world_size}"):
        loader_of(jsonl, tokenizer, rank, world_size)


ANEW = {
    "a second iterator": iter,
    "another epoch": lambda loader: loader.set_epoch(1),
    "a state": lambda loader: loader.load_state_dict(loader.state_dict()),
}


@pytest.mark.parametrize("anew", ANEW)
def test_an_iteration_does_not_go_on_once_the_loader_was_begun_anew(anew, jsonl, tokenizer):
    loader = loader_of(jsonl, tokenizer)
    first = iter(loader)
    next(first)
    ANEW[anew](loader)
    before = loader.state_dict()
    with pytest.raises(RuntimeError, match="this iteration of the PackLoader has ended"):
        next(first)
    assert loader.state_dict() == before


@pytest.mark.slow
def test_epochs_have_other_orders_and_each_holds_all(jsonl, tokenizer):
    loader = loader_of(jsonl, tokenizer, accumulation=4)
    found = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        found.append(samples_of([loader]))
        assert sum(map(len, found[-1])) >= COUNT
        loader.ledger.check()
        assert loader.ledger.samples_packed == COUNT
    assert found[0] != found[1] != found[2]
    again = loader_of(jsonl, tokenizer, accumulation=4, num_workers=2, persistent_workers=True)
    for epoch in (0, 2, 1):
        again.set_epoch(epoch)
        assert samples_of([again]) == found[epoch]


@pytest.mark.parametrize(
    ("data", "ranks", "steps"),
    [(1, 4, 1), (3, 8, 1), (7, 2, None)],
    ids=["one sample for four ranks", "three for eight", "seven for two"],
)
def test_less_data_than_ranks_gives_all_of_them_the_same_few_batches(data, ranks, steps, tokenizer, tmp_path):
    found = samples_of(loaders(write_jsonl(tmp_path, data), tokenizer, ranks, accumulation=2))
    assert Counter(name for step in found for name, _ in step) == Counter(f"made/{row}" for row in range(data))
    assert steps is None or len(found) == steps


@pytest.mark.slow
def test_a_last_step_of_fewer_packs_than_ranks_gives_all_of_them_work(jsonl, tokenizer):
    for ranks in (5, 7, 11):
        last = [list(loader)[-1] for loader in loaders(jsonl, tokenizer, ranks)]
        assert all(segments_of(batch) for batch in last) or sum(len(segments_of(batch)) for batch in last) < ranks


# -- resume --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(jsonl, tokenizer) -> list:
    return samples_of(loaders(jsonl, tokenizer, 2, accumulation=3))


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "workers"), [(0, 0), (1, 4), (3, 0), (7, 2)])
def test_a_run_goes_on_from_its_state_on_any_ranks_and_workers(stop, workers, whole, jsonl, tokenizer):
    first = loaders(jsonl, tokenizer, 2, accumulation=3, num_workers=workers)
    assert len(steps_of(first, stop)) == stop
    states = [json.loads(json.dumps(loader.state_dict())) for loader in first]
    assert states[0] == states[1], "the same on every rank"
    for ranks, accumulation, workers in ((1, 6, 0), (6, 1, 0), (3, 2, 2), (2, 3, 1), (1, 6, 4)):
        later = loaders(jsonl, tokenizer, ranks, accumulation=accumulation, num_workers=workers)
        resume(later, states[0])
        assert samples_of(later) == whole[stop:]
        later[0].ledger.check()
        assert later[0].ledger.samples_packed == COUNT


@pytest.mark.slow
def test_the_state_counts_whole_steps_that_were_delivered_not_what_was_prefetched(jsonl, tokenizer):
    loader = loader_of(jsonl, tokenizer, accumulation=3, num_workers=2, prefetch_factor=4)
    batches = iter(loader)
    for number in range(1, 10):
        next(batches)
        assert loader.steps_done == number // 3
        state = loader.state_dict()
        assert (state["plan"] or {"step": 0})["step"] == number // 3


@pytest.mark.slow
def test_resumed_batches_are_equal_to_the_byte(jsonl, tokenizer):
    config = replace(CONFIG, max_packed_tokens=90, repeat_system_prompt=True)  # many samples are split
    expected = [fingerprint(batch) for batch in loader_of(jsonl, tokenizer, accumulation=2, config=config)]
    loader = loader_of(jsonl, tokenizer, accumulation=2, config=config)
    found = [fingerprint(batch) for batch in islice(iter(loader), 40)]
    later = loader_of(jsonl, tokenizer, accumulation=2, config=config, num_workers=2)
    later.load_state_dict(loader.state_dict())
    assert found + [fingerprint(batch) for batch in later] == expected
    assert any(batch["fragments"][0][1] > 1 for batch in loader_of(jsonl, tokenizer, config=config))


@pytest.mark.slow
def test_a_state_at_the_end_of_an_epoch_has_nothing_left_in_it(jsonl, tokenizer):
    loader = loader_of(jsonl, tokenizer)
    list(loader)
    later = loader_of(jsonl, tokenizer)
    later.load_state_dict(loader.state_dict())
    assert not list(later)
    later.set_epoch(1)
    second = loader_of(jsonl, tokenizer)
    second.set_epoch(1)
    assert [fingerprint(b) for b in later] == [fingerprint(b) for b in second]


@pytest.mark.slow
def test_other_packs_a_step_are_said_and_train_the_rest_once(jsonl, tokenizer, caplog):
    loader = loader_of(jsonl, tokenizer, accumulation=4)
    batches = iter(loader)
    seen = Counter(name for batch in islice(batches, 12) for name, _ in segments_of(batch))
    later = loader_of(jsonl, tokenizer, accumulation=3)
    later.load_state_dict(loader.state_dict())
    assert "4 packs a step when the checkpoint was saved, 3 now" in caplog.text
    seen.update(name for batch in later for name, _ in segments_of(batch))
    assert seen == Counter(f"made/{row}" for row in range(COUNT))


REFUSED = [
    ({"max_packed_tokens": 500}, "max_packed_tokens was 400 when the checkpoint was saved and is 500 now"),
    ({"seed": 4}, "seed was 3"),
    ({"oversize": "drop"}, "oversize was 'split'"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_state_of_other_options_is_refused_by_their_name(changes, message, jsonl, tokenizer):
    state = loader_of(jsonl, tokenizer).state_dict()
    other = loader_of(jsonl, tokenizer, config=replace(CONFIG, **changes))
    with pytest.raises(UserError, match=message):
        other.load_state_dict(state)
    other.load_state_dict(state, check_options=False)


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ({"objective": "mpo"}, {}, "objective was 'mpo' when the checkpoint was saved and is 'sft' now"),
        ({}, {"objective": "dpo"}, "objective was 'sft' when the checkpoint was saved and is 'dpo' now"),
        ({}, {"share_prefix": True}, "share_prefix was False when the checkpoint was saved and is True now"),
    ],
)
def test_an_option_that_stands_in_no_fingerprint_at_its_default_is_named_by_it(before, now, message):
    state = make_state(0, before, None, Losses().state_dict())
    with pytest.raises(UserError, match=message):
        read_state(state, now)


def test_options_that_do_not_change_packs_may_differ(jsonl, tokenizer, tmp_path):
    state = loader_of(jsonl, tokenizer).state_dict()
    config = replace(CONFIG, on_error="stop", max_bad_fraction=0.5, survey_dir=str(tmp_path))
    loader_of(jsonl, tokenizer, config=config).load_state_dict(state)


def test_a_state_of_another_version_is_refused_in_one_line(jsonl, tokenizer):
    state = loader_of(jsonl, tokenizer).state_dict()
    for version in (2, None):
        with pytest.raises(UserError, match=f"version {version}, this release reads version {STATE_VERSION}"):
            loader_of(jsonl, tokenizer).load_state_dict({**state, "version": version})


def entries(value: Any, path: tuple = ()) -> list[tuple]:
    """The paths of all entries of a state's objects."""
    if not isinstance(value, dict):
        return []
    return [each for key in value for each in [(*path, key), *entries(value[key], (*path, key))]]


@pytest.mark.slow
def test_a_state_that_lacks_an_entry_or_has_another_type_there_is_refused_in_one_line(jsonl, tokenizer):
    loader = loader_of(jsonl, tokenizer, accumulation=2)
    list(islice(loader, 40))
    whole = json.dumps(loader.state_dict())
    for path in entries(json.loads(whole)):
        for wrong in (None, "x", [], 1.5, "taken away"):
            state = json.loads(whole)
            *above, last = path
            holder = state
            for key in above:
                holder = holder[key]
            if wrong == "taken away":
                del holder[last]
            else:
                holder[last] = wrong
            if (path == ("plan",) and wrong is None) or above[-1:] in (["good"], ["bad"]):
                continue  # the start of an epoch; how many rows were good or bad of which dataset
            if above == ["options"] and wrong in (None, "taken away") and json.loads(whole)["options"][last] is None:
                continue
            if state == json.loads(whole):  # it was an empty list
                continue
            with pytest.raises(UserError) as refusal:
                loader.load_state_dict(state)
            assert str(refusal.value).startswith("resume: ") and "\n" not in str(refusal.value), path


def test_a_state_whose_counts_do_not_add_up_is_refused(jsonl, tokenizer):
    loader = loader_of(jsonl, tokenizer)
    list(islice(loader, 40))
    text = json.dumps(loader.state_dict())
    names = json.loads(text)["plan"]["ledger"]["counts"].keys() - {"samples_split", "samples_trained_in_part"}
    for changed in (*((name,) for name in names), ("samples_in", "samples_packed")):
        state = json.loads(text)
        for name in changed:
            state["plan"]["ledger"]["counts"][name] += 1
        with pytest.raises(UserError, match="the plan of the saved state is damaged"):
            loader.load_state_dict(state)


@pytest.mark.slow
def test_a_state_of_more_samples_than_there_are_is_refused_where_options_are_ignored(jsonl, tokenizer, tmp_path):
    loader = loader_of(jsonl, tokenizer)
    list(loader)
    fewer = loader_of(write_jsonl(tmp_path, 20), tokenizer)
    with pytest.raises(UserError, match=f"resume: {COUNT} samples of the epoch were read .* the data has 20 now"):
        fewer.load_state_dict(loader.state_dict(), check_options=False)


@pytest.mark.parametrize(
    "smaller",
    [
        {"max_packed_tokens": 330},
        {"num_images_expected": 3},
        {"max_attention_cost": 110_000},
        {"pad_to_multiple_of": 64},
    ],
)
def test_packs_of_a_larger_budget_are_refused_also_where_options_are_ignored(smaller, jsonl, tokenizer):
    loader = loader_of(jsonl, tokenizer, accumulation=2)
    list(islice(loader, 40))
    now = loader_of(jsonl, tokenizer, accumulation=2, config=replace(CONFIG, **smaller))
    with pytest.raises(UserError, match="packs of a larger budget: set max_packed_tokens"):
        now.load_state_dict(loader.state_dict(), check_options=False)


def test_a_file_whose_rows_changed_places_is_refused_though_all_lengths_agree(tokenizer, tmp_path):
    turns = [{"from": "human", "value": "one two"}, {"from": "gpt", "value": "three"}]
    rows = [json.dumps({"id": f"{n:02d}", "conversations": turns}) for n in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    meta = tmp_path / "meta.json"
    meta.write_text(json.dumps({"a": {"root": "", "annotation": "a.jsonl", "repeat_time": 1, "data_augment": False}}))
    state = loader_of(meta, tokenizer).state_dict()
    rows[3], rows[30] = rows[30], rows[3]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    with pytest.raises(UserError, match="resume: meta was"):
        loader_of(meta, tokenizer).load_state_dict(state)


def test_data_that_was_moved_goes_on(tokenizer, tmp_path):
    meta = write_jsonl(tmp_path / "here", 40)
    loader = loader_of(meta, tokenizer)
    next(iter(loader))
    shutil.move(tmp_path / "here", tmp_path / "there")
    loader_of(tmp_path / "there" / "meta.json", tokenizer).load_state_dict(loader.state_dict())


# -- samples that leave --------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_image_that_is_damaged_after_the_survey_leaves_its_pack_by_id(tokenizer, tmp_path):
    meta = write_jsonl(tmp_path, 60)
    expected = samples_of(loaders(meta, tokenizer, 2))
    images = sorted((tmp_path / "images").glob("*.png"))
    damaged = {f"made/{int(path.name.split('_')[0])}" for path in images[:9]}
    for path in images[:9]:
        data = path.read_bytes()
        path.write_bytes(data[: len(data) - 40] + b"\0" * 40)
    found = loaders(meta, tokenizer, 2)
    steps = samples_of(found)
    assert steps == [[pair for pair in step if pair[0] not in damaged] for step in expected]
    events = [event for loader in found for event in loader.take_events()]
    assert {event["id"] for event in events} == damaged
    losses = Losses.merged(loader.losses.state_dict() for loader in found)
    ledger = found[0].ledger_of(losses)
    ledger.check()
    assert ledger.samples_quarantined == len(damaged) and ledger.samples_packed == 60 - len(damaged)


@pytest.mark.slow
def test_a_row_that_is_another_sample_now_leaves_its_pack_by_id(tokenizer, tmp_path):
    """An image of another size makes other tiles: the survey, by the annotation's content, knows nothing of it."""
    from helpers.factory import png

    meta = write_jsonl(tmp_path, 60)
    list(loader_of(meta, tokenizer))
    path = sorted((tmp_path / "images").glob("*.png"))[4]
    path.write_bytes(png(56, 56 * 6, 3))
    loader = loader_of(meta, tokenizer)
    names = {name for batch in loader for name, _ in segments_of(batch)}
    (event,) = loader.take_events()
    assert event["id"] == f"made/{int(path.name.split('_')[0])}" and event["id"] not in names
    assert event["reason"] == "changed_since_survey" and "was surveyed as another" in event["detail"]
    loader.ledger.check()
    assert len(names) == 59


@pytest.mark.slow
def test_a_picture_that_was_mended_is_read_by_the_next_run(tokenizer, tmp_path):
    meta = write_jsonl(tmp_path, 60)
    path = sorted((tmp_path / "images").glob("*.png"))[0]
    whole = path.read_bytes()
    path.write_bytes(b"no picture")
    loader = loader_of(meta, tokenizer)
    list(loader)
    assert loader.ledger.samples_quarantined == 1 and len(loader.take_events()) == 1
    path.write_bytes(whole)
    again = loader_of(meta, tokenizer)
    list(again)
    assert again.ledger.samples_packed == 60 and not again.take_events()


@pytest.mark.slow
def test_a_share_of_bad_samples_above_the_limit_stops_the_run(tokenizer, tmp_path):
    meta = write_jsonl(tmp_path, 60)
    for path in sorted((tmp_path / "images").glob("*.png"))[::3]:
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"max_bad_fraction 0\.1: \d+ of \d+ samples read are bad"):
        list(loader_of(meta, tokenizer, config=replace(CONFIG, max_bad_fraction=0.1), num_workers=2))


@pytest.mark.slow
def test_a_mistake_that_stops_the_run_reaches_the_main_process_in_one_line(tokenizer, tmp_path):
    meta = write_jsonl(tmp_path, 60)
    sorted((tmp_path / "images").glob("*.png"))[0].write_bytes(b"")
    for workers in (0, 2):
        with pytest.raises(UserError) as error:
            list(loader_of(meta, tokenizer, config=replace(CONFIG, on_error="stop"), num_workers=workers))
        assert str(error.value).startswith("made/") and "\n" not in str(error.value)


def test_options_of_earlier_releases_are_accepted_with_a_line(caplog):
    config = PackingConfig(num_lanes=64, balance_reservoir=16)
    assert config == PackingConfig()
    assert "num_lanes is not needed any more" in caplog.text and "balance_reservoir" in caplog.text


@pytest.mark.parametrize(("name", "value"), [("packs_per_batch", 0), ("accumulation", 0)])
def test_counts_below_one_are_refused(name, value, jsonl, tokenizer):
    with pytest.raises(UserError, match=f"{name} is 0: give at least 1"):
        loader_of(jsonl, tokenizer, **{name: value})


@pytest.mark.slow
def test_replacement_draws_and_weights_make_epochs_of_the_same_size(jsonl, tokenizer):
    config = replace(CONFIG, replacement=True)
    steps = samples_of(loaders(jsonl, tokenizer, 2, accumulation=2, config=config))
    count = Counter(name for step in steps for name, fragment in step if fragment[0] == 0)
    assert count.total() == COUNT and max(count.values()) > 1


def test_a_row_of_several_packs_is_flattened_and_counts_as_one_micro_batch(jsonl, tokenizer):
    batches = list(loader_of(jsonl, tokenizer, packs_per_batch=3))
    assert max(batch["num_packs"] for batch in batches) == 3
    assert all(batch["num_packs"] == 3 for batch in batches[:-1])
    assert all(batch["input_ids"].shape[0] == 1 for batch in batches)


def test_tiles_of_a_pack_reach_the_batch_without_a_copy(jsonl, tokenizer):
    dataset = PackedDataset.from_meta(jsonl, tokenizer, CONFIG, encode=TINY)
    row = next(row for row in dataset if sum(len(s.tiles) for s in row.segments) > 3)
    batch = packed_collate_fn([row], image_size=56)
    assert batch["pixel_values"].data_ptr() == row.tiles.__array_interface__["data"][0]
    assert torch.equal(batch["pixel_values"], torch.cat([torch.from_numpy(s.tiles) for s in row.segments]))


@pytest.mark.slow
def test_the_cache_folder_is_the_surveys_place(jsonl, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("INTERNVL_PACK_CACHE", str(tmp_path))
    list(loader_of(jsonl, tokenizer))
    (folder,) = (tmp_path / "survey").iterdir()
    assert folder.name.startswith("made-") and os.path.getsize(folder / "lengths.npy") == 128 + 8 * COUNT


def test_a_length_is_refused_with_what_counts_instead(jsonl, tokenizer):
    loader = loader_of(jsonl, tokenizer)
    for thing in (loader, loader.packed_dataset):
        with pytest.raises(TypeError, match="estimate_epochs"):
            len(thing)


def test_a_reader_that_cannot_hand_over_its_batch_ends_the_run_in_one_line(jsonl, tokenizer, monkeypatch):
    """Shared memory that another process has filled: torch's own thread would drop the batch in silence."""
    loader = loader_of(jsonl, tokenizer, num_workers=1)
    monkeypatch.setattr(torch.Tensor, "share_memory_", no_space)
    with pytest.raises(UserError, match=r"^a dataloader worker cannot hand over .*No space left.*--shm-size[^\n]*$"):
        list(loader)


def no_space(tensor):
    raise RuntimeError("unable to write to file </torch_1_2_3>:\nNo space left on device (28)")
