"""`Reader`: encodes and decodes its own packs of each step.

Step -> deal -> this rank's micro-batches -> PackRow (tokens, uint8 tiles) + Progress
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from ..batch.loss_weights import IGNORE_INDEX
from ..batch.row import PackRow, Segment
from ..config import PackingConfig
from ..encode.images import empty_tiles, tiles_over
from ..encode.outline import Outline
from ..encode.sample import Encoded, PlannedImage
from ..encode.trees import with_those_that_leave
from ..encode.video import PlannedFrame, PlannedVideo
from ..errors import SampleError, UserError, isolate_sample_errors
from ..order.mixture import Mixture
from ..plan.groups import Step, StepPlan, deal
from ..plan.online import ALL_BAD_ROWS, all_bad
from ..plan.sequence import PlannedPack, Refused
from ..records import Fragment
from ..samples import Samples
from .buffers import TileBuffers

_KEPT_CHARACTERS = 16 << 20  # of samples of several fragments that a reader keeps for the fragments to come

_buffers = TileBuffers()


@dataclass
class Progress:
    """What one micro-batch means for the run.

    Attributes:
        step, micro_batch: its place in the epoch.
        ends_step: whether it is this rank's last one of the step.
        events: samples that left, with reasons: those refused by the survey (reported by one rank), and lost ones.
        lost: fragments that could not be used, with reasons.
        state: of the plan after the step; with its last micro-batch only.
        fatal: a message that must stop the run.
    """

    step: int = 0
    micro_batch: int = 0
    ends_step: bool = False
    events: list[dict[str, Any]] = field(default_factory=list)
    lost: list[tuple[Fragment, str]] = field(default_factory=list)
    state: dict[str, Any] | None = None
    fatal: str | None = None


@dataclass
class MicroBatch:
    """The rows of one micro-batch, none of them filled where the rank has no pack, and its progress."""

    rows: list[PackRow]
    progress: Progress


class SegmentSource(Protocol):
    """Where the data of planned fragments comes from."""

    def segment(self, pack: PlannedPack, fragment: Fragment, out: np.ndarray) -> Segment:
        """The fragment's tokens, and its tiles decoded into `out`, uint8 (tiles, 3, S, S).

        Raises:
            SampleError: it cannot be used.
        """
        ...

    def name(self, fragment: Fragment) -> str:
        """The id of the fragment's sample."""
        ...

    def dataset(self, fragment: Fragment) -> str:
        """The name of its dataset."""
        ...

    def origin(self, fragment: Fragment) -> str:
        """Where its sample stands, for messages."""
        ...


