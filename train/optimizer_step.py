"""The optimizer's step: no host waits for the device on the way, and gradients that are not finite change nothing.

    forward | backward | norm | clip, AdamW, weights to half precision      the device, one after the other
        loss -> host      norm -> host                                      copied when there, read when logged

DeepSpeed's ZeRO 1 and 2 look for infinite gradients one parameter at a time, make the norm one parameter at a time, and
wait for both before the rest of the step is issued. The norm alone shows as much: it is not finite where a gradient is
not. Here it is made for all parameters at once, and the host reads it beside the optimizer's work, which it has issued
by then: AdamW's fused kernel is given a flag on the device that says whether to change anything, and the divisor that
clips. Other optimizers have neither: for them the host waits for the norm, and issues the rest, or not. So it does with
ZeRO-3, of which only the norm is made here.

On a single rank there is nothing to reduce, but DeepSpeed copies each gradient four times on its way to the optimizer,
twice one parameter at a time. Those copies are left out, and with them the buffers (1 to 2 GB).

A step that was not made changes neither weights nor the optimizer's states nor the learning rate, whatever the way of
sharding, and is reported in one line with the ids of its samples.
"""

from __future__ import annotations

import logging
import math
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from internvl_pack.model.sharded import own_part

from .ranks import Ranks

if TYPE_CHECKING:
    from .arguments import PackTrainingArguments

logger = logging.getLogger(__name__)


class Reading:
    """A device scalar that is being copied to the host; reading it does not wait for work issued after it."""

    def __init__(self, value: torch.Tensor) -> None:
        value = value.detach()
        if value.is_cuda:
            self._host = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._host.copy_(value, non_blocking=True)
            self._there: torch.cuda.Event | None = torch.cuda.Event()
            self._there.record()
        else:
            self._host, self._there = value.clone(), None

    def __float__(self) -> float:
        if self._there is not None:
            self._there.synchronize()
        return self._host.item()


