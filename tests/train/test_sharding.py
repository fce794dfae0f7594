"""Every way of sharding trains the same, compiled or not: losses, packed = alone, resume."""

from __future__ import annotations

import pytest
from helpers.launched import made_in
from helpers.stepping import run_ranks

pytestmark = pytest.mark.slow

STEPS, SAVED = 12, 6
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
ZERO1, ZERO2, ZERO3 = ({"deepspeed": f"zero_stage{stage}"} for stage in (1, 2, 3))
COMPILED = {"compile": True}
RUNS = {
    "zero1": ZERO1,
    "zero2 compiled": ZERO2 | COMPILED | FEW,
    "zero3": ZERO3 | {"grad_checkpoint": True},
    "zero3 compiled": ZERO3 | COMPILED | {"grad_checkpoint": True, "save_strategy": "steps", "save_steps": SAVED},
    "zero1, frozen": ZERO1 | FROZEN,
    "zero3, frozen": ZERO3 | FROZEN,
    "zero1, a vision layer": ZERO1 | PART,
    "zero3, a vision layer": ZERO3 | PART,
}

RESUMED = "zero3 compiled, resumed"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tokenizer):
    """The last one goes on from a checkpoint, and with the graphs, of one before it."""
    made = made_in(tmp_path_factory.mktemp("made"), tokenizer, 60)
    checkpoint = made / "zero3 compiled" / f"checkpoint-{SAVED}"
    more = {"save_strategy": "no", "resume_from_checkpoint": checkpoint}
    resumed = RUNS["zero3 compiled"] | more
    every = {name: COMMON | options for name, options in RUNS.items()}
    return run_ranks(made, every | {RESUMED: COMMON | resumed}, row=True)


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_norms_are_those_of_zero_1(name, runs):
    _, comma, what = name.partition(", ")
    reference = runs["zero1" + (comma + what if what in ("frozen", "a vision layer") else "")][0]
    seen = runs[name][0]
    steps = (COMMON | RUNS[name])["max_steps"]
    assert len(set(seen["losses"])) > steps // 2, "it trains"
    assert seen["losses"] == pytest.approx(reference["losses"][:steps], rel=1e-5)
    assert seen["norms"] == pytest.approx(reference["norms"][:steps], rel=1e-4)


@pytest.mark.parametrize("name", [name for name, options in RUNS.items() if options.items() >= COMPILED.items()])
def test_nothing_is_compiled_again(name, runs):
    for rank in runs[name]:
        before, *after = rank["compiled"]
        assert before > 0 and set(after) == {before}


@pytest.mark.parametrize("name", RUNS)
def test_packed_samples_have_the_losses_they_have_alone(name, runs):
    for rank in runs[name]:
        assert rank["packed"] == pytest.approx(rank["alone"], rel=1e-4)


def test_a_compiled_run_of_zero_3_goes_on_where_it_was(runs):
    whole, resumed = runs["zero3 compiled"][0], runs[RESUMED][0]
    assert len(resumed["steps"]) == STEPS - SAVED
    assert resumed["losses"][-(STEPS - SAVED) :] == pytest.approx(whole["losses"][SAVED:], rel=1e-6)
