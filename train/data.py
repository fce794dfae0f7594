"""What a run reads: rows of this rank, packed or padded, and the held-out ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from internvl_pack import PresetDataset, in_batch_collate_fn
from internvl_pack.batch.collate import padded_collate_fn
from internvl_pack.checkpoints import tokenizers
from internvl_pack.checkpoints.encoding import encode_config
from internvl_pack.checkpoints.internvl_format_files import config_of
from internvl_pack.config import PackingConfig
from internvl_pack.errors import UserError, naming
from internvl_pack.samples import Samples
from internvl_pack.sources import load_meta
from internvl_pack.stream.dataset import PackedDataset
from internvl_pack.stream.loader import packed_collator

from .arguments import DataTrainingArguments, ModelArguments, PackTrainingArguments
from .combinations import IN_BATCH, PADDED, PRESET
from .ranks import Ranks


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
    # the checkpoint that the vision tower is taken from
    encode = encode_config(vars(data_args), config_of(model_args.model_name_or_path or model_args.vision_path))
    place = {"rank": ranks.data_rank, "world_size": ranks.data_ranks}
    train: PackedDataset
    if data_args.packing_mode == PRESET:
        preset, meta = str(data_args.preset_path), data_args.meta_path or None
        train = PresetDataset.open(preset, meta, tokenizer, packing, encode=encode, **place)
    else:
        train = PackedDataset.from_meta(str(data_args.meta_path), tokenizer, packing, encode=encode, **place)
    row_budget = (packing.max_packed_tokens, packing.num_images_expected)
    if data_args.packing_mode == IN_BATCH:  # a pack is a sample, with its share of the row
        assert data_args.num_images_expected is not None, "known from the start of the run"
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
    with naming(f"--{option} "):
        tokenizer = tokenizers.load_tokenizer(getattr(model_args, option))
    if option == "llm_path":
        tokenizers.add_image_tokens(tokenizer)
    return tokenizer


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
    return once_each(str(data_args.eval_meta_path), train)


def once_each(meta_path: str, train: PackedDataset) -> PackedDataset:
    """Data in the order of its files, each sample once, packed by the budgets of `train` and for its rank."""
    specs = [replace(spec, repeat_time=1.0, weight=None) for spec in load_meta(meta_path)]
    config = replace(
        train.config,
        shuffle=False,
        replacement=False,
        use_data_resampling=False,
        share_prefix=False,
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
    packed = packed_collator(
        train, loss_reduction=data_args.loss_reduction, branch_keys=args.reference_path is not None, **padding
    )
    if data_args.packing_mode == IN_BATCH:
        budget = {name: getattr(data_args, name) for name in ("max_packed_tokens", "num_images_expected")}
        return partial(in_batch_collate_fn, **packed.keywords, **budget)
    if data_args.packing_mode == PADDED:
        return partial(padded_collate_fn, **{k: v for k, v in packed.keywords.items() if k not in padding})
    return packed
