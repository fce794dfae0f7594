"""Which options do not go together, and why: one table, looked at before anything is loaded.

The modes that make rows, by `--packing`:

    padded     one sample a row, padded; for comparison
    stream     packs are planned while training reads the data
    in_batch   the samples of a micro-batch in one row; nothing is planned
    preset     packs were planned by `internvl-pack plan`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from internvl_pack.config import PackingConfig
from internvl_pack.errors import UserError

PADDED, STREAM, IN_BATCH, PRESET = "padded", "stream", "in_batch", "preset"
PACKED_WAYS = (STREAM, IN_BATCH, PRESET)
# Options of the packer, with the values that leave it alone.
PACKER_OPTIONS = {"packing_policy": "subset_sum", "max_buffer_size": 64}


@dataclass(frozen=True)
class Rule:
    """Options that do not go together.

    Attributes:
        given: whether the options break it.
        why: what to say, a format string over the options and `packing`.
        packing_modes: the values of packing that it is about.
    """

    given: Callable[[Mapping[str, Any]], bool]
    why: str
    packing_modes: tuple[str, ...] = (PADDED, STREAM, IN_BATCH, PRESET)


def _without_effect(packing_modes: tuple[str, ...], why: str, **defaults: Any) -> list[Rule]:
    """That options stand at their defaults."""

    def rule(name: str, default: Any) -> Rule:
        return Rule(lambda o: o[name] != default, f"--{name} {why}", packing_modes)

    return [rule(name, default) for name, default in defaults.items()]


def _is_ring(o: Mapping[str, Any]) -> bool:
    return o["sequence_parallel_size"] > 1 and o["sequence_parallel_mode"] == "ring"


def _share(o: Mapping[str, Any], name: str) -> int:
    total = getattr(PackingConfig, name) if o[name] is None else o[name]  # the model may have another default
    return total // max(1, o["per_device_train_batch_size"])


def _is_budget_without_rows(o: Mapping[str, Any]) -> bool:
    """Whether the token budget is neither the default nor that of a packed run that the padded one is compared with."""
    longest = o["max_seq_length"] or 0
    known = (PackingConfig.max_packed_tokens, longest, longest * o["per_device_train_batch_size"])
    return o["max_packed_tokens"] not in known


def _tiles_of_one_image(o: Mapping[str, Any]) -> int:
    if not o["dynamic_image_size"]:
        return 1
    tiles = o["max_dynamic_patch"]
    return tiles + 1 if o["use_thumbnail"] and tiles > 1 else tiles


RULES: tuple[Rule, ...] = (
    Rule(
        lambda o: o["sharding"] and o["deepspeed"],
        "--sharding {sharding} with --deepspeed {deepspeed}: both would shard the weights; leave one of the two out",
    ),
    Rule(
        lambda o: o["sharding"] and o["fp16"],
        "--sharding {sharding} with --fp16 True: it does not scale gradients; use --bf16 True",
    ),
    Rule(
        lambda o: o["sharding"] and o["fp8"],
        "--sharding {sharding} with --fp8 {fp8}: nobody has tried it; leave one of the two out, or use --deepspeed",
    ),
    Rule(
        lambda o: o["objective"] in ("dpo", "mpo") and o["loss_reduction"] != "token",
        "--loss_reduction {loss_reduction} with --objective {objective}: all pairs count alike, and "
        "all tokens of chosen answers; leave it out",
    ),
    Rule(
        lambda o: (o["objective"] in ("dpo", "mpo") or o["share_prefix"]) and _is_ring(o),
        "prefix trees with --sequence_parallel_mode ring: use ulysses",
    ),
    Rule(
        lambda o: o["sequence_parallel_mode"] != "ulysses" and o["sequence_parallel_size"] == 1,
        "--sequence_parallel_mode {sequence_parallel_mode} with --sequence_parallel_size 1: no row is shared; leave it "
        "out, or give the size",
    ),
    Rule(
        lambda o: o["unfreeze_vit_layers"] and not (o["freeze_backbone"] or o["use_backbone_lora"]),
        "--unfreeze_vit_layers {unfreeze_vit_layers} without --freeze_backbone True: all layers are trained; leave it "
        "out, or freeze them",
    ),
    Rule(
        lambda o: not o["compile"] and o["compile_recompute"] != "language",
        "--compile_recompute {compile_recompute} without --compile True: it is about compiled layers; leave it out",
    ),
    Rule(
        lambda o: o["repeat_system_prompt"] and o["oversize"] != "split",
        "--repeat_system_prompt True with --oversize {oversize}: no sample is split; leave it out",
    ),
    Rule(
        lambda o: o["per_device_train_batch_size"] < 2,
        "--packing in_batch with --per_device_train_batch_size 1: a row of one sample is not packed; give 2 or more, "
        "or use --packing stream, which fills rows by itself",
        (IN_BATCH,),
    ),
    *_without_effect(
        (STREAM, IN_BATCH, PADDED),
        "with --packing {packing}: the packs of a preset would be packed again or taken apart; use --packing preset, "
        "or leave --preset_path out",
        preset_path=None,
    ),
    Rule(
        lambda o: o["preset_path"] is None,
        "--packing preset needs --preset_path: the folder that internvl-pack plan wrote",
        (PRESET,),
    ),
    *_without_effect(
        (IN_BATCH,),
        "with --packing in_batch: rows are the sampler's micro-batches, nothing is planned; leave it out, or use "
        "--packing stream",
        **PACKER_OPTIONS,
        max_attention_cost=None,
        cost_model=None,
    ),
    *_without_effect(
        (PRESET,),
        "with --packing preset: it was decided when the packs were planned; leave it out, or give it to internvl-pack "
        "plan",
        **PACKER_OPTIONS,
        shuffle_buffer_size=None,
        cost_model=None,
        data_seed=None,
    ),
    *_without_effect(
        (PADDED, IN_BATCH),
        "True with --packing {packing}: a beginning is shared within planned rows; leave it out, or use --packing "
        "stream",
        share_prefix=False,
    ),
    Rule(
        lambda o: o["share_prefix"] and o["pad_seq_to_mult"] > 1,
        "--share_prefix True with --pad_seq_to_mult {pad_seq_to_mult}: the segments of prefix trees cannot be padded; "
        "leave one of the two out",
        (STREAM, PRESET),
    ),
    Rule(
        lambda o: (o["max_seq_length"] or 0) * o["per_device_train_batch_size"] > o["max_packed_tokens"],
        "--max_seq_length {max_seq_length} x --per_device_train_batch_size {per_device_train_batch_size} exceeds "
        "--max_packed_tokens {max_packed_tokens}: a micro-batch of long samples would not fit its row; raise the last",
        (IN_BATCH,),
    ),
    Rule(
        lambda o: _share(o, "num_images_expected") < _tiles_of_one_image(o),
        "--num_images_expected {num_images_expected} leaves each of {per_device_train_batch_size} samples of a row "
        "fewer tiles than one image may have (--max_dynamic_patch {max_dynamic_patch}): raise it, or lower the others",
        (IN_BATCH,),
    ),
    *_without_effect(
        (PADDED,),
        "without packing: it is about packed rows; leave it out, or use --packing stream",
        **PACKER_OPTIONS,
        cost_model=None,
        pad_seq_to_mult=1,
        pad_cu_seqlens_to=None,
    ),
    Rule(
        _is_budget_without_rows,
        "--max_packed_tokens {max_packed_tokens} without packing: a row holds one sample, which --max_seq_length "
        "bounds; add --use_packed_ds True, or leave it out",
        (PADDED,),
    ),
    Rule(
        lambda o: o["pad_cu_seqlens_to"] is not None and not o["strict_mode"],
        "--pad_cu_seqlens_to without --strict_mode True: rows whose lengths differ have no static shape",
        PACKED_WAYS,
    ),
    Rule(
        lambda o: o["max_packed_tokens"] % max(1, o["pad_seq_to_mult"]) != 0 and o["strict_mode"],
        "--strict_mode True with --pad_seq_to_mult {pad_seq_to_mult}: --max_packed_tokens {max_packed_tokens} is no "
        "multiple of it, so the pad at the end would not be either",
        PACKED_WAYS,
    ),
)


def check_combinations(packing: str, options: Mapping[str, Any]) -> None:
    """Check that options go together.

    Args:
        packing: one of the modes above.
        options: of the model, the data and the training, by name.

    Raises:
        UserError: some do not; names the first.
    """
    for rule in RULES:
        if packing in rule.packing_modes and rule.given(options):
            raise UserError(rule.why.format(**{**options, "packing": packing}))
