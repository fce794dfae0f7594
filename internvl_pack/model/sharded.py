"""`--sharding fsdp2`: weights, gradients and optimizer states sharded over all ranks, by torch's `fully_shard`.

    one gather each        embeddings | a vision layer ... | a decoder layer ... | head         freed after use
    for the whole pass     what is left: patch embedding, projector, the last norm, tied embeddings

Each piece is gathered whole before it runs and again for its backward pass, the next one meanwhile; its gradients are
reduced once, as soon as they are all there. Hooks are around pieces, never within: a compiled layer is one graph.

A trained weight is kept in float32 and gathered in the type of the products; its gradient is averaged in that type,
then added up in float32. That is how DeepSpeed's ZeRO does it: bfloat16 on the wire, float32 in the optimizer. Frozen
weights are kept as they are computed with.

Rows of different ranks differ, collective calls must not. The head runs once a pass however many labels there are
(loss/head.py). A vision tower that runs fused (vision/fused.py), or in micro-tiles, is one piece, gathered once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from ..errors import UserError
from .parts import decoder_layers

if TYPE_CHECKING:
    from .packed import PackedModel

logger = logging.getLogger(__name__)


def shard(packed: PackedModel, device: torch.device, compute_dtype: torch.dtype) -> None:
    """Move the model to the device, a part to each rank; every rank has loaded the same one.

    Names of modules and parameters stay. Layers are compiled before, by `compile_blocks`.

    Args:
        device: of this process.
        compute_dtype: what products are computed in.

    Raises:
        UserError: a language model whose layers have another name.
    """
    try:
        decoder = decoder_layers(packed.language_model)
    except AttributeError:
        family = packed.config.get_text_config().model_type
        raise UserError(
            f"--sharding fsdp2 with a {family!r} language model: its layers are not called layers; use --deepspeed"
        ) from None
    mesh = _mesh(device)
    policy = MixedPrecisionPolicy(compute_dtype, compute_dtype, cast_forward_inputs=False)

    def as_one(module: nn.Module, policy: MixedPrecisionPolicy = policy, **options: Any) -> None:
        _give_masters(module.parameters(), device, compute_dtype)
        fully_shard(module, mesh=mesh, mp_policy=policy, **options)

    tower: list[nn.Module] = []
    if packed.tower is not None and (packed.fused_vision or packed.vision_micro_tiles is not None):
        # It stays for the backward pass: as often as it runs, it is gathered once. Its own type is asked for while it
        # is in parts, so what goes in is cast.
        whole = MixedPrecisionPolicy(compute_dtype, compute_dtype, cast_forward_inputs=True)
        as_one(packed.vision_modules[0], whole, reshard_after_forward=False)
    elif packed.tower is not None:
        tower = list(packed.tower.layers)
    layers = [*tower, *decoder]
    for layer in layers:
        as_one(layer)
    embeddings, head = packed.get_input_embeddings(), packed.get_output_embeddings()
    if embeddings.weight is not head.weight:
        as_one(embeddings)
        as_one(head, reshard_after_forward=False)  # its backward pass comes next
        _run_inside(head, packed.head)
    as_one(packed)  # what is left
    for layer, following in pairwise(layers):
        _piece(layer).set_modules_to_forward_prefetch([_piece(following)])
    packed.register_forward_pre_hook(_hide, prepend=True, with_kwargs=True)
    packed.register_forward_pre_hook(_show, with_kwargs=True)
    _compile_as_unsharded(packed)
    whole_tower = "" if tower or packed.tower is None else ", the vision tower as one"
    logger.info("FSDP2: %d layers one by one%s, on %d ranks", len(layers), whole_tower, mesh.size())
    marked: Any = packed
    marked._is_accelerate_prepared = True  # accelerate would wrap it in DDP, and run it in autocast


def _mesh(device: torch.device) -> Any:
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return init_device_mesh(device.type, (dist.get_world_size(),))


def _piece(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule), "sharded before"
    return module


def _give_masters(parameters: Iterable[nn.Parameter], device: torch.device, compute_dtype: torch.dtype) -> None:
    """On the device, trained weights in float32; of a piece at a time, so that the whole model never is there."""
    for parameter in parameters:
        if not isinstance(parameter, DTensor):
            dtype = torch.float32 if parameter.requires_grad else compute_dtype
            parameter.data = parameter.data.to(device, dtype)


def _compile_as_unsharded(packed: PackedModel) -> None:
    """Let the compiler take numbers of a layer (heads, width of a head) as constants, as in a model that is whole.

    In modules that `fully_shard` has marked it takes them for symbols, and tracing takes up to three times as long. The
    mark is for hooks within what is compiled; here they are around it.
    """
    for module in packed.modules():
        vars(module).pop("_is_fsdp_managed_module", None)


def _run_inside(head: nn.Module, losses: nn.Module) -> None:
    """Let the module that makes losses, which reads the head's weight, run as a forward pass of the head."""
    called: Any = head
    called.losses = losses.forward
    register_fsdp_forward_method(head, "losses")
    losses.forward = called.losses


class _AsGiven:
    """Arguments that torch does not look into: it would move those that are on the host to the device."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs


def _hide(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (), {"given": _AsGiven(args, kwargs)}


def _show(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = kwargs["given"]
    return given.args, given.kwargs


# --- what is in parts -----------------------------------------------------------------------------


def put_back(model: nn.Module) -> None:
    """Free what is gathered still, as after a pass without a backward one: parameters are this rank's parts again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the state dict by name, whole, weights in `dtype`; all ranks go through it together."""
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, DTensor):
            part: Any = tensor.detach().to(dtype)
            yield name, part.full_tensor()
        else:
            yield name, tensor.detach()
