"""Kernels against a dense mask, boundaries against the table of bad ones, and the way back to ordinary attention."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from model_samples import mixed_segments, packed_batch, relative_error, text_segments, tiny_packed

from internvl_pack.errors import UserError
from internvl_pack.model import kernels
from internvl_pack.model.attention import register_packed_attention, validate_cu_seqlens
from internvl_pack.model.images import IMAGE_MEAN, IMAGE_STD, normalize_tiles
from internvl_pack.model.kernels import KERNELS, Kernel, register_kernel, select_kernel


def dense_reference(q, k, v, cu_seqlens, window):
    """Softmax over an explicit (N, N) mask, heads expanded; float64."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    n = len(q)
    segment = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff())
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    seen = (segment[:, None] == segment[None]) & (j <= i)
    if window is not None:
        seen &= j > i - window
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [5, 1, 7], [16], [2, 9, 3, 1]])
def test_the_sdpa_kernel_is_attention_under_a_block_mask(lengths, heads, window):
    torch.manual_seed(0)
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    n, dim = sum(lengths), 8
    q, k, v = (torch.randn(n, h, dim, requires_grad=True) for h in (heads[0], heads[1], heads[1]))
    upstream = torch.randn(n, heads[0], dim)
    results = []
    for out in (
        KERNELS["sdpa"].run(q, k, v, cu_seqlens, max(lengths), None, window),
        dense_reference(q, k, v, cu_seqlens, window),
    ):
        results.append([out, *torch.autograd.grad((out * upstream).sum(), (q, k, v))])
    for got, expected in zip(*results, strict=True):
        assert (got - expected).abs().max() < 1e-5


def test_the_scale_is_the_callers():
    q, k, v = (torch.randn(3, 2, 8) for _ in range(3))
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    run = KERNELS["sdpa"].run
    assert torch.allclose(
        run(q, k, v, bounds, 3, 0.7, None), run(q * 0.7 * 8**0.5, k, v, bounds, 3, None, None), atol=1e-6
    )


# --- boundaries -----------------------------------------------------------------------------------


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("cu_seqlens", "num_tokens", "max_seqlen"),
    [
        (int32(0, 5, 6, 13), 13, 7),
        (int32(0, 5, 6, 13, 16), 16, 7),  # a pad segment of its own
        (int32(0, 1, 2, 3), 3, 1),
        (int32(0, 7), 7, 7),
        (np.array([0, 3, 5], dtype=np.int32), 5, None),
    ],
)
def test_good_boundaries_pass(cu_seqlens, num_tokens, max_seqlen):
    validate_cu_seqlens(cu_seqlens, num_tokens, max_seqlen)


