"""The console's progress: whole lines where there is no terminal, and of the first rank only."""

from __future__ import annotations

import io
from types import SimpleNamespace

from train.progress import ConsoleProgress


def state(step: int, total: int = 4) -> SimpleNamespace:
    return SimpleNamespace(is_world_process_zero=True, global_step=step, max_steps=total)


def test_without_a_terminal_progress_is_whole_lines(monkeypatch):
    out = io.StringIO()
    progress = ConsoleProgress("packed", out)
    monkeypatch.setattr("train.progress.SECONDS_BETWEEN_LINES", 0.0)
    progress.on_train_begin(None, state(0), None)
    for step in (1, 2):
        progress.on_step_end(None, state(step), None)
        progress.on_log(None, state(step), None, {"loss": 3.0, "token_fill": 0.5})
    progress.on_train_end(None, state(2, total=2), None)
    assert out.getvalue().splitlines() == [
        "packed [#####---------------] step 1/4: loss 3.0000, fill 50.0%",
        "packed [##########----------] step 2/4: loss 3.0000, fill 50.0%",
        "packed [####################] step 2/2: loss 3.0000, fill 50.0%",
    ]


def test_other_ranks_are_silent():
    out = io.StringIO()
    progress = ConsoleProgress("packed", out)
    quiet = SimpleNamespace(is_world_process_zero=False, global_step=1, max_steps=1)
    progress.on_train_begin(None, quiet, None)
    progress.on_log(None, quiet, None, {"loss": 1.0})
    progress.on_train_end(None, quiet, None)
    assert out.getvalue() == ""
