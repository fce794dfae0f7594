"""Cut samples that do not fit into a pack.

A cut inside a run of text repeats the token before it, unsupervised (`num_context_tokens`): without it
the first token of the fragment, which may be a target, would have nothing to be predicted from.

Where the cuts fall: as few as possible inside a turn, then as few fragments as possible, then fragments
of even length. An image's block is never cut. Every token and tile of the sample lands in exactly one
fragment, in order.

Why the search is exact although it only keeps the furthest reach: whatever can follow position p can,
shortened at its front, also follow any later position, so among all choices of `f` fragments with `t`
cuts inside turns only the one that reaches furthest matters. It takes time and memory that grow with the square of the
number of fragments, so beyond EXACT_FRAGMENTS of them each cut is the last turn border in reach, else the last
permitted cut.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from ..errors import SampleError, UserError
from ..options import count
from ..records import Fragment, Record, Span, whole
from .budget import Budget

OVERSIZE = ("split", "truncate", "drop", "error")
SMALLER = "max_dynamic_patch; with native resolution max_pixels, of a video video_max_pixels"
EXACT_FRAGMENTS = 256  # a sample of 2 million tokens at a budget of 8,192


def split(
    record: Record,
    position: int,
    budget: Budget,
    *,
    oversize: str = "split",
    max_segment_tokens: int | None = None,
    repeat_system_prompt: bool = False,
) -> list[Fragment]:
    """The fragments of a sample: itself where it fits, else as `oversize` says.

    Args:
        record: its `spans` say where images lie and turns end. Without spans a sample without tiles is
            one run of text; one with tiles cannot be cut.
        position: the sample's place in the epoch's order, copied into the fragments.
        oversize: what to do with a sample that exceeds the budget:
            `split` at turn borders, else between tokens of text; `truncate` to the longest prefix that
            fits (tokens after it are not trained); `drop` it; `error`.
        max_segment_tokens: a limit on one fragment's tokens besides the budget's, such as the model's
            longest position.
        repeat_system_prompt: begin every fragment but the first with the system turn's tokens
            (`num_prefix_tokens`, counted in the budget). Not done for a sample whose system turn holds an
            image, takes over half of the budget, or leaves no room for one of its images.

    A tree is cut between its branches, whatever `oversize` cuts, each part after the whole prefix; a pair never. One of
    joined rows is cut always, since each of these fits.

    Raises:
        SampleError: `sample_empty`, `oversized_dropped`, `oversized_error` (the caller turns this one
            into the end of the run), or `image_exceeds_budget`: one image alone is too large to be kept.
        UserError: an unknown `oversize`, or `max_segment_tokens` below 1.
    """
    if oversize not in OVERSIZE:
        raise UserError(f"oversize is {oversize!r}: choose one of {', '.join(OVERSIZE)}")
    if max_segment_tokens is not None and max_segment_tokens < 1:
        raise UserError(f"max_segment_tokens is {max_segment_tokens}: give at least 1 token, or None")
    if record.num_tokens < 1:
        raise SampleError("sample_empty", f"sample {record.sample_id} has no tokens")

    room = budget.max_segment_tokens
    if max_segment_tokens is not None:
        room = min(room, max_segment_tokens)
    if record.branches:
        return _tree_fragments(record, position, budget, max_segment_tokens, oversize)
    if record.num_tokens <= room and record.num_tiles <= budget.max_tiles:
        return [whole(position, record.num_tokens, record.num_tiles, record.num_tile_pairs)]
    size = f"{_size_of(record)}, a pack holds {room} and {budget.max_tiles}"
    if oversize == "drop":
        raise SampleError("oversized_dropped", f"{size}: raise the budget, or set oversize to split")
    if oversize == "error":
        raise SampleError("oversized_error", f"{size}: raise the budget, or set oversize to split, truncate or drop")

    layout = _Layout(record)
    if oversize == "truncate":
        stop = layout.reach(0, room, budget.max_tiles)
        if stop == 0:
            raise SampleError("image_exceeds_budget", f"{size}: {_cure(layout, room, budget.max_tiles)}")
        return [whole(position, stop, layout.tiles_before(stop), layout.tile_pairs(0, stop))]

    return _fragments(record, layout, position, room, budget.max_tiles, repeat_system_prompt)


def _size_of(record: Record) -> str:
    return f"sample {record.sample_id} has {count(record.num_tokens, 'tokens')} and {count(record.num_tiles, 'tiles')}"


def _cure(layout: _Layout, room: int, max_tiles: int) -> str:
    """What to change so that the largest image fits."""
    if layout.largest_image_tiles > max_tiles:
        cure = f"raise num_images_expected to {layout.largest_image_tiles}"
    else:
        cure = f"raise max_packed_tokens above {max(room, layout.largest_image_tokens)}"
    return f"{cure}, or make it smaller ({SMALLER})"


def _fragments(
    record: Record, layout: _Layout, position: int, room: int, max_tiles: int, repeat_system_prompt: bool
) -> list[Fragment]:
    if layout.largest_image_tokens > room or layout.largest_image_tiles > max_tiles:
        raise SampleError(
            "image_exceeds_budget",
            f"sample {record.sample_id} has an image or video of {count(layout.largest_image_tokens, 'tokens')} and "
            f"{count(layout.largest_image_tiles, 'tiles')}, a pack holds {room} and {max_tiles}: "
            + _cure(layout, room, max_tiles),
        )
    prefix = 0
    if repeat_system_prompt and _can_repeat(record, layout, room):
        prefix = record.num_system_tokens
    # One token of each later fragment is kept for the context token of a cut inside text.
    context = 1 if layout.largest_image_tokens < room - prefix and room - prefix > 1 else 0
    later_room = room - prefix - context
    exact = max(record.num_tokens / later_room, record.num_tiles / max(1, max_tiles)) <= EXACT_FRAGMENTS
    cuts = (_choose_cuts if exact else _furthest_cuts)(layout, room, later_room, max_tiles)
    return [
        Fragment(
            position,
            index,
            len(cuts) - 1,
            start,
            stop,
            layout.tiles_before(start),
            layout.tiles_before(stop),
            num_prefix_tokens=prefix if index else 0,
            num_context_tokens=context if start and layout.inside_text(start) else 0,
            **layout.spans_of(start, stop),
            num_loss_tokens=record.num_loss_tokens,
            num_tile_pairs=layout.tile_pairs(start, stop),
        )
        for index, (start, stop) in enumerate(pairwise(cuts))
    ]


def _can_repeat(record: Record, layout: _Layout, room: int) -> bool:
    system = record.num_system_tokens
    # One token more than the largest image, for the context of a cut inside text.
    return 0 < system <= room // 2 and layout.tiles_before(system) == 0 and layout.largest_image_tokens < room - system


def _tree_fragments(
    record: Record, position: int, budget: Budget, max_segment_tokens: int | None, oversize: str
) -> list[Fragment]:
    """A tree in as few parts as possible: each the prefix and as many of the next branches as fit."""
    prefix, room = record.num_prefix_tokens, budget.max_segment_tokens
    lengths = [branch.num_tokens for branch in record.branches]
    longest = prefix + max(lengths)
    size = _size_of(record)
    if longest > min(room, max_segment_tokens or room) or record.num_tiles > budget.max_tiles:
        tiles = count(record.num_tiles, "tiles")
        size = f"sample {record.sample_id} has an answer of {longest:,} tokens with its prompt, {tiles}"
    elif record.num_tokens <= room:
        found = whole(position, record.num_tokens, record.num_tiles, record.num_tile_pairs)
        return [found._replace(**_shared(prefix, lengths))]
    elif record.is_joined or (oversize in ("split", "truncate") and not record.is_pair):
        parts: list[list[int]] = [[]]
        for length in lengths:
            if prefix + sum(parts[-1]) + length > room:
                parts.append([])
            parts[-1].append(length)
        ends = [0, *accumulate(map(sum, parts), initial=prefix)]
        del ends[1]  # the first part begins with the prefix
        return [
            Fragment(
                position,
                index,
                len(parts),
                start,
                stop,
                0,
                record.num_tiles,
                num_prefix_tokens=prefix if index else 0,
                num_loss_tokens=record.num_loss_tokens,
                num_tile_pairs=record.num_tile_pairs,
                **_shared(prefix, part),
            )
            for index, (part, (start, stop)) in enumerate(zip(parts, pairwise(ends), strict=True))
        ]
    limits = f"a pack holds {room} and {budget.max_tiles}"
    if max_segment_tokens is not None:
        limits += f", max_seq_length is {max_segment_tokens}"
    if oversize == "error":
        raise SampleError("oversized_error", f"{size}, {limits}: raise the budget, or set oversize to drop")
    raise SampleError("oversized_dropped", f"{size}, {limits}" + (": a pair is not cut" if record.is_pair else ""))


def _shared(prefix: int, branches: Sequence[int]) -> dict[str, int]:
    """What a `Fragment` says of these branches, lengths of tokens, after a prefix."""
    return {
        "num_branches": len(branches),
        "num_saved_tokens": prefix * (len(branches) - 1),
        "num_unseen_pairs": sum(branches) ** 2 - sum(n * n for n in branches),
    }


class _Layout:
    """Where a sample may be cut: span starts, tiles before each, turn borders."""

    def __init__(self, record: Record) -> None:
        spans = record.spans or (Span(record.num_tokens, record.num_tiles),)
        self._counts_pairs = record.num_tile_pairs > 0
        self.starts, self.tiles, self.images, self.borders = [0], [0], [], []
        self.largest_image_tokens = self.largest_image_tiles = 0
        for span in spans:
            self.images.append(span.num_tiles > 0)
            self.starts.append(self.starts[-1] + span.num_tokens)
            self.tiles.append(self.tiles[-1] + span.num_tiles)
            if span.num_tiles:
                self.largest_image_tokens = max(self.largest_image_tokens, span.num_tokens)
                self.largest_image_tiles = max(self.largest_image_tiles, span.num_tiles)
            if span.ends_turn:
                self.borders.append(self.starts[-1])
        self.num_tokens = self.starts[-1]
        assert self.num_tokens == record.num_tokens and self.tiles[-1] == record.num_tiles, (
            f"the spans of {record.sample_id} do not add up to its tokens and tiles"
        )
        if not self.borders or self.borders[-1] != self.num_tokens:
            self.borders.append(self.num_tokens)  # the end is as good a place as any border

    def _span_at(self, token: int) -> int:
        """The span that holds `token`; a position between two spans belongs to the later one."""
        return bisect_right(self.starts, token, hi=len(self.starts) - 1) - 1

    def tiles_before(self, token: int) -> int:
        """Tiles of the images that begin before `token`, which lies at a permitted cut."""
        span = self._span_at(token)
        return self.tiles[span + 1] if token == self.starts[span + 1] else self.tiles[span]

    def tile_pairs(self, start: int, stop: int) -> int:
        """Sum of the squared tiles of the images in [start, stop), where the record counts them."""
        if not self._counts_pairs:
            return 0
        first, last = self._span_at(start), self._span_at(stop - 1) + 1
        return sum((after - before) ** 2 for before, after in pairwise(self.tiles[first : last + 1]))

    def spans_of(self, start: int, stop: int) -> dict[str, int]:
        """Which spans hold the tokens [start, stop), as `Fragment` has it."""
        first, last = self._span_at(start), self._span_at(stop - 1) + 1
        offset, tokens = start - self.starts[first], self.starts[last] - self.starts[first]
        return {"span_start": first, "span_stop": last, "span_offset": offset, "span_tokens": tokens}

    def inside_text(self, token: int) -> bool:
        """Whether a cut at `token` parts a run of text, whose next token may be a supervised target."""
        return self.starts[self._span_at(token)] != token

    def down(self, token: int) -> int:
        """The last permitted cut at or before `token`."""
        span = self._span_at(token)
        return self.starts[span] if self.images[span] and token < self.starts[span + 1] else token

    def up(self, token: int) -> int:
        """The first permitted cut at or after `token`."""
        span = self._span_at(token)
        return self.starts[span + 1] if self.images[span] and token > self.starts[span] else token

    def reach(self, start: int, max_tokens: int, max_tiles: int) -> int:
        """The last permitted cut of a fragment that begins at `start`; `start` when nothing fits."""
        last = bisect_right(self.tiles, self.tiles_before(start) + max_tiles) - 1
        return self.down(min(start + max_tokens, self.starts[last]))

    def reach_back(self, stop: int, max_tokens: int, max_tiles: int) -> int:
        """The first permitted cut from which a fragment may run to `stop`."""
        first = bisect_left(self.tiles, self.tiles_before(stop) - max_tiles)
        return self.up(max(stop - max_tokens, self.starts[first]))

    def border_up(self, token: int) -> int:
        """The first turn border at or after `token`; the sample's end counts as one."""
        return self.borders[bisect_left(self.borders, token)]

    def border_down(self, token: int) -> int:
        """The last turn border at or before `token`; the sample's start counts as one."""
        place = bisect_right(self.borders, token)
        return self.borders[place - 1] if place else 0

    def border_nearest(self, token: int, first: int, last: int) -> int | None:
        """The turn border nearest to `token` among those in [first, last]."""
        lo, hi = bisect_left(self.borders, first), bisect_right(self.borders, last)
        place = bisect_left(self.borders, token, lo, hi)
        beside = self.borders[max(lo, place - 1) : min(hi, place + 1)]
        return min(beside, key=lambda border: abs(border - token)) if beside else None

    def cut_nearest(self, token: int, first: int, last: int) -> int:
        """The permitted cut nearest to `token` in [first, last], which are permitted cuts."""
        token = min(max(token, first), last)
        down, up = self.down(token), self.up(token)
        return down if down >= first and (token - down <= up - token or up > last) else up


