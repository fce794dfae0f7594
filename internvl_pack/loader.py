"""`PackLoader`: packs in the global order, with a state that counts what was delivered.

torchdata's StatefulDataLoader moves the data; the state is ours, because its own belongs to one number
of workers. Every row carries its lane's state after it, and handing the row to the training loop
commits that state: what workers have prefetched never counts. States of all ranks merge into one, and
any topology whose readers divide the lanes goes on from it.
"""

from __future__ import annotations

import gc
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from .collate import filler_row, is_filler, packed_collate_fn
from .config import auto_lanes
from .dataset import STATE_VERSION, PackedDataset, check_state
from .errors import UserError
from .lanes import Topology
from .memory import release_free_memory
from .parallel.agreement import Agreement
from .report.ledger import Ledger
from .signals import obey_only_the_parent

MIN_SAMPLES_TO_JUDGE = 1000  # `max_bad_fraction` is taken of at least this many samples

_EPOCH, _FIRST_PACK, _RESUMED = range(3)


class _Feed(IterableDataset):
    """What a worker runs: its lanes' rows for ever, aligned with the global order."""

    def __init__(self, dataset: PackedDataset, num_workers: int, packs_per_batch: int) -> None:
        super().__init__()
        self.dataset = dataset
        self.num_workers = num_workers
        self.packs_per_batch = packs_per_batch
        # In shared memory, so that workers that stay alive see the next epoch.
        self.control = torch.zeros(3, dtype=torch.int64).share_memory_()
        self.states: Mapping[str, Any] = {}

    def topology(self) -> Topology:
        return Topology(
            num_lanes=self.dataset.num_lanes,
            num_ranks=self.dataset.world_size,
            num_workers=self.num_workers,
            packs_per_batch=self.packs_per_batch,
            first_pack=int(self.control[_FIRST_PACK]),
        )

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker:
            obey_only_the_parent()
        if worker and not gc.get_freeze_count():
            gc.freeze()  # the collector writes into all it looks at: 50 MB of the parent's objects copied for nothing
        lanes = self.topology().reader_lanes(self.dataset.rank, worker.id if worker else 0)
        states = self.states if self.control[_RESUMED] else {}
        return self.dataset.read_lanes(lanes, int(self.control[_EPOCH]), states)


