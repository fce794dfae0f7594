"""`--sequence_parallel_size` end to end: four processes with gloo, all runs in one launch of them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import ranks
from helpers.factory import write_jsonl
from helpers.launched import losses, made_in

from internvl_pack.cli import main as internvl_pack
from internvl_pack.errors import UserError
from internvl_pack.model.attention import KERNELS
from internvl_pack.plan.preset import Preset
from train import sequence
from train.accounting import read_sample_log
from train.options import parse

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = 4
COUNT = 40
TOLERANCE = 1e-5
UNREADABLE = "made/7"  # on one rank of a group only
pytestmark = pytest.mark.slow

SHAPE = ("--force_image_size", "56", "--dynamic_image_size", "True", "--num_images_expected", "24")
# A large epsilon: Adam's first steps are otherwise signs of gradients, which rounding may turn.
STEPS = (
    "--lr_scheduler_type",
    "constant",
    "--learning_rate",
    "1e-2",
    "--adam_epsilon",
    "1e-2",
    "--max_grad_norm",
    "0.5",
)
COMMON = (
    *SHAPE,
    *STEPS,
    "--use_packed_ds",
    "True",
    "--max_packed_tokens",
    "520",
    "--use_cpu",
    "True",
)
COMMON += ("--optim", "adamw_torch", "--report_to", "none", "--log_sample_ids", "True", "--check_isolation", "False")
# What ring pads two or four ranks' samples to: the packs of all runs are then the same.
COMMON += ("--pad_to_multiple_of", "8", "--num_train_epochs", "1", "--grad_checkpoint", "False")


def sharing(size: int, mode: str = "ulysses") -> tuple[str, ...]:
    """`size` ranks a row; four packs a step whatever it is."""
    return (
        *("--sequence_parallel_size", str(size), "--sequence_parallel_mode", mode),
        *("--gradient_accumulation_steps", str(size)),
    )


SAVING = ("--save_strategy", "steps", "--save_steps", "2", "--resume_from_checkpoint", "auto")
NOT_SAVING = ("--save_strategy", "no")
# Runs in the order in which they are made: (name, output folder, options).
RUNS: list[tuple[str, tuple[str, ...]]] = [
    ("alone", ("--deepspeed", "zero_stage1", "--do_eval", "True", *SAVING)),
    ("zero1", ("--deepspeed", "zero_stage1", "--do_eval", "True", *sharing(2), *NOT_SAVING)),
    (
        "zero3",
        (
            "--deepspeed",
            "zero_stage3",
            "--max_steps",
            "2",
            "--check_isolation",
            "True",
            *sharing(2, "ring"),
            *NOT_SAVING,
        ),
    ),
    # One run on three ways to share rows, which goes on from its checkpoints.
    ("zero2", ("--deepspeed", "zero_stage2", "--max_steps", "2", *sharing(2, "ring"), *SAVING)),
    ("zero2", ("--deepspeed", "zero_stage2", "--max_steps", "4", *sharing(1), *SAVING)),
    ("zero2", ("--deepspeed", "zero_stage2", *sharing(4), *SAVING)),
]
RUNS.append(("refused", ("--deepspeed", "zero_stage1", "--sequence_parallel_size", "3")))
REFUSED = {
    "no rank": (("--sequence_parallel_size", "0"), "--sequence_parallel_size is 0: give at least 1 GPU"),
    "mode": (
        ("--sequence_parallel_size", "2", "--sequence_parallel_mode", "zigzag"),
        "--sequence_parallel_mode 'zigzag' is unknown: use one of ulysses, ring",
    ),
    "heads": (
        ("--sequence_parallel_size", "8"),
        "--sequence_parallel_size 8 does not divide the language model's 4 attention heads, which "
        "--sequence_parallel_mode ulysses spreads over the ranks",
    ),
    "budget": (
        ("--sequence_parallel_size", "4", "--max_packed_tokens", "522"),
        "--max_packed_tokens 522 is no multiple of 8, which --sequence_parallel_size 4 in ulysses mode and "
        "--pad_to_multiple_of 8 needs: use",
    ),
    "budget of ring": (
        (
            *("--sequence_parallel_size", "4", "--sequence_parallel_mode", "ring"),
            *("--max_packed_tokens", "516", "--pad_to_multiple_of", "6"),
        ),
        "--max_packed_tokens 516 is no multiple of 24, which --sequence_parallel_size 4 in ring mode and "
        "--pad_to_multiple_of 6 needs: use",
    ),
    "padded": (
        ("--sequence_parallel_size", "2", "--use_packed_ds", "False"),
        "--sequence_parallel_size 2 with --use_packed_ds False: only packed rows are cut",
    ),
    "a config of DeepSpeed's": (
        ("--sequence_parallel_size", "2", "--deepspeed", "{made}/sequence.json"),
        "the DeepSpeed config's sequence_parallel_size 2: use --sequence_parallel_size 2, and leave it out there",
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer) -> Path:
    """Samples, one of them with an image that is none; held-out ones; a tiny model."""
    folder = made_in(tmp_path_factory.mktemp("made"), tokenizer, COUNT)
    sorted((folder / "images").iterdir())[0].write_bytes(b"not an image")
    write_jsonl(folder / "held_out", 6, seed=1)
    config = json.loads((ROOT / "train" / "configs" / "zero_stage1.json").read_text())
    (folder / "sequence.json").write_text(json.dumps(config | {"sequence_parallel_size": 2}))
    return folder


@pytest.fixture(scope="module")
def runs(made, tmp_path_factory) -> Path:
    """The folder with a folder of each run, all made by one launch of four processes."""
    out = tmp_path_factory.mktemp("runs")
    series = []
    for name, options in RUNS:
        evaluated = ("--eval_meta_path", str(made / "held_out" / "meta.json")) if "--do_eval" in options else ()
        given = [*of(made), "--output_dir", str(out / name), *COMMON, *evaluated, *options]
        series.append({"options": given, "unreadable": {"1": UNREADABLE} if name == "zero1" else {}})
    ranks.run("helpers.finetune_series:run_all", series, PROCESSES, out / "log.txt", timeout=500)
    return out


def of(made: Path) -> list[str]:
    return ["--model_name_or_path", str(made / "model"), "--meta_path", str(made / "meta.json")]


def summary(folder: Path) -> dict:
    return json.loads((folder / "train_summary.json").read_text())


def history(folder: Path) -> list[dict]:
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder).state_dict()


def worst(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest relative error of a parameter. Gradients of a key's bias are zero but for rounding: so are these."""
    assert ours.keys() == expected.keys()
    norms = {name: value.norm().item() for name, value in expected.items()}
    return max(((ours[n] - expected[n]).norm().item() / max(norms[n], 1e-6), n) for n in norms)


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_shared_rows_train_what_unshared_rows_do(name, runs):
    expected, found = losses(runs / "alone"), losses(runs / name)
    steps = sorted(expected)[: len(found)]
    assert sorted(found) == steps and len(steps) >= 2
    assert max(abs(found[step] - expected[step]) for step in steps) <= 1e-6 * max(expected.values())
    norms = [[e["grad_norm"] for e in history(runs / which) if "loss" in e] for which in ("alone", name)]
    assert max(abs(a / b - 1) for a, b in zip(*norms, strict=False)) <= TOLERANCE
    last = runs / "alone" if len(steps) == len(expected) else runs / "alone" / f"checkpoint-{len(steps)}"
    error, where = worst(weights(runs / name), weights(last))
    assert error <= TOLERANCE, where


