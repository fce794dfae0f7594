"""The options of `finetune.py`: three dataclasses for `HfArgumentParser`.

Names and meanings are those of InternVL's fine-tuning scripts; what is new says so in its help text.
What packing requires of the Hugging Face `Trainer` is the default here, and `PackTrainingArguments`
refuses values that would break it, naming the option.
"""

from __future__ import annotations

import json
import math
import os
import re
from argparse import ArgumentTypeError
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import TrainingArguments
from transformers.hf_argparser import string_to_bool

from internvl_pack.config import PackingConfig
from internvl_pack.errors import UserError
from internvl_pack.parallel.checks import check_mode, check_world

from .combinations import IN_BATCH, PACKED_WAYS, PADDED, PRESET, STREAM
from .environment import join_deepspeed_on_cpu, prepare_deepspeed_on_cpu

CONFIGS = Path(__file__).resolve().parent / "configs"
AUTO = "auto"  # of grad_checkpoint
PADDED_MAX_SEQ_LENGTH = 8192  # InternVL's default of max_seq_length


def option(default: Any, text: str, **words: Any) -> Any:
    return field(default=default, metadata={"help": text, **words})


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
    use_backbone_lora: int = option(0, "Rank of LoRA on the vision tower; 0: no LoRA. Needs peft.")
    use_llm_lora: int = option(0, "Rank of LoRA on the language model; 0: no LoRA. Needs peft.")
    grad_checkpoint: str = option(
        "True",
        "Gradient checkpointing in both towers: about a third more compute for much less memory. True: every layer; "
        "False: none; auto: those whose activations of a full row do not fit, found out before the first step, and "
        "every layer without packing or CUDA.",
        nargs="?",
        const="True",
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
    )
    loss_kernel: Literal["auto", "torch", "liger"] = option(
        "auto",
        "What makes losses and gradients of logits: torch, or liger-kernel's fused kernel. auto takes the compiler's "
        "with --compile, else liger where it is installed and gives the same loss.",
    )
    vision_micro_tiles: int | None = option(
        None,
        "Tiles that go through the vision tower at once, which bounds its memory where it is frozen or checkpointed. "
        "Default: all of a row.",
    )
    compile: bool = option(
        False, "torch.compile the layers of both towers: a minute at the start, then a quarter faster and less memory."
    )
    compile_recompute: Literal["none", "language", "all"] = option(
        "language",
        "With --compile: whose layers compute norms and activation functions again in the backward pass instead of "
        "keeping them: all saves a third of the memory of none and is 1-2 % slower.",
    )
    fused_vision: bool = option(
        True,
        "With --compile: the vision tower's layers with their gradients written out, where they are as in InternVL's "
        "300M tower, the attention kernel is fa4 and the weights are in half precision (with --deepspeed: --bf16 or "
        "--fp16). False leaves them to torch.compile.",
    )

    experts_implementation: Literal["auto", "eager", "grouped_mm", "batched_mm"] = option(
        "auto",
        "How a mixture of experts is multiplied: grouped_mm (one grouped product), batched_mm or eager (a loop over "
        "experts). auto leaves it to transformers: grouped_mm.",
    )
    router_loss_coef: float = option(
        0.0,
        "Weight of a mixture of experts' balance loss, taken over the whole optimizer step; 0: none. With gradient "
        "accumulation each micro-batch is run forward once more, about a quarter more time.",
    )

    def __post_init__(self) -> None:
        self.grad_checkpoint = _checkpointing(self.grad_checkpoint)  # type: ignore[assignment]  # the parser's is str
        parts = (self.vision_path, self.llm_path)
        if self.model_name_or_path is None and None in parts:
            raise UserError("--model_name_or_path is missing: give a checkpoint, or both --vision_path and --llm_path")
        if self.model_name_or_path is not None and any(parts):
            raise UserError("--model_name_or_path excludes --vision_path and --llm_path: give one or the others")
        if not 0.0 <= self.drop_path_rate < 1.0:
            raise UserError(f"--drop_path_rate {self.drop_path_rate}: give a probability, 0 or more and below 1")
        for name in ("use_backbone_lora", "use_llm_lora"):
            if getattr(self, name) < 0:
                raise UserError(f"--{name} {getattr(self, name)}: give the rank of LoRA, or 0 for none")
        if not self.router_loss_coef >= 0.0:
            raise UserError(f"--router_loss_coef {self.router_loss_coef}: give 0 or more")
        if self.loss_chunk < 1:
            raise UserError(f"--loss_chunk {self.loss_chunk}: give at least 1 token")
        if self.vision_micro_tiles is not None and self.vision_micro_tiles < 1:
            raise UserError(f"--vision_micro_tiles {self.vision_micro_tiles}: give at least 1 tile, or leave it out")


