"""`LaneStream`: one lane of one epoch, from positions to rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .buffers import TileBuffers
from .collate import PackRow, Segment
from .encode.images import tiles_over
from .encode.sample import Encoded
from .errors import SampleError, UserError, costs_one_sample
from .loss import IGNORE_INDEX
from .packing.budget import Budget
from .packing.packer import LanePacker
from .records import Fragment
from .report.ledger import Ledger
from .sources.mixture import Mixture

if TYPE_CHECKING:
    from .dataset import PackedDataset

ALL_BAD_ROWS = 32  # rows of one dataset in one lane, all bad: nothing in it loads

_buffers = TileBuffers()


class Contents(NamedTuple):
    """What some packs hold; parts of a split sample count once as a sample."""

    samples: int
    tokens: int
    tiles: int


class Counted(NamedTuple):
    """The length of a lane. `contents` is None where packs are known without looking at what they hold."""

    packs: int
    contents: Contents | None = None


def plan_sample(
    dataset: PackedDataset, mixture: Mixture, position: int, budget: Budget
) -> tuple[Encoded, list[Fragment]]:
    """The sample at a position of an epoch, encoded and cut.

    Raises:
        SampleError: whatever goes wrong with it.
    """
    which, row = mixture.locate(position)
    source = dataset.sources[which]
    encoded = dataset.encoder.load(source, row, dataset.specs[which])
    with costs_one_sample(source=partial(source.origin, row)):
        return encoded, dataset.config.cut(encoded.record, position, budget)


class LaneStream:
    """One lane of one epoch: reads its positions, packs them, and hands out rows in turn."""

    def __init__(self, dataset: PackedDataset, lane: int, epoch: int, mixture: Mixture) -> None:
        config = dataset.config
        self.dataset = dataset
        self.lane = lane
        self.epoch = epoch
        self.mixture = mixture
        self.budget = config.budget()
        self.packer: LanePacker[Fragment] = LanePacker(
            self.budget,
            policy=config.packing_policy if config.packing else "single",
            buffer_size=config.max_buffer_size if config.packing else 1,
            reservoir=config.balance_reservoir if config.packing else 0,
            cost=dataset.cost_model,
        )
        self.cursor = 0  # positions of the lane already read
        self.turns = 0
        self.ledger = Ledger()
        self.ended = False
        self._encoded: dict[int, Encoded] = {}
        self._vanished: dict[int, SampleError] = {}  # samples that waited in a saved state and cannot be read again
        self._outstanding: Counter[int] = Counter()  # fragments waiting, by position
        self._events: list[dict[str, Any]] = []
        self._outcomes: Counter[tuple[int, str, bool]] = Counter()  # (dataset, stage, good)
        self._fatal: str | None = None

    # -- reading ---------------------------------------------------------------------------------

    def _position(self) -> int | None:
        position = self.lane + self.cursor * self.dataset.num_lanes
        return position if position < len(self.mixture) else None

    def _load(self, position: int) -> tuple[Encoded, list[Fragment]]:
        """The sample at a position, encoded and cut. Raises SampleError."""
        return plan_sample(self.dataset, self.mixture, position, self.budget)

    def _read_next(self, position: int) -> None:
        if not self.cursor:
            self.packer.expect(self.dataset.prior())
        self.cursor += 1
        which, row = self.mixture.locate(position)
        try:
            encoded, fragments = self._load(position)
        except SampleError as error:
            self.ledger.refuse(error.reason)
            self._leave(self.dataset.sources[which].sample_id(row), error, which, row, "planned")
            return
        self._outcomes[which, "planned", True] += 1
        self.ledger.read(encoded.record, fragments)
        self._encoded[position] = encoded
        self._outstanding[position] = len(fragments)
        for fragment in fragments:
            self.packer.add(fragment)

    def _fill(self) -> None:
        while not self.packer.full and (position := self._position()) is not None and self._fatal is None:
            self._read_next(position)

    # -- handing out -----------------------------------------------------------------------------

    def next_fragments(self) -> list[Fragment]:
        """The fragments of the lane's next pack; empty once it has ended."""
        self._fill()
        if self._fatal is not None:
            return []
        if not self.packer.waiting:
            self.ended = True
            return []
        return self.packer.pop()

    def take_turn(self) -> PackRow:
        """The lane's next pack with its pixels; without segments once it has ended."""
        segments: list[Segment] = []
        while not segments and (pack := self.next_fragments()):
            segments = self._with_pixels(pack)
        self.turns += 1
        events, self._events = self._events, []
        return PackRow(segments, self.lane, self.turns - 1, self.state_dict(), events, fatal=self._fatal)

    def count_packs(self) -> Counted:
        """Packs to the lane's end, planned without decoding; the stream is used up."""
        packs = tokens = tiles = 0
        while pack := self.next_fragments():
            packs += 1
            for fragment in pack:
                self._release(fragment)
                tokens += fragment.num_tokens
                tiles += fragment.num_tiles
        return Counted(packs, Contents(self.ledger.samples_waiting, tokens, tiles))

    def _release(self, fragment: Fragment) -> Encoded | SampleError:
        """The fragment's sample, or why it is gone; let go after its last fragment."""
        position = fragment.position
        found = self._vanished.get(position) or self._encoded[position]
        self._outstanding[position] -= 1
        if not self._outstanding[position]:
            del self._outstanding[position]
            self._encoded.pop(position, None)
            self._vanished.pop(position, None)
        return found

    def _with_pixels(self, pack: list[Fragment]) -> list[Segment]:
        """The pack's fragments, decoded into one array, so that collating need not copy a tile."""
        size = self.dataset.encoder.config.image_size
        tiles = tiles_over(_buffers.take((sum(f.num_tiles for f in pack), size, size, 3)))
        segments, used = [], 0
        for fragment in pack:
            segment = self._materialise(fragment, tiles[used : used + fragment.num_tiles])
            if segment is not None:
                segments.append(segment)
                used += fragment.num_tiles
        return segments

    def _materialise(self, fragment: Fragment, out: np.ndarray) -> Segment | None:
        """A fragment with its pixels, written into `out`, or None (counted) where they cannot be decoded."""
        found = self._release(fragment)
        last = fragment.position not in self._outstanding
        which, row = self.mixture.locate(fragment.position)
        try:
            with costs_one_sample(source=partial(self.dataset.sources[which].origin, row)):
                segment = self._segment(fragment, found, out)
        except SampleError as error:
            if self.ledger.lose(fragment, error.reason, last=last):
                self._leave(fragment.sample_id, of_fragment(error, fragment), which, row, "decoded")
            return None
        self.ledger.pack(fragment, last=last)
        self._outcomes[which, "decoded", True] += 1
        return segment

    def _segment(self, fragment: Fragment, found: Encoded | SampleError, out: np.ndarray) -> Segment:
        """The fragment of the sample that was found, its tiles decoded into `out`. Raises SampleError."""
        if isinstance(found, SampleError):
            raise found
        decode = self.dataset.encoder.decode
        return make_segment(
            found, fragment, decode(found, fragment.tile_start, fragment.tile_stop, epoch=self.epoch, out=out)
        )

    # -- samples that leave ------------------------------------------------------------------------

    def _leave(self, sample_id: str, error: SampleError, which: int, row: int, stage: str) -> None:
        error.source = error.source or self.dataset.sources[which].origin(row)
        self._tell(sample_id, error)
        self._outcomes[which, stage, False] += 1
        bad = self._outcomes[which, stage, False]
        if self.dataset.config.on_error == "stop" or error.reason == "oversized_error":
            self._fatal = f"{sample_id}: {error}"
        elif bad >= ALL_BAD_ROWS and not self._outcomes[which, stage, True]:
            name = self.dataset.specs[which].name
            self._fatal = f"dataset {name!r}: none of its first {bad} samples can be used; {sample_id}: {error}"

    def _tell(self, sample_id: str, error: SampleError) -> None:
        about = {"source": error.source, "reason": error.reason, "detail": error.detail}
        self._events.append({"id": sample_id, **about})

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: what a restart needs, and no more."""
        return {
            "cursor": self.cursor,
            "turns": self.turns,
            "packer": self.packer.state_dict(),
            "extents": [_extent(f) for f in sorted(self.packer.waiting, key=lambda f: f.key)],
            "ledger": self.ledger.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after `state`: only the records that wait are read again.

        A sample that cannot be read any more keeps its place in the packs to come, so that these stay what they
        were, and leaves its pack as one whose images cannot be decoded does.

        Raises:
            UserError: a sample has changed since, or cannot be read and `on_error` is `stop`.
        """
        self.cursor = state["cursor"]
        self.turns = state["turns"]
        self.ledger.load_state_dict(state["ledger"])
        self.packer.load_state_dict(state["packer"], _Waiting(self, state))
        for fragment in self.packer.waiting:
            self._outstanding[fragment.position] += 1


