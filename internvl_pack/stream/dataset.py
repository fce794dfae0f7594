"""`PackedDataset`: samples in, packs out, by the one plan of the run.

    Samples -> Survey -> OnlinePacks (or a preset) -> StepPlan -> Reader -> rows

Every reader process of every rank makes the same plan for itself and materialises its own packs of each step. The plan
holds lengths, never tokens or pixels, and is a function of (data, options, seed, epoch).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from ..batch.row import PackRow
from ..config import PackingConfig, check_budget
from ..encode.config import EncodeConfig
from ..encode.sample import Encoder
from ..errors import UserError
from ..order.mixture import Mixture
from ..packing.cost import CostModel
from ..plan.groups import StepPlan
from ..plan.online import OnlinePacks
from ..plan.sequence import PackSequence
from ..samples import Samples
from ..sources import DatasetSpec, Source
from ..survey.exchange import Exchange
from ..survey.survey import Survey
from ..survey.table import root_of
from .reader import MicroBatch, Reader, SampleSegments, SegmentSource


def number_from_environment(name: str, default: int) -> int:
    """A whole number that a launcher sets.

    Raises:
        UserError: it is none.
    """
    value = os.environ.get(name, "")
    try:
        return int(value or default)
    except ValueError:
        raise UserError(f"environment variable {name}={value}: give a whole number, or unset it") from None


class PackedDataset(IterableDataset):
    """Packs of image-text samples under joint token and tile budgets.

    Iterating yields the `PackRow`s of this rank for `packed_collate_fn`, one optimizer step of one pack a rank after
    the other; each sample comes once an epoch over all ranks and DataLoader workers, and all ranks have as many rows.
    `build_loader` gives the loader that also knows steps of several packs a rank, and goes on from a saved state.

    Args:
        samples: the data and its encoder; or sources, one a dataset, with `encoder` and `specs`.
        config: budgets and order.
        rank, world_size: data-parallel place; default from torchrun's environment (RANK, WORLD_SIZE).

    Raises:
        UserError: no samples, budgets that no tile fits, or a rank that is not one of world_size.
    """

    preset: Any = None

    def __init__(
        self,
        samples: Samples | Sequence[Source],
        encoder: Encoder | None = None,
        config: PackingConfig | None = None,
        *,
        specs: Sequence[DatasetSpec] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(samples, Samples):
            if encoder is None:
                raise UserError("PackedDataset: give an encoder with the sources")
            samples = Samples.of(samples, encoder, specs)
        self.config = config or PackingConfig()
        self.samples = samples.joined(self.config, root_of(self.config.survey_dir))
        self.rank = number_from_environment("RANK", 0) if rank is None else rank
        self.world_size = number_from_environment("WORLD_SIZE", 1) if world_size is None else world_size
        if not 0 <= self.rank < self.world_size:
            raise UserError(
                f"rank {self.rank} of world_size {self.world_size}: ranks are 0 to world_size - 1; give both, or set "
                "RANK and WORLD_SIZE"
            )
        self.epoch = 0
        samples.check_some(self.num_positions)
        check_budget(self.config, samples.encoder)
        self.cost_model = CostModel.from_name(self.config.cost_model)
        self.survey = self._open_survey()

    @classmethod
    def from_meta(
        cls,
        meta_path: str | Path,
        tokenizer: Any,
        config: PackingConfig | None = None,
        *,
        encode: EncodeConfig | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> PackedDataset:
        """From an InternVL meta file. `encode` says tile size, chat format ..."""
        samples = Samples.from_meta(meta_path, tokenizer, encode)
        return cls(samples, config=config, rank=rank, world_size=world_size)

    @property
    def encoder(self) -> Encoder:
        """Tokenizer, chat format and tile rules of the samples."""
        return self.samples.encoder

    @cached_property
    def num_positions(self) -> int:
        """Samples of an epoch, bad ones included."""
        return len(self.mixture(0))

    def _open_survey(self) -> Survey | None:
        """The survey to plan by, None for a preset; rows that an earlier run refused are tried again."""
        survey = Survey(self.samples, self.config.room, root_of(self.config.survey_dir))
        survey.forget_refusals()
        return survey

    def mixture(self, epoch: int) -> Mixture:
        """The order of an epoch: which row of which dataset stands at each position."""
        return self.samples.mixture(self.config, epoch)

    def pack_sequence(self, epoch: int) -> PackSequence:
        """The packs of an epoch, from its start."""
        assert self.survey is not None, "planned by its lengths"
        return OnlinePacks(self.survey, self.mixture(epoch), self.config, self.cost_model)

    def segment_source(self, epoch: int) -> SegmentSource:
        """The data of an epoch's fragments."""
        return SampleSegments(self.samples, self.config, self.mixture(epoch), epoch)

    def step_plan(self, epoch: int, packs_per_step: int, state: Mapping[str, Any] | None = None) -> StepPlan:
        """The steps of an epoch: from its start, or after `state`, one of `StepPlan.state_dict`."""
        plan = StepPlan(
            self.pack_sequence(epoch),
            packs_per_step,
            seed=self.config.seed,
            epoch=epoch,
            balanced=self.config.packing and self.config.shuffle,  # not rows of a sample, nor a given order
        )
        if state is not None:
            plan.load_state_dict(state)
        return plan

    def __len__(self) -> int:
        """Packs are known when the epoch has been planned.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "PackedDataset has no length before its epoch is planned: num_positions is that of its samples, "
            "estimate_epochs(dataset, packs_per_step, epochs) counts packs and steps"
        )

    def __bool__(self) -> bool:
        return True

    def set_epoch(self, epoch: int) -> None:
        """Order of this epoch from the next iteration on.

        Raises:
            UserError: it is no whole number from 0.
        """
        if not isinstance(epoch, int | np.integer) or isinstance(epoch, bool) or epoch < 0:
            raise UserError(f"set_epoch({epoch!r}): give a whole number from 0")
        self.epoch = int(epoch)

    # -- iteration -----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[PackRow]:
        for batch in self.micro_batches(self.epoch):
            if batch.progress.fatal:
                raise UserError(batch.progress.fatal)
            yield from batch.rows or [PackRow([])]

    def micro_batches(
        self,
        epoch: int,
        *,
        packs_per_batch: int = 1,
        accumulation: int = 1,
        state: Mapping[str, Any] | None = None,
        exchange: Exchange | None = None,
    ) -> Iterator[MicroBatch]:
        """What this reader process materialises of the epoch, in order.

        Args:
            packs_per_batch: packs of a micro-batch.
            accumulation: micro-batches of a rank in each step.
            state: of the plan, to go on after.
            exchange: of the survey with other readers.
        """
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        if self.survey is not None:
            self.survey.share(exchange, reader=self.rank * count + number, num_readers=self.world_size * count)
        packs_per_step = self.world_size * packs_per_batch * accumulation
        return iter(
            Reader(
                plan=self.step_plan(epoch, packs_per_step, state),
                segments=self.segment_source(epoch),
                epoch=epoch,
                image_size=self.encoder.config.image_size,
                stops=self.config.on_error == "stop",
                rank=self.rank,
                num_ranks=self.world_size,
                worker=number,
                num_workers=count,
                packs_per_batch=packs_per_batch,
            )
        )

    # -- state ---------------------------------------------------------------------------------------

    def fingerprint(self) -> dict[str, Any]:
        """Options and data that the order of packs depends on, by name, as JSON values."""
        return self.config.fingerprint() | {"meta": self.samples.fingerprint()} | self.encoder.fingerprint()

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that identify the data, the options and this start of the run."""
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        facts = json.dumps([self.fingerprint(), start], sort_keys=True, default=str)
        return hashlib.sha256(facts.encode()).hexdigest()[:16]
