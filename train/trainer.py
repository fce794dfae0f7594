"""The Hugging Face Trainer on packs.

What it changes, and why:

* Batches come from our loader, step by step of the one plan; accelerate neither shards nor dispatches them.
* One small all-reduce a step, on the CPU, before the step: sum of loss weights (the normaliser), the
  figures of the metrics, and whether a rank failed. It is the only extra collective.
* The loss is the sum of w*ce over the step divided by that normaliser, exact over ranks and accumulation.
* All ranks make the same plan, so they have as many steps and end together. A step of which no sample could be
  decoded is passed over: without data nothing moves the weights.
* A checkpoint holds the state of the plan (`packing_state.json`), written last: its presence marks the
  checkpoint as complete.
* A run that is asked to (interruption.py) saves at the end of a step and stops.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from internvl_pack.errors import UserError
from internvl_pack.estimate.epochs import RunEstimate, estimate_epochs
from internvl_pack.ledger import Ledger, Losses
from internvl_pack.model.flops import flop_counts, peak_flops, trained_parts
from internvl_pack.parallel.agreement import OtherRankFailed
from internvl_pack.parallel.slices import count_slice_targets
from internvl_pack.stream.dataset import PackedDataset
from internvl_pack.stream.loader import PackLoader, build_loader

from . import checkpoint_folders
from .checkpoint import load_packing_state, make_universal
from .evaluation import SampleSums, add_sample_losses, figures, merge_sums, tell_left_out
from .foresight import untrained_by_text
from .interruption import StopRequest
from .optimizer_step import StepTrainer
from .ranks import Ranks, others_answer
from .router_loss import RouterLoss
from .sample_log import batch_ids
from .saving import Saving

logger = logging.getLogger(__name__)

MODEL_KEYS = (
    "input_ids",
    "labels",
    "position_ids",
    "loss_weight",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "pixel_values",
    "image_offsets",
    "attention_mask",
    "num_loss_tokens",
    "num_image_tokens",
    "num_real_tokens",
)
_COUNTS = ("num_samples", "num_packs", "num_real_tokens", "num_tokens", "num_tiles", "num_loss_tokens")
_VECTOR = ("loss_weight", "has_data", "failed", "capacity", *_COUNTS)


class PackTrainer(StepTrainer):
    """Trains a `PackedModel` on packs, as transformers' Trainer does on its datasets.

        trainer = PackTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
        trainer.train()

    Args:
        model: the packed model.
        args: the training arguments, a `PackTrainingArguments`.
        train_dataset: the packs; or a loader of them, packed or padded, that was built otherwise.
        eval_dataset: held-out packs, unshuffled, or their loader; see evaluation.py.
        loss_reduction_all_gather: False normalises by each rank's own weights, as InternVL's scripts
            do by default; the result then depends on how samples fell on ranks.
        resume_ignore_options: go on from a checkpoint that was saved with other packing options.
        saving: how the model is written; default: as a native checkpoint, LoRA merged in.
        ranks: the place of this process; default: every process has rows of its own.
        router_loss: the balance loss of a model whose routers are balanced.
        also_saved: what else `packing_state.json` holds, for whoever goes on from it.

    Attributes:
        stopped_by: what made the run save and stop before its end (interruption.py), or nothing.
        estimate: how many steps the epochs have, and what packs hold.
        earlier_ledger, earlier_epochs: of the epochs that had ended before the checkpoint that the run goes on from.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: Any,
        train_dataset: PackedDataset | PackLoader,
        *,
        eval_dataset: PackedDataset | PackLoader | None = None,
        loss_reduction_all_gather: bool = True,
        resume_ignore_options: bool = False,
        saving: Saving | None = None,
        ranks: Ranks | None = None,
        also_saved: Mapping[str, Any] | None = None,
        router_loss: RouterLoss | None = None,
        **kwargs: Any,
    ) -> None:
        self.loader = loader = _loader_of(train_dataset, args)
        self.eval_loader = None if eval_dataset is None else _loader_of(eval_dataset, args, evaluates=True)
        if self.eval_loader is not None:
            kwargs["eval_dataset"] = self.eval_loader.packed_dataset  # the Trainer only asks whether there is one
        super().__init__(model=model, args=args, **kwargs)
        self.saving = saving or Saving()
        self.ranks = ranks or Ranks.here()
        self.also_saved = dict(also_saved or {})
        self.router_loss = router_loss
        self.sequence_group = getattr(model, "sequence_group", None)
        self.loss_reduction_all_gather = loss_reduction_all_gather
        self.resume_ignore_options = resume_ignore_options
        self.steps_without_samples = 0  # passed over
        # Our loss is divided by the normaliser of the whole step; nothing else may scale it.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self.metrics = StepMetrics(loader, model, args.device, self.ranks.processes)
        self.estimate: RunEstimate | None = None
        self.epoch_ledgers: list[Ledger] = []
        self.earlier_ledger, self.earlier_epochs = Ledger(), 0
        self.step_sample_ids: list[str] = []  # what this rank trains on in the current step
        self.stop_request = StopRequest(args.output_dir, self.ranks.process)
        self.stopped_by = ""
        self._group: dist.ProcessGroup | None = None
        self._normalizer = 0.0
        self.add_callback(_EpochControl(self))

    # -- data ------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> PackLoader:
        return self.loader

    def set_initial_training_values(
        self, args: Any, dataloader: Any, *_: Any
    ) -> tuple[int, int, int, int, int, int | None, int]:
        """Number of steps: `max_steps` where given, else counted or estimated from the data."""
        num_epochs = math.ceil(args.num_train_epochs) if args.max_steps <= 0 else 1
        estimate = self._estimate(num_epochs)
        if args.max_steps > 0:
            num_epochs, total = sys.maxsize, args.max_steps
        else:
            total = max(1, estimate.total_steps(args.num_train_epochs))
            logger.warning(
                "%d optimizer steps in %g epochs (%s), %d packs a step",
                total,
                args.num_train_epochs,
                estimate.how if estimate.exact else f"{estimate.how}; the run ends with the data, not at this number",
                self.loader.packs_per_step,
            )
        batches = max(1, estimate.steps(0)) * args.gradient_accumulation_steps
        num_samples = self.loader.packed_dataset.num_positions
        # The epoch ends with the plan (get_batch_samples), so the loop itself has no limit.
        return num_epochs, sys.maxsize, num_samples, num_samples, self.loader.packs_per_step, batches, total

    def _estimate(self, num_epochs: int) -> RunEstimate:
        """Steps of the epochs and what packs hold: the first rank finds out, the others hear."""

        def found() -> RunEstimate:
            return estimate_epochs(self.loader.packed_dataset, self.loader.packs_per_step, num_epochs)

        self.estimate = estimate = self.ranks.from_first(found, self._cpu_group())
        if self.loader.packed_dataset.config.packing:
            logger.warning(estimate.first.line())
            if (trouble := estimate.first.trouble()) is not None:
                logger.warning(trouble)
        if (trouble := untrained_by_text(trained_parts(self.model), estimate.first.tiles)) is not None:
            logger.warning(trouble)
        return estimate

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], torch.Tensor | None]:
        """The next step's batches and its normaliser; no batches at the end of the epoch."""
        if 0 < self.args.max_steps <= self.state.global_step:  # resumed where it had ended
            self.control.should_training_stop = True
            return [], None
        defer_worker_death()
        started = time.perf_counter()
        while True:
            batches, error = self._next_step(epoch_iterator)
            figures = self._reduce(batches, failed=error is not None)
            if figures["failed"]:
                self._fail_together(error)
            if not figures["has_data"]:
                self.control.should_epoch_stop = True
                self._end_epoch()
                return [], None
            if figures["num_samples"] or figures["num_packs"]:
                break
            self.steps_without_samples += 1
            logger.warning("a step is passed over: none of its samples could be decoded, quarantine.jsonl names them")
        # The Trainer makes gradient_accumulation_steps of every step; the last one of an epoch may have fewer.
        fillers = self.args.gradient_accumulation_steps - len(batches)
        batches += [self.loader.filler_batch() for _ in range(fillers)]
        self.metrics.begin_step(figures, time.perf_counter() - started)
        if self.router_loss is not None:
            self.router_loss.begin_step(batches, figures["num_real_tokens"])
        self.step_sample_ids = [i for batch in batches for i in batch_ids(batch)]
        # Gradients are averaged over all processes afterwards, and those that share a row each have a part of its sum:
        # hence the division. A step in which nothing is supervised has a zero sum: any normaliser gives zero.
        if self.loss_reduction_all_gather:
            weights, averaged = figures["loss_weight"], self.ranks.processes
        else:
            weights, averaged = figures["own_loss_weight"], self.ranks.sequence_parallel_size
        self._normalizer = weights / averaged if weights > 0 else 1.0
        return batches, None  # a number on the host, where compute_loss finds it: the device is not waited for

    def _next_step(self, batches: Iterator[dict[str, Any]]) -> tuple[list[dict[str, Any]], Exception | None]:
        """This rank's micro-batches of the next step, none at the end of the epoch; or what reading them raised."""
        step: list[dict[str, Any]] = []
        try:
            for batch in batches:
                step.append(batch)
                if batch["progress"].ends_step:
                    break
        except Exception as problem:
            return step, problem
        return step, None

    def _fail_together(self, error: Exception | None) -> NoReturn:
        """Every rank ends with the message of those that cannot read on, instead of waiting for them."""
        errors = self._gather(_told(error))
        rank, (kind, message) = next((rank, told) for rank, told in enumerate(errors) if told)
        if kind == UserError.__name__:
            raise UserError(message) from error
        raise RuntimeError(f"rank {rank} cannot read its data: {kind}: {message}") from error

    def _reduce(self, batches: list[dict[str, Any]], *, failed: bool) -> dict[str, float]:
        """Sums over the data ranks, and the slowest one's modelled cost against the mean."""
        ranks = self.ranks
        own = {key: float(sum(b[key] for b in batches)) for key in _COUNTS}
        own["loss_weight"] = sum(float(b["loss_weight"].sum(dtype=torch.float64)) for b in batches)
        own["has_data"] = float(bool(batches))
        own["capacity"] = self.metrics.capacity(batches)
        vector = torch.zeros(len(_VECTOR) + ranks.data_ranks, dtype=torch.float64)
        if ranks.leads:  # what a row holds counts once, however many share it
            vector[: len(_VECTOR)] = torch.tensor([own.get(key, 0.0) for key in _VECTOR], dtype=torch.float64)
            vector[len(_VECTOR) + ranks.data_rank] = self.metrics.cost(batches)
        vector[_VECTOR.index("failed")] = failed
        if ranks.processes > 1:
            with others_answer(self.args.ddp_timeout):
                dist.all_reduce(vector, group=self._cpu_group())
        values = vector.tolist()
        figures = dict(zip(_VECTOR, values, strict=False))
        costs = values[len(_VECTOR) :]
        figures["flops"] = sum(costs)
        figures["balance"] = sum(costs) / len(costs) / max(costs) if max(costs) > 0 else 1.0
        figures["own_loss_weight"] = own["loss_weight"]
        return figures

    def _end_epoch(self) -> None:
        ledger = self.ledger_of_epoch()
        for source in self.loader.packed_dataset.samples.sources:
            for damage in source.damage:  # broken parts of files, which belong to no row
                ledger.refuse(damage.reason)
        ledger.check()
        self.epoch_ledgers.append(ledger)
        if not ledger.samples_packed:
            reasons = ", ".join(f"{n} {reason}" for reason, n in sorted((ledger.dropped + ledger.quarantined).items()))
            raise UserError(f"no sample of the data can be trained on ({reasons}): quarantine.jsonl names them")

    def ledger_of_epoch(self) -> Ledger:
        """What became of the samples of this epoch so far; all processes call it together."""
        return self.loader.ledger_of(self._lost())

    def _lost(self) -> Losses:
        """What no rank could decode in this epoch; all processes call it together."""
        return Losses.merged(self.ranks.gather_books(self.loader.losses.state_dict(), self._cpu_group()))

    # -- loss ------------------------------------------------------------------------------------------

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """To the device without blocking; dtypes stay (DeepSpeed's own cast would round the loss weights)."""
        group = self.sequence_group
        # Boundaries stay on the host, where the model checks them without waiting for the device, and so do pixels of
        # a shared row: each rank takes its tiles there.
        on_host = ("cu_seqlens", "cu_seqlens_padded") + (() if group is None else ("pixel_values",))
        more = {} if group is None else {"num_slice_loss_tokens": count_slice_targets(inputs, group)}
        return more | {
            key: value.to(self.args.device, non_blocking=True)
            if isinstance(value, torch.Tensor) and key not in on_host
            else value
            for key, value in inputs.items()
            if key in MODEL_KEYS
        }

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        if self.router_loss is not None:
            self.router_loss.before_forward(model, self._prepare_inputs)
        outputs = model(**inputs, loss_normalizer=self._normalizer)
        if self.router_loss is not None:
            outputs.loss = outputs.loss + self.router_loss.of(outputs)
        self.read_loss(outputs["loss"])
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs.update(self.metrics.since_last_log())
            if self.router_loss is not None and (router_loss := self.router_loss.last()) is not None:
                logs["router_loss"] = router_loss
        super().log(logs, start_time)

    # -- evaluation ------------------------------------------------------------------------------------

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> dict:
        """Loss of the held-out data a token, a sample, and by dataset (evaluation.py); logged, and returned."""
        assert self.eval_loader is not None, "evaluate without an eval_loader"
        model = self.model_wrapped
        was_training = model.training
        model.eval()
        sums: SampleSums = {}
        batches = iter(self.eval_loader)
        with torch.no_grad():
            while True:
                batch, error = None, None
                try:
                    batch = next(batches, None)
                except Exception as problem:
                    error = problem
                flags = torch.tensor([batch is not None, error is not None], dtype=torch.int64)
                if self.ranks.processes > 1:  # sharded weights need every rank in every forward
                    dist.all_reduce(flags, group=self._cpu_group())
                more, failed = flags.tolist()
                if failed:
                    self._fail_together(error)
                if not more:
                    break
                batch = batch if batch is not None else self.eval_loader.filler_batch()
                with self.compute_loss_context_manager():
                    outputs = model(**self._prepare_inputs(batch))
                add_sample_losses(sums, batch, outputs.target_losses, outputs.target_positions)
        model.train(was_training)
        events = self.eval_loader.take_events()
        found = self._gather((sums, events if self.ranks.leads else []))
        sums = merge_sums([part for part, _ in found])
        tell_left_out([event for _, events in found for event in events])
        names = [spec.name for spec in self.eval_loader.packed_dataset.samples.specs]
        metrics = figures(sums, names, metric_key_prefix)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # -- checkpoints -----------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """A checkpoint of the model inside (saving.py); the Trainer's own would keep the wrapper's names."""
        if not self.args.should_save:
            return
        folder = output_dir or self.args.output_dir
        assert folder is not None, "an option that is asked for"
        self.saving.write(self.accelerator.unwrap_model(self.model), folder, state_dict, self.processing_class)
        torch.save(self.args, os.path.join(folder, "training_args.bin"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """Weights of a checkpoint that `_save` wrote; DeepSpeed loads its own."""
        self.saving.read(self.accelerator.unwrap_model(model or self.model), resume_from_checkpoint)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        output_dir = Path(self._get_output_dir(trial=trial))
        folder = output_dir / f"checkpoint-{self.state.global_step}"
        limit, self.args.save_total_limit = self.args.save_total_limit, None  # the Trainer would remove before the mark
        try:
            with checkpoint_folders.writing_to(folder):
                if self.args.should_save:
                    # What a killed run left there, perhaps on more ranks, would be read with what is written now.
                    checkpoint_folders.remove(folder)
                self.wait_for_all()
                super()._save_checkpoint(model, trial)
                if not self.args.save_only_model:  # else nothing to go on from: it must not look complete
                    self._mark(folder)
        finally:
            self.args.save_total_limit = limit
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            checkpoint_folders.rotate(output_dir, limit, None if best is None else Path(best))

    def _mark(self, folder: Path) -> None:
        """Declare a checkpoint complete, with the state of the data; all ranks call it together."""
        losses = self._lost().state_dict()
        if self.args.should_save:
            more = {
                "world_size": self.ranks.processes,  # which the optimizer's shards are for
                "sequence_parallel_size": self.ranks.sequence_parallel_size,
                "ended": self._books_of_ended_epochs(),
                "totals": self.metrics.total,
                checkpoint_folders.OPTIMIZER: checkpoint_folders.optimizer_options(self.args),
            }
            checkpoint_folders.mark(folder, self.loader.state_dict() | {"losses": losses} | more | self.also_saved)

    def _books_of_ended_epochs(self) -> dict[str, Any]:
        return {"epochs": self.earlier_epochs + len(self.epoch_ledgers), "ledger": self.ended_ledger().state_dict()}

    def ended_ledger(self) -> Ledger:
        """All epochs of the run that have ended, those before a resume included."""
        total = self.earlier_ledger
        for ledger in self.epoch_ledgers:
            total = total.merged(ledger)
        return total

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(resume_from_checkpoint, str) and self.is_deepspeed_enabled:
            saved = load_packing_state(resume_from_checkpoint)["world_size"]
            if saved != self.ranks.processes:
                logger.warning("resume: saved on %d ranks, going on with %d", saved, self.ranks.processes)
                if self.ranks.is_first:
                    make_universal(Path(resume_from_checkpoint))
                if self.ranks.processes > 1:
                    dist.barrier(group=dist.new_group(backend="gloo", timeout=timedelta(hours=6)))  # it takes its time
                self.accelerator.state.deepspeed_plugin.hf_ds_config.config["checkpoint"] = {"load_universal": True}
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, num_epochs: int, resume_from_checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        super()._init_training_state(max_steps, steps_per_epoch, num_epochs, resume_from_checkpoint, trial)
        if resume_from_checkpoint is None:
            return 0, 0
        state = load_packing_state(resume_from_checkpoint)
        for line in checkpoint_folders.overruled(state, self.args):
            logger.warning("resume: %s", line)
        self.loader.load_state_dict(state, check_options=not self.resume_ignore_options)
        if "ended" in state:
            try:
                self.earlier_epochs = int(state["ended"]["epochs"])
                self.earlier_ledger.load_state_dict(state["ended"]["ledger"])
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise UserError(
                    f"resume: the ledger of the ended epochs in {resume_from_checkpoint} is damaged "
                    f"({type(error).__name__}: {error}): go on from an earlier checkpoint"
                ) from None
        self.metrics.total = dict(state.get("totals", {}))
        return self.loader.epoch, 0

    # -- ranks -----------------------------------------------------------------------------------------

    def asked_to_stop(self) -> str:
        """What asked any rank to save and stop; all ranks call it together at the end of a step."""
        return self.stop_request.agree(self._cpu_group())

    def wait_for_all(self) -> None:
        """Until every rank is here; before a rank leaves with a status that makes launchers end the others."""
        if self.ranks.processes > 1:
            dist.barrier(group=self._cpu_group())

    def _gather(self, value: Any) -> list[Any]:
        return self.ranks.gather(value, self._cpu_group())

    def _cpu_group(self) -> dist.ProcessGroup | None:
        """A gloo group of all processes, whose small reductions do not wait for the device; None for one alone."""
        if self._group is None and self.ranks.processes > 1:
            # A rank that is stopped, not dead, is noticed by this group's time-out alone.
            self._group = dist.new_group(backend="gloo", timeout=self.args.ddp_timeout_delta)
        return self._group


def _told(error: Exception | None) -> tuple[str, str] | None:
    if error is None or isinstance(error, OtherRankFailed):  # that one tells
        return None
    return type(error).__name__, str(error)


def defer_worker_death() -> None:
    """Let a reader process that died be noticed where its data is missed, not in the middle of a collective.

    torch raises from a SIGCHLD handler, wherever the main thread is: other ranks would then wait in the
    all-reduce that this one never joins. Without the handler the loader itself notices within seconds.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGCHLD) is not signal.SIG_DFL:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _loader_of(data: PackedDataset | PackLoader, args: Any, *, evaluates: bool = False) -> PackLoader:
    """The loader of a dataset by the training arguments; held-out packs are a row each and a step by themselves."""
    if isinstance(data, PackLoader):
        return data
    workers = args.dataloader_num_workers
    return build_loader(
        data,
        packs_per_batch=1 if evaluates else args.per_device_train_batch_size,
        accumulation=1 if evaluates else args.gradient_accumulation_steps,
        num_workers=workers,
        pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
        persistent_workers=args.dataloader_persistent_workers and workers > 0 and not evaluates,
        prefetch_factor=args.dataloader_prefetch_factor if workers else None,
    )


class _EpochControl(TrainerCallback):
    """Ends the run with the data, not with an estimated number of steps."""

    def __init__(self, trainer: PackTrainer) -> None:
        self.trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.first_step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        trainer.metrics.end_step()
        self._set_epoch_and_end(args, state, control)
        if trainer.asked_to_stop() and not control.should_training_stop:  # else the run has ended anyway
            trainer.stopped_by = trainer.stop_request.agreed
            # Nothing that takes time but the checkpoint, and that with the optimizer's state.
            args.save_only_model = False
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def _set_epoch_and_end(self, args: Any, state: Any, control: Any) -> None:
        trainer = self.trainer
        estimate, loader = trainer.estimate, trainer.loader
        assert estimate is not None, "made before the first step"
        state.epoch = loader.epoch + min(1.0, loader.steps_done / max(1, estimate.steps(loader.epoch)))
        if args.max_steps > 0 or not float(args.num_train_epochs).is_integer():
            return  # a number of steps it is; whole epochs end with the plan
        if state.global_step >= state.max_steps:
            control.should_training_stop = False
            state.max_steps = state.global_step + 1

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.trainer.stopped_by:  # the epoch has not ended
            control.should_log = control.should_evaluate = control.should_save = False
            return
        # A run resumed at the very end of an epoch finds nothing left in it; the Trainer would stop there.
        if state.global_step == self.first_step and (args.max_steps <= 0 or state.global_step < state.max_steps):
            control.should_training_stop = False

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.max_steps = state.global_step


class StepMetrics:
    """Figures of the steps since the last log, summed over data ranks; those a GPU are of all `processes`."""

    def __init__(self, loader: PackLoader, model: torch.nn.Module, device: torch.device, processes: int) -> None:
        self._config = loader.packed_dataset.config
        self._flops = flop_counts(model.config, **trained_parts(model))
        self._on_cuda = device.type == "cuda"
        self._peak_flops = peak_flops(torch.cuda.get_device_name(device)) if self._on_cuda else None
        self._max_tiles = loader.budget[1]
        self._processes = processes
        self._sums: dict[str, float] = {}
        self._steps = 0
        self._started = time.perf_counter()
        self.total: dict[str, float] = {}  # of the whole run
        self.here: dict[str, float] = {}  # of this process: since the run began or went on
        self.step_times: list[tuple[float, float]] = []  # (end of step in s, real tokens of the step)

    def capacity(self, batches: list[dict[str, Any]]) -> float:
        """Tokens that the step's rows could have held."""
        if self._config.packing:
            return float(sum(b["num_packs"] for b in batches) * self._config.max_packed_tokens)
        return float(sum(b["num_tokens"] for b in batches))

    def cost(self, batches: list[dict[str, Any]]) -> float:
        """What a data rank computes in a step: floating-point operations (docs/performance.md has the formula)."""
        return float(sum(self._flops.of(b) for b in batches))

    def begin_step(self, figures: dict[str, float], waited: float) -> None:
        self._now = figures | {"data_wait_s": waited}

    def end_step(self) -> None:
        for key, value in self._now.items():
            self._sums[key] = self._sums.get(key, 0.0) + value
            self.total[key] = self.total.get(key, 0.0) + value
            self.here[key] = self.here.get(key, 0.0) + value
        self._steps += 1
        self.step_times.append((time.perf_counter(), self._now["num_real_tokens"]))

    def since_last_log(self) -> dict[str, float]:
        if not self._steps:
            return {}
        elapsed = time.perf_counter() - self._started
        sums, steps = self._sums, self._steps
        self._sums, self._steps, self._started = {}, 0, time.perf_counter()
        tile_capacity = sums["num_packs"] * self._max_tiles
        logs = {
            "tokens_per_s": sums["num_real_tokens"] / elapsed,
            "tokens_per_s_per_gpu": sums["num_real_tokens"] / elapsed / self._processes,
            "samples_per_s": sums["num_samples"] / elapsed,
            "tiles_per_s": sums["num_tiles"] / elapsed,
            "token_fill": sums["num_real_tokens"] / max(1.0, sums["capacity"]),
            "tile_fill": sums["num_tiles"] / max(1.0, tile_capacity),
            "samples_per_pack": sums["num_samples"] / max(1.0, sums["num_packs"]),
            "data_wait": sums["data_wait_s"] / elapsed,
            "rank_balance": sums["balance"] / steps,
            "tflops_per_s_per_gpu": sums["flops"] / elapsed / self._processes / 1e12,
        }
        if self._peak_flops is not None:
            logs["mfu"] = sums["flops"] / elapsed / self._processes / self._peak_flops
        if self._on_cuda:
            logs["memory_peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        return logs
