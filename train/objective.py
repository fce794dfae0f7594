"""--objective dpo | mpo: the loss of pairs in the trainer, with its reference model.

    reference  ->  log-probabilities of both answers, (P, 2), without a gradient
    policy     ->  the same with theirs                            losses  ->  sums, one all-reduce a step  ->  logs
                                                                                        -> the running mean

The loss is divided by the pairs and the chosen tokens of the whole step (step_sync.py counts them), so it does not
depend on packing, ranks or accumulation. bco_pair takes the mean of all rewards of the steps before: the same on all
ranks, kept in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from internvl_pack.checkpoints.lora import lora_layers, without_lora
from internvl_pack.errors import UserError
from internvl_pack.model.loss.preference import PairLosses, Pairs, PreferenceLoss, RunningMean, branch_sums
from internvl_pack.model.packed import PackedModel, PackedOutput
from internvl_pack.model.sharded import shard
from internvl_pack.model.zero3 import is_zero3
from internvl_pack.parallel.collectives import summed

from .arguments import compute_dtype
from .ranks import Ranks
from .reference import Table

if TYPE_CHECKING:
    from internvl_pack.stream.loader import PackLoader

    from .step_sync import Batch
    from .trainer import PackTrainer

STATE = "objective"  # in packing_state.json
KEYS = ("pairs", "branch_keys")  # of a batch, which the model does not read


# --- references ------------------------------------------------------------------------------------


class FrozenCopy:
    """Another model, as the trained one was at the beginning of the run."""

    def __init__(self, model: PackedModel) -> None:
        self.model: Any = model.requires_grad_(False).eval()

    def prepare(self, trainer: PackTrainer) -> None:
        """Put it on the device; under ZeRO-3 and with --sharding in parts, as the trained one."""
        if trainer.args.sharding:
            shard(self.model, trainer.args.device, compute_dtype(trainer.args))
            return
        if not is_zero3(self.model):
            self.model.to(trainer.args.device)
            return
        import deepspeed

        config = dict(trainer.accelerator.state.deepspeed_plugin.deepspeed_config)
        config = {name: value for name, value in config.items() if name not in ("optimizer", "scheduler")}
        self.model, *_ = deepspeed.initialize(model=self.model, config=config)
        self.model.eval()

    def __call__(self, model: Any, inputs: Batch) -> PackedOutput:
        return self.model(**inputs, return_logprobs=True)


class WithoutAdapters:
    """The trained model without its LoRA, where nothing else of it is trained."""

    def prepare(self, trainer: PackTrainer) -> None:
        self.layers = list(lora_layers(trainer.packed_model).values())

    def __call__(self, model: Any, inputs: Batch) -> PackedOutput:
        trains = model.training
        model.eval()  # stochastic depth is off
        try:
            with without_lora(self.layers):
                return model(**inputs, return_logprobs=True)
        finally:
            model.train(trains)


def trains_adapters_alone(model: PackedModel) -> bool:
    """Whether every trained weight is one of LoRA's."""
    return all(".lora_" in name for name, p in model.named_parameters() if p.requires_grad)


# --- the objective --------------------------------------------------------------------------------


