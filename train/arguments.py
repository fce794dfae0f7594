"""The options of `finetune.py`: three dataclasses for `HfArgumentParser`.

Names and meanings are those of InternVL's fine-tuning scripts; what is new says so in its help text.
What packing requires of the Hugging Face `Trainer` is the default here, and `PackTrainingArguments`
refuses values that would break it, naming the option.
"""

from __future__ import annotations

import math
import os
from argparse import ArgumentTypeError
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from internvl_pack.config import PackingConfig, RowOptions
from internvl_pack.encode.config import EncodeConfig
from internvl_pack.encode.tiles import TileOptions
from internvl_pack.errors import UserError
from internvl_pack.model.compiled import RECOMPUTE
from internvl_pack.model.experts import EXPERTS
from internvl_pack.model.fp8 import RECIPES
from internvl_pack.model.loss import LOSS_KERNELS
from internvl_pack.options import boolean, check_options, from_config, make, option
from internvl_pack.parallel.checks import MODES

from .checkpoint import is_none
from .combinations import IN_BATCH, PACKED_WAYS, PADDED, PRESET, STREAM
from .environment import find_deepspeed_config, join_deepspeed_on_cpu, prepare_deepspeed_on_cpu
from .preference import PreferenceArguments

AUTO = "auto"  # of grad_checkpoint
PADDED_MAX_SEQ_LENGTH = 8192  # InternVL's default of max_seq_length

packing_option = partial(from_config, PackingConfig)
row_option = partial(from_config, RowOptions)
encode_option = partial(from_config, EncodeConfig)


@dataclass
class ModelArguments:
    """Which model, and which of its parts are trained."""

    model_name_or_path: str | None = option(
        None,
        "Checkpoint folder or hub name of an InternVL: transformers' InternVLForConditionalGeneration (names ending in "
        "-hf), or InternVL's own InternVLChatModel.",
    )
    vision_path: str | None = option(None, "Vision tower to start from, with --llm_path, instead of a whole model.")
    llm_path: str | None = option(None, "Language model to start from, with --vision_path, instead of a whole model.")
    freeze_llm: bool = option(False, "Do not train the language model.")
    freeze_backbone: bool = option(False, "Do not train the vision tower.")
    freeze_mlp: bool = option(False, "Do not train the projector between the vision tower and the language model.")
    unfreeze_vit_layers: int = option(
        0,
        "With --freeze_backbone: train the vision layers from this index on, from the end if negative; 0: none.",
    )
    use_backbone_lora: int = option(0, "Rank of LoRA on the vision tower; 0: no LoRA. Needs peft.", at_least=0)
    use_llm_lora: int = option(0, "Rank of LoRA on the language model; 0: no LoRA. Needs peft.", at_least=0)
    grad_checkpoint: str = option(
        "True",
        "Gradient checkpointing in both towers: about a third more compute for much less memory. True: every layer; "
        "False: none; auto: those whose activations of a full row do not fit, found out before the first step, and "
        "every layer without packing or CUDA.",
        const="True",
        page="performance.md#checkpointing-by-memory",
    )
    drop_path_rate: float = option(
        0.0,
        "Stochastic depth of the vision tower: probability that a tile skips a branch of the last layer, less before.",
    )
    attn_kernel: str = option(
        "auto",
        "Attention of packed rows: auto, fa4, flash_attn, varlen (torch's own) or sdpa (any device). auto takes the "
        "first of these that runs here.",
    )
    loss_chunk: int = option(
        1024,
        "Logits are made for this many labelled tokens at a time: fewer need less memory, more are a little faster.",
        unit="tokens",
        at_least=1,
    )
    loss_kernel: str = option(
        "auto",
        "What makes losses and gradients of logits: torch, or liger-kernel's fused kernel. auto takes the compiler's "
        "with --compile, else liger where it is installed and gives the same loss.",
        choices=LOSS_KERNELS,
    )
    vision_micro_tiles: int | None = option(
        None,
        "Tiles that go through the vision tower at once, which bounds its memory where it is frozen or checkpointed. "
        "Default: all of a row.",
        unit="tiles",
        at_least=1,
    )
    compile: bool = option(
        False, "torch.compile the layers of both towers: a minute at the start, then a quarter faster and less memory."
    )
    compile_recompute: str = option(
        "language",
        "With --compile: whose layers compute norms and activation functions again in the backward pass instead of "
        "keeping them: all saves a third of the memory of none and is 1-2 % slower.",
        choices=RECOMPUTE,
    )
    fused_vision: bool = option(
        True,
        "With --compile: the vision tower's layers with their gradients written out, where they are as in InternVL's "
        "300M tower, the attention kernel is fa4 and the weights are in half precision (with --deepspeed: --bf16 or "
        "--fp16). False leaves them to torch.compile.",
        page="performance.md#the-vision-tower",
    )
    fp8: str | None = option(
        None,
        "Matrix products of the decoder layers in 8-bit floating point, by torchao, with a scale for each token, so "
        "that samples of a pack stay apart: rowwise for all of them, rowwise_with_gw_hp leaves gradients of weights "
        "in bfloat16. Default: not.",
        choices=RECIPES,
        page="performance.md#fp8",
    )
    experts_implementation: str = option(
        "auto",
        "How a mixture of experts is multiplied: grouped_mm (one grouped product), batched_mm or eager (a loop over "
        "experts). auto leaves it to transformers: grouped_mm.",
        choices=EXPERTS,
        page="attention.md#experts",
    )
    router_loss_coef: float = option(
        0.0,
        "Weight of a mixture of experts' balance loss, taken over the whole optimizer step; 0: none. With gradient "
        "accumulation each micro-batch is run forward once more, about a quarter more time.",
        at_least=0,
    )

    def __post_init__(self) -> None:
        given = str(self.grad_checkpoint)
        try:
            meant: Any = AUTO if given.lower() == AUTO else boolean(given)  # the parser's is str
            self.grad_checkpoint = meant
        except ArgumentTypeError:
            raise UserError(f"--grad_checkpoint {given}: give True, False or {AUTO}") from None
        parts = (self.vision_path, self.llm_path)
        if self.model_name_or_path is None and None in parts:
            raise UserError("--model_name_or_path is missing: give a checkpoint, or both --vision_path and --llm_path")
        if self.model_name_or_path is not None and any(parts):
            raise UserError("--model_name_or_path excludes --vision_path and --llm_path: give one or the others")
        if not 0.0 <= self.drop_path_rate < 1.0:
            raise UserError(f"--drop_path_rate {self.drop_path_rate}: give a probability, 0 or more and below 1")
        check_options(self, "--")


