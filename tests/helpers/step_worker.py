"""Fine-tuning runs looked at step by step, one after the other in the same ranks: for `ranks.run`."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
from accelerate.state import AcceleratorState
from torch._dynamo import lookup_backend
from torch._dynamo.utils import counters
from transformers import TrainerCallback

from helpers.model_samples import mixed_segments, packed_batch
from internvl_pack.model import build
from internvl_pack.model.sharded import own_part
from train.environment import set_up_logging, shut_down
from train.finetune import prepare
from train.options import parse
from train.warm_up import WarmUp


def digest(tensors: list[torch.Tensor]) -> str:
    seen = hashlib.sha256()
    for tensor in map(own_part, tensors):
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
    def __init__(self, trainer: Any, planted_at: list[int] | None) -> None:
        self.trainer, self.steps = trainer, []
        self.compiled: list[int] = []  # graphs before the first step, after each, and after the row at the end
        self.step, self.rank = planted_at or (None, None)
        compute_loss = trainer.compute_loss

        def planted(*args: Any, **kwargs: Any) -> Any:
            loss = compute_loss(*args, **kwargs)
            if trainer.state.global_step + 1 == self.step and trainer.ranks.rank == self.rank:
                loss.register_hook(lambda gradient: gradient * torch.nan)
            return loss

        trainer.compute_loss = planted

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not state.global_step:
            self.compiled.append(counters["stats"]["unique_graphs"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        self.compiled.append(counters["stats"]["unique_graphs"])
        self.steps.append(
            marks(trainer)
            | {
                "learning_rate": trainer.lr_scheduler.get_last_lr(),
                "skipped": trainer.accelerator.optimizer_step_was_skipped,
                "sample_ids": trainer.step_sample_ids,
            }
        )


def count_tiles(tiles: list[int], module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    tiles.append(len(kwargs["pixel_values"]))


def alone_and_packed(trainer: Any) -> tuple[list[float], list[float]]:
    """Losses of a row's targets by the model as it is wrapped: all samples at once, and each in a row of its own."""
    model = trainer.model_wrapped
    model.train()  # and with gradients: compiled layers are those of the steps
    row = mixed_segments(trainer.processing_class)
    packed = model(**packed_batch(row)).target_losses
    alone = torch.cat([model(**packed_batch([segment])).target_losses for segment in row])
    return alone.tolist(), packed.tolist()


def traced(numbers: set[str], graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """The backend aot_eager. Adds names of the whole numbers that the graph is given."""
    places = graph.graph.find_nodes(op="placeholder")
    numbers |= {place.name for place in places if isinstance(place.meta["example_value"], torch.SymInt)}
    return lookup_backend("aot_eager")(graph, inputs)


def run_all(runs: list[dict[str, Any]]) -> None:
    """Make runs, each into its output folder.

    Writes rank<r>.json: by step, marks of weights and optimizer states after it, the learning rate, whether it was
    skipped, and the ids of that rank's samples; losses and norms; tiles of every forward pass; what the log said; how
    often something was compiled, and which whole numbers graphs take as inputs; and if asked for, of a row at the end,
    losses of its targets packed and a sample at a time.

    Args:
        runs: {"options": [options of finetune.py], "planted": [step, rank] of a NaN in a gradient, or null,
            "warm_up": whether to warm up, which finetune.py does where layers are compiled, "row": whether to run the
            row at the end}.
    """
    set_up_logging()
    numbers: set[str] = set()
    backend = partial(traced, numbers)  # Inductor needs a C++ compiler here
    build.compile_blocks = partial(build.compile_blocks, backend=backend)
    torch._dynamo.config.recompile_limit = 64  # runs share what is compiled, and each adds a case or two
    for run in runs:
        warnings = BufferingHandler(capacity=10_000)
        warnings.setLevel(logging.WARNING)
        logging.getLogger("train").addHandler(warnings)
        prepared = prepare(*parse(run["options"]))
        trainer = prepared.trainer
        watch = Watch(trainer, run["planted"])
        trainer.add_callback(watch)
        if run["warm_up"]:
            trainer.add_callback(WarmUp(trainer, *trainer.row_budget))
        tiles: list[int] = []
        hook = trainer.model.register_forward_pre_hook(partial(count_tiles, tiles), with_kwargs=True)
        assert prepared.train() == 0
        hook.remove()
        logging.getLogger("train").removeHandler(warnings)
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        seen = {name: [entry[key] for entry in logs] for name, key in (("losses", "loss"), ("norms", "grad_norm"))}
        seen |= {
            "steps": watch.steps,
            "lines": [record.getMessage() for record in warnings.buffer],
            "compiled": watch.compiled,
            "numbers": sorted(numbers),
            "tiles": tiles,
        }
        if run["row"]:
            seen["alone"], seen["packed"] = alone_and_packed(trainer)
            watch.compiled.append(counters["stats"]["unique_graphs"])
        out = Path(trainer.args.output_dir) / f"rank{os.environ['RANK']}.json"
        out.write_text(json.dumps(seen), encoding="utf-8")
        numbers.clear()
        del prepared, trainer, watch
        gc.collect()
        AcceleratorState._reset_state()  # one DeepSpeed config a process is accelerate's rule
    shut_down()
