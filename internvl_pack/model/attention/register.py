"""Packed attention inside transformers' models, and the choice of its kernel.

`register_packed_attention` puts a kernel (kernels/) among transformers' attention functions. Set it on
the text config only: the vision tower keeps SDPA and never sees the language model's boundaries. The
names transformers and flash-attn use for them are made in one place, `packed_row`:

    with packed_row(cu_seqlens, max_seqlen) as names:
        language_model(inputs_embeds=..., position_ids=..., use_cache=False, **names)

Without those names, as in generation or with a padded batch and its attention_mask, the same function is
transformers' ordinary SDPA with the ordinary masks, so a model under training still generates correctly.

Why boundaries are always given and never inferred: from position_ids they cost a device synchronisation,
merge fragments whose positions go on, and are not looked for at all once a cache or a mask is passed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import UserError
from ...parallel.group import SequenceGroup
from .kernels import HALF, KERNELS, Kernel, Row, attend_row, run_device
from .linear import Stretches
from .ring import ring_attention
from .sinks import attend_with_sinks, masked_attention_with_sinks
from .tree import TreeLinks, attend_trees
from .ulysses import ulysses_attention

logger = logging.getLogger(__name__)

# Arguments by which some models change the scores themselves; no kernel here knows them.
_SCORE_CHANGES = ("softcap", "position_bias")

_in_packed_row: ContextVar[bool] = ContextVar("internvl_pack_in_packed_row", default=False)


@contextlib.contextmanager
def packed_row(
    cu_seqlens: Tensor,
    max_seqlen: int,
    sequence_group: SequenceGroup | None = None,
    tree_links: TreeLinks | None = None,
    stretches: Stretches | None = None,
) -> Iterator[dict[str, Any]]:
    """The names by which transformers hands a pack's boundaries to attention, for one model call.

    While it is open no attention mask is made for models that use packed attention: a mask for N tokens
    takes N^2 bytes, and the boundaries say all of it.

    Args:
        sequence_group: the ranks that share the row; the boundaries are then those of a `RowSlice`.
        tree_links: which tokens see which prefix, where the row has prefix trees.
        stretches: for linear layers, where the model has some.
    """
    token = _in_packed_row.set(True)
    try:
        names: dict[str, Any] = {
            "cu_seq_lens_q": cu_seqlens,
            "cu_seq_lens_k": cu_seqlens,
            "max_length_q": max_seqlen,
            "max_length_k": max_seqlen,
        }
        more = {"sequence_group": sequence_group, "tree_links": tree_links, "stretches": stretches}
        yield names | {name: value for name, value in more.items() if value is not None}
    finally:
        _in_packed_row.reset(token)


def select_kernel(
    name: str = "auto",
    device: torch.device | str | None = None,
    compute_dtype: torch.dtype = torch.bfloat16,
    head_size: int | None = None,
) -> Kernel:
    """The kernel called `name`, or with `auto` the first of KERNELS that runs on `device`.

    Args:
        device: see `run_device`.
        compute_dtype: of q, k and v in training, so under autocast that of the autocast.
        head_size: of the language model, see `head_size_of`; None if it is not known.

    Raises:
        UserError: an unknown name, or a kernel that was asked for and cannot run so.
    """
    device = run_device(device)
    if name == "auto":
        return next(kernel for kernel in KERNELS.values() if _problem(kernel, device, compute_dtype, head_size) is None)
    if name not in KERNELS:
        raise UserError(f"--attn_kernel {name!r} is unknown: use auto, {', '.join(KERNELS)}")
    if problem := _problem(KERNELS[name], device, compute_dtype, head_size):
        raise UserError(f"--attn_kernel {name} {problem}")
    return KERNELS[name]


def head_size_of(config: Mapping[str, Any]) -> int | None:
    """Of a language model, alone or within another, by its config.json; None where that leaves it to the class."""
    within = (config.get(name) for name in ("text_config", "llm_config"))
    text = next((found for found in within if found and isinstance(found, Mapping)), config)
    plain, rotary = (text.get(f"qk_{part}_head_dim") for part in ("nope", "rope"))
    if isinstance(plain, int) and isinstance(rotary, int):
        return plain + rotary  # latent attention, whatever the width
    size, heads, width = (text.get(name) for name in ("head_dim", "num_attention_heads", "hidden_size"))
    if isinstance(heads, int) and isinstance(width, int) and heads > 0:
        size = size or width // heads
    return size if isinstance(size, int) else None  # what is of another kind is refused where it is loaded


def _problem(kernel: Kernel, device: torch.device, compute_dtype: torch.dtype, head_size: int | None) -> str | None:
    if problem := kernel.problem(device):
        return problem
    if kernel.half_only and compute_dtype not in HALF:
        return f"computes in bfloat16 or float16, this run in {compute_dtype}: set --bf16, or --attn_kernel sdpa"
    sizes = kernel.head_sizes
    if head_size is not None and sizes is not None and head_size not in sizes:
        return (
            f"takes head sizes that are multiples of {sizes.step} up to {sizes[-1]}, this model's is {head_size}: use "
            "--attn_kernel auto or sdpa"
        )
    return None


def kernel_of(implementation: str | None) -> Kernel:
    """The kernel whose name `register_packed_attention` gave among transformers' attention functions."""
    return next(kernel for kernel in KERNELS.values() if kernel.implementation == implementation)