class PackLoader(StatefulDataLoader):
    """Batches of packs of one rank. Build it with `build_loader`.

    Iterating gives one epoch (`set_epoch`). Batches are dicts of `packed_collate_fn`; a batch whose
    lanes have ended while others go on has no sample and weighs zero, so that ranks stay in step.

    Attributes:
        ledger: what happened to every sample of this rank's lanes in this epoch, as delivered.
        events: samples that left since `take_events` was last called.
        way: how its rows are made, one of combinations.py; only told in reports.
        row_budget: (tokens, tiles) that a row may hold, where that is not the dataset's budget of a pack.
        agreement: with the ranks that share this one's rows (parallel/agreement.py).
    """

    way = "stream"
    row_budget: tuple[int, int] | None = None
    agreement: Agreement | None = None

    def __init__(
        self,
        dataset: PackedDataset,
        *,
        packs_per_batch: int = 1,
        num_workers: int = 0,
        collate_fn: Callable[..., dict[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        self.packed_dataset = dataset
        if dataset.config.num_lanes is None:
            dataset.num_lanes = auto_lanes(dataset.num_positions, dataset.world_size, num_workers, packs_per_batch)
        self._feed = _Feed(dataset, num_workers, packs_per_batch)
        self._feed.topology()  # refuse a count that does not divide the lanes before anything starts
        self._states: dict[str, Any] = {}
        self._first_pack = 0
        self._num_batches = 0
        self._resumed = False
        self._events = damage_events(dataset) if dataset.rank == 0 else []
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # of torchdata's own making
            super().__init__(
                self._feed,
                batch_size=packs_per_batch,
                num_workers=num_workers,
                collate_fn=collate_fn or packed_collate_fn,
                # Our feed has no state of its own; asking for it at every step would be wasted.
                snapshot_every_n_steps=2**31,
                **options,
            )

    @property
    def budget(self) -> tuple[int, int]:
        """Tokens and tiles of a row of one pack."""
        config = self.packed_dataset.config
        return self.row_budget or (config.max_packed_tokens, config.num_images_expected)

    @property
    def epoch(self) -> int:
        """The epoch that is read, counted from 0."""
        return self.packed_dataset.epoch

    def set_epoch(self, epoch: int) -> None:
        """Read this epoch from its start; the one that is being read, if it is that, goes on."""
        if epoch != self.packed_dataset.epoch:
            self._states, self._first_pack, self._num_batches, self._resumed = {}, 0, 0, False
        self.packed_dataset.set_epoch(epoch)

    @property
    def global_packs(self) -> int:
        """Packs of the global sequence that all ranks in step have delivered in this epoch."""
        return self._first_pack + self._num_batches * self.packed_dataset.world_size * self._feed.packs_per_batch

    # -- iteration -----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self._resumed:
            self._states, self._first_pack, self._num_batches = {}, 0, 0
        self._feed.states = dict(self._states)
        self._feed.control[_EPOCH] = self.epoch
        self._feed.control[_FIRST_PACK] = self._first_pack
        self._feed.control[_RESUMED] = int(self._resumed)
        self._resumed = False
        if self.num_workers:  # about to be forked
            self.packed_dataset.prior()  # once, instead of in every worker
            release_free_memory()
        return self._batches(super().__iter__())

    def _batches(self, batches: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        readers = self._feed.topology().num_readers
        ended: set[int] = set()
        held: list[dict[str, Any]] = []  # empty batches: delivered only if data follows them
        read = self._from_readers(batches)
        for number, batch in enumerate(read if self.agreement is None else self.agreement.on(read)):
            if not is_filler(batch):
                for empty in held:
                    yield self._deliver(empty)
                held = []
                yield self._deliver(batch)
                continue
            held.append(batch)
            if all(row.exhausted for row in batch["rows"]):
                ended.add(number % readers)
            self._raise_fatal(batch)
            if len(ended) == readers:
                break
        for empty in held:
            self._commit(empty)

    def _from_readers(self, batches: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """`batches`; a reader process that died is named, however its death was noticed.

        Its last tensors are in memory that only it can hand over, so that its end can show as an end of file or a
        broken connection while the kernel still counts it among the living.
        """
        try:
            yield from batches
        except (OSError, EOFError, RuntimeError) as error:
            workers = getattr(self._iterator, "_workers", [])
            if workers and not isinstance(error, RuntimeError):
                ending = wait([worker.sentinel for worker in workers], timeout=5)
                for worker in workers:
                    if worker.sentinel in ending:
                        worker.join()  # its exit code comes a moment after its files are closed
            dead = [f"{n} (pid {w.pid}, {_exit_of(w.exitcode)})" for n, w in enumerate(workers) if w.exitcode]
            if not dead:
                raise
            raise RuntimeError(f"DataLoader worker {', '.join(dead)} exited unexpectedly") from error

    def _deliver(self, batch: dict[str, Any]) -> dict[str, Any]:
        self._raise_fatal(batch)
        self._commit(batch)
        self._num_batches += 1
        batch.pop("rows")
        return batch

    def _commit(self, batch: dict[str, Any]) -> None:
        for row in batch["rows"]:
            self._states[str(row.lane)] = row.state
            self._events.extend(
                {**event, "epoch": self.epoch, "lane": row.lane, "turn": row.turn} for event in row.events
            )
        if any(row.events for row in batch["rows"]):
            self._check_bad_fraction()

    def _check_bad_fraction(self) -> None:
        """Stop when too many samples are bad. The first thousand cannot prove a small share and count in full."""
        dataset, ledger = self.packed_dataset, self.ledger
        fraction = dataset.config.max_bad_fraction
        share = dataset.num_positions // dataset.world_size
        allowed = fraction * max(ledger.samples_in, min(MIN_SAMPLES_TO_JUDGE, share))
        if fraction < 1.0 and ledger.samples_quarantined > allowed:
            reasons = ", ".join(f"{n} {reason}" for reason, n in ledger.quarantined.most_common(3))
            raise UserError(
                f"max_bad_fraction {fraction}: {ledger.samples_quarantined} of {ledger.samples_in} samples read are "
                f"bad ({reasons}); quarantine.jsonl names them. Mend them, or raise max_bad_fraction"
            )

    @staticmethod
    def _raise_fatal(batch: dict[str, Any]) -> None:
        for row in batch["rows"]:
            if row.fatal:
                raise UserError(row.fatal)

    def filler_batch(self) -> dict[str, Any]:
        """A batch without samples, counted as delivered: what this rank does while others still have data."""
        batch = self.collate_fn([filler_row()])
        batch.pop("rows")
        self._num_batches += 1
        return batch

    # -- what happened ---------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """What became of the samples of this epoch, as far as its packs were handed out on this rank."""
        merged = Ledger()
        for state in self._states.values():
            lane = Ledger()
            lane.load_state_dict(state["ledger"])
            merged = merged.merged(lane)
        return merged

    def take_events(self) -> list[dict[str, Any]]:
        """Samples that could not be used since the last call: their ids, reasons and details."""
        events, self._events = self._events, []
        return events

    # -- state -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's part; `merge_states` joins the ranks' (docs/resume.md has the schema)."""
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "global_packs": self.global_packs,
            "options": self.packed_dataset.fingerprint(),
            "prior": self.packed_dataset.known_prior,
            "lanes": dict(self._states),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, check_options: bool = True) -> None:
        """Go on after a merged state (or one of a single rank) at the next iteration, on any topology.

        Raises:
            UserError: another version, other options (named), or the state of a part of the ranks only.
        """
        self.packed_dataset.adopt_lanes(state)
        check_state(state, self.packed_dataset.fingerprint() if check_options else None)
        self.packed_dataset.adopt_prior(state)
        self._iterator = None  # workers that are alive know nothing of the new state
        self.packed_dataset.set_epoch(state["epoch"])
        self._first_pack, self._num_batches = state["global_packs"], 0
        self._resumed = True
        topology = Topology(  # refuses a count that does not divide the lanes, before the first batch
            num_lanes=self.packed_dataset.num_lanes,
            num_ranks=self.packed_dataset.world_size,
            num_workers=self._feed.num_workers,
            packs_per_batch=self._feed.packs_per_batch,
            first_pack=self._first_pack,
        )
        # Other ranks' lanes are theirs to go on with, and to save.
        own = (topology.reader_lanes(self.packed_dataset.rank, w) for w in range(topology.num_readers))
        self._states = {
            str(lane): state["lanes"][str(lane)] for lanes in own for lane in lanes if str(lane) in state["lanes"]
        }


def _exit_of(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"{name}: is the machine out of memory?" if -code == signal.SIGKILL else name


def damage_events(dataset: PackedDataset) -> list[dict[str, Any]]:
    """What is broken in the files and belongs to no sample, as events like those of samples that leave."""
    return [
        {"id": f"{source.name}#damage{number}", "source": error.source or source.name}
        | {"reason": error.reason, "detail": error.detail, "epoch": 0, "lane": -1, "turn": -1}
        for source in dataset.sources
        for number, error in enumerate(source.damage)
    ]


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One state of the run from the states of its ranks, saved at the same step.

    Raises:
        UserError: they are not of the same step.
    """
    states = list(states)
    merged = {**states[0], "lanes": {}}
    for state in states:
        for key in ("version", "epoch", "global_packs"):
            if state[key] != merged[key]:
                raise UserError(f"resume: ranks saved different {key}: {merged[key]} and {state[key]}")
        merged["lanes"].update(state["lanes"])
    return merged


def build_loader(
    dataset: PackedDataset,
    *,
    packs_per_batch: int = 1,
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
    """The loader over `dataset` with `packed_collate_fn` set up from its encoder.

    Args:
        packs_per_batch: packs flattened into one row.
        num_workers: reader processes; ranks x workers x packs_per_batch must divide the lanes.
        loss_reduction: `token`, `sample` or `square`.
        pad_to: pad each row to this many tokens (strict mode).
        pad_seq_to_mult: pad each segment to a multiple of this many tokens; it must divide the multiple
            (`pad_to_multiple_of`) by which the dataset's packs were filled.
        pad_cu_seqlens_to: also give the boundaries at this constant length, for CUDA graphs.
        pin_memory, persistent_workers, prefetch_factor, timeout: as torch's DataLoader.

    Raises:
        UserError: the readers do not divide the lanes (lists the counts that do), or rows would exceed the budget.
    """
    if dataset.config.pad_to_multiple_of % pad_seq_to_mult:
        raise UserError(
            f"pad_seq_to_mult {pad_seq_to_mult} does not divide pad_to_multiple_of "
            f"{dataset.config.pad_to_multiple_of}, which budgets are counted with: rows would exceed them; set both to "
            "the same number"
        )
    collate = partial(
        packed_collate_fn,
        pad_token_id=dataset.encoder.pad_token_id,
        image_size=dataset.encoder.config.image_size,
        loss_reduction=loss_reduction,
        pad_to=pad_to,
        pad_seq_to_mult=pad_seq_to_mult,
        pad_cu_seqlens_to=pad_cu_seqlens_to,
        image_token_id=dataset.encoder.image_context_id,
    )
    return PackLoader(
        dataset,
        packs_per_batch=packs_per_batch,
        num_workers=num_workers,
        collate_fn=collate,
        pin_memory=pin_memory,
        persistent_workers=persistent_workers,
        prefetch_factor=prefetch_factor,
        timeout=timeout,
    )