def test_a_run_whose_ranks_a_row_change_trains_every_sample_once_in_the_same_steps(runs):
    """2 ranks a row with ring, then 1, then 4 with Ulysses, always going on from a checkpoint."""
    steps = read_sample_log(runs / "zero2")
    expected = read_sample_log(runs / "alone")
    assert {step: sorted(ids) for step, ids in steps.items()} == {s: sorted(ids) for s, ids in expected.items()}
    assert len(steps) > 4
    trained = Counter(i.split("#")[0] for ids in steps.values() for i in ids)
    (lost,) = (json.loads(line)["id"] for line in (runs / "zero2" / "quarantine.jsonl").read_text().splitlines())
    assert set(trained) == {f"made/{i}" for i in range(COUNT)} - {lost}
    state = json.loads((runs / "zero2" / "checkpoint-4" / "packing_state.json").read_text())
    assert (state["world_size"], state["sequence_parallel_size"]) == (PROCESSES, 1)
    assert (json.loads((runs / "zero2/checkpoint-2/packing_state.json").read_text()))["sequence_parallel_size"] == 2


def test_books_count_a_row_once_however_many_share_it(runs):
    one, other = summary(runs / "alone"), summary(runs / "zero1")
    assert (one["ranks"], one["sequence_parallel_size"]) == (PROCESSES, 1)
    assert (other["ranks"], other["sequence_parallel_size"]) == (PROCESSES, 2)
    # Rows of a last step with fewer packs than data ranks are parted: their number and fills go by the ranks.
    same = ("steps", "num_real_tokens", "num_loss_tokens", "num_tiles", "ledger")
    assert {key: one[key] for key in same} == {key: other[key] for key in same}
    assert one["samples_packed"] == COUNT - 1
    lines = [json.loads(line) for line in (runs / "zero1" / "quarantine.jsonl").read_text().splitlines()]
    assert len(lines) == 1, "one writer, and one event a row"
    files = [sorted(f.name for f in (runs / name / "sample_ids").iterdir()) for name in ("alone", "zero1")]
    assert files == [[f"rank{r:05d}.jsonl" for r in range(n)] for n in (4, 2)]
    for log in (entry for entry in history(runs / "zero1") if "tokens_per_s" in entry):
        assert log["tokens_per_s_per_gpu"] == pytest.approx(log["tokens_per_s"] / PROCESSES)
        assert 0 < log["rank_balance"] <= 1 and 0 < log["token_fill"] <= 1


