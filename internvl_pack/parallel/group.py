"""Which ranks share a row.

Consecutive ranks are one group, so that a group of up to 8 stays inside a machine:

    rank        0 1 2 3 4 5 6 7        --sequence_parallel_size 4
    group       0 0 0 0 1 1 1 1        the data-parallel rank: which packs it reads
    in group    0 1 2 3 0 1 2 3        which slice of them it computes
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from .checks import MODES, check_fp8, check_mode, check_model, check_pictures, check_world

logger = logging.getLogger(__name__)

__all__ = ["MODES", "SequenceGroup", "enable_sequence_parallel", "group_ranks", "make_groups"]


@dataclass(frozen=True, kw_only=True)
class SequenceGroup:
    """The ranks that share a row, as one of them sees it.

    Attributes:
        process_group: torch's group of them; None for one rank by itself.
        rank, size: place in the group, and how many share a row.
        mode: "ulysses" or "ring".
        ranks: global ranks, in order.
        dp_rank, dp_world: number of this group and of all groups, as readers count them.
    """

    process_group: Any
    rank: int
    size: int
    mode: str
    ranks: tuple[int, ...]
    dp_rank: int
    dp_world: int


def group_ranks(world_size: int, sequence_parallel_size: int) -> list[tuple[int, ...]]:
    """Global ranks of each group, in order.

    Raises:
        UserError: the groups do not cover the ranks.
    """
    check_world(world_size, sequence_parallel_size)
    starts = range(0, world_size, sequence_parallel_size)
    return [tuple(range(start, start + sequence_parallel_size)) for start in starts]


def make_groups(
    world_size: int, sequence_parallel_size: int, mode: str = "ulysses", timeout: timedelta | None = None
) -> SequenceGroup:
    """Make all process groups (every rank must call, in the same order) and give this rank's.

    Args:
        timeout: after which a collective whose other ranks are missing fails; None takes torch's own, which is not
            that of the processes' first group.

    Raises:
        UserError: the groups do not cover the ranks, or an unknown mode.
    """
    import torch.distributed as dist

    check_mode(mode)
    groups = group_ranks(world_size, sequence_parallel_size)
    rank = dist.get_rank() if dist.is_initialized() else 0
    own = rank // sequence_parallel_size
    process_group = None
    if sequence_parallel_size > 1:
        made = [dist.new_group(list(ranks), timeout=timeout) for ranks in groups]
        process_group = made[own]
    return SequenceGroup(
        process_group=process_group,
        rank=rank % sequence_parallel_size,
        size=sequence_parallel_size,
        mode=mode,
        ranks=groups[own],
        dp_rank=own,
        dp_world=len(groups),
    )


def enable_sequence_parallel(packed: Any, group: SequenceGroup | None) -> None:
    """Run the packs of a `PackedModel` over `group` from now on; None, or a group of one, ends it.

    Raises:
        UserError: heads, kernel, layers or products of the model that do not go with it.
    """
    if group is None or group.size == 1:
        packed.sequence_group = None
        return
    check_fp8(packed.fp8, group.size)
    check_pictures(packed.tower, packed.config.model_type, group.size)
    if line := check_model(packed.config.get_text_config(), packed.attn_kernel.name, group.size, group.mode):
        logger.info(line)
    packed.sequence_group = group
