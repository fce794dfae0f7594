"""The counters that must balance.

    samples in   = packed + dropped + quarantined + waiting
    fragments in = packed + lost + waiting
    tokens in    = packed + lost + cut off + waiting

`dropped` are samples that a policy of the user's removes (`oversize`); `quarantined` are samples that
cannot be used, each under its reason. A split sample counts as packed with its last fragment, and as
quarantined as soon as one of its fragments is lost. Its other fragments are trained all the same, since
packs are fixed before pixels are decoded and some may have been delivered: `samples_trained_in_part`
counts the quarantined samples of which at least one fragment was. Counts are integers, so ledgers of lanes and ranks
add up exactly in any order, and go into a saved state as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from internvl_pack.records import Fragment, Record

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


class Ledger:
    """What became of every sample that was read."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.quarantined: Counter[str] = Counter()
        self._lossy: set[int] = set()  # positions of split samples that lost a fragment and have others waiting
        self._begun: set[int] = set()  # of those that had one packed

    # -- events ----------------------------------------------------------------------------------------

    def read(self, record: Record, fragments: Sequence[Fragment]) -> None:
        """A sample came in and was cut into `fragments`; what they do not cover was truncated."""
        covered = sum(f.token_stop - f.token_start for f in fragments)
        self.read_sample(record.num_tokens, len(fragments), covered)

    def read_sample(self, num_tokens: int, num_fragments: int, covered: int) -> None:
        """A sample came in and was cut into fragments that cover `covered` of its tokens."""
        self.counts["samples_in"] += 1
        self.counts["samples_split"] += num_fragments > 1
        self.counts["fragments_in"] += num_fragments
        self.counts["tokens_in"] += num_tokens
        self.counts["tokens_cut_off"] += num_tokens - covered

    def refuse(self, reason: str) -> None:
        """A sample came in and could not be used as a whole."""
        self.counts["samples_in"] += 1
        (self.dropped if reason.startswith(POLICY_PREFIX) else self.quarantined)[reason] += 1

    def pack(self, fragment: Fragment, *, last: bool) -> None:
        """A fragment was put into a row; `last` when no other fragment of its sample waits."""
        self.counts["fragments_packed"] += 1
        self.counts["tokens_packed"] += fragment.token_stop - fragment.token_start
        if fragment.count > 1:
            self._begun.add(fragment.position)
        if last and fragment.position not in self._lossy:
            self.counts["samples_packed"] += 1
        self._settle(fragment, last)

    def lose(self, fragment: Fragment, reason: str, *, last: bool) -> bool:
        """A fragment's images could not be decoded. True for the first of its sample, which quarantines it."""
        self.counts["fragments_lost"] += 1
        self.counts["tokens_lost"] += fragment.token_stop - fragment.token_start
        is_first = fragment.position not in self._lossy
        if is_first:
            self.quarantined[reason] += 1
            self._lossy.add(fragment.position)
        self._settle(fragment, last)
        return is_first

    def _settle(self, fragment: Fragment, last: bool) -> None:
        if last:
            self.counts["samples_trained_in_part"] += fragment.position in self._lossy & self._begun
            self._lossy.discard(fragment.position)
            self._begun.discard(fragment.position)

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

    def check(self, *, waiting_fragments: int = 0) -> None:
        """Assert the balance. `waiting_fragments` is 0 at the end of an epoch."""
        c = self.counts
        assert self.samples_waiting >= 0, f"more samples left than came: {self.lines()}"
        missing = c["fragments_in"] - c["fragments_packed"] - c["fragments_lost"]
        assert missing == waiting_fragments, f"{missing} fragments are unaccounted for: {self.lines()}"
        if not waiting_fragments:
            assert self.samples_waiting == 0, f"{self.samples_waiting} samples are unaccounted for: {self.lines()}"
            tokens = c["tokens_in"] - c["tokens_packed"] - c["tokens_lost"] - c["tokens_cut_off"]
            assert tokens == 0, f"{tokens} tokens are unaccounted for: {self.lines()}"

    def lines(self) -> list[str]:
        """The ledger as people read it, one line a reason."""
        c = self.counts
        lines = [
            f"samples in          {self.samples_in:>12,}",
            f"  packed            {self.samples_packed:>12,}   ({c['samples_split']:,} of them split)",
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
            "lossy": sorted(self._lossy),
            "begun": sorted(self._begun),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts = Counter(state["counts"])
        self.dropped = Counter(state["dropped"])
        self.quarantined = Counter(state["quarantined"])
        self._lossy = set(state["lossy"])
        self._begun = set(state.get("begun", ()))  # absent in states of earlier releases

    def merged(self, other: Ledger) -> Ledger:
        """A new ledger of both."""
        out = Ledger()
        out.counts = self.counts + other.counts
        out.dropped = self.dropped + other.dropped
        out.quarantined = self.quarantined + other.quarantined
        out._lossy = self._lossy | other._lossy
        out._begun = self._begun | other._begun
        return out
