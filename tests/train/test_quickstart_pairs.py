"""Pairs made of the demo data, and the last line of `shell/quickstart_mpo.sh`."""

from __future__ import annotations

import json

from internvl_pack import EncodeConfig
from internvl_pack.samples import Samples
from train import quickstart_pairs


def test_every_row_of_the_demo_becomes_a_pair(tokenizer, demo_dir, tmp_path):
    assert quickstart_pairs.main([str(demo_dir / "demo.jsonl"), str(demo_dir / "images"), str(tmp_path)]) == 0
    encode = EncodeConfig(image_size=56, tokens_per_tile=4, objective="mpo")
    samples = Samples.from_meta(tmp_path / "pairs.json", tokenizer, encode)
    assert samples.num_rows == 52
    for row in range(52):
        encoded = samples.encode(0, row)
        chosen, rejected = encoded.record.branches
        parts = encoded.input_ids[-chosen.num_tokens - rejected.num_tokens :]
        assert encoded.record.is_pair and parts[: chosen.num_tokens].tolist() != parts[chosen.num_tokens :].tolist()


def test_the_summary_has_the_margins(tmp_path, capsys):
    figures = {"ranks": 2, "steps": 3, "samples_packed": 9, "token_fill": 0.5, "loss_first": 9.0, "loss_last": 7.0}
    steps = [{"rewards/margins": m, "rewards/accuracies": a} for m, a in ((0.0, 0.0), (1.0, 0.5), (2.0, 1.0))]
    (tmp_path / "train_summary.json").write_text(json.dumps(figures))
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [*steps, {"train_runtime": 1.0}]}))
    assert quickstart_pairs.main([str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out.removeprefix("SUMMARY "))
    assert found == figures | {"margin_first": 0.0, "margin_last": 1.0, "accuracy_last": 0.5}
