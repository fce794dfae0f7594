"""`--fp8`: which layers it takes, how far their products are off, and that samples of a pack stay apart bit for bit.

On a CPU torchao rounds as on a GPU, and multiplies what is rounded in float32.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import native_samples as native
from helpers.model_samples import (
    gradients,
    mixed_segments,
    packed_batch,
    padded_batch,
    relative_error,
    tiny_packed,
)
from helpers.tree_samples import trees
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from internvl_pack.errors import UserError
from internvl_pack.model.attention import register_packed_attention
from internvl_pack.model.build import build_model
from internvl_pack.model.compiled import compile_blocks
from internvl_pack.model.fp8 import MULTIPLE, RECIPES, check_fp8, use_fp8, why_slower
from internvl_pack.model.packed import PackedModel
from internvl_pack.model.selfcheck import check_isolation
from internvl_pack.testing.tiny import save_tiny_checkpoint

# torchao alone takes a second to import.
pytestmark = pytest.mark.slow

float8 = pytest.importorskip("torchao.float8")
Float8Linear = pytest.importorskip("torchao.float8.float8_linear").Float8Linear

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def in_fp8(tokenizer, recipe: str = "rowwise", **settings) -> PackedModel:
    packed = tiny_packed(tokenizer, **settings)
    use_fp8(packed, recipe, "cpu")
    return packed


def in_bfloat16(packed: PackedModel) -> PackedModel:
    """A copy, in what fp8 is for."""
    model = copy.deepcopy(packed.model).to(torch.bfloat16)
    model.set_attn_implementation({"text_config": register_packed_attention("sdpa", "cpu", torch.bfloat16)})
    return PackedModel(model).train()


def float8_layers(packed: PackedModel) -> set[str]:
    return {name for name, module in packed.named_modules() if isinstance(module, Float8Linear)}


# --- which layers


def test_the_decoder_and_nothing_else_is_taken(tokenizer):
    packed = tiny_packed(tokenizer)
    before = dict(packed.named_parameters())
    use_fp8(packed, "rowwise", "cpu")
    prefix = "model.model.language_model.layers"
    assert float8_layers(packed) == {
        f"{prefix}.{i}.{'self_attn' if name.split('_')[0] in 'qkvo' else 'mlp'}.{name}"
        for i in range(2)
        for name in LAYERS
    }
    after = dict(packed.named_parameters())
    assert list(before) == list(after), "the order, too, by which an optimizer's state is saved"
    assert all(after[name] is parameter for name, parameter in before.items())


def test_sizes_that_the_hardware_does_not_multiply_are_left_alone(tokenizer):
    packed = tiny_packed(tokenizer, hidden_size=64, intermediate_size=120)
    use_fp8(packed, "rowwise", "cpu")
    assert len(float8_layers(packed)) == 8
    assert {name.rpartition(".")[2] for name in float8_layers(packed)} == set(LAYERS[:4])
    with pytest.raises(UserError, match="--fp8 rowwise: no linear layer of the decoder has both sizes a multiple"):
        use_fp8(tiny_packed(tokenizer, hidden_size=72, head_dim=18), "rowwise", "cpu")


def test_experts_are_refused(tokenizer):
    with pytest.raises(UserError, match="--fp8 rowwise with a 'qwen3_moe' language model"):
        use_fp8(tiny_packed(tokenizer, "qwen3_moe"), "rowwise", "cpu")


def test_linear_attention_is_refused():
    packed = native.tiny_packed(native.native_tokenizer("qwen3_5"), "qwen3_5")
    with pytest.raises(UserError, match="--fp8 rowwise with a 'qwen3_5_text' language model: its linear layers"):
        use_fp8(packed, "rowwise", "cpu")


@pytest.mark.parametrize(
    ("capability", "dtype", "message"),
    [
        ((8, 0), torch.bfloat16, r"needs a GPU of compute capability 8.9 or later .*, A100 has 8.0"),
        ((9, 0), torch.float16, "goes with bfloat16, this run is in torch.float16: set --bf16 True"),
        ((9, 0), torch.bfloat16, None),
    ],
)
def test_gpus_and_precisions(monkeypatch, capability, dtype, message):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    if message is None:
        check_fp8("rowwise", "cuda", dtype)
    else:
        with pytest.raises(UserError, match=f"^--fp8 rowwise {message}"):
            check_fp8("rowwise", "cuda", dtype)


def test_scales_of_whole_tensors_are_not_offered():
    with pytest.raises(UserError, match="--fp8 tensorwise is unknown: use rowwise or rowwise_with_gw_hp"):
        check_fp8("tensorwise", "cpu", torch.bfloat16)


# --- how far off


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_off_by_the_rounding_of_their_factors(recipe):
    """Against products of factors that are rounded here, by the definition of the format."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(64, 48, bias=True)
    x = torch.randn(32, 64, generator=generator)
    x[3] *= 1000  # an outlier has a scale of its own
    x.requires_grad_()
    upstream = torch.randn(32, 48, generator=generator)

    def rounded(values: torch.Tensor, dim: int | tuple[int, int]) -> torch.Tensor:
        largest = values.abs().amax(dim, keepdim=True)
        scale = torch.exp2(torch.floor(torch.log2(448 / largest)))  # 448 is the largest e4m3
        return (values * scale).to(torch.float8_e4m3fn).float() / scale

    holder = nn.ModuleList([copy.deepcopy(layer)])
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    float8.convert_to_float8_training(holder, config=config)
    output = holder[0](x)
    output.backward(upstream)

    weight = layer.weight.detach()
    factors = x.detach()
    expected = {
        "output": (output.detach(), rounded(factors, 1) @ rounded(weight, 1).T + layer.bias.detach()),
        "input": (x.grad, rounded(upstream, 1) @ rounded(weight, 0)),
        "weight": (holder[0].weight.grad, rounded(upstream, 0).T @ rounded(factors, 0)),
    }
    if recipe == "rowwise_with_gw_hp":
        expected["input"] = (x.grad, rounded(upstream, 1) @ rounded(weight, (0, 1)))
        expected["weight"] = (holder[0].weight.grad, upstream.T @ factors)
    for name, (got, reference) in expected.items():
        assert relative_error(got, reference) < 1e-6, name


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_pack_is_off_by_a_few_percent_and_each_gradient_by_a_fraction(tokenizer, checkpointing, recipe):
    batch = packed_batch(mixed_segments(tokenizer))
    plain, packed = tiny_packed(tokenizer), in_fp8(tokenizer, recipe)
    if checkpointing:
        packed.gradient_checkpointing_enable()
    for model in (plain, packed):
        model.loss = model(**batch).loss
        model.loss.backward()
    assert packed.loss != plain.loss, "the products are not made in fp8"
    assert packed.loss.item() == pytest.approx(plain.loss.item(), rel=0.02)
    expected = gradients(plain)
    assert gradients(packed).keys() == expected.keys()
    total = torch.stack([g.norm() for g in expected.values()]).norm()
    for name, gradient in gradients(packed).items():
        assert (gradient - expected[name]).norm() < 0.1 * total, name


