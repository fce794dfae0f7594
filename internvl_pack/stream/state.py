"""The saved state of a run's data: one JSON object, the same on every rank.

    {"version": 4, "epoch": 0, "options": {...}, "plan": {...} or null, "losses": {...}}

`plan` is that of plan/groups.py after the last step that was trained, null at the start of an epoch; `losses` are of
this epoch (ledger.py), of one rank until whoever saves adds up the ranks'. `options` are what the order of samples and
packs depends on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UserError
from ..ledger import Losses
from ..plan.packed_state import from_json, to_json

STATE_VERSION = 4


def make_state(
    epoch: int, options: Mapping[str, Any], plan: Mapping[str, Any] | None, losses: Mapping[str, Any]
) -> dict[str, Any]:
    """The state as JSON values."""
    plan_values = None if plan is None else to_json(dict(plan))
    return {
        "version": STATE_VERSION,
        "epoch": epoch,
        "options": dict(options),
        "plan": plan_values,
        "losses": dict(losses),
    }


def plan_of(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The plan's state, its tables as arrays.

    Raises:
        UserError: it is damaged.
    """
    plan = state["plan"]
    if plan is not None and not isinstance(plan, dict):
        raise UserError("resume: the plan of the saved state is damaged: resume from an earlier checkpoint")
    return None if plan is None else from_json(plan)


def losses_of(state: Mapping[str, Any]) -> Losses:
    """What could not be used so far.

    Raises:
        UserError: it is damaged.
    """
    losses = state["losses"]
    try:
        out = Losses.merged([losses])
        numbers = [out.fragments, out.tokens, *out.samples.values(), *(n for part in out.parts for n in part[:4])]
        shapes = isinstance(losses["samples"], dict) and all(len(part) == 5 for part in out.parts)
        if shapes and all(isinstance(n, int) and n >= 0 for n in numbers):
            return out
    except (LookupError, TypeError, ValueError):
        pass
    raise UserError("resume: 'losses' of the saved state are damaged: resume from an earlier checkpoint")


def check_state(state: Mapping[str, Any], options: Mapping[str, Any] | None) -> None:
    """Check that a saved state can be resumed here.

    Raises:
        UserError: it cannot; names the option that differs.
    """
    if not isinstance(state, Mapping):
        raise UserError("resume: the saved state is no JSON object: resume from an earlier checkpoint")
    if state.get("version") != STATE_VERSION:
        raise UserError(
            f"resume: the saved state has version {state.get('version')!r}, this release reads version "
            f"{STATE_VERSION}: "
            "finish that run with the release that began it, or start anew from its weights"
        )
    missing = [key for key in ("epoch", "options", "plan", "losses") if key not in state]
    if missing:
        raise UserError(
            f"resume: the saved state has no {missing[0]!r}: it is damaged, resume from an earlier checkpoint"
        )
    if not isinstance(state["epoch"], int) or state["epoch"] < 0 or not isinstance(state["options"], dict):
        raise UserError(
            "resume: the epoch or the options of the saved state are damaged: resume from an earlier checkpoint"
        )
    if options is None:
        return
    saved = state["options"]
    for name in sorted(options.keys() | saved.keys(), key=lambda name: (name == "meta", name)):  # the longest last
        old, new = saved.get(name), options.get(name)
        if old != new:
            if (
                name == "meta" and isinstance(old, list) and new and len(old) == len(new)
            ):  # only the datasets that differ
                old, new = zip(*((o, n) for o, n in zip(old, new, strict=True) if o != n), strict=True)
            raise UserError(
                f"resume: {name} was {old!r} when the checkpoint was saved and is {new!r} "
                f"now: set it back, or pass resume_ignore_options to continue with another order"
            )
