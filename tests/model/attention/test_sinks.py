"""Attention sinks out of a kernel's log-sum-exp, against attention written out; GPT-OSS packed and a sample a row."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.model_samples import gradients, mixed_segments, packed_batch, padded_batch, reference_loss, tiny_packed

from internvl_pack.errors import UserError
from internvl_pack.model.attention import KERNELS, Row
from internvl_pack.model.attention.sinks import attend_with_sinks, masked_attention_with_sinks
from internvl_pack.model.compiled import compile_blocks
from internvl_pack.model.selfcheck import check_isolation
from internvl_pack.parallel.checks import check_model

LENGTHS = [1, 9, 30, 4]


def inputs(dtype=torch.float64):
    torch.manual_seed(0)
    n = sum(LENGTHS)
    q, k, v = (torch.randn(n, heads, 16, dtype=dtype) for heads in (4, 2, 2))
    sinks = torch.tensor([-3.0, 0.0, 1.5, 6.0], dtype=dtype)
    cu_seqlens = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    return [t.requires_grad_() for t in (q, k, v, sinks)], cu_seqlens


def written_out(q, k, v, sinks, cu_seqlens, window):
    """Token by token: the softmax runs over the keys it sees and one more logit, whose value is nothing."""
    out = []
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        for i in range(start, stop):
            first = start if window is None else max(start, i + 1 - window)
            for head in range(q.shape[1]):
                keys, values = k[first : i + 1, head // 2], v[first : i + 1, head // 2]
                scores = torch.cat([keys @ q[i, head] * 16**-0.5, sinks[head : head + 1]])
                out.append(scores.softmax(0)[:-1] @ values)
    return torch.stack(out).view(q.shape)


@pytest.mark.parametrize("window", [None, 5])
def test_output_and_gradients_are_those_of_one_more_logit(window):
    tensors, cu_seqlens = inputs()
    upstream = torch.randn(sum(LENGTHS), 4, 16, dtype=torch.float64)
    expected = written_out(*tensors, cu_seqlens, window)
    wanted = torch.autograd.grad(expected, tensors, upstream)
    row = Row(cu_seqlens, max(LENGTHS), None, window)
    found = attend_with_sinks(KERNELS["sdpa"], *(t.float() for t in tensors), row)
    assert torch.allclose(found, expected.float(), atol=1e-5)
    for gradient, other in zip(torch.autograd.grad(found, tensors, upstream.float()), wanted, strict=True):
        assert torch.allclose(gradient, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
def test_padded_batches_and_generation_have_them_too(window):
    tensors, cu_seqlens = inputs()
    q, k, v, sinks = (t.detach() for t in tensors)
    expected = written_out(q, k, v, sinks, cu_seqlens, window)[1:10]  # the second segment
    batch = [t[None, 1:10].transpose(1, 2) for t in (q, k, v)]
    found = masked_attention_with_sinks(*batch, sinks, None, 16**-0.5, window)
    assert torch.allclose(found[0], expected, atol=1e-6)
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    mask = (mask if window is None else mask.triu(1 - window))[None, None]
    assert torch.equal(masked_attention_with_sinks(*batch, sinks, mask, 16**-0.5, None), found)
    added = torch.zeros(1, 1, 9, 9).masked_fill(~mask, -torch.inf)
    assert torch.allclose(masked_attention_with_sinks(*batch, sinks, added, 16**-0.5, None), found)
    last = masked_attention_with_sinks(batch[0][:, :, -1:], *batch[1:], sinks, None, 16**-0.5, window)
    assert torch.allclose(last, found[:, -1:])


def gpt_oss(tokenizer):
    packed = tiny_packed(tokenizer, "gpt_oss")
    assert packed.config.text_config.layer_types == ["sliding_attention", "full_attention"]
    return packed


def test_gpt_oss_in_packs_is_gpt_oss_a_sample_at_a_time(tokenizer):
    packed, segments = gpt_oss(tokenizer), mixed_segments(tokenizer)
    plain = copy.deepcopy(packed.model)
    plain.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa", "": "eager"})
    expected = reference_loss(plain.train(), segments, "square")
    expected.backward()
    found = packed(**packed_batch(segments, loss_reduction="square")).loss
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    for name, gradient in gradients(packed).items():
        other = wanted[name.removeprefix("model.")]
        assert (gradient - other).norm() <= 1e-5 * other.norm() + 1e-9, name
    assert packed(**padded_batch(segments, loss_reduction="square")).loss.item() == pytest.approx(
        expected.item(), rel=1e-6
    )


def test_no_sample_of_a_pack_sees_another(tokenizer):
    check_isolation(gpt_oss(tokenizer))


@pytest.mark.slow
def test_its_layers_compile_and_are_checkpointed(tokenizer):
    batch = packed_batch(mixed_segments(tokenizer))
    plain, compiled = gpt_oss(tokenizer), gpt_oss(tokenizer)
    compiled.gradient_checkpointing_enable()
    compile_blocks(compiled, backend="aot_eager")
    for packed in (plain, compiled):
        packed(**batch).loss.backward()
    wanted = gradients(plain)
    for name, gradient in gradients(compiled).items():
        assert (gradient - wanted[name]).norm() <= 1e-5 * wanted[name].norm() + 1e-9, name


def test_it_takes_no_trees_without_windows_either(tokenizer):
    packed = tiny_packed(tokenizer, "gpt_oss", layer_types=["full_attention"] * 2)
    assert "attention sinks" in packed.tree_problem
    check_isolation(packed)


def test_its_row_is_not_shared_among_gpus(tokenizer):
    config = gpt_oss(tokenizer).config.text_config
    for mode in ("ulysses", "ring"):
        with pytest.raises(UserError, match=r"'gpt_oss' language model|sliding windows"):
            check_model(config, "sdpa", 2, mode)
