"""Checkpoints of `--sharding fsdp2`, from which any number of ranks goes on.

    checkpoint-30/fsdp2/   weights in float32 and the optimizer's states, in torch's distributed format: each rank
                           writes its parts, and reads those that it has then

The model of a checkpoint, gathered, lies beside it as always.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from internvl_pack.errors import UserError
from internvl_pack.model.sharded import gathered, put_back

if TYPE_CHECKING:
    from internvl_pack.model.packed import PackedModel

    from .ranks import Ranks

FOLDER = "fsdp2"  # within a checkpoint
MODEL, OPTIMIZER = "model", "optimizer"


def check_form(checkpoint: Path, sharding: str | None) -> None:
    """Refuse a checkpoint whose optimizer's states are in the other form.

    Args:
        sharding: of the run that would go on from it.

    Raises:
        UserError: it was written with --sharding, and the run is without, or the other way round.
    """
    if (checkpoint / FOLDER).is_dir() != bool(sharding):
        raise UserError(
            f"--resume_from_checkpoint {checkpoint}: it was written "
            + ("without --sharding: leave it out" if sharding else "with --sharding fsdp2: give it again")
            + ", or begin anew with the checkpoint as --model_name_or_path"
        )


def save(folder: str | Path, model: PackedModel, optimizer: Any, ranks: Ranks) -> None:
    """Write this rank's parts of weights and states; all ranks call it together.

    Args:
        folder: of the checkpoint.
        optimizer: as accelerate wraps it.
    """
    dcp.save(_state(model, optimizer), checkpoint_id=Path(folder, FOLDER), process_group=ranks.cpu_group)


def load(folder: str | Path, model: PackedModel, optimizer: Any, ranks: Ranks) -> None:
    """Take this rank's parts of weights and states, whatever ranks have written them.

    Raises:
        UserError: other weights were trained then, or of other shapes.
    """
    state, parts = _state(model, optimizer), Path(folder, FOLDER)
    saved = dcp.FileSystemReader(parts).read_metadata().state_dict_metadata
    prefix = f"{OPTIMIZER}.state."
    trained_then = {name.removeprefix(prefix).rpartition(".")[0] for name in saved if name.startswith(prefix)}
    odd = sorted(trained_then ^ state[OPTIMIZER]["state"].keys())
    odd += sorted(name for name, tensor in state[MODEL].items() if _differs(saved.get(f"{MODEL}.{name}"), tensor))
    if odd:
        raise UserError(
            f"--resume_from_checkpoint {folder}: was trained with other options (--use_llm_lora, --use_backbone_lora, "
            f"--freeze_*): {odd[0]} and {len(odd) - 1} more differ"
        )
    dcp.load(state, checkpoint_id=parts, process_group=ranks.cpu_group)
    given = {"model_state_dict": state[MODEL], "optim_state_dict": state[OPTIMIZER]}
    set_state_dict(model, optimizer.optimizer, **given)


def _differs(saved: Any, tensor: torch.Tensor) -> bool:
    """Whether a checkpoint's tensor, as its metadata describes it, is missing or has another shape."""
    return getattr(saved, "size", None) != tensor.shape


def _state(model: PackedModel, optimizer: Any) -> dict[str, Any]:
    put_back(model)
    return dict(zip((MODEL, OPTIMIZER), get_state_dict(model, optimizer.optimizer), strict=True))


def model_state(model: PackedModel, dtype: torch.dtype, ranks: Ranks) -> dict[str, torch.Tensor]:
    """The whole state dict on the CPU of the first rank, empty elsewhere; all ranks call it together."""
    put_back(model)
    state = {}
    for name, tensor in gathered(model, dtype):
        if ranks.is_first:
            state[name] = tensor.cpu()
    return state
