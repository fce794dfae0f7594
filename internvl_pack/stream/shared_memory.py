"""Check that the batches in flight fit into shared memory (/dev/shm), and raise the limit of open files.

    a reader collates a batch into /dev/shm ──> a descriptor of it goes to the training process ──> freed after its step

A container often has 64 MB of it, of which a batch of 48 tiles of 448 pixels takes 29. So the space is counted before
the first batch. Other processes may fill it later. torch's own thread would then drop the batch silently, and the
training process would wait for ever, so that readers put their tensors there themselves.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import UserError

SHARED_MEMORY = "/dev/shm"
# Ids, labels, positions, weights and a mask: five numbers of 8 bytes at most.
BYTES_A_TOKEN = 40
# Batches beyond those that readers have been asked for: one that is trained on, one on its way to the device.
HELD_BATCHES = 2
OPEN_FILES = 1 << 16


def bytes_of_batch(max_tokens: int, max_tiles: int, image_size: int) -> int:
    """Bytes of a batch at most.

    Args:
        max_tokens, max_tiles: of a batch, all its packs together.
        image_size: pixels along a tile's edge; three bytes each.
    """
    return max_tokens * BYTES_A_TOKEN + max_tiles * 3 * image_size * image_size


def free_bytes(path: str = SHARED_MEMORY) -> int | None:
    """Free bytes of shared memory; None where there is none (macOS)."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def fitting_prefetch(
    batch_bytes: int, num_workers: int, prefetch_factor: int, free: int | None, processes: int = 1
) -> int:
    """The prefetch factor, or a smaller one with which all batches in flight of `num_workers` readers fit.

    Args:
        batch_bytes: see `bytes_of_batch`; beside num_workers * prefetch_factor batches, HELD_BATCHES are alive.
        free: bytes of shared memory; None where it is not known.
        processes: training processes of this machine, which share it.

    Raises:
        UserError: not even one batch a reader fits.
    """
    if free is None:
        return prefetch_factor
    fitting = (free // (processes * batch_bytes) - HELD_BATCHES) // num_workers
    if fitting >= 1:
        return min(prefetch_factor, fitting)
    needed = processes * batch_bytes * (num_workers + HELD_BATCHES)
    raise UserError(
        f"{SHARED_MEMORY} has {free / 1e6:,.0f} MB free, and batches on their way from {processes} x {num_workers} "
        f"dataloader workers take {needed / 1e6:,.0f} MB: give the container more (docker run --shm-size "
        f"{-(-needed // 2**30)}g, or --ipc host), or set --dataloader_num_workers lower (0: none is needed)"
    )


def share(batch: Mapping[str, Any]) -> None:
    """Move a batch's tensors into shared memory, in the reader, which can say that it is full.

    Raises:
        UserError: there is no room for them.
    """
    try:
        for value in batch.values():
            if isinstance(value, torch.Tensor):
                value.share_memory_()
    except RuntimeError as error:
        reason, free = " ".join(str(error).split())[:120], (free_bytes() or 0) / 1e6
        raise UserError(
            f"a dataloader worker cannot hand over its batch ({reason}): {SHARED_MEMORY} has {free:,.0f} MB free; "
            "give the container more (docker run --shm-size, or --ipc host), or set --dataloader_num_workers lower"
        ) from None


def allow_many_open_files() -> None:
    """Raise the soft limit of open files towards the hard one: each tensor of a batch in flight is a descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
