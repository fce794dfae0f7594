"""Training on the console: a bar where a person looks, and a line now and then where nobody does."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

SECONDS_BETWEEN_LINES = 5.0
BAR_CELLS = 20

# What the console shows of the logs, and how. Every logged name goes to TensorBoard and the like.
SHOWN = (
    ("loss", "loss {:.4f}"),
    ("token_fill", "fill {:.1%}"),
    ("samples_per_pack", "{:.1f} samples/pack"),
    ("tokens_per_s_per_gpu", "{:,.0f} tokens/s/rank"),
    ("data_wait", "data wait {:.0%}"),
    ("rank_balance", "balance {:.0%}"),
)


class ConsoleProgress(TrainerCallback):
    """One bar for the run: a tqdm bar on a terminal, else lines at most every few seconds."""

    def __init__(self, name: str = "train", stream: TextIO | None = None) -> None:
        self.name = name
        self.stream = stream or sys.stderr
        self.is_terminal = self.stream.isatty()
        self.bar: Any = None
        self.last_line = 0.0
        self.text = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.last_line = time.monotonic()
        if state.is_world_process_zero and self.is_terminal:
            from tqdm import tqdm

            self.bar = tqdm(
                total=state.max_steps, initial=state.global_step, desc=self.name, unit="step", file=self.stream
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if not state.is_world_process_zero or not logs or "loss" not in logs:
            return
        self.text = ", ".join(form.format(logs[name]) for name, form in SHOWN if name in logs)
        if self.bar is not None:
            self.bar.set_postfix_str(self.text, refresh=False)
        elif time.monotonic() - self.last_line >= SECONDS_BETWEEN_LINES:
            self._line(state.global_step, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.bar is not None:
            self.bar.total = max(self.bar.total or 0, state.max_steps)
            self.bar.update(state.global_step - self.bar.n)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.bar is not None:
            self.bar.total = state.global_step
            self.bar.close()
            self.bar = None
        elif state.is_world_process_zero:
            self._line(state.global_step, state.global_step)

    def _line(self, step: int, total: int) -> None:
        filled = round(BAR_CELLS * step / max(1, total))
        bar = "#" * filled + "-" * (BAR_CELLS - filled)
        print(f"{self.name} [{bar}] step {step}/{total}: {self.text}", file=self.stream, flush=True)
        self.last_line = time.monotonic()


def install(trainer: Any, name: str = "train") -> None:
    """Put `ConsoleProgress` in the place of the Trainer's own bar or printer."""
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(ConsoleProgress(name))