def _extent(fragment: Fragment) -> list[int]:
    """What a saved state keeps of a fragment's size: [tokens, tiles] of a whole sample, else all its borders."""
    f = fragment
    if f.count == 1 and not (f.token_start or f.tile_start):
        return [f.token_stop, f.tile_stop]
    borders = (f.token_stop, f.tile_stop, f.token_start, f.tile_start)
    return [*borders, f.num_prefix_tokens, f.num_context_tokens, f.count]


class _Waiting(Mapping):
    """Fragments by key, each sample read when it is first asked for."""

    def __init__(self, stream: LaneStream, state: Mapping[str, Any]) -> None:
        self._stream = stream
        packer = state["packer"]
        held = [key for entry in packer["reservoir"] for key in entry["keys"]]
        keys = sorted((key[0], key[1]) for key in [*packer["waiting"], *held])
        self._extents: dict[tuple[int, int], list[int]] = dict(zip(keys, state["extents"], strict=True))
        self._fragments: dict[tuple[int, int], Fragment] = {}

    def __getitem__(self, key: tuple[int, int]) -> Fragment:
        key = (key[0], key[1])
        if key not in self._fragments:
            self._read(key[0])
        return self._fragments[key]

    def _read(self, position: int) -> None:
        stream = self._stream
        which, row = stream.mixture.locate(position)
        sample_id = stream.dataset.sources[which].sample_id(row)
        expected = {key: extent for key, extent in self._extents.items() if key[0] == position}
        try:
            encoded, fragments = stream._load(position)
        except SampleError as error:
            if stream.dataset.config.on_error == "stop":
                raise UserError(
                    f"resume: {sample_id} waited in the saved state and cannot be read again: {error}"
                ) from None
            stream._vanished[position] = error
            fragments = [_stand_in(key, sample_id, extent) for key, extent in expected.items()]
        else:
            stream._encoded[position] = encoded
        found = {f.key: f for f in fragments}
        for key, extent in expected.items():
            if key not in found or _extent(found[key]) != extent:
                raise UserError(
                    f"resume: {sample_id} has changed since the state was saved: its fragment {key[1] + 1} ended at "
                    f"token {extent[0]:,} and tile {extent[1]:,}; put the old data back, or start a new run"
                )
        self._fragments.update(found)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._extents)

    def __len__(self) -> int:
        return len(self._extents)