def test_a_sample_that_one_rank_cannot_read_is_trained_by_all_where_the_first_of_them_can(runs):
    assert UNREADABLE in {i for ids in read_sample_log(runs / "zero1").values() for i in ids}
    found = [line for line in (runs / "log.txt").read_text().splitlines() if "share rows" in line]
    assert found == [
        f"ranks 0, 1 share rows and did not read the same ({UNREADABLE}: image_unreadable on rank 1, not on all): all "
        "train what rank 0 read, which is sent to the others; is the storage reliable?"
    ]


def test_held_out_losses_are_those_of_unshared_rows(runs):
    (expected,), (found,) = ([e for e in history(runs / n) if "eval_loss" in e] for n in ("alone", "zero1"))
    names = [name for name in expected if name.startswith("eval_")]
    assert expected["eval_samples"] == found["eval_samples"] == 6
    for name in names:
        assert found[name] == pytest.approx(expected[name], rel=TOLERANCE), name


def test_the_log_says_how_rows_are_shared(runs):
    log = (runs / "log.txt").read_text().splitlines()
    assert log.count("sequence parallelism: 2 groups of 2 GPUs, ulysses") == 1, "zero1"
    assert log.count("sequence parallelism: 2 groups of 2 GPUs, ring") == 2, "zero2 and zero3"
    assert len([line for line in log if " optimizer steps on 4 ranks, 2 a row, " in line]) == 3


def test_isolation_is_checked_on_shared_rows(runs):
    assert (runs / "log.txt").read_text().count("isolation: changing one sample of a pack leaves") == 1


def test_processes_that_do_not_make_whole_groups_are_refused(runs):
    found = (runs / "refused" / "error.txt").read_text()
    assert found.startswith("--sequence_parallel_size 3 does not divide the run's 4 processes: set it to a divisor")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shared_is_refused_in_one_line(name, made, tmp_path):
    options, message = REFUSED[name]
    with pytest.raises(UserError) as refused:
        parsed = parse([*of(made), "--output_dir", str(tmp_path), *COMMON, *(o.format(made=made) for o in options)])
        sequence.check_options(*parsed)
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)


