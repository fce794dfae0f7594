"""Every sample of a meta file checked as training would see it.

    rows -> survey (headers), or read, encoded and decoded -> split -> good, or one `BadSample`

A row goes through the same functions as in a run, so that the two cannot disagree. The survey keeps what is measured
here for the run that follows. Rows are checked in chunks, in this process or in worker processes, and
reported in the order of the data whatever the number of workers. Memory is flat: workers hand back bad samples only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..config import PackingConfig, check_budget
from ..encode.fields import RECORD_FIELDS, TURN_FIELDS, unknown_fields
from ..errors import SampleError, isolate_sample_errors, without_traces
from ..samples import Samples
from ..sources import DatasetSpec, Source
from ..sources.names import meant
from ..sources.normalise import IMAGES, TURNS
from ..sources.shards import ShardSource
from .survey import Part, Survey
from .workers import in_order

# Rows that a worker checks at a time: some 0.1 s by headers.
CHUNK_ROWS = 256
CHUNK_ROWS_DECODED = 32
NUM_EXAMPLES = 3
# Rows of a dataset that are looked at for unknown fields: few are in a handful of rows only. It takes a second.
FIELD_ROWS = 10_000


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
    id: str | int | None = None
    index: int | None = None
    key: str | None = None
    sample_id: str | None = None
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
    without_images: set[str] = field(default_factory=set)  # datasets of which an image is missing

    @property
    def good(self) -> int:
        return self.samples - self.reasons.total()

    def count(self, num_samples: int, bad: Iterable[BadSample]) -> None:
        self.samples += num_samples
        for sample in bad:
            self.reasons[sample.reason] += 1
            if sample.reason == "image_missing":
                self.without_images.add(sample.dataset)
            examples = self.examples.setdefault(sample.reason, [])
            if len(examples) < NUM_EXAMPLES:
                examples.append(sample)


class Checker:
    """The data and the rules it is checked by. Picklable, for workers.

    Args:
        samples: the data, and how its rows become tokens and tiles.
        config: budgets of the run, and what it does with samples that exceed them.
        root: folder of the surveys; None keeps what is measured for this check only.
        decode: decode the pixels, too, instead of reading the images' headers only.
    """

    def __init__(
        self,
        samples: Samples,
        config: PackingConfig | None = None,
        *,
        root: Path | None = None,
        decode: bool = False,
    ) -> None:
        self.samples = samples
        self.config = config or PackingConfig()
        self.decode = decode
        check_budget(self.config, samples.encoder)
        self.survey = Survey(samples, self.config.room, root)
        self.survey.forget_refusals()

    def damage(self) -> list[BadSample]:
        """Damage that belongs to no row, of all datasets."""
        return [
            BadSample(
                dataset=spec.name,
                key=getattr(error, "key", None),
                source=error.source or spec.name,
                reason=error.reason,
                detail=error.detail,
            )
            for spec, source in zip(self.samples.specs, self.samples.sources, strict=True)
            for error in source.damage
        ]

    def check(self, which: int, start: int, stop: int) -> list[BadSample]:
        """The bad ones among rows [start, stop) of dataset `which`.

        Raises:
            UserError: reading cannot continue, as with a file that changes meanwhile.
        """
        errors = self._decoded(which, start, stop) if self.decode else self._surveyed(which, start, stop)
        return [self._bad(which, row, error) for row, error in errors]

    def _decoded(self, which: int, start: int, stop: int) -> Iterator[tuple[int, SampleError]]:
        """(row, why it cannot be used), pixels looked at."""
        encoder, source, spec = self.samples.encoder, self.samples.sources[which], self.samples.specs[which]
        for row in range(start, stop):
            try:
                with isolate_sample_errors(source=partial(source.origin, row)):
                    encoded = encoder.encode(source.read(row), spec)
                    self.config.cut(encoded.record, row)
                    encoder.check_pixels(encoded)
            except SampleError as error:
                yield row, error

    def _surveyed(self, which: int, start: int, stop: int) -> Iterator[tuple[int, SampleError]]:
        """(row, why it cannot be used), by its headers. Images beside the data may have gone since: they are read."""
        rows = np.arange(start, stop)
        part = self.survey.measured(Part.of(np.full_like(rows, which), rows), look_again=True)
        for offset in part.notes:
            try:
                part.cut(offset, start + offset, self.samples.sample_id, self.config)
            except SampleError as error:
                yield start + offset, error

    def _bad(self, which: int, row: int, error: SampleError) -> BadSample:
        source, spec = self.samples.sources[which], self.samples.specs[which]
        return BadSample(
            dataset=spec.name,
            id=self._own_id(which, row),
            index=row if spec.shards is None else None,
            key=source.key(row) if isinstance(source, ShardSource) else None,
            sample_id=source.sample_id(row),
            source=error.source or source.origin(row),
            reason=error.reason,
            detail=error.detail,
        )

    def _own_id(self, which: int, row: int) -> str | int | None:
        """The `id` that a record gives itself; None where it has none or cannot be read."""
        try:
            with isolate_sample_errors():
                raw = self.samples.sources[which].read(row)
                return raw.data["id"] if raw.own_id is not None else None
        except SampleError:
            return None


def validate(checker: Checker, *, num_workers: int = 0) -> Iterator[tuple[int, list[BadSample]]]:
    """Check everything: damage first, then the rows in order.

    Args:
        num_workers: processes; 0 checks in this one.

    Yields:
        (samples checked since the last time, the bad ones among them).

    Raises:
        UserError: reading cannot continue, or a worker was killed.
    """
    damage = checker.damage()
    if damage:
        yield len(damage), damage
    rows = CHUNK_ROWS_DECODED if checker.decode else CHUNK_ROWS
    for (_, start, stop), bad in in_order(checker.check, checker.samples.chunks(rows), num_workers):
        yield stop - start, bad


def count_unknown_fields(sources: Sequence[Source], max_rows: int = FIELD_ROWS) -> Counter[str]:
    """{"dataset: field": records with it} among rows spread evenly over each dataset; what cannot be read is skipped.

    Fields of turns are `conversations[].name`.
    """
    found: Counter[str] = Counter()
    for source in sources:
        count = min(len(source), max_rows)
        for step in range(count):
            try:
                with without_traces(), isolate_sample_errors():
                    data = source.read(step * len(source) // count).data
            except SampleError:  # counted by its reason where all rows are checked
                continue
            found.update(f"{source.name}: {field}" for field in unknown_fields(data))
    return found


def report_lines(counts: Counter[str]) -> list[str]:
    """A line for each field, the most frequent first, with the known one that it may stand for."""
    return [
        f"passed over, as no such field is known: {name} ({count:,} records){_known_as(name)}"
        for name, count in counts.most_common()
    ]


def _known_as(name: str) -> str:
    """`: did you mean 'image'?` for `dataset: imgae`; "" where no known field is near."""
    field = name.rpartition(": ")[2]
    of_turn = field.removeprefix("conversations[].")
    known = TURN_FIELDS if of_turn != field else {*RECORD_FIELDS, *TURNS, *IMAGES}
    hint = meant(of_turn, sorted(known), cutoff=0.75)
    return hint if "did you mean" in hint else ""


def root_lines(without_images: Container[str], specs: Sequence[DatasetSpec]) -> list[str]:
    """A line for each dataset of which images are missing, by their names."""
    return [
        f"dataset {spec.name!r}: {spec.where_images_are}"
        for spec in specs
        if spec.name in without_images and spec.where_images_are
    ]
