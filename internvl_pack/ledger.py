"""The counters that must balance.

    samples in   = packed + dropped + quarantined + waiting
    fragments in = packed + lost + waiting
    tokens in    = packed + lost + cut off + waiting

`dropped` are samples that a policy of the user's removes (`oversize`); `quarantined` are samples that cannot be used,
each under its reason. The plan counts what it reads, refuses and puts into packs: the same on every rank. What its
readers then cannot decode are `Losses`, kept a rank and added up. A split sample counts as packed with its last
fragment, and as quarantined as soon as one of its fragments is lost; its other fragments are trained all the same,
since packs are fixed before pixels are decoded (`samples_trained_in_part`). Counts are integers, so they add up exactly
in any order, and go into a saved state as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .records import Fragment

POLICY_PREFIX = "oversized"  # reasons that are the user's policy, not damage

_COUNTS = (
    "samples_in",
    "samples_packed",
    "samples_split",
    "samples_trained_in_part",
    "fragments_in",
    "fragments_packed",
    "fragments_lost",
    "tokens_in",
    "tokens_packed",
    "tokens_lost",
    "tokens_cut_off",
)


class Losses:
    """Fragments that were planned and could not be used: their images cannot be decoded, or they have changed.

    Attributes:
        fragments, tokens: lost in all.
        samples: whole samples lost, by reason.
        parts: lost fragments of split samples, as (epoch, position, index, count, reason): the rest may be on other
            ranks.
    """

    def __init__(self) -> None:
        self.fragments = self.tokens = 0
        self.samples: Counter[str] = Counter()
        self.parts: list[tuple[int, int, int, int, str]] = []

    def add(self, epoch: int, fragment: Fragment, reason: str) -> None:
        """A fragment is lost."""
        self.fragments += 1
        self.tokens += fragment.token_stop - fragment.token_start
        if fragment.count == 1:
            self.samples[reason] += 1
        else:
            self.parts.append((epoch, fragment.position, fragment.index, fragment.count, reason))

    @property
    def num_samples(self) -> int:
        """Samples that lost anything."""
        return self.samples.total() + len({part[:2] for part in self.parts})

    def state_dict(self) -> dict[str, Any]:
        parts = [list(part) for part in sorted(self.parts)]
        return {"fragments": self.fragments, "tokens": self.tokens, "samples": dict(self.samples), "parts": parts}

    @classmethod
    def merged(cls, states: Iterable[Mapping[str, Any]]) -> Losses:
        """The sum of several ranks' `state_dict`s."""
        out = cls()
        for state in states:
            out.fragments += state["fragments"]
            out.tokens += state["tokens"]
            out.samples += Counter(state["samples"])
            out.parts += [tuple(part) for part in state["parts"]]
        return out