def register_packed_attention(
    kernel: str = "auto",
    device: torch.device | str | None = None,
    compute_dtype: torch.dtype = torch.bfloat16,
    head_size: int | None = None,
) -> str:
    """Register the chosen kernel with transformers; registering twice is harmless. Arguments: see `select_kernel`.

    Returns:
        the name to set as the text config's attn_implementation.

    Raises:
        UserError: see `select_kernel`.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    chosen = select_kernel(kernel, device, compute_dtype, head_size)
    AttentionInterface.register(chosen.implementation, _attention_function(chosen))
    AttentionMaskInterface.register(chosen.implementation, _attention_mask)
    logger.info("attention kernel: %s", chosen.name)
    return chosen.implementation


def _attention_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    from transformers.masking_utils import sdpa_mask

    return None if _in_packed_row.get() else sdpa_mask(*args, **kwargs)


def _attention_function(kernel: Kernel) -> Callable[..., tuple[Tensor, None]]:
    """transformers' attention contract over `kernel`: (1, H, N, D) in, (1, N, H, D) out."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # A compiled layer sees one operation, or calls the kernel between two graphs.
    run = torch.compiler.disable(kernel.run)
    run_over_group = torch.compiler.disable(attend_over_group)
    is_one_operation = kernel.forward is not None

    def packed_attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int | None = None,
        sequence_group: SequenceGroup | None = None,
        tree_links: TreeLinks | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        changes = [name for name in _SCORE_CHANGES if kwargs.get(name) is not None]
        if changes:
            raise ValueError(f"{type(module).__name__} uses {', '.join(changes)}, which packed attention does not know")
        if cu_seq_lens_q is None and s_aux is not None:
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            return masked_attention_with_sinks(query, key, value, s_aux, attention_mask, scale, sliding_window), None
        if cu_seq_lens_q is None:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
            )
        if query.shape[0] != 1:
            raise ValueError(f"cu_seq_lens describe one row, the batch has {query.shape[0]}")
        if dropout:
            raise ValueError(f"packed attention has no dropout, the config asks for {dropout}: set attention_dropout 0")
        q, k, v = (t[0].transpose(0, 1) for t in one_dtype(query, key, value))
        assert max_length_q is not None, "given with the boundaries"
        row = Row(cu_seq_lens_q, max_length_q, scaling, sliding_window)
        if s_aux is not None:
            assert sequence_group is None and tree_links is None, "refused at the start"
            out = attend_with_sinks(kernel, q, k, v, s_aux, row)
        elif sequence_group is not None:
            out = run_over_group(kernel, q, k, v, row, sequence_group, tree_links)
        elif tree_links is not None:
            out = attend_trees(kernel, q, k, v, row, tree_links)
        elif is_one_operation and torch.compiler.is_compiling():
            # contiguous: part of the rotary embedding's kernel
            out, _ = attend_row(kernel, q.contiguous(), k.contiguous(), v.contiguous(), row)
        else:
            out = run(q, k, v, row)
        return out.unsqueeze(0), None

    return packed_attention


def attend_over_group(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row: Row,
    group: SequenceGroup,
    tree_links: TreeLinks | None = None,
) -> Tensor:
    """The kernel contract on this rank's tokens, with the boundaries of its `RowSlice`."""
    if group.mode == "ring":
        assert tree_links is None, "refused at the start"
        return ring_attention(kernel, q, k, v, row, group)
    attend = kernel.run if tree_links is None else partial(attend_trees, kernel, links=tree_links)
    return ulysses_attention(attend, q, k, v, row, group)


def one_dtype(*tensors: Tensor) -> list[Tensor]:
    """Under autocast with float32 weights, q/k norms give float32 q and k beside a half v: use autocast's type."""
    device_type = tensors[0].device.type
    if torch.is_autocast_enabled(device_type):
        return [t.to(torch.get_autocast_dtype(device_type)) for t in tensors]
    return list(tensors)
