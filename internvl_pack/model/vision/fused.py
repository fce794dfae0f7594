"""The vision tower's layers with their gradients written out: as few passes over memory as there can be.

A third of a compiled layer's time goes to operations that wait for memory: norms, GELU, and the sums over all patches
that are the gradients of biases and layer scales. Here a layer is two autograd functions, its attention and its MLP, of
one form:

    stream, branch, bias -> stream + branch + bias -> norm -> attention or MLP -> the sum, next branch, its bias

* The layer scale is folded into the product before it, scale * (W h + b) = (scale W) h + scale b. No activation is
  scaled, or kept for the scale's gradient: that comes from the folded weight's gradient, a row of the weight at a time.
* Each half-layer returns the stream and the branch still to be added; the norm that comes next, in an MLP's case that
  of the layer after, adds it with its bias.
* A pass backward through a norm or GELU also makes the sums over patches that it can see.
* q, k and v are one product, and attention's gradients are written where one product reads them.

It takes the place of the compiled layers of `--compile` where it can: layers as in InternVL's 300M tower (layer norm,
GELU, no norm of q and k), without LoRA or stochastic depth, in half precision, with an attention kernel for tiles
(tile_attention.py) and Triton, where only what the last layer gives is asked for: no module of a layer is called, so
neither are hooks. Elsewhere the compiled layers run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.utils import output_capturing

from ..attention import HALF, KERNELS
from ..parts import vision_layers
from .fused_ops import add_norm, add_norm_backward, column_sums, fold, fold_backward, gelu_backward, triton_kernels
from .tile_attention import tile_kernel

if TYPE_CHECKING:
    from ..packed import PackedModel

logger = logging.getLogger(__name__)

# (stream, branch, bias): (rows, width), the same or None, and float32 (width,) or None.
State = tuple[Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class TileHeads:
    """How rows become tiles and heads, and the kernel they meet in."""

    patches: int
    heads: int
    kernel: str
    scale: float

    def apart(self, rows: Tensor) -> tuple[Tensor, ...]:
        """q, k and v, (T, P, H, D) each, as views of (rows, 3 * width)."""
        return rows.view(-1, self.patches, 3, self.heads, rows.shape[1] // (3 * self.heads)).unbind(2)

    def attend(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        forward = KERNELS[self.kernel].tiles_forward
        assert forward is not None, "looked at before"
        out, lse = forward(*self.apart(qkv), self.scale)
        return out.reshape(len(qkv), -1), lse

    def gradient(self, upstream: Tensor, qkv: Tensor, attended: Tensor, lse: Tensor) -> Tensor:
        """(rows, 3 * width)."""
        backward = KERNELS[self.kernel].tiles_backward
        assert backward is not None, "a kernel with a forward has a backward"
        q, k, v = self.apart(qkv)
        together = torch.empty_like(qkv)
        backward(upstream.view(q.shape), q, k, v, attended.view(q.shape), lse, self.scale, self.apart(together))
        return together


class AttentionHalf(torch.autograd.Function):
    """A layer's norm, attention and projection.

    Args of apply:
        stream, branch, bias: a State.
        heads, epsilon: of the tiles; of the norm.
        parameters: the norm's weight and bias; weights of q, k and v; their biases, or None three times; weight and
            bias of the projection; the layer scale.

    Returns:
        the next State.
    """

    @staticmethod
    def forward(
        ctx: Any,
        stream: Tensor,
        branch: Tensor | None,
        bias: Tensor | None,
        heads: TileHeads,
        epsilon: float,
        *parameters: Tensor,
    ) -> State:
        norm, norm_bias, q, k, v, q_bias, k_bias, v_bias, *projection = parameters
        qkv_weight = torch.cat([q, k, v])
        qkv_bias = None if q_bias is None else torch.cat([q_bias, k_bias, v_bias])
        out_weight, out_bias = fold(*projection)
        total, normed, *statistics = add_norm(stream, branch, bias, norm, norm_bias, epsilon)
        qkv = F.linear(normed, qkv_weight, qkv_bias)
        attended, lse = heads.attend(qkv)
        ctx.heads = heads
        ctx.save_for_backward(total, normed, *statistics, qkv, attended, lse, qkv_weight, out_weight, norm, *projection)
        return total, attended @ out_weight.T, out_bias

    @staticmethod
    @once_differentiable  # the kernels are invisible to autograd: a second derivative would lack their part
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        stream_grad, branch_grad, bias_grad = (g.contiguous() for g in upstream)
        total, normed, means, scales, qkv, attended, lse, qkv_weight, out_weight, norm, *projection = ctx.saved_tensors
        needs = ctx.needs_input_grad
        qkv_grad = ctx.heads.gradient(branch_grad @ out_weight, qkv, attended, lse)
        out_grads = _folded_gradients(branch_grad, bias_grad, attended, projection, needs[13:])
        weights = (qkv_grad.T @ normed).chunk(3) if any(needs[7:10]) else [None] * 3
        biases = column_sums(qkv_grad).to(norm.dtype).chunk(3) if any(needs[10:13]) else [None] * 3
        grad, sums = add_norm_backward(qkv_grad @ qkv_weight, stream_grad, total, means, scales, norm)
        return (*_state_gradients(ctx, grad, sums), None, None, *sums[:2].to(norm.dtype), *weights, *biases, *out_grads)


class MlpHalf(torch.autograd.Function):
    """A layer's second norm and its MLP.

    Args of apply:
        stream, branch, bias: a State.
        keep, epsilon: whether GELU's output is kept for the backward pass, or computed again there; of the norm.
        parameters: weight and bias of the norm, of the first and of the second linear layer, and the layer scale.

    Returns:
        the next State.
    """

    @staticmethod
    def forward(
        ctx: Any,
        stream: Tensor,
        branch: Tensor | None,
        bias: Tensor | None,
        keep: bool,
        epsilon: float,
        *parameters: Tensor,
    ) -> State:
        norm, norm_bias, weight, inner_bias, *second = parameters
        out_weight, out_bias = fold(*second)
        total, normed, *statistics = add_norm(stream, branch, bias, norm, norm_bias, epsilon)
        inner = F.linear(normed, weight, inner_bias)
        active = F.gelu(inner)
        ctx.save_for_backward(
            total, normed, *statistics, inner, active if keep else None, weight, out_weight, norm, *second
        )
        return total, active @ out_weight.T, out_bias

    @staticmethod
    @once_differentiable  # the kernels are invisible to autograd: a second derivative would lack their part
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        stream_grad, branch_grad, bias_grad = (g.contiguous() for g in upstream)
        total, normed, means, scales, inner, active, weight, out_weight, norm, *second = ctx.saved_tensors
        needs = ctx.needs_input_grad
        inner_grad, again, inner_sums = gelu_backward(branch_grad @ out_weight, inner, active is None)
        second_grads = _folded_gradients(branch_grad, bias_grad, again if active is None else active, second, needs[9:])
        del active, again
        weight_grad = inner_grad.T @ normed if needs[7] else None
        normed_grad = inner_grad @ weight
        del inner_grad
        grad, sums = add_norm_backward(normed_grad, stream_grad, total, means, scales, norm)
        first_grads = (*sums[:2].to(norm.dtype), weight_grad, inner_sums.to(norm.dtype))
        return (*_state_gradients(ctx, grad, sums), None, None, *first_grads, *second_grads)


def _folded_gradients(
    upstream: Tensor, sums: Tensor, inputs: Tensor | None, linear: Sequence[Tensor], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of a linear layer's weight, bias and scale; `sums`: of upstream over rows."""
    assert inputs is not None, "kept, or made again"
    return fold_backward(upstream.T @ inputs, sums, *linear) if any(needed) else (None, None, None)


