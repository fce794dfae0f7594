"""`PackLoader`: the micro-batches of one rank, step after step, with a state that counts what was trained.

torch's DataLoader moves the data. Reader j of W materialises every W-th micro-batch of the rank, so any number of
workers gives the same batches. The last micro-batch of each step carries the plan's state after it; handing out the
next step's first batch, or asking for the state, finds it committed: what readers have prefetched never counts. The
state is that of the run, the same on every rank, and any number of ranks and workers goes on from it.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..batch.collate import packed_collate_fn
from ..batch.loss_weights import check_loss_reduction
from ..batch.row import PackRow
from ..errors import UserError
from ..ledger import Ledger, Losses
from ..options import count
from ..parallel.agreement import Agreement
from ..survey.exchange import Exchange, local_store, store_of_the_run
from .dataset import PackedDataset, number_from_environment
from .reader import MicroBatch, Progress
from .shared_memory import allow_many_open_files, bytes_of_batch, fitting_prefetch, free_bytes, share
from .state import make_state, read_state
from .worker import ReaderProcesses, begin_reader, release_free_memory

logger = logging.getLogger(__name__)

PREFETCH = 2  # batches that a reader makes ahead, torch's default
_FAILED = "failed"  # instead of a batch: why its reader cannot hand it over
MIN_SAMPLES_TO_JUDGE = 1000  # `max_bad_fraction` is taken of at least this many samples


class _Feed(IterableDataset):
    """What a reader runs: its micro-batches of one epoch."""

    def __init__(self, dataset: PackedDataset, packs_per_batch: int, accumulation: int) -> None:
        super().__init__()
        self.dataset = dataset
        self.packs_per_batch = packs_per_batch
        self.accumulation = accumulation
        # In shared memory, so that workers that stay alive see the next epoch: epoch, whether it goes on from `state`.
        self.control = torch.zeros(2, dtype=torch.int64).share_memory_()
        self.state: Mapping[str, Any] | None = None
        self.exchange: Exchange | None = None

    def __iter__(self) -> Iterator[MicroBatch]:
        if get_worker_info():
            begin_reader()
        return self.dataset.micro_batches(
            int(self.control[0]),
            packs_per_batch=self.packs_per_batch,
            accumulation=self.accumulation,
            state=self.state if self.control[1] else None,
            exchange=self.exchange,
        )


@dataclass(frozen=True)
class _Collate:
    """A batch of a micro-batch's rows, with its progress; of a filler where this rank's data has ended."""

    collate_fn: Callable[..., dict[str, Any]]

    def __call__(self, batch: MicroBatch) -> dict[str, Any]:
        made = self.collate_fn(batch.rows or [PackRow([])]) | {"progress": batch.progress}
        if get_worker_info() is not None:
            try:
                share(made)
            except UserError as error:
                return {_FAILED: str(error)}
        return made


class PackLoader(DataLoader):
    """Batches of packs of one rank. Build it with `build_loader`.

    Iterating gives one epoch (`set_epoch`). Batches are dicts of `packed_collate_fn`, and `batch["progress"].ends_step`
    marks the last one of an optimizer step. All ranks have the same number of batches. One iteration goes on at a time:
    going on with an earlier one is a RuntimeError.

    Args:
        collate_fn: rows to a batch; default: `packed_collator` of the dataset.
        agreement: with the ranks that share this one's rows (parallel/agreement.py).
        others: see `build_loader`.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        *,
        packs_per_batch: int = 1,
        accumulation: int = 1,
        num_workers: int = 0,
        collate_fn: Callable[..., dict[str, Any]] | None = None,
        agreement: Agreement | None = None,
        **options: Any,
    ) -> None:
        for name, value in (("packs_per_batch", packs_per_batch), ("accumulation", accumulation)):
            if value < 1:
                raise UserError(f"{name} is {value}: give at least 1")
        if num_workers:
            ahead = options.get("prefetch_factor")
            options["prefetch_factor"] = _prefetch(dataset, packs_per_batch, num_workers, ahead)
        self.packed_dataset = dataset
        self.pack_collate_fn = collate_fn or packed_collator(dataset)
        self._agreement = agreement
        self._feed = _Feed(dataset, packs_per_batch, accumulation)
        self._store: Any = None  # of this process, for its own readers
        self._plan: dict[str, Any] | None = None  # its state after the last step that was delivered
        self._losses, self._pending_losses = Losses(), Losses()
        self._resumed = False
        self._iteration = 0  # the number of the one that is going on
        self._events = damage_events(dataset) if dataset.rank == 0 else []
        collate: Any = _Collate(self.pack_collate_fn)  # torch's types know batches only, not rows made one
        super().__init__(self._feed, batch_size=None, num_workers=num_workers, collate_fn=collate, **options)

    @property
    def packs_per_batch(self) -> int:
        """Packs of a micro-batch."""
        return self._feed.packs_per_batch

    @property
    def packs_per_step(self) -> int:
        """Packs of an optimizer step, over all ranks."""
        return self.packed_dataset.world_size * self._feed.packs_per_batch * self._feed.accumulation

    @property
    def epoch(self) -> int:
        """The epoch that is read, counted from 0."""
        return self.packed_dataset.epoch

    @property
    def steps_done(self) -> int:
        """Steps of this epoch that were delivered whole."""
        return 0 if self._plan is None else self._plan["step"]

    def set_epoch(self, epoch: int) -> None:
        """Read this epoch, from its start unless it is being read already."""
        before = self.epoch
        self.packed_dataset.set_epoch(epoch)
        if self.epoch != before:
            self._begin_anew()

    def __len__(self) -> int:
        """Batches are known when the epoch has been planned.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "PackLoader has no length before its epoch is planned: estimate_epochs(dataset, loader.packs_per_step, "
            "epochs).steps(0) counts its optimizer steps"
        )

    def _begin_anew(self) -> None:
        self._plan, self._losses, self._pending_losses, self._resumed = None, Losses(), Losses(), False
        self._iteration += 1

    # -- iteration -----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[dict[str, Any]]:  # type: ignore[override]  # a generator over torch's iterator
        if self._resumed:
            self._iteration += 1
        else:
            self._begin_anew()
        self._feed.state = self._plan
        self._feed.control[0] = self.epoch
        self._feed.control[1] = int(self._resumed)
        self._resumed = False
        self._pending_losses = Losses()
        if self._feed.exchange is None:
            self._feed.exchange = self._make_exchange()
        with _naming_the_dead(self._iterator):  # persistent ones are told to begin anew
            batches = super().__iter__()
        return self._batches(batches, self._iteration)

    def _get_iterator(self) -> Any:
        if not self.num_workers:
            return super()._get_iterator()
        release_free_memory()  # readers are about to be forked
        return ReaderProcesses(self)

    def _make_exchange(self) -> Exchange | None:
        found = store_of_the_run()
        if found is None and self.num_workers > 1:
            self._store = local_store()
            found = self._store.host, self._store.port
        if found is None:
            return None
        return Exchange(*found, prefix=f"internvl_pack/{self.packed_dataset.digest}/")

    def _batches(self, batches: Iterable[dict[str, Any]], iteration: int) -> Iterator[dict[str, Any]]:
        read = self._from_readers(batches)
        self._check_goes_on(iteration)
        for batch in read if self._agreement is None else self._agreement.on(read):
            progress: Progress = batch["progress"]
            self._commit(progress)
            if progress.fatal:
                raise UserError(progress.fatal)
            yield batch
            self._check_goes_on(iteration)

    def _check_goes_on(self, iteration: int) -> None:
        """The state is of one iteration, and so are readers that stay alive: another ends those before it."""
        if iteration != self._iteration:
            raise RuntimeError(
                "this iteration of the PackLoader has ended: the loader was iterated anew, or moved by set_epoch or "
                "load_state_dict; use a loader for each of several iterations at a time"
            )

    def _from_readers(self, batches: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        with _naming_the_dead(batches):
            for batch in batches:
                if _FAILED in batch:
                    raise UserError(batch[_FAILED])
                yield batch

    def _commit(self, progress: Progress) -> None:
        """Count the batch that is about to be delivered; the state moves on with the last one of a step."""
        self._events.extend(progress.events)
        for fragment, reason in progress.lost:
            self._pending_losses.add(self.epoch, fragment, reason)
        if progress.ends_step:
            self._plan = progress.state
            self._losses = Losses.merged([self._losses.state_dict(), self._pending_losses.state_dict()])
            self._pending_losses = Losses()
        if progress.events:
            self._check_bad_fraction()

    def _check_bad_fraction(self) -> None:
        """Stop when too many samples are bad. The first thousand cannot prove a small share and count in full."""
        dataset = self.packed_dataset
        fraction = dataset.config.max_bad_fraction
        if fraction == 1.0:
            return
        ledger, ranks = self.ledger, dataset.world_size
        lost = self._losses.num_samples + self._pending_losses.num_samples
        refused = ledger.samples_quarantined - self._losses.num_samples
        bad = refused / ranks + lost
        allowed = fraction * max(ledger.samples_in, min(MIN_SAMPLES_TO_JUDGE, dataset.num_positions)) / ranks
        if bad > allowed:
            quarantined = ledger.quarantined + self._pending_losses.samples
            reasons = ", ".join(f"{n} {reason}" for reason, n in quarantined.most_common(3))
            raise UserError(
                f"max_bad_fraction {fraction}: {refused + lost} of {ledger.samples_in} samples read are bad "
                f"({reasons}); quarantine.jsonl names them. Mend them, or raise max_bad_fraction"
            )

    def filler_batch(self) -> dict[str, Any]:
        """A batch without samples: what a rank does while others still have data."""
        return _Collate(self.pack_collate_fn)(MicroBatch([], Progress()))

    # -- what happened ---------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """Counts of the run's samples in the steps of this epoch that were handed out: the same on all ranks, except
        for samples that this rank could not decode (`losses`)."""
        return self.ledger_of(self._losses)

    @property
    def losses(self) -> Losses:
        """Fragments that this rank could not decode, in the steps of this epoch that were handed out."""
        return self._losses

    def ledger_of(self, losses: Losses) -> Ledger:
        """The run's ledger of this epoch, given the losses of all ranks."""
        ledger = Ledger()
        if self._plan is not None:
            ledger.load_state_dict(self._plan["ledger"])
        return ledger.less(losses)

    def take_events(self) -> list[dict[str, Any]]:
        """Samples that could not be used since the last call: their ids, reasons and details."""
        events, self._events = self._events, []
        return events

    # -- state -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The run's state after the last whole step (stream/state.py): JSON values, the same on every rank.

        Only `losses` are this rank's; `Losses.merged` adds up those of all ranks.
        """
        return make_state(self.epoch, self.packed_dataset.fingerprint(), self._plan, self._losses.state_dict())

    def load_state_dict(self, state: Mapping[str, Any], *, check_options: bool = True) -> None:
        """Resume after a saved state at the next iteration, on any number of ranks and workers.

        Raises:
            UserError: another version, other options or data (named), or a damaged state.
        """
        options = self.packed_dataset.fingerprint() if check_options else None
        epoch, plan, losses = read_state(state, options)
        if plan is not None:  # report damage here, not in a reader
            self.packed_dataset.step_plan(epoch, self.packs_per_step, plan)
        self._iterator = None  # workers that are alive know nothing of the new state
        self.packed_dataset.set_epoch(epoch)
        self._begin_anew()
        if self.packed_dataset.rank == 0:  # the sum of all ranks', which counts once
            self._losses = losses
        self._plan, self._resumed = plan, plan is not None
        if plan is not None and plan["packs_per_step"] != self.packs_per_step:
            logger.warning(
                "resume: %s a step when the checkpoint was saved, %d now: steps differ from here on",
                count(plan["packs_per_step"], "packs"),
                self.packs_per_step,
            )


def _prefetch(dataset: PackedDataset, packs_per_batch: int, num_workers: int, wanted: int | None) -> int:
    """Batches that each reader makes ahead: as wanted, or as many as fit into shared memory.

    Raises:
        UserError: not even one a reader fits.
    """
    allow_many_open_files()
    config, wanted = dataset.config, wanted or PREFETCH
    batch = bytes_of_batch(
        packs_per_batch * config.max_packed_tokens,
        packs_per_batch * config.num_images_expected,
        dataset.encoder.config.image_size,
    )
    processes = number_from_environment("LOCAL_WORLD_SIZE", 1)
    fitting = fitting_prefetch(batch, num_workers, wanted, free_bytes(), processes)
    if fitting < wanted:
        logger.warning("readers make %d batches ahead instead of %d: shared memory holds no more", fitting, wanted)
    return fitting


@contextmanager
def _naming_the_dead(iterator: Any) -> Iterator[None]:
    """Name a reader process of torch's iterator that died, however its death is noticed inside.

    Its last tensors are in memory that only it can hand over, so that its end can show as an end of file or a broken
    connection while the kernel still counts it among the living.

    Raises:
        RuntimeError: with the reader's number, pid and end.
    """
    try:
        yield
    except (OSError, EOFError, RuntimeError) as error:
        workers = getattr(iterator, "_workers", [])
        if workers and not isinstance(error, RuntimeError):
            ending = wait([worker.sentinel for worker in workers], timeout=5)
            for worker in workers:
                if worker.sentinel in ending:
                    worker.join()  # its exit code comes a moment after its files are closed
        dead = [f"{n} (pid {w.pid}, {_exit_of(w.exitcode)})" for n, w in enumerate(workers) if w.exitcode]
        if not dead:
            raise
        raise RuntimeError(f"DataLoader worker {', '.join(dead)} exited unexpectedly") from error


def _exit_of(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"{name}: is the machine out of memory?" if -code == signal.SIGKILL else name


def damage_events(dataset: PackedDataset) -> list[dict[str, Any]]:
    """Damage in the files that belongs to no sample, as events like those of samples that leave."""
    return [
        {"id": f"{source.name}#damage{number}", "source": error.source or source.name}
        | {"reason": error.reason, "detail": error.detail, "epoch": 0, "step": -1}
        for source in dataset.samples.sources
        for number, error in enumerate(source.damage)
    ]


def packed_collator(
    dataset: PackedDataset,
    *,
    loss_reduction: str = "token",
    pad_to: int | None = None,
    pad_seq_to_mult: int = 1,
    pad_cu_seqlens_to: int | None = None,
    branch_keys: bool = False,
) -> partial[dict[str, Any]]:
    """`packed_collate_fn` for the rows of a dataset: with its pad token, image token, tile size and objective.

    Args:
        loss_reduction: `token`, `sample` or `square`; see batch/loss_weights.py.
        pad_to, pad_seq_to_mult, pad_cu_seqlens_to, branch_keys: see `packed_collate_fn`.

    Raises:
        UserError: an unknown loss_reduction, or rows that would exceed the budget.
    """
    check_loss_reduction(loss_reduction)
    if dataset.config.pad_to_multiple_of % pad_seq_to_mult:
        raise UserError(
            f"pad_seq_to_mult {pad_seq_to_mult} does not divide pad_to_multiple_of "
            f"{dataset.config.pad_to_multiple_of}, which budgets are counted with: rows would exceed them; set both to "
            "the same number"
        )
    return partial(
        packed_collate_fn,
        pad_token_id=dataset.encoder.pad_token_id,
        image_size=dataset.encoder.config.image_size,
        loss_reduction=loss_reduction,
        pad_to=pad_to,
        pad_seq_to_mult=pad_seq_to_mult,
        pad_cu_seqlens_to=pad_cu_seqlens_to,
        image_token_id=dataset.encoder.picture_token_ids,
        grid_positions=dataset.encoder.grid_positions,
        pairs=dataset.encoder.config.objective != "sft",
        branch_keys=branch_keys,
    )


def build_loader(
    dataset: PackedDataset,
    *,
    packs_per_batch: int = 1,
    accumulation: int = 1,
    num_workers: int = 0,
    loss_reduction: str = "token",
    pad_to: int | None = None,
    pad_seq_to_mult: int = 1,
    pad_cu_seqlens_to: int | None = None,
    pin_memory: bool = False,
    persistent_workers: bool = False,
    prefetch_factor: int | None = None,
    timeout: float = 0,
) -> PackLoader:
    """The loader of a `PackedDataset`.

    Args:
        packs_per_batch: packs flattened into one row a micro-batch (`per_device_train_batch_size`).
        accumulation: micro-batches of a rank in an optimizer step (`gradient_accumulation_steps`): packs of a step are
            of like cost, and its state counts whole steps.
        num_workers: reader processes of this rank; any number gives the same batches.
        loss_reduction: `token`, `sample` or `square`; see batch/loss_weights.py.
        pad_to, pad_seq_to_mult, pad_cu_seqlens_to: see `packed_collate_fn`. A constant row of `packs_per_batch` packs
            has `packs_per_batch * max_packed_tokens` tokens.
        pin_memory, persistent_workers, prefetch_factor, timeout: as torch's DataLoader takes them.

    Raises:
        UserError: an unknown loss_reduction, a count below 1, or rows that would exceed the budget.
    """
    collator = packed_collator(
        dataset,
        loss_reduction=loss_reduction,
        pad_to=pad_to,
        pad_seq_to_mult=pad_seq_to_mult,
        pad_cu_seqlens_to=pad_cu_seqlens_to,
    )
    return PackLoader(
        dataset,
        packs_per_batch=packs_per_batch,
        accumulation=accumulation,
        num_workers=num_workers,
        collate_fn=collator,
        pin_memory=pin_memory,
        persistent_workers=persistent_workers,
        prefetch_factor=prefetch_factor,
        timeout=timeout,
    )
