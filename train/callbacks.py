"""What happens around the training loop: books kept over epochs, and the isolation check before the first step."""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainerCallback

from internvl_pack.report.ledger import Ledger

logger = logging.getLogger(__name__)


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