@dataclass
class PackingArguments:
    """How samples share rows."""

    use_packed_ds: bool = option(False, "Pack several samples into one row instead of padding each.")
    packing: str | None = option(
        None,
        "How rows are packed: stream (packs are planned while training reads the data), in_batch (the samples of a "
        "micro-batch in one row) or preset (planned before by internvl-pack plan). Default: stream with "
        "--use_packed_ds True, else not at all.",
        choices=PACKED_WAYS,
        page="offline.md",
    )
    max_packed_tokens: int = packing_option("max_packed_tokens")
    num_images_expected: int | None = packing_option("num_images_expected")
    max_seq_length: int | None = packing_option(
        "max_seq_length",
        help="Tokens of one sample at most; longer ones follow --oversize. Default: the token budget of a row with "
        f"packing, {PADDED_MAX_SEQ_LENGTH} without.",
    )
    oversize: str = packing_option("oversize")
    repeat_system_prompt: bool = packing_option("repeat_system_prompt")
    share_prefix: bool = packing_option("share_prefix")
    max_buffer_size: int = packing_option("max_buffer_size")
    packing_policy: str = packing_option("packing_policy")
    max_attention_cost: int | None = packing_option("max_attention_cost")
    pad_to_multiple_of: int = packing_option("pad_to_multiple_of")
    strict_mode: bool = row_option("strict_mode")
    pad_seq_to_mult: int = row_option("pad_seq_to_mult")
    pad_cu_seqlens_to: int | None = option(
        None,
        "Also give the boundaries of each row at this constant length (cu_seqlens_static), for CUDA graphs.",
        unit="boundaries",
        at_least=2,
    )
    cost_model: str | None = packing_option(
        "cost_model",
        default=None,
        help="Whose operations the packs of a step are balanced by: a size from 1B to 78B, or a model's config.json. "
        "Default: the model that is trained where it is a local folder, else 1B.",
    )
    survey_dir: str | None = packing_option("survey_dir")
    preset_path: str | None = option(
        None, "With --packing preset: the folder that internvl-pack plan wrote.", page="offline.md"
    )
    loss_reduction: str = row_option("loss_reduction")
    loss_reduction_all_gather: bool = option(
        True,
        "Divide the loss by its weights over all ranks, which makes it independent of how samples fall on them; "
        "False: over each rank's own.",
    )
    log_freq: int = option(
        1000,
        "Optimizer steps between two reports of packing on the console; 0: only at the end.",
        unit="steps",
        at_least=0,
    )


