"""What `--sequence_parallel_size` asks of the other options, looked at before anything is loaded."""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from dataclasses import replace

import torch

from internvl_pack.checkpoints.internvl_format_files import config_of
from internvl_pack.config import PackingConfig
from internvl_pack.errors import UserError
from internvl_pack.model.attention import Kernel, head_size_of, select_kernel
from internvl_pack.model.packed import PackedModel
from internvl_pack.model.towers import find_tower
from internvl_pack.options import count
from internvl_pack.parallel import enable_sequence_parallel, make_groups
from internvl_pack.parallel.checks import (
    RING_KERNELS,
    check_budget,
    check_fp8,
    check_heads,
    check_kernel,
    check_packed,
    check_pictures,
    token_multiple,
)
from internvl_pack.plan.preset import Preset

from .arguments import DataTrainingArguments, ModelArguments, PackTrainingArguments
from .checkpoint import load_packing_state
from .combinations import PRESET
from .ranks import Ranks

logger = logging.getLogger(__name__)

GIVEN = "pad_to_multiple_of"  # of packing_state.json: the multiple that the user gave, the mode's own aside


def check_options(model_args: ModelArguments, data_args: DataTrainingArguments, args: PackTrainingArguments) -> None:
    """Check that rows, budgets and heads can be shared as asked.

    Raises:
        UserError: they cannot.
    """
    size, mode = args.sequence_parallel_size, args.sequence_parallel_mode
    if size == 1:
        return
    check_fp8(model_args.fp8, size)
    model_type = data_args.family_check or config_of(model_args.model_name_or_path).get("model_type")
    check_pictures(find_tower(model_type), model_type, size)
    check_packed(data_args.use_packed_ds, size)
    check_budget(data_args.max_packed_tokens, size, mode, data_args.pad_multiple)
    config = config_of(model_args.model_name_or_path or model_args.llm_path)
    config = config.get("text_config") or config.get("llm_config") or config
    if (heads := config.get("num_attention_heads")) is not None:
        check_heads(heads, config.get("num_key_value_heads") or heads, size, mode)


def select_shared_kernel(model_args: ModelArguments, args: PackTrainingArguments, dtype: torch.dtype) -> Kernel:
    """The attention kernel of the run: with ring `auto` means the first that attends to parts of segments.

    Raises:
        UserError: an unknown kernel, or one that cannot run here or so.
    """
    size, mode, name = args.sequence_parallel_size, args.sequence_parallel_mode, model_args.attn_kernel
    head_size = None
    with suppress(UserError):  # no such folder, which is said by its option's name where it is loaded
        head_size = head_size_of(config_of(model_args.model_name_or_path or model_args.llm_path))
    kernel = select_kernel(name, args.device, dtype, head_size)
    if name == "auto" and size > 1 and mode == "ring" and kernel.name not in RING_KERNELS:
        for other in RING_KERNELS:
            try:
                return select_kernel(other, args.device, dtype, head_size)
            except UserError as problem:
                logger.info("sequence parallelism, ring: %s", problem)
    if size > 1:
        check_kernel(kernel.name, mode)
    return kernel


def fit_packing(
    packing: PackingConfig, data_args: DataTrainingArguments, args: PackTrainingArguments, checkpoint: str | None
) -> PackingConfig:
    """Samples' shares of the budget rounded up to what each is padded to, with ring; packs that exist stay as they are.

    A run that goes on keeps the multiple that its packs were filled with, so that the number of GPUs a row may change,
    and so does one on packs that were planned. Where that multiple is too small for ring, rows exceed their budget by
    the difference, and the log says so.
    """
    size, mode, given = args.sequence_parallel_size, args.sequence_parallel_mode, data_args.pad_multiple
    needed = token_multiple(size, mode) if mode == "ring" else 1
    found = _multiple_of_packs(data_args, args, checkpoint, given)
    if found is None:
        return replace(packing, pad_to_multiple_of=math.lcm(given, needed))
    if found % needed:
        logger.warning(
            "packs were filled by multiples of %d tokens, --sequence_parallel_size %d in ring mode pads each sample "
            "to one of %d: rows may exceed --max_packed_tokens by up to %d tokens a sample",
            *(found, size, needed, needed - 1),
        )
    return replace(packing, pad_to_multiple_of=found)


def _multiple_of_packs(
    data_args: DataTrainingArguments, args: PackTrainingArguments, checkpoint: str | None, given: int
) -> int | None:
    """What the packs of a preset or of a saved run were filled by; None for packs yet to be made, or other options."""
    if data_args.packing_mode == PRESET:
        if args.sequence_parallel_size == 1 or not data_args.preset_path:
            return None
        planned = Preset(data_args.preset_path).settings["pad_to_multiple_of"]
        return planned if planned % given == 0 else None
    if checkpoint is None:
        return None
    state = load_packing_state(checkpoint)
    saved = state.get("options", {}).get("pad_to_multiple_of")
    return saved if saved is not None and state.get(GIVEN, saved) == given else None


def share_rows(model: PackedModel, args: PackTrainingArguments, ranks: Ranks) -> None:
    """Divide the rows of a model among the ranks of each group."""
    mode, timeout = args.sequence_parallel_mode, args.ddp_timeout_delta
    group = make_groups(ranks.world_size, ranks.sequence_parallel_size, mode, timeout)
    enable_sequence_parallel(model, group)
    logger.info("sequence parallelism: %s of %d GPUs, %s", count(group.dp_world, "groups"), group.size, group.mode)
