"""`--compile`: the same losses and gradients, and no compilation after the first steps however packs look."""

from __future__ import annotations

import pytest
import torch
from helpers import native_samples as native
from helpers.model_samples import (
    assert_same_gradients,
    gradients,
    mixed_segments,
    packed_batch,
    relative_error,
    segment,
    text_segments,
    tiny_packed,
)
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.integrations import HfDeepSpeedConfig

from internvl_pack.errors import UserError
from internvl_pack.model import compiled
from internvl_pack.model.build import check_vision_micro_tiles
from internvl_pack.model.compiled import compile_blocks, repeated_blocks
from internvl_pack.model.selfcheck import check_isolation
from internvl_pack.model.vision.drop_path import add_drop_path

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def packs(tokenizer):
    """Rows that differ in tokens, segments, longest segment, tiles and labels."""
    mixed, text = mixed_segments(tokenizer), text_segments(tokenizer)
    one_tile = segment(tokenizer, [("image", 1), ("text", 30), ("answer", 5)], seed=9)
    return [mixed, mixed[:2], [*text, *mixed], text, mixed[::-1][:4], [one_tile], [*mixed, one_tile, *mixed[:3]]]


@pytest.mark.parametrize(
    ("llm", "checkpointing", "backend"),
    [("llama", False, "eager"), ("qwen3", True, "aot_eager")],
    ids=["llama", "qwen3"],
)
def test_packs_of_all_shapes_are_compiled_once(tokenizer, llm, checkpointing, backend):
    packed, plain = tiny_packed(tokenizer, llm), tiny_packed(tokenizer, llm)
    counter = CompileCounterWithBackend(backend)
    compile_blocks(packed, backend=counter)
    if checkpointing:
        packed.gradient_checkpointing_enable()
    compiled_by_then = []
    for segments in packs(tokenizer):
        batch = packed_batch(segments)
        for model in (packed, plain):
            model.zero_grad()
            out = model(**batch)
            out.loss.backward()
            model.last = out.loss.item()
        assert packed.last == pytest.approx(plain.last, rel=1e-6)
        expected = gradients(plain)
        total = torch.stack([g.norm() for g in expected.values()]).norm()
        for name, gradient in gradients(packed).items():
            assert (gradient - expected[name]).norm() < 1e-6 * total, name
        compiled_by_then.append(counter.frame_count)
    assert compiled_by_then[0] > 0
    assert compiled_by_then[1:] == compiled_by_then[:1] * (len(compiled_by_then) - 1)


def test_pictures_of_native_resolution_are_compiled_once():
    """Features of earlier tower layers are added behind the compiled decoder layers; a row of text has none."""
    family = "qwen3_vl"
    tokenizer = native.native_tokenizer(family)
    packed, plain = (native.tiny_packed(tokenizer, family) for _ in range(2))
    counter = CompileCounterWithBackend("eager")
    compile_blocks(packed, backend=counter)
    packed.gradient_checkpointing_enable()
    segments = native.segments_of(tokenizer, family)
    compiled_by_then = []
    for some in (segments, segments[1:2], segments[:2], [segments[4]], [*segments, *segments[:3]]):
        batch = native.collated(tokenizer, family, some)
        losses = [model(**batch).loss for model in (packed, plain)]
        for model, loss in zip((packed, plain), losses, strict=True):
            model.zero_grad()
            loss.backward()
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
        assert_same_gradients(gradients(packed), gradients(plain))
        compiled_by_then.append(counter.frame_count)
    assert compiled_by_then[0] > 0 and len(set(compiled_by_then)) == 1


@pytest.mark.parametrize("drop_path_rate", [0.0, 0.1])
def test_layers_of_a_tower_share_their_compilation(tokenizer, drop_path_rate):
    """A model with more of them needs no more graphs."""
    counts = []
    for layers in (2, 5):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        packed = tiny_packed(tokenizer, num_layers=layers, num_vision_layers=layers).train()
        if drop_path_rate:
            add_drop_path(packed.vision_modules[0], drop_path_rate)
        compile_blocks(packed, backend=counter)
        packed(**packed_batch(mixed_segments(tokenizer))).loss.backward()
        counts.append(counter.frame_count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("frozen", ["vision", "language"])
def test_frozen_parts_compile_too(tokenizer, frozen):
    packed, plain = tiny_packed(tokenizer), tiny_packed(tokenizer)
    for model in (packed, plain):
        parts = model.vision_modules if frozen == "vision" else [model.language_model, model.get_output_embeddings()]
        for part in parts:
            part.requires_grad_(False)
    compile_blocks(packed, backend="aot_eager" if frozen == "vision" else "eager")
    batch = packed_batch(mixed_segments(tokenizer))
    for model in (packed, plain):
        model(**batch).loss.backward()
    got, expected = gradients(packed), gradients(plain)
    assert got.keys() == expected.keys() and len(got) > 4
    for name, gradient in expected.items():
        if gradient.norm() > 1e-6:
            assert relative_error(got[name], gradient) < 1e-5, name


def test_under_autocast_it_compiles_too(tokenizer):
    packed, plain = tiny_packed(tokenizer), tiny_packed(tokenizer)
    compile_blocks(packed, backend="aot_eager")
    batch = packed_batch(mixed_segments(tokenizer))
    with torch.autocast("cpu", torch.bfloat16):
        losses = [model(**batch).loss for model in (packed, plain)]
    losses[0].backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-2)
    assert all(p.grad.dtype == torch.float32 for p in packed.parameters())


def test_names_of_parameters_stay(tokenizer):
    packed = tiny_packed(tokenizer)
    names = list(packed.state_dict())
    compile_blocks(packed, backend="eager")
    assert len(repeated_blocks(packed)) == 2 + 1 + 2 + 1
    assert all(isinstance(block.forward, compiled.CompiledForward) for block in repeated_blocks(packed))
    assert list(packed.state_dict()) == names


def test_the_isolation_check_runs_on_a_compiled_model(tokenizer):
    packed = tiny_packed(tokenizer)
    compile_blocks(packed, backend="eager")
    check_isolation(packed)


def test_what_does_not_compile_is_refused_by_name(tokenizer, monkeypatch):
    monkeypatch.setattr(compiled, "COMPILED_FAMILIES", frozenset({"llama"}))
    with pytest.raises(UserError, match="--compile with a 'qwen2' language model"):
        compile_blocks(tiny_packed(tokenizer))


@pytest.mark.parametrize(("linear", "refused"), [({}, True), ({"memory_efficient_linear": False}, False)])
def test_zero_3_is_refused_where_deepspeed_replaces_linear_layers(tokenizer, linear, refused):
    packed = tiny_packed(tokenizer)
    packed.language_model.norm.weight.ds_id = 1  # as ZeRO-3 marks what it has partitioned
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3, **linear}})
    assert config.is_zero3()
    if refused:
        with pytest.raises(UserError, match="memory_efficient_linear to false"):
            compile_blocks(packed, backend="eager")
    else:
        compile_blocks(packed, backend="eager")


def test_vision_micro_tiles_are_refused_with_zero_3(tokenizer):
    packed = tiny_packed(tokenizer)
    packed.vision_micro_tiles = 4
    check_vision_micro_tiles(packed)
    packed.language_model.norm.weight.ds_id = 1
    with pytest.raises(UserError, match="--vision_micro_tiles 4 with ZeRO-3"):
        check_vision_micro_tiles(packed)