def _furthest_cuts(layout: _Layout, first_room: int, room: int, max_tiles: int) -> list[int]:
    """Cut positions, 0 and the end included: each the last turn border in reach, else the last permitted cut."""
    cuts = [0]
    while cuts[-1] < layout.num_tokens:
        stop = layout.reach(cuts[-1], room if len(cuts) > 1 else first_room, max_tiles)
        assert stop > cuts[-1], "a fragment without tokens"
        border = layout.border_down(stop)
        cuts.append(border if border > cuts[-1] else stop)
    return cuts


def _choose_cuts(layout: _Layout, first_room: int, room: int, max_tiles: int) -> list[int]:
    """Cut positions, 0 and the end included: fewest cuts inside turns, then fewest fragments, then even.

    `first_room` tokens fit into the first fragment and `room` into each later one; every image fits
    into both.
    """
    tails, inside, count = _plan(layout, first_room, room, max_tiles)
    prefix = first_room - room
    cuts = [0]
    for left in range(count - 1, 0, -1):  # fragments after the one that ends at the next cut
        start = cuts[-1]
        rest = layout.num_tokens - start
        even = start + rest // (left + 1) if start else (rest + prefix * left) // (left + 1)
        stop = layout.reach(start, room if start else first_room, max_tiles)
        candidates = []
        if (
            left <= len(tails[inside])
            and (at := layout.border_nearest(even, tails[inside][left - 1], stop)) is not None
        ):
            candidates.append((abs(at - even), 0, at))
        if inside and left <= len(tails[inside - 1]) and tails[inside - 1][left - 1] <= stop:
            at = layout.cut_nearest(even, tails[inside - 1][left - 1], stop)
            candidates.append((abs(at - even), 1, at))
        _, used, cut = min(candidates)
        assert start < cut < layout.num_tokens, "a fragment without tokens"
        inside -= used
        cuts.append(cut)
    cuts.append(layout.num_tokens)
    return cuts


def _plan(layout: _Layout, first_room: int, room: int, max_tiles: int) -> tuple[list[list[int]], int, int]:
    """(tails, cuts inside turns, fragments) of the best split.

    tails[t][f - 1] is the earliest start of a tail of at most `f` fragments with at most `t` cuts inside
    turns between them.
    """
    tails: list[list[int]] = []
    while True:
        shorter = tails[-1] if tails else []
        row: list[int] = []
        tails.append(row)
        row.append(layout.reach_back(layout.num_tokens, room, max_tiles))
        while True:
            start = layout.reach_back(layout.border_up(row[-1]), room, max_tiles)
            if len(row) <= len(shorter):
                start = min(start, layout.reach_back(shorter[len(row) - 1], room, max_tiles))
            if start >= row[-1] and len(row) >= len(shorter):
                break
            row.append(start)
            if start == 0:
                break
        inside = len(tails) - 1
        for fragments in range(1, max(len(row), len(shorter)) + 1):
            cuts = [layout.border_up(row[fragments - 1])] if fragments <= len(row) else []
            cuts += [shorter[fragments - 1]] if fragments <= len(shorter) else []
            if cuts and layout.reach_back(min(cuts), first_room, max_tiles) == 0:
                return tails, inside, fragments + 1
