"""Attention that keeps the segments of a packed row apart: the kernels, and how a model comes to use one.

kernels/          one signature, a file a kernel; operation.py: a kernel as one operation of a compiled layer
register.py       the choice of the kernel; the function among transformers' attention functions
tree.py           branches that see their prefix
linear.py         linear attention, whose state ends with a segment
ulysses.py, ring.py    attention of a row that several ranks share
boundaries.py     checks of cu_seqlens
"""

from .boundaries import check_boundaries, validate_cu_seqlens
from .kernels import HALF, KERNELS, Kernel, Row, attend_row, attention_operation, register_kernel, run_device
from .linear import Stretches, keep_states_apart, linear_layers, log_linear_attention, stretches
from .register import head_size_of, kernel_of, one_dtype, packed_row, register_packed_attention, select_kernel
from .tree import TreeLinks, tree_links

__all__ = [
    "HALF",
    "KERNELS",
    "Kernel",
    "Row",
    "Stretches",
    "TreeLinks",
    "attend_row",
    "attention_operation",
    "check_boundaries",
    "head_size_of",
    "keep_states_apart",
    "kernel_of",
    "linear_layers",
    "log_linear_attention",
    "one_dtype",
    "packed_row",
    "register_kernel",
    "register_packed_attention",
    "run_device",
    "select_kernel",
    "stretches",
    "tree_links",
    "validate_cu_seqlens",
]
