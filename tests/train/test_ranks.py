"""Gradients as DDP wants them, and ranks that end together."""

from __future__ import annotations

import pytest
import torch

from internvl_pack.errors import UserError
from train.ranks import Ranks, lay_out_gradients


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


OF_OTHERS = (True, 0, "OtherRankFailed", "rank 1 cannot read")


@pytest.mark.parametrize(
    ("found", "kind", "message"),
    [
        ([OF_OTHERS, (False, 1, "UserError", "a bad row")], UserError, "^a bad row$"),
        ([None, (False, 1, "OSError", "disk")], RuntimeError, "rank 1 cannot read its data: OSError: disk"),
        ([OF_OTHERS, None], RuntimeError, "rank 0 cannot read its data"),
    ],
)
def test_all_ranks_end_with_the_reason_of_the_one_that_has_it(found, kind, message, monkeypatch):
    monkeypatch.setattr(Ranks, "gather", lambda self, value: found)
    with pytest.raises(kind, match=message):
        Ranks(rank=0, world_size=2).fail_together(None)


def fails() -> int:
    raise UserError("no data")


def test_what_the_first_rank_makes_is_handed_on_and_so_is_its_error():
    Ranks().fail_together(None)
    assert Ranks().from_first(lambda: 3) == 3
    with pytest.raises(UserError, match="no data"):
        Ranks().from_first(fails)
