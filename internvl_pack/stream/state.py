"""The saved state of a run's data: one JSON object, the same on every rank.

    {"version": 4, "epoch": 0, "options": {...}, "plan": {...} or null, "losses": {...}}

`plan` is that of plan/groups.py after the last step that was trained, null at the start of an epoch; `losses` are of
this epoch (ledger.py), of one rank until whoever saves adds up the ranks'. `options` are what the order of samples and
packs depends on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import PackingConfig
from ..encode.config import EncodeConfig
from ..errors import UserError
from ..ledger import Losses
from ..plan.packed_state import from_json, to_json

STATE_VERSION = 4
# Options that a fingerprint leaves out at their defaults, as before there were others.
_LEFT_OUT = {"objective": EncodeConfig.objective, "share_prefix": PackingConfig.share_prefix}
_KINDS: dict[str, Any] = {"epoch": int, "options": dict, "plan": dict | None, "losses": dict}


def make_state(
    epoch: int, options: Mapping[str, Any], plan: Mapping[str, Any] | None, losses: Mapping[str, Any]
) -> dict[str, Any]:
    """The state as JSON values."""
    packed = None if plan is None else to_json(dict(plan))
    return {"version": STATE_VERSION, "epoch": epoch, "options": dict(options), "plan": packed, "losses": dict(losses)}


def read_state(
    state: Mapping[str, Any], options: Mapping[str, Any] | None
) -> tuple[int, dict[str, Any] | None, Losses]:
    """(epoch, the plan's state with its tables as arrays, losses) of a saved state.

    Args:
        options: of this run, which must be those of the state; None does not compare them.

    Raises:
        UserError: another version, other options (the first is named), or damage.
    """
    if not isinstance(state, Mapping):
        raise UserError("resume: the saved state is no JSON object: resume from an earlier checkpoint")
    if state.get("version") != STATE_VERSION:
        raise UserError(
            f"resume: the saved state has version {state.get('version')!r}, this release reads version "
            f"{STATE_VERSION}: finish that run with the release that began it, or start anew from its weights"
        )
    for name, kind in _KINDS.items():
        if name not in state or not isinstance(state[name], kind):
            raise _damaged(name)
    if state["epoch"] < 0:
        raise _damaged("epoch")
    if options is not None:
        _compare(state["options"], options)
    plan = None if state["plan"] is None else from_json(state["plan"])
    return state["epoch"], plan, _losses_of(state["losses"])


def _damaged(name: str) -> UserError:
    return UserError(f"resume: {name!r} of the saved state is damaged: resume from an earlier checkpoint")


def _losses_of(state: Mapping[str, Any]) -> Losses:
    try:
        losses = Losses.merged([state])
        numbers = [losses.fragments, losses.tokens, *losses.samples.values(), *(n for p in losses.parts for n in p[:4])]
        assert isinstance(state["samples"], dict) and all(len(part) == 5 for part in losses.parts)
        assert all(isinstance(n, int) and n >= 0 for n in numbers)
    except (AssertionError, LookupError, TypeError, ValueError):
        raise _damaged("losses") from None
    return losses


def _compare(saved: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Compare a state's options with those of this run; of several data sets only those that differ are shown.

    Raises:
        UserError: an option differs.
    """
    for name in sorted(options.keys() | saved.keys(), key=lambda name: (name == "meta", name)):  # the longest last
        old, new = (each.get(name, _LEFT_OUT.get(name)) for each in (saved, options))
        if old == new:
            continue
        if name == "meta" and isinstance(old, list) and new and len(old) == len(new):
            old, new = zip(*((o, n) for o, n in zip(old, new, strict=True) if o != n), strict=True)
        raise UserError(
            f"resume: {name} was {old!r} when the checkpoint was saved and is {new!r} now: set it back, start "
            "anew (--overwrite_output_dir True, or another --output_dir), or continue with another order "
            "(--resume_ignore_options True)"
        )
