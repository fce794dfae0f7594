"""Whole epochs of lengths: no step too many, even ranks; and input that is no lengths, or lengths of no sample."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from internvl_pack.cli import main
from internvl_pack.config import PackingConfig
from internvl_pack.errors import UserError
from internvl_pack.estimate.simulate import LengthTable, read_lengths, simulate
from internvl_pack.estimate.suggest import suggest
from internvl_pack.packing.cost import CostModel

ROOT = Path(__file__).resolve().parents[2]
COST = CostModel.from_name("1B")
BUDGETS = {(8192, 40): 1.01, (16384, 48): 1.02, (32768, 96): 1.01}  # steps over the bound's


@pytest.fixture(scope="module")
def real() -> LengthTable:
    with open(ROOT / "benchmarks" / "real_mix_a.csv", encoding="utf-8", newline="") as file:
        return read_lengths(file, "real_mix_a.csv")


def config(max_tokens: int, max_tiles: int, **options) -> PackingConfig:
    return PackingConfig(max_packed_tokens=max_tokens, num_images_expected=max_tiles, **options)


def table(*rows: tuple[int, int]) -> LengthTable:
    tokens, tiles = np.array(rows, np.int64).T
    return LengthTable(tokens, tiles)


# --- epochs ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("num_ranks", [8, 64])
@pytest.mark.parametrize("num_samples", [3_000, 10_000, 50_000])
def test_an_epoch_takes_no_step_too_many(real, budget, num_ranks, num_samples):
    epoch = simulate(real.drawn(num_samples, seed=0), config(*budget), COST, num_ranks=num_ranks)
    assert epoch.steps <= math.ceil(BUDGETS[budget] * epoch.bound / num_ranks) + 1
    assert epoch.steps_not_full <= 1 and epoch.steps_empty == 0
    assert epoch.samples + epoch.refused.total() == num_samples
    if num_samples == 50_000:
        least = {8: (0.98, 0.99, 0.99), 64: (0.985, 0.990, 0.992)}[num_ranks]
        assert epoch.rank_efficiency >= least[list(BUDGETS).index(budget)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "over_bound"), [((8192, 40), 1.0008), ((16384, 48), 1.0034), ((32768, 96), 1.0014)], ids=str
)
def test_one_long_stream_is_packed_as_closely_as_ever(real, budget, over_bound):
    assert round(simulate(real, config(*budget), COST, num_ranks=1).packs_over_bound, 4) <= over_bound


@pytest.mark.parametrize(("num_ranks", "packs_per_step"), [(1, 1), (3, 7), (5, 20), (7, 7)])
def test_the_packs_of_an_epoch_do_not_depend_on_the_ranks(real, num_ranks, packs_per_step):
    drawn = real.drawn(1000, seed=1)
    epoch = simulate(drawn, config(8192, 40), COST, num_ranks=num_ranks, packs_per_step=packs_per_step)
    alone = simulate(drawn, config(8192, 40), COST, num_ranks=1)
    assert (epoch.packs, epoch.tokens, epoch.tiles) == (alone.packs, alone.tokens, alone.tiles)
    assert epoch.steps == math.ceil(epoch.packs / packs_per_step)


def test_draws_with_one_seed_are_the_same(real):
    one, same, other = (real.drawn(50, seed).sizes()[0].tolist() for seed in (3, 3, 4))
    assert one == same != other


def test_samples_that_are_too_large_are_cut_where_their_images_are_not(real):
    cut = simulate(table((20_000, 30), (300, 1)), config(8192, 16), COST, num_ranks=1)
    assert (cut.split, cut.samples, cut.tiles) == (1, 2, 31) and cut.segments > 3


def test_a_rank_without_a_pack_a_step_is_refused():
    with pytest.raises(UserError, match="--global_batch 4 is less than --ranks 8"):
        simulate(table((10, 0)), config(8192, 16), COST, num_ranks=8, packs_per_step=4)


# --- suggest --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_larger_rows_are_suggested_until_they_gain_little(real):
    found = suggest(real.drawn(2000, 0), PackingConfig(), COST, num_ranks=8, token_budgets=(2048, 8192, 16384))
    worth = [trial.worth for trial in found.trials]
    assert len({trial.max_tokens for trial in found.trials}) == 3 and all(0 < each < 1 for each in worth)
    assert found.chosen.worth >= max(worth) - 0.01
    smaller = [trial.worth for trial in found.trials if trial.max_tokens < found.chosen.max_tokens]
    assert all(each < max(worth) - 0.01 for each in smaller)


def test_budgets_that_no_sample_fits_are_not_suggested():
    found = suggest(
        table(*[(5000, 0)] * 40), PackingConfig(oversize="drop"), COST, num_ranks=1, token_budgets=(4096, 8192)
    )
    assert {trial.max_tokens for trial in found.trials} == {8192}


# --- the command ----------------------------------------------------------------------------------


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(["simulate", *argv])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.slow
def test_workers_change_nothing_and_that_is_said(capsys):
    options = (str(ROOT / "benchmarks" / "real_mix_a.csv"), "--ranks", "4", "--global_batch", "12", "--samples", "500")
    code, alone, err = run(capsys, *options, "--json")
    assert code == 0 and not err
    code, shared, err = run(capsys, *options, "--workers", "4", "--json")
    assert code == 0 and "makes no difference" in err
    reports = [json.loads(text) for text in (alone, shared)]
    for report in reports:
        del report["us_per_sample"]
    assert reports[0] == reports[1]
    assert reports[0]["samples"] == 500 and reports[0]["steps_not_full"] <= 1 and reports[0]["steps_empty"] == 0
    code, out, _ = run(capsys, *options)
    steps, packs = reports[0]["steps"], reports[0]["packs"]
    assert (
        code == 0 and re.search(rf"steps +{steps} +of 12 packs on 4 ranks", out) and re.search(rf"packs +{packs} ", out)
    )


@pytest.mark.slow
def test_suggest_names_the_options_to_give(capsys):
    lengths = str(ROOT / "benchmarks" / "real_mix_a.csv")
    code, out, _ = run(capsys, lengths, "--ranks", "2", "--samples", "300", "--suggest")
    assert code == 0 and "Use --max_packed_tokens" in out
    code, out, _ = run(capsys, lengths, "--ranks", "2", "--samples", "300", "--suggest", "--json")
    found = json.loads(out)
    assert code == 0 and len({trial["max_packed_tokens"] for trial in found["trials"]}) == 4
    assert found["reason"].startswith("the stream has")


def test_data_of_few_steps_is_said_to_be_too_small_to_judge(capsys):
    lengths = str(ROOT / "benchmarks" / "real_mix_a.csv")
    code, out, _ = run(capsys, lengths, "--ranks", "64", "--samples", "130", "--suggest")
    assert code == 0 and "the data is too small to judge budgets by: an epoch has 1 step of 64 packs" in out
    assert "\nNo recommendation, " in out and "\nUse " not in out


@pytest.mark.parametrize("option", ["--ranks", "--global_batch", "--samples"])
def test_numbers_below_one_are_refused(option, tmp_path, capsys):
    path = tmp_path / "lengths.csv"
    path.write_text("num_tokens,num_tiles\n700,2\n", encoding="utf-8")
    code, _, err = run(capsys, str(path), option, "0")
    assert code == 2 and option in err


@pytest.mark.parametrize("content", [b"\xff\xfe1\x00", b"num_tokens,num_tiles\n5,1\n\xe9,1\n"])
def test_a_file_that_is_not_utf8_is_one_line_that_names_it(content, tmp_path, capsys):
    path = tmp_path / "lengths.csv"
    path.write_bytes(content)
    code, _, err = run(capsys, str(path))
    assert code == 2
    assert err.count("\n") == 1 and "lengths.csv" in err and "UTF-8" in err


def test_a_field_without_end_is_one_line_that_names_the_file(tmp_path, capsys):
    path = tmp_path / "lengths.csv"
    path.write_text('num_tokens,num_tiles\n"' + "1" * 200_000, encoding="utf-8")
    code, _, err = run(capsys, str(path))
    assert code == 2
    assert err.count("\n") == 1 and "lengths.csv" in err


@pytest.mark.parametrize("oversize", ["split", "truncate", "drop"])
def test_a_row_of_more_tiles_than_tokens_is_dropped_and_counted(oversize, tmp_path, capsys):
    path = tmp_path / "lengths.csv"
    path.write_text("num_tokens,num_tiles,num_images\n5,200,1\n700,2,1\n", encoding="utf-8")
    code, out, _ = run(capsys, str(path), "--json", "--oversize", oversize)
    report = json.loads(out)
    assert code == 0
    assert (report["samples"], report["packs"], report["dropped"]) == (2, 1, 1)


def test_a_number_of_images_beyond_measure_is_as_many_as_there_are_tiles():
    table = read_lengths(io.StringIO("num_tokens,num_tiles,num_images\n700,2,99999999999999999999\n"), "lengths.csv")
    known = LengthTable(table.tokens, table.tiles, np.array([2]))
    found, expected = (one.part(one.mixture(), 0).notes.get(0) for one in (table, known))
    assert found == expected


@pytest.mark.parametrize("rows", ["", "0,0\n"])
def test_a_file_without_a_sample_has_no_packs(rows, tmp_path, capsys):
    path = tmp_path / "lengths.csv"
    path.write_text("num_tokens,num_tiles\n" + rows, encoding="utf-8")
    code, out, _ = run(capsys, str(path), "--json")
    report = json.loads(out)
    assert code == 0 and (report["packs"], report["steps"], report["packs_over_bound"]) == (0, 0, 1.0)


def test_tiles_of_a_meta_file_are_those_of_the_options(tmp_path, capsys, tokenizer):
    meta = ROOT / "shell" / "data" / "demo" / "meta.json"
    tokenizer.save_pretrained(tmp_path)
    found = {}
    for cut in ("True", "False"):
        options = ("--tokenizer", str(tmp_path), "--dynamic_image_size", cut, "--use_thumbnail", cut, "--json")
        code, out, _ = run(capsys, str(meta), *options, "--ranks", "2")
        assert code == 0
        found[cut] = json.loads(out)
    assert found["True"]["samples"] == found["False"]["samples"] > 0
    assert found["True"]["lower_bound"] > found["False"]["lower_bound"]
    code, out, _ = run(capsys, str(meta), *options, "--ranks", "2", "--suggest")
    assert code == 0 and len({trial["max_packed_tokens"] for trial in json.loads(out)["trials"]}) == 4