class SampleSegments:
    """Fragments of samples that are read and encoded now. A `SegmentSource` of one epoch.

    Args:
        samples, config: the data, and how its samples are cut.
        mixture: the order that positions are of.
        epoch: of `data_augment` and of a video's frames; a preset repeats an order in later epochs.
    """

    def __init__(self, samples: Samples, config: PackingConfig, mixture: Mixture, epoch: int) -> None:
        self._samples, self._config, self._mixture, self._epoch = samples, config, mixture, epoch
        self._split: OrderedDict[int, tuple[Outline, int]] = OrderedDict()  # by position, with its characters

    def segment(self, pack: PlannedPack, fragment: Fragment, out: np.ndarray) -> Segment:
        encoded = self.encoded(fragment)
        try:
            second = empty_tiles(fragment.num_tiles, out.shape[-1]) if encoded.has_pairs else None
            what = (encoded, 0, fragment.num_tiles)
            tiles = self._samples.encoder.decode(*what, epoch=self._epoch, out=out, second=second)
        except SampleError as error:
            if not encoded.record.is_joined:
                raise
            own = self.name(fragment)
            others = [branch.sample_id for branch in encoded.branches if branch.sample_id != own]
            raise with_those_that_leave(error, others) if others else error from None
        return make_segment(encoded, fragment, tiles, second)

    def name(self, fragment: Fragment) -> str:
        return self._samples.sample_id(*self._mixture.locate(fragment.position))

    def dataset(self, fragment: Fragment) -> str:
        return self._samples.names[self._mixture.locate(fragment.position)[0]]

    def origin(self, fragment: Fragment) -> str:
        return self._samples.origin(*self._mixture.locate(fragment.position))

    def encoded(self, fragment: Fragment) -> Encoded:
        """The fragment, as its sample was surveyed.

        Raises:
            SampleError: its sample cannot be read, or differs from what the survey measured.
        """
        position = fragment.position
        if fragment.count > 1:
            return self._samples.encode_part(self._outline(position), fragment)
        encoded = self._samples.encode(*self._mixture.locate(position))
        record = encoded.record
        size = (record.num_tokens, record.num_tiles)
        if (fragment.token_stop, fragment.tile_stop) == size:
            return encoded
        cut = self._config.cut(record, position)
        if [part._replace(num_tile_pairs=fragment.num_tile_pairs) for part in cut] != [fragment]:  # the survey's own
            raise SampleError(
                "changed_since_survey",
                f"it has {size[0]:,} tokens and {size[1]:,} tiles now, and was surveyed as another sample, of which "
                f"{fragment.token_stop:,} tokens and {fragment.tile_stop:,} tiles were to be trained",
            )
        return encoded

    def _outline(self, position: int) -> Outline:
        """The outline of a sample of several fragments: kept, since its next fragment may be this reader's, too."""
        kept = self._split.pop(position, None)
        if kept is None:
            outline = self._samples.outline(*self._mixture.locate(position))
            kept = outline, outline.num_characters
        self._split[position] = kept
        while len(self._split) > 1 and sum(size for _, size in self._split.values()) > _KEPT_CHARACTERS:
            self._split.popitem(last=False)
        return kept[0]