@dataclass
class DataTrainingArguments:
    """Which data, how it becomes tokens and tiles, and how samples share rows."""

    meta_path: str | None = option(
        None,
        "Meta file: JSON of {dataset: {root, annotation, repeat_time, ...}}. A preset that holds its data needs none.",
    )
    eval_meta_path: str | None = option(
        None, "Meta file of held-out data for --do_eval (after training) and --eval_strategy; each sample once."
    )
    conv_style: str | None = option(
        None, "Chat format of the conversations. Default: the checkpoint's `template` if it has one, else internvl2_5."
    )
    max_seq_length: int | None = option(
        None,
        "Tokens of one sample at most; longer ones follow --oversize. Default: max_packed_tokens with packing, "
        f"{PADDED_MAX_SEQ_LENGTH} without.",
    )
    force_image_size: int = option(448, "Side of a tile, pixels.")
    down_sample_ratio: float = option(
        0.5, "Of the vision tower's patches to tokens, a side: 0.5 gives (448/14)^2 * 0.25 = 256 tokens a tile."
    )
    dynamic_image_size: bool = option(
        False, "Cut images into several tiles by their shape; otherwise one tile an image."
    )
    use_thumbnail: bool = option(False, "With more than one tile, add the whole image as one more.")
    min_dynamic_patch: int = option(1, "Tiles of an image at least, without the thumbnail.")
    max_dynamic_patch: int = option(12, "Tiles of an image at most, without the thumbnail; several images share them.")
    min_num_frame: int = option(8, "Frames taken of a video at least.")
    max_num_frame: int = option(32, "Frames taken of a video at most; the number is drawn for each sample.")
    allow_remote: str | None = option(
        None,
        "Hosts that rows may name besides those of the meta file, with commas between; any: all public ones, none: not "
        "even those. Default: INTERNVL_PACK_ALLOW_REMOTE of the environment.",
    )
    allow_outside_root: bool | None = option(
        None,
        "Rows may name files outside the root of their dataset. Default: INTERNVL_PACK_ALLOW_OUTSIDE_ROOT of the "
        "environment.",
    )
    max_image_pixels: int = option(
        2**26, "Width x height above which an image is refused from its header; decoding needs up to 32 bytes a pixel."
    )
    allow_truncated_images: bool = option(False, "Accept image files that are cut off, the missing part grey.")
    apply_exif_orientation: bool = option(True, "Turn photographs upright as their EXIF orientation says.")
    transparent_background: str | None = option(
        None,
        "Colour (white, #ff8800) that transparent pixels are composited on. Default: alpha is dropped, as in InternVL.",
    )
    normalize_type: Literal["imagenet", "clip", "siglip"] = option(
        "imagenet", "Mean and deviation of pixels; the native model has ImageNet's."
    )
    use_packed_ds: bool = option(False, "Pack several samples into one row instead of padding each.")
    packing: str | None = option(
        None,
        "How rows are packed: stream (planned while training), in_batch (the samples of a micro-batch in one row) or "
        "preset (planned before by internvl-pack plan). Default: stream with --use_packed_ds True, else not at all.",
    )
    preset_path: str | None = option(None, "With --packing preset: the folder that internvl-pack plan wrote.")
    max_packed_tokens: int = option(8192, "Token budget of a row.")
    num_images_expected: int = option(40, "Tile budget of a row, thumbnails included.")
    max_buffer_size: int = option(64, "Look-ahead of the packer (records, not decoded samples).")
    strict_mode: bool = option(
        False, "Pad each row to max_packed_tokens with one isolated, unlabelled segment, so that all have one shape."
    )
    pad_to_max_length: bool = option(False, "The same as --strict_mode: rows of one static shape.")
    pad_seq_to_mult: int = option(
        1, "Pad each sample of a row to a multiple of this many tokens, as context parallelism and FP8 want."
    )
    pad_cu_seqlens_to: int | None = option(
        None, "Also give the boundaries of each row at this constant length (cu_seqlens_static), for CUDA graphs."
    )
    loss_reduction: Literal["token", "sample", "square"] = option(
        "token", "A supervised token of a sample with n of them weighs 1, 1/n or 1/sqrt(n)."
    )
    loss_reduction_all_gather: bool = option(
        True,
        "Divide the loss by its weights over all ranks, which makes it independent of how samples fall on them; "
        "False: over each rank's own.",
    )
    replacement: bool = option(
        False, "Draw samples with replacement by the datasets' weights, instead of each once an epoch."
    )
    use_data_resampling: bool = option(False, "Weigh datasets by the square root of their length.")
    shuffle_buffer_size: int | None = option(
        None,
        "Samples shuffled together in an order that reads shard after shard, for slow disks and shards far away. "
        "Default: all data is shuffled at once.",
    )
    log_freq: int = option(1000, "Report packing on the console every this many optimizer steps; 0: only at the end.")
    survey_dir: str | None = option(
        None,
        "Folder of the surveyed lengths, which later runs use again. Default: INTERNVL_PACK_CACHE or the user's cache.",
    )
    num_lanes: int | None = option(None, "Accepted and not needed any more: all readers follow one plan.")
    packing_policy: str = option(
        "subset_sum", "How packs are chosen: subset_sum (fullest), greedy or next_fit (the simplest)."
    )
    oversize: str = option(
        "split", "A sample that exceeds a budget: split at turns, truncate, drop (counted), or error (stops the run)."
    )
    repeat_system_prompt: bool = option(
        False, "Begin each later part of a split sample with its system turn, as untrained context."
    )
    max_attention_cost: int | None = option(
        None, "Sum of squared sample lengths of a row, tokens^2, at most. Bounds the slowest step. Default: no bound."
    )
    pad_to_multiple_of: int = option(1, "Round each sample's share of the budget up to a multiple of this many tokens.")
    balance_reservoir: int | None = option(
        None, "Accepted and not needed any more: packs of a step are of like cost by themselves."
    )
    cost_model: str | None = option(
        None,
        "Whose operations packs of all ranks are balanced by: 1B, 2B, 8B, 14B, 38B, 78B or a config.json. "
        "Default: the model that is trained where it is a local folder, else 1B.",
    )
    on_error: Literal["skip", "stop"] = option(
        "skip", "A sample that cannot be used: skip and count it, or stop the run."
    )
    max_bad_fraction: float = option(1.0, "Stop when more than this share of the samples read could not be used.")

    def __post_init__(self) -> None:
        if not self.meta_path and self.packing != PRESET:
            raise UserError("--meta_path is missing: give the meta file of the data")
        if self.meta_path and not Path(self.meta_path).is_file():
            raise UserError(f"--meta_path {self.meta_path}: no such file")
        if self.eval_meta_path and not Path(self.eval_meta_path).is_file():
            raise UserError(f"--eval_meta_path {self.eval_meta_path}: no such file")
        if self.normalize_type != "imagenet":
            raise UserError(
                f"--normalize_type {self.normalize_type}: the native InternVL is trained on ImageNet's mean and "
                "deviation, use imagenet"
            )
        if not 1 <= self.min_dynamic_patch <= self.max_dynamic_patch:
            raise UserError(
                f"--min_dynamic_patch {self.min_dynamic_patch} and --max_dynamic_patch {self.max_dynamic_patch}: "
                "give at least 1 and not more than the maximum"
            )
        if self.packing is not None:
            if self.packing not in PACKED_WAYS:
                raise UserError(f"--packing {self.packing}: use one of {', '.join(PACKED_WAYS)}")
            self.use_packed_ds = True
        if self.pad_seq_to_mult < 1:
            raise UserError(f"--pad_seq_to_mult {self.pad_seq_to_mult}: give at least 1 token")
        if self.pad_cu_seqlens_to is not None and self.pad_cu_seqlens_to < 2:
            raise UserError(f"--pad_cu_seqlens_to {self.pad_cu_seqlens_to}: give at least 2 boundaries")
        if self.log_freq < 0:
            raise UserError(f"--log_freq {self.log_freq}: give optimizer steps, or 0 for the end only")

    @property
    def way(self) -> str:
        """How rows are made: padded, stream, in_batch or preset."""
        return self.packing or (STREAM if self.use_packed_ds else PADDED)

    @property
    def static_rows(self) -> bool:
        """Whether every row is padded to its budget."""
        return self.strict_mode or self.pad_to_max_length

    def tokens_per_tile(self, patch_size: int) -> int:
        """Tokens of one tile: (force_image_size / patch * down_sample_ratio)^2.

        Raises:
            UserError: the tile does not divide into whole tokens.
        """
        side = self.force_image_size / patch_size * self.down_sample_ratio
        if self.force_image_size % patch_size or side < 1 or not math.isclose(side, round(side)):
            raise UserError(
                f"--force_image_size {self.force_image_size} with patches of {patch_size} pixels and "
                f"--down_sample_ratio {self.down_sample_ratio} gives {side:g} tokens a side: it must be a whole number"
            )
        return round(side) ** 2

    def packing_config(self, seed: int, samples_per_row: int = 1) -> PackingConfig:
        """Budgets and order.

        Without packing the same budgets bound a sample, so that both ways train the same data. With in_batch each of
        the `samples_per_row` samples has its share of the row's, so that no micro-batch exceeds it.
        """
        max_seq_length = self.max_seq_length
        max_packed_tokens = self.max_packed_tokens
        max_tiles = self.num_images_expected
        if self.way == PADDED:
            max_packed_tokens = max_seq_length or PADDED_MAX_SEQ_LENGTH
        elif self.way == IN_BATCH:
            max_packed_tokens, max_tiles = max_packed_tokens // samples_per_row, max_tiles // samples_per_row
        return PackingConfig(
            max_packed_tokens=max_packed_tokens,
            num_images_expected=max_tiles,
            max_seq_length=max_seq_length,
            max_buffer_size=self.max_buffer_size,
            packing_policy=self.packing_policy,
            oversize=self.oversize,
            repeat_system_prompt=self.repeat_system_prompt,
            max_attention_cost=self.max_attention_cost,
            pad_to_multiple_of=math.lcm(self.pad_to_multiple_of, self.pad_seq_to_mult),
            balance_reservoir=self.balance_reservoir,
            cost_model=self.cost_model or "1B",
            num_lanes=self.num_lanes,
            packing=self.way in (STREAM, PRESET),
            seed=seed,
            replacement=self.replacement,
            use_data_resampling=self.use_data_resampling,
            shuffle_buffer_size=self.shuffle_buffer_size,
            on_error=self.on_error,
            max_bad_fraction=self.max_bad_fraction,
            survey_dir=self.survey_dir,
        )

    def encode_config(self, patch_size: int) -> Any:
        """Chat format and tiles. Imported late: help and early errors need no image library."""
        from internvl_pack.encode.sample import EncodeConfig

        return EncodeConfig(
            conv_style=self.conv_style or "internvl2_5",
            image_size=self.force_image_size,
            tokens_per_tile=self.tokens_per_tile(patch_size),
            min_dynamic_patch=self.min_dynamic_patch,
            max_dynamic_patch=self.max_dynamic_patch,
            use_thumbnail=self.use_thumbnail,
            dynamic_image_size=self.dynamic_image_size,
            min_num_frame=self.min_num_frame,
            max_num_frame=self.max_num_frame,
            max_image_pixels=self.max_image_pixels,
            allow_truncated_images=self.allow_truncated_images,
            apply_exif_orientation=self.apply_exif_orientation,
            transparent_background=self.transparent_background,
        )


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
    "torch_compile": (False, "it compiles the whole model as one piece: use --compile"),
    "fsdp": (None, "use --deepspeed zero_stage3 to shard parameters"),
    "train_sampling_strategy": ("random", "the order is the dataset's, see --seed and --use_data_resampling"),
}
ACCELERATOR = {"split_batches": False, "dispatch_batches": False, "even_batches": False}


