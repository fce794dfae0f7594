"""Pack a stream of lengths without any data behind it: how full, how fair, how dear, how even.

The stream is read once and in order; what is kept of it does not grow with it (histograms, and SAMPLE rows for the
ranks), so a file of a billion rows needs no more memory than one of a million.
"""

from __future__ import annotations

import csv
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TextIO

from internvl_pack.errors import SampleError, UserError
from internvl_pack.packing.balance import PRIOR_SAMPLES, prior_figures
from internvl_pack.packing.bounds import LowerBounds
from internvl_pack.packing.budget import Budget
from internvl_pack.packing.cost import CostModel
from internvl_pack.packing.packer import LanePacker
from internvl_pack.packing.policies import BALANCED
from internvl_pack.packing.reservoir import Reservoir
from internvl_pack.packing.split import split
from internvl_pack.records import Fragment, Record, Span, whole

CHUNK = 4096  # rows packed between two looks at the clock
SAMPLE = 20_000  # rows of the stream from which the ranks' streams are drawn
TOKENS_A_TILE = 256
WARM_UP = 60  # packs of a lane before the ranks are compared, so that its look-ahead is in its steady state
STEPS = 112  # twice the reservoir's cycle of 56
RESERVOIR = 16
MAX_SAMPLES_A_RANK = 8_000  # read in a comparison; with hundreds in a pack, packs hardly differ and few tell enough