@dataclass(kw_only=True)
class Reader:
    """The micro-batches of one reader process in one epoch.

    Attributes:
        plan: the epoch's steps, which every reader makes for itself.
        segments: the data of fragments.
        epoch: for the events.
        image_size: side of a tile in pixels.
        stops: whether a sample that cannot be used ends the run (`on_error`).
        rank, num_ranks: data-parallel place.
        worker, num_workers: of a rank's readers; a loader takes its workers in turn.
        packs_per_batch: packs of a micro-batch.
    """

    plan: StepPlan
    segments: SegmentSource
    epoch: int
    image_size: int
    stops: bool
    rank: int
    num_ranks: int
    worker: int
    num_workers: int
    packs_per_batch: int

    def __post_init__(self) -> None:
        self._decoded: set[str] = set()  # datasets of which a fragment could be used
        self._lost: Counter[str] = Counter()  # fragments lost of those that are not among them
        self._dealt = 0  # micro-batches of this rank

    def __iter__(self) -> Iterator[MicroBatch]:
        try:
            for step in self.plan:
                yield from self._of_step(step)
            if not self.plan.num_steps:
                yield MicroBatch([], self._nothing())
        except UserError as error:
            # Every reader comes to it at the same place; the one whose turn is next is heard.
            yield MicroBatch([], Progress(step=self.plan.num_steps, fatal=str(error)))

    def _nothing(self) -> Progress:
        """The progress of an epoch without a pack: all of its samples were refused."""
        events = [self._refusal(refused) for refused in self.plan.take_refused()]
        reasons = ", ".join(f"{n} {reason}" for reason, n in Counter(e["reason"] for e in events).most_common())
        example = "; {id}: {source}: {detail}".format_map(events[0]) if events else ""
        return Progress(
            ends_step=True,
            events=[] if self.rank else events,
            state=self.plan.state_dict(),
            fatal=f"no sample of epoch {self.epoch} can be trained on ({reasons}){example}",
        )

    def _of_step(self, step: Step) -> Iterator[MicroBatch]:
        shares = deal(step, self.num_ranks, self.packs_per_batch)[self.rank]
        for micro_batch, packs in enumerate(shares):
            mine = self._dealt % self.num_workers == self.worker
            self._dealt += 1
            if mine:
                yield self._micro_batch(step, micro_batch, packs, ends_step=micro_batch == len(shares) - 1)

    def _micro_batch(
        self, step: Step, micro_batch: int, packs: Sequence[PlannedPack], *, ends_step: bool
    ) -> MicroBatch:
        progress = Progress(step.number, micro_batch, ends_step)
        if not micro_batch and not self.rank:
            progress.events += [self._refusal(refused) for refused in step.refused]
        rows = [self._row(pack, progress) for pack in packs]
        if ends_step:
            progress.state = self.plan.state_dict()
        return MicroBatch(rows, progress)

    def _row(self, pack: PlannedPack, progress: Progress) -> PackRow:
        """The pack's fragments, decoded into one array; what cannot be used leaves, the rest goes on."""
        size = self.image_size
        tiles = tiles_over(_buffers.take((sum(f.num_tiles for f in pack.fragments), size, size, 3)))
        segments, used = [], 0
        for fragment in pack.fragments:
            out = tiles[used : used + fragment.num_tiles]
            try:
                with isolate_sample_errors(source=partial(self.segments.origin, fragment)):
                    segments.append(self.segments.segment(pack, fragment, out))
            except SampleError as error:
                self._lose(fragment, error, progress)
            else:
                used += fragment.num_tiles
                self._decoded.add(self.segments.dataset(fragment))
        return PackRow(segments, tiles[:used])

    def _lose(self, fragment: Fragment, error: SampleError, progress: Progress) -> None:
        name, sample_id = self.segments.dataset(fragment), self.segments.name(fragment)
        progress.lost.append((fragment, error.reason))
        detail = error.detail
        if fragment.count > 1:
            detail += f" (part {fragment.index + 1} of {fragment.count} of this sample; the others are trained)"
        progress.events.append(self._event(sample_id, error.source, error.reason, detail))
        self._lost[name] += name not in self._decoded
        if self.stops:
            progress.fatal = f"{sample_id}: {error}"
        elif self._lost[name] >= ALL_BAD_ROWS and name not in self._decoded:
            progress.fatal = all_bad(name, self._lost[name], sample_id, error)

    def _refusal(self, refused: Refused) -> dict[str, Any]:
        place = Fragment(refused.position, 0, 1, 0, 0, 0, 0)
        source = refused.source or self.segments.origin(place)
        return self._event(self.segments.name(place), source, refused.reason, refused.detail)

    def _event(self, sample_id: str, source: str | None, reason: str, detail: str) -> dict[str, Any]:
        about = {"id": sample_id, "source": source, "reason": reason, "detail": detail}
        return about | {"epoch": self.epoch, "step": self.plan.num_steps - 1}


def make_segment(
    encoded: Encoded, fragment: Fragment, tiles: np.ndarray, second_tiles: np.ndarray | None = None
) -> Segment:
    """A fragment as it is encoded, with its tiles, as a segment of a pack."""
    ids, labels = encoded.input_ids[: fragment.num_tokens], encoded.labels[: fragment.num_tokens]
    num_loss_tokens = encoded.record.num_loss_tokens
    if len(ids) < encoded.record.num_tokens:  # truncated: what is left is the whole sample
        num_loss_tokens = int((labels[1:] != IGNORE_INDEX).sum())
    pictures = [picture for image in images_of(encoded, fragment) for picture in image.grid.pictures]
    return Segment(
        encoded.record.sample_id,
        (fragment.index, fragment.count),
        ids,
        labels,
        tiles,
        tuple(num_tiles for num_tiles, _ in pictures),
        num_loss_tokens,
        encoded.record.branches,
        tuple(grid for _, grid in pictures),
        second_tiles,
    )


def images_of(encoded: Encoded, fragment: Fragment) -> Iterator[PlannedImage | PlannedFrame | PlannedVideo]:
    """The images of a fragment: all but those behind the end of a truncated sample."""
    first = 0
    for image in encoded.images:
        if first < fragment.num_tiles:
            yield image
        first += image.grid.num_tiles
