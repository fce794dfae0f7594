"""The speed of a run."""

from __future__ import annotations

import pytest

from train.metrics import tokens_per_second


@pytest.mark.parametrize(
    ("step_times", "expected"),
    [
        ([(10, 500), (20, 500), (21, 300), (22, 100)], 200.0),  # the first two are left out
        ([(10, 500), (20, 500), (21, 300)], 800 / 11),  # too few for that: only the first is
        ([(10, 500), (12, 500)], 250.0),
        ([(10, 500)], None),
        ([], None),
    ],
)
def test_speed_counts_steps_after_the_warm_up_only(step_times, expected):
    assert tokens_per_second(step_times) == expected