def _state_gradients(ctx: Any, grad: Tensor, sums: Tensor) -> list[Tensor | None]:
    """Of stream, branch and bias: they are added up."""
    return [g if needed else None for g, needed in zip((grad, grad, sums[2]), ctx.needs_input_grad, strict=False)]


class FusedTower:
    """Stands in the place of the encoder's `forward`: through the fused layers where this call can be.

    Attributes:
        off: through the layers as they were, for comparisons.
    """

    def __init__(self, encoder: nn.Module, config: Any, keep_gelu: bool) -> None:
        self.encoder, self.config, self.keep_gelu = encoder, config, keep_gelu
        self.layers_as_they_are = encoder.forward
        self.off = False

    def __call__(self, hidden_states: Tensor) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        kernel, layers = tile_kernel(self.config._attn_implementation), cast(Any, self.encoder).layer
        recorded = _recorded()
        states: list[Tensor | None] | None = recorded.get("hidden_states")
        last_alone = states is None or recorded.get("_hidden_states_layers") == {len(layers)}
        if self.off or kernel is None or not last_alone or not _fits(hidden_states, self.encoder):
            return self.layers_as_they_are(hidden_states)
        if any(_has_hooks(module) for module in layers.modules()):
            return self.layers_as_they_are(hidden_states)
        tiles, patches, width = hidden_states.shape
        state: State = (hidden_states.reshape(tiles * patches, width).contiguous(), None, None)
        for layer in layers:
            run = partial(self._layer, layer, patches=patches, kernel=kernel)
            if layer.gradient_checkpointing and layer.training and torch.is_grad_enabled():
                # What a checkpoint is given is kept: one tensor, so what is yet to be added is added.
                alone = layer._gradient_checkpointing_func(
                    lambda rows, run=run: _added(run((rows, None, None))), state[0]
                )
                state = (alone, None, None)
            else:
                state = run(state)
        features = _added(state).view(tiles, patches, width)
        if states is not None:
            states += [*[None] * len(layers), features]  # as the recording does with those that are not asked for
        return BaseModelOutput(last_hidden_state=features)

    def _layer(self, layer: Any, state: State, *, patches: int, kernel: str) -> State:
        attention, norm = layer.attention, layer.layernorm_before
        heads = TileHeads(patches, attention.num_heads, kernel, attention.scale)
        q, k, v, out = attention.q_proj, attention.k_proj, attention.v_proj, attention.projection_layer
        state = AttentionHalf.apply(
            *state, heads, norm.eps, norm.weight, norm.bias, q.weight, k.weight, v.weight, q.bias, k.bias, v.bias,
            out.weight, out.bias, layer.lambda_1,
        )  # fmt: skip
        norm, first, second = layer.layernorm_after, layer.mlp.fc1, layer.mlp.fc2
        return MlpHalf.apply(
            *state, self.keep_gelu, norm.eps, norm.weight, norm.bias, first.weight, first.bias, second.weight,
            second.bias, layer.lambda_2,
        )  # fmt: skip