class Length(NamedTuple):
    """One sample of a stream of lengths; `num_images` only matters where it has to be cut."""

    num_tokens: int
    num_tiles: int
    num_images: int | None = None


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a simulation found; `report` has the names that `internvl-pack simulate --json` prints."""

    samples: int
    packs: int
    lower_bounds: dict[str, int]
    token_fill: float
    tile_fill: float
    us_per_sample: float
    waits: Counter[int]
    split: int
    dropped: dict[str, int]
    fragments: int
    rank_efficiency: float
    rank_efficiency_reservoir: float

    @property
    def lower_bound(self) -> int:
        return max(*self.lower_bounds.values(), int(self.fragments > 0))

    def report(self) -> dict[str, int | float]:
        return {
            "samples": self.samples,
            "packs": self.packs,
            "lower_bound": self.lower_bound,
            "packs_over_bound": self.packs / self.lower_bound if self.packs else 1.0,
            "token_fill": self.token_fill,
            "tile_fill": self.tile_fill,
            "us_per_sample": self.us_per_sample,
            "max_wait_samples": max(self.waits, default=0),
            "p99_wait_samples": _quantile(self.waits, 0.99),
            "split": self.split,
            "dropped": sum(self.dropped.values()),
            "fragments": self.fragments,
            "rank_efficiency": self.rank_efficiency,
            "rank_efficiency_reservoir": self.rank_efficiency_reservoir,
        }


def simulate(
    lengths: Iterable[Length],
    budget: Budget,
    *,
    policy: str = "subset_sum",
    buffer_size: int = 64,
    num_lanes: int = 1,
    num_ranks: int = 64,
    reservoir: int = RESERVOIR,
    cost: CostModel | None = None,
    oversize: str = "split",
    seed: int = 0,
    compare_ranks: bool = True,
) -> Simulation:
    """Pack a finite stream, last packs included, and compare ranks on reshuffled streams of its rows.

    Args:
        num_lanes: sample k goes to lane k mod num_lanes, each with its own packer.
        num_ranks: ranks that step together in the comparison, each with a lane of its own.
        reservoir: packs a rank of the second comparison.
        cost: of packs, InternVL3-1B's by default.
        oversize: see split.py; a row is taken as text with its images spread evenly over it.
        seed: of the ranks' streams, which begin with figures in common as training's lanes do.
        compare_ranks: False leaves the comparison out (the efficiencies are then 1).

    Raises:
        UserError: an option that makes no sense, or a sample of too many tokens with `oversize` error.
    """
    if num_lanes < 1:
        raise UserError(f"--lanes is {num_lanes}: give at least 1")
    if num_ranks < 1:
        raise UserError(f"--ranks is {num_ranks}: give at least 1")
    if reservoir < 0:
        raise UserError(f"--reservoir is {reservoir}: give 0 or more packs")
    cost = cost or CostModel.from_size("1B")

    bounds = LowerBounds(budget)
    cutter = Cutter(budget, oversize)

    def make(prior: dict[str, int] | None) -> LanePacker[Fragment]:
        return LanePacker(budget, policy=policy, buffer_size=buffer_size, cost=cost, prior=prior)

    def prior_of(rows: Iterable[Length]) -> dict[str, int] | None:
        return prior_figures(budget, cost, cutter.sizes(rows)) if policy in BALANCED else None

    lanes: list[_Lane] = []
    kept = _Kept(SAMPLE, seed)
    samples = fragments = num_split = 0
    dropped: Counter[str] = Counter()
    seconds = 0.0
    rows = iter(lengths)
    while chunk := list(islice(rows, CHUNK)):
        if not lanes:
            prior = prior_of(chunk[:PRIOR_SAMPLES]) if num_lanes > 1 else None
            lanes = [_Lane(make(prior)) for _ in range(num_lanes)]
        work: list[tuple[_Lane, list[Fragment]]] = []
        for length in chunk:
            kept.offer(length)
            try:
                parts = cutter.cut(length, samples)
            except SampleError as error:
                if error.reason == "oversized_error":
                    raise UserError(error.detail) from error
                dropped[error.reason] += 1
                parts = []
            work.append((lanes[samples % num_lanes], parts))
            samples += 1
            fragments += len(parts)
            num_split += len(parts) > 1
            for part in parts:
                bounds.add(part.num_tokens, part.num_tiles)
        start = time.thread_time()
        for lane, parts in work:
            lane.read(parts)
        seconds += time.thread_time() - start
    start = time.thread_time()
    for lane in lanes:
        lane.finish()
    seconds += time.thread_time() - start

    packs = sum(lane.packs for lane in lanes)
    even, even_reservoir = 1.0, 1.0
    if compare_ranks and packs:
        drawn = random.Random(f"{seed} prior").sample(kept.rows, min(PRIOR_SAMPLES, len(kept.rows)))
        even, even_reservoir = rank_efficiency(
            kept.rows, partial(make, prior_of(drawn)), cutter, cost, reservoir, num_ranks=num_ranks, seed=seed
        )
    return Simulation(
        samples=samples,
        packs=packs,
        lower_bounds=bounds.all(),
        token_fill=sum(lane.tokens for lane in lanes) / (packs * budget.max_tokens) if packs else 0.0,
        tile_fill=sum(lane.tiles for lane in lanes) / (packs * budget.max_tiles) if packs and budget.max_tiles else 0.0,
        us_per_sample=seconds / samples * 1e6 if samples else 0.0,
        waits=sum((lane.waits for lane in lanes), Counter()),
        split=num_split,
        dropped=dict(sorted(dropped.items())),
        fragments=fragments,
        rank_efficiency=even,
        rank_efficiency_reservoir=even_reservoir,
    )


class _Lane:
    """A packer, driven as training drives it; counts what comes out."""

    def __init__(self, packer: LanePacker[Fragment]) -> None:
        self.packer = packer
        self.packs = self.tokens = self.tiles = self.read_so_far = 0
        self.waits: Counter[int] = Counter()
        self._came: dict[tuple[int, int], int] = {}

    def read(self, parts: Sequence[Fragment]) -> None:
        """The lane's next sample; packs are built as soon as the look-ahead is full."""
        while self.packer.full:
            self._pop()
        for part in parts:
            self.packer.add(part)
            self._came[part.key] = self.read_so_far
        self.read_so_far += 1

    def finish(self) -> None:
        while self._came:
            self._pop()

    def _pop(self) -> None:
        pack = self.packer.pop()
        self.packs += 1
        for part in pack:
            self.tokens += part.num_tokens
            self.tiles += part.num_tiles
            self.waits[self.read_so_far - 1 - self._came.pop(part.key)] += 1