class StepTrainer(Trainer):
    """The part of a Trainer that steps and logs steps."""

    args: PackTrainingArguments
    ranks: Ranks
    step_sample_ids: list[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._losses: list[Reading] = []  # of the micro-steps since the last log
        self._zero: ZeroStep | None = None
        self._sharded: ShardedStep | None = None
        self.add_callback(SkippedSteps(self))

    def read_loss(self, loss: torch.Tensor) -> None:
        """To be called with the loss of each micro-step, as soon as it is issued."""
        self._losses.append(Reading(loss))

    def prepare_steps(self) -> None:
        """To be called when model and optimizer are wrapped."""
        if self.args.sharding:
            self._sharded = ShardedStep(self.optimizer, self.args.max_grad_norm)
        engine = getattr(self.accelerator, "deepspeed_engine_wrapped", None)
        if engine is None:
            return
        if ZeroStep.knows(engine.engine):
            self._zero = ZeroStep(engine.engine)
        elif is_zero3_on_device(engine.engine):
            zero = engine.engine.optimizer
            zero._get_norm_groups = lambda: [_norm_at_once(zero)]  # not one parameter at a time, by groups

    def floating_point_ops(self, inputs: Any) -> int:
        """0: the Trainer's estimate counts all parameters anew for each row; what is logged is counted exactly."""
        return 0

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        if self._sharded is not None:
            return self._sharded.norm()
        return super()._clip_grad_norm(model) if self._zero is None else self._zero.norm()

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        if self._sharded is not None:
            return self._sharded.norm()
        if self._zero is None or grad_norm is not None:
            return super()._get_grad_norm(model, grad_norm)
        return self._zero.norm()

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: Any,
        model: torch.nn.Module,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            self._log_steps(tr_loss, grad_norm, start_time, learning_rate)
        super()._maybe_log_save_evaluate(
            tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=learning_rate
        )

    def _log_steps(self, tr_loss: torch.Tensor, grad_norm: Any, started: float, learning_rate: float | None) -> None:
        """What the Trainer logs, with the loss that was copied meanwhile, not read from the device again."""
        own, self._losses = sum(map(float, self._losses)), []
        loss = self.ranks.all_reduce(torch.tensor(own, dtype=torch.float64)) / self.ranks.world_size
        tr_loss.zero_()
        logs = {"loss": loss.item() / (self.state.global_step - self._globalstep_last_logged)}
        if grad_norm is not None:
            logs["grad_norm"] = float(grad_norm)
        logs["learning_rate"] = self._get_learning_rate() if learning_rate is None else learning_rate
        self._total_loss_scalar += loss.item()
        self._globalstep_last_logged = self.state.global_step
        self.store_flos()
        self.log(logs, started)


class SkippedSteps(TrainerCallback):
    """Skips steps without DeepSpeed, which does so by itself, and reports all skipped steps."""

    def __init__(self, trainer: StepTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.trainer.prepare_steps()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        trainer = self.trainer
        if trainer._sharded is not None:
            trainer._sharded.before()
            return
        if trainer.is_deepspeed_enabled or trainer.accelerator.scaler is not None:
            return
        optimizer: Any = trainer.optimizer
        gradients = [p.grad for p in trainer.model_wrapped.parameters() if p.grad is not None]
        finite = not gradients or math.isfinite(torch.nn.utils.get_total_norm(gradients).item())
        optimizer._is_overflow = not finite  # what accelerate sets where a step of float16 was not made
        if not finite:
            trainer.model_wrapped.zero_grad(set_to_none=True)  # an optimizer leaves alone what has no gradient

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.trainer._sharded is not None:
            self.trainer._sharded.after()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer = self.trainer
        if args.fp16 or not trainer.accelerator.optimizer_step_was_skipped:  # float16 finds its scale by such steps
            return
        everyones = trainer.ranks.gather_from_leaders(trainer.step_sample_ids)
        ids = ", ".join(dict.fromkeys(name for names in everyones for name in names))  # a pair is two segments
        logger.warning("step %d is skipped: the gradient is not finite; its samples: %s", state.global_step, ids)


class ZeroStep:
    """The norm of DeepSpeed's ZeRO-1 and 2 optimizer made at once, and read beside its step.

    Takes the place of methods of this one optimizer and engine: DeepSpeed has no setting for them. Where it searches
    gradients (`bf16.check_grad_overflow`, its default), that stays as it is.

    Args:
        engine: that `knows` holds for.
    """

    def __init__(self, engine: Any) -> None:
        self.engine, self.zero = engine, engine.optimizer
        self.reading: Reading | None = None
        zero = self.zero
        zero.scaled_global_norm = MethodType(self._norm_of_all, zero)
        engine.zero_grad = _nothing  # the Trainer calls it once more, when the optimizer has let go of all gradients
        if dist.get_world_size(zero.dp_process_group) == 1 and zero.gradient_accumulation_dtype == zero.dtype:
            # a gradient is reduced where the backward pass has put it, and no bucket is filled
            zero.process_gradients = zero.reduce_ready_partitions_and_remove_grads = _nothing
            zero.reduce_ipg_grads = _nothing
            zero.reduce_bucket_size = 1  # of which a buffer is made in each backward pass
        if zero.dtype != torch.bfloat16 or zero.check_grad_overflow:
            self.on_device = False
            return
        # A scheduler of DeepSpeed's is stepped with the optimizer, before the host has read the norm.
        self.on_device = is_fused_adam(zero.optimizer) and engine.lr_scheduler is None
        if self.on_device:
            zero.unscale_and_clip_grads = _nothing  # the optimizer's kernel clips, see `_limit`
        else:
            zero.check_grad_overflow = True  # what the norm says ...
            zero.check_overflow = _nothing  # ... and that alone, not of all gradients one by one

    @staticmethod
    def knows(engine: Any) -> bool:
        """Whether this is a step of ZeRO 1 or 2 on the device, of a whole model."""
        zero = engine.optimizer
        names = ["scaled_global_norm", "averaged_gradients", "check_grad_overflow", "real_dp_process_group"]
        names += ["unscale_and_clip_grads", "check_overflow"]
        names += ["process_gradients", "reduce_ready_partitions_and_remove_grads", "reduce_ipg_grads"]
        return (
            engine.zero_optimization_stage() in (1, 2)
            and all(hasattr(zero, name) for name in names)
            and not zero.cpu_offload
            and not zero.has_moe_layers
            and engine.mpu is None
            and zero.dtype != torch.float16
            and getattr(zero, "compute_grad_norm", True)
        )

    def norm(self) -> float:
        """Of the step's gradients before they were clipped; informs DeepSpeed of a step that changed nothing."""
        if self.reading is None:  # the search has found something
            return math.inf
        norm, self.reading = float(self.reading), None
        if self.on_device and not math.isfinite(norm):
            self.zero.overflow = True
            self.engine.skipped_steps += 1
        return norm

    def _norm_of_all(self, zero: Any, norm_type: int = 2) -> torch.Tensor:
        """Of the gradients of all ranks, a float32 scalar on the device; infinite or NaN where one of them is."""
        assert norm_type == 2, "the only one DeepSpeed asks for"
        norm = _norm_at_once(zero)
        self.reading = Reading(norm)
        if self.on_device:
            _limit(zero.optimizer, norm, zero.clip_grad)
        return norm


class ShardedStep:
    """Norm, clipping and skipping of a step whose gradients are in parts on all ranks.

    The norm is made of all parts at once, and reduced on the device. Fused AdamW gets the divisor that clips, and the
    flag of a gradient that is not finite; with other optimizers the host waits for the norm.

    Args:
        optimizer: as accelerate wraps it.
        max_norm: of --max_grad_norm; 0 for no clipping.
    """

    def __init__(self, optimizer: Any, max_norm: float) -> None:
        self.wrapped, self.optimizer, self.max_norm = optimizer, optimizer.optimizer, max_norm
        self.on_device = is_fused_adam(self.optimizer)
        self.reading: Reading | None = None

    @torch.no_grad()
    def norm(self) -> Reading:
        """Of the gradients of all ranks before they are clipped."""
        if self.reading is not None:
            return self.reading
        own = [part for part in map(own_part, self._gradients()) if part.numel()]
        norm = _norm_of_parts(own, self.optimizer.param_groups[0]["params"][0].device)
        self.reading = Reading(norm)
        if self.on_device:
            _limit(self.optimizer, norm, self.max_norm)
        return self.reading

    @torch.no_grad()
    def before(self) -> None:
        """To be called before the optimizer's step."""
        reading = self.norm()
        if self.on_device:
            return
        norm = float(reading)
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)  # an optimizer leaves alone what has no gradient
        elif 0 < self.max_norm < norm + 1e-6:
            torch._foreach_mul_([own_part(g) for g in self._gradients()], self.max_norm / (norm + 1e-6))

    def after(self) -> None:
        """To be called after the optimizer's step is issued: says whether it has changed anything."""
        assert self.reading is not None, "called after `before`"
        self.wrapped._is_overflow = not math.isfinite(self.reading)  # as accelerate does in float16
        self.reading = None

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]


