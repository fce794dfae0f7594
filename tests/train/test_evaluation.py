"""Evaluation: every held-out sample once, and the same figures on any ranks, workers and budgets."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.factory import TINY, write_jsonl, write_meta
from helpers.ranks import run

pytestmark = pytest.mark.slow

COUNT = 30


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer) -> Path:
    """Two held-out sets, one of which the training meta file would repeat, and a tiny model."""
    from internvl_pack.testing.tiny import save_tiny_checkpoint

    folder = tmp_path_factory.mktemp("eval")
    write_jsonl(folder, COUNT, name="first")
    write_jsonl(folder, COUNT, seed=1, name="second")
    spec = {"root": "images", "data_augment": False}
    write_meta(folder, {n: spec | {"annotation": f"{n}.jsonl", "repeat_time": 2} for n in ("first", "second")})
    save_tiny_checkpoint(folder / "model", tokenizer)
    return folder


def evaluate(made: Path, out: Path, *options: str, ranks: int = 1) -> dict[str, float]:
    """The eval figures that a run of one step with learning rate 0 logs."""
    argv = ["--model_name_or_path", str(made / "model"), "--meta_path", str(made / "meta.json")]
    argv += ["--eval_meta_path", str(made / "meta.json"), "--do_eval", "True", "--output_dir", str(out)]
    argv += ["--use_packed_ds", "True", "--force_image_size", "56", "--num_images_expected", "24"]
    argv += ["--eval_strategy", "steps", "--eval_steps", "1"]
    argv += ["--max_steps", "1", "--learning_rate", "0", "--save_strategy", "no", "--report_to", "none"]
    argv += ["--use_cpu", "True", "--check_isolation", "False", *options]
    run("train.finetune:main", argv, ranks, out.with_suffix(".log"))
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    (logged,) = (entry for entry in history if "eval_loss" in entry)  # once, though asked for at step 1 and at the end
    assert (
        out.with_suffix(".log").read_text().count(f"evaluation at step 1: eval_loss {logged['eval_loss']:.4f}, ") == 1
    )
    assert json.loads((out / "train_summary.json").read_text())["evaluation"] == logged
    return {key: value for key, value in logged.items() if key.startswith("eval_")}


def one_by_one(made: Path, tokenizer) -> dict[str, float]:
    """The same figures from every sample alone in a row."""
    from internvl_pack import PackedDataset, PackingConfig, build_loader
    from internvl_pack.model.build import build_model

    model = build_model(
        model_name_or_path=str(made / "model"), tokenizer=tokenizer, dtype=torch.float32, attn_kernel="sdpa"
    ).eval()
    encode = replace(TINY, dynamic_image_size=False, use_thumbnail=False)
    config = PackingConfig(packing=False, shuffle=False)
    dataset = PackedDataset.from_meta(made / "meta.json", tokenizer, config, encode=encode)
    sums: dict[str, tuple[float, int]] = {}
    with torch.no_grad():
        for batch in build_loader(dataset):
            out = model(**{k: v for k, v in batch.items() if k != "rows"})
            sums[batch["sample_ids"][0]] = (out.ce_sum.item(), int(out.num_targets))
    total, tokens = (sum(pair[i] for pair in sums.values()) for i in (0, 1))
    first = [pair for sample_id, pair in sums.items() if sample_id.startswith("first/")]
    return {
        "eval_loss": total / tokens,
        "eval_loss_per_sample": sum(ce / n for ce, n in sums.values()) / len(sums),
        "eval_loss_first": sum(ce for ce, _ in first) / sum(n for _, n in first),
        "eval_samples": float(len(sums)),
        "eval_tokens": float(tokens),
    }


def test_figures_are_those_of_samples_one_by_one_on_any_ranks_workers_and_budgets(made, tmp_path, tokenizer):
    expected = one_by_one(made, tokenizer)
    assert expected["eval_samples"] == 2 * COUNT
    runs = [
        evaluate(made, tmp_path / "a", "--max_packed_tokens", "600"),
        evaluate(made, tmp_path / "b", "--max_packed_tokens", "2048", "--dataloader_num_workers", "2"),
        evaluate(made, tmp_path / "c", "--max_packed_tokens", "900", "--deepspeed", "zero_stage3", ranks=2),
    ]
    for seen in runs:
        for name, value in expected.items():
            assert seen[name] == pytest.approx(value, rel=1e-5), name
        assert set(seen) == {*expected, "eval_loss_second"}


@pytest.mark.parametrize(
    ("given", "named"), [(("--do_eval", "True"), "--do_eval"), (("--eval_strategy", "steps"), "--eval_strategy steps")]
)
def test_evaluation_without_held_out_data_is_refused(made, tmp_path, capsys, given, named):
    from train import finetune

    argv = ["--model_name_or_path", str(made / "model"), "--meta_path", str(made / "meta.json")]
    argv += ["--output_dir", str(tmp_path), "--force_image_size", "56", "--use_cpu", "True", *given]
    saved = os.environ.copy()
    try:
        assert finetune.main(argv) == 2
    finally:
        os.environ.clear()
        os.environ.update(saved)
    assert f"{named} needs --eval_meta_path" in capsys.readouterr().err


def test_a_dataset_has_its_own_figures_whatever_it_is_called():
    from train.evaluation import SampleSums, add_sample_losses, figures

    ids = ["web/0", "web/en/0", "<x>/0", "per_sample/0", "<pad>"]
    batch = {"sample_ids": ids, "cu_seqlens": torch.arange(0, 12, 2, dtype=torch.int32)}
    sums: SampleSums = {}
    add_sample_losses(sums, batch, torch.tensor([1.0, 2.0, 3.0, 6.0]), torch.tensor([0, 2, 4, 6]))
    out = figures(sums, ["web", "web/en", "<x>", "per_sample"])
    assert (out["eval_loss_web"], out["eval_loss_web/en"], out["eval_loss_<x>"]) == (1.0, 2.0, 3.0)
    assert out["eval_samples"] == 4 and out["eval_loss"] == out["eval_loss_per_sample"] == 3.0
