"""The kernels that make losses and gradients of logits, and how one is chosen."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from helpers.model_samples import mixed_segments, packed_batch, tiny_packed

from internvl_pack.errors import UserError
from internvl_pack.model.compiled import compile_blocks
from internvl_pack.model.loss import kernels as loss_kernels
from internvl_pack.model.loss.head import loss_and_gradient
from internvl_pack.model.loss.kernels import difference_from_torch, liger_loss_and_gradient, select_loss_kernel

CPU = torch.device("cpu")


def test_without_a_gpu_it_is_pytorch_and_liger_is_refused_by_name():
    assert select_loss_kernel("auto", "cpu", torch.bfloat16) is loss_and_gradient
    assert select_loss_kernel("torch", None, torch.bfloat16) is loss_and_gradient
    with pytest.raises(UserError, match="--loss_kernel liger: it needs a CUDA device, this run is on cpu; use auto or"):
        select_loss_kernel("liger", "cpu", torch.bfloat16)
    with pytest.raises(UserError, match="--loss_kernel 'fused' is unknown: use auto, torch, liger"):
        select_loss_kernel("fused", "cpu", torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_liger_is_taken_only_if_it_gives_the_same(monkeypatch, dtype):
    def as_pytorch(logits, targets, weights, grad_dtype):
        return loss_and_gradient(logits, targets, weights, grad_dtype)

    def rounded_losses(logits, targets, weights, grad_dtype):
        losses, grad = loss_and_gradient(logits, targets, weights, grad_dtype)
        return losses.bfloat16().float(), grad

    def unweighted(logits, targets, weights, grad_dtype):
        return loss_and_gradient(logits, targets, torch.ones_like(weights), grad_dtype)

    def fails(logits, targets, weights, grad_dtype):
        raise TypeError("missing a required argument: 'softcap'\nand more")

    cases = {
        as_pytorch: None,
        rounded_losses: "gives other losses",
        unweighted: "gives other gradients",
        fails: "does not run here (TypeError: missing a required argument: 'softcap')",
    }
    for kernel, problem in cases.items():
        monkeypatch.setattr(loss_kernels, "liger_loss_and_gradient", kernel)
        found = difference_from_torch(CPU, dtype)
        assert found is None if problem is None else problem in found


def test_a_problem_is_said_or_passed_over(monkeypatch):
    for problem, chosen in ((None, liger_loss_and_gradient), ("it is too old", loss_and_gradient)):
        monkeypatch.setattr(loss_kernels, "liger_problem", lambda device, dtype, problem=problem: problem)
        assert select_loss_kernel("auto", "cuda", torch.bfloat16) is chosen
    with pytest.raises(UserError, match="--loss_kernel liger: it is too old"):
        select_loss_kernel("liger", "cuda", torch.bfloat16)


def test_the_compiler_takes_the_place_of_pytorch_and_not_of_liger(tokenizer):
    for kernel in (loss_and_gradient, liger_loss_and_gradient):
        packed = tiny_packed(tokenizer)
        packed.head.loss_kernel = kernel
        compile_blocks(packed, backend="eager")
        assert (packed.head.loss_kernel is kernel) == (kernel is liger_loss_and_gradient)


def test_gradients_that_do_not_fit_in_the_logits_place_are_pytorchs(tokenizer):
    logits, targets = torch.randn(3, 50, dtype=torch.float16), torch.tensor([0, 49, 7])
    losses, grad = liger_loss_and_gradient(logits, targets, torch.ones(3), torch.float32)
    assert losses.dtype == grad.dtype == torch.float32
    packed = tiny_packed(tokenizer).half()  # a row without a label has no logits
    packed.head.loss_kernel = liger_loss_and_gradient
    batch = packed_batch(mixed_segments(tokenizer))
    batch |= {"labels": torch.full_like(batch["labels"], -100), "num_loss_tokens": 0}
    assert packed(**batch, loss_normalizer=1.0).loss.item() == 0.0


IN_THE_INTERPRETER = """
import torch
from internvl_pack.model.loss.head import loss_and_gradient
from internvl_pack.model.loss.kernels import difference_from_torch, liger_loss_and_gradient

assert difference_from_torch(torch.device("cpu"), torch.float32) is None
torch.manual_seed(0)
for tokens, vocabulary, row in ((7, 250, 256), (1, 33, 33), (3, 40_000, 40_064)):
    logits = 5 * torch.randn(tokens, row)[:, :vocabulary]
    targets, weights = torch.randint(vocabulary, (tokens,)), torch.rand(tokens)
    got = liger_loss_and_gradient(logits.clone(), targets, weights, torch.float32)
    for one, two in zip(got, loss_and_gradient(logits.clone(), targets, weights, torch.float32)):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    liger_loss_and_gradient(logits, targets, weights, torch.float32)  # in place, with rows apart
    torch.testing.assert_close(logits, got[1])
print("as PyTorch")
"""


def test_ligers_kernel_gives_pytorchs_losses_and_gradients():
    pytest.importorskip("triton")
    pytest.importorskip("liger_kernel")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, "-c", IN_THE_INTERPRETER], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("as PyTorch\n")