# --- samples stay apart


def segment_logits(packed: PackedModel, segments) -> list[torch.Tensor]:
    """Logits of each sample in a pack of them."""
    with torch.no_grad():
        logits = packed(**packed_batch(segments), return_logits=True).logits[0]
    return list(logits.split([len(s.input_ids) for s in segments]))


def in_place_of_words(sample, token: int):
    """The sample with another token at every place of text."""
    image = sample.input_ids >= 256
    return replace(sample, input_ids=np.where(image, sample.input_ids, token).astype(np.int32))


@pytest.mark.parametrize("recipe", [*RECIPES, "tensorwise"])
def test_a_changed_sample_leaves_the_others_bit_for_bit(tokenizer, recipe):
    """And would not with a scale for the whole tensor, which is why that is not offered."""
    packed = in_bfloat16(tiny_packed(tokenizer)).eval()
    if recipe in RECIPES:
        use_fp8(packed, recipe, "cpu")
    else:
        config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        float8.convert_to_float8_training(packed.language_model.layers, config=config)
    with torch.no_grad():
        packed.get_input_embeddings().weight[300] = 0
        packed.get_input_embeddings().weight[300, 0] = 1e4  # no word of the others
    segments = mixed_segments(tokenizer)
    before = segment_logits(packed, segments)
    changed = len(segments) // 2
    segments[changed] = in_place_of_words(segments[changed], 300)
    after = segment_logits(packed, segments)
    moved = [not torch.equal(one, other) for one, other in zip(before, after, strict=True)]
    assert moved[changed]
    assert sum(moved) == 1 if recipe in RECIPES else sum(moved) > 1


def test_the_check_before_training_passes(tokenizer):
    check_isolation(in_fp8(tokenizer))


# --- rows of any length


