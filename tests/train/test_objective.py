"""DPO and MPO through `finetune.py`: packed they train as each answer alone does, whatever the ranks."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
from helpers.pairs import write_pairs
from helpers.ranks import run as start
from transformers import InternVLForConditionalGeneration

from train.checkpoint import PACKING_STATE

pytestmark = pytest.mark.slow

COUNT = 12
COMMON = ("--max_grad_norm", "0", "--lr_scheduler_type", "constant", "--check_isolation", "False", "--optim", "sgd")
COMMON += ("--learning_rate", "0.05", "--save_strategy", "no", "--report_to", "none")
WHOLE = ("--max_packed_tokens", "8192", "--max_seq_length", "8192", "--num_images_expected", "200")
PACKED = ("--use_packed_ds", "True", *WHOLE)  # an epoch is one row, and one step


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs"), COUNT)


@pytest.fixture
def run(train, pairs, tmp_path):
    """Trains on the pairs; gives what each step logged, and the weights."""

    def call(name, *options):
        assert train("--meta_path", str(pairs), *COMMON, *options, out=tmp_path / name) == 0
        return found(tmp_path / name)

    return call


def found(folder):
    """What each step of a run logged, and its weights."""
    state = json.loads((folder / "trainer_state.json").read_text())
    model = InternVLForConditionalGeneration.from_pretrained(folder)
    return [entry for entry in state["log_history"] if "loss" in entry], model.state_dict()


def on_ranks(ranks, made, pairs, out, *options):
    argv = ["--model_name_or_path", str(made / "model"), "--meta_path", str(pairs), "--output_dir", str(out)]
    argv += ["--force_image_size", "56", "--use_cpu", "True", "--logging_steps", "1", *COMMON, *options]
    start("train.finetune:main", argv, ranks, out.with_suffix(".log"))
    return found(out)


def assert_same(found, expected, made):
    """Figures within 1e-6, and how far each weight has moved within 1e-4, but for its rounding."""
    for got, wanted in zip(found[0], expected[0], strict=True):
        for name in ("loss", *(key for key in wanted if "/" in key)):
            assert got[name] == pytest.approx(wanted[name], rel=1e-6, abs=1e-6), name
    before = InternVLForConditionalGeneration.from_pretrained(made / "model").state_dict()
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        moved = (value - before[name]).norm()
        assert (found[1][name] - value).norm() <= 1e-4 * moved + 1e-7 * value.norm() + 1e-9, name


def test_packed_pairs_train_as_their_answers_do_alone(run, made):
    """Three epochs of MPO: a row that holds all pairs, or a padded row an answer."""
    mpo = ("--objective", "mpo", "--num_train_epochs", "3")
    packed = run("packed", *mpo, *PACKED)
    padded = run("padded", *mpo, *WHOLE, "--use_packed_ds", "False", "--per_device_train_batch_size", str(COUNT))
    assert_same(packed, padded, made)
    logs, _ = packed
    first = logs[0]
    assert [first[f"rewards/{name}"] for name in ("chosen", "rejected", "margins")] == [0, 0, 0]
    assert first["loss/sigmoid"] == pytest.approx(math.log(2)) and first["loss/bco_pair"] == pytest.approx(
        2 * math.log(2)
    )
    assert first["loss"] == pytest.approx(0.8 * math.log(2) + 0.2 * 2 * math.log(2) + first["loss/sft"], rel=1e-6)
    margins = [entry["rewards/margins"] for entry in logs]
    assert all(before < after for before, after in pairwise(margins)) and logs[-1]["rewards/accuracies"] > 0.5


def test_accumulation_is_one_row(run, made, tmp_path):
    """Rows of a pair or a few, all of them in one step, against one row of all."""
    dpo = (
        "--loss_type",
        "sigmoid_norm,bco_pair",
        "--beta",
        "0.5",
        "--label_smoothing",
        "0.1",
        "--num_train_epochs",
        "2",
    )
    whole = run("whole", *dpo, *PACKED)
    budget = ("--use_packed_ds", "True", "--max_packed_tokens", "700", "--max_seq_length", "700")
    parts = run("parts", *dpo, *budget, "--num_images_expected", "48", "--gradient_accumulation_steps", "12")
    assert len(whole[0]) == len(parts[0]) == 2
    assert_same(parts, whole, made)
    summary = json.loads((tmp_path / "parts" / "train_summary.json").read_text())
    assert summary["packs"] > 4


MPO = ("--objective", "mpo", "--num_train_epochs", "2")


@pytest.fixture(scope="module")
def one_row(made, pairs, tmp_path_factory):
    return on_ranks(1, made, pairs, tmp_path_factory.mktemp("one_row") / "out", *MPO, *PACKED)


@pytest.mark.parametrize(
    ("ranks", "shared_by", "stage"),
    [
        (3, 1, None),
        *((2, 1, f"zero_stage{n}") for n in (2, 3)),  # the first is in test_resume.py
        (2, 2, None),
    ],
)
def test_ranks_train_as_one_does(one_row, made, pairs, tmp_path, ranks, shared_by, stage):
    """Rows of a few pairs on several ranks, or each shared by two (Ulysses), checkpointed, against one row of all."""
    rows = ("--use_packed_ds", "True", "--max_packed_tokens", "700", "--num_images_expected", "48")
    rows += ("--gradient_accumulation_steps", str(6 * shared_by), "--sequence_parallel_size", str(shared_by))
    rows += ("--deepspeed", stage) if stage else ()
    assert_same(on_ranks(ranks, made, pairs, tmp_path / "out", *MPO, *rows), one_row, made)


def test_a_resumed_run_has_the_same_running_mean(run, made, tmp_path):
    options = ("--objective", "mpo", "--num_train_epochs", "3", *PACKED, "--save_strategy", "epoch")
    through = run("through", *options)
    state = json.loads((tmp_path / "through" / "checkpoint-1" / PACKING_STATE).read_text())["objective"]
    total, count = state["rewards"]
    assert count == 2 * COUNT and total == 0  # of the first step, in which nothing had been learnt
    resumed = run("resumed", *options, "--resume_from_checkpoint", str(tmp_path / "through" / "checkpoint-2"))
    assert [entry["step"] for entry in resumed[0]] == [1, 2, 3]
    assert_same((resumed[0][2:], resumed[1]), (through[0][2:], through[1]), made)
    ends = [
        json.loads((tmp_path / name / "checkpoint-3" / PACKING_STATE).read_text()) for name in ("through", "resumed")
    ]
    assert ends[0]["objective"]["rewards"] == pytest.approx(ends[1]["objective"]["rewards"], rel=1e-6)
    assert ends[0]["objective"]["rewards"][1] == 6 * COUNT


def test_evaluation_has_the_figures_of_pairs(run, made, pairs, tmp_path):
    options = ("--objective", "dpo", "--num_train_epochs", "1", *PACKED, "--eval_meta_path", str(pairs))
    options += ("--do_eval", "True", "--eval_strategy", "epoch")
    logs, _ = run("held_out", *options)
    evaluation = evaluated(tmp_path / "held_out")
    assert evaluation["eval_samples"] == COUNT and evaluation["eval_rewards/margins"] > 0 == logs[0]["rewards/margins"]
    assert evaluation["eval_loss"] == evaluation["eval_loss/sigmoid"] < math.log(2)

    on_ranks(2, made, pairs, tmp_path / "shared", *options, "--sequence_parallel_size", "2")
    shared = evaluated(tmp_path / "shared")
    figures = [name for name in evaluation if "/" in name or name in ("eval_loss", "eval_samples")]
    assert [shared[name] for name in figures] == pytest.approx([evaluation[name] for name in figures], rel=1e-5)


def evaluated(folder):
    """What a run's only evaluation logged."""
    state = json.loads((folder / "trainer_state.json").read_text())
    (evaluation,) = [entry for entry in state["log_history"] if "eval_loss" in entry]
    return evaluation