@pytest.mark.parametrize(
    ("cu_seqlens", "num_tokens", "max_seqlen", "message"),
    [
        (int32(0, 5, 6, 13), 16, 7, "ends at 13, the row has 16 tokens: give the rest a pad segment"),
        (int32(0), 0, None, "has no segment"),
        (int32(0, 4, 4, 7), 7, 4, r"segment 1 from 4 to 4 is empty \(repeated boundary\)"),
        (int32(0, 5, 3, 7), 7, 5, "segment 1 from 5 to 3 runs backwards"),
        (int32(1, 5), 5, 4, "must start at 0, starts at 1"),
        (torch.tensor([0, 7]), 7, 7, "must be int32, is int64"),
        (torch.tensor([0.0, 7.0]), 7, 7, "must be int32, is float32"),
        (int32(0, 7), 7, torch.tensor(7), "max_seqlen must be a Python int, is Tensor"),
        (int32(0, 7), 7, np.int64(7), "max_seqlen must be a Python int, is int64"),
        (int32(0, 5, 7), 7, 7, "max_seqlen is 7, the longest segment has 5 tokens"),
        (np.array([0, 2**30, 2**31, 3 * 2**30]), 3 * 2**30, 2**30, r"ends at 3221225472, above 2\*\*31 - 1"),
        (np.array([0, 2**30, 2**31, 3 * 2**30]).astype(np.int32), 3 * 2**30, 2**30, "has wrapped around int32"),
        (int32(0, 7)[None], 7, 7, "must be an int32 vector"),
        ([0, 7], 7, 7, "must be an int32 vector"),
    ],
)
def test_bad_boundaries_say_what_is_wrong(cu_seqlens, num_tokens, max_seqlen, message):
    with pytest.raises(ValueError, match=message):
        validate_cu_seqlens(cu_seqlens, num_tokens, max_seqlen)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position_ids": torch.arange(5)[None]}, "position_ids is .1, 5., input_ids is"),
        ({"loss_weight": torch.ones(1, 3)}, "loss_weight is .1, 3., input_ids is"),
        ({"max_seqlen": None}, "a pack needs max_seqlen"),
        ({"position_ids": None}, "a pack needs max_seqlen .* and position_ids"),
        ({"attention_mask": "ones"}, "leave the mask out"),
        ({"position_ids": "row"}, "position_ids must restart at 0: segment 1 starts at"),
        ({"pixel_values": torch.zeros(1, 3, 56, 56, dtype=torch.uint8)}, "0 image tokens .* for 1 tiles of 4 tokens"),
        ({"num_loss_tokens": 1}, "was counted to hold 1"),
    ],
)
def test_a_row_whose_parts_do_not_fit_is_refused(tokenizer, change, message):
    batch = packed_batch(text_segments(tokenizer))
    n = batch["num_tokens"]
    named = {"ones": torch.ones(1, n), "row": torch.arange(n)[None]}
    change = {key: named[value] if isinstance(value, str) else value for key, value in change.items()}
    with pytest.raises(ValueError, match=message):
        tiny_packed(tokenizer)(**(batch | change))


def test_missing_tiles_and_tiles_of_another_size_are_refused(tokenizer):
    packed = tiny_packed(tokenizer)
    batch = packed_batch(mixed_segments(tokenizer))
    with pytest.raises(ValueError, match=r"28 image tokens .* for 6 tiles of 4 tokens"):
        packed(**(batch | {"pixel_values": batch["pixel_values"][1:]}))
    with pytest.raises(ValueError, match=r"tiles of \(28, 28\), the model's are \(56, 56\)"):
        packed(**(batch | {"pixel_values": batch["pixel_values"][..., ::2, ::2]}))


# --- choice of the kernel -------------------------------------------------------------------------


def test_auto_on_a_cpu_is_sdpa():
    assert select_kernel("auto", "cpu", torch.bfloat16).name == "sdpa"


@pytest.mark.parametrize("name", ["flash_attn", "varlen", "fa3", "fa4", "varlen_fa3", "varlen_fa4"])
def test_a_cuda_kernel_asked_for_on_a_cpu_names_the_option_and_the_cure(name):
    with pytest.raises(UserError, match=f"--attn_kernel {name} needs a CUDA device.*use --attn_kernel auto or sdpa"):
        select_kernel(name, "cpu")


def test_an_unknown_kernel_lists_the_known():
    with pytest.raises(UserError, match="--attn_kernel 'flash3' is unknown: use auto, flash_attn, varlen, sdpa"):
        select_kernel("flash3", "cpu")


