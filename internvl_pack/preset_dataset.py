"""`PresetDataset`: training on packs that were planned before.

    preset -> the lane's next pack -> its samples, read and encoded as streaming does -> tiles -> PackRow

Order, lanes, resume and elasticity are those of `PackedDataset`: only where the packs come from differs. A lane's
state is the number of packs it has delivered, its counters, and which samples are in part delivered.

The epochs that were planned run as planned; later ones repeat them in turn, the packs of each lane in another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .collate import Segment
from .config import PackingConfig
from .dataset import PackedDataset
from .encode.sample import EncodeConfig, Encoded, Encoder
from .errors import SampleError, UserError
from .materialise import PackStore
from .preset import PlannedFragment, Preset
from .records import Fragment
from .sources import DatasetSpec, RawSample, Source, load_meta, open_source
from .sources.mixture import Mixture, MixturePart
from .sources.order import Permutation, derive_seed
from .stream import Counted, LaneStream, of_fragment


class PresetDataset(PackedDataset):
    """Packs of a preset; use it as a `PackedDataset`, with `build_loader`.

    Args:
        preset: the folder that `internvl-pack plan` wrote, or what was read of it.
        sources, specs: the data that it was planned for; None where it was materialised and needs none.
        encoder: the tokenizer and tile options that it was planned for.
        config: the run's options; None takes all from the preset. Budgets and the like must be the preset's.

    Raises:
        UserError: the preset does not fit the data, the tokenizer or the options any more; names what changed.
    """

    packs_are_counted = True

    def __init__(
        self,
        preset: Preset | str | Path,
        sources: Sequence[Source] | None,
        encoder: Encoder,
        config: PackingConfig | None = None,
        *,
        specs: Sequence[DatasetSpec] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.preset = preset if isinstance(preset, Preset) else Preset(preset)
        config = self.preset.config(config)
        self.store: PackStore | None = None
        if sources is None or specs is None:
            self.preset.check_encoder(encoder)
            self.store = PackStore(self.preset)
            sources, specs = planned_sources(self.preset)
        else:
            self.preset.check_fits(specs, sources, encoder)
        super().__init__(sources, encoder, config, specs=specs, rank=rank, world_size=world_size)

    @classmethod
    def open(
        cls,
        preset: str | Path,
        meta_path: str | Path | None,
        tokenizer: Any,
        config: PackingConfig | None = None,
        *,
        encode: EncodeConfig | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> PresetDataset:
        """From a preset and the meta file it was planned for. Without `encode` its tile options are the preset's.

        Without a meta file the preset must have been materialised.
        """
        read = Preset(preset)
        encoder = Encoder(tokenizer, encode or planned_encode_config(read))
        if meta_path is None:
            return cls(read, None, encoder, config, rank=rank, world_size=world_size)
        specs = load_meta(meta_path)
        sources = [open_source(spec) for spec in specs]
        return cls(read, sources, encoder, config, specs=specs, rank=rank, world_size=world_size)

    def lane_stream(self, lane: int, epoch: int, mixture: Mixture) -> PresetLane:
        kind = PresetLane if self.store is None else StoredLane
        return kind(self, lane, epoch, mixture)

    def prior(self) -> None:
        return None  # its packs are made

    def mixture(self, epoch: int) -> Mixture:
        """The order of an epoch; those that were planned come again after the last."""
        return super().mixture(epoch % self.preset.epochs)

    def _data_options(self, part: MixturePart, spec: DatasetSpec, source: Source) -> dict[str, Any]:
        # The preset was checked against all else, and a materialised one knows no files.
        return {"name": part.name, "rows": part.num_rows, "repeat_time": part.repeat_time, "weight": part.weight}

    def fingerprint(self) -> dict[str, Any]:
        return super().fingerprint() | {"preset": self.preset.digest}


def planned_encode_config(preset: Preset) -> EncodeConfig:
    """The tile options and chat format that a preset was planned for."""
    options = {name: value for name, value in preset.content["encode"].items() if name != "tokenizer"}
    options["image_size"] = options.pop("force_image_size")
    options["markup_tokens"] = tuple(options["markup_tokens"])
    return EncodeConfig(**options)


class PresetLane(LaneStream):
    """One lane of one epoch: hands out its planned packs. `cursor` counts packs."""

    dataset: PresetDataset

    def __init__(self, dataset: PresetDataset, lane: int, epoch: int, mixture: Mixture) -> None:
        super().__init__(dataset, lane, epoch, mixture)
        self.preset = dataset.preset
        self.planned_epoch = epoch % self.preset.epochs
        self.num_packs = self.preset.num_packs(self.planned_epoch, lane)
        self._order: Permutation | None = None
        if epoch >= self.preset.epochs:
            self._order = Permutation(self.num_packs, derive_seed(dataset.config.seed, "packs", epoch, lane))
        self._gone: dict[int, int] = {}  # split samples that could not be read: fragments still to come

    # -- handing out -----------------------------------------------------------------------------

    def next_fragments(self) -> list[Fragment]:
        """The fragments of the next pack that can be read; empty once the lane has ended."""
        self._encoded.clear()  # samples that were split over several packs are read again for each
        if self.cursor == 0:
            self._leave_as_planned()
        while self._fatal is None:
            if self.cursor == self.num_packs:
                self.ended = True
                return []
            turn = self.cursor if self._order is None else self._order[self.cursor]
            self.cursor += 1
            fragments: list[Fragment] = [f for f in self._pack(turn) if self._admit(f)]
            if fragments:
                return fragments
        return []

    def count_packs(self) -> Counted:
        return Counted(self.num_packs)

    def _pack(self, turn: int) -> tuple[PlannedFragment, ...]:
        return self.preset.pack(self.planned_epoch, self.lane, turn)

    def _admit(self, fragment: PlannedFragment) -> bool:
        """Read the fragment's sample. False where it cannot be used: the rest of the pack goes on."""
        position = fragment.position
        if position in self._gone:
            self._gone[position] -= 1
            if not self._gone[position]:
                del self._gone[position]
            return False
        if position not in self._encoded:
            try:
                self._encoded[position] = self._read(fragment)
            except SampleError as error:
                self._lose(fragment, error)
                return False
            except UserError as error:
                self._fatal = str(error)
                return False
        if position not in self._outstanding:
            covered = fragment.sample_tokens
            if fragment.count == 1:
                covered = fragment.token_stop - fragment.token_start
            self.ledger.read_sample(fragment.sample_tokens, fragment.count, covered)
            self._outstanding[position] = fragment.count
        return True

    def _read(self, fragment: PlannedFragment) -> Encoded:
        """The fragment's sample, which must be what it was when it was planned.

        Raises:
            SampleError: it cannot be read.
            UserError: it is another one now.
        """
        which, row = self.mixture.locate(fragment.position)
        encoded = self.dataset.encoder.load(self.dataset.sources[which], row, self.dataset.specs[which])
        record = encoded.record
        planned = (fragment.sample_id, fragment.sample_tokens, fragment.sample_tiles)
        found = (record.sample_id, record.num_tokens, record.num_tiles)
        if planned != found:
            raise UserError(
                f"preset {self.preset.folder} does not fit the data any more: {_size(planned)} was planned and "
                f"{_size(found)} is there now ({self.dataset.sources[which].origin(row)}): plan it again"
            )
        return encoded

    def _lose(self, fragment: PlannedFragment, error: SampleError) -> None:
        position = fragment.position
        which, row = self.mixture.locate(position)
        if position in self._outstanding:  # an earlier fragment has been trained on
            self._outstanding[position] -= 1
            last = not self._outstanding[position]
            if last:
                del self._outstanding[position]
            if not self.ledger.lose(fragment, error.reason, last=last):
                return
        else:
            self.ledger.refuse(error.reason)
            if fragment.count > 1:
                self._gone[position] = fragment.count - 1
        self._leave(fragment.sample_id, of_fragment(error, fragment), which, row, "decoded")

    def _leave_as_planned(self) -> None:
        """The samples that left when the preset was planned enter the ledger with the lane's first pack."""
        for refused in self.preset.refused(self.planned_epoch, self.lane):
            which, row = self.mixture.locate(refused["position"])
            error = SampleError(refused["reason"], refused["detail"], self._origin(refused, which, row))
            self.ledger.refuse(error.reason)
            self._tell(refused["sample_id"], error)
            if self.dataset.config.on_error == "stop":
                self._fatal = f"{refused['sample_id']}: {error}"

    def _origin(self, refused: dict[str, Any], which: int, row: int) -> str:
        """Where a sample stands that left when the preset was planned."""
        return self.dataset.sources[which].origin(row)

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "cursor": self.cursor,
            "turns": self.turns,
            "split": {str(position): left for position, left in self._outstanding.items()},
            "gone": {str(position): left for position, left in self._gone.items()},
            "ledger": self.ledger.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.cursor = state["cursor"]
        self.turns = state["turns"]
        self._outstanding.update({int(position): left for position, left in state["split"].items()})
        self._gone = {int(position): left for position, left in state["gone"].items()}
        self.ledger.load_state_dict(state["ledger"])