def test_lora_is_held_against_the_model_without_it(run, capfd):
    pytest.importorskip("peft")
    options = ("--objective", "dpo", "--num_train_epochs", "3", *PACKED, "--use_llm_lora", "4")
    frozen = ("--freeze_backbone", "True", "--freeze_mlp", "True")
    alone = run("alone", *options, *frozen)
    assert "reference: the model without its LoRA" in capfd.readouterr().err
    assert alone[0][0]["rewards/margins"] == 0 < alone[0][1]["rewards/margins"] < alone[0][2]["rewards/margins"]


def test_held_out_data_of_another_objective_is_refused_before_the_model(train, made, pairs, capfd, tmp_path):
    options = ("--meta_path", str(pairs), *COMMON, "--objective", "dpo", "--do_eval", "True")
    assert train(*options, "--eval_meta_path", str(made / "meta.json"), out=tmp_path) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert "--eval_meta_path: dataset" in last and "no_preference_data" in last


def test_options_of_pairs_are_refused_without_them(train, capfd, tmp_path):
    for options, message in (
        (("--beta", "0.2"), "--beta 0.2 is of pairs of answers: give --objective dpo or mpo, or leave it out"),
        (
            ("--objective", "dpo", "--loss_type", "hinge"),
            "--loss_type 'hinge' is unknown: use sigmoid, sigmoid_norm, bco",
        ),
        (("--objective", "dpo", "--beta", "0"), "--beta 0.0: give more than 0"),
    ):
        assert train(*options, out=tmp_path) == 2
        assert message in capfd.readouterr().err
