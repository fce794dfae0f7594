"""What `--compile` changes beside compiling: what is kept for the backward pass, patches as a matrix product."""

from __future__ import annotations

import pytest
import torch
from model_samples import gradients, mixed_segments, packed_batch, tiny_packed
from torch import nn

from internvl_pack.errors import UserError
from internvl_pack.model.compiled import RECOMPUTE, compile_blocks
from internvl_pack.model.patches import PatchProjection, is_patch_projection, project_patches


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_what_is_computed_again_is_not_kept_and_changes_no_gradient(tokenizer):
    batch, plain = packed_batch(mixed_segments(tokenizer)), tiny_packed(tokenizer)
    plain(**batch).loss.backward()
    expected = gradients(plain)
    total = torch.stack([g.norm() for g in expected.values()]).norm()
    kept = {}
    for recompute in RECOMPUTE:
        torch._dynamo.reset()
        packed = tiny_packed(tokenizer)
        compile_blocks(packed, backend="aot_eager_decomp_partition", recompute=recompute)
        sizes = {}

        def keep(tensor, sizes=sizes):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = packed(**batch).loss
        loss.backward()
        kept[recompute] = sum(sizes.values())
        for name, gradient in gradients(packed).items():
            assert (gradient - expected[name]).norm() < 1e-6 * total, name
    assert kept["all"] < kept["language"] < kept["none"], kept


def test_an_unknown_recompute_is_refused(tokenizer):
    with pytest.raises(UserError, match="--compile_recompute some: choose from none, language, all"):
        compile_blocks(tiny_packed(tokenizer), recompute="some")


# --- patches --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "bias"), [((14, 14), True), ((4, 6), False)])
def test_patches_by_a_product_are_those_of_the_convolution(kernel, bias):
    convolution = nn.Conv2d(3, 10, kernel, stride=kernel, bias=bias).double()
    assert is_patch_projection(convolution)
    tiles = torch.randn(2, 3, kernel[0] * 3, kernel[1] * 2, dtype=torch.float64, requires_grad=True)
    expected = convolution(tiles)
    got = project_patches(tiles, convolution.weight, convolution.bias)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    operands = [tiles, *convolution.parameters()]
    upstream = torch.randn_like(expected)
    ours = torch.autograd.grad(got, operands, upstream)
    for one, two in zip(torch.autograd.grad(expected, operands, upstream), ours, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-12)


def test_tiles_that_are_no_multiple_of_the_patch_go_through_the_convolution():
    convolution = nn.Conv2d(3, 4, 14, stride=14)
    tiles = torch.randn(1, 3, 30, 29)
    expected = convolution(tiles)
    convolution.forward = PatchProjection(convolution)
    assert torch.equal(convolution(tiles), expected)


def test_other_convolutions_are_no_patch_projections():
    for options in (
        {"stride": 1},
        {"stride": 3, "padding": 1},
        {"stride": 3, "dilation": 2},
        {"stride": 3, "groups": 3},
    ):
        assert not is_patch_projection(nn.Conv2d(3, 3, 3, **options)), options
    assert not is_patch_projection(nn.Linear(3, 3))