def is_zero3_on_device(engine: Any) -> bool:
    """Whether this is a step of ZeRO-3 on the device, of a whole model, sharded over all ranks."""
    zero = engine.optimizer
    return (
        engine.zero_optimization_stage() == 3
        and all(hasattr(zero, name) for name in ("_get_norm_groups", "averaged_gradients", "sub_group_process_groups"))
        and not zero.offload_optimizer
        and not zero.use_muon
        and engine.mpu is None
        and zero.dtype != torch.float16
        and all(group == zero.dp_process_group for group in zero.sub_group_process_groups)
    )


def _norm_at_once(zero: Any) -> torch.Tensor:
    """Of the gradients of all ranks, a float32 scalar on the device; infinite or NaN where one of them is."""
    own = []
    for gradients in zero.averaged_gradients.values():
        own += [g for g in gradients or () if not getattr(g, "_zero_padding", False)]
    return _norm_of_parts(own, zero.device, zero.dp_process_group)


def _norm_of_parts(own: list[torch.Tensor], device: torch.device, group: Any = None) -> torch.Tensor:
    """Of all ranks' parts, of which these are this rank's: a float32 scalar on the device."""
    squares = torch.zeros((), dtype=torch.float32, device=device)
    if own:
        squares += torch.stack(torch._foreach_norm(own, 2, dtype=torch.float32)).square().sum()
    dist.all_reduce(squares, group=group)
    return squares.sqrt()


def is_fused_adam(optimizer: Any) -> bool:
    """Whether its kernel takes `found_inf` and `grad_scale`, as a GradScaler sets them."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and bool(optimizer.defaults.get("fused"))


def _limit(optimizer: Any, norm: torch.Tensor, max_norm: float) -> None:
    """Let fused Adam's kernel clip as DeepSpeed does, and change nothing where the norm is not finite.

    Args:
        max_norm: 0 for no clipping.
    """
    optimizer.found_inf = (~norm.isfinite()).float()
    if max_norm > 0:
        optimizer.grad_scale = ((norm + 1e-6) / max_norm).clamp(min=1.0)


def _nothing(*_: Any, **__: Any) -> None:
    """In the place of work that is done elsewhere, or has no effect."""
