"""Every sample of a meta file checked as training would see it.

    rows -> Source.read -> Encoder.encode -> split -> (pixels) -> good, or one `BadSample`

A row goes through the very functions that a run reads it with, so that the two cannot disagree. Rows are checked in
chunks, in this process or in worker processes, and reported in the order of the data whatever the number of workers.
Memory is flat: workers hand back what is bad, and nothing else.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from .config import PackingConfig, check_budget
from .encode.sample import Encoder
from .errors import SampleError, UserError, costs_one_sample
from .sources import DatasetSpec, Source
from .sources.shards import ShardSource

CHUNK_ROWS = 256
"""Rows that a worker checks at a time: some 0.1 s by headers."""
CHUNK_ROWS_DECODED = 32
NUM_EXAMPLES = 3


@dataclass(frozen=True, kw_only=True)
class BadSample:
    """A sample that a run would leave out, or damage that belongs to no row.

    Attributes:
        dataset: its name in the meta file.
        id: the record's own `id` as it is written there; None where it has none or cannot be read.
        index: row in the annotation file, from 0, blank lines not counted; None for shards.
        key: key in its shard; None for annotation files, and for damage before the first key.
        sample_id: the id that runs use, `<dataset>/<index>` or `<dataset>/<shard>/<key>`; None for damage.
        source: `file:line 12` or `shard:key@byte`.
        reason: a slug such as `image_truncated`.
        detail: one sentence.
    """

    dataset: str
    id: str | int | None
    index: int | None
    key: str | None
    sample_id: str | None
    source: str
    reason: str
    detail: str

    def as_json(self) -> dict[str, Any]:
        """A JSON object: `index` of annotation files or `key` of shards, not both."""
        values = asdict(self)
        del values["index" if self.index is None else "key"]
        return values


@dataclass
class Report:
    """What was seen. `samples` = `good` + the sum of `reasons`; damage that belongs to no row counts as one sample."""

    samples: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[BadSample]] = field(default_factory=dict)  # by reason, the first few

    @property
    def good(self) -> int:
        return self.samples - self.reasons.total()

    def count(self, num_samples: int, bad: Iterable[BadSample]) -> None:
        self.samples += num_samples
        for sample in bad:
            self.reasons[sample.reason] += 1
            examples = self.examples.setdefault(sample.reason, [])
            if len(examples) < NUM_EXAMPLES:
                examples.append(sample)


class Checker:
    """The data and the rules it is checked by. Picklable, for workers.

    Args:
        sources, specs: as `PackedDataset` takes them.
        encoder: tokenizer and tile rules of the run.
        config: budgets of the run, and what it does with samples that exceed them.
        decode: decode the pixels, too, instead of reading the images' headers only.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        specs: Sequence[DatasetSpec],
        encoder: Encoder,
        config: PackingConfig | None = None,
        *,
        decode: bool = False,
    ) -> None:
        self.sources = list(sources)
        self.specs = list(specs)
        self.encoder = encoder
        self.config = config or PackingConfig()
        self.decode = decode
        self._budget = self.config.budget()
        check_budget(self.config, encoder)

    def damage(self) -> list[BadSample]:
        """What is broken and belongs to no row, of all datasets."""
        return [
            BadSample(
                dataset=spec.name,
                id=None,
                index=None,
                key=getattr(error, "key", None),
                sample_id=None,
                source=error.source or spec.name,
                reason=error.reason,
                detail=error.detail,
            )
            for spec, source in zip(self.specs, self.sources, strict=True)
            for error in source.damage
        ]

    def check(self, which: int, start: int, stop: int) -> list[BadSample]:
        """The bad ones among rows [start, stop) of dataset `which`.

        Raises:
            UserError: the data cannot be gone on with, such as a file that changes meanwhile.
        """
        return [bad for row in range(start, stop) if (bad := self._check_row(which, row)) is not None]

    def _check_row(self, which: int, row: int) -> BadSample | None:
        source, spec = self.sources[which], self.specs[which]
        own_id = None
        try:
            with costs_one_sample(source=partial(source.origin, row)):
                raw = source.read(row)
                own_id = raw.data["id"] if raw.own_id is not None else None
                encoded = self.encoder.encode(raw, spec)
                self.config.cut(encoded.record, row, self._budget)
                if self.decode:
                    self.encoder.check_pixels(encoded)
        except SampleError as error:
            is_line = spec.shards is None
            sample_id = source.sample_id(row)
            return BadSample(
                dataset=spec.name,
                id=own_id,
                index=row if is_line else None,
                key=source.key(row) if isinstance(source, ShardSource) else None,
                sample_id=sample_id,
                source=error.source or source.origin(row),
                reason=error.reason,
                detail=error.detail,
            )
        return None


def validate(checker: Checker, *, num_workers: int = 0) -> Iterator[tuple[int, list[BadSample]]]:
    """Check everything: damage first, then the rows in order.

    Args:
        num_workers: processes; 0 checks in this one.

    Yields:
        (samples checked since the last time, the bad ones among them).

    Raises:
        UserError: the data cannot be gone on with, or a worker was killed.
    """
    damage = checker.damage()
    if damage:
        yield len(damage), damage
    rows = CHUNK_ROWS_DECODED if checker.decode else CHUNK_ROWS
    chunks = (
        (which, start, min(start + rows, len(source)))
        for which, source in enumerate(checker.sources)
        for start in range(0, len(source), rows)
    )
    with ExitStack() as stack:
        pool = None
        if num_workers:
            context = multiprocessing.get_context("spawn")  # takes over nothing of this process, such as threads
            pool = stack.enter_context(
                ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start, initargs=(checker,))
            )
        for (_, start, stop), bad in _in_order(checker, chunks, pool, in_flight=3 * num_workers):
            yield stop - start, bad


_checker: Checker | None = None  # of a worker


def _start(checker: Checker) -> None:
    global _checker
    _checker = checker


def _check(which: int, start: int, stop: int) -> list[BadSample]:
    assert _checker is not None
    return _checker.check(which, start, stop)


def _in_order(
    checker: Checker, chunks: Iterator[tuple[int, int, int]], pool: Executor | None, in_flight: int
) -> Iterator[tuple[tuple[int, int, int], list[BadSample]]]:
    if pool is None:
        for chunk in chunks:
            yield chunk, checker.check(*chunk)
        return
    waiting: deque[tuple[tuple[int, int, int], Future]] = deque()
    try:
        while True:
            while len(waiting) < in_flight and (following := next(chunks, None)) is not None:
                waiting.append((following, pool.submit(_check, *following)))
            if not waiting:
                return
            chunk, future = waiting.popleft()
            yield chunk, future.result()
    except BrokenProcessPool:
        raise UserError("a worker of --workers was killed (out of memory?): use fewer") from None
    finally:
        for _, future in waiting:
            future.cancel()
