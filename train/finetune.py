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
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: find the packages without an installation
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    __package__ = "train"

if find_spec("torchao"):  # transformers imports it, and it tells of each of its own kernels that does not load
    for _name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(_name).setLevel(logging.ERROR)

import torch
from transformers import PreTrainedConfig, TrainerCallback, set_seed

from internvl_pack import PresetDataset, in_batch_collate_fn
from internvl_pack.batch.collate import padded_collate_fn
from internvl_pack.checkpoints import tokenizers
from internvl_pack.checkpoints.internvl_format_files import chat_style, config_of
from internvl_pack.config import PackingConfig
from internvl_pack.errors import UserError
from internvl_pack.model.build import build_model, check_loadable
from internvl_pack.model.packed import PackedModel
from internvl_pack.options import count
from internvl_pack.packing.cost import CostModel
from internvl_pack.parallel import enable_sequence_parallel, make_groups
from internvl_pack.samples import Samples
from internvl_pack.sources import load_meta
from internvl_pack.sources.reach import allow
from internvl_pack.stream.dataset import PackedDataset
from internvl_pack.stream.loader import packed_collator

from . import accounting, progress, sequence
from .arguments import AUTO, DataTrainingArguments, ModelArguments, PackTrainingArguments
from .callbacks import FirstPacks, IsolationCheck, PackingReport, RunOptions
from .checkpoint import find_checkpoint
from .checkpointing import CheckpointByMemory
from .combinations import IN_BATCH, PRESET, STREAM, check_combinations
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
    telling_of_ports,
    wait_no_longer_than,
)
from .options import parse
from .ranks import Ranks
from .saving import Saving
from .trainer import PackTrainer
from .warm_up import WarmUp, keep_compiled

logger = logging.getLogger("train.finetune")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, train, save. Returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    run = None
    try:
        prepare_environment()
        set_up_logging()
        with telling_of_ports():
            run = prepare(*parse(argv))
        return run.train()
    except UserError as error:
        report_error("finetune", error, everyone=run is not None)
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


@dataclass(frozen=True, kw_only=True)
class Data:
    """What a run reads.

    Attributes:
        train, held_out: rows of this data rank; held_out in a given order, each sample once.
        collator: rows to a batch.
        row_budget: tokens and tiles that a row of one pack may hold.
    """

    tokenizer: Any
    train: PackedDataset
    held_out: PackedDataset | None
    collator: Callable[..., dict[str, Any]]
    row_budget: tuple[int, int]


def prepare(model_args: ModelArguments, data_args: DataTrainingArguments, args: PackTrainingArguments) -> Run:
    """The run of these options; what is quick to check comes first.

    Raises:
        UserError: a mistake in the options, the data or the environment.
    """
    check_combinations(data_args.packing_mode, {**vars(args), **vars(data_args)})
    check_precision("bf16" if args.bf16 else "fp16" if args.fp16 else "no")
    wait_no_longer_than(args.ddp_timeout)
    allow(remote=data_args.allow_remote, outside_root=data_args.allow_outside_root)
    ranks = Ranks.of(args)
    sequence.check_options(model_args, data_args, args)
    kernel = sequence.select_shared_kernel(model_args.attn_kernel, args, compute_dtype(args))
    found = find_checkpoint(args.resume_from_checkpoint, str(args.output_dir))
    checkpoint = None if found is None else str(found)
    packing = make_packing(model_args, data_args, args, checkpoint)
    check_loadable(**{name: getattr(model_args, name) for name in ("model_name_or_path", "vision_path", "llm_path")})
    style = chat_style(data_args.conv_style, config_of(model_args.model_name_or_path))
    data_args = replace(data_args, conv_style=style)
    data = make_data(model_args, data_args, args, packing, ranks)
    set_seed(args.seed)
    if model_args.compile:
        keep_compiled(str(args.output_dir))
    model = make_model(model_args, data_args, args, data.tokenizer, kernel.name, ranks)
    trainer = make_trainer(model_args, data_args, args, data, model)
    for callback in make_callbacks(model_args, data_args, trainer):
        trainer.add_callback(callback)
    return Run(trainer, data_args.packing_mode, checkpoint)


