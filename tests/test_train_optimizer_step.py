"""The optimizer's step: one that has a NaN in it changes nothing and is told, whatever the way of sharding."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launched import made_in

ROOT = Path(__file__).resolve().parents[1]
STEPS, PLANTED = 5, 3
OPTIONS = {"use_packed_ds": True, "force_image_size": 56, "max_packed_tokens": 256, "num_images_expected": 8}
OPTIONS |= {"num_lanes": 2, "max_steps": STEPS, "learning_rate": 1e-2, "lr_scheduler_type": "linear", "use_cpu": True}
OPTIONS |= {"grad_checkpoint": False, "save_strategy": "no", "check_isolation": False, "report_to": "none"}
HALF = {"bf16": True, "optim": "adamw_torch_fused"}
RUNS = {
    "plain": {"optim": "adamw_torch"},
    "zero1, float32": {"deepspeed": "zero_stage1", "optim": "adamw_torch"},
    "zero1": {"deepspeed": "zero_stage1", **HALF},
    "zero1, another optimizer": {"deepspeed": "zero_stage1", **HALF, "optim": "adamw_torch"},
    "zero2": {"deepspeed": "zero_stage2", **HALF, "gradient_accumulation_steps": 2},
    "zero3": {"deepspeed": "zero_stage3", **HALF},
    "a user's zero1": {**HALF},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tokenizer) -> dict[str, list[dict]]:
    """What each rank saw, by run."""
    made = made_in(tmp_path_factory.mktemp("made"), tokenizer, 60)
    own = json.loads((ROOT / "train" / "configs" / "zero_stage1.json").read_text(encoding="utf-8"))
    del own["bf16"]["check_grad_overflow"]
    (made / "own.json").write_text(json.dumps(own), encoding="utf-8")
    series = {}
    for name, options in RUNS.items():
        options = {
            **OPTIONS,
            **({"deepspeed": str(made / "own.json")} if "user" in name else {}),
            **options,
            "model_name_or_path": str(made / "model"),
            "meta_path": str(made / "meta.json"),
            "output_dir": str(made / name),
        }
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        series[name] = {"options": words, "step": PLANTED, "rank": 1}
    (made / "runs.json").write_text(json.dumps(series), encoding="utf-8")
    command = [sys.executable, str(ROOT / "tests" / "skipped_step_worker.py"), str(made / "runs.json")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: [json.loads((made / name / f"rank{r}.json").read_text()) for r in range(2)] for name in RUNS}


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
    (line,) = first["lines"]
    assert line.startswith(f"step {PLANTED} is skipped: the gradient is not finite; its samples: ")
    assert line.endswith(", ".join([*ids[0], *ids[1]]))


def test_losses_and_norms_of_all_ways_agree(runs):
    reference = runs["plain"][0]
    ways = {"zero1, float32": 1e-5, "zero1": 3e-2, "zero1, another optimizer": 3e-2, "zero3": 3e-2}
    for name, tolerance in ways.items():
        seen = runs[name][0]
        assert seen["losses"] == pytest.approx(reference["losses"], rel=tolerance), name
        finite = [n for n, norm in enumerate(reference["norms"], 1) if n != PLANTED]
        assert not math.isfinite(seen["norms"][PLANTED - 1])
        got, expected = ([rank["norms"][n - 1] for n in finite] for rank in (seen, reference))
        assert got == pytest.approx(expected, rel=tolerance), name
