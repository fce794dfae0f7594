"""What happens around the training loop: where the run ends, what is logged beside the loss, the isolation check."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from internvl_pack.estimate.figures import RunEstimate
from internvl_pack.model.flops import trained_parts
from internvl_pack.model.packed import PackedModel
from internvl_pack.model.selfcheck import check_isolation

from .arguments import DataTrainingArguments, ModelArguments

if TYPE_CHECKING:
    from .trainer import PackTrainer

logger = logging.getLogger(__name__)

FIRST_PACKS = 256  # real packs that are compared with the estimate


class EpochControl(TrainerCallback):
    """Ends the run with the data, not with an estimated number of steps, and where it is asked to stop."""

    def __init__(self, trainer: PackTrainer) -> None:
        self.trainer = trainer
        self.first_step = 0

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.first_step = state.global_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer = self.trainer
        trainer.metrics.end_step()
        state.epoch = trainer.loader.epoch + trainer.share_of_epoch
        ends_with_the_plan = args.max_steps <= 0 and float(args.num_train_epochs).is_integer()
        if ends_with_the_plan and state.global_step >= state.max_steps:
            control.should_training_stop = False
            state.max_steps = state.global_step  # no fewer than were made, should the estimate have been too low
        asked = trainer.stop_request.agree(trainer.ranks.cpu_group)
        if asked and not control.should_training_stop:  # else the run has ended anyway
            trainer.stopped_by = asked
            # Nothing that takes time but the checkpoint, and that with the optimizer's state.
            args.save_only_model = False
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.trainer.stopped_by:  # the epoch has not ended
            control.should_log = control.should_evaluate = control.should_save = False
            return
        # A run resumed at the very end of an epoch finds nothing left in it; the Trainer would stop there.
        if state.global_step == self.first_step and (args.max_steps <= 0 or state.global_step < state.max_steps):
            control.should_training_stop = False

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        state.max_steps = state.global_step


# --- packing in the log


def log_estimate(estimate: RunEstimate, model: PackedModel, *, packing: bool) -> None:
    """Before the first step: what packs will hold, and what would show in hours otherwise."""
    if packing:
        logger.warning(estimate.first.line())
    troubles = (
        estimate.first.trouble() if packing else None,
        untrained_by_text(trained_parts(model), estimate.first.tiles),
    )
    for trouble in filter(None, troubles):
        logger.warning(trouble)


def untrained_by_text(trained: Mapping[str, bool], num_tiles: float) -> str | None:
    """A line where only parts are trained that see images, and the data holds none; else None.

    Args:
        trained: `model.flops.trained_parts`.
        num_tiles: of the samples that were looked at.
    """
    of_images = trained["trains_vision"] or trained["trains_projector"]
    if num_tiles or not of_images or trained["trains_language"] or trained["trains_head"]:
        return None
    parts = " and ".join(name for name in ("vision", "projector") if trained[f"trains_{name}"])
    return (
        f"nothing will be learnt: of the model only {parts} is trained, and no sample that was looked at has an image; "
        "add data with images, or train the language model (--freeze_llm False)"
    )


class FirstPacks(TrainerCallback):
    """Compares the first real packs with the estimate, once, and says where they differ."""

    def __init__(self, trainer: PackTrainer) -> None:
        self.trainer = trainer
        self.done = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        total, loader = self.trainer.metrics.here, self.trainer.loader
        expected = self.trainer.estimate.first
        if self.done or not loader.packed_dataset.config.packing:
            return
        if total.get("num_packs", 0.0) < min(FIRST_PACKS, expected.packs):
            return
        self.done = True
        found = replace(
            expected,
            packs=total["num_packs"],
            samples=total["num_samples"],
            tokens=total["num_real_tokens"],
            tiles=total["num_tiles"],
        )
        if not expected.differs(found) or not state.is_world_process_zero:
            return
        logger.warning(
            "packing: the first %d packs hold %.1f samples each (%.1f were expected), token fill %.1f%% (%.1f%%), "
            "tile fill %.1f%% (%.1f%%)",
            *(found.packs, found.samples_per_pack, expected.samples_per_pack),
            *(100 * found.token_fill, 100 * expected.token_fill, 100 * found.tile_fill, 100 * expected.tile_fill),
        )
        if (trouble := found.trouble()) is not None and expected.trouble() is None:
            logger.warning(trouble)


class PackingReport(TrainerCallback):
    """What rows have held so far, in the log every `log_freq` optimizer steps; the summary has it at the end."""

    def __init__(self, trainer: PackTrainer, log_freq: int) -> None:
        self.trainer = trainer
        self.log_freq = log_freq

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self.log_freq or state.global_step % self.log_freq or not state.is_world_process_zero:
            return
        total = self.trainer.metrics.total
        fills = self.trainer.metrics.fills(total)
        logger.info(
            "step %d: %s rows so far, %.1f samples each, token fill %.1f%%, tile fill %.1f%%",
            *(state.global_step, f"{total['num_packs']:,.0f}", fills["samples_per_pack"]),
            *(100 * fills["token_fill"], 100 * fills["tile_fill"]),
        )


# --- others


class IsolationCheck(TrainerCallback):
    """Proves on the model as it will train (wrapped, placed, sharded) that no segment sees another."""

    def __init__(self, trainer: PackTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        check_isolation(self.trainer.model_wrapped, device=args.device)
        logger.info("isolation: changing one sample of a pack leaves the other's outputs as they were")


class RunOptions(TrainerCallback):
    """Adds the options that transformers does not know, those of data and packing, to the config of a wandb run.

    Callbacks are called in the order of their adding, so that transformers' own has begun the run by then.
    """

    def __init__(self, *options: ModelArguments | DataTrainingArguments) -> None:
        self.options = {field.name: getattr(group, field.name) for group in options for field in fields(group)}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if "wandb" not in (args.report_to or ()) or not state.is_world_process_zero:
            return
        import wandb  # not installed where it is not reported to

        if wandb.run is not None:  # None under WANDB_MODE=disabled or WANDB_DISABLED
            wandb.run.config.update(self.options, allow_val_change=True)  # a run that goes on has some already
