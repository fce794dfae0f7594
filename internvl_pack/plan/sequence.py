"""`PackSequence`, which every plan is: the packs of an epoch in order, resumable from a saved state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ..ledger import Ledger
from ..records import Fragment


class PlannedPack(NamedTuple):
    """The fragments that share a row.

    Attributes:
        number: its place in the epoch's sequence, from 0.
        cost: what it costs to train, in the packer's units; equal costs take equal time.
        fragments: in the order of their segments.
    """

    number: int
    cost: int
    fragments: tuple[Fragment, ...]


class Refused(NamedTuple):
    """A sample that enters no pack: its place in the epoch's order, and why."""

    position: int
    reason: str
    detail: str
    source: str | None


class PackSequence(Protocol):
    """The packs of one epoch, in order."""

    @property
    def ledger(self) -> Ledger:
        """Counts of what was read so far; the caller of `next_pack` adds the packs."""
        ...

    def next_pack(self) -> PlannedPack | None:
        """The next pack; None at the end of the epoch.

        Raises:
            UserError: a sample that must stop the run.
        """
        ...

    def take_refused(self) -> list[Refused]:
        """Samples refused since the last call."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The state to resume from, without the ledger: JSON values and tables (packed_state.py)."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], *, pooled: Sequence[Sequence[Fragment]] = ()) -> None:
        """Resume after the state. The ledger was loaded before; `pooled` packs were taken but not yet trained."""
        ...
