"""The vision tower's layers with written-out gradients: the layers they stand for, and every way to them."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from helpers.model_samples import gradients, mixed_segments, packed_batch, relative_error, tiny_packed
from torch import nn

from internvl_pack.model.attention import KERNELS
from internvl_pack.model.build import build_model
from internvl_pack.model.compiled import compile_blocks
from internvl_pack.model.parts import vision_layers
from internvl_pack.model.selfcheck import check_isolation
from internvl_pack.model.vision import fused as fused_module
from internvl_pack.model.vision.drop_path import add_drop_path
from internvl_pack.model.vision.fused import FusedTower, fuse_tower, is_fusible
from internvl_pack.model.vision.tile_attention import tile_kernel, use_tile_attention
from internvl_pack.testing.tiny import save_tiny_checkpoint


def attend(q, k, v, scale):
    q, k, v = (t.to(wide(t)).transpose(1, 2) for t in (q, k, v))
    scores = q @ k.mT * scale
    return (scores.softmax(-1) @ v).transpose(1, 2).to(q.dtype), scores.logsumexp(-1)


def attend_gradient(upstream, q, k, v, out, lse, scale, into=None):
    dtype = q.dtype
    do, q, k, v, o = (t.to(wide(t)).transpose(1, 2) for t in (upstream, q, k, v, out))
    p = (q @ k.mT * scale - lse.unsqueeze(-1)).exp()
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) * scale
    grads = tuple(g.transpose(1, 2).to(dtype) for g in (ds @ k, ds.mT @ q, p.mT @ do))
    for place, gradient in zip(into or (), grads, strict=False):
        place.copy_(gradient)
    return grads


def wide(tensor):
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


@pytest.fixture
def stand_in(monkeypatch):
    """A kernel for tiles that runs on a CPU, also in double precision."""
    torch._dynamo.reset()

    def forward(q, k, v, scale):
        out, lse = attend(q, k, v, scale)
        return out.to(q.dtype), lse

    kernel = replace(KERNELS["sdpa"], name="stand_in", tiles_forward=forward, tiles_backward=attend_gradient)
    monkeypatch.setitem(KERNELS, "stand_in", kernel)
    yield kernel
    torch._dynamo.reset()


@pytest.fixture
def everywhere(monkeypatch):
    """Lets other than half precision through, so that results can be compared beyond rounding."""
    monkeypatch.setattr(fused_module, "_fits", lambda hidden_states, encoder: not torch.is_autocast_enabled("cpu"))


def pair(tokenizer, stand_in, dtype=torch.float64, **settings):
    """A model with fused vision layers and its twin without."""
    plain = tiny_packed(tokenizer, **settings).to(dtype)
    fused = copy.deepcopy(plain)
    use_tile_attention(fused.model, stand_in)
    fuse_tower(fused)
    return fused, plain


def features_and_gradients(model, tiles, upstream=None):
    tiles = tiles.clone().requires_grad_()
    features = model.vision_modules[0](tiles).last_hidden_state
    upstream = torch.linspace(-1, 1, features.numel(), dtype=features.dtype).view_as(features)
    model.zero_grad()
    features.backward(upstream)
    return features.detach(), {"tiles": tiles.grad} | gradients(model.vision_modules[0])


def assert_same(fused, plain, tiles, tolerance=1e-12):
    got, expected = features_and_gradients(fused, tiles), features_and_gradients(plain, tiles)
    assert relative_error(got[0], expected[0]) < tolerance
    assert got[1].keys() == expected[1].keys()
    total = torch.stack([g.norm() for g in expected[1].values()]).norm()
    for name, gradient in expected[1].items():
        # The key's bias moves all scores of a query alike: its gradient is rounding, of the whole.
        scale = total if name.endswith("k_proj.bias") else gradient.norm()
        assert (got[1][name] - gradient).norm() <= tolerance * scale, name


def tiles_of(model, count=3):
    size = model.config.vision_config.image_size
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(2)).to(model.tower.dtype)


@pytest.mark.parametrize("keep_gelu", [True, False])
@pytest.mark.parametrize("attention_bias", [True, False])
def test_features_and_every_gradient_are_those_of_the_layers(
    tokenizer, stand_in, everywhere, attention_bias, keep_gelu
):
    fused, plain = pair(tokenizer, stand_in, num_vision_layers=3)
    for model in (fused, plain):
        for layer in vision_layers(model.vision_modules[0]):
            for linear in (layer.attention.q_proj, layer.attention.k_proj, layer.attention.v_proj):
                assert linear.bias is not None
                linear.bias = linear.bias if attention_bias else None
    fused.vision_modules[0].encoder.forward.keep_gelu = keep_gelu
    assert_same(fused, plain, tiles_of(plain))
    assert_same(fused, plain, tiles_of(plain, 1))


def test_the_gradient_passes_the_numerical_check(stand_in):
    torch.manual_seed(0)
    rows, width, inner = 6, 8, 12

    def random(*shape):
        return torch.randn(*shape, dtype=torch.float64).mul_(0.5).requires_grad_()

    state = (random(rows, width), random(rows, width), random(width))
    heads = fused_module.TileHeads(patches=3, heads=2, kernel="stand_in", scale=0.5)
    square = [random(width, width) for _ in range(4)]
    biases = [random(width) for _ in range(7)]
    attention = (*biases[:2], *square[:3], *biases[2:5], square[3], *biases[5:])
    names = (*state, *attention)
    assert torch.autograd.gradcheck(
        lambda *args: fused_module.AttentionHalf.apply(*args[:3], heads, 1e-6, *args[3:]), names, fast_mode=True
    )
    mlp = (random(width), random(width), random(inner, width), random(inner), random(width, inner), *biases[:2])
    for keep in (True, False):
        assert torch.autograd.gradcheck(
            lambda *args, keep=keep: fused_module.MlpHalf.apply(*args[:3], keep, 1e-6, *args[3:]),
            (*state, *mlp),
            fast_mode=True,
        )


def test_checkpointed_layers_give_the_same(tokenizer, stand_in, everywhere):
    fused, plain = pair(tokenizer, stand_in, num_vision_layers=3)
    calls = []
    counted = replace(stand_in, tiles_forward=lambda *a: (calls.append(1), stand_in.tiles_forward(*a))[1])
    KERNELS["stand_in"] = counted
    fused.gradient_checkpointing_enable()
    assert_same(fused, plain, tiles_of(plain))
    assert len(calls) == 2 * 3  # forward, and again in the backward pass
    calls.clear()
    fused.eval()
    assert_same(fused, plain, tiles_of(plain))
    assert len(calls) == 3


@pytest.mark.parametrize(
    "frozen",
    [
        ["encoder.layer.0", "embeddings"],
        ["encoder.layer.2"],
        ["weight"],
        ["bias"],
        ["lambda_1", "fc2.weight"],
        ["q_proj", "fc1", "layernorm_after"],
        ["projection_layer", "lambda_1", "v_proj"],
    ],
)
def test_frozen_parameters_get_no_gradient_and_the_others_theirs(tokenizer, stand_in, everywhere, frozen):
    fused, plain = pair(tokenizer, stand_in, num_vision_layers=3)
    for model in (fused, plain):
        for name, parameter in model.vision_modules[0].named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
    assert_same(fused, plain, tiles_of(plain))


def test_each_parameter_gets_its_gradient_where_it_alone_is_trained(tokenizer, stand_in, everywhere):
    fused, plain = pair(tokenizer, stand_in)
    expected = features_and_gradients(plain, tiles_of(plain))[1]
    vision = fused.vision_modules[0].requires_grad_(False)
    layer = {name: p for name, p in vision.named_parameters() if name.startswith("encoder.layer.0.")}
    assert len(layer) == 18
    for name, parameter in layer.items():
        parameter.requires_grad_()
        got = features_and_gradients(fused, tiles_of(plain))[1]
        assert got.keys() == {"tiles", name}
        if not name.endswith("k_proj.bias"):  # zero, but for rounding
            assert relative_error(got[name], expected[name]) < 1e-12, name
        parameter.requires_grad_(False)


def test_a_frozen_tower_keeps_no_graph(tokenizer, stand_in, everywhere):
    fused, plain = pair(tokenizer, stand_in)
    for model in (fused, plain):
        model.vision_modules[0].requires_grad_(False)
    features = fused.vision_modules[0](tiles_of(plain)).last_hidden_state
    assert not features.requires_grad
    torch.testing.assert_close(features, plain.vision_modules[0](tiles_of(plain)).last_hidden_state)


@pytest.mark.slow
def test_a_compiled_model_in_half_precision_trains_through_them(tokenizer, stand_in, monkeypatch):
    batch = packed_batch(mixed_segments(tokenizer))
    exact = tiny_packed(tokenizer)
    half, fused = (copy.deepcopy(exact).to(torch.bfloat16) for _ in range(2))
    use_tile_attention(fused.model, stand_in)
    compile_blocks(fused, backend="eager")
    for layer in vision_layers(fused.vision_modules[0]):
        monkeypatch.setattr(layer, "forward", lambda *a: pytest.fail("the layer itself was called"))
    for model in (exact, half, fused):
        model(**batch).loss.backward()
    expected = gradients(exact)
    assert gradients(fused).keys() == expected.keys()

    def error(model):
        got = gradients(model)
        names = [n for n in expected if "vision_tower" in n]
        return relative_error(*(torch.cat([g[n].float().flatten() for n in names]) for g in (got, expected)))

    assert error(fused) < 1.5 * error(half)
    check_isolation(fused)


def test_what_they_are_not_made_for_goes_through_the_layers(tokenizer, stand_in, monkeypatch):
    model = tiny_packed(tokenizer).to(torch.bfloat16)
    use_tile_attention(model.model, stand_in)
    fuse_tower(model)
    encoder = model.vision_modules[0].encoder
    used = []
    monkeypatch.setattr(FusedTower, "_layer", lambda self, layer, state, **_: (used.append(1), state)[1])
    hidden = torch.randn(2, 17, model.config.vision_config.hidden_size, dtype=torch.bfloat16)
    encoder(hidden)
    assert len(used) == 2
    with torch.autocast("cpu", torch.bfloat16):
        encoder(hidden)
    encoder.forward.off = True
    encoder(hidden)
    encoder.forward.off = False
    model.model.set_attn_implementation({"vision_config": "sdpa"})
    encoder(hidden)
    use_tile_attention(model.model, stand_in)
    model.to(torch.float32)
    encoder(hidden.float())
    assert len(used) == 2


@pytest.mark.parametrize("feature_layer", [-1, -2, 1, 3])
def test_features_of_any_layer_are_those_of_the_layers(tokenizer, stand_in, everywhere, feature_layer):
    fused, plain = pair(tokenizer, stand_in, num_vision_layers=3)
    tiles = tiles_of(plain)
    for model in (fused, plain):
        model.config.vision_feature_layer = feature_layer
    torch.testing.assert_close(fused.image_features(tiles), plain.image_features(tiles))
    got, expected = (
        model.vision_modules[0](tiles, output_hidden_states=True).hidden_states for model in (fused, plain)
    )
    torch.testing.assert_close(got, expected)
    assert ("at layer" in fuse_tower(fused)) == (feature_layer != -1)


def test_recording_once_does_not_keep_later_calls_from_them(tokenizer, stand_in, everywhere, monkeypatch):
    fused, plain = pair(tokenizer, stand_in)
    fused.vision_modules[0](tiles_of(plain), output_hidden_states=True)
    for layer in vision_layers(fused.vision_modules[0]):
        monkeypatch.setattr(layer, "forward", lambda *a: pytest.fail("the layer itself was called"))
    torch.testing.assert_close(fused.image_features(tiles_of(plain)), plain.image_features(tiles_of(plain)))


@pytest.mark.parametrize("inside", ["", "attention", "mlp.fc1", "layernorm_after"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_in_a_layer_are_called(tokenizer, stand_in, everywhere, inside, kind):
    fused, plain = pair(tokenizer, stand_in)
    module = vision_layers(fused.vision_modules[0])[1].get_submodule(inside)
    calls = []
    hook = getattr(module, f"register_{kind}_hook")(lambda *_: calls.append(kind))
    assert_same(fused, plain, tiles_of(plain))
    assert calls
    assert not is_fusible(vision_layers(fused.vision_modules[0])[1])
    hook.remove()
    calls.clear()
    assert_same(fused, plain, tiles_of(plain))
    assert not calls
    assert is_fusible(vision_layers(fused.vision_modules[0])[1])


def test_a_second_derivative_is_refused(tokenizer, stand_in, everywhere):
    fused, plain = pair(tokenizer, stand_in)
    tiles = tiles_of(plain).requires_grad_()
    features = fused.vision_modules[0](tiles).last_hidden_state
    (gradient,) = torch.autograd.grad(features.square().sum(), tiles, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()


def test_the_kernels_get_tensors_without_gaps(tokenizer, stand_in, everywhere, monkeypatch):
    fused, _ = pair(tokenizer, stand_in)
    called = set()

    def checked(name, function):
        def call(*args):
            called.add(name)
            assert all(a.is_contiguous() for a in args if isinstance(a, torch.Tensor)), name
            return function(*args)

        return call

    names = {"add_norm", "add_norm_backward", "column_sums", "fold", "fold_backward", "gelu_backward"}
    for name in names:
        monkeypatch.setattr(fused_module, name, checked(name, getattr(fused_module, name)))
    width = fused.config.vision_config.hidden_size
    hidden = torch.randn(2, 17, 2 * width, dtype=torch.float64)[..., :width]
    features = fused.vision_modules[0].encoder(hidden).last_hidden_state
    features.sum().backward()  # the gradient of a sum is one number, expanded
    assert called == names


@pytest.mark.slow
def test_only_layers_they_stand_for_are_fused(tokenizer, stand_in):
    def layer(model):
        return vision_layers(model.vision_modules[0])[1]

    def changed(change):
        model = tiny_packed(tokenizer)
        use_tile_attention(model.model, stand_in)
        change(model)
        return model

    class Adapted(nn.Linear):
        """As LoRA's layers are: a linear layer and more."""

    class Quantised(torch.Tensor):
        """As quantised weights are: a tensor that is not what lies in its memory."""

    cases = {
        "drop path": lambda m: add_drop_path(m.vision_modules[0], 0.1),
        "an adapter": lambda m: setattr(layer(m).mlp, "fc1", Adapted(32, 64)),
        "q and k norms": lambda m: setattr(layer(m).attention, "q_norm", nn.LayerNorm(32)),
        "another norm": lambda m: setattr(layer(m), "layernorm_after", nn.RMSNorm(32)),
        "another activation": lambda m: setattr(layer(m).mlp, "activation_fn", nn.GELU(approximate="tanh")),
        "dropout": lambda m: setattr(layer(m).attention, "attention_dropout", 0.1),
        "dropout of the MLP": lambda m: setattr(layer(m), "dropout", nn.Dropout(0.1)),
        "dropout of the projection": lambda m: setattr(layer(m).attention, "projection_dropout", nn.Dropout(0.1)),
        "a norm without bias": lambda m: setattr(layer(m), "layernorm_before", nn.LayerNorm(32, bias=False)),
        "a linear layer without bias": lambda m: setattr(layer(m).mlp, "fc2", nn.Linear(64, 32, bias=False)),
        "a bias of the query alone": lambda m: setattr(layer(m).attention.k_proj, "bias", None),
        "no layer scale": lambda m: setattr(layer(m), "lambda_2", None),
        "a quantised weight": lambda m: setattr(layer(m).mlp.fc1, "weight", nn.Parameter(Quantised(64, 32))),
        "a weight computed before each call": lambda m: nn.utils.spectral_norm(layer(m).mlp.fc1),
    }
    assert all(is_fusible(at) for at in vision_layers(tiny_packed(tokenizer).vision_modules[0]))
    for name, change in cases.items():
        model = changed(change)
        assert not is_fusible(layer(model)), name
        assert "its layers are not" in fuse_tower(model), name
        assert not isinstance(model.vision_modules[0].encoder.forward, FusedTower), name