def _stand_in(key: tuple[int, int], sample_id: str, extent: list[int]) -> Fragment:
    """A fragment of a sample that is gone, of the size that it had."""
    token_stop, tile_stop, token_start, tile_start, prefix, context, count = [*extent, 0, 0, 0, 0, 1][:7]
    return Fragment(key[0], sample_id, key[1], count, token_start, token_stop, tile_start, tile_stop, prefix, context)


def of_fragment(error: SampleError, fragment: Fragment) -> SampleError:
    """The error, saying of a split sample which part of it is lost: the others are trained."""
    if fragment.count == 1:
        return error
    part = f"part {fragment.index + 1} of {fragment.count} of this sample; parts without damage are trained"
    return SampleError(error.reason, f"{error.detail} ({part})", error.source)


def make_segment(encoded: Encoded, fragment: Fragment, tiles: np.ndarray) -> Segment:
    """The tokens, labels and tiles of one fragment; repeated tokens are not trained again."""
    start, stop = fragment.token_start, fragment.token_stop
    begin = start - fragment.num_context_tokens
    ids, labels = encoded.input_ids[begin:stop], encoded.labels[begin:stop]
    if fragment.num_context_tokens:
        labels = labels.copy()
        labels[: fragment.num_context_tokens] = IGNORE_INDEX
    if fragment.num_prefix_tokens:
        prefix = encoded.input_ids[: fragment.num_prefix_tokens]
        ids = np.concatenate([prefix, ids])
        labels = np.concatenate([np.full(len(prefix), IGNORE_INDEX, dtype=labels.dtype), labels])
    num_loss_tokens = encoded.record.num_loss_tokens
    if fragment.count == 1 and stop < encoded.record.num_tokens:  # truncated: what is left is the whole sample
        num_loss_tokens = int((labels[1:] != IGNORE_INDEX).sum())
    per_image, first = [], 0
    for image in encoded.images:
        if fragment.tile_start <= first < fragment.tile_stop:
            per_image.append(image.grid.num_tiles)
        first += image.grid.num_tiles
    return Segment(
        fragment.sample_id,
        (fragment.index, fragment.count),
        ids,
        labels,
        tiles,
        tuple(per_image),
        num_loss_tokens,
    )