@pytest.mark.parametrize("segments", [1, 2, 5])
def test_losses_of_a_pack_are_those_of_its_samples_one_by_one(tokenizer, segments):
    """Whatever the number of tokens: what fills a row up to a multiple of 16 changes no sample's loss."""
    packed = in_fp8(tokenizer).eval()
    row = mixed_segments(tokenizer)[:segments]
    assert sum(len(s.input_ids) for s in row) % MULTIPLE
    with torch.no_grad():
        together = packed(**packed_batch(row)).target_losses
        alone = torch.cat([packed(**packed_batch([s])).target_losses for s in row])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_prefix_trees_are_their_answers_one_by_one(tokenizer):
    packed = in_fp8(tokenizer).eval()
    row = trees(tokenizer)
    assert sum(len(s.input_ids) for s in row) % MULTIPLE
    with torch.no_grad():
        together, alone = (packed(**packed_batch(s)).loss for s in (row, [one for s in row for one in s.unshared()]))
    assert together.item() == pytest.approx(alone.item(), rel=1e-3)  # a factor may fall on the next number of 8 bit


def test_what_fills_a_row_adds_to_no_gradient(tokenizer):
    """Beside the same row filled up by the collator, whose pads are tokens."""
    packed = in_fp8(tokenizer)
    row = mixed_segments(tokenizer)
    length = sum(len(s.input_ids) for s in row)
    packed(**packed_batch(row)).loss.backward()
    filled = gradients(packed)
    packed.zero_grad()
    packed(**packed_batch(row, pad_to=length + -length % MULTIPLE)).loss.backward()
    for name, gradient in gradients(packed).items():
        assert relative_error(filled[name], gradient) < 0.05, name  # scales of columns may see a pad


def test_a_padded_batch_trains_like_a_pack(tokenizer):
    packed = in_fp8(tokenizer).eval()
    row = mixed_segments(tokenizer)[:3]
    with torch.no_grad():
        pack, padded = (packed(**make(row)) for make in (packed_batch, padded_batch))
    assert pack.loss.item() == pytest.approx(padded.loss.item(), rel=1e-4)


# --- with other options


def test_compiled_layers_give_the_same_and_are_compiled_once(tokenizer):
    torch._dynamo.reset()
    packed, plain = (in_fp8(tokenizer, "rowwise_with_gw_hp") for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    compile_blocks(packed, backend=counter)
    counts = []
    mixed = mixed_segments(tokenizer)
    for row in (mixed, mixed[:3], [*mixed, *mixed], mixed[::-1][:5]):
        for model in (packed, plain):
            model.zero_grad()
            model.loss = model(**packed_batch(row)).loss
            model.loss.backward()
        assert packed.loss.item() == pytest.approx(plain.loss.item(), rel=1e-4)
        expected = gradients(plain)
        total = torch.stack([g.norm() for g in expected.values()]).norm()
        for name, gradient in gradients(packed).items():
            assert (gradient - expected[name]).norm() < 0.01 * total, name
        counts.append(counter.frame_count)
    assert counts[0] > 0 and set(counts) == {counts[0]}
    torch._dynamo.reset()


def test_lora_stays_in_its_own_precision_and_is_merged_into_the_weight(tokenizer, tmp_path):
    save_tiny_checkpoint(tmp_path / "model", tokenizer)
    packed = build_model(
        tmp_path / "model", tokenizer=tokenizer, dtype=torch.float32, device="cpu", use_llm_lora=16, fp8="rowwise"
    )
    taken = float8_layers(packed)
    assert len(taken) == 14 and all(name.endswith(".base_layer") for name in taken)
    row = packed_batch(mixed_segments(tokenizer))
    packed.train()(**row).loss.backward()
    trained = gradients(packed)
    assert any(".lora_B." in name and gradient.any() for name, gradient in trained.items())
    assert not any(".base_layer." in name for name in trained)
    with torch.no_grad():
        for name, parameter in packed.named_parameters():
            if ".lora_B." in name:
                parameter.add_(0.05)
    packed.eval().save_pretrained(tmp_path / "merged")
    merged = build_model(tmp_path / "merged", tokenizer=tokenizer, dtype=torch.float32, device="cpu").eval()
    with torch.no_grad():
        assert packed(**row).loss.item() == pytest.approx(merged(**row).loss.item(), rel=0.02)


def test_the_log_says_where_it_does_not_pay(tokenizer):
    packed = in_fp8(tokenizer)
    assert "on a CPU products are emulated" in why_slower(packed, "cpu")
    assert "does not pay for a language model of width 64" in why_slower(packed, "cuda")
    packed.config.get_text_config().hidden_size = 4096
    assert "without --compile" in why_slower(packed, "cuda")
    packed.is_compiled = True
    assert why_slower(packed, "cuda") is None
