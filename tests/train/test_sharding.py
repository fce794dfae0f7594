"""Every way of sharding trains the same, compiled or not: losses, packed = alone, resume."""

from __future__ import annotations

import pytest
import torch
from helpers.launched import made_in
from helpers.runs import weights
from helpers.stepping import run_ranks

pytestmark = pytest.mark.slow

STEPS, SAVED = 8, 4
COMMON = {
    "max_steps": STEPS,
    "lr_scheduler_type": "constant",
    "learning_rate": 1e-3,
    "adam_epsilon": 1e-3,
    "check_isolation": True,
}
FEW = {"max_steps": 6}
FROZEN = FEW | {"freeze_backbone": True}  # the projector is trained, and no gradient comes from before it
PART = FEW | {"freeze_backbone": True, "freeze_mlp": True, "freeze_llm": True, "unfreeze_vit_layers": 1}
LORA = FEW | {"use_llm_lora": 4, "use_backbone_lora": 2, "gradient_accumulation_steps": 2}
HALF = FEW | {"bf16": True, "vision_micro_tiles": 2}
ZERO1, ZERO2, ZERO3 = ({"deepspeed": f"zero_stage{stage}"} for stage in (1, 2, 3))
FSDP2 = {"sharding": "fsdp2"}
FUSED = FSDP2 | {"optim": "adamw_torch_fused"}
COMPILED = {"compile": True}
RUNS = {  # those of FSDP2 first: accelerate does not leave DeepSpeed again
    "fsdp2": FUSED,
    "fsdp2 checkpointed": FUSED | {"grad_checkpoint": True},
    "fsdp2 compiled": FUSED | COMPILED | {"grad_checkpoint": True},
    "fsdp2, frozen": FUSED | FROZEN | {"vision_micro_tiles": 2},
    "fsdp2, a vision layer": FUSED | PART,
    "fsdp2, LoRA": FUSED | LORA,
    "fsdp2, half": FSDP2 | HALF,
    "zero1": ZERO1,
    "zero2 compiled": ZERO2 | COMPILED | FEW,
    "zero3": ZERO3 | {"grad_checkpoint": True},
    "zero3 compiled": ZERO3 | COMPILED | {"grad_checkpoint": True, "save_strategy": "steps", "save_steps": SAVED},
    "zero1, frozen": ZERO1 | FROZEN,
    "zero3, frozen": ZERO3 | FROZEN,
    "zero1, a vision layer": ZERO1 | PART,
    "zero3, a vision layer": ZERO3 | PART,
    "zero1, LoRA": ZERO1 | LORA,
    "zero1, half": ZERO1 | HALF,
}
REFERENCE = {name: "zero1" + "".join(name.partition(", ")[1:]) for name in RUNS}
IS_COMPILED = [name for name, options in RUNS.items() if options.items() >= COMPILED.items()]
LOOSE = {"fsdp2, half": 3e-2}  # of the others sums differ in their order alone

RESUMED = "zero3 compiled, resumed"


def steps_of(name: str) -> int:
    return (COMMON | RUNS[name])["max_steps"]


def lengths_agree(name: str) -> bool:
    return steps_of(name) == steps_of(REFERENCE[name])


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer):
    return made_in(tmp_path_factory.mktemp("made"), tokenizer, 60)


@pytest.fixture(scope="module")
def runs(made):
    """The last one goes on from a checkpoint, and with the graphs, of one before it."""
    checkpoint = made / "zero3 compiled" / f"checkpoint-{SAVED}"
    more = {"save_strategy": "no", "resume_from_checkpoint": checkpoint}
    resumed = RUNS["zero3 compiled"] | more
    every = {name: COMMON | options for name, options in RUNS.items()}
    return run_ranks(made, every | {RESUMED: COMMON | resumed}, row=RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_norms_are_those_of_zero_1(name, runs):
    seen, reference = runs[name][0], runs[REFERENCE[name]][0]
    steps, tolerance = steps_of(name), LOOSE.get(name, 1e-5)
    assert len(set(seen["losses"])) > steps // 2, "it trains"
    assert seen["losses"] == pytest.approx(reference["losses"][:steps], rel=tolerance)
    assert seen["norms"] == pytest.approx(reference["norms"][:steps], rel=10 * tolerance)


@pytest.mark.parametrize("name", [name for name, like in REFERENCE.items() if like != name and lengths_agree(name)])
def test_the_saved_model_is_that_of_zero_1(name, runs, made):
    tolerance = LOOSE.get(name, 1e-4)
    folders = [made / name, made / REFERENCE[name]]
    ours, theirs = map(weights, folders)
    assert ours.keys() == theirs.keys()
    for key, weight in theirs.items():
        assert ours[key].dtype == weight.dtype, key
        torch.testing.assert_close(ours[key], weight, rtol=tolerance, atol=tolerance)
    configs = [(folder / "config.json").read_text() for folder in folders]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("name", IS_COMPILED)
def test_nothing_is_compiled_again(name, runs):
    for rank in runs[name]:
        before, *after = rank["compiled"]
        assert before > 0 and set(after) == {before}


@pytest.mark.parametrize("name", RUNS)
def test_packed_samples_have_the_losses_they_have_alone(name, runs):
    for rank in runs[name]:
        assert rank["packed"] == pytest.approx(rank["alone"], rel=LOOSE.get(name, 1e-4))


@pytest.mark.parametrize("name", IS_COMPILED)
def test_graphs_take_sizes_of_rows_as_inputs_and_those_of_layers_as_constants(name, runs):
    """Heads, their width and the like: as symbols they make compiling slow."""
    for rank in runs[name]:
        assert "l_kwargs_max_length_q_" in rank["numbers"], "the longest segment"
        assert not [number for number in rank["numbers"] if number.startswith("l_self_")]


def test_a_compiled_run_of_zero_3_goes_on_where_it_was(runs):
    whole, resumed = runs["zero3 compiled"][0], runs[RESUMED][0]
    assert len(resumed["steps"]) == STEPS - SAVED
    assert resumed["losses"][-(STEPS - SAVED) :] == pytest.approx(whole["losses"][SAVED:], rel=1e-6)
