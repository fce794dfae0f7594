"""What the console shows of a run."""

from __future__ import annotations

import io
from types import SimpleNamespace

from train import progress
from train.progress import ConsoleProgress


def state(step: int, total: int = 4, first: bool = True) -> SimpleNamespace:
    return SimpleNamespace(is_world_process_zero=first, global_step=step, max_steps=total)


def test_without_a_terminal_each_log_and_each_evaluation_is_a_line(monkeypatch):
    clock = iter([100.0, 107.0, 114.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    console = ConsoleProgress("packed", out)
    console.on_train_begin(None, state(0), None)
    for step in (1, 2):
        console.on_step_end(None, state(step), None)
        console.on_log(
            None, state(step), None, {"loss": 3.0, "learning_rate": 1e-5, "grad_norm": 0.5, "token_fill": 0.5}
        )
    console.on_evaluate(None, state(2), None, {"eval_loss": 2.5, "eval_samples": 1200.0, "epoch": 0.5})
    console.on_log(None, state(2), None, {"train_runtime": 9.0})
    console.on_train_end(None, state(2, total=2), None)
    assert out.getvalue().splitlines() == [
        "packed [#####---------------] step 1/4: loss 3.0000, lr 1e-05, grad norm 0.5, fill 50.0%, 0:00:21 left",
        "packed [##########----------] step 2/4: loss 3.0000, lr 1e-05, grad norm 0.5, fill 50.0%, 0:00:14 left",
        "evaluation at step 2: eval_loss 2.5000, eval_samples 1,200",
    ]


def test_a_terminal_has_a_bar_and_evaluations_above_it():
    out = io.StringIO()
    out.isatty = lambda: True
    console = ConsoleProgress("packed", out)
    console.on_train_begin(None, state(0), None)
    console.on_log(None, state(1), None, {"loss": 3.0, "learning_rate": 1e-5})
    console.on_evaluate(None, state(1), None, {"eval_loss": 2.5})
    console.on_step_end(None, state(1), None)
    console.on_train_end(None, state(1, total=1), None)
    text = out.getvalue()
    assert "evaluation at step 1: eval_loss 2.5000\n" in text
    assert text.rstrip().splitlines()[-1].rpartition("\r")[2].startswith("packed: 100%")
    assert "loss 3.0000, lr 1e-05" in text


def test_other_ranks_are_silent():
    out = io.StringIO()
    console = ConsoleProgress("packed", out)
    console.on_train_begin(None, state(1, first=False), None)
    console.on_log(None, state(1, first=False), None, {"loss": 1.0})
    console.on_evaluate(None, state(1, first=False), None, {"eval_loss": 1.0})
    console.on_train_end(None, state(1, first=False), None)
    assert out.getvalue() == ""