def fuse_tower(packed: PackedModel, keep_gelu: bool = True) -> str | None:
    """Let the vision tower's layers run fused, if all of them can be, in calls that allow it.

    Args:
        keep_gelu: keep GELU's output for the backward pass: 8 kB a patch and layer of InternVL's 300M tower.

    Returns:
        None if they will as the model is now, else why not.
    """
    assert packed.has_vision, "there is a tower"
    tower = packed.vision_modules[0]
    if not all(is_fusible(layer) for layer in vision_layers(tower)):
        return "its layers are not those of InternVL's 300M tower as it is published"
    config = packed.config.vision_config
    encoder = tower.get_submodule("encoder")
    encoder.forward = FusedTower(encoder, config, keep_gelu)
    if (used := packed.config.vision_feature_layer) != -1:
        return f"its features are taken at layer {used}, not at the last"
    if tile_kernel(config._attn_implementation) is None:
        return f"its attention is {config._attn_implementation}, not a kernel for tiles such as fa4"
    if not {p.dtype for p in encoder.parameters()} <= set(HALF):
        return "its weights are not in half precision"
    return None if triton_kernels() is not None else "Triton is not installed"


def is_fusible(layer: nn.Module) -> bool:
    """Whether a layer is what AttentionHalf and MlpHalf compute, in training too."""
    from transformers.activations import GELUActivation
    from transformers.models.internvl.modeling_internvl import InternVLVisionLayer

    if type(layer) is not InternVLVisionLayer:
        return False
    attention, mlp = cast(Any, layer.attention), cast(Any, layer.mlp)
    norms = (layer.layernorm_before, layer.layernorm_after)
    linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.projection_layer, mlp.fc1, mlp.fc2)
    return (
        all(type(norm) is nn.LayerNorm and norm.bias is not None for norm in norms)
        and all(type(linear) is nn.Linear for linear in linears)
        and len({linear.bias is None for linear in linears[:3]}) == 1
        and all(linear.bias is not None for linear in linears[3:])
        and all(isinstance(norm, nn.Identity) for norm in (attention.q_norm, attention.k_norm))
        and isinstance(mlp.activation_fn, GELUActivation)
        and mlp.activation_fn.act is F.gelu
        and not attention.attention_dropout
        and all(_drops_nothing(module) for module in (attention.projection_dropout, layer.dropout))
        and isinstance(layer.lambda_1, nn.Parameter) and isinstance(layer.lambda_2, nn.Parameter)
        and all(type(parameter) is nn.Parameter for parameter in layer.parameters())  # no quantised or sharded ones
        and not any(_has_hooks(module) for module in layer.modules())
    )  # fmt: skip


def _drops_nothing(module: nn.Module) -> bool:
    return isinstance(module, nn.Identity) or (type(module) is nn.Dropout and module.p == 0.0)


def _recorded() -> dict[str, Any]:
    """What transformers records of the current call: lists by name, and which hidden states were asked for."""
    collector = getattr(output_capturing, "_active_collector", None)  # private: another version may have none
    return (collector.get() if collector is not None else None) or {}


def _has_hooks(module: nn.Module) -> bool:
    """Whether something is to be called with the module, but transformers' recording of states."""
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    hooks = module._forward_hooks.values()
    return any(getattr(hook, "__module__", "") != output_capturing.__name__ for hook in hooks)


def _fits(hidden_states: Tensor, encoder: nn.Module) -> bool:
    """Whether the kernels take these tensors: in half precision, like the weights, outside of autocast."""
    on_device = not hidden_states.is_cuda or triton_kernels() is not None
    dtypes = {hidden_states.dtype, *(p.dtype for p in encoder.parameters())}
    return (
        on_device
        and len(dtypes) == 1
        and dtypes <= set(HALF)
        and not torch.is_autocast_enabled(hidden_states.device.type)
    )


def _added(state: State) -> Tensor:
    stream, branch, bias = state
    return stream if branch is None or bias is None else stream + (branch + bias.to(branch.dtype))
