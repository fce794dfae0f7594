"""Fields that encoding passes over, by name: a misspelt or foreign one may have been meant to count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..encode.fields import unknown_fields
from ..errors import SampleError, isolate_sample_errors, without_traces
from ..sources import Source

# Rows of a dataset to look at, spread evenly: few fields are in a handful of rows only, and this takes a second.
MAX_ROWS = 10_000


def count_unknown_fields(sources: Sequence[Source], max_rows: int = MAX_ROWS) -> Counter[str]:
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
    """A line for each field, the most frequent first."""
    return [
        f"passed over, as no such field is known: {name} ({count:,} records)" for name, count in counts.most_common()
    ]