class Ledger:
    """What became of every sample that was read."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.quarantined: Counter[str] = Counter()
        self._parts: dict[int, int] = {}  # fragments still to come, by position, of split samples

    # -- events ----------------------------------------------------------------------------------------

    def read(self, num_tokens: int, fragments: Sequence[Fragment]) -> None:
        """A sample came in and was cut into `fragments`; what they do not cover was truncated."""
        counts = self.counts
        counts["samples_in"] += 1
        counts["fragments_in"] += len(fragments)
        counts["tokens_in"] += num_tokens
        if len(fragments) == 1:
            counts["tokens_cut_off"] += num_tokens - fragments[0].token_stop
        else:
            counts["samples_split"] += 1
            self._parts[fragments[0].position] = len(fragments)

    def read_many(self, num_samples: int, num_tokens: int, num_cut_off: int, parts: Mapping[int, int]) -> None:
        """As `read` of many samples: `parts` are the fragments of those that were split, by position."""
        self.counts["samples_in"] += num_samples
        self.counts["samples_split"] += len(parts)
        self.counts["fragments_in"] += num_samples - len(parts) + sum(parts.values())
        self.counts["tokens_in"] += num_tokens
        self.counts["tokens_cut_off"] += num_cut_off
        self._parts.update(parts)

    def refuse(self, reason: str) -> None:
        """A sample came in and could not be used as a whole."""
        self.counts["samples_in"] += 1
        (self.dropped if reason.startswith(POLICY_PREFIX) else self.quarantined)[reason] += 1

    def pack(self, fragment: Fragment) -> None:
        """A fragment was put into a pack."""
        self.counts["fragments_packed"] += 1
        self.counts["tokens_packed"] += fragment.token_stop - fragment.token_start
        if fragment.count > 1:
            left = self._parts[fragment.position] - 1
            if left:
                self._parts[fragment.position] = left
                return
            del self._parts[fragment.position]
        self.counts["samples_packed"] += 1

    def less(self, losses: Losses) -> Ledger:
        """A new ledger in which what was lost does not count as packed."""
        out = self.merged(Ledger())
        counts = out.counts
        counts["fragments_packed"] -= losses.fragments
        counts["fragments_lost"] += losses.fragments
        counts["tokens_packed"] -= losses.tokens
        counts["tokens_lost"] += losses.tokens
        out.quarantined += losses.samples
        counts["samples_packed"] -= losses.samples.total()
        by_sample: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
        for epoch, position, index, count, reason in sorted(losses.parts):
            by_sample.setdefault((epoch, position), []).append((index, count, reason))
        for (_, position), lost in by_sample.items():
            out.quarantined[lost[0][2]] += 1
            if position not in self._parts:  # all of its fragments are in packs
                counts["samples_packed"] -= 1
                counts["samples_trained_in_part"] += len(lost) < lost[0][1]
        return out

    @property
    def parts(self) -> dict[int, int]:
        """Fragments still to come of split samples, by position, in the order in which they were read."""
        return self._parts

    # -- figures ---------------------------------------------------------------------------------------

    @property
    def samples_in(self) -> int:
        return self.counts["samples_in"]

    @property
    def samples_packed(self) -> int:
        return self.counts["samples_packed"]

    @property
    def samples_dropped(self) -> int:
        return sum(self.dropped.values())

    @property
    def samples_quarantined(self) -> int:
        return sum(self.quarantined.values())

    @property
    def samples_waiting(self) -> int:
        return self.samples_in - self.samples_packed - self.samples_dropped - self.samples_quarantined

    @property
    def _tokens_left(self) -> int:
        c = self.counts
        return c["tokens_in"] - c["tokens_packed"] - c["tokens_lost"] - c["tokens_cut_off"]

    def check(self, *, waiting_fragments: int = 0) -> None:
        """Assert the balance. `waiting_fragments` is 0 at the end of an epoch."""
        c = self.counts
        assert self.samples_waiting >= 0, f"more samples left than came: {self.lines()}"
        missing = c["fragments_in"] - c["fragments_packed"] - c["fragments_lost"]
        assert missing == waiting_fragments, f"{missing} fragments are unaccounted for: {self.lines()}"
        if not waiting_fragments:
            assert self.samples_waiting == 0, f"{self.samples_waiting} samples are unaccounted for: {self.lines()}"
            assert self._tokens_left == 0, f"{self._tokens_left} tokens are unaccounted for: {self.lines()}"

    def check_waiting(self, waiting: Sequence[Fragment]) -> None:
        """Assert that these fragments, and no others, are still to be packed."""
        self.check(waiting_fragments=len(waiting))
        tokens = self._tokens_left
        assert tokens == sum(f.token_stop - f.token_start for f in waiting), f"{tokens} tokens wait: {self.lines()}"
        parts = Counter(fragment.position for fragment in waiting if fragment.count > 1)
        assert parts == self._parts, "other parts of split samples wait"
        whole = sum(fragment.count == 1 for fragment in waiting)
        assert self.samples_waiting == whole + len(parts), f"{whole + len(parts)} samples wait: {self.lines()}"

    def lines(self) -> list[str]:
        """The ledger as people read it, one line a reason."""
        c = self.counts
        lines = [
            f"samples in          {self.samples_in:>12,}   ({c['samples_split']:,} of them split)",
            f"  packed            {self.samples_packed:>12,}",
        ]
        lines += [f"  dropped           {n:>12,}   {reason}" for reason, n in sorted(self.dropped.items())]
        lines += [f"  quarantined       {n:>12,}   {reason}" for reason, n in sorted(self.quarantined.items())]
        if c["samples_trained_in_part"]:
            lines.append(f"    trained in part {c['samples_trained_in_part']:>12,}   fragments without lost images")
        lines.append(f"  still waiting     {self.samples_waiting:>12,}")
        lines.append(
            f"fragments           {c['fragments_in']:>12,}   packed {c['fragments_packed']:,}, "
            f"lost {c['fragments_lost']:,}"
        )
        lines.append(
            f"tokens              {c['tokens_in']:>12,}   packed {c['tokens_packed']:,}, lost {c['tokens_lost']:,}, "
            f"cut off {c['tokens_cut_off']:,}"
        )
        return lines

    # -- state -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "counts": {key: self.counts[key] for key in _COUNTS},
            "dropped": dict(sorted(self.dropped.items())),
            "quarantined": dict(sorted(self.quarantined.items())),
            "parts": {str(position): left for position, left in self._parts.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state of `state_dict`.

        Raises:
            LookupError, TypeError, ValueError, AttributeError: the state is damaged.
        """
        self.counts = Counter({key: int(state["counts"][key]) for key in _COUNTS})
        self.dropped, self.quarantined = (
            Counter({reason: int(n) for reason, n in state[name].items()}) for name in ("dropped", "quarantined")
        )
        self._parts = {int(position): int(left) for position, left in state["parts"].items()}

    def merged(self, other: Ledger) -> Ledger:
        """A new ledger of both, of different epochs."""
        out = Ledger()
        out.counts = Counter({key: self.counts[key] + other.counts[key] for key in _COUNTS})
        out.dropped = self.dropped + other.dropped
        out.quarantined = self.quarantined + other.quarantined
        out._parts = {**self._parts, **other._parts}
        return out
