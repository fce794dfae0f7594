"""Gradients as DDP wants them."""

from __future__ import annotations

import torch

from train.ranks import lay_out_gradients


def test_the_gradient_of_a_single_tiles_class_token_has_the_parameters_strides():
    seen = {}
    for laid_out in (False, True):
        model = torch.nn.Module()
        model.cls_token = torch.nn.Parameter(torch.randn(1, 1, 8))
        if laid_out:
            lay_out_gradients(model)
        patches = torch.randn(1, 16, 8, requires_grad=True)
        (torch.cat([model.cls_token.expand(1, -1, -1), patches], dim=1) * torch.arange(17.0)[:, None]).sum().backward()
        seen[laid_out] = model.cls_token.grad
        assert (model.cls_token.grad.stride() == model.cls_token.stride()) == laid_out
    assert torch.equal(seen[False], seen[True])


def test_gradients_of_a_single_tile_add_up_over_rows():
    """The class token and the position embeddings of its place have the same gradient, but not the same memory."""
    model = torch.nn.Module()
    model.cls_token = torch.nn.Parameter(torch.randn(1, 1, 8))
    model.positions = torch.nn.Parameter(torch.randn(1, 17, 8))
    lay_out_gradients(model)
    patches, weights = torch.randn(1, 16, 8, requires_grad=True), torch.randn(1, 17, 8)
    for _ in range(3):
        ((torch.cat([model.cls_token, patches], dim=1) + model.positions) * weights).sum().backward()
    assert torch.allclose(model.positions.grad, 3 * weights)
    assert torch.allclose(model.cls_token.grad, 3 * weights[:, :1])
