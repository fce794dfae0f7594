"""Linear attention of packed rows (Qwen3-Next, Qwen3.5: the gated delta rule): its state begins anew in each segment.

Such a layer carries a state along the row, and a convolution before it sees the three tokens before a token: both must
end with a segment. flash-linear-attention and causal-conv1d take boundaries, so where both are installed, on CUDA, a
row is one call. Elsewhere the layer's own code runs once a segment.

A branch of a prefix tree begins with the state that its prefix leaves. Its prefix is computed again before it, of which
nothing is kept: in these layers a tree costs what its branches would without sharing.
"""

from __future__ import annotations

import importlib
import logging
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .kernels import run_device

logger = logging.getLogger(__name__)

# What takes boundaries, by the module that has it.
KERNELS = {"fla.ops.gated_delta_rule": "chunk_gated_delta_rule", "causal_conv1d": "causal_conv1d_fn"}


class Stretches(NamedTuple):
    """What a linear layer runs over, each with a state of its own: a row's segments, branches after their prefixes.

    Attributes:
        lengths: of each, on the host.
        cu_seqlens: int32 (S+1,) on the device; cu_seqlens_cpu: the same on the host.
        numbers: int32 (1, M) on the device, which one a token is of.
        places: int64 (M,) on the device, the row's tokens in their order, and kept: int64 (N,), where the row's own are
            among them. None in a row without trees, which is as it is.
    """

    lengths: list[int]
    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor
    numbers: Tensor
    places: Tensor | None = None
    kept: Tensor | None = None


def stretches(cu_seqlens: Tensor, prefix_of: Tensor | None, device: torch.device | str) -> Stretches:
    """Of a row; the device is not waited for.

    Args:
        cu_seqlens: int32 (S+1,) on the host; prefix_of: int32 (S,) likewise, see `tree_links`.
    """
    bounds = cu_seqlens.numpy().astype(np.int64)
    own = np.diff(bounds)
    prefixes = np.full(len(own), -1) if prefix_of is None else prefix_of.numpy()
    before = np.where(prefixes >= 0, own[prefixes], 0)
    edges = np.append(0, np.cumsum(before + own))

    def on_device(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    numbers = on_device(np.repeat(np.arange(len(own), dtype=np.int32), before + own)[None])
    edges_cpu = torch.from_numpy(edges.astype(np.int32))
    found = Stretches((before + own).tolist(), edges_cpu.to(device, non_blocking=True), edges_cpu, numbers)
    if not before.any():
        return found
    spans = [np.arange(bounds[i], bounds[i + 1]) for i in range(len(own))]
    parts = [part for i, p in enumerate(prefixes) for part in ([spans[p], spans[i]] if p >= 0 else [spans[i]])]
    starts = edges[:-1] + before
    kept = np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], own)
    return found._replace(places=on_device(np.concatenate(parts)), kept=on_device(kept))


def linear_layers(language_model: nn.Module) -> list[nn.Module]:
    """The linear attention of its decoder layers."""
    layers = getattr(language_model, "layers", ())
    return [layer.linear_attn for layer in layers if hasattr(layer, "linear_attn")]


def keep_states_apart(language_model: nn.Module) -> None:
    """Let its linear layers run over the `stretches` that a forward gives; without them they run as they are."""
    for layer in linear_layers(language_model):
        if not isinstance(layer.forward, ApartForward):
            layer.forward = ApartForward(layer)


class ApartForward:
    """Stands in the place of one linear layer's `forward`."""

    def __init__(self, layer: nn.Module) -> None:
        self._forward = layer.forward

    def __call__(self, hidden_states: Tensor, stretches: Stretches | None = None, **given: Any) -> Tensor:
        """(1, N, H) to (1, N, H); a padded batch, which has no stretches, with its mask."""
        if stretches is None:
            return self._forward(hidden_states, **given)
        if stretches.places is not None:
            hidden_states = hidden_states.index_select(1, stretches.places)
        if takes_rows(hidden_states.device):
            out = self._forward(
                hidden_states,
                cu_seq_lens_q=stretches.cu_seqlens,
                cu_seqlens_cpu=stretches.cu_seqlens_cpu,
                seq_idx=stretches.numbers,
            )
        else:
            out = torch.cat([self._forward(part) for part in hidden_states.split(stretches.lengths, 1)], 1)
        return out if stretches.kept is None else out.index_select(1, stretches.kept)


def takes_rows(device: torch.device) -> bool:
    """Whether a linear layer's code takes boundaries there."""
    return device.type == "cuda" and missing_kernel() is None


@lru_cache(maxsize=1)
def missing_kernel() -> str | None:
    """The first of KERNELS that cannot be imported, as transformers tries it; None where both are there."""
    for module, name in KERNELS.items():
        try:
            getattr(importlib.import_module(module), name)
        except Exception:  # of any kind, in a build for another torch
            return f"{module}.{name}"
    return None


def log_linear_attention(language_model: nn.Module, device: torch.device | str | None) -> None:
    """Say in the log how its linear layers will run, where it has some."""
    if not linear_layers(language_model):
        return
    device = run_device(device)
    if takes_rows(device):
        logger.info("linear attention: whole rows, by flash-linear-attention and causal-conv1d")
        return
    why = f" ({missing_kernel()} cannot be imported)" if device.type == "cuda" else ""
    logger.warning(
        "linear attention: one segment at a time, exact but slower; whole rows need a GPU and "
        "pip install flash-linear-attention causal-conv1d%s",
        why,
    )
