"""`--fp8` in training: ZeRO 1 and 3 in two processes, ordinary checkpoints, and going on with and without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.launched import made_in
from helpers.runs import summary_of, weights
from helpers.stepping import run_ranks
from safetensors import safe_open

from internvl_pack.errors import UserError
from train.checkpoint import load_packing_state
from train.options import parse
from train.sequence import check_options

pytest.importorskip("torchao")
pytestmark = pytest.mark.slow

COMMON = {"max_steps": 3, "logging_steps": 1, "bf16": True, "learning_rate": 1e-3, "check_isolation": True}
FP8 = COMMON | {"fp8": "rowwise"}
RUNS = {f"zero{stage}": FP8 | {"deepspeed": f"zero_stage{stage}"} for stage in (1, 3)}
RUNS["without"] = COMMON | {"deepspeed": "zero_stage1"}
COMPILED = {"compiled": RUNS["zero1"] | {"compile": True, "gradient_accumulation_steps": 2}}  # on one rank


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, tokenizer) -> tuple[Path, dict[str, list[dict]]]:
    """Folder of the runs, and by run what each rank wrote down."""
    folder = made_in(tmp_path_factory.mktemp("fp8"), tokenizer, 24)
    return folder, run_ranks(folder, RUNS) | run_ranks(folder, COMPILED, processes=1)


@pytest.mark.parametrize("name", ["zero1", "zero3", "compiled"])
def test_losses_are_near_those_without_it_and_no_sharding_changes_them(name, ranks):
    losses = {run: torch.tensor(seen[0]["losses"]) for run, seen in ranks[1].items()}
    assert len(losses[name]) == 3
    assert not torch.equal(losses[name], losses["without"]), "the products are not made in fp8"
    torch.testing.assert_close(losses[name], losses["without"], rtol=0.02, atol=0)
    torch.testing.assert_close(losses[name], losses["zero1"], rtol=2e-3, atol=0)  # of bfloat16's rounding


@pytest.mark.parametrize("name", ["zero1"])
def test_what_is_saved_is_what_is_saved_without_it(name, ranks):
    def described(run: str) -> dict[str, tuple]:
        with safe_open(ranks[0] / run / "model.safetensors", framework="pt") as file:
            return {key: (file.get_slice(key).get_dtype(), file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118

    assert described(name) == described("without")
    assert {dtype for dtype, _ in described(name).values()} == {"BF16"}


def test_a_run_goes_on_with_it_and_without(train, tmp_path, capsys):
    """Each change is said, and so is that a CPU emulates it."""
    always = ("--use_packed_ds", "True", "--lr_scheduler_type", "constant", "--save_strategy", "steps")
    always += ("--save_steps", "1", "--save_total_limit", "1")
    said = []
    for steps, options in ((1, ["--fp8", "rowwise"]), (2, []), (3, ["--fp8", "rowwise"]), (4, ["--fp8", "rowwise"])):
        assert train(*always, "--max_steps", str(steps), *options) == 0
        lines = capsys.readouterr().err.splitlines()
        said.append([line for line in lines if line.startswith("resume: the decoder's products")])
        assert bool(options) == any("on a CPU products are emulated" in line for line in lines)
        recipe = "rowwise" if options else None
        assert load_packing_state(tmp_path / f"checkpoint-{steps}")["fp8"] == summary_of(tmp_path)["fp8"] == recipe
    on, off = "in fp8 (rowwise)", "without fp8"
    line = "resume: the decoder's products were made {} until this checkpoint, from here on {}"
    assert said == [[], [line.format(on, off)], [line.format(off, on)], []]
    assert all(value.isfinite().all() for value in weights(tmp_path).values())


def test_a_row_shared_by_ranks_is_refused(made):
    words = ["--model_name_or_path", str(made / "model"), "--meta_path", str(made / "meta.json"), "--output_dir", "x"]
    words += ["--use_packed_ds", "True", "--sequence_parallel_size", "2", "--use_cpu", "True", "--fp8", "rowwise"]
    with pytest.raises(UserError, match="--fp8 rowwise with --sequence_parallel_size 2: slices of rows"):
        check_options(*parse(words))


def test_a_mixture_of_experts_is_refused_in_a_line(train, made, tokenizer, tmp_path, capsys):
    from internvl_pack.testing.tiny import save_tiny_checkpoint

    save_tiny_checkpoint(tmp_path / "moe", tokenizer, "qwen3_moe")
    options = ("--model_name_or_path", str(tmp_path / "moe"), "--use_packed_ds", "True", "--fp8", "rowwise")
    assert train(*options) == 2
    assert "--fp8 rowwise with a 'qwen3_moe' language model" in capsys.readouterr().err