# --- packs that exist, and what ring pads to ------------------------------------------------------


def options_of(made: Path, out: Path, *more: str):
    common = [word for word in COMMON if word not in ("--pad_to_multiple_of", "8")]
    return parse([*of(made), "--output_dir", str(out), *common, *more])


def fitted(made: Path, out: Path, *more: str, checkpoint: Path | None = None) -> int:
    _, data_args, args = options_of(made, out, *more)
    packing = sequence.fit_packing(data_args.packing_config(seed=0), data_args, args, checkpoint)
    return packing.pad_to_multiple_of


def test_ring_fills_new_packs_by_the_multiple_that_it_pads_samples_to(made, tmp_path):
    assert fitted(made, tmp_path) == 1
    assert fitted(made, tmp_path, *sharing(4)) == 1, "Ulysses pads rows, not samples"
    assert fitted(made, tmp_path, *sharing(4, "ring")) == 8
    assert fitted(made, tmp_path, *sharing(4, "ring"), "--pad_seq_to_mult", "6") == 24


def test_packs_of_a_saved_run_keep_their_multiple_whatever_number_of_ranks_shares_them(made, tmp_path, caplog):
    saved = {"version": 4, "options": {"pad_to_multiple_of": 8}, sequence.GIVEN: 1, "sequence_parallel_size": 4}
    (tmp_path / "packing_state.json").write_text(json.dumps(saved))
    for shared in (sharing(1), sharing(8), sharing(2, "ring"), sharing(4, "ring")):
        assert fitted(made, tmp_path, *shared, checkpoint=tmp_path) == 8
    assert not caplog.text
    assert fitted(made, tmp_path, *sharing(8, "ring"), checkpoint=tmp_path) == 8
    assert "rows may exceed --max_packed_tokens by up to 15 tokens a sample" in caplog.text
    changed = fitted(made, tmp_path, *sharing(4, "ring"), "--pad_to_multiple_of", "3", checkpoint=tmp_path)
    assert changed == 24, "another option of the user's, which the resume refuses by name"


def test_a_preset_is_trained_by_ring_as_it_was_planned(made, tmp_path):
    pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "preset"
    plan = ["plan", str(made / "meta.json"), "--out", str(folder), "--tokenizer", str(made / "model"), "--workers", "0"]
    limits = ["--max_packed_tokens", "520", "--pad_to_multiple_of", "4"]
    assert internvl_pack([*plan, *SHAPE, *limits]) == 0
    preset = ("--packing", "preset", "--preset_path", str(folder))
    for shared in (sharing(2), sharing(2, "ring"), sharing(4, "ring")):
        _, data_args, args = options_of(made, tmp_path, *preset, *shared)
        packing = sequence.fit_packing(data_args.packing_config(seed=0), data_args, args, None)
        assert Preset(folder).config(packing).pad_to_multiple_of == 4


@pytest.mark.parametrize(("runs_here", "taken"), [(("flash_attn", "varlen"), "flash_attn"), (("varlen",), "varlen")])
def test_ring_takes_the_first_kernel_that_attends_to_parts_of_segments(runs_here, taken, made, tmp_path, monkeypatch):
    def select(name, device, dtype, head_size):
        assert head_size == 16
        if name not in ("auto", "fa4", *runs_here):
            raise UserError(f"--attn_kernel {name} needs something that is not there")
        return KERNELS["fa4" if name == "auto" else name]

    monkeypatch.setattr(sequence, "select_kernel", select)
    model_args, _, args = options_of(made, tmp_path, *sharing(2, "ring"))
    assert sequence.select_shared_kernel(model_args, args, torch.float32).name == taken
    with pytest.raises(UserError, match="--attn_kernel fa4 with --sequence_parallel_mode ring"):
        sequence.select_shared_kernel(replace(model_args, attn_kernel="fa4"), args, torch.float32)
    model_args, _, args = options_of(made, tmp_path, *sharing(2))
    assert sequence.select_shared_kernel(model_args, args, torch.float32).name == "fa4"