@dataclass
class DataTrainingArguments(PackingArguments):
    """Which data, and how it becomes tokens and tiles."""

    meta_path: str | None = option(
        None,
        "Meta file: JSON of {dataset: {root, annotation, repeat_time, ...}}; or, also as --data, a path of data itself "
        "(JSON lines, Parquet, a saved Dataset, tar shards). A preset that holds its data needs none.",
        page="data.md",
    )
    eval_meta_path: str | None = option(
        None, "Meta file of held-out data for --do_eval (after training) and --eval_strategy; each sample once."
    )
    objective: str | None = encode_option(
        "objective",
        default=None,
        help="What is trained: sft (conversations, groups of answers), or on pairs of a chosen and a rejected answer "
        "dpo or mpo. Default: sft; with --loss_type that of its losses.",
    )
    family_check: str | None = encode_option("family")
    conv_style: str | None = encode_option("conv_style")
    force_image_size: int | None = encode_option("image_size")
    down_sample_ratio: float | None = from_config(TileOptions, "down_sample_ratio")
    dynamic_image_size: bool = encode_option("dynamic_image_size")
    use_thumbnail: bool = encode_option("use_thumbnail")
    min_dynamic_patch: int = encode_option("min_dynamic_patch")
    max_dynamic_patch: int = encode_option("max_dynamic_patch")
    min_pixels: int | None = encode_option("min_pixels")
    max_pixels: int | None = encode_option("max_pixels")
    video_max_pixels: int | None = encode_option("video_max_pixels")
    min_num_frame: int = encode_option("min_num_frame")
    max_num_frame: int = encode_option("max_num_frame")
    max_image_pixels: int = encode_option("max_image_pixels")
    allow_truncated_images: bool = encode_option("allow_truncated_images")
    apply_exif_orientation: bool = encode_option("apply_exif_orientation")
    transparent_background: str | None = encode_option("transparent_background")
    allow_remote: str | None = option(
        None,
        "Hosts that rows may name besides those of the meta file, with commas between; any: all public ones, none: not "
        "even those. Default: INTERNVL_PACK_ALLOW_REMOTE of the environment.",
        page="data.md#data-by-address",
    )
    allow_outside_root: bool | None = option(
        None,
        "Rows may name files outside the root of their dataset. Default: INTERNVL_PACK_ALLOW_OUTSIDE_ROOT of the "
        "environment.",
    )
    replacement: bool = packing_option("replacement")
    use_data_resampling: bool = packing_option("use_data_resampling")
    shuffle_buffer_size: int | None = packing_option("shuffle_buffer_size")
    on_error: str = packing_option("on_error")
    max_bad_fraction: float = packing_option("max_bad_fraction")

    def __post_init__(self) -> None:
        if not self.meta_path and self.packing != PRESET:
            raise UserError("--meta_path is missing: give the meta file of the data")
        for name in ("meta_path", "eval_meta_path"):
            path = getattr(self, name)
            # A pattern is expanded when the data is opened.
            if path and not any(mark in path for mark in "{*?[") and not Path(path).exists():
                where = "" if os.path.isabs(path) else f" (working folder: {os.getcwd()})"
                raise UserError(f"--{name} {path}: no such file{where}")
        check_options(self, "--")
        self.use_packed_ds = self.use_packed_ds or self.packing is not None

    @property
    def packing_mode(self) -> str:
        """How rows are made: padded, stream, in_batch or preset."""
        return self.packing or (STREAM if self.use_packed_ds else PADDED)

    @property
    def pad_multiple(self) -> int:
        """What a sample's share of the budget is rounded up to, in tokens."""
        return math.lcm(self.pad_to_multiple_of, self.pad_seq_to_mult)

    def packing_config(self, seed: int, samples_per_row: int = 1) -> PackingConfig:
        """Budgets and order.

        Without packing the same budgets bound a sample, so that both modes train the same data. With in_batch each of
        the `samples_per_row` samples has its share of the row's, so that no micro-batch exceeds it.
        """
        tokens, tiles = self.max_packed_tokens, self.num_images_expected
        if tiles is None:
            tiles = PackingConfig.num_images_expected
        if self.packing_mode == PADDED:
            tokens = self.max_seq_length or PADDED_MAX_SEQ_LENGTH
        elif self.packing_mode == IN_BATCH:
            tokens, tiles = tokens // samples_per_row, tiles // samples_per_row
        return make(
            PackingConfig,
            vars(self),
            max_packed_tokens=tokens,
            num_images_expected=tiles,
            pad_to_multiple_of=self.pad_multiple,
            packing=self.packing_mode in (STREAM, PRESET),
            seed=seed,
        )