@dataclass
class PackTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the defaults that packing needs, checked at start."""

    per_device_train_batch_size: int = option(
        1,
        "Packs flattened into one row; with --packing in_batch samples of a row, without packing samples of a batch.",
    )
    gradient_accumulation_steps: int = option(1, "Micro-batches of each rank in one optimizer step.")
    average_tokens_across_devices: bool = option(False, "Must stay False: the loss is already exact over all ranks.")
    logging_nan_inf_filter: bool = option(False, "Must stay False: a loss that is not finite must show.")
    log_level_replica: str = option("error", "Level of transformers' log on ranks other than the first.")
    sequence_parallel_size: int = option(
        1,
        "GPUs that share each packed row, for rows too long for one: its tokens and its tiles are divided among them "
        "(docs/sequence-parallel.md). It must divide the processes; each group of so many reads rows of its own.",
    )
    sequence_parallel_mode: str = option(
        "ulysses",
        "How GPUs that share a row attend: ulysses (each to the whole row with a part of the heads, which their number "
        "must divide) or ring (keys and values go round; any number of GPUs).",
    )
    logging_steps: float = option(1, "Log every this many optimizer steps.")
    ddp_find_unused_parameters: bool | None = option(
        False, "Search for unused parameters at every step: never needed, all take part in every row."
    )
    remove_unused_columns: bool = option(False, "Must stay False: rows carry columns that the Trainer does not know.")
    save_only_model: bool = option(False, "Checkpoints without optimizer state and without the data's: no resume.")
    save_format: Literal["hf", "internvl"] = option(
        "hf",
        "Format of the model that is saved: transformers' InternVLForConditionalGeneration, or InternVL's own "
        "InternVLChatModel, with the other files of --model_name_or_path where that is one.",
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
            given = getattr(self, name)
            if given != value and given not in (None, "", [], False):
                raise UserError(f"--{name} {given} does not go with this trainer ({why}): leave it out, or {value}")
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)}: give at least 1")
        if self.dataloader_num_workers < 0:
            raise UserError(f"--dataloader_num_workers {self.dataloader_num_workers}: give 0 or more processes")
        if self.max_steps <= 0 and not self.num_train_epochs > 0:
            raise UserError(f"--num_train_epochs {self.num_train_epochs}: give more than 0, or --max_steps")
        if self.save_only_model and self.resume_from_checkpoint:
            raise UserError("--save_only_model leaves nothing to resume from: drop it or --resume_from_checkpoint")
        if self.resume_from_checkpoint is None and not (self.overwrite_output_dir or self.save_only_model):
            self.resume_from_checkpoint = "auto"
        if self.sequence_parallel_size < 1:
            check_world(1, self.sequence_parallel_size)
        check_mode(self.sequence_parallel_mode)
        self._check_accelerator()
        if isinstance(self.deepspeed, str):
            self.deepspeed = str(find_deepspeed_config(self.deepspeed))
        if not torch.accelerator.is_available():
            self.use_cpu = True  # without it transformers refuses bf16, and accelerate looks for NCCL
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed warns where it has to find out
        if self.deepspeed and self.use_cpu:
            prepare_deepspeed_on_cpu()
        if self.label_names is None:
            self.label_names = ["labels"]
        try:
            super().__post_init__()
        except (ValueError, TypeError, ImportError) as error:
            raise UserError(" ".join(str(error).split())) from error
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

    def _check_accelerator(self) -> None:
        """Batches reach each rank from its own packs: accelerate must neither split nor dispatch them."""
        given = self.accelerator_config
        if isinstance(given, str):
            given = _json_option("accelerator_config", given)
        settings = dict(given) if isinstance(given, dict) else dict(vars(given)) if given is not None else {}
        for name, needed in ACCELERATOR.items():
            # An AcceleratorConfig object holds its own defaults, so only what is switched on is an error.
            if settings.get(name) and settings[name] != needed and name != "even_batches":
                raise UserError(
                    f"--accelerator_config {name}={settings[name]}: each rank reads its own packs, accelerate must not "
                    f"split or dispatch batches; leave {name} out"
                )
        self.accelerator_config = {**settings, **ACCELERATOR}


def _json_option(name: str, value: str) -> dict[str, Any]:
    """A dictionary given as JSON, or as the name of a JSON file."""
    try:
        content = json.loads(value if value.lstrip().startswith("{") else Path(value).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--{name} {value}: neither JSON nor a JSON file ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"--{name} {value}: give a JSON object")
    return content


def find_deepspeed_config(name: str) -> Path:
    """A DeepSpeed config by path, or one of those shipped here by name (`zero_stage1`).

    Raises:
        UserError: neither a file nor a name.
    """
    path = Path(name)
    if path.is_file():
        return path
    shipped = {config.stem: config for config in sorted(CONFIGS.glob("*.json"))}
    # InternVL's scripts say zero_stage1_config.json, and for larger models zero_stage3_config_34b.json,
    # zero_stage3_config_100b_1e8.json or zero_stage3_config_100b_1e7_offload.json.
    stem = re.sub(r"_config(_\d+b)?(_\de\d)?(?=$|_offload$)", "", path.stem)
    if stem in shipped and path.parent == Path("."):
        return shipped[stem]
    raise UserError(f"--deepspeed {name}: no such file; shipped configs are {', '.join(shipped)}")


def option_names() -> list[str]:
    """Every option of the three dataclasses."""
    return [
        f.name for cls in (ModelArguments, DataTrainingArguments, PackTrainingArguments) for f in fields(cls) if f.init
    ]


def _value(option: Any) -> Any:
    return getattr(option, "value", option)


def _checkpointing(value: str | bool) -> str | bool:
    """Of --grad_checkpoint: whether, or AUTO.

    Raises:
        UserError: another value.
    """
    word = str(value).lower()
    if word == AUTO:
        return AUTO
    try:
        return string_to_bool(word)
    except ArgumentTypeError:
        raise UserError(f"--grad_checkpoint {value}: give True, False or {AUTO}") from None
