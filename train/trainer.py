"""The Hugging Face Trainer on packs.

What it changes, and why:

* Batches come from our loader, step by step of the one plan; accelerate neither shards nor dispatches them.
* One small all-reduce a step (step_sync.py). It is the only extra collective.
* The loss is the sum of w*ce over the step divided by the step's sum of w, exact over ranks and accumulation.
* All ranks make the same plan, so they have as many steps and end together. A step of which no sample could be
  decoded is passed over: without data nothing moves the weights.
* A checkpoint holds the state of the plan too (resume.py).
* A run that is asked to (interruption.py) saves at the end of a step and stops.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HfHubHTTPError

from internvl_pack.batch.collate import ON_HOST, to_device
from internvl_pack.errors import UserError
from internvl_pack.estimate.epochs import estimate_epochs
from internvl_pack.estimate.figures import RunEstimate
from internvl_pack.model.packed import PackedModel
from internvl_pack.model.sharded import put_back, shard
from internvl_pack.options import count
from internvl_pack.parallel.agreement import Agreement
from internvl_pack.parallel.slices import count_slice_targets
from internvl_pack.stream.dataset import PackedDataset
from internvl_pack.stream.loader import PackLoader, packed_collator

from . import sharded
from .accounting import Ledgers, Quarantine, SampleLog, batch_ids
from .arguments import PackTrainingArguments, compute_dtype
from .callbacks import EpochControl, log_estimate
from .checkpoint import find_checkpoint
from .evaluation import figures, log_left_out, merge_sums, sample_losses
from .interruption import StopRequest, defer_worker_death
from .metrics import StepMetrics
from .objective import KEYS as PAIR_KEYS
from .objective import PairObjective
from .ranks import Ranks
from .resume import ResumableTrainer
from .router_loss import RouterLoss
from .saving import Saving
from .step_sync import OF_PAIRS, Batch, StepSync

logger = logging.getLogger(__name__)

# Its own class of errors has those of the library for HTTP among its bases, whichever that is.
HUB_ERRORS: tuple[type[Exception], ...] = (OSError, *HfHubHTTPError.__bases__)
MODEL_KEYS = frozenset(inspect.signature(PackedModel.forward).parameters)


class PackTrainer(ResumableTrainer):
    """Trains a `PackedModel` on packs, as transformers' Trainer does on its datasets.

        trainer = PackTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
        trainer.train()

    Args:
        model: the packed model.
        args: the training arguments.
        train_dataset: the packs.
        eval_dataset: held-out packs, unshuffled; see evaluation.py.
        data_collator: rows to a batch; default: `packed_collator(train_dataset)`.
        processing_class: the tokenizer, saved with the model.
        row_budget: (tokens, tiles) that a row may hold, where that is not the dataset's budget of a pack.
        loss_reduction_all_gather: False normalises by each rank's own weights, as InternVL's scripts
            do by default; the result then depends on how samples fell on ranks.
        router_loss_coef: weight of the balance loss of a model that `balance_routers`.
        objective: of pairs of answers (objective.py); None for the loss of the labelled tokens.
        saving: how the model is written; default: as the arguments say.
        also_saved: what else `packing_state.json` holds, for whoever goes on from it.
        more: as transformers' Trainer takes it: callbacks, optimizers, ...

    Attributes:
        stopped_by: what made the run save and stop before its end (interruption.py), or nothing.
        estimate: how many steps the epochs have, and what packs hold; made before the first step.
        steps_without_samples: passed over, as none of their samples could be decoded.
        step_sample_ids: what this rank trains on in the current step.
    """

    args: PackTrainingArguments
    estimate: RunEstimate

    def __init__(
        self,
        model: PackedModel,
        args: PackTrainingArguments,
        train_dataset: PackedDataset,
        *,
        eval_dataset: PackedDataset | None = None,
        data_collator: Callable[..., Batch] | None = None,
        processing_class: Any = None,
        row_budget: tuple[int, int] | None = None,
        loss_reduction_all_gather: bool = True,
        router_loss_coef: float = 0.0,
        objective: PairObjective | None = None,
        saving: Saving | None = None,
        also_saved: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        collator: Any = data_collator or packed_collator(train_dataset)
        if args.sharding:
            shard(model, args.device, compute_dtype(args))  # before the optimizer takes its parameters
        super().__init__(
            model=model,
            args=args,
            data_collator=collator,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **more,
        )
        self.train_dataset: Any = train_dataset  # transformers refuses one without a length
        self.ranks = Ranks.of(args)
        group = model.sequence_group
        self._agreement = None if group is None else Agreement(group, args.ddp_timeout_delta)
        self._loader: PackLoader | None = None
        self._eval_loader: PackLoader | None = None
        config = train_dataset.config
        self.row_budget = row_budget or (config.max_packed_tokens, config.num_images_expected)
        self.saving = saving or Saving(args.save_format, args.merge_lora, encode=train_dataset.encoder.config)
        self.also_saved = dict(also_saved or {})
        self.router_loss = None if model.routing is None else RouterLoss(router_loss_coef, self.ranks.world_size)
        self.objective = objective
        if objective is not None:
            objective.trainer = self
            self.add_callback(objective)
        # Our loss is divided by the normaliser of the whole step; nothing else may scale it.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self._normalizer = 0.0
        self.metrics = StepMetrics(config, self.row_budget[1], model, args.device, self.ranks.world_size)
        self.sync = StepSync(self.ranks, self.metrics, over_all_ranks=loss_reduction_all_gather)
        self.steps_without_samples = 0
        self.step_sample_ids: list[str] = []
        self.stop_request = StopRequest(self.output_dir, self.ranks.rank)
        self.stopped_by = ""
        self.ledgers = Ledgers(self.loader, self.ranks)
        self.add_callback(EpochControl(self))
        self.add_callback(self.ledgers)
        if args.log_sample_ids:
            self.add_callback(SampleLog(self))

    def init_hf_repo(self, *args: Any, **options: Any) -> None:
        """As transformers' Trainer, before the first step.

        Raises:
            UserError: the hub is out of reach, or refuses.
        """
        try:
            super().init_hf_repo(*args, **options)
        except HUB_ERRORS as error:
            raise UserError(
                f"--push_to_hub True: the hub cannot be used: {str(error).strip().splitlines()[0]}"
            ) from error

    def push_to_hub(self, *args: Any, **options: Any) -> Any:
        """As transformers' Trainer, after the run; a hub that fails then is a warning, since all is saved here."""
        try:
            return super().push_to_hub(*args, **options)
        except HUB_ERRORS as error:
            logger.warning(
                "--push_to_hub True: the upload failed: %s; the output is whole in %s, for hf upload",
                *(str(error).strip().splitlines()[0], self.args.output_dir),
            )

    # -- data ------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> PackLoader:
        """The packs of this rank by the training arguments; the same loader at every call."""
        if self._loader is None:
            args = self.args
            self._loader = self._new_loader(
                self.train_dataset,
                self.data_collator,
                packs_per_batch=args.per_device_train_batch_size,
                accumulation=args.gradient_accumulation_steps,
                persistent_workers=args.dataloader_persistent_workers and args.dataloader_num_workers > 0,
            )
        return self._loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> PackLoader:
        """Held-out packs, a row each; of the trainer's own dataset the same loader at every call."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if not isinstance(dataset, PackedDataset):
            raise ValueError(f"evaluation takes a PackedDataset as eval_dataset, not {type(dataset).__name__}")
        if dataset is self.eval_dataset and self._eval_loader is not None:
            return self._eval_loader
        loader = self._new_loader(dataset, packed_collator(dataset, branch_keys=self.args.reference_path is not None))
        if dataset is self.eval_dataset:
            self._eval_loader = loader
        return loader

    def _new_loader(self, dataset: PackedDataset, collator: Any, **options: Any) -> PackLoader:
        args = self.args
        return PackLoader(
            dataset,
            collate_fn=collator,
            agreement=self._agreement,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
            prefetch_factor=args.dataloader_prefetch_factor if args.dataloader_num_workers else None,
            **options,
        )

    def set_initial_training_values(
        self, args: Any, dataloader: Any, *_: Any
    ) -> tuple[int, int, int, int, int, int | None, int]:
        """Number of steps: `max_steps` where given, else counted or estimated from the data."""
        num_epochs = math.ceil(args.num_train_epochs) if args.max_steps <= 0 else 1
        loader = self.loader
        self.estimate = estimate = self.ranks.from_first(
            lambda: estimate_epochs(loader.packed_dataset, loader.packs_per_step, num_epochs)
        )
        log_estimate(estimate, self.packed_model, packing=loader.packed_dataset.config.packing)
        if args.max_steps > 0:
            num_epochs, total = sys.maxsize, args.max_steps
        else:
            epochs = float(args.num_train_epochs)
            total = max(1, estimate.total_steps(epochs))
            logger.warning(
                "%s in %s (%s), %s a step",
                count(total, "optimizer steps"),
                count(int(epochs) if epochs.is_integer() else epochs, "epochs"),
                estimate.how if estimate.exact else f"{estimate.how}; the run ends with the data, not at this number",
                count(loader.packs_per_step, "packs"),
            )
        batches = max(1, estimate.steps(0)) * args.gradient_accumulation_steps
        num_samples = loader.packed_dataset.num_positions
        # The epoch ends with the plan (get_batch_samples), so the loop itself has no limit.
        return num_epochs, sys.maxsize, num_samples, num_samples, loader.packs_per_step, batches, total

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], torch.Tensor | None]:
        """The next step's batches and its normaliser; no batches at the end of the epoch."""
        if 0 < self.args.max_steps <= self.state.global_step:  # resumed where it had ended
            self.control.should_training_stop = True
            return [], None
        defer_worker_death()
        started = time.perf_counter()
        while True:
            batches, sums = self.sync.next_step(epoch_iterator)
            if not sums["has_data"]:
                self.control.should_epoch_stop = True
                self.ledgers.end_epoch()
                return [], None
            if sums["num_samples"] or sums["num_packs"]:
                break
            self.steps_without_samples += 1
            logger.warning("a step is passed over: none of its samples could be decoded, quarantine.jsonl names them")
        # The Trainer makes gradient_accumulation_steps of every step; the last one of an epoch may have fewer.
        fillers = self.args.gradient_accumulation_steps - len(batches)
        batches += [self.loader.filler_batch() for _ in range(fillers)]
        self.metrics.begin_step(sums, time.perf_counter() - started)
        if self.objective is not None:
            self.objective.begin_step(*(self.sync.normalizer(sums, key) for key in OF_PAIRS))
        if self.router_loss is not None:
            self.router_loss.begin_step(batches, sums["num_real_tokens"])
        self.step_sample_ids = [i for batch in batches for i in batch_ids(batch)]
        self._normalizer = self.sync.normalizer(sums)
        return batches, None  # a number on the host, where compute_loss finds it: the device is not waited for

    # -- loss ------------------------------------------------------------------------------------------

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        """To the device without blocking; dtypes stay (DeepSpeed's own cast would round the loss weights)."""
        group = self.packed_model.sequence_group
        # Boundaries stay on the host, where the model checks them without waiting for the device, and so do pixels of
        # a shared row: each rank takes its tiles there.
        on_host = ON_HOST if group is None else (*ON_HOST, "pixel_values")
        more = {} if group is None else {"num_slice_loss_tokens": count_slice_targets(inputs, group)}
        keys = MODEL_KEYS if self.objective is None else MODEL_KEYS.union(PAIR_KEYS)
        return more | to_device({k: v for k, v in inputs.items() if k in keys}, self.args.device, on_host)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        if self.router_loss is not None:
            self.router_loss.before_forward(model, self._prepare_inputs)
        shared_by = 1
        if self.objective is None:
            outputs = model(**inputs, loss_normalizer=self._normalizer)
        else:
            loss, outputs = self.objective.of(model, inputs)
            outputs.loss, shared_by = loss, self.ranks.sequence_parallel_size  # each of them has the row's whole loss
        if self.router_loss is not None:
            outputs.loss = outputs.loss + self.router_loss.of(outputs)
        self.read_loss(outputs["loss"] / shared_by)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs.update(self.metrics.since_last_log())
            if self.objective is not None:
                logs |= {name: value for name, value in self.objective.since_last_log().items() if name != "loss"}
            if self.router_loss is not None and (router_loss := self.router_loss.last()) is not None:
                logs["router_loss"] = router_loss
        super().log(logs, start_time)

    # -- evaluation ------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Loss of the held-out data a token, a sample, and by dataset (evaluation.py); logged, and returned.

        Of pairs: their losses and rewards (objective.py).
        """
        loader, model = self.get_eval_dataloader(eval_dataset), self.model_wrapped
        was_training = model.training
        model.eval()

        if self.objective is not None:
            of_pairs = self.objective.evaluate(loader)
            metrics = {f"{metric_key_prefix}_{name}": value for name, value in of_pairs.items()}
        else:

            def forward(batch: Batch) -> Any:
                with self.compute_loss_context_manager():
                    return model(**self._prepare_inputs(batch))

            sums = merge_sums(self.ranks.gather(sample_losses(loader, forward, self.sync)))
            names = [spec.name for spec in loader.packed_dataset.samples.specs]
            metrics = figures(sums, names, metric_key_prefix)
        model.train(was_training)
        put_back(model)
        events = self.ranks.gather_from_leaders(loader.take_events())
        log_left_out([event for part in events for event in part])
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def last_evaluation(self) -> dict[str, float] | None:
        """What the run's last evaluation logged, with its `step`."""
        return next((entry for entry in reversed(self.state.log_history) if "eval_loss" in entry), None)

    # -- checkpoints -----------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, from the start or from a checkpoint.

        Args:
            resume_from_checkpoint: a folder; True: the complete one in output_dir that was written last.

        Raises:
            UserError: bad data, or a checkpoint that cannot be resumed.
        """
        if resume_from_checkpoint is True:
            found = find_checkpoint("auto", self.output_dir)
            resume_from_checkpoint = None if found is None else str(found)
        if resume_from_checkpoint:
            sharded.check_form(Path(resume_from_checkpoint), self.args.sharding)
        if resume_from_checkpoint and self.is_deepspeed_enabled:
            self.move_to_these_ranks(Path(resume_from_checkpoint))
        resumed = bool(resume_from_checkpoint)
        quarantine = Quarantine(self.loader, self.output_dir, self.ranks, resumed=resumed)
        self.add_callback(quarantine)
        transformers_log = logging.getLogger("transformers.trainer")
        if resumed:
            transformers_log.addFilter(_is_of_use)
        try:
            with self.stop_request.listening():
                output = super().train(resume_from_checkpoint, *args, **kwargs)
        except UserError:
            quarantine.flush_alone()
            raise
        finally:
            self.remove_callback(quarantine)
            transformers_log.removeFilter(_is_of_use)
        quarantine.flush()
        return output


def _is_of_use(record: logging.LogRecord) -> bool:
    """False for what transformers says of an epoch that a resumed run had ended: it takes that for a lack of data."""
    return "not to be a single sample" not in str(record.msg)
