"""Attention of the vision tower by a kernel of its own: the same features and gradients, eager and compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.model_samples import gradients, mixed_segments, packed_batch, tiny_packed

from internvl_pack.model.attention import KERNELS
from internvl_pack.model.vision.tile_attention import attend_tiles, use_tile_attention


def written_out(q, k, v, scale):
    q, k, v = (t.float().transpose(1, 2) for t in (q, k, v))
    scores = q @ k.mT * scale
    return (scores.softmax(-1) @ v).transpose(1, 2).to(torch.bfloat16), scores.logsumexp(-1)


def written_out_gradient(upstream, q, k, v, out, lse, scale):
    do, q, k, v, o = (t.float().transpose(1, 2) for t in (upstream, q, k, v, out))
    p = (q @ k.mT * scale - lse.unsqueeze(-1)).exp()
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) * scale
    return tuple(g.transpose(1, 2).to(torch.bfloat16) for g in (ds @ k, ds.mT @ q, p.mT @ do))


@pytest.fixture
def stand_in(monkeypatch):
    """A kernel for tiles that runs on a CPU."""
    torch._dynamo.reset()
    kernel = replace(KERNELS["sdpa"], name="stand_in", tiles_forward=written_out, tiles_backward=written_out_gradient)
    monkeypatch.setitem(KERNELS, "stand_in", kernel)
    yield kernel
    torch._dynamo.reset()


def test_the_operation_and_its_gradient_are_those_of_sdpa(stand_in):
    torch.manual_seed(0)
    q, k, v, upstream = (torch.randn(3, 17, 2, 8, dtype=torch.bfloat16) for _ in range(4))
    ours = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = attend_tiles(*ours, 0.3, "stand_in")
    assert out.shape == q.shape and lse.shape == (3, 2, 17) and lse.dtype == torch.float32
    theirs = [t.double().requires_grad_() for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in theirs), scale=0.3).transpose(1, 2)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    got = torch.autograd.grad(out, ours, upstream)
    for one, two in zip(got, torch.autograd.grad(expected, theirs, upstream.double()), strict=True):
        torch.testing.assert_close(one.double(), two, rtol=3e-2, atol=3e-2)
    torch.library.opcheck(attend_tiles, (*ours, 0.3, "stand_in"), test_utils=("test_schema", "test_faketensor"))


def test_a_model_trains_the_same_with_it(tokenizer, stand_in):
    packed, plain = (tiny_packed(tokenizer).to(torch.bfloat16) for _ in range(2))
    calls = []
    counted = replace(stand_in, tiles_forward=lambda *a: (calls.append(1), written_out(*a))[1])
    KERNELS["stand_in"] = counted
    assert use_tile_attention(packed.model, counted) == "internvl_pack_tiles_stand_in"
    batch = packed_batch(mixed_segments(tokenizer))
    losses = []
    for model in (packed, plain):
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
    assert len(calls) == len(packed.vision_modules[0].encoder.layer)
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    expected, got = gradients(plain), gradients(packed)
    total = torch.stack([g.float().norm() for g in expected.values()]).norm()
    apart = torch.stack([(got[n].float() - g.float()).norm() for n, g in expected.items()]).norm()
    assert apart < 0.05 * total


def test_a_compiled_layer_has_it_as_one_operation(tokenizer, stand_in):
    packed = tiny_packed(tokenizer).to(torch.bfloat16)
    use_tile_attention(packed.model, stand_in)
    layer = packed.vision_modules[0].encoder.layer[0].attention
    x = torch.randn(2, 17, packed.config.vision_config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    results = []
    for run in (layer.forward, compiled):
        out = run(x)[0]
        results.append((out, *torch.autograd.grad(out.float().square().sum(), [x, *layer.parameters()])))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(two, one, rtol=2e-2, atol=2e-2)


def test_under_autocast_normalised_queries_have_the_type_of_the_values(tokenizer, stand_in):
    from transformers import AttentionInterface

    packed = tiny_packed(tokenizer)
    attention = AttentionInterface()[use_tile_attention(packed.model, stand_in)]
    q, k = (torch.randn(2, 2, 17, 8) for _ in range(2))  # float32 norms give float32
    v = torch.randn(2, 2, 17, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = attention(None, q, k, v, None, scaling=0.3)
        half = [t.transpose(1, 2).to(torch.bfloat16) for t in (q, k, v)]
        assert torch.equal(out, attend_tiles(*half, 0.3, "stand_in")[0])


def test_float32_and_heads_it_cannot_take_go_through_sdpa(tokenizer, stand_in):
    packed = tiny_packed(tokenizer)
    refuse = replace(stand_in, tiles_forward=lambda *a: pytest.fail("float32 is not for this kernel"))
    KERNELS["stand_in"] = refuse
    use_tile_attention(packed.model, refuse)
    packed(**packed_batch(mixed_segments(tokenizer)))
    packed.config.vision_config.num_attention_heads = packed.config.vision_config.hidden_size // 4
    assert use_tile_attention(packed.model, stand_in) == "sdpa"
    assert use_tile_attention(packed.model, KERNELS["sdpa"]) == "sdpa"
    assert packed.config.vision_config._attn_implementation == "sdpa"
