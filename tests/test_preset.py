"""Presets: planned packs equal the streamed ones, go on after a kill, are refused when they no longer fit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from factory import TINY, write_jsonl, write_meta, write_shards
from test_dataset import fingerprint, in_step, resume, saved

from internvl_pack import planning, scan
from internvl_pack.collate import FILLER_ID, is_filler
from internvl_pack.config import PackingConfig
from internvl_pack.dataset import PackedDataset
from internvl_pack.encode.sample import Encoder
from internvl_pack.errors import UserError
from internvl_pack.loader import build_loader
from internvl_pack.packing.budget import Budget
from internvl_pack.packing.offline import first_fit_decreasing, first_fit_shuffle
from internvl_pack.plan import plan_epochs
from internvl_pack.planning import plan_preset
from internvl_pack.preset import Preset
from internvl_pack.preset_dataset import PresetDataset
from internvl_pack.records import Record, whole
from internvl_pack.sources import load_meta, open_source

pytest.importorskip("pyarrow")

COUNT = 160
CONFIG = PackingConfig(max_packed_tokens=300, num_images_expected=9, max_buffer_size=8, num_lanes=8, seed=3)


def planned(meta: Path, out: Path, tokenizer, config=CONFIG, encode=TINY, **options: Any) -> Preset:
    specs = load_meta(meta)
    return plan_preset(out, specs, [open_source(s) for s in specs], Encoder(tokenizer, encode), config, **options)


def preset_loaders(preset: Path, meta: Path, tokenizer, ranks=1, workers=0, config=CONFIG):
    return [
        build_loader(
            PresetDataset.open(preset, meta, tokenizer, config, encode=TINY, rank=rank, world_size=ranks),
            num_workers=workers,
        )
        for rank in range(ranks)
    ]


def stream_loader(meta: Path, tokenizer, config=CONFIG):
    return build_loader(PackedDataset.from_meta(meta, tokenizer, config, encode=TINY))


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


# -- what is planned -----------------------------------------------------------------------------------


def test_a_preset_of_the_streaming_packer_trains_the_very_batches_of_streaming(data, preset, tokenizer):
    stream, (loader,) = stream_loader(data, tokenizer), preset_loaders(preset, data, tokenizer)
    assert [fingerprint(b) for b in loader] == [fingerprint(b) for b in stream]
    assert loader.ledger.state_dict() == stream.ledger.state_dict()
    assert [e["id"] for e in loader.take_events()] == [e["id"] for e in stream.take_events()]
    loader.ledger.check()
    assert loader.ledger.counts["samples_split"] >= 6


def test_shards_are_planned_as_annotation_files_are(tokenizer, tmp_path):
    meta = write_shards(tmp_path, 60)
    planned(meta, tmp_path / "preset", tokenizer)
    (loader,) = preset_loaders(tmp_path / "preset", meta, tokenizer)
    assert [fingerprint(b) for b in loader] == [fingerprint(b) for b in stream_loader(meta, tokenizer)]


def test_later_epochs_hold_the_same_packs_in_another_order(data, preset, tokenizer):
    (loader,) = preset_loaders(preset, data, tokenizer)
    orders = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        orders.append([tuple(b["sample_ids"]) for b in loader])
        loader.ledger.check()
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert orders[0] != orders[1] != orders[2]


def test_several_epochs_can_be_planned_each_as_streaming_would(data, tokenizer, tmp_path):
    planned(data, tmp_path / "two", tokenizer, epochs=2)
    (loader,) = preset_loaders(tmp_path / "two", data, tokenizer)
    stream = stream_loader(data, tokenizer)
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        stream.set_epoch(epoch)
        assert [fingerprint(b) for b in loader] == [fingerprint(b) for b in stream]


@pytest.mark.parametrize("policy", ["first_fit_decreasing", "first_fit_shuffle"])
def test_offline_policies_hold_each_sample_once_within_the_budgets(policy, data, tokenizer, tmp_path):
    planned(data, tmp_path / "preset", tokenizer, policy=policy)
    (loader,) = preset_loaders(tmp_path / "preset", data, tokenizer)
    seen: Counter[str] = Counter()
    for batch in loader:
        assert batch["num_tokens"] <= CONFIG.max_packed_tokens and batch["num_tiles"] <= CONFIG.num_images_expected
        first = [i for i, (index, _) in zip(batch["sample_ids"], batch["fragments"], strict=True) if index == 0]
        seen.update(i for i in first if i != FILLER_ID)
    assert len(seen) == COUNT + 6 - 1 and set(seen.values()) == {1}
    loader.ledger.check()


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
    fragments = [whole(Record(str(i), tokens, tiles), i) for i, (tokens, tiles) in enumerate(sizes)]
    assert [[f.position for f in pack] for pack in policy(fragments, budget)] == packs


def test_the_preset_tells_its_fill_and_its_bound(data, preset, tokenizer):
    statistics = Preset(preset).content["statistics"]
    (loader,) = preset_loaders(preset, data, tokenizer)
    batches = [b for b in loader if not is_filler(b)]
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


def test_the_number_of_packs_is_known_at_once(data, preset, tokenizer):
    (loader,) = preset_loaders(preset, data, tokenizer)
    counted = plan_epochs(loader.packed_dataset, 3, exact_samples=0)
    assert counted.exact
    assert counted.packs == (sum(not is_filler(b) for b in loader),) * 3


# -- order, resume, elasticity -------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (2, 2), (8, 1)])
def test_every_number_of_ranks_and_workers_trains_the_same_global_packs(ranks, workers, data, preset, tokenizer):
    expected = in_step(preset_loaders(preset, data, tokenizer))
    assert in_step(preset_loaders(preset, data, tokenizer, ranks=ranks, workers=workers)) == expected


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_saved_run_goes_on_with_other_ranks_at_the_next_pack(epoch, data, preset, tokenizer):
    def at(ranks: int):
        loaders = preset_loaders(preset, data, tokenizer, ranks=ranks)
        for loader in loaders:
            loader.set_epoch(epoch)
        return loaders

    expected = in_step(at(1))
    first = at(2)
    head = in_step(first, steps=5)
    second = at(4)
    resume(second, saved(first))
    middle = in_step(second, steps=2)
    third = at(1)
    resume(third, saved(second))
    assert head + middle + in_step(third) == expected
    third[0].ledger.check()
    assert third[0].ledger.samples_packed == COUNT + 6 - 1


def test_a_run_does_not_go_on_from_streaming_to_a_preset(data, preset, tokenizer):
    stream, (loader,) = stream_loader(data, tokenizer), preset_loaders(preset, data, tokenizer)
    next(iter(stream))
    with pytest.raises(UserError, match="resume: preset was None"):
        loader.load_state_dict(stream.state_dict())


# -- planning goes on, and is the same every time ------------------------------------------------------


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_two_plans_are_the_same_to_the_byte_with_any_number_of_processes(data, preset, tokenizer, tmp_path):
    planned(data, tmp_path / "again", tokenizer, num_workers=2)
    assert files(tmp_path / "again") == files(preset)


def test_data_that_has_been_moved_gives_the_same_preset(data, preset, tokenizer, tmp_path):
    shutil.copytree(data.parent, tmp_path / "moved")
    planned(tmp_path / "moved" / "meta.json", tmp_path / "again", tokenizer)
    assert files(tmp_path / "again") == files(preset)


@pytest.mark.parametrize("stage", ["measuring", "planning", "writing"])
def test_a_plan_that_was_stopped_goes_on(stage, data, preset, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "CHUNK_ROWS", 32)
    out = tmp_path / "preset"
    done: Counter[str] = Counter()
    measure, plan_lane = scan.Scanner.measure, planning.Planner.plan_lane

    def counted_measure(self, *args):
        done["measuring"] += 1
        return measure(self, *args)

    def counted_plan(self, *args):
        done["planning"] += 1
        return plan_lane(self, *args)

    def follow(what, total, steps):
        for _ in steps:
            if stage == what and done[what] == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(scan.Scanner, "measure", counted_measure)
    monkeypatch.setattr(planning.Planner, "plan_lane", counted_plan)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if stage == "writing":
            patch.setattr(planning, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        planned(data, out, tokenizer, follow=follow)
    with pytest.raises(UserError, match="its planning has not been finished"):
        Preset(out)
    planned(data, out, tokenizer)
    assert done == {"measuring": -(-(COUNT + 6) // 32), "planning": 8}, "nothing is done twice"
    assert files(out) == files(preset)


def test_a_plan_that_was_killed_goes_on(data, preset, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    code = "import sys, time, internvl_pack.scan as s; s.CHUNK_ROWS = 16; m = s.Scanner.measure\n"
    slow = "s.Scanner.measure = lambda *a: (time.sleep(0.3), m(*a))[1]\n"
    main = "from internvl_pack.cli import main; sys.exit(main())"
    options = ["plan", str(data), "--out", str(tmp_path / "preset"), "--tokenizer", str(tmp_path / "tokenizer")]
    options += ["--workers", "0", "--force_image_size", "448", "--num_lanes", "8", "--max_packed_tokens", "4096"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    process = subprocess.Popen([sys.executable, "-c", code + slow + main, *options], env=environment)
    work = tmp_path / "preset" / "work" / "scan"
    deadline = time.monotonic() + 120
    while len(list(work.glob("chunk-*.parquet"))) < 3 and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {p.name: p.stat().st_mtime_ns for p in work.glob("chunk-*.parquet")}
    assert 3 <= len(kept) < 11 and not (tmp_path / "preset" / "preset.json").exists()
    watch = "r = s.Scanner.measure; s.Scanner.measure = lambda *a: (print('measured', a[4].name), r(*a))[1]\n"
    again = subprocess.run(
        [sys.executable, "-c", code + watch + main, *options],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    measured = {line.split()[1] for line in again.stdout.splitlines() if line.startswith("measured")}
    assert measured and not measured & kept.keys() and len(measured) + len(kept) == 11
    options[3] = str(tmp_path / "whole")
    subprocess.run([sys.executable, "-c", code + main, *options], env=environment, capture_output=True, check=True)
    assert files(tmp_path / "preset") == files(tmp_path / "whole")


def test_a_finished_preset_is_kept_and_one_of_other_options_is_not_overwritten(data, tokenizer, tmp_path, preset):
    shutil.copytree(preset, tmp_path / "preset")
    before = files(tmp_path / "preset")
    planned(data, tmp_path / "preset", tokenizer)
    with pytest.raises(UserError, match="holds a preset of other data or options"):
        planned(data, tmp_path / "preset", tokenizer, replace(CONFIG, seed=4))
    assert files(tmp_path / "preset") == before


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
    other = replace(CONFIG, seed=77, max_buffer_size=64, num_lanes=None, packing_policy="greedy", max_seq_length=300)
    dataset = PresetDataset.open(preset, data, tokenizer, other, encode=TINY)
    assert dataset.fingerprint() == PresetDataset.open(preset, data, tokenizer).fingerprint()
    assert dataset.num_lanes == 8


def test_other_tiles_and_tokenizers_are_refused_by_name(data, preset, tokenizer):
    from internvl_pack.tiny import tiny_tokenizer

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


def test_an_image_of_another_shape_stops_the_run_by_the_samples_name(moved, preset, tokenizer):
    from factory import png

    path = sorted((moved.parent / "images").iterdir())[0]
    path.write_bytes(png(56, 336, 9))
    (loader,) = preset_loaders(preset, moved, tokenizer)
    with pytest.raises(UserError, match=rf"made/{int(path.name[:5])} of \d+ tokens and \d+ tiles was planned and"):
        list(loader)


def test_images_that_went_away_since_cost_their_samples_only(moved, preset, tokenizer):
    gone = sorted((moved.parent / "images").iterdir())[8]
    gone.unlink()
    (loader,) = preset_loaders(preset, moved, tokenizer)
    seen = {i for b in loader for i in b["sample_ids"]} - {FILLER_ID}
    assert f"made/{int(gone.name[:5])}" not in seen and len(seen) == COUNT + 6 - 2
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


def test_data_in_which_nothing_loads_and_runs_that_stop_are_told_when_planned(tokenizer, tmp_path):
    meta = write_jsonl(tmp_path, 3)
    for path in (tmp_path / "images").iterdir():
        path.write_bytes(b"no image")
    with pytest.raises(UserError, match=r"made/\d: image_"):
        planned(meta, tmp_path / "a", tokenizer, replace(CONFIG, on_error="stop"))
    (tmp_path / "made.jsonl").write_text("[]\n" * 40)
    with pytest.raises(UserError, match="dataset 'made': none of its first 32 samples can be used"):
        planned(meta, tmp_path / "b", tokenizer, replace(CONFIG, num_lanes=1))
    (tmp_path / "made.jsonl").write_text("[]\n" * 4)
    with pytest.raises(UserError, match="no sample of the data can be trained on"):
        planned(meta, tmp_path / "c", tokenizer)


def test_a_stopped_plan_of_other_data_is_begun_anew_with_a_warning(tokenizer, tmp_path, caplog):
    def stop(what, total, steps):
        for _ in steps:
            pass
        if what == "measuring":
            raise KeyboardInterrupt

    meta = write_jsonl(tmp_path, 20)
    with pytest.raises(KeyboardInterrupt):
        planned(meta, tmp_path / "preset", tokenizer, follow=stop)
    write_jsonl(tmp_path, 20, seed=1)
    planned(meta, tmp_path / "preset", tokenizer)
    assert "was made with other data or settings and is begun anew" in caplog.text
    planned(meta, tmp_path / "fresh", tokenizer)
    assert files(tmp_path / "preset") == files(tmp_path / "fresh")
