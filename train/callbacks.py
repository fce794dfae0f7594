"""What happens around the training loop: books kept over epochs, and the isolation check before the first step."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from typing import Any

from transformers import TrainerCallback

from internvl_pack.ledger import Ledger

logger = logging.getLogger(__name__)

FIRST_PACKS = 256  # real packs that are held against the estimate


class Epochs(TrainerCallback):
    """Knows whether an epoch was cut short, so that the run's ledger holds it too."""

    def __init__(self) -> None:
        self.begun = 0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begun += 1

    def ledger(self, trainer: Any) -> Ledger:
        """All epochs and ranks of the run; all ranks call it together."""
        total = trainer.ended_ledger()
        if self.begun <= len(trainer.epoch_ledgers):
            return total
        return total.merged(trainer.ledger_of_epoch())


class PackingReport(TrainerCallback):
    """What rows have held so far, in the log every `log_freq` optimizer steps; the summary tells it at the end."""

    def __init__(self, trainer: Any, log_freq: int) -> None:
        self.trainer = trainer
        self.log_freq = log_freq

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.log_freq or state.global_step % self.log_freq or not state.is_world_process_zero:
            return
        total, (_, max_tiles) = self.trainer.metrics.total, self.trainer.loader.budget
        packs = max(1.0, total["num_packs"])
        logger.info(
            "step %d: %s rows so far, %.1f samples each, token fill %.1f%%, tile fill %.1f%%",
            *(state.global_step, f"{total['num_packs']:,.0f}", total["num_samples"] / packs),
            *(
                100 * total["num_real_tokens"] / max(1.0, total["capacity"]),
                100 * total["num_tiles"] / packs / max_tiles,
            ),
        )


class IsolationCheck(TrainerCallback):
    """Proves on the model as it will train (wrapped, placed, sharded) that no segment sees another."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        from internvl_pack.model.selfcheck import check_isolation

        check_isolation(self.trainer.model_wrapped, device=args.device)
        logger.info("isolation: changing one sample of a pack leaves the other's outputs as they were")


class RunOptions(TrainerCallback):
    """Adds the options that transformers does not know, those of data and packing, to the config of a wandb run.

    Callbacks are called in the order of their adding, so that transformers' own has begun the run by then.
    """

    def __init__(self, *options: Any) -> None:
        self.options = {field.name: getattr(group, field.name) for group in options for field in fields(group)}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if "wandb" not in args.report_to or not state.is_world_process_zero:
            return
        import wandb

        if wandb.run is not None:  # None under WANDB_MODE=disabled or WANDB_DISABLED
            wandb.run.config.update(self.options, allow_val_change=True)  # a run that goes on has some already


class FirstPacks(TrainerCallback):
    """Holds the first real packs against the estimate, once, and says where they differ."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.done = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
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
