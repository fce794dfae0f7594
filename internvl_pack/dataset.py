"""`PackedDataset`: from sources to packs, one lane at a time.

    order (seed, epoch) -> position of the lane -> source -> encode (header only) -> split -> packer
                                                                                               |
    PackRow <- decode the tiles of the chosen fragments, the rest of the pack goes on  <-------+

The look-ahead holds records, token ids and file references, never pixels. Everything is a function of
(seed, epoch, lane, position): a lane's saved state is its cursor, the keys of the fragments that wait,
and its counters, a few kB of JSON.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from .collate import PackRow
from .config import PackingConfig, auto_lanes, check_budget
from .encode.sample import Encoder
from .errors import UserError
from .lanes import Topology
from .packing.cost import CostModel
from .prior import lanes_prior, shares_a_prior
from .sources import DatasetSpec, Source, load_meta, open_source
from .sources.mixture import Mixture, MixturePart
from .stream import LaneStream, plan_sample

STATE_VERSION = 2
_POLICY_OPTIONS = ("on_error", "max_bad_fraction", "num_lanes")  # may differ on resume; lanes are added resolved


class PackedDataset(IterableDataset):
    """Packs of image-text samples under joint token and tile budgets.

    Iterating yields `PackRow`s for `packed_collate_fn`; each sample comes once an epoch over all ranks
    and DataLoader workers. `build_loader` gives the loader that also keeps the global order of packs,
    resumes and is elastic.

    Args:
        sources: where samples come from, one `Source` each.
        specs: the matching entries of the meta file (repeat_time, weight, max_dynamic_patch ...).
        encoder: tokenizer and tile rules.
        config: budgets and order.
        rank, world_size: data-parallel place; default from torchrun's environment (RANK, WORLD_SIZE).

    Raises:
        UserError: no samples, budgets that no tile fits, lanes that do not divide.
    """

    packs_are_counted = False  # whether a lane knows its number of packs without reading samples

    def __init__(
        self,
        sources: Sequence[Source],
        encoder: Encoder,
        config: PackingConfig | None = None,
        *,
        specs: Sequence[DatasetSpec] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config or PackingConfig()
        self.sources = list(sources)
        self.specs = list(specs) if specs is not None else [DatasetSpec(name=s.name) for s in sources]
        self.encoder = encoder
        self.rank = int(os.environ.get("RANK", 0)) if rank is None else rank
        self.world_size = int(os.environ.get("WORLD_SIZE", 1)) if world_size is None else world_size
        self.epoch = 0
        self.parts = self.config.parts(self.specs, self.sources)
        self.num_positions = len(self.mixture(0))
        if not self.num_positions:
            damage = next((str(d) for s in self.sources for d in s.damage), "all of its files are empty")
            raise UserError(f"the data holds no samples: {damage}")
        check_budget(self.config, encoder)
        self.num_lanes = self.config.num_lanes or auto_lanes(self.num_positions, self.world_size)
        self.cost_model = CostModel.from_name(self.config.cost_model)
        self._start: dict[str, Any] | None = None
        self._streams: dict[int, LaneStream] = {}
        self._prior: dict[str, int] | None = None
        self._prior_is_known = False

    @classmethod
    def from_meta(
        cls,
        meta_path: str | Path,
        tokenizer: Any,
        config: PackingConfig | None = None,
        *,
        encode: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> PackedDataset:
        """From an InternVL meta file. `encode` is an `EncodeConfig` (tile size, chat format ...)."""
        specs = load_meta(meta_path)
        encoder = Encoder(tokenizer, encode) if encode is not None else Encoder(tokenizer)
        sources = [open_source(spec) for spec in specs]
        return cls(sources, encoder, config, specs=specs, rank=rank, world_size=world_size)

    def mixture(self, epoch: int) -> Mixture:
        """The order of an epoch: which row of which dataset stands at each position."""
        return self.config.mixture(self.parts, epoch)

    def lane_stream(self, lane: int, epoch: int, mixture: Mixture) -> LaneStream:
        """The lane from its start; `mixture` is that of the epoch."""
        return LaneStream(self, lane, epoch, mixture)

    def prior(self) -> dict[str, int] | None:
        """What every lane begins each epoch with (prior.py); None where lanes find out for themselves.

        The first call reads some samples, no pixels: under a second for local data. A state that goes on brings it.
        """
        if not self._prior_is_known and shares_a_prior(self.config, self.num_lanes, self.specs):
            self._prior_is_known = True
            mixture, budget = self.mixture(0), self.config.budget()
            self._prior = lanes_prior(
                self.config,
                self.cost_model,
                len(mixture),
                lambda position: plan_sample(self, mixture, position, budget)[1],
            )
        return self._prior

    def adopt_prior(self, state: Mapping[str, Any]) -> None:
        """Lanes that begin later in a run that goes on begin with what its first ones did, if the data is the same."""
        same = state.get("options") == self.fingerprint()
        self._prior = state.get("prior") if same else None
        self._prior_is_known = self._prior is not None

    def take_prior(self, prior: dict[str, int] | None) -> None:
        """Lanes begin with these figures, whatever this process would find: another one's `prior`, the same for all."""
        self._prior, self._prior_is_known = prior, True

    @property
    def known_prior(self) -> dict[str, int] | None:
        """`prior` as far as it has been asked for, for a saved state."""
        return self._prior

    def set_epoch(self, epoch: int) -> None:
        """Order of this epoch from the next iteration on; a state loaded for another epoch is let go."""
        if epoch != self.epoch:
            self._streams = {}  # they are another epoch's: its lanes are no state of this one
        self.epoch = epoch
        if self._start is not None and self._start["epoch"] != epoch:
            self._start = None

    # -- iteration -----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[PackRow]:
        worker = get_worker_info()
        topology = Topology(
            num_lanes=self.num_lanes, num_ranks=self.world_size, num_workers=worker.num_workers if worker else 0
        )
        lanes = topology.reader_lanes(self.rank, worker.id if worker else 0)
        start, self._start = self._start, None
        states = (start or {}).get("lanes", {})
        taken = sum(states[str(lane)]["turns"] for lane in lanes if str(lane) in states)
        first = taken % len(lanes)
        for row in self.read_lanes(lanes[first:] + lanes[:first], self.epoch, states):
            if row.fatal:
                raise UserError(row.fatal)
            if row.exhausted:
                return
            if row.segments:
                yield row

    def read_lanes(self, lanes: Iterable[int], epoch: int, states: Mapping[str, Any]) -> Iterator[PackRow]:
        """Rows of these lanes in turn, for ever: a lane that has ended gives rows without segments."""
        mixture = self.mixture(epoch)
        self._streams = {lane: self.lane_stream(lane, epoch, mixture) for lane in lanes}
        for lane, stream in self._streams.items():
            if str(lane) in states:
                stream.load_state_dict(states[str(lane)])
        streams = list(self._streams.values())
        while True:
            for stream in streams:
                row = stream.take_turn()
                row.exhausted = all(s.ended for s in streams)
                yield row

    # -- state ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the lanes read by this process stand; see docs/resume.md for the schema."""
        if not self._streams and self._start is not None:
            return self._start
        lanes = {str(lane): s.state_dict() for lane, s in self._streams.items() if s.turns}
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "options": self.fingerprint(),
            "prior": self.known_prior,
            "lanes": lanes,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, check_options: bool = True) -> None:
        """Go on after `state` at the next iteration.

        Raises:
            UserError: the state is of another version, or was saved with other options; names them.
        """
        self.adopt_lanes(state)
        check_state(state, self.fingerprint() if check_options else None)
        self.adopt_prior(state)
        self._start = dict(state)
        self._streams = {}
        self.epoch = state["epoch"]

    def adopt_lanes(self, state: Mapping[str, Any]) -> None:
        """Where the number of lanes is left to us, a saved run's number stays."""
        if self.config.num_lanes is None and "num_lanes" in state.get("options", {}):
            self.num_lanes = state["options"]["num_lanes"]

    def fingerprint(self) -> dict[str, Any]:
        """Options and data that the order of packs depends on, by name, as JSON values."""
        config = {k: v for k, v in asdict(self.config).items() if k not in _POLICY_OPTIONS}
        config["cost_model"] = list(astuple(self.cost_model))  # the same model may lie elsewhere on resume
        data = [self._data_options(*each) for each in zip(self.parts, self.specs, self.sources, strict=True)]
        return config | {"num_lanes": self.num_lanes, "meta": data} | self.encoder.fingerprint()

    def _data_options(self, part: MixturePart, spec: DatasetSpec, source: Source) -> dict[str, Any]:
        """What the order depends on of a dataset. Its folder is not: data may be moved."""
        files = spec.shards or ([spec.annotation] if spec.annotation else [])
        names = "\n".join(os.path.basename(path) for path in files)
        of_files = os.path.basename(files[0]) if len(files) == 1 else hashlib.sha256(names.encode()).hexdigest()[:16]
        return {
            "name": part.name,
            "rows": part.num_rows,
            "repeat_time": part.repeat_time,
            "weight": part.weight,
            "max_dynamic_patch": spec.max_dynamic_patch,
            "data_augment": spec.data_augment,
            "files": source.fingerprint or of_files,
        }


def check_state(state: Mapping[str, Any], options: Mapping[str, Any] | None) -> None:
    """Raises UserError naming the option when a saved state cannot go on here."""
    if state.get("version") != STATE_VERSION:
        raise UserError(
            f"resume: the saved state has version {state.get('version')!r}, this release reads version {STATE_VERSION}"
        )
    if options is None:
        return
    saved = state["options"]
    for name in sorted(options.keys() | saved.keys(), key=lambda name: (name == "meta", name)):  # the longest last
        old, new = saved.get(name), options.get(name)
        if old != new:
            if name == "meta" and old and new and len(old) == len(new):  # only the datasets that differ
                old, new = zip(*((o, n) for o, n in zip(old, new, strict=True) if o != n), strict=True)
            raise UserError(
                f"resume: {name} was {old!r} when the checkpoint was saved and is {new!r} "
                f"now: set it back, or pass resume_ignore_options to go on with an order that differs"
            )
