"""The choice of the kernel, and the way back to transformers' ordinary attention."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.model_samples import packed_batch, text_segments, tiny_packed

from internvl_pack.errors import UserError
from internvl_pack.model.attention import (
    KERNELS,
    Kernel,
    head_size_of,
    register_kernel,
    register_packed_attention,
    select_kernel,
)
from internvl_pack.model.attention.kernels import fa4, flash_attn, sdpa


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_auto_on_a_cpu_is_sdpa():
    assert select_kernel("auto", "cpu", torch.bfloat16).name == "sdpa"


@pytest.mark.parametrize("name", ["fa4", "flash_attn", "varlen"])
def test_a_cuda_kernel_asked_for_on_a_cpu_names_the_option_and_the_cure(name):
    with pytest.raises(UserError, match=f"--attn_kernel {name} needs a CUDA device.*use --attn_kernel auto or sdpa"):
        select_kernel(name, "cpu")


def test_an_unknown_kernel_lists_the_known():
    with pytest.raises(UserError, match="--attn_kernel 'flash3' is unknown: use auto, fa4, flash_attn, varlen, sdpa"):
        select_kernel("flash3", "cpu")


@pytest.fixture
def cuda_like(monkeypatch):
    """An Ampere card, as far as the choice of a kernel looks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))


def test_on_cuda_flash_attn_comes_first_then_torchs_own(cuda_like, monkeypatch):
    monkeypatch.setattr(flash_attn, "varlen_func", lambda: print)
    assert select_kernel("auto", "cuda").name == "flash_attn"
    monkeypatch.setattr(flash_attn, "varlen_func", lambda: None)
    assert select_kernel("auto", "cuda").name == "varlen"
    with pytest.raises(
        UserError, match=r"--attn_kernel flash_attn needs flash-attn 2: pip install 'internvl-pack\[flash\]'"
    ):
        select_kernel("flash_attn", "cuda")


def test_on_hopper_flash_attention_4_comes_first_where_it_is_installed(cuda_like, monkeypatch):
    monkeypatch.setattr(fa4, "varlen_func", lambda: print)
    assert select_kernel("auto", "cuda").name != "fa4"  # Ampere
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert select_kernel("auto", "cuda").name == "fa4"
    monkeypatch.setattr(fa4, "varlen_func", lambda: None)
    assert select_kernel("auto", "cuda").name != "fa4"
    with pytest.raises(UserError, match="--attn_kernel fa4 needs FlashAttention 4: pip install --pre flash-attn-4"):
        select_kernel("fa4", "cuda")


def test_float32_on_cuda_is_sdpa(cuda_like):
    assert select_kernel("auto", "cuda", torch.float32).name == "sdpa"
    with pytest.raises(UserError, match=r"--attn_kernel varlen computes in bfloat16 or float16.*set --bf16"):
        select_kernel("varlen", "cuda", torch.float32)


LATENT = {"hidden_size": 2048, "num_attention_heads": 20, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64}


@pytest.mark.parametrize(
    ("config", "head_size", "taken"),
    [
        ({"hidden_size": 896, "num_attention_heads": 14}, 64, "varlen"),
        ({"text_config": {"hidden_size": 896, "num_attention_heads": 14, "head_dim": 256}}, 256, "varlen"),
        ({"llm_config": {"hidden_size": 896, "num_attention_heads": 14, "head_dim": 288}}, 288, "sdpa"),
        ({"hidden_size": 840, "num_attention_heads": 14}, 60, "sdpa"),
        (LATENT, 256, "varlen"),
        (LATENT | {"qk_rope_head_dim": 60, "head_dim": 60}, 252, "sdpa"),
        ({"model_type": "of a class that says it"}, None, "varlen"),
        ({"hidden_size": 896, "num_attention_heads": "14"}, None, "varlen"),  # refused where it is loaded
        ({"llm_config": "qwen2"}, None, "varlen"),
    ],
)
def test_auto_passes_over_kernels_that_do_not_take_the_models_heads(cuda_like, config, head_size, taken):
    assert head_size_of(config) == head_size
    assert select_kernel("auto", "cuda", head_size=head_size).name == taken
    if taken == "sdpa":
        with pytest.raises(UserError, match=f"multiples of 8 up to 256, this model's is {head_size}: use .* sdpa"):
            select_kernel("varlen", "cuda", head_size=head_size)


def test_a_kernel_is_added_in_a_few_lines(tokenizer, monkeypatch):
    lengths = []

    def counting(q, k, v, row):
        lengths.append((q.shape, k.shape, row.max_seqlen))
        return sdpa.run(q, k, v, row)

    monkeypatch.setitem(KERNELS, "counting", None)  # taken out again after the test
    register_kernel(Kernel(name="counting", run=counting, problem=lambda device: None, half_only=False))
    packed = tiny_packed(tokenizer, kernel="counting")
    batch = packed_batch(text_segments(tokenizer))
    loss = packed(**batch).loss
    n = batch["num_tokens"]
    assert lengths == [((n, 4, 16), (n, 2, 16), batch["max_seqlen"])] * 2  # grouped heads arrive unexpanded
    assert loss.item() == tiny_packed(tokenizer)(**batch).loss.item()


# --- in a model ---


@pytest.mark.parametrize("window", [None, 4])
def test_without_boundaries_it_is_transformers_own_attention(tokenizer, window):
    settings = {} if window is None else {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    packed = tiny_packed(tokenizer, **settings).eval()
    plain = copy.deepcopy(packed.model)
    plain.set_attn_implementation({"text_config": "sdpa"})
    torch.manual_seed(0)
    ids = torch.randint(0, 200, (2, 9))
    left_padded = torch.ones_like(ids)
    left_padded[0, :3] = 0
    with torch.no_grad():
        for mask in (None, torch.ones_like(ids), left_padded):
            got, expected = (m(input_ids=ids, attention_mask=mask).logits for m in (packed.model, plain))
            real = slice(3, None) if mask is left_padded else slice(None)
            assert torch.allclose(got[:, real], expected[:, real], atol=1e-6)
        generated = [
            m.generate(input_ids=ids, attention_mask=left_padded, max_new_tokens=5, do_sample=False, pad_token_id=0)
            for m in (packed.model, plain)
        ]
    assert torch.equal(*generated)


def test_what_packed_attention_cannot_do_is_refused(tokenizer):
    from transformers import AttentionInterface

    attend = AttentionInterface()[register_packed_attention("sdpa", "cpu")]
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    bounds = {"cu_seq_lens_q": int32(0, 6), "max_length_q": 6}
    module = torch.nn.Module()
    assert attend(module, q, k, k, None, **bounds)[0].shape == (1, 6, 4, 8)
    with pytest.raises(ValueError, match="Module uses softcap"):
        attend(module, q, k, k, None, softcap=30.0, **bounds)
    with pytest.raises(ValueError, match=r"has no dropout, the config asks for 0.1"):
        attend(module, q, k, k, None, dropout=0.1, **bounds)
    with pytest.raises(ValueError, match="describe one row, the batch has 2"):
        attend(module, q.repeat(2, 1, 1, 1), k, k, None, **bounds)


def test_names_of_the_implementations_are_not_taken_for_transformers_own():
    """transformers takes every name with "flash" in it for one of its flash attentions and drops the mask."""
    assert not any("flash" in kernel.implementation for kernel in KERNELS.values())