@pytest.fixture
def cuda_like(monkeypatch):
    """An Ampere card, as far as the choice of a kernel looks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))


def test_on_cuda_flash_attn_comes_first_then_torchs_own(cuda_like, monkeypatch):
    monkeypatch.setattr(kernels, "_flash_attn_varlen_func", lambda: print)
    assert select_kernel("auto", "cuda").name == "flash_attn"
    monkeypatch.setattr(kernels, "_flash_attn_varlen_func", lambda: None)
    assert select_kernel("auto", "cuda").name == "varlen"
    with pytest.raises(
        UserError, match=r"--attn_kernel flash_attn needs flash-attn 2: pip install 'internvl-pack\[flash\]'"
    ):
        select_kernel("flash_attn", "cuda")


def test_on_hopper_flash_attention_4_comes_first_where_it_is_installed(cuda_like, monkeypatch):
    monkeypatch.setattr(kernels, "_fa4_varlen_func", lambda: print)
    assert select_kernel("auto", "cuda").name != "fa4"  # Ampere
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert select_kernel("auto", "cuda").name == "fa4"
    monkeypatch.setattr(kernels, "_fa4_varlen_func", lambda: None)
    assert select_kernel("auto", "cuda").name != "fa4"
    with pytest.raises(UserError, match="--attn_kernel fa4 needs FlashAttention 4: pip install --pre flash-attn-4"):
        select_kernel("fa4", "cuda")


@pytest.mark.parametrize("window", [None, 3, 100])
def test_flash_attention_4_is_called_as_causal_with_or_without_a_window(monkeypatch, window):
    calls = []

    def like_4(q, k, v, **given):
        calls.append(given)
        return q, None

    monkeypatch.setattr(kernels, "_fa4_varlen_func", lambda: like_4)
    q = torch.zeros(4, 2, 8)
    assert kernels.fa4(q, q, q, int32(0, 4), 4, 0.5, window) is q
    assert calls[0]["causal"] and calls[0]["softmax_scale"] == 0.5
    assert calls[0]["window_size"] == ((2, 0) if window == 3 else (None, None))


@pytest.mark.parametrize("window", [None, 3])
def test_flex_attention_sees_the_same_segments(window):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(12, heads, 16, generator=generator) for heads in (4, 2, 2))
    row = (int32(0, 5, 6, 12), 6, None, window)
    assert torch.allclose(kernels.flex(q, k, v, *row), kernels.sdpa(q, k, v, *row), atol=1e-5)
    with pytest.raises(UserError, match="--attn_kernel flex has a backward pass on CUDA only"):
        select_kernel("flex", "cpu")


@pytest.mark.parametrize("window", [None, 3])
def test_the_written_out_gradient_of_the_reference_is_autograds(window):
    generator = torch.Generator().manual_seed(0)
    q, k, v, upstream = (torch.randn(12, heads, 16, generator=generator) for heads in (4, 2, 2, 4))
    row = (int32(0, 5, 6, 12), 6, 0.3, window)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = torch.autograd.grad(kernels.sdpa(*leaves, *row), leaves, upstream)
    out, lse = kernels.sdpa_forward(q, k, v, *row)
    for got, right in zip(kernels.sdpa_backward(upstream, q, k, v, out, lse, *row), expected, strict=True):
        assert torch.allclose(got, right, atol=1e-5)


def test_float32_on_cuda_is_sdpa(cuda_like):
    assert select_kernel("auto", "cuda", torch.float32).name == "sdpa"
    with pytest.raises(UserError, match=r"--attn_kernel varlen computes in bfloat16 or float16.*set --bf16"):
        select_kernel("varlen", "cuda", torch.float32)


def test_torchs_kernel_is_called_as_causal_with_or_without_a_window(monkeypatch):
    calls = []

    def like_2_11(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        calls.append(window_size)
        return q

    def like_2_13(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        calls.append((window_size, enable_gqa))
        return q

    q, k = torch.zeros(4, 2, 8), torch.zeros(4, 1, 8)
    for function, announce in ((like_2_11, False), (like_2_13, True)):
        monkeypatch.setattr(kernels, "_varlen_attn", lambda f=function, a=announce: (f, a))
        for window in (None, 2, 4):
            kernels.varlen(q, k, k, int32(0, 4), 4, None, window)
    assert calls == [(-1, 0), (1, 0), (-1, 0), ((-1, 0), True), ((1, 0), True), ((-1, 0), True)]


def test_a_kernel_is_added_in_a_few_lines(tokenizer, monkeypatch):
    lengths = []

    def counting(q, k, v, cu_seqlens, max_seqlen, scale, window):
        lengths.append((q.shape, k.shape, max_seqlen))
        return kernels.sdpa(q, k, v, cu_seqlens, max_seqlen, scale, window)

    monkeypatch.setitem(KERNELS, "counting", None)  # taken out again after the test
    register_kernel(Kernel(name="counting", run=counting, problem=lambda device: None, half_only=False))
    packed = tiny_packed(tokenizer, kernel="counting")
    batch = packed_batch(text_segments(tokenizer))
    loss = packed(**batch).loss
    n = batch["num_tokens"]
    assert lengths == [((n, 4, 16), (n, 2, 16), batch["max_seqlen"])] * 2  # grouped heads arrive unexpanded
    assert loss.item() == tiny_packed(tokenizer)(**batch).loss.item()


# --- without boundaries ---------------------------------------------------------------------------


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


# --- tiles ----------------------------------------------------------------------------------------


def test_tiles_are_normalised_as_internvl_does():
    tiles = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    expected = (tiles.double() / 255 - torch.tensor(IMAGE_MEAN).view(3, 1, 1)) / torch.tensor(IMAGE_STD).view(3, 1, 1)
    assert relative_error(normalize_tiles(tiles, torch.float32).double(), expected) < 1e-6
    together = normalize_tiles(tiles.to(memory_format=torch.channels_last), torch.float32)  # as loaders lay them
    assert together.is_contiguous() and torch.equal(together, normalize_tiles(tiles, torch.float32))
    assert normalize_tiles(tiles, torch.bfloat16).dtype == torch.bfloat16
    done = torch.randn(1, 3, 4, 4)
    assert torch.equal(normalize_tiles(done, torch.float32), done)
    with pytest.raises(ValueError, match="must be uint8 tiles"):
        normalize_tiles(tiles.int(), torch.float32)
    with pytest.raises(ValueError, match=r"must be \(tiles, 3, S, S\)"):
        normalize_tiles(tiles[0], torch.float32)


def test_varlen_runs_over_another_implementation_where_there_is_one(monkeypatch):
    import torch.nn.attention as attention

    device = torch.device("cuda")
    kernel = KERNELS["varlen_fa4"]
    monkeypatch.setattr(kernels, "_needs_ampere", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(kernels, "_varlen_attn", lambda: (print, True))
    monkeypatch.setattr(kernels, "_fa4_varlen_func", lambda: None)
    assert "pip install --pre flash-attn-4" in kernel.problem(device)
    monkeypatch.setattr(kernels, "_fa4_varlen_func", lambda: print)
    monkeypatch.setattr(attention, "list_flash_attention_impls", lambda: ["FA3"], raising=False)
    assert "needs a PyTorch that knows FA4" in kernel.problem(device)
    monkeypatch.setattr(attention, "list_flash_attention_impls", lambda: ["FA3", "FA4"], raising=False)

    calls = []
    monkeypatch.setattr(attention, "activate_flash_attention_impl", calls.append, raising=False)
    monkeypatch.setattr(attention, "restore_flash_attention_impl", lambda: calls.append("restored"), raising=False)
    monkeypatch.setattr(kernels, "_varlen_attn", lambda: (lambda q, *row, **options: q * 2, False))

    def trial():
        kernels._trial_of_varlen_over.cache_clear()
        return kernels._trial_of_varlen_over("FA4", torch.device("cpu"))

    assert trial() is None and calls == ["FA4", "restored"]

    def mismatched(*row, **options):
        raise ValueError("too many values to unpack")

    monkeypatch.setattr(kernels, "_varlen_attn", lambda: (mismatched, False))
    assert trial().endswith("FA4 (ValueError: too many values to unpack): use --attn_kernel fa4")
    assert calls == ["FA4", "restored"] * 2
    kernels._trial_of_varlen_over.cache_clear()

    calls.clear()
    monkeypatch.setattr(kernels, "_varlen_attn", lambda: (lambda *row, **options: row[:3], False))
    row = (1, 2, 3, int32(0, 4), 4, None, None)
    assert kernel.run(*row) == kernel.run(*row) == (1, 2, 3)
    KERNELS["varlen_fa3"].run(*row)
    for _ in range(2):
        KERNELS["varlen"].run(*row)
    assert calls == ["FA4", "FA3", "restored"]
