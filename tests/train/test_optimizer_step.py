"""The optimizer's step: one that has a NaN in it changes nothing and is told, whatever the way of sharding."""

from __future__ import annotations

import json
import math

import pytest
from helpers import ranks
from helpers.launched import made_in
from helpers.stepping import run_ranks
from helpers.zero_engines import MICRO_STEPS

from train.environment import CONFIGS

pytestmark = pytest.mark.slow

STEPS, PLANTED, CLIP = 4, 3, 0.05
HALF = {"bf16": True, "optim": "adamw_torch_fused"}
RUNS = {
    "plain": {},
    "fsdp2": {"sharding": "fsdp2"},
    "fsdp2, half": {"sharding": "fsdp2", **HALF},
    "zero1, float32": {"deepspeed": "zero_stage1"},
    "zero1": {"deepspeed": "zero_stage1", **HALF},
    "zero1, another optimizer": {"deepspeed": "zero_stage1", **HALF, "optim": "adamw_torch"},
    "zero2": {"deepspeed": "zero_stage2", **HALF, "gradient_accumulation_steps": 2},
    "zero3": {"deepspeed": "zero_stage3", **HALF},
    "a user's zero1": {"deepspeed": "own.json", **HALF},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tokenizer) -> dict[str, list[dict]]:
    """What each rank saw, by run."""
    made = made_in(tmp_path_factory.mktemp("made"), tokenizer, 60)
    own = json.loads((CONFIGS / "zero_stage1.json").read_text(encoding="utf-8"))
    del own["bf16"]["check_grad_overflow"]
    (made / "own.json").write_text(json.dumps(own), encoding="utf-8")
    all_runs = {name: {**options, "max_steps": STEPS} for name, options in RUNS.items()}
    all_runs["a user's zero1"]["deepspeed"] = made / "own.json"
    return run_ranks(made, all_runs, planted=(PLANTED, 1))


@pytest.mark.parametrize("name", RUNS)
def test_a_step_with_a_nan_is_as_if_it_had_not_been(name, runs):
    for rank in runs[name]:
        before, planted, after = rank["steps"][PLANTED - 2 : PLANTED + 1]
        assert [step["skipped"] for step in rank["steps"]] == [number == PLANTED for number in range(1, STEPS + 1)]
        for key in ("weights", "states", "masters", "learning_rate"):
            assert planted[key] == before[key], key
            assert after[key] != planted[key], f"{key}: the run goes on"


@pytest.mark.parametrize("name", RUNS)
def test_it_is_told_in_one_line_with_its_samples(name, runs):
    first, second = runs[name]
    ids = [rank["steps"][PLANTED - 1]["sample_ids"] for rank in (first, second)]
    assert all(ids)
    (line,) = (line for line in first["lines"] if "skipped" in line)
    assert line.startswith(f"step {PLANTED} is skipped: the gradient is not finite; its samples: ")
    assert line.endswith(", ".join([*ids[0], *ids[1]]))


def test_losses_and_norms_of_all_ways_agree(runs):
    reference = runs["plain"][0]
    ways = {"fsdp2": 1e-5, "fsdp2, half": 3e-2}
    ways |= {"zero1, float32": 1e-5, "zero1": 3e-2, "zero1, another optimizer": 3e-2, "zero3": 3e-2}
    for name, tolerance in ways.items():
        seen = runs[name][0]
        assert seen["losses"] == pytest.approx(reference["losses"], rel=tolerance), name
        finite = [n for n, norm in enumerate(reference["norms"], 1) if n != PLANTED]
        assert not math.isfinite(seen["norms"][PLANTED - 1])
        got, expected = ([rank["norms"][n - 1] for n in finite] for rank in (seen, reference))
        assert got == pytest.approx(expected, rel=tolerance), name


def zero_config(stage: int, **more: object) -> dict:
    common = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": MICRO_STEPS}
    common["gradient_clipping"] = CLIP
    common |= {"zero_optimization": {"stage": stage, "overlap_comm": stage > 1, "reduce_bucket_size": 100}}
    return common | more


@pytest.mark.parametrize("processes", [1, 2])
def test_weights_and_norms_are_those_of_deepspeeds_own_step(processes, tmp_path):
    half = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    configs = {f"zero{stage}": zero_config(stage) for stage in (1, 2, 3)}
    configs |= {f"zero{stage}, half": zero_config(stage, **half) for stage in (1, 2)}
    configs["zero2, half, float32 gradients"] = zero_config(2, data_types={"grad_accum_dtype": "fp32"}, **half)
    ranks.run("helpers.zero_engines:both", {"folder": str(tmp_path), "configs": configs}, processes, tmp_path / "log")
    for rank in range(processes):
        for name, (theirs, ours) in json.loads((tmp_path / f"rank{rank}.json").read_text()).items():
            assert min(theirs[0]) > CLIP, "each step is clipped"
            for own, reference in zip(ours, theirs, strict=True):
                assert own == pytest.approx(reference, rel=1e-6), name