def compute_dtype(args: PackTrainingArguments) -> torch.dtype:
    """Of the products in training."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


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


# --- data


def make_data(
    model_args: ModelArguments,
    data_args: DataTrainingArguments,
    args: PackTrainingArguments,
    packing: PackingConfig,
    ranks: Ranks,
) -> Data:
    """The rows of this data rank, packed or padded, and the held-out ones.

    Raises:
        UserError: the data, the tokenizer or the budgets do not fit.
    """
    tokenizer = load_tokenizer(model_args)
    encode = data_args.encode_config(vision_config(model_args))
    place = {"rank": ranks.data_rank, "world_size": ranks.data_ranks}
    train: PackedDataset
    if data_args.packing_mode == PRESET:
        preset, meta = str(data_args.preset_path), data_args.meta_path or None
        train = PresetDataset.open(preset, meta, tokenizer, packing, encode=encode, **place)
    else:
        train = PackedDataset.from_meta(str(data_args.meta_path), tokenizer, packing, encode=encode, **place)
    row_budget = (packing.max_packed_tokens, packing.num_images_expected)
    if data_args.packing_mode == IN_BATCH:  # a pack is a sample, with its share of the row
        row_budget = (data_args.max_packed_tokens, data_args.num_images_expected)
    return Data(
        tokenizer=tokenizer,
        train=train,
        held_out=make_held_out(data_args, args, train),
        collator=make_collator(data_args, args, train),
        row_budget=row_budget,
    )


def load_tokenizer(model_args: ModelArguments) -> Any:
    """The checkpoint's tokenizer; that of a bare language model gets the tokens for images.

    Raises:
        UserError: there is none.
    """
    option = "model_name_or_path" if model_args.model_name_or_path else "llm_path"
    path = getattr(model_args, option)
    if not os.path.isdir(path) and not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path):
        raise UserError(f"--{option} {path}: no such folder, and no hub name, which is owner/name")
    try:
        tokenizer = tokenizers.load_tokenizer(path)
    except UserError as error:
        raise UserError(f"--{option} {error}") from error
    except (OSError, ValueError) as error:
        if not os.path.isdir(path) and os.environ.get("HF_HUB_OFFLINE") == "1":
            raise UserError(f"--{option} {path}: no such folder, and the hub is off (HF_HUB_OFFLINE=1)") from error
        raise UserError(f"--{option} {path}: no tokenizer found there: {str(error).splitlines()[0]}") from error
    if option == "llm_path":
        tokenizers.add_image_tokens(tokenizer)
    return tokenizer


def vision_config(model_args: ModelArguments) -> dict[str, Any]:
    """The config of the checkpoint that the vision tower is taken from."""
    option = "model_name_or_path" if model_args.model_name_or_path else "vision_path"
    path = getattr(model_args, option)
    try:
        config, _ = PreTrainedConfig.get_config_dict(path)
    except OSError as error:
        raise UserError(f"--{option} {path}: {str(error).splitlines()[0]}") from error
    return config


def make_held_out(
    data_args: DataTrainingArguments, args: PackTrainingArguments, train: PackedDataset
) -> PackedDataset | None:
    """Held-out data as this rank reads it: unshuffled, each sample once, packed by the same budgets.

    Raises:
        UserError: evaluation is asked for without data, or the data cannot be used.
    """
    strategy = str(getattr(args.eval_strategy, "value", args.eval_strategy))
    wanted = args.do_eval or strategy != "no"
    if wanted and not data_args.eval_meta_path:
        raise UserError(f"--{'do_eval' if strategy == 'no' else f'eval_strategy {strategy}'} needs --eval_meta_path")
    if data_args.eval_meta_path and not wanted:
        raise UserError("--eval_meta_path needs --do_eval True or --eval_strategy steps")
    if not wanted:
        return None
    specs = [replace(spec, repeat_time=1.0, weight=None) for spec in load_meta(str(data_args.eval_meta_path))]
    config = replace(
        train.config,
        shuffle=False,
        replacement=False,
        use_data_resampling=False,
        shuffle_buffer_size=None,
        packing=True,
    )
    samples = Samples.from_specs(specs, train.encoder)
    return PackedDataset(samples, config=config, rank=train.rank, world_size=train.world_size)


def make_collator(
    data_args: DataTrainingArguments, args: PackTrainingArguments, train: PackedDataset
) -> Callable[..., dict[str, Any]]:
    """Rows of `train` to a batch.

    Raises:
        UserError: rows would exceed their budget.
    """
    packs = 1 if data_args.packing_mode == IN_BATCH else args.per_device_train_batch_size
    padding: dict[str, Any] = {
        "pad_to": data_args.max_packed_tokens * packs if data_args.strict_mode else None,
        "pad_seq_to_mult": data_args.pad_seq_to_mult,
        "pad_cu_seqlens_to": data_args.pad_cu_seqlens_to,
    }
    if data_args.packing_mode in (STREAM, PRESET):
        return packed_collator(train, loss_reduction=data_args.loss_reduction, **padding)
    collator = partial(
        padded_collate_fn,
        pad_token_id=train.encoder.pad_token_id,
        image_size=train.encoder.config.image_size,
        loss_reduction=data_args.loss_reduction,
        image_token_id=train.encoder.image_context_id,
    )
    if data_args.packing_mode == IN_BATCH:
        budget = {name: getattr(data_args, name) for name in ("max_packed_tokens", "num_images_expected")}
        return partial(in_batch_collate_fn, **collator.keywords, **budget, **padding)
    return collator


# --- model, trainer, callbacks


def make_model(
    model_args: ModelArguments,
    data_args: DataTrainingArguments,
    args: PackTrainingArguments,
    tokenizer: Any,
    kernel: str,
    ranks: Ranks,
) -> PackedModel:
    """The model, with its rows shared over a sequence group where one is asked for.

    Raises:
        UserError: it cannot be loaded or trained so.
    """
    options = asdict(model_args) | {"attn_kernel": kernel}
    model = build_model(
        device=args.device,
        tokenizer=tokenizer,
        # DeepSpeed keeps the float32 weights itself; elsewhere bf16 is autocast over float32 weights.
        dtype=compute_dtype(args) if args.deepspeed else torch.float32,
        compute_dtype=compute_dtype(args),
        force_image_size=data_args.force_image_size,
        down_sample_ratio=data_args.down_sample_ratio,
        **options,
    )
    if ranks.sequence_parallel_size > 1:
        mode, timeout = args.sequence_parallel_mode, args.ddp_timeout_delta
        group = make_groups(ranks.world_size, ranks.sequence_parallel_size, mode, timeout)
        enable_sequence_parallel(model, group)
        logger.info("sequence parallelism: %d groups of %d GPUs, %s", group.dp_world, group.size, group.mode)
    return model


def make_trainer(
    model_args: ModelArguments,
    data_args: DataTrainingArguments,
    args: PackTrainingArguments,
    data: Data,
    model: PackedModel,
) -> PackTrainer:
    """The trainer of these data and this model.

    Raises:
        UserError: the model cannot be saved as asked, or the hub is out of reach.
    """
    saving = Saving(args.save_format, args.merge_lora, model_args.model_name_or_path, data.train.encoder.config)
    saving.check(model)
    try:
        return PackTrainer(
            model=model,
            args=args,
            train_dataset=data.train,
            eval_dataset=data.held_out,
            data_collator=data.collator,
            processing_class=data.tokenizer,
            row_budget=data.row_budget,
            loss_reduction_all_gather=data_args.loss_reduction_all_gather,
            router_loss_coef=model_args.router_loss_coef,
            saving=saving,
            also_saved={sequence.GIVEN: sequence.given_multiple(data_args)},
        )
    except OSError as error:  # what huggingface_hub raises
        if not args.push_to_hub:
            raise
        raise UserError(f"--push_to_hub True: {str(error).strip().splitlines()[0]}") from error


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
