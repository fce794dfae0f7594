"""The quickstarts' pairs, tables and last lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from internvl_pack import EncodeConfig
from internvl_pack.ledger import Ledger
from internvl_pack.samples import Samples
from train import quickstart

REQUIRED = """ranks zero_stage steps steps_over_bound steps_empty token_fill tile_fill packs samples_in samples_packed
samples_dropped loss_first loss_last tokens_per_s_packed tokens_per_s_padded"""


def run_summary(**changes) -> dict:
    ledger = Ledger()
    ledger.counts.update({"samples_in": 103, "samples_packed": 100, "fragments_in": 100, "fragments_packed": 100})
    ledger.quarantined["image_truncated"] = 3
    return {
        "packed": True,
        "ranks": 2,
        "zero_stage": 1,
        "device": "cpu",
        "dtype": "float32",
        "attn_kernel": "sdpa",
        "steps": 60,
        "steps_over_bound": 1.0345,
        "steps_empty": 0,
        "max_packed_tokens": 2048,
        "num_images_expected": 40,
        "packs": 120,
        "num_tokens": 1000,
        "token_fill": 0.98765,
        "tile_fill": 0.5,
        "samples_per_pack": 8.25,
        "samples_in": 103,
        "samples_packed": 100,
        "samples_dropped": 0,
        "samples_quarantined": 3,
        "loss_first": 7.5,
        "loss_last": 2.25,
        "tokens_per_s": 5000.0,
        "ledger": ledger.state_dict(),
    } | changes


PADDED = {"packed": False, "num_tokens": 1600, "token_fill": 0.6, "tokens_per_s": 2500.0, "packs": 100}


@pytest.fixture
def folders(tmp_path) -> list[str]:
    for name, changes in (("packed", {}), ("padded", PADDED)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train_summary.json").write_text(json.dumps(run_summary(**changes)))
    return [str(tmp_path / "packed"), str(tmp_path / "padded")]


def test_the_last_line_is_the_summary_with_every_required_figure(folders, capsys):
    assert quickstart.main(["compare", *folders]) == 0
    word, _, figures = capsys.readouterr().out.splitlines()[-1].partition(" ")
    assert word == "SUMMARY"
    summary = json.loads(figures)
    assert set(REQUIRED.split()) <= summary.keys()
    assert summary["padding_avoided"] == 0.375, "600 of 1600 tokens"
    assert (summary["tokens_per_s_packed"], summary["tokens_per_s_padded"]) == (5000.0, 2500.0)
    assert (summary["token_fill"], summary["token_fill_padded"]) == (0.9877, 0.6)


def test_runs_of_other_numbers_of_steps_are_not_compared_by_their_losses_without_a_word(folders, capsys, tmp_path):
    assert quickstart.main(["compare", *folders]) == 0
    assert "train further" not in capsys.readouterr().out
    (tmp_path / "padded" / "train_summary.json").write_text(json.dumps(run_summary(**PADDED, steps=65)))
    assert quickstart.main(["compare", *folders]) == 0
    assert "made 60 and 65 steps at one learning rate" in capsys.readouterr().out


def test_the_table_is_narrow_and_tells_what_left_and_why(folders, capsys):
    assert quickstart.main(["compare", *folders]) == 0
    lines = capsys.readouterr().out.splitlines()[:-1]
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    for expected in ("98.8%", "37.5%", "5,000", "2,500", "7.5000", "2.2500", "image_truncated"):
        assert expected in text


def test_a_run_that_did_not_end_is_named(folders, capsys):
    (Path(folders[1]) / "train_summary.json").unlink()
    assert quickstart.main(["compare", *folders]) == 2
    assert "did not end" in capsys.readouterr().err


def test_every_row_of_the_demo_becomes_a_pair(tokenizer, demo_dir, tmp_path):
    assert quickstart.main(["pairs", *map(str, (demo_dir / "demo.jsonl", demo_dir / "images", tmp_path))]) == 0
    encode = EncodeConfig(image_size=56, tokens_per_tile=4, objective="mpo")
    samples = Samples.from_meta(tmp_path / "pairs.json", tokenizer, encode)
    assert samples.num_rows == 52
    for row in range(52):
        encoded = samples.encode(0, row)
        chosen, rejected = encoded.record.branches
        parts = encoded.input_ids[-chosen.num_tokens - rejected.num_tokens :]
        assert encoded.record.is_pair and parts[: chosen.num_tokens].tolist() != parts[chosen.num_tokens :].tolist()


def test_the_summary_of_pairs_has_the_margins(tmp_path, capsys):
    figures = {"ranks": 2, "steps": 3, "samples_packed": 9, "token_fill": 0.5, "loss_first": 9.0, "loss_last": 7.0}
    steps = [{"rewards/margins": m, "rewards/accuracies": a} for m, a in ((0.0, 0.0), (1.0, 0.5), (2.0, 1.0))]
    (tmp_path / "train_summary.json").write_text(json.dumps(figures))
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [*steps, {"train_runtime": 1.0}]}))
    assert quickstart.main(["preferences", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out.removeprefix("SUMMARY "))
    assert found == figures | {"margin_first": 0.0, "margin_last": 1.0, "accuracy_last": 0.5}
