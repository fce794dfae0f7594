"""Fine-tune InternVL on packed (or, for comparison, padded) rows.

    torchrun --nproc_per_node 8 train/finetune.py --model_name_or_path OpenGVLab/InternVL3-1B-hf \\
        --meta_path data/meta.json --use_packed_ds True --max_packed_tokens 16384 --num_images_expected 48 \\
        --deepspeed zero_stage1 --bf16 True --output_dir work_dirs/run

Also under `deepspeed`, and as plain `python` for one process. Writes into output_dir an ordinary
Hugging Face checkpoint with its tokenizer (or, by --save_format, one in InternVL's own format),
`train_summary.json`, and `quarantine.jsonl` with the samples that could not be used. Exit codes: 0 fine,
2 a user's mistake, said in one line, 75 stopped by a signal at a checkpoint, to be started again.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:  # run as a file: find the packages without an installation
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    __package__ = "train"
    import_module("train")  # before transformers: it keeps quiet what that imports

import torch

try:
    import transformers
    from transformers import TrainerCallback, set_seed

    _ = transformers.PreTrainedModel  # loads torchvision, where it is installed
except ModuleNotFoundError as error:  # what it makes of any trouble within its imports
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    print(
        f"finetune: error: transformers cannot be imported: {' '.join(str(cause).split())}; where torchvision is "
        "named, it was made for another torch: install both from the same index, or pip uninstall torchvision",
        file=sys.stderr,
    )
    sys.exit(2)

from internvl_pack.checkpoints.encoding import default_tiles, served_by
from internvl_pack.checkpoints.internvl_format_files import chat_style, config_of
from internvl_pack.config import PackingConfig
from internvl_pack.errors import UserError, naming
from internvl_pack.model.build import build_model, check_loadable
from internvl_pack.model.loss.preference import PreferenceLoss
from internvl_pack.model.packed import PackedModel
from internvl_pack.options import count
from internvl_pack.packing.cost import CostModel
from internvl_pack.sources.reach import allow

from . import accounting, progress, sequence, sharded
from .activation_checkpointing import CheckpointByMemory
from .arguments import AUTO, DataTrainingArguments, ModelArguments, PackTrainingArguments, compute_dtype
from .callbacks import FirstPacks, IsolationCheck, PackingReport, RunOptions
from .checkpoint import find_checkpoint
from .combinations import IN_BATCH, STREAM, check_combinations
from .data import Data, make_data
from .environment import (
    INTERRUPTED,
    KEYBOARD_INTERRUPT,
    USER_ERROR,
    check_precision,
    is_main_process,
    prepare_environment,
    report_error,
    set_up_logging,
    shut_down,
    silent,
    telling_of_ports,
    wait_no_longer_than,
)
from .objective import FrozenCopy, PairObjective, WithoutAdapters, trains_adapters_alone
from .options import PROGRAM, parse
from .preference import objective_of, preference_loss
from .ranks import Ranks, lay_out_gradients
from .reference import Table, marks_of
from .saving import Saving
from .trainer import PackTrainer
from .warm_up import WarmUp, keep_compiled

logger = logging.getLogger("train.finetune")


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Parse, train, save. Returns the exit code.

    Args:
        program: what the user calls it by, for help and messages.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    run = None
    try:
        prepare_environment()
        set_up_logging()
        with telling_of_ports():
            run = prepare(*parse(argv, program))
        return run.train()
    except UserError as error:
        report_error(program.removesuffix(".py"), error, everyone=run is not None)
        return USER_ERROR
    except KeyboardInterrupt:  # while nothing can be saved: before the first step, or after the last
        return KEYBOARD_INTERRUPT
    finally:
        shut_down()


@dataclass(frozen=True)
class Run:
    """A training run, ready to start.

    Attributes:
        packing: how its rows are made, one of combinations.py.
        checkpoint: to go on from.
    """

    trainer: PackTrainer
    packing: str
    checkpoint: str | None

    def train(self) -> int:
        """Train, save the model, say what happened.

        Returns:
            The exit code: 0, or INTERRUPTED where a signal ended the run at a checkpoint.

        Raises:
            UserError: bad data that must stop the run.
        """
        trainer = self.trainer
        trainer.train(resume_from_checkpoint=self.checkpoint)
        if trainer.stopped_by:
            logger.warning(
                "stopped by %s after step %d: checkpoint-%d is complete, start again with "
                "--resume_from_checkpoint auto to go on from it (exit status %d)",
                *(trainer.stopped_by, trainer.state.global_step, trainer.state.global_step, INTERRUPTED),
            )
            trainer.ranks.barrier()  # before a rank leaves with a status that makes launchers end the others
            return INTERRUPTED
        ledger = trainer.ledgers.of_run()
        if trainer.eval_dataset is not None and trainer.args.do_eval:
            last = trainer.last_evaluation()
            if last is None or last["step"] != trainer.state.global_step:
                trainer.evaluate()
        trainer.save_model()
        trainer.save_state()
        if not trainer.metrics.here:
            logger.info(
                "the run is complete: all %s are trained; for more, raise --num_train_epochs or --max_steps",
                count(trainer.state.global_step, "steps"),
            )
        elif is_main_process():
            figures = accounting.summarise(trainer, ledger, packing=self.packing)
            accounting.write_summary(figures, trainer.output_dir)
            for line in accounting.summary_lines(figures, ledger):
                logger.info(line)
        logger.info("the model and what was logged are in %s", trainer.output_dir)
        return 0


def prepare(model_args: ModelArguments, data_args: DataTrainingArguments, args: PackTrainingArguments) -> Run:
    """The run of these options.

    Raises:
        UserError: a mistake in the options, the data or the environment, a model that cannot be saved as asked, or a
            hub (--push_to_hub) that is out of reach.
    """
    begun = begin(model_args, data_args, args)
    data_args, data = begun.data_args, begun.data
    saving = Saving(args.save_format, args.merge_lora, model_args.model_name_or_path, data.train.encoder.config)
    saving.check(begun.model)
    trainer = PackTrainer(
        model=begun.model,
        args=args,
        train_dataset=data.train,
        eval_dataset=data.held_out,
        data_collator=data.collator,
        processing_class=data.tokenizer,
        row_budget=data.row_budget,
        loss_reduction_all_gather=data_args.loss_reduction_all_gather,
        router_loss_coef=model_args.router_loss_coef,
        objective=None if begun.loss is None else make_objective(begun.loss, begun, model_args, args),
        saving=saving,
        also_saved={sequence.GIVEN: data_args.pad_multiple},
    )
    for callback in make_callbacks(model_args, data_args, trainer):
        trainer.add_callback(callback)
    return Run(trainer, data_args.packing_mode, begun.checkpoint)


class Begun(NamedTuple):
    """What a run consists of before there is a trainer.

    Attributes:
        data_args: with what the checkpoint has the last word on.
        loss: of pairs; None for sft.
        checkpoint: to go on from.
    """

    data_args: DataTrainingArguments
    loss: PreferenceLoss | None
    ranks: Ranks
    data: Data
    model: PackedModel
    checkpoint: str | None


def begin(model_args: ModelArguments, data_args: DataTrainingArguments, args: PackTrainingArguments) -> Begun:
    """Data and model of these options; what is quick to check comes first.

    Raises:
        UserError: a mistake in the options, the data or the environment.
    """
    data_args = replace(data_args, objective=objective_of(data_args.objective, args))
    check_combinations(data_args.packing_mode, vars(args) | vars(model_args) | vars(data_args))
    loss = preference_loss(data_args.objective, args)
    check_precision("bf16" if args.bf16 else "fp16" if args.fp16 else "no")
    wait_no_longer_than(args.ddp_timeout)
    allow(remote=data_args.allow_remote, outside_root=data_args.allow_outside_root)
    ranks = Ranks.of(args)
    kernel = sequence.select_shared_kernel(model_args, args, compute_dtype(args))
    found = find_checkpoint(args.resume_from_checkpoint, str(args.output_dir))
    checkpoint = None if found is None else str(found)
    if found is not None:
        sharded.check_form(found, args.sharding)  # before the model is loaded
    paths = {name: getattr(model_args, name) for name in ("model_name_or_path", "vision_path", "llm_path")}
    check_loadable(data_args.family_check, **paths)
    sequence.check_options(model_args, data_args, args)
    checkpoint_config = served_by(config_of(model_args.model_name_or_path), data_args.family_check)
    tiles = data_args.num_images_expected
    if tiles is None:
        tiles = default_tiles(checkpoint_config, data_args.max_packed_tokens)
    style = chat_style(data_args.conv_style, checkpoint_config)
    data_args = replace(data_args, num_images_expected=tiles, conv_style=style)
    packing = make_packing(model_args, data_args, args, checkpoint)
    data = make_data(model_args, data_args, args, packing, ranks)
    data.train.samples.check_objective()
    if data.held_out is not None:
        with naming("--eval_meta_path: "):
            data.held_out.samples.check_objective()
    set_seed(args.seed)
    if model_args.compile:
        keep_compiled(str(args.output_dir))
    model = load_model(model_args, data_args, args, data.tokenizer, kernel.name)
    if not (args.deepspeed or args.sharding):
        lay_out_gradients(model)
    if ranks.sequence_parallel_size > 1:
        sequence.share_rows(model, args, ranks)
    return Begun(data_args, loss, ranks, data, model, checkpoint)


def make_packing(
    model_args: ModelArguments, data_args: DataTrainingArguments, args: PackTrainingArguments, checkpoint: str | None
) -> PackingConfig:
    """Budgets and order. Streamed packs are balanced by the operations of the model that is trained, where its config
    is at hand."""
    seed = args.seed if args.data_seed is None else args.data_seed
    packing = data_args.packing_config(seed, samples_per_row=args.per_device_train_batch_size)
    folder = model_args.model_name_or_path
    if (
        data_args.packing_mode == STREAM
        and not data_args.cost_model
        and folder
        and Path(folder, "config.json").is_file()
    ):
        try:
            CostModel.from_name(folder)
            packing = replace(packing, cost_model=folder)
        except UserError as error:
            logger.info("packs are balanced by InternVL3-1B's costs: %s", error)
    return sequence.fit_packing(packing, data_args, args, checkpoint)


# --- model, trainer, callbacks

# Options of a model that is not trained.
AS_IT_IS: dict[str, Any] = {
    **dict.fromkeys(("freeze_llm", "freeze_backbone", "freeze_mlp", "grad_checkpoint"), False),
    **dict.fromkeys(
        ("unfreeze_vit_layers", "use_backbone_lora", "use_llm_lora", "drop_path_rate", "router_loss_coef"), 0
    ),
}


def load_model(
    model_args: ModelArguments,
    data_args: DataTrainingArguments,
    args: PackTrainingArguments,
    tokenizer: Any,
    kernel: str,
) -> PackedModel:
    """The model of these options, each rank with rows of its own.

    Raises:
        UserError: it cannot be loaded or trained so.
    """
    options = asdict(model_args) | {"attn_kernel": kernel}
    return build_model(
        device=args.device,
        tokenizer=tokenizer,
        # DeepSpeed and FSDP2 keep float32 weights themselves; elsewhere bf16 is autocast over float32 weights.
        dtype=compute_dtype(args) if args.deepspeed or args.sharding else torch.float32,
        compute_dtype=compute_dtype(args),
        force_image_size=data_args.force_image_size,
        down_sample_ratio=data_args.down_sample_ratio,
        family_check=data_args.family_check,
        **options,
    )


def make_objective(
    loss: PreferenceLoss, begun: Begun, model_args: ModelArguments, args: PackTrainingArguments
) -> PairObjective:
    """The loss of pairs with its reference model.

    Raises:
        UserError: a table of another model, or of other options.
    """
    reference: FrozenCopy | WithoutAdapters | Table
    if args.reference_path is not None:
        reference = Table(args.reference_path, marks_of(model_args, begun.data.train, compute_dtype(args)))
        logger.info("reference: %s answers stored in %s", f"{len(reference):,}", args.reference_path)
    elif trains_adapters_alone(begun.model):
        reference = WithoutAdapters()
        logger.info("reference: the model without its LoRA")
    else:
        as_it_is, kernel = replace(model_args, **AS_IT_IS), begun.model.attn_kernel.name
        with silent("internvl_pack.model"):  # what it would say was said of the trained one
            copy = load_model(as_it_is, begun.data_args, args, begun.data.tokenizer, kernel)
        copy.sequence_group = begun.model.sequence_group
        reference = FrozenCopy(copy)
        logger.info("reference: a frozen copy of the model")
    return PairObjective(loss, reference, begun.ranks, args.device)


def make_callbacks(
    model_args: ModelArguments, data_args: DataTrainingArguments, trainer: PackTrainer
) -> list[TrainerCallback]:
    """What is done around the loop, in the order in which it is done before the first step."""
    progress.install(trainer, "packed" if data_args.use_packed_ds else "padded")
    callbacks: list[TrainerCallback] = [
        FirstPacks(trainer),
        PackingReport(trainer, data_args.log_freq),
        RunOptions(model_args, data_args),
    ]
    if not data_args.use_packed_ds:
        return callbacks
    packs = 1 if data_args.packing_mode == IN_BATCH else trainer.args.per_device_train_batch_size
    max_tokens, max_tiles = (packs * budget for budget in trainer.row_budget)
    if model_args.grad_checkpoint == AUTO:
        callbacks.append(CheckpointByMemory(trainer, max_tokens, max_tiles))
    if model_args.compile:
        callbacks.append(WarmUp(trainer, max_tokens, max_tiles))
    if trainer.args.check_isolation or not trainer.packed_model.family_is_known:
        callbacks.append(IsolationCheck(trainer))
    return callbacks


if __name__ == "__main__":
    sys.exit(main())
