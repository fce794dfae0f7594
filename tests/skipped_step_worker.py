"""Fine-tuning runs in two processes, a NaN in one sample's gradient: `skipped_step_worker.py RUNS.json`.

RUNS.json: {name: {"options": [options of finetune.py], "step": the step, "rank": of whose first sample}}. Writes into
each run's output folder rank<r>.json: by step, marks of weights and optimizer states after it, the learning rate, the
norm, whether it was skipped, and the ids of all samples of that rank; and the lines of the log of the first rank.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from accelerate.state import AcceleratorState
from finetune_series import forked, import_all
from transformers import TrainerCallback

from train.environment import set_up_logging, shut_down
from train.finetune import prepare
from train.options import parse


def digest(tensors: list[torch.Tensor]) -> str:
    seen = hashlib.sha256()
    for tensor in tensors:
        seen.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()


def marks(trainer: Any) -> dict[str, str]:
    """Of what a step changes: weights as the model has them, and what the optimizer keeps of this rank."""
    weights = [getattr(p, "ds_tensor", p.data) for p in trainer.model.parameters()]
    optimizer = trainer.optimizer.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    states = [value for state in inner.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    in_groups = [p for group in inner.param_groups for p in group["params"]]
    masters = getattr(optimizer, "fp32_partitioned_groups_flat", in_groups)  # ZeRO-3 has its own
    return {"weights": digest(weights), "states": digest(states), "masters": digest(masters)}


class Watch(TrainerCallback):
    def __init__(self, trainer: Any, step: int, rank: int) -> None:
        self.trainer, self.steps = trainer, []
        compute_loss = trainer.compute_loss

        def planted(*args: Any, **kwargs: Any) -> Any:
            loss = compute_loss(*args, **kwargs)
            if trainer.state.global_step + 1 == step and trainer.ranks.process == rank:
                loss.register_hook(lambda gradient: gradient * torch.nan)
            return loss

        trainer.compute_loss = planted

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        self.steps.append(
            marks(trainer)
            | {
                "learning_rate": trainer.lr_scheduler.get_last_lr(),
                "skipped": trainer.accelerator.optimizer_step_was_skipped,
                "sample_ids": trainer.step_sample_ids,
            }
        )


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run_all(runs: dict[str, Any]) -> None:
    set_up_logging()
    for run in runs.values():
        told = Lines()
        logging.getLogger("train.optimizer_step").addHandler(told)
        prepared = prepare(*parse(run["options"]))
        trainer = prepared.trainer
        watch = Watch(trainer, run["step"], run["rank"])
        trainer.add_callback(watch)
        assert prepared.train() == 0
        logging.getLogger("train.optimizer_step").removeHandler(told)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        seen = {"steps": watch.steps, "lines": told.lines, "losses": losses, "norms": norms}
        out = Path(trainer.args.output_dir) / f"rank{os.environ['RANK']}.json"
        out.write_text(json.dumps(seen), encoding="utf-8")
        del prepared, trainer, watch
        gc.collect()
        AcceleratorState._reset_state()  # one DeepSpeed config a process is accelerate's rule
    shut_down()


if __name__ == "__main__":
    import_all()
    sys.exit(forked(run_all, json.loads(Path(sys.argv[1]).read_text()), 2))
