"""What a sample is made of: runs of text and images between which it may be cut.

An outline costs little. Of a sample that was cut into many rows, only the spans of one row are encoded from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .chat import Part
from .trees import Answer
from .video import PlannedFrame, PlannedVideo

if TYPE_CHECKING:
    from ..sources import RawSample


class SpanParts(NamedTuple):
    """What a `Span` is made of: an image, or text and fixed tokens; of ends of turns that of the system turn."""

    parts: tuple[Part, ...]
    ends_turn: bool = False

    @property
    def is_image(self) -> bool:
        return self.parts[0].kind == "image"


@dataclass(frozen=True, slots=True)
class Outline:
    """A sample before its texts are tokenized and its images' headers are read.

    names: of its images, frames: of its video, or the video; one for each span that is an image.
    answers: of a tree, each answer with the outline of the conversation that it is alone; the rest is then the first's.
    """

    raw: RawSample
    spans: tuple[SpanParts, ...]
    names: list[str]
    frames: tuple[PlannedFrame, ...] | tuple[PlannedVideo, ...]
    max_dynamic_patch: int
    data_augment: bool
    answers: tuple[tuple[Outline, Answer], ...] = ()

    @property
    def num_characters(self) -> int:
        """Characters of its texts, and of the images that its record holds or names."""
        if self.answers:
            return sum(outline.num_characters for outline, _ in self.answers)
        texts = sum(len(str(part.value)) for span in self.spans for part in span.parts if part.kind == "text")
        return texts + sum(map(len, self.names))

    @property
    def num_system_spans(self) -> int:
        """The first spans, up to the one in which the system turn ends."""
        ends = (at for at, span in enumerate(self.spans, 1) for part in span.parts if part.kind == "end")
        return next(ends, 0)


def spans_of(parts: Sequence[Part]) -> Iterator[SpanParts]:
    """The parts of a conversation, cut where a sample may be: around images, and at ends of turns.

    A cut before an answer would part it from its question, so that a turn before an answer has no border.
    """
    current: list[Part] = []
    following = iter([*[part.value for part in parts if part.kind == "end"][1:], None])
    for part in parts:
        if part.kind == "end":
            if part.value == "system" and current:
                current.append(part)
            if next(following) != "gpt" and current:
                yield SpanParts(tuple(current), ends_turn=True)
                current = []
        elif part.kind == "image":
            if current:
                yield SpanParts(tuple(current))
                current = []
            yield SpanParts((part,))
        elif isinstance(part.value, str | np.ndarray) and len(part.value):
            current.append(part)
    if current:
        yield SpanParts(tuple(current))