def test_the_log_says_which_layers_run(tokenizer, stand_in, caplog, monkeypatch):
    monkeypatch.setattr(fused_module, "triton_kernels", lambda: fused_module)
    with caplog.at_level("INFO"):
        model = tiny_packed(tokenizer)
        compile_blocks(model, backend="eager")
        assert "layers of the vision tower: compiled, since its attention is sdpa" in caplog.text
        use_tile_attention(model.model, stand_in)
        compile_blocks(model, backend="eager")
        assert "layers of the vision tower: compiled, since its weights are not in half precision" in caplog.text
        model.to(torch.bfloat16)
        compile_blocks(model, backend="eager", fused_vision=False)
        compile_blocks(model, backend="eager")
        assert caplog.text.count("layers of the vision tower: fused") == 1


@pytest.mark.parametrize(("recompute", "keeps"), [("none", True), ("language", True), ("all", False)])
def test_gelu_is_kept_unless_all_layers_compute_it_again(tokenizer, stand_in, recompute, keeps):
    model = tiny_packed(tokenizer)
    compile_blocks(model, recompute=recompute, backend="eager")
    assert model.vision_modules[0].encoder.forward.keep_gelu == keeps


@pytest.mark.slow
@pytest.mark.parametrize("fused_vision", [True, False])
def test_the_option_reaches_the_tower(tokenizer, tmp_path, fused_vision):
    save_tiny_checkpoint(tmp_path, tokenizer)
    model = build_model(tmp_path, tokenizer=tokenizer, device="cpu", compile=True, fused_vision=fused_vision)
    assert isinstance(model.vision_modules[0].encoder.forward, FusedTower) == fused_vision