class Cutter:
    """Turns lengths into fragments.

    A row of lengths does not say where its images lie or its turns end. One that exceeds the budget is taken as text
    with its images spread evenly over it and its tiles evenly over its images (one tile an image where the number of
    images is not known), TOKENS_A_TILE tokens a tile, text cut anywhere.
    """

    def __init__(self, budget: Budget, oversize: str) -> None:
        self.budget = budget
        self.oversize = oversize

    def sizes(self, rows: Iterable[Length]) -> Iterator[tuple[int, int]]:
        """Tokens and tiles of the rows' fragments; rows that cannot be cut are left out."""
        for row in rows:
            try:
                parts = self.cut(row, 0)
            except SampleError:
                continue
            for part in parts:
                yield part.num_tokens, part.num_tiles

    def cut(self, length: Length, position: int) -> list[Fragment]:
        """Raises SampleError like `split`."""
        num_tokens, num_tiles, num_images = length
        if num_tokens > 0 and self.budget.fits(num_tokens, num_tiles):
            return [whole(Record("", num_tokens, num_tiles), position)]
        # more tiles than tokens is no sample that was ever encoded: one block, which cannot be cut
        spans = _spread(num_tokens, num_tiles, num_images) if 0 < num_tiles <= num_tokens else ()
        record = Record(f"row {position + 1}", num_tokens, num_tiles, spans=spans)
        return split(record, position, self.budget, oversize=self.oversize)


