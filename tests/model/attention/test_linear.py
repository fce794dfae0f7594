"""Linear attention of packed rows: what it runs over, by boundaries or by segments, and that a leak is found."""

from __future__ import annotations

import pytest
import torch
from helpers import native_samples as native
from helpers.model_samples import gradients, relative_error
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from internvl_pack.checkpoints.lora import lora_layers, merged_state_dict
from internvl_pack.errors import UserError
from internvl_pack.model.attention import linear, linear_layers, stretches
from internvl_pack.model.freeze import freeze
from internvl_pack.model.selfcheck import IsolationError, check_isolation
from internvl_pack.parallel.checks import check_linear


@pytest.fixture(scope="module")
def tokenizer():
    return native.native_tokenizer("qwen3_5")


@pytest.fixture
def packed(tokenizer):
    return native.tiny_packed(tokenizer, "qwen3_5")


def numbers(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_a_row_without_trees_is_its_segments():
    for prefix_of in (None, numbers(-1, -1, -1)):
        found = stretches(numbers(0, 3, 4, 6), prefix_of, "cpu")
        assert found.lengths == [3, 1, 2] and found.cu_seqlens.tolist() == [0, 3, 4, 6]
        assert found.numbers.tolist() == [[0, 0, 0, 1, 2, 2]] and found.numbers.dtype == torch.int32
        assert found.places is None and found.kept is None


def test_a_branch_comes_after_its_prefix_again():
    found = stretches(numbers(0, 2, 3, 5, 6), numbers(-1, 0, 0, -1), "cpu")
    assert found.lengths == [2, 3, 4, 1]
    assert found.places.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4, 5]
    assert found.kept.tolist() == [0, 1, 4, 7, 8, 9]
    assert found.places[found.kept].tolist() == list(range(6))


def rule_by_boundaries(query, key, value, g, beta, cu_seqlens, cu_seqlens_cpu, **kwargs):
    """As flash-linear-attention's."""
    assert cu_seqlens.tolist() == cu_seqlens_cpu.tolist()
    parts = zip(*(t.split(cu_seqlens.diff().tolist(), 1) for t in (query, key, value, g, beta)), strict=True)
    own = OWN_RULE
    return torch.cat([own(q, k, v, g=gs, beta=b, use_qk_l2norm_in_kernel=True)[0] for q, k, v, gs, b in parts], 1), None


def convolution_by_numbers(hidden_states, weight, bias, activation, seq_idx, **kwargs):
    """As causal-conv1d's: hidden states (1, D, N), `seq_idx` (1, N)."""
    parts = hidden_states.split(seq_idx[0].bincount().tolist(), 2)
    return torch.cat([OWN_CONVOLUTION(part, weight, bias, activation=activation) for part in parts], 2)


OWN_RULE, OWN_CONVOLUTION = qwen.torch_chunk_gated_delta_rule, qwen.causal_conv1d_fn


@pytest.fixture
def kernels(monkeypatch):
    """Stand for the two libraries on a GPU."""
    monkeypatch.setattr(linear, "takes_rows", lambda device: True)
    monkeypatch.setattr(qwen, "torch_chunk_gated_delta_rule", rule_by_boundaries)
    monkeypatch.setattr(qwen, "causal_conv1d_fn", convolution_by_numbers)


def test_kernels_get_the_boundaries_that_segments_have(packed, tokenizer, kernels, monkeypatch):
    batch = native.collated(tokenizer, "qwen3_5", native.segments_of(tokenizer, "qwen3_5"))
    losses, found = [], []
    for whole in (True, False):
        if not whole:
            monkeypatch.undo()
        packed.zero_grad(set_to_none=True)
        loss = packed(**batch).loss
        loss.backward()
        losses.append(loss.item())
        found.append(gradients(packed.model))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert max(relative_error(found[0][name], found[1][name]) for name in found[1]) < 1e-5


def test_the_models_own_forward_over_a_row_is_found_out(packed):
    for layer in linear_layers(packed.language_model):
        own = layer.forward._forward
        layer.forward = lambda hidden_states, own=own, **kwargs: own(hidden_states)
    with pytest.raises(IsolationError, match="linear attention of decoder layer 0 leaks"):
        check_isolation(packed)


def test_a_leak_through_the_convolution_alone_is_found_out(packed, kernels, monkeypatch):
    check_isolation(packed)
    monkeypatch.setattr(qwen, "causal_conv1d_fn", lambda *args, seq_idx, **kwargs: OWN_CONVOLUTION(*args, **kwargs))
    with pytest.raises(IsolationError, match="linear attention of decoder layer 0 leaks"):
        check_isolation(packed)


def test_a_log_line_says_what_to_install(packed, caplog):
    linear.log_linear_attention(packed.language_model, "cpu")
    assert len(caplog.records) == 1
    assert "one segment at a time" in caplog.text and "pip install flash-linear-attention causal-conv1d" in caplog.text


@pytest.mark.slow
def test_lora_goes_on_the_projections_and_merges_into_them(packed, tokenizer):
    freeze(packed, use_llm_lora=2, freeze_backbone=True, freeze_mlp=True)
    first = [path.rpartition(".")[2] for path in lora_layers(packed.language_model) if path.startswith("layers.0.")]
    assert {"in_proj_qkv", "in_proj_z", "out_proj", "gate_proj"} <= set(first)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in packed.named_parameters():
        if ".lora_B." in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    merged = native.tiny_packed(tokenizer, "qwen3_5")
    merged.model.load_state_dict(merged_state_dict(packed.model, packed.model.state_dict()))
    batch = native.collated(tokenizer, "qwen3_5", native.segments_of(tokenizer, "qwen3_5"))
    assert packed(**batch).loss.item() == pytest.approx(merged(**batch).loss.item(), rel=1e-6)


def test_sequence_parallelism_is_refused(packed):
    with pytest.raises(UserError, match="--sequence_parallel_size 2 with a 'qwen3_5_text' language model: the state"):
        check_linear(packed.config.get_text_config(), 2)
