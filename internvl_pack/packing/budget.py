"""What one pack may hold."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Any, NamedTuple

from ..errors import UserError


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of one pack; a pack that meets a limit exactly is full, not too large.

    Args:
        max_tokens: tokens of a row (`max_packed_tokens`).
        max_tiles: rows of `pixel_values`, thumbnails included (`num_images_expected`). 0 packs text only.
        max_attention_cost: sum over the segments of length squared (aligned lengths; of trees as in cost.py), or None
            for no limit.
        pad_to_multiple_of: every segment's length is rounded up to a multiple of this, as context
            parallelism needs, and the rounded lengths are what `max_tokens` limits.

    Raises:
        UserError: a limit that no sample can meet.
    """

    max_tokens: int
    max_tiles: int
    max_attention_cost: int | None = None
    pad_to_multiple_of: int = 1

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UserError(f"max_packed_tokens is {self.max_tokens}: give at least 1 token")
        if self.max_tiles < 0:
            raise UserError(f"num_images_expected is {self.max_tiles}: give 0 (text only) or more tiles")
        if self.pad_to_multiple_of < 1:
            raise UserError(f"pad_to_multiple_of is {self.pad_to_multiple_of}: give 1 (no alignment) or more tokens")
        if self.max_attention_cost is not None and self.max_attention_cost < 1:
            raise UserError(f"max_attention_cost is {self.max_attention_cost}: give at least 1 token squared, or None")
        if self.max_segment_tokens < 1:
            raise UserError(
                f"pad_to_multiple_of {self.pad_to_multiple_of} leaves no room for a segment in "
                f"max_packed_tokens {self.max_tokens}: lower it or raise the budget"
            )

    @property
    def max_segment_tokens(self) -> int:
        """The longest single segment, in tokens before alignment (a multiple of `pad_to_multiple_of`)."""
        longest = self.max_tokens
        if self.max_attention_cost is not None:
            longest = min(longest, isqrt(self.max_attention_cost))
        return longest - longest % self.pad_to_multiple_of

    def aligned(self, num_tokens: int) -> int:
        """Tokens that a segment of `num_tokens` takes in a row."""
        return -(-num_tokens // self.pad_to_multiple_of) * self.pad_to_multiple_of

    def fits(self, num_tokens: int, num_tiles: int) -> bool:
        """Whether a segment fits into an empty pack."""
        return num_tokens <= self.max_segment_tokens and num_tiles <= self.max_tiles


class Room(NamedTuple):
    """The largest sample that need not be cut, in tokens and tiles."""

    max_tokens: int
    max_tiles: int

    def holds(self, num_tokens: Any, num_tiles: Any) -> Any:
        """Whether a sample fits; arrays give an array."""
        return (num_tokens <= self.max_tokens) & (num_tiles <= self.max_tiles)