class PairObjective(TrainerCallback):
    """The loss of pairs, its running mean and its figures, for the trainer that it is given to.

    Args:
        loss: of the pairs.
        reference: gives the log-probabilities that the policy's are compared with.
        ranks, device: of the run.
    """

    trainer: PackTrainer

    def __init__(
        self,
        loss: PreferenceLoss,
        reference: FrozenCopy | WithoutAdapters | Table,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self.loss, self.reference, self.ranks, self.device = loss, reference, ranks, device
        self.mean = RunningMean(device)
        self._counts = (1.0, 1.0)
        self._step: dict[str, Tensor] = {}
        self._logged: dict[str, Tensor] = {}

    def begin_step(self, num_pairs: float, num_chosen_tokens: float) -> None:
        """A step with so many pairs and chosen tokens, each over the ranks that gradients are averaged over."""
        self._counts = (num_pairs, num_chosen_tokens)
        self._step = {}

    def of(self, model: Any, inputs: Batch) -> tuple[Tensor, PackedOutput]:
        """What one micro-batch adds to the loss of the step that has begun, and the model's outputs."""
        losses, outputs = self._pair_losses(model, inputs, *self._counts)
        _add(self._step, losses.sums)
        return losses.loss.float(), outputs

    def run(self, model: Any, inputs: Batch) -> Tensor:
        """All that is computed of a micro-batch but the losses: the sum of its log-probabilities, part of no figure."""
        inputs = dict(inputs)
        places = inputs.pop("pairs").long()
        if not isinstance(self.reference, Table):
            with torch.no_grad():
                self.reference(model, inputs)
        return self._answers(model(**inputs, return_logprobs=True), inputs, places)[0].sum()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not isinstance(self.reference, Table):
            self.reference.prepare(self.trainer)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The step's rewards become part of the mean, and its figures of the next log."""
        sums = torch.stack(list(self._step.values())) / self.ranks.sequence_parallel_size
        if self.ranks.world_size > 1:
            dist.all_reduce(sums)
        step = dict(zip(self._step, sums, strict=True))
        self.mean.add(step)
        _add(self._logged, step)
        self._step = {}

    def since_last_log(self) -> dict[str, float]:
        """Figures of the steps since the last call; nothing where there were none."""
        sums, self._logged = self._logged, {}
        return figures(self.loss, _numbers(sums)) if sums else {}

    def evaluate(self, loader: PackLoader) -> dict[str, float]:
        """Figures of held-out pairs; all ranks call it together."""
        trainer, sums = self.trainer, dict[str, Tensor]()
        with torch.no_grad():
            for batch in trainer.sync.batches(loader):
                with trainer.compute_loss_context_manager():
                    losses, _ = self._pair_losses(trainer.model_wrapped, trainer._prepare_inputs(batch), 1, 1)
                _add(sums, losses.sums)
        parts = self.ranks.gather_from_leaders(_numbers(sums))
        total = {name: sum(part[name] for part in parts) for name in parts[0]}
        return figures(self.loss, total) | {"samples": total["num_pairs"]}

    def state_dict(self) -> dict[str, Any]:
        return {"loss": asdict(self.loss), "rewards": self.mean.state()}

    def load_state_dict(self, state: Mapping[str, Any], *, check_options: bool = True) -> None:
        """Go on from a checkpoint.

        Raises:
            UserError: it was trained with another loss.
        """
        now = asdict(self.loss)
        changed = [name for name, value in now.items() if state["loss"].get(name) != value]
        if changed and check_options:
            name, before = changed[0], state["loss"].get(changed[0])
            raise UserError(
                f"resume: the loss of pairs has {name} {now[name]}, in the checkpoint {before}: give the same options, "
                "or --resume_ignore_options True"
            )
        self.mean = RunningMean(self.device, state["rewards"])

    def _pair_losses(
        self, model: Any, inputs: Batch, num_pairs: float, num_chosen_tokens: float
    ) -> tuple[PairLosses, PackedOutput]:
        inputs = dict(inputs)
        places = inputs.pop("pairs").long()
        keys = inputs.pop("branch_keys", None)
        if isinstance(self.reference, Table):
            stored = torch.tensor(self.reference.of(keys), dtype=torch.float64)
            reference = stored[places.cpu()].to(places.device)
        else:
            with torch.no_grad():
                reference, _ = self._answers(self.reference(model, inputs), inputs, places)
        outputs = model(**inputs, return_logprobs=True)
        logprobs, num_tokens = self._answers(outputs, inputs, places)
        pairs = Pairs(logprobs, reference, num_tokens)
        return self.loss.of(pairs, self.mean.value, num_pairs, num_chosen_tokens), outputs

    def _answers(self, outputs: PackedOutput, inputs: Batch, places: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and numbers of tokens of the pairs' answers, (P, 2) each."""
        assert outputs.target_logprobs is not None and outputs.target_positions is not None, "asked for"
        boundaries = inputs.get("cu_seqlens")
        if boundaries is None:  # padded: a row an answer
            rows, length = inputs["input_ids"].shape
            boundaries = torch.arange(0, (rows + 1) * length, length)
        sums, counts = branch_sums(outputs.target_logprobs, outputs.target_positions, boundaries)
        if self.ranks.sequence_parallel_size > 1:
            group = self.trainer.packed_model.sequence_group
            assert group is not None, "made where rows are shared"
            sums, counts = (summed(values, group.process_group) for values in (sums, counts))
        return sums[places], counts[places]


def figures(loss: PreferenceLoss, sums: Mapping[str, float]) -> dict[str, float]:
    """Means by the names that TRL gives them, and the losses by theirs.

    Args:
        sums: of `PairLosses`, as numbers.
    """
    pairs, tokens = max(1.0, sums["num_pairs"]), max(1.0, sums["num_chosen_tokens"])
    chosen, rejected = sums["rewards_chosen"] / pairs, sums["rewards_rejected"] / pairs
    losses = {name: sums[name] / pairs for name in loss.weights} | {"sft": sums["sft"] / tokens}
    total = sum(weight * losses[name] for name, weight in loss.weights.items()) + loss.sft_weight * losses["sft"]
    return {
        "loss": total,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": sums["accuracy"] / pairs,
        **{f"loss/{name}": value for name, value in losses.items()},
    }


def _add(sums: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    for name, value in more.items():
        sums[name] = sums[name] + value if name in sums else value.double()


def _numbers(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """On the host, with one wait for the device."""
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}
