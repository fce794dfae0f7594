"""What `--compile` changes beside compiling: what is kept for the backward pass, patches as a matrix product."""

from __future__ import annotations

import pytest
import torch
from helpers.model_samples import tiny_packed
from torch import nn

from internvl_pack.errors import UserError
from internvl_pack.model import compiled as compiled_module
from internvl_pack.model.compiled import BELOW_ALL, compile_blocks, with_memory_budget
from internvl_pack.model.vision.patches import PatchProjection, is_patch_projection, project_patches


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """A gated feed-forward layer, with what a decoder layer has that is cheap: a norm and an activation function."""

    def __init__(self, width=8, inner=32):
        super().__init__()
        self.norm, self.gate, self.up = nn.RMSNorm(width), nn.Linear(width, inner), nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def test_what_is_computed_again_is_not_kept_and_changes_no_gradient():
    block = Block().double()
    x = torch.randn(40, 8, dtype=torch.float64, requires_grad=True)
    operands = [x, *block.parameters()]
    expected = torch.autograd.grad(block(x).square().sum(), operands)
    kept = []
    for budget in (1.0, BELOW_ALL):
        torch._dynamo.reset()
        compiled = torch.compile(block, backend=with_memory_budget("aot_eager_decomp_partition", budget))
        sizes = {}

        def keep(tensor, sizes=sizes):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = compiled(x)
        kept.append(sum(sizes.values()))
        for one, two in zip(expected, torch.autograd.grad(out.square().sum(), operands), strict=True):
            torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-12)
    assert kept[1] <= kept[0] - 40 * 32 * 8, kept  # the product that goes into the last layer, at least


@pytest.mark.parametrize(("recompute", "kinds"), [("none", 0), ("language", 1), ("all", 4)])
def test_it_is_the_layers_of_the_option_that_keep_less(tokenizer, monkeypatch, recompute, kinds):
    made, compile_one = [], torch.compile
    monkeypatch.setattr(compiled_module, "with_memory_budget", lambda backend, budget: "less")
    monkeypatch.setattr(
        torch, "compile", lambda f, backend, **rest: (made.append(backend), compile_one(f, backend="eager", **rest))[1]
    )
    compile_blocks(tiny_packed(tokenizer), backend="eager", recompute=recompute)
    assert made.count("less") == kinds and made.count("eager") == 4 + 2 - kinds  # four kinds, the patches and the loss


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
