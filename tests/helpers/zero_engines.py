"""DeepSpeed's own step and ours on the same gradients: for `ranks.run`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

STEPS, MICRO_STEPS = 3, 2


def _model() -> torch.nn.Module:
    """Sizes that no number of ranks divides."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.GELU(), torch.nn.Linear(13, 5))


def _train(config: dict[str, Any], ours: bool) -> tuple[list[float], list[float]]:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    from train.optimizer_step import StepTrainer, is_fused_adam

    model, rank = _model(), int(os.environ["RANK"])
    # An epsilon far above the gradients: Adam's steps then go with their scale, and show how they are clipped.
    optimizer = torch.optim.AdamW(model.parameters(), lr=10.0, eps=100.0, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    trainer: Any = SimpleNamespace(accelerator=SimpleNamespace(deepspeed_engine_wrapped=SimpleNamespace(engine=engine)))
    trainer.args, trainer._zero = SimpleNamespace(sharding=None), None
    if ours:
        StepTrainer.prepare_steps(trainer)
        assert is_fused_adam(engine.optimizer.optimizer)
    norms, generator = [], torch.Generator().manual_seed(rank)
    dtype = next(model.parameters()).dtype
    for _ in range(STEPS):
        for _ in range(MICRO_STEPS):
            loss = engine(torch.randn(4, 7, generator=generator).to(dtype)).float().square().mean()
            engine.backward(loss)
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    masters = [safe_get_full_fp32_param(p) for p in model.parameters()]
    return norms, torch.cat([master.view(-1) for master in masters]).tolist()


def both(argument: dict[str, Any]) -> None:
    """Writes rank<r>.json: by config, norms and float32 weights after STEPS of DeepSpeed's step, and of ours.

    Args:
        argument: {"folder": ..., "configs": {name: of DeepSpeed}}.
    """
    import deepspeed
    import torch.distributed as dist

    from train.environment import prepare_deepspeed_on_cpu

    prepare_deepspeed_on_cpu()
    deepspeed.init_distributed("gloo", verbose=False)
    seen = {name: [_train(config, ours) for ours in (False, True)] for name, config in argument["configs"].items()}
    (Path(argument["folder"]) / f"rank{dist.get_rank()}.json").write_text(json.dumps(seen), encoding="utf-8")
    dist.destroy_process_group()