COMPILES_ALL = (None, "it compiles the whole model as one piece: use --compile")
# Options of the Trainer that packing needs at one value, and why. The defaults below agree.
REQUIRED: dict[str, tuple[Any, str]] = {
    "remove_unused_columns": (
        False,
        "the boundaries of samples within a row are columns that the Trainer does not know",
    ),
    "auto_find_batch_size": (False, "the row's size is set by --max_packed_tokens, lower that one instead"),
    "average_tokens_across_devices": (False, "the loss is already exact over all ranks, it would be scaled twice"),
    "logging_nan_inf_filter": (False, "a loss that is not finite must show"),
    "label_smoothing_factor": (0.0, "the loss is computed where there is a label only, without smoothing"),
    "neftune_noise_alpha": (None, "it patches the model's embeddings"),
    "load_best_model_at_end": (False, "checkpoints are resumed from, not chosen between: load the one you want"),
    "include_num_input_tokens_seen": ("no", "tokens are counted exactly under num_real_tokens"),
    **dict.fromkeys(("torch_compile", "torch_compile_backend", "torch_compile_mode"), COMPILES_ALL),
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), (False, "held-out data is computed as the training's")),
    "do_predict": (False, "held-out data is evaluated: use --do_eval"),
    "dataloader_drop_last": (False, "every pack is trained: the last step of an epoch may have fewer"),
    "ignore_data_skip": (False, "a resumed run goes on with the next pack, nothing is read anew"),
    "enable_jit_checkpoint": (False, "a run that gets a signal saves a checkpoint and stops by itself"),
    "fsdp": (None, "use --sharding fsdp2 to shard parameters"),
    "parallelism_config": (None, "use --sequence_parallel_size to share rows between GPUs"),
    "train_sampling_strategy": ("random", "the order is the dataset's, see --seed and --use_data_resampling"),
}


