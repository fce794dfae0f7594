"""Packed attention inside transformers' models, and the checks of a pack's boundaries.

`register_packed_attention` puts a kernel (kernels.py) among transformers' attention functions. Set it on
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
import itertools
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from ..parallel.attention import attend_over_group
from ..parallel.group import SequenceGroup
from .attention_op import NO_WINDOW, attend
from .kernels import Kernel, select_kernel

logger = logging.getLogger(__name__)

INT32_MAX = 2**31 - 1

# Arguments by which some models change the scores themselves; no kernel here knows them.
_SCORE_CHANGES = ("softcap", "s_aux", "position_bias")

_in_packed_row: ContextVar[bool] = ContextVar("internvl_pack_in_packed_row", default=False)


@contextlib.contextmanager
def packed_row(
    cu_seqlens: torch.Tensor, max_seqlen: int, sequence_group: SequenceGroup | None = None
) -> Iterator[dict[str, Any]]:
    """The names by which transformers hands a pack's boundaries to attention, for one model call.

    While it is open no attention mask is made for models that use packed attention: a mask for N tokens
    takes N^2 bytes, and the boundaries say all of it.

    Args:
        sequence_group: the ranks that share the row; the boundaries are then those of a `RowSlice`.
    """
    token = _in_packed_row.set(True)
    try:
        names = {
            "cu_seq_lens_q": cu_seqlens,
            "cu_seq_lens_k": cu_seqlens,
            "max_length_q": max_seqlen,
            "max_length_k": max_seqlen,
        }
        yield names if sequence_group is None else names | {"sequence_group": sequence_group}
    finally:
        _in_packed_row.reset(token)


def register_packed_attention(
    kernel: str = "auto",
    device: torch.device | str | None = None,
    compute_dtype: torch.dtype = torch.bfloat16,
) -> str:
    """Register the chosen kernel with transformers; registering twice is harmless.

    Returns:
        the name to set as the text config's attn_implementation.

    Raises:
        UserError: see `select_kernel`.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    chosen = select_kernel(kernel, device, compute_dtype)
    AttentionInterface.register(chosen.implementation, _attention_function(chosen))
    AttentionMaskInterface.register(chosen.implementation, _attention_mask)
    logger.info("attention kernel: %s", chosen.name)
    return chosen.implementation


def _attention_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    from transformers.masking_utils import sdpa_mask

    return None if _in_packed_row.get() else sdpa_mask(*args, **kwargs)


def _attention_function(kernel: Kernel) -> Callable[..., tuple[torch.Tensor, None]]:
    """transformers' attention contract over `kernel`: (1, H, N, D) in, (1, N, H, D) out."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # A compiled layer sees one operation, or calls the kernel between two graphs.
    run = torch.compiler.disable(kernel.run)
    run_over_group = torch.compiler.disable(attend_over_group)
    is_one_operation = kernel.forward is not None

    def packed_attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        max_length_q: int | None = None,
        sequence_group: SequenceGroup | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        changes = [name for name in _SCORE_CHANGES if kwargs.get(name) is not None]
        if changes:
            raise ValueError(f"{type(module).__name__} uses {', '.join(changes)}, which packed attention does not know")
        if cu_seq_lens_q is None:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
            )
        if query.shape[0] != 1:
            raise ValueError(f"cu_seq_lens describe one row, the batch has {query.shape[0]}")
        if dropout:
            raise ValueError(f"packed attention has no dropout, the config asks for {dropout}: set attention_dropout 0")
        q, k, v = (t[0].transpose(0, 1) for t in one_dtype(query, key, value))
        if sequence_group is not None:
            row = (cu_seq_lens_q, max_length_q, scaling, sliding_window, sequence_group)
            out = run_over_group(kernel, q, k, v, *row)
        elif is_one_operation and torch.compiler.is_compiling():
            scale = q.shape[-1] ** -0.5 if scaling is None else scaling
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()  # part of the rotary embedding's kernel
            settings = (max_length_q, scale, sliding_window or NO_WINDOW, kernel.name)
            out, _ = attend(q, k, v, cu_seq_lens_q, *settings)
        else:
            out = run(q, k, v, cu_seq_lens_q, max_length_q, scaling, sliding_window)
        return out.unsqueeze(0), None

    return packed_attention


def one_dtype(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Under autocast with float32 weights, q/k norms give float32 q and k beside a half v: use autocast's type."""
    device_type = tensors[0].device.type
    if torch.is_autocast_enabled(device_type):
        return [t.to(torch.get_autocast_dtype(device_type)) for t in tensors]
    return list(tensors)


def validate_cu_seqlens(cu_seqlens: Any, num_tokens: int, max_seqlen: int | None = None) -> None:
    """Check a row's boundaries once, on the host, before any kernel reads them.

    Args:
        cu_seqlens: int32 (S+1,), numpy or torch; a CUDA tensor costs a synchronisation.
        num_tokens: N, tokens of the row, pad segment included.
        max_seqlen: as it will be given to the kernel; None if it is not known yet.

    Raises:
        ValueError: says which rule is broken.
    """
    check_cu_seqlens_form(cu_seqlens, max_seqlen, allow_wider=True)
    bounds = cu_seqlens.tolist()
    total = bounds[-1]
    if total > INT32_MAX:
        raise ValueError(f"cu_seqlens ends at {total}, above 2**31 - 1: int32 boundaries cannot hold the row")
    if _dtype_name(cu_seqlens) != "int32":
        raise ValueError(
            f"cu_seqlens must be int32, is {_dtype_name(cu_seqlens)}: the kernels would refuse or misread it"
        )
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, starts at {bounds[0]}")
    for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if stop < 0:
            raise ValueError(f"cu_seqlens[{i + 1}] is {stop}: the row's length has wrapped around int32")
        if stop <= start:
            kind = "is empty (repeated boundary)" if stop == start else "runs backwards"
            raise ValueError(f"cu_seqlens must be strictly increasing: segment {i} from {start} to {stop} {kind}")
    if total != num_tokens:
        raise ValueError(
            f"cu_seqlens ends at {total}, the row has {num_tokens} tokens: give the rest a pad segment of its own, or "
            "trim the row; gradients of uncovered tokens are undefined"
        )
    if max_seqlen is not None:
        longest = max(stop - start for start, stop in itertools.pairwise(bounds))
        if max_seqlen != longest:
            raise ValueError(f"max_seqlen is {max_seqlen}, the longest segment has {longest} tokens")


def check_cu_seqlens_form(cu_seqlens: Any, max_seqlen: Any, allow_wider: bool = False) -> None:
    """What can be said of boundaries without reading their values: no synchronisation.

    Raises:
        ValueError: wrong shape or dtype, no segment, or a max_seqlen that is not a Python int.
    """
    if not hasattr(cu_seqlens, "dtype") or len(cu_seqlens.shape) != 1:
        raise ValueError(f"cu_seqlens must be an int32 vector (S+1,), is {_describe(cu_seqlens)}")
    if cu_seqlens.shape[0] < 2:
        raise ValueError("cu_seqlens has no segment: an empty pack must not reach the model")
    if _dtype_name(cu_seqlens) not in (("int32", "int64") if allow_wider else ("int32",)):
        raise ValueError(
            f"cu_seqlens must be int32, is {_dtype_name(cu_seqlens)}: the kernels would refuse or misread it"
        )
    if max_seqlen is not None and type(max_seqlen) is not int:
        raise ValueError(f"max_seqlen must be a Python int, is {_describe(max_seqlen)}: layers must not ask the device")


def _dtype_name(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")
