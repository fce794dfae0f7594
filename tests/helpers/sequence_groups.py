"""Groups of ranks and boundaries of rows, without processes."""

from __future__ import annotations

import itertools

import torch

from internvl_pack.parallel.group import SequenceGroup


def group_of(size, mode="ulysses", rank=0):
    ranks = tuple(range(size))
    return SequenceGroup(process_group=None, rank=rank, size=size, mode=mode, ranks=ranks, dp_rank=0, dp_world=1)


def cumulative(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
