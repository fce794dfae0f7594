"""Fine-tune InternVL on packed (or, for comparison, padded) rows.

    torchrun --nproc_per_node 8 train/finetune.py --model_name_or_path OpenGVLab/InternVL3-1B-hf \\
        --meta_path data/meta.json --use_packed_ds True --max_packed_tokens 16384 --num_images_expected 48 \\
        --deepspeed zero_stage1 --bf16 True --output_dir work_dirs/run

Also under `deepspeed`, and as plain `python` for one process. Writes into output_dir an ordinary
Hugging Face checkpoint with its tokenizer (or, by --save_format, one in InternVL's own format),
`train_summary.json`, and `quarantine.jsonl` with the samples that could not be used. Exit codes: 0 fine,
2 a user's mistake, told in one line, 75 stopped by a signal at a checkpoint, to be started again.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: find the packages without an installation
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from internvl_pack.errors import UserError
from train.environment import (
    INTERRUPTED,
    USER_ERROR,
    is_main_process,
    prepare_environment,
    report_error,
    set_up_logging,
    shut_down,
    telling_of_ports,
    wait_no_longer_than,
)

logger = logging.getLogger("train.finetune")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, train, save. Returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    run = None
    try:
        prepare_environment()
        set_up_logging()
        from train.options import parse

        with telling_of_ports():
            run = prepare(*parse(argv))
        return run.train()
    except UserError as error:
        report_error("finetune", error, everyone=run is not None)
        return USER_ERROR
    finally:
        shut_down()


@dataclass
class Run:
    """All that a training run consists of, ready to start."""

    trainer: Any
    quarantine: Any
    epochs: Any
    attn_kernel: str
    zero_stage: int
    checkpoint: str | None

    def train(self) -> int:
        """Train, save the model, tell what happened.

        Returns:
            The exit code: 0, or INTERRUPTED where a signal ended the run at a checkpoint.

        Raises:
            UserError: bad data that must stop the run.
        """
        from train import summary

        trainer = self.trainer
        try:
            with trainer.stop_request.listening():
                trainer.train(resume_from_checkpoint=self.checkpoint)
        except UserError:
            self.quarantine.flush_alone()
            raise
        self.quarantine.flush()
        if trainer.stopped_by:
            logger.warning(
                "stopped by %s after step %d: checkpoint-%d is complete, start again with "
                "--resume_from_checkpoint auto to go on from it (exit status %d)",
                *(trainer.stopped_by, trainer.state.global_step, trainer.state.global_step, INTERRUPTED),
            )
            trainer.wait_for_all()
            return INTERRUPTED
        ledger = self.epochs.ledger(trainer)
        if trainer.eval_loader is not None and trainer.args.do_eval:
            trainer.evaluate()
        trainer.save_model()
        trainer.save_state()
        if not trainer.metrics.here:
            logger.info("nothing was left to train; the summary of the run that ended stays as it is")
        elif is_main_process():
            figures = summary.summarise(trainer, ledger, zero_stage=self.zero_stage, attn_kernel=self.attn_kernel)
            summary.write(figures, trainer.args.output_dir)
            for line in summary.lines(figures, ledger):
                logger.info(line)
        return 0


def prepare(model_args: Any, data_args: Any, args: Any) -> Run:
    """Tokenizer, data, model and trainer from the options; what is quick to check comes first.

    Raises:
        UserError: a mistake in the options, the data or the environment.
    """
    import torch
    from transformers import set_seed

    from internvl_pack.checkpoints.internvl_format_files import chat_style, config_of
    from internvl_pack.model.build import build_model, check_loadable
    from internvl_pack.parallel import enable_sequence_parallel, make_groups
    from internvl_pack.parallel.agreement import Agreement
    from internvl_pack.sources.reach import allow
    from train import checkpoint_folders, progress, sequence
    from train.arguments import AUTO
    from train.callbacks import Epochs, FirstPacks, IsolationCheck, PackingReport, RunOptions
    from train.checkpointing import CheckpointByMemory
    from train.combinations import IN_BATCH, check_combinations
    from train.quarantine import Quarantine
    from train.ranks import Ranks
    from train.router_loss import RouterLoss
    from train.sample_log import SampleLog
    from train.saving import Saving
    from train.trainer import PackTrainer
    from train.warm_up import WarmUp, keep_compiled

    check_combinations(data_args.way, {**vars(args), **vars(data_args)})
    wait_no_longer_than(args.ddp_timeout)
    allow(remote=data_args.allow_remote, outside_root=data_args.allow_outside_root)
    ranks = Ranks(
        process=args.process_index,
        processes=args.world_size,
        sequence_parallel_size=args.sequence_parallel_size,
    )
    sequence.check_options(model_args, data_args, args)
    compute_dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    kernel = sequence.select_shared_kernel(model_args.attn_kernel, args, compute_dtype)
    seed = args.seed if args.data_seed is None else args.data_seed
    packing = data_args.packing_config(seed, samples_per_row=args.per_device_train_batch_size)
    packing = balanced_by_the_model(packing, model_args, data_args)
    found = checkpoint_folders.find(args.resume_from_checkpoint, args.output_dir)
    checkpoint = None if found is None else str(found)
    packing = sequence.fit_packing(packing, data_args, args, checkpoint)
    check_loadable(**{name: getattr(model_args, name) for name in ("model_name_or_path", "vision_path", "llm_path")})
    data_args.conv_style = chat_style(data_args.conv_style, config_of(model_args.model_name_or_path))
    tokenizer = load_tokenizer(model_args)
    loader = make_loader(model_args, data_args, args, tokenizer, packing, ranks)
    eval_loader = make_eval_loader(data_args, args, loader)
    set_seed(args.seed)
    if model_args.compile:
        keep_compiled(args.output_dir)
    model = build_model(
        device=args.device,
        tokenizer=tokenizer,
        # DeepSpeed keeps the float32 weights itself; elsewhere bf16 is autocast over float32 weights.
        dtype=compute_dtype if args.deepspeed else torch.float32,
        compute_dtype=compute_dtype,
        force_image_size=data_args.force_image_size,
        down_sample_ratio=data_args.down_sample_ratio,
        **(asdict(model_args) | {"attn_kernel": kernel.name}),
    )
    if ranks.sequence_parallel_size > 1:
        group = make_groups(
            ranks.processes, ranks.sequence_parallel_size, args.sequence_parallel_mode, args.ddp_timeout_delta
        )
        enable_sequence_parallel(model, group)
        logger.info("sequence parallelism: %d groups of %d GPUs, %s", group.dp_world, group.size, group.mode)
        loader.agreement = Agreement(group, args.ddp_timeout_delta)
        if eval_loader is not None:
            eval_loader.agreement = loader.agreement
    saving = Saving(args.save_format, args.merge_lora, model_args.model_name_or_path)
    saving.check(model, data_args)
    trainer = PackTrainer(
        model=model,
        args=args,
        train_dataset=loader,
        eval_dataset=eval_loader,
        processing_class=tokenizer,
        loss_reduction_all_gather=data_args.loss_reduction_all_gather,
        resume_ignore_options=args.resume_ignore_options,
        saving=saving,
        ranks=ranks,
        router_loss=RouterLoss(model_args.router_loss_coef, ranks.processes) if model.routing is not None else None,
        also_saved={sequence.GIVEN: sequence.given_multiple(data_args)},
    )
    progress.install(trainer, "packed" if data_args.use_packed_ds else "padded")
    quarantine = Quarantine(loader, args.output_dir, resumed=checkpoint is not None, ranks=ranks)
    epochs = Epochs()
    trainer.add_callback(quarantine)
    trainer.add_callback(epochs)
    trainer.add_callback(FirstPacks(trainer))
    trainer.add_callback(PackingReport(trainer, data_args.log_freq))
    trainer.add_callback(RunOptions(model_args, data_args))
    if args.log_sample_ids:
        trainer.add_callback(SampleLog(trainer, args.output_dir))
    packs = 1 if data_args.way == IN_BATCH else args.per_device_train_batch_size
    full_row = tuple(packs * budget for budget in loader.budget)
    if data_args.use_packed_ds and model_args.grad_checkpoint == AUTO:
        trainer.add_callback(CheckpointByMemory(trainer, *full_row))
    if data_args.use_packed_ds and model_args.compile:
        trainer.add_callback(WarmUp(trainer, *full_row))
    if data_args.use_packed_ds and (args.check_isolation or not model.family_is_known):
        trainer.add_callback(IsolationCheck(trainer))
    return Run(trainer, quarantine, epochs, kernel.name, zero_stage(args), checkpoint)


def balanced_by_the_model(packing: Any, model_args: Any, data_args: Any) -> Any:
    """Streamed packs are balanced by the operations of the model that is trained, where its config is at hand."""
    from internvl_pack.packing.cost import CostModel
    from train.combinations import STREAM

    folder = model_args.model_name_or_path
    if data_args.way != STREAM or data_args.cost_model or not folder or not Path(folder, "config.json").is_file():
        return packing
    try:
        CostModel.from_name(folder)
    except UserError as error:
        logger.info("packs are balanced by InternVL3-1B's costs: %s", error)
        return packing
    return replace(packing, cost_model=folder)


def load_tokenizer(model_args: Any) -> Any:
    """The checkpoint's tokenizer; that of a bare language model gets the tokens for images.

    Raises:
        UserError: there is none.
    """
    from internvl_pack.checkpoints import tokenizers

    option = "model_name_or_path" if model_args.model_name_or_path else "llm_path"
    path = getattr(model_args, option)
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


def make_loader(model_args: Any, data_args: Any, args: Any, tokenizer: Any, config: Any, ranks: Any) -> Any:
    """The batches of this data rank, packed or padded.

    Raises:
        UserError: the data or the budgets do not fit.
    """
    from internvl_pack import PresetDataset, in_batch_collate_fn
    from internvl_pack.batch.collate import padded_collate_fn
    from internvl_pack.stream.dataset import PackedDataset
    from internvl_pack.stream.loader import PackLoader, build_loader
    from train.combinations import IN_BATCH, PRESET, STREAM

    options = {
        "encode": data_args.encode_config(patch_size(model_args)),
        "rank": ranks.data_rank,
        "world_size": ranks.data_ranks,
    }
    if data_args.way == PRESET:
        dataset: PackedDataset = PresetDataset.open(
            data_args.preset_path, data_args.meta_path or None, tokenizer, config, **options
        )
    else:
        dataset = PackedDataset.from_meta(data_args.meta_path, tokenizer, config, **options)
    packs, workers = args.per_device_train_batch_size, args.dataloader_num_workers
    feeding = {
        "packs_per_batch": packs,
        "accumulation": args.gradient_accumulation_steps,
        "num_workers": workers,
        "pin_memory": args.dataloader_pin_memory and args.device.type == "cuda",
        "persistent_workers": args.dataloader_persistent_workers and workers > 0,
        "prefetch_factor": args.dataloader_prefetch_factor if workers else None,
    }
    per_row = 1 if data_args.way == IN_BATCH else packs
    padding = {
        "pad_to": data_args.max_packed_tokens * per_row if data_args.static_rows else None,
        "pad_seq_to_mult": data_args.pad_seq_to_mult,
        "pad_cu_seqlens_to": data_args.pad_cu_seqlens_to,
    }
    if data_args.way in (STREAM, PRESET):
        loader = build_loader(dataset, loss_reduction=data_args.loss_reduction, **padding, **feeding)
        loader.packing_mode = data_args.way
        return loader
    collate = partial(
        padded_collate_fn,
        pad_token_id=dataset.encoder.pad_token_id,
        image_size=dataset.encoder.config.image_size,
        loss_reduction=data_args.loss_reduction,
        image_token_id=dataset.encoder.image_context_id,
    )
    if data_args.way == IN_BATCH:
        budget = {name: getattr(data_args, name) for name in ("max_packed_tokens", "num_images_expected")}
        collate = partial(in_batch_collate_fn, **collate.keywords, **budget, **padding)
    loader = PackLoader(dataset, collate_fn=collate, **feeding)
    loader.packing_mode = data_args.way
    if data_args.way == IN_BATCH:
        loader.row_budget = (data_args.max_packed_tokens, data_args.num_images_expected)
    return loader


def make_eval_loader(data_args: Any, args: Any, loader: Any) -> Any:
    """Held-out data as this rank reads it: unshuffled, each sample once, packed by the same budgets.

    Raises:
        UserError: evaluation is asked for without data, or the data cannot be used.
    """
    from internvl_pack.samples import Samples
    from internvl_pack.sources import load_meta
    from internvl_pack.stream.dataset import PackedDataset
    from internvl_pack.stream.loader import build_loader

    wanted = args.do_eval or str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no"
    if wanted != bool(data_args.eval_meta_path):
        what = "needs --eval_meta_path" if wanted else "needs --do_eval True or --eval_strategy steps"
        raise UserError(f"--{'do_eval' if wanted else 'eval_meta_path'} {what}")
    if not wanted:
        return None
    train = loader.packed_dataset
    specs = [replace(spec, repeat_time=1.0, weight=None) for spec in load_meta(data_args.eval_meta_path)]
    config = replace(
        train.config,
        shuffle=False,
        replacement=False,
        use_data_resampling=False,
        shuffle_buffer_size=None,
        packing=True,
    )
    samples = Samples.from_specs(specs, train.encoder)
    dataset = PackedDataset(samples, config=config, rank=train.rank, world_size=train.world_size)
    return build_loader(dataset, num_workers=args.dataloader_num_workers)


def patch_size(model_args: Any) -> int:
    """Pixels along a patch of the vision tower, from the checkpoint's config; 14 where it does not say."""
    from transformers import PreTrainedConfig

    from internvl_pack.checkpoints.internvl_format_files import patch_size_of

    option = "model_name_or_path" if model_args.model_name_or_path else "vision_path"
    path = getattr(model_args, option)
    try:
        config, _ = PreTrainedConfig.get_config_dict(path)
    except OSError as error:
        raise UserError(f"--{option} {path}: {str(error).splitlines()[0]}") from error
    return patch_size_of(config)


def zero_stage(args: Any) -> int:
    """ZeRO stage of the run, 0 without DeepSpeed."""
    if not args.deepspeed:
        return 0
    return int(args.hf_deepspeed_config.get_value("zero_optimization.stage", 0))


if __name__ == "__main__":
    sys.exit(main())
