"""The part of the Trainer that writes checkpoints and goes on from them.

A checkpoint holds the weights (saving.py), the optimizer's state, and the state of the plan (`packing_state.json`),
which is written last: its presence marks the checkpoint as complete.
"""

from __future__ import annotations

import logging
import math
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from transformers.trainer import SCHEDULER_NAME

from internvl_pack.estimate.figures import RunEstimate
from internvl_pack.ledger import Losses
from internvl_pack.model.packed import PackedModel
from internvl_pack.options import count
from internvl_pack.stream.loader import PackLoader

from . import sharded
from .accounting import Ledgers
from .arguments import PackTrainingArguments, compute_dtype
from .checkpoint import (
    compared_options,
    differences,
    load_packing_state,
    make_universal,
    mark,
    remove,
    rotate,
    writing_to,
)
from .metrics import StepMetrics
from .objective import STATE, PairObjective
from .optimizer_step import StepTrainer
from .saving import Saving

logger = logging.getLogger(__name__)

HOURS_TO_CONVERT = timedelta(hours=6)
SCHEDULE = "schedule"  # in a checkpoint: packs_per_step and steps_ahead of the run that wrote it


def move_back(scheduler: Any, steps: int) -> bool:
    """Set a schedule, and the optimizer's learning rate by it, so many steps back; forward if negative.

    At most to its first step, since rates of a place before it can be negative: skipped steps do not move a schedule,
    which so can lie behind the steps that were made.

    Args:
        scheduler: of transformers, or of a DeepSpeed config.

    Returns:
        False for one that does not go by steps alone, as `reduce_lr_on_plateau`: it stays where it is.
    """
    scheduler = getattr(scheduler, "scheduler", scheduler)  # within accelerate's
    state = scheduler.state_dict()
    name = "last_epoch" if isinstance(scheduler, LambdaLR) else "last_batch_iteration"
    if name not in state:
        return False
    scheduler.load_state_dict(state | {name: max(state[name] - steps, 0) - 1})
    scheduler.step()  # the rate of a place is set on the way there
    return True