@dataclass
class PackTrainingArguments(PreferenceArguments, TrainingArguments):
    """`TrainingArguments` with the defaults that packing needs, checked at start."""

    output_dir: str | None = option(None, "Folder of the trained model, its checkpoints and reports.")
    learning_rate: float = option(5e-5, "Largest learning rate of the schedule.")
    num_train_epochs: float = option(3.0, "Epochs to train; --max_steps takes precedence.")
    bf16: bool = option(False, "Compute in bfloat16.")
    deepspeed: dict | str | None = option(  # noqa: RUF009
        None,
        "DeepSpeed config: a file, or the name of one that is shipped: zero_stage1, zero_stage2, zero_stage3, "
        "zero_stage3_offload.",
    )
    sharding: str | None = option(
        None,
        "Shard weights, gradients and optimizer states over all GPUs, by torch instead of DeepSpeed: fsdp2. Default: "
        "whole on each, or as --deepspeed says.",
        choices=("fsdp2",),
        page="performance.md#models-that-do-not-fit-zero-1",
    )
    per_device_train_batch_size: int = option(
        1,
        "Packs flattened into one row; with --packing in_batch samples of a row, without packing samples of a batch.",
        at_least=1,
    )
    gradient_accumulation_steps: int = option(1, "Micro-batches of each rank in one optimizer step.", at_least=1)
    dataloader_num_workers: int = option(
        0, "Reader processes of each rank; packs are the same with any number.", unit="processes", at_least=0
    )
    average_tokens_across_devices: bool = option(False, "Must stay False: the loss is already exact over all ranks.")
    logging_nan_inf_filter: bool = option(False, "Must stay False: a loss that is not finite must show.")
    log_level_replica: str = option("error", "Level of transformers' log on ranks other than the first.")
    sequence_parallel_size: int = option(
        1,
        "GPUs that share each packed row, for rows too long for one: its tokens and its tiles are divided among them. "
        "It must divide the processes; each group of so many reads rows of its own.",
        unit="GPUs",
        at_least=1,
        page="sequence-parallel.md",
    )
    sequence_parallel_mode: str = option(
        "ulysses",
        "How GPUs that share a row attend: ulysses (each to the whole row with a part of the heads, which their number "
        "must divide) or ring (keys and values go round; any number of GPUs).",
        choices=MODES,
    )
    logging_steps: float = option(1, "Optimizer steps between two lines of the log.", unit="steps")
    ddp_find_unused_parameters: bool | None = option(
        False, "Search for unused parameters at every step: never needed, all take part in every row."
    )
    remove_unused_columns: bool = option(False, "Must stay False: rows carry columns that the Trainer does not know.")
    save_only_model: bool = option(False, "Checkpoints without optimizer state and without the data's: no resume.")
    save_format: str = option(
        "hf",
        "Format of the model that is saved: transformers' InternVLForConditionalGeneration, or InternVL's own "
        "InternVLChatModel, with the other files of --model_name_or_path where that is one.",
        choices=("hf", "internvl"),
        page="checkpoints.md",
    )
    merge_lora: bool = option(
        True,
        "With LoRA: save the whole model, LoRA merged into its weights (and the adapters in the folder adapter); "
        "False: the adapters alone, for peft.",
    )
    overwrite_output_dir: bool = option(
        False,
        "Start anew although output_dir holds checkpoints, whose places those of this run take. False: go on from the "
        "newest complete one. --resume_from_checkpoint says otherwise.",
    )
    resume_from_checkpoint: str | None = option(
        None,
        "Checkpoint folder to go on from, auto for the newest complete one in output_dir, or False. Default: as "
        "--overwrite_output_dir says.",
        page="resume.md",
    )
    resume_ignore_options: bool = option(
        False, "Resume although options that the order of packs depends on have changed: the order then differs."
    )
    log_sample_ids: bool = option(
        False, "Write the ids of the samples of every optimizer step to output_dir/sample_ids, a file a rank."
    )
    check_isolation: bool = option(
        True,
        "Before training, prove on the model as it will train that no sample of a pack sees another (some seconds).",
    )

    def __post_init__(self) -> None:
        for name, (value, why) in REQUIRED.items():
            given = getattr(self, name, value)
            if given != value and given not in (None, "", [], False):
                raise UserError(f"--{name} {given} does not go with this trainer ({why}): leave it out")
        check_options(self, "--")
        if not self.output_dir:
            raise UserError("--output_dir is missing: give the folder of the trained model and its checkpoints")
        if self.max_steps <= 0 and not self.num_train_epochs > 0:
            raise UserError(f"--num_train_epochs {self.num_train_epochs}: give more than 0, or --max_steps")
        if self.save_only_model and not is_none(self.resume_from_checkpoint):
            raise UserError("--save_only_model leaves nothing to resume from: drop it or --resume_from_checkpoint")
        if self.resume_from_checkpoint is None and not (self.overwrite_output_dir or self.save_only_model):
            self.resume_from_checkpoint = "auto"
        if isinstance(self.deepspeed, str):
            self.deepspeed = str(find_deepspeed_config(self.deepspeed))
        if not torch.accelerator.is_available():
            self.use_cpu = True  # without it transformers refuses bf16, and accelerate looks for NCCL
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed warns where it has to find out
        if self.deepspeed and self.use_cpu:
            prepare_deepspeed_on_cpu()
        if self.label_names is None:
            self.label_names = ["labels"]
        given = self.accelerator_config
        if isinstance(given, str) and not given.lstrip().startswith("{") and not Path(given).is_file():
            raise UserError(f"--accelerator_config {given}: no such file")
        try:
            super().__post_init__()
        except (ValueError, TypeError, ImportError, OSError) as error:
            raise UserError(" ".join(str(error).split())) from error
        for name in ("split_batches", "dispatch_batches"):
            if getattr(self.accelerator_config, name):
                raise UserError(
                    f"--accelerator_config {name}=True: each rank reads its own packs, accelerate must not split or "
                    f"dispatch batches; leave {name} out"
                )
        self._check_reports()
        if self.deepspeed and (size := self.hf_deepspeed_config.config.get("sequence_parallel_size", 1)) != 1:
            raise UserError(
                f"the DeepSpeed config's sequence_parallel_size {size}: use --sequence_parallel_size {size}, "
                "and leave it out there: DeepSpeed would scale gradients by it, by some ZeRO stages only"
            )
        if self.deepspeed and self.use_cpu:
            join_deepspeed_on_cpu()

    def _check_reports(self) -> None:
        """Where to report to, while nothing has been loaded."""
        from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

        for name in self.report_to or ():  # a list by now
            try:
                INTEGRATION_TO_CALLBACK[name]()
            except KeyError:
                known = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
                raise UserError(f"--report_to {name} is unknown: use none or one of {known}") from None
            except (RuntimeError, ImportError) as error:
                raise UserError(f"--report_to {name}: it is not installed: pip install {name}, or use none") from error


def compute_dtype(args: TrainingArguments) -> torch.dtype:
    """Of the products in training."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
