"""What a forward pass asks for does not grow with the number of segments, and no layer waits for the device."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from helpers.model_samples import packed_batch, segment, tiny_packed
from torch.utils._python_dispatch import TorchDispatchMode

from internvl_pack.model.attention import KERNELS, Kernel, register_kernel
from internvl_pack.parallel.slices import RowSlice

# What makes the host wait for a device: values it asks for, and results whose size depends on values.
WAITS = {
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten.is_nonzero.default",
    "aten.unique_dim.default",
}
WAITS |= {"aten.masked_select.default", "aten.repeat_interleave.Tensor", "aten.equal.default"}


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def opaque_kernel(monkeypatch):
    """A kernel of one operation, as those on a GPU are."""

    def run(q, k, v, row):
        assert type(row.max_seqlen) is int
        return q.clone()

    monkeypatch.setitem(KERNELS, "opaque", None)
    register_kernel(Kernel(name="opaque", run=run, problem=lambda device: None, half_only=False))
    return "opaque"


def decode_operations(packed, batch) -> Counter:
    embeddings = packed.get_input_embeddings()(batch["input_ids"])
    with Operations() as operations, torch.no_grad():
        row = RowSlice.whole(batch["cu_seqlens"], batch["max_seqlen"])
        packed._decode(embeddings, batch["position_ids"], row, None, None)
    return operations.counts


@pytest.mark.parametrize("llm", ["qwen2", "qwen3", "llama"])
def test_the_language_model_does_the_same_for_any_number_of_segments_without_waiting(tokenizer, opaque_kernel, llm):
    packed = tiny_packed(tokenizer, llm, kernel=opaque_kernel)
    decode_operations(packed, packed_batch([segment(tokenizer, [("text", 3), ("answer", 3)])]))
    counts = []
    for number in (1, 2, 8, 32):
        row = [segment(tokenizer, [("text", 64 // number), ("answer", 64 // number)], seed) for seed in range(number)]
        counts.append(decode_operations(packed, packed_batch(row)))
    assert counts[0] == counts[1] == counts[2] == counts[3]
    assert counts[0]["aten.mm.default"] + counts[0]["aten.addmm.default"] == 7 * 2  # matrices of two layers
    assert counts[0]["aten.cos.default"] == 1  # the rotary table, once for all layers
    assert not WAITS & counts[0].keys()


def test_grouped_heads_are_not_expanded(tokenizer, monkeypatch):
    shapes = []

    def run(q, k, v, row):
        shapes.append((q.shape[1], k.shape[1], v.shape[1]))
        return q.clone()

    monkeypatch.setitem(KERNELS, "shapes", None)
    register_kernel(Kernel(name="shapes", run=run, problem=lambda device: None, half_only=False))
    packed = tiny_packed(tokenizer, kernel="shapes")
    packed(**packed_batch([segment(tokenizer, [("text", 3), ("answer", 3)])]))
    assert shapes == [(4, 2, 2)] * 2
