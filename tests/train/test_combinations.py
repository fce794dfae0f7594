"""Options that do not go together, by the way of packing."""

from __future__ import annotations

import pytest

from internvl_pack.errors import UserError
from train.combinations import check_combinations

DEFAULTS = {
    "objective": "sft",
    "sharding": None,
    "deepspeed": None,
    "fp16": False,
    "fp8": None,
    "loss_reduction": "token",
    "per_device_train_batch_size": 1,
    "preset_path": None,
    "packing_policy": "subset_sum",
    "max_buffer_size": 64,
    "balance_reservoir": 0,
    "max_attention_cost": None,
    "num_lanes": None,
    "shuffle_buffer_size": None,
    "max_seq_length": None,
    "max_packed_tokens": 8192,
    "share_prefix": False,
    "num_images_expected": 40,
    "max_dynamic_patch": 12,
    "dynamic_image_size": True,
    "use_thumbnail": True,
    "strict_mode": False,
    "pad_seq_to_mult": 1,
    "pad_cu_seqlens_to": None,
    "sequence_parallel_size": 1,
    "sequence_parallel_mode": "ulysses",
    "cost_model": None,
    "data_seed": None,
    "repeat_system_prompt": False,
    "oversize": "split",
    "freeze_backbone": False,
    "use_backbone_lora": 0,
    "unfreeze_vit_layers": 0,
    "compile": False,
    "compile_recompute": "language",
}
RING = {"sequence_parallel_size": 2, "sequence_parallel_mode": "ring"}
TWO = {"per_device_train_batch_size": 2}
COMBINATIONS = [
    ("in_batch", {}, "--per_device_train_batch_size 1: a row of one sample is not packed"),
    ("in_batch", TWO, None),
    ("in_batch", TWO | {"preset_path": "p"}, "--preset_path with --packing in_batch"),
    ("stream", {"preset_path": "p", "packing": None}, "--preset_path with --packing stream"),
    ("padded", {"preset_path": "p"}, "--preset_path with --packing padded"),
    ("preset", {"packing": None}, "--packing preset needs --preset_path"),
    ("preset", {"preset_path": "p"}, None),
    ("preset", {"preset_path": "p"} | TWO, None),
    ("preset", {"preset_path": "p", "num_lanes": 8}, None),  # not needed any more, which config.py says
    ("preset", {"preset_path": "p", "shuffle_buffer_size": 9}, "--shuffle_buffer_size with --packing preset"),
    ("preset", {"preset_path": "p", "max_buffer_size": 8}, "--max_buffer_size with --packing preset"),
    ("preset", {"preset_path": "p", "cost_model": "8B"}, "--cost_model with --packing preset"),
    ("preset", {"preset_path": "p", "data_seed": 1}, "--data_seed with --packing preset"),
    ("stream", {"cost_model": "8B", "data_seed": 1}, None),
    ("stream", {"unfreeze_vit_layers": -4}, "--unfreeze_vit_layers -4 without --freeze_backbone True"),
    ("stream", {"unfreeze_vit_layers": -4, "freeze_backbone": True}, None),
    ("padded", {"unfreeze_vit_layers": -4, "use_backbone_lora": 8}, None),
    ("stream", {"compile_recompute": "all"}, "--compile_recompute all without --compile True"),
    ("stream", {"compile_recompute": "all", "compile": True}, None),
    ("padded", {"repeat_system_prompt": True, "oversize": "drop"}, "--repeat_system_prompt True with --oversize drop"),
    ("stream", {"repeat_system_prompt": True}, None),
    ("in_batch", TWO | {"packing_policy": "greedy"}, "--packing_policy with --packing in_batch"),
    ("in_batch", TWO | {"max_attention_cost": 9}, "--max_attention_cost with --packing in_batch"),
    ("in_batch", TWO | {"cost_model": "8B"}, "--cost_model with --packing in_batch"),
    ("in_batch", TWO | {"max_seq_length": 4096}, None),
    ("in_batch", TWO | {"max_seq_length": 4097}, "--max_seq_length 4097 x --per_device_train_batch_size 2 exceeds"),
    ("in_batch", {"per_device_train_batch_size": 4}, "--num_images_expected 40 leaves each of 4 samples"),
    ("in_batch", {"per_device_train_batch_size": 4, "dynamic_image_size": False}, None),
    ("stream", {"share_prefix": True}, None),
    ("preset", {"preset_path": "p", "share_prefix": True}, None),
    ("in_batch", TWO | {"share_prefix": True}, "--share_prefix True with --packing in_batch"),
    ("padded", {"share_prefix": True}, "--share_prefix True with --packing padded"),
    ("stream", {"share_prefix": True, "pad_seq_to_mult": 8}, "--share_prefix True with --pad_seq_to_mult 8"),
    ("padded", {"pad_seq_to_mult": 8}, "--pad_seq_to_mult without packing"),
    ("padded", {"packing_policy": "greedy"}, "--packing_policy without packing"),
    ("padded", {"max_buffer_size": 8}, "--max_buffer_size without packing"),
    ("padded", {"cost_model": "8B"}, "--cost_model without packing"),
    ("padded", {"max_attention_cost": 9}, None),  # bounds a sample
    ("padded", {"strict_mode": True}, None),
    ("stream", {"sharding": "fsdp2"}, None),
    ("stream", {"sharding": "fsdp2", "deepspeed": "zero_stage1"}, "--sharding fsdp2 with --deepspeed zero_stage1"),
    ("padded", {"sharding": "fsdp2", "fp16": True}, "--sharding fsdp2 with --fp16 True"),
    ("preset", {"sharding": "fsdp2", "fp8": "rowwise", "preset_path": "p"}, "--sharding fsdp2 with --fp8 rowwise"),
    ("stream", {"objective": "dpo", "loss_reduction": "square"}, "--loss_reduction square with --objective dpo"),
    ("stream", {"objective": "dpo"}, None),
    ("stream", {"objective": "mpo"} | RING, "prefix trees with --sequence_parallel_mode ring: use ulysses"),
    ("preset", {"preset_path": "p", "share_prefix": True} | RING, "prefix trees with --sequence_parallel_mode ring"),
    ("stream", {"objective": "mpo", "sequence_parallel_size": 2}, None),
    ("stream", RING, None),
    ("stream", {"sequence_parallel_mode": "ring"}, "--sequence_parallel_mode ring with --sequence_parallel_size 1"),
    ("padded", {"max_packed_tokens": 512}, "--max_packed_tokens 512 without packing"),
    ("padded", {"max_packed_tokens": 512, "max_seq_length": 512}, None),  # as a packed run that it is compared with
    ("padded", TWO | {"max_packed_tokens": 512, "max_seq_length": 256}, None),
    ("stream", {"pad_cu_seqlens_to": 65}, "--pad_cu_seqlens_to without --strict_mode True"),
    ("stream", {"pad_cu_seqlens_to": 65, "strict_mode": True}, None),
    ("stream", {"pad_seq_to_mult": 3, "strict_mode": True}, "--max_packed_tokens 8192 is no multiple"),
    ("stream", {"pad_seq_to_mult": 128, "strict_mode": True}, None),
]


@pytest.mark.parametrize(("packing", "options", "message"), COMBINATIONS)
def test_combinations(packing, options, message):
    if message is None:
        check_combinations(packing, DEFAULTS | options)
        return
    with pytest.raises(UserError, match=message):
        check_combinations(packing, DEFAULTS | options)
