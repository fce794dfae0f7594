"""Training on the console: a bar where a person looks, else a line for each logged step; a line for each evaluation."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TextIO

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from .metrics import WARM_UP_STEPS

if TYPE_CHECKING:
    from .trainer import PackTrainer

BAR_CELLS = 20

# What the console shows of the logs, and how. Every logged name goes to TensorBoard and the like.
SHOWN = (
    ("loss", "loss {:.4f}"),
    ("learning_rate", "lr {:.3g}"),
    ("grad_norm", "grad norm {:.3g}"),
    ("rewards/margins", "margin {:.3g}"),
    ("rewards/accuracies", "{:.0%} of pairs right"),
    ("token_fill", "fill {:.1%}"),
    ("samples_per_pack", "{:.1f} samples/pack"),
    ("tokens_per_s_per_gpu", "{:,.0f} tokens/s/rank"),
    ("data_wait", "data wait {:.0%}"),
    ("rank_balance", "balance {:.0%}"),
)


class ConsoleProgress(TrainerCallback):
    """The run on the first rank's console.

    Args:
        packs: packs(n) of the run's first n steps.
    """

    def __init__(self, packs: Callable[[int], float], name: str = "train", stream: TextIO | None = None) -> None:
        self.packs = packs
        self.name = name
        self.stream = stream or sys.stderr
        self.bar: Any = None
        # (clock in seconds, steps made): at the first step, and after the warm-up
        self.marks: list[tuple[float, int]] = []

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.marks = []
        if state.is_world_process_zero and self.stream.isatty():
            steps = {"total": state.max_steps, "initial": state.global_step}
            self.bar = tqdm(desc=self.name, unit="step", file=self.stream, **steps)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self.marks or (len(self.marks) == 1 and state.global_step == self.marks[0][1] + WARM_UP_STEPS):
            self.marks.append((time.monotonic(), state.global_step))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs or "loss" not in logs:
            return
        text = ", ".join(form.format(logs[name]) for name, form in SHOWN if name in logs)
        if logs.get("loss_tokens_per_step") == 0:
            text = f"nothing to train in these rows, {text}"
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
            return
        step, total = state.global_step, max(1, state.max_steps)
        filled = round(BAR_CELLS * step / total)
        cells = "#" * filled + "-" * (BAR_CELLS - filled)
        self._print(f"{self.name} [{cells}] step {step}/{total}: {text}, {self._time_left(step, total)} left")

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if state.is_world_process_zero and metrics:
            shown = {name: f"{v:,.0f}" if float(v).is_integer() else f"{v:.4f}" for name, v in metrics.items()}
            text = ", ".join(f"{name} {value}" for name, value in shown.items() if name != "epoch")
            self._print(f"evaluation at step {state.global_step}: {text}")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.bar is not None:
            self.bar.total = max(self.bar.total or 0, state.max_steps)
            self.bar.update(state.global_step - self.bar.n)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.bar is not None:
            self.bar.total = state.global_step
            self.bar.close()
            self.bar = None

    def _time_left(self, step: int, total: int) -> timedelta:
        """By packs, at the pace of this process's steps, without the warm-up once it is over; whole seconds."""
        began, before = next(mark for mark in reversed(self.marks) if mark[1] < step)
        a_pack = (time.monotonic() - began) / max(1.0, self.packs(step) - self.packs(before))
        return timedelta(seconds=round(a_pack * (self.packs(total) - self.packs(step))))

    def _print(self, line: str) -> None:
        if self.bar is not None:
            self.bar.write(line, file=self.stream)
        else:
            print(line, file=self.stream, flush=True)


def install(trainer: PackTrainer, name: str = "train") -> None:
    """Put `ConsoleProgress` in the place of the Trainer's own bar or printer."""
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(ConsoleProgress(lambda steps: trainer.estimate.packs(steps - trainer.steps_ahead), name))
