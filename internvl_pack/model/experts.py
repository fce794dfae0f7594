"""Mixtures of experts: how their products are computed, and what their routers chose.

The experts of a layer are two 3D parameters. transformers multiplies them expert by expert (`eager`, which asks the
device how many tokens each has), as one grouped product (`grouped_mm`) or as a batched one (`batched_mm`, which copies
weights for each token): all give the same result. Under ZeRO-3 a layer's experts are gathered together, whichever of
them a rank's tokens go to, so that ranks that route differently make the same collective calls.

`RoutingSums` collects what a balance loss needs of a forward, without keeping logits: for each layer and expert how
many real tokens went there, and the sum of its probabilities over all real tokens. Both are sums, so they add up over
micro-batches and ranks, however samples are packed; pads are left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError

EXPERTS = ("auto", "eager", "grouped_mm", "batched_mm")


def expert_blocks(language_model: nn.Module) -> list[nn.Module]:
    """The blocks of a language model that hold a router and its experts, in the order of the layers."""
    return [module for module in language_model.modules() if hasattr(module, "experts") and _router(module) is not None]


def _router(block: nn.Module) -> nn.Module | None:
    """transformers calls it gate or router; both return (logits, weights, indices) of flat tokens."""
    return getattr(block, "gate", getattr(block, "router", None))


def choose_experts(language_model: Any, implementation: str) -> None:
    """Set how experts are computed; auto is transformers' choice.

    Raises:
        UserError: an unknown name, or a model without experts.
    """
    if implementation not in EXPERTS:
        raise UserError(f"--experts_implementation {implementation}: choose from {', '.join(EXPERTS)}")
    if implementation == "auto":
        return
    if not expert_blocks(language_model):
        raise UserError(
            f"--experts_implementation {implementation}: a {language_model.config.model_type!r} language model has no "
            "experts: leave it out"
        )
    language_model.set_experts_implementation(implementation)


def gather_experts_together(language_model: nn.Module) -> None:
    """Under ZeRO-3: a block of experts is gathered as one, before DeepSpeed takes the model."""
    from deepspeed.utils import set_z3_leaf_modules

    if kinds := list({type(block) for block in expert_blocks(language_model)}):
        set_z3_leaf_modules(language_model, kinds)


class RoutingSums:
    """Hooks on a model's routers, see the head of this file. One forward at a time.

    Args:
        language_model: with experts.

    Raises:
        UserError: it has none.
    """

    def __init__(self, language_model: Any) -> None:
        blocks = expert_blocks(language_model)
        if not blocks:
            family = language_model.config.model_type
            raise UserError(f"--router_loss_coef: a {family!r} language model has no experts: leave it out")
        self.num_layers = len(blocks)
        self._is_real: Tensor | None = None
        self._sums: list[tuple[Tensor, Tensor]] = []
        self._collects = False
        add = torch.compiler.disable(self._add)  # what it keeps would be guarded on, a graph for each layer
        for block in blocks:
            router = _router(block)
            assert router is not None, "what makes it a block of experts"
            router.register_forward_hook(add)

    def begin(self, is_real: Tensor) -> None:
        """Of the forward that follows; `is_real` (tokens,) is true where a token counts."""
        self._is_real = is_real.reshape(-1)
        self._sums.clear()
        self._collects = True

    def take(self) -> tuple[Tensor, Tensor]:
        """(counts, probabilities) of the forward, float32 (layers, experts) each; the second with its graph."""
        assert len(self._sums) == self.num_layers, "each layer once"
        counts, probabilities = zip(*self._sums, strict=True)
        self._sums.clear()
        self._collects = False
        return torch.stack(counts), torch.stack(probabilities)

    def _add(self, router: nn.Module, args: Any, output: Any) -> None:
        if self._is_real is None or not router.training:
            return
        logits, _, chosen = output
        # Also where a checkpointed layer runs again: it must then keep what it kept before. Nothing is collected there.
        probabilities = (logits.float().softmax(dim=-1) * self._is_real[:, None]).sum(dim=0)
        if self._collects:
            with torch.no_grad():
                weights = self._is_real.float()[:, None].expand_as(chosen).reshape(-1)
                counts = torch.zeros_like(probabilities).index_add_(0, chosen.reshape(-1).long(), weights)
            self._sums.append((counts, probabilities))


def real_tokens(
    input_ids: Tensor,
    num_real_tokens: int | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_padded: Tensor | None,
    attention_mask: Tensor | None,
) -> Tensor:
    """Where a batch holds tokens of samples and no pads, bool like `input_ids`.

    Args:
        input_ids: (1, N) packed or (B, L) padded.
        num_real_tokens: of all segments together, which come before the pad segment; None for no pad segment.
        cu_seqlens: boundaries without pads within segments; cu_seqlens_padded: where segments lie, if they have such.
    """
    if cu_seqlens is None:
        return torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    lengths = cu_seqlens.diff()
    if num_real_tokens is not None:
        lengths = lengths * (cu_seqlens[:-1] < num_real_tokens)
    places = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    numbers = torch.arange(input_ids.shape[1], device=places.device)
    segment = torch.searchsorted(places[1:-1].contiguous(), numbers, right=True)
    is_real = numbers - places[:-1][segment] < lengths[segment]
    return is_real[None].to(input_ids.device, non_blocking=True)
