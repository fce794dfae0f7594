"""What sequence parallelism asks of a run in which ranks share rows, checked before it starts; pure functions.

Each that refuses raises a UserError of one line, which names the options to change.
"""

from __future__ import annotations

import math
from typing import Any

from ..errors import UserError

MODES = ("ulysses", "ring")

# Kernels that give the log-sum-exp of a block and take it back in the gradient, which ring attention needs.
RING_KERNELS = ("flash_attn", "varlen", "sdpa")


def check_mode(mode: str) -> None:
    """Refuse an unknown mode."""
    if mode not in MODES:
        raise UserError(f"--sequence_parallel_mode {mode!r} is unknown: use {' or '.join(MODES)}")


def check_world(world_size: int, sequence_parallel_size: int) -> None:
    """Refuse groups of `sequence_parallel_size` ranks that do not cover the `world_size` ranks."""
    if sequence_parallel_size < 1:
        raise UserError(f"--sequence_parallel_size {sequence_parallel_size}: give 1 (off) or more ranks a row")
    if world_size % sequence_parallel_size:
        raise UserError(
            f"--sequence_parallel_size {sequence_parallel_size} does not divide the run's {world_size} processes: "
            "set it to a divisor, or start another number of processes"
        )


def check_heads(heads: int, kv_heads: int, sequence_parallel_size: int, mode: str) -> str | None:
    """Whether the attention heads can be spread over the ranks; ring takes any number.

    Returns:
        what to say in the log where key/value heads are repeated, else None.

    Raises:
        UserError: Ulysses with a number of ranks that does not divide the query heads.
    """
    if mode != "ulysses":
        return None
    if heads % sequence_parallel_size:
        raise UserError(
            f"--sequence_parallel_size {sequence_parallel_size} does not divide the language model's {heads} attention "
            "heads, which --sequence_parallel_mode ulysses spreads over the ranks: set it to a divisor, or use "
            "--sequence_parallel_mode ring"
        )
    copies = kv_copies(heads, kv_heads, sequence_parallel_size)
    if copies == 1:
        return None
    return (
        f"sequence parallelism: the {kv_heads} key/value heads are repeated {copies} times for "
        f"{sequence_parallel_size} ranks"
    )


def kv_copies(heads: int, kv_heads: int, sequence_parallel_size: int) -> int:
    """How often each key/value head must be repeated, in place, so that the ranks share the copies evenly.

    Rank r then holds query heads [r * Hq / n, ...) and the copies they read. 28 query and 4 key/value heads:
    1 for 2 or 4 ranks, 7 for 7, 14 or 28.
    """
    group = heads // kv_heads
    return next(m for m in range(1, group + 1) if group % m == 0 and kv_heads * m % sequence_parallel_size == 0)


def token_multiple(sequence_parallel_size: int, mode: str, pad_to_multiple_of: int = 1) -> int:
    """What the token budget must be a multiple of: N for Ulysses, 2 N for ring, with `pad_to_multiple_of` the lcm.

    With ring every segment is padded to this multiple too, so that each rank has a first and a second part of it;
    with Ulysses only the row is.
    """
    own = sequence_parallel_size * (2 if mode == "ring" and sequence_parallel_size > 1 else 1)
    return math.lcm(own, pad_to_multiple_of)


def check_budget(max_packed_tokens: int, sequence_parallel_size: int, mode: str, pad_to_multiple_of: int = 1) -> None:
    """Refuse a budget whose full row cannot be cut evenly."""
    multiple = token_multiple(sequence_parallel_size, mode, pad_to_multiple_of)
    if max_packed_tokens % multiple == 0:
        return
    also = f" and --pad_to_multiple_of {pad_to_multiple_of}" if pad_to_multiple_of > 1 else ""
    below = max_packed_tokens - max_packed_tokens % multiple
    possible = f"{below} or {below + multiple}" if below else str(multiple)
    raise UserError(
        f"--max_packed_tokens {max_packed_tokens} is no multiple of {multiple}, which --sequence_parallel_size "
        f"{sequence_parallel_size} in {mode} mode{also} needs: use {possible}"
    )