def test_names_of_attention_functions():
    assert tile_kernel("internvl_pack_tiles_fa4") == "fa4"
    for name in ("sdpa", "internvl_pack_tiles_nothing", "internvl_pack_fa4", "fa4", None):
        assert tile_kernel(name) is None


KERNELS_AGAINST_PYTORCH = """
import torch
from internvl_pack.model.vision import fused_ops as ops, fused_triton as kernels

torch.manual_seed(0)

def check(name, *args):
    copies = [[a.clone() if isinstance(a, torch.Tensor) else a for a in args] for _ in range(2)]
    got, expected = (getattr(m, name)(*c) for m, c in zip((kernels, ops), copies))
    for one, two in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, expected)), strict=True):
        assert (one is None) == (two is None), name
        if one is not None:
            torch.testing.assert_close(one, two, rtol=2e-5, atol=2e-5, msg=lambda m: f"{name}{args[0].shape}: {m}")

for rows, width in ((37, 48), (130, 64), (1, 200), (67, 130)):
    x, y, g, h = torch.randn(4, rows, width)
    w, b, c = torch.randn(3, width)
    for branch, bias in ((y, c), (y, None), (None, None)):
        check("add_norm", x, branch, bias, w, b, 0.01)
    _, _, means, scales = ops.add_norm(x, None, None, w, b, 0.01)
    for stream in (h, None):
        check("add_norm_backward", g, stream, x, means, scales, w)
    for again in (True, False):
        check("gelu_backward", g, 3 * x, again)
    check("column_sums", x)
    scale, bias, sums = torch.randn(3, rows)
    check("fold", x, bias, scale)
    check("fold_backward", g, sums, x, bias, scale)
# What is normed is the sum as it is stored, however the interpreter rounds it.
x, y = torch.randn(2, 5, 48).mul_(64).bfloat16()
total, *normed = kernels.add_norm(x, y, c[:48], w[:48], b[:48], 1e-6)
for one, two in zip(normed[1:], ops.add_norm(total, None, None, w[:48], b[:48], 1e-6)[2:], strict=True):
    torch.testing.assert_close(one, two)
print("as PyTorch")
"""


def test_triton_kernels_compute_what_is_written_out_in_pytorch():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, "-c", KERNELS_AGAINST_PYTORCH], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "as PyTorch\n"