class ResumableTrainer(StepTrainer):
    """Saves and loads weights, the optimizer and the state of the plan; its subclass sets what is declared here.

    Attributes:
        steps_ahead: steps made beyond those that this run's packs a step would have made of the same samples; 0 where
            their number never changed.
    """

    args: PackTrainingArguments
    saving: Saving
    also_saved: dict[str, Any]
    ledgers: Ledgers
    metrics: StepMetrics
    objective: PairObjective | None
    estimate: RunEstimate
    steps_ahead = 0
    _schedule_moved = 0  # steps that the checkpoint's schedule is ahead of the samples by this run's packs a step
    _gathered: dict[str, torch.Tensor] | None = None  # the model that is being saved, where ranks have parts of it

    @property
    def loader(self) -> PackLoader:
        """The training loader, which knows how far the run is."""
        loader: Any = self.get_train_dataloader()
        return loader

    @property
    def share_of_epoch(self) -> float:
        """The share of this epoch's usable samples that its steps have trained, however many packs these had."""
        ledger = self.loader.ledger_of(Losses())
        read = ledger.samples_in / max(1, self.loader.packed_dataset.num_positions)
        usable = ledger.samples_packed + ledger.samples_waiting
        return min(1.0, read * (ledger.samples_packed / usable if usable else 1.0))

    @property
    def output_dir(self) -> Path:
        return Path(str(self.args.output_dir))

    @property
    def packed_model(self) -> PackedModel:
        """The model that is trained, whatever it is wrapped in."""
        return self.accelerator.unwrap_model(self.model)

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        if not self.args.sharding:  # else its parts are there
            super()._move_model_to_device(model, device)

    def move_to_these_ranks(self, checkpoint: Path) -> None:
        """Optimizer states of DeepSpeed that were saved on another number of ranks are converted, once."""
        saved = load_packing_state(checkpoint)["world_size"]
        if saved == self.ranks.world_size:
            return
        logger.warning("resume: saved on %s, going on with %d", count(saved, "ranks"), self.ranks.world_size)
        if self.ranks.is_first:
            make_universal(checkpoint)
        if self.ranks.world_size > 1:
            dist.barrier(group=dist.new_group(backend="gloo", timeout=HOURS_TO_CONVERT))
        self.accelerator.state.deepspeed_plugin.hf_ds_config.config["checkpoint"] = {"load_universal": True}

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, num_epochs: int, resume_from_checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        super()._init_training_state(max_steps, steps_per_epoch, num_epochs, resume_from_checkpoint, trial)
        if resume_from_checkpoint is None:
            return 0, 0
        state = load_packing_state(resume_from_checkpoint)
        for line in differences(state, self.args, self.packed_model.fp8):
            logger.warning("resume: %s", line)
        self.loader.load_state_dict(state, check_options=not self.args.resume_ignore_options)
        if "ended" in state:
            self.ledgers.load_state_dict(state["ended"], resume_from_checkpoint)
        self.metrics.total = dict(state.get("totals", {}))
        if self.objective is not None and STATE in state:
            self.objective.load_state_dict(state[STATE], check_options=not self.args.resume_ignore_options)
        if self.args.max_steps <= 0:
            self._follow_samples(state)
        return self.loader.epoch, 0

    def _follow_samples(self, state: dict[str, Any]) -> None:
        """Where packs a step have changed, so has the number of steps: the schedule goes on by the share of samples."""
        loader, estimate = self.loader, self.estimate
        now, epoch = loader.packs_per_step, loader.epoch
        before = state.get(SCHEDULE, {"packs_per_step": (state.get("plan") or {}).get("packs_per_step", now)})
        self.steps_ahead = was_ahead = before.get("steps_ahead", 0)
        made, whole = self.state.global_step, self.state.max_steps
        if before["packs_per_step"] != now:
            packs = estimate.epochs[min(epoch, len(estimate.epochs) - 1)].packs
            left = math.ceil(round(packs * (1 - self.share_of_epoch)) / now)  # steps of this epoch
            to_come = max(0, whole - estimate.total_steps(epoch + 1) + left)
            self.steps_ahead = made + to_come - whole
            self._schedule_moved = self.steps_ahead - was_ahead
            logger.warning("resume: %s made, %d to come", count(made, "steps"), to_come)
        self.state.max_steps = whole + self.steps_ahead

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """Weights of a checkpoint that `_save` wrote; DeepSpeed loads its own, and so does what is sharded."""
        if self.args.sharding:
            return
        self.saving.read(self.accelerator.unwrap_model(model or self.model), resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self.args.sharding:
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            sharded.load(checkpoint, self.packed_model, self.optimizer, self.ranks)
            assert self.lr_scheduler is not None, "it is made before"
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True))
        if checkpoint is not None and self._schedule_moved and move_back(self.lr_scheduler, self._schedule_moved):
            logger.warning("resume: the learning rate goes on by the share of samples trained")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.args.sharding:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        sharded.save(output_dir, self.packed_model, self.optimizer, self.ranks)
        if self.args.should_save:
            assert self.lr_scheduler is not None, "it is made before the first step"
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As transformers' Trainer; weights in parts are gathered, which all ranks do together."""
        if self.args.sharding:
            self._gathered = sharded.model_state(self.packed_model, compute_dtype(self.args), self.ranks)
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._gathered = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """A checkpoint of the model inside (saving.py); the Trainer's own would keep the wrapper's names."""
        if not self.args.should_save:
            return
        folder = output_dir or self.args.output_dir
        assert folder is not None, "an option that is asked for"
        state = self._gathered if state_dict is None else state_dict
        self.saving.write(self.packed_model, folder, state, self.processing_class)
        torch.save(self.args, os.path.join(folder, "training_args.bin"))

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        output_dir = Path(self._get_output_dir(trial=trial))
        folder = output_dir / f"checkpoint-{self.state.global_step}"
        limit, self.args.save_total_limit = self.args.save_total_limit, None  # the Trainer would remove before the mark
        try:
            with writing_to(folder):
                if self.args.should_save:
                    # What a killed run left there, perhaps on more ranks, would be read with what is written now.
                    remove(folder)
                self.ranks.barrier()
                super()._save_checkpoint(model, trial)
                if not self.args.save_only_model:  # else nothing to go on from: it must not look complete
                    self._mark(folder)
        finally:
            self.args.save_total_limit = limit
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            rotate(output_dir, limit, None if best is None else Path(best))

    def _mark(self, folder: Path) -> None:
        """Declare a checkpoint complete, with the state of the data; all ranks call it together."""
        losses = self.ledgers.losses().state_dict()
        if self.args.should_save:
            more = {
                "losses": losses,
                "world_size": self.ranks.world_size,  # which the optimizer's shards are for
                "sequence_parallel_size": self.ranks.sequence_parallel_size,
                "ended": self.ledgers.state_dict(),
                "totals": self.metrics.total,
                SCHEDULE: {"packs_per_step": self.loader.packs_per_step, "steps_ahead": self.steps_ahead},
                **compared_options(self.args, self.packed_model.fp8),
            }
            if self.objective is not None:
                more[STATE] = self.objective.state_dict()
            mark(folder, self.loader.state_dict() | more | self.also_saved)