def check_kernel(kernel: str, mode: str) -> None:
    """Refuse a kernel (by its name, not "auto") whose blocks ring attention cannot join."""
    if mode != "ring" or kernel in RING_KERNELS:
        return
    raise UserError(
        f"--attn_kernel {kernel} with --sequence_parallel_mode ring: it does not attend to parts of a segment; use "
        f"--attn_kernel {', '.join(RING_KERNELS[:-1])} or {RING_KERNELS[-1]}, or --sequence_parallel_mode ulysses"
    )


def check_window(text_config: Any, mode: str) -> None:
    """Refuse sliding-window layers with ring attention: a window cuts each block differently."""
    if mode != "ring":
        return
    layers = getattr(text_config, "layer_types", None) or ()
    window = getattr(text_config, "sliding_window", None)
    if window and ("sliding_attention" in layers or not layers):
        raise UserError(
            f"--sequence_parallel_mode ring with a language model of sliding windows ({window} tokens): use "
            "--sequence_parallel_mode ulysses"
        )


def check_sinks(text_config: Any, sequence_parallel_size: int) -> None:
    """Refuse attention sinks: a head's sink is not divided with its row."""
    if text_config.model_type == "gpt_oss":
        raise UserError(
            f"--sequence_parallel_size {sequence_parallel_size} with a 'gpt_oss' language model: its attention sinks "
            "are not shared among GPUs; set it to 1"
        )


def check_linear(text_config: Any, sequence_parallel_size: int) -> None:
    """Refuse linear attention, whose state goes along the whole row."""
    if "linear_attention" in (getattr(text_config, "layer_types", None) or ()):
        raise UserError(
            f"--sequence_parallel_size {sequence_parallel_size} with a {text_config.model_type!r} language model: the "
            "state of its linear attention is not handed from GPU to GPU; set it to 1"
        )


def check_fp8(recipe: str | None, sequence_parallel_size: int) -> None:
    """Refuse products in 8 bit: a rank's slice would have to be filled up as whole rows are."""
    if recipe is not None:
        raise UserError(
            f"--fp8 {recipe} with --sequence_parallel_size {sequence_parallel_size}: slices of rows are not filled up "
            "to what products in 8 bit need; leave one of them out"
        )


def check_pictures(tower: Any, model_type: str | None, sequence_parallel_size: int) -> None:
    """Refuse pictures of native resolution, which are not shared out among ranks.

    Args:
        tower: of the model, or what makes it; None without.
    """
    if getattr(tower, "grid_positions", False):
        raise UserError(
            f"--sequence_parallel_size {sequence_parallel_size} does not go with a {model_type!r} model yet: leave it "
            "out"
        )


def check_packed(use_packed_ds: bool, sequence_parallel_size: int) -> None:
    """Refuse padded batches: only a packed row is cut."""
    if not use_packed_ds:
        raise UserError(
            f"--sequence_parallel_size {sequence_parallel_size} with --use_packed_ds False: only packed rows are cut; "
            "set --use_packed_ds True or --sequence_parallel_size 1"
        )


def check_model(text_config: Any, kernel: str, sequence_parallel_size: int, mode: str) -> str | None:
    """All that can be said of a model.

    Args:
        kernel: name of its attention kernel.

    Returns:
        as check_heads.

    Raises:
        UserError: the first thing that does not go.
    """
    check_mode(mode)
    check_kernel(kernel, mode)
    check_window(text_config, mode)
    check_sinks(text_config, sequence_parallel_size)
    check_linear(text_config, sequence_parallel_size)
    heads = text_config.num_attention_heads
    kv_heads = getattr(text_config, "num_key_value_heads", None) or heads
    return check_heads(heads, kv_heads, sequence_parallel_size, mode)