class StoredLane(PresetLane):
    """A lane of a preset that holds its data: nothing is read from the sources."""

    def __init__(self, dataset: PresetDataset, lane: int, epoch: int, mixture: Mixture) -> None:
        super().__init__(dataset, lane, epoch, mixture)
        self._row: dict[str, Any] = {}
        self._places: dict[tuple[int, int], int] = {}

    def _pack(self, turn: int) -> tuple[PlannedFragment, ...]:
        assert self.dataset.store is not None
        fragments = super()._pack(turn)
        self._row = self.dataset.store.row(self.planned_epoch, self.lane, turn)
        self._places = {fragment.key: number for number, fragment in enumerate(fragments)}
        return fragments

    def _origin(self, refused: dict[str, Any], which: int, row: int) -> str:
        return refused.get("source") or super()._origin(refused, which, row)

    def _read(self, fragment: PlannedFragment) -> Encoded:
        assert self.dataset.store is not None
        which, _ = self.mixture.locate(fragment.position)
        augment = self.preset.content["data"][which]["data_augment"]
        number = self._places[fragment.key]
        return self.dataset.store.segment(self._row, number, fragment, data_augment=augment)

    def _segment(self, fragment: Fragment, found: Encoded | SampleError, out: np.ndarray) -> Segment:
        assert isinstance(fragment, PlannedFragment)
        stored = self._read(fragment)
        tiles = self.dataset.encoder.decode(stored, epoch=self.epoch, out=out)
        per_image = tuple(image.grid.num_tiles for image in stored.images)
        place = (fragment.index, fragment.count)
        ids, labels = stored.input_ids, stored.labels
        return Segment(fragment.sample_id, place, ids, labels, tiles, per_image, stored.record.num_loss_tokens)


class PlannedSource(Source):
    """Stands for data that is in the preset itself: its name and its number of rows."""

    def __init__(self, name: str, num_rows: int, folder: Path) -> None:
        self.name, self._num_rows, self._folder = name, num_rows, folder

    def __len__(self) -> int:
        return self._num_rows

    def read(self, row: int) -> RawSample:
        raise UserError(f"preset {self._folder}: the rows of dataset {self.name!r} are not read again")

    def sample_id(self, row: int) -> str:
        return f"{self.name}/{row}"

    def origin(self, row: int) -> str:
        return f"{self._folder}: row {row} of dataset {self.name!r}"


def planned_sources(preset: Preset) -> tuple[list[Source], list[DatasetSpec]]:
    """The datasets of a preset that holds its data."""
    sources: list[Source] = []
    specs = []
    for entry in preset.content["data"]:
        sources.append(PlannedSource(entry["name"], entry["rows"], preset.folder))
        specs.append(DatasetSpec(name=entry["name"], repeat_time=entry["repeat_time"], weight=entry["weight"]))
    return sources, specs


def _size(sample: tuple[str, int, int]) -> str:
    return f"{sample[0]} of {sample[1]} tokens and {sample[2]} tiles"
