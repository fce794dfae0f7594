"""What the console shows of a run."""

from __future__ import annotations

import io
from datetime import timedelta
from types import SimpleNamespace

from internvl_pack.estimate.figures import PackingEstimate, RunEstimate
from train import progress
from train.progress import ConsoleProgress


def state(step: int, total: int = 4, first: bool = True) -> SimpleNamespace:
    return SimpleNamespace(is_world_process_zero=first, global_step=step, max_steps=total)


def test_without_a_terminal_each_log_and_each_evaluation_is_a_line(monkeypatch):
    clock = iter([100.0, 107.0, 114.0])  # the first step begins; two lines
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    console = ConsoleProgress(float, "packed", out)
    console.on_train_begin(None, state(0), None)
    for step in (1, 2):
        console.on_step_begin(None, state(step - 1), None)
        console.on_step_end(None, state(step), None)
        logs = {
            "loss": 3.0,
            "learning_rate": 1e-5,
            "grad_norm": 0.5,
            "token_fill": 0.5,
            "loss_tokens_per_step": 2 - step,
        }
        console.on_log(None, state(step), None, logs)
    console.on_evaluate(None, state(2), None, {"eval_loss": 2.5, "eval_samples": 1200.0, "epoch": 0.5})
    console.on_log(None, state(2), None, {"train_runtime": 9.0})
    console.on_train_end(None, state(2, total=2), None)
    assert out.getvalue().splitlines() == [
        "packed [#####---------------] step 1/4: loss 3.0000, lr 1e-05, grad norm 0.5, fill 50.0%, 0:00:21 left",
        "packed [##########----------] step 2/4: nothing to train in these rows, loss 3.0000, lr 1e-05, grad norm 0.5, "
        "fill 50.0%, 0:00:14 left",
        "evaluation at step 2: eval_loss 2.5000, eval_samples 1,200",
    ]


def test_time_left_is_by_packs_and_without_the_first_steps(monkeypatch):
    # Two epochs of 4 steps, the last with one pack instead of 8; the first two steps take 30 s, the others 8 or 1.
    clock = iter([0.0, 30.0, 60.0, 60.0, 68.0, 69.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    epoch = PackingEstimate(packs=25, samples=25, tokens=25, tiles=0, budget=(1, 1), steps=4, packs_per_step=8)
    out = io.StringIO()
    console = ConsoleProgress(RunEstimate((epoch,), exact=True).packs, "packed", out)
    console.on_train_begin(None, state(0, 8), None)
    for step in (1, 2, 3, 4):
        console.on_step_begin(None, state(step - 1, 8), None)
        console.on_log(None, state(step, 8), None, {"loss": 3.0})
    left = [line.rpartition(", ")[2] for line in out.getvalue().splitlines()]
    assert RunEstimate((epoch, epoch), exact=True).packs(19) == 2 * 25 + 25 + 25 + 24
    first = 30 / 8 * 42, 60 / 16 * 34
    assert left == [f"{timedelta(seconds=round(s))} left" for s in (*first, 8 / 8 * 26, 9 / 9 * 25)]


def test_a_terminal_has_a_bar_and_evaluations_above_it():
    out = io.StringIO()
    out.isatty = lambda: True
    console = ConsoleProgress(float, "packed", out)
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
    console = ConsoleProgress(float, "packed", out)
    console.on_train_begin(None, state(1, first=False), None)
    console.on_log(None, state(1, first=False), None, {"loss": 1.0})
    console.on_evaluate(None, state(1, first=False), None, {"eval_loss": 1.0})
    console.on_train_end(None, state(1, first=False), None)
    assert out.getvalue() == ""