def _spread(num_tokens: int, num_tiles: int, num_images: int | None) -> tuple[Span, ...]:
    images = min(num_images or num_tiles, num_tiles)
    a_tile = min(TOKENS_A_TILE, num_tokens // num_tiles)
    text = num_tokens - a_tile * num_tiles
    spans = []
    for i in range(images):
        spans.append(Span(text * (i + 1) // (images + 1) - text * i // (images + 1)))
        tiles = num_tiles * (i + 1) // images - num_tiles * i // images
        spans.append(Span(a_tile * tiles, tiles))
    spans.append(Span(text - text * images // (images + 1)))
    return tuple(span for span in spans if span.num_tokens)


class _Kept:
    """A uniform sample of a stream's rows in bounded memory (Vitter's algorithm R)."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.rows: list[Length] = []
        self._seen = 0
        self._random = random.Random(seed)

    def offer(self, row: Length) -> None:
        self._seen += 1
        if len(self.rows) < self.size:
            self.rows.append(row)
        else:
            place = self._random.randrange(self._seen)
            if place < self.size:
                self.rows[place] = row


def rank_efficiency(
    rows: Sequence[Length],
    make: Callable[[], LanePacker[Fragment]],
    cutter: Cutter,
    cost: CostModel,
    reservoir: int,
    *,
    num_ranks: int = 64,
    num_steps: int = STEPS,
    seed: int = 0,
) -> tuple[float, float]:
    """Mean over max cost of a step, averaged over `num_steps`: without and with a reservoir of so many packs a rank.

    `make` gives packers without one: a lane builds the same packs either way, and the reservoir hands them out in
    another order. Each rank has a lane that draws its own reshuffled stream of the rows, again and again; the first
    WARM_UP packs are left out, and there is no end whose last packs would count. Where a pack holds so many samples
    that a rank would read more than MAX_SAMPLES_A_RANK, fewer packs are compared, with a warm-up and a reservoir that
    are smaller likewise.
    """
    first = rows[0] if rows else Length(0, 0)
    if all(row[:2] == first[:2] for row in rows) and cutter.budget.fits(first.num_tokens, first.num_tiles):
        return 1.0, 1.0  # packs of one shape alone
    share = min(1.0, MAX_SAMPLES_A_RANK / ((WARM_UP + num_steps) * _samples_a_pack(rows, cutter.budget)))
    warm_up, num_steps = max(1, int(share * WARM_UP)), max(2, int(share * num_steps))
    reservoir = min(reservoir, max(1, int(share * reservoir)))
    alone, sorted_out = [], []
    for rank in range(num_ranks):
        built = _costs(_endless(rows, cutter, random.Random(f"{seed} {rank}")), make(), cost)
        costs = list(islice(built, warm_up + num_steps + reservoir))
        alone.append(costs[warm_up : warm_up + num_steps])
        sorted_out.append(list(_handed_out(costs, reservoir))[warm_up : warm_up + num_steps])
    return _evenness(alone), _evenness(sorted_out)


def _evenness(ranks: Sequence[Sequence[int]]) -> float:
    steps = list(zip(*ranks, strict=True))
    return sum(sum(step) / len(step) / max(step) for step in steps) / len(steps) if steps else 1.0


def _handed_out(costs: Iterable[int], size: int) -> Iterator[int]:
    """Costs of packs in the order in which a reservoir hands them out, while more come."""
    if not size:
        yield from costs
        return
    held = Reservoir(size)
    for cost in costs:
        held.add(cost, cost)
        if held.full:
            yield held.pop()


def _samples_a_pack(rows: Sequence[Length], budget: Budget) -> float:
    """How many rows fill a pack, on average."""
    tokens = sum(budget.aligned(row.num_tokens) for row in rows) / budget.max_tokens
    tiles = sum(row.num_tiles for row in rows) / budget.max_tiles if budget.max_tiles else 0.0
    return len(rows) / max(tokens, tiles, 1e-9)


def _endless(rows: Sequence[Length], cutter: Cutter, order: random.Random) -> Iterator[Fragment]:
    position = 0
    while True:
        empty = True
        for row in order.sample(rows, len(rows)):
            try:
                parts = cutter.cut(row, position)
            except SampleError:
                continue
            yield from parts
            position += 1
            empty = False
        if empty:
            return


def _costs(fragments: Iterator[Fragment], packer: LanePacker[Fragment], cost: CostModel) -> Iterator[int]:
    while True:
        while not packer.full:
            fragment = next(fragments, None)
            if fragment is None:
                return
            packer.add(fragment)
        yield cost.of_pack((packer.budget.aligned(f.num_tokens), f.num_tiles) for f in packer.pop())


def _quantile(counts: Counter[int], share: float) -> int:
    """The smallest value that `share` of the counted values do not exceed."""
    total, seen = sum(counts.values()), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= share * total:
            return value
    return 0


def read_lengths(lines: TextIO, name: str) -> Iterator[Length]:
    """Rows of a CSV file with the columns num_tokens and num_tiles, and num_images if it has it, one by one.

    Raises:
        UserError: a column is missing, a row's number is none, or it is no text; it names the line.
    """
    rows = _rows(csv.reader(lines), name)
    _, header = next(rows, (0, None))
    if header is None:
        raise UserError(f"{name} is empty: give a CSV file with the columns num_tokens and num_tiles")
    header = [column.strip().lstrip("\ufeff") for column in header]
    for column in ("num_tokens", "num_tiles"):
        if column not in header:
            raise UserError(f"{name} has no column {column}: it has {', '.join(header)}")
    tokens, tiles = header.index("num_tokens"), header.index("num_tiles")
    images = header.index("num_images") if "num_images" in header else None
    for line, row in rows:
        if not row:
            continue
        try:
            length = Length(int(row[tokens]), int(row[tiles]))
        except (IndexError, ValueError):
            raise UserError(f"{name}:{line}: num_tokens and num_tiles must be whole numbers") from None
        if min(length.num_tokens, length.num_tiles) < 0:
            raise UserError(f"{name}:{line}: num_tokens and num_tiles cannot be negative")
        if images is not None and len(row) > images and row[images].isdecimal():
            length = length._replace(num_images=int(row[images]))
        yield length


def _rows(reader: Any, name: str) -> Iterator[tuple[int, list[str]]]:
    """(line number, row) of a CSV reader."""
    try:
        for row in reader:
            yield reader.line_num, row
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{name}:{reader.line_num + 1}: this is no CSV file in UTF-8 ({error})") from None
