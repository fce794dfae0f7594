"""--grad_checkpoint auto: which layers keep their activations, the same on every rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers.model_samples import gradients, mixed_segments, packed_batch, tiny_packed

from internvl_pack.errors import UserError
from internvl_pack.model.parts import decoder_layers, vision_layers
from train import activation_checkpointing
from train.activation_checkpointing import CheckpointByMemory, Kind, keep_activations, layers_that_fit
from train.arguments import AUTO, ModelArguments

VISION, DECODER = Kind("vision", 24, 200, 1e9), Kind("decoder", 28, 100, 4e9)


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (-5, {"decoder": 0, "vision": 0}),
        (99, {"decoder": 0, "vision": 0}),
        (100, {"decoder": 1, "vision": 0}),
        (2799, {"decoder": 27, "vision": 0}),
        (3199, {"decoder": 28, "vision": 1}),
        (10**6, {"decoder": 28, "vision": 24}),
    ],
)
def test_the_layers_that_cost_most_to_compute_again_are_kept_first(free, expected):
    assert layers_that_fit(free, [VISION, DECODER]) == expected


def test_layers_that_keep_nothing_are_not_checkpointed():
    assert layers_that_fit(0, [Kind("decoder", 2, 0, 1.0)]) == {"decoder": 2}


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_kept_layers_are_computed_once_and_the_gradients_are_the_same(tokenizer, kept):
    plain, packed = tiny_packed(tokenizer), tiny_packed(tokenizer)
    packed.gradient_checkpointing_enable()
    layers = decoder_layers(packed.language_model)
    keep_activations(layers, kept)
    calls = []
    for layer in layers:
        layer.input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    for model in (plain, packed):
        model(**packed_batch(mixed_segments(tokenizer))).loss.backward()
    assert len(calls) == 2 * len(layers) - kept
    expected = gradients(plain)
    for name, gradient in gradients(packed).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-7)


def test_a_card_is_filled_up_and_it_is_told(tokenizer, monkeypatch, caplog):
    """A card of 1,000 bytes: a row peaks at 500, decoder layers keep 120 and vision layers 300."""
    model = tiny_packed(tokenizer)
    model.gradient_checkpointing_enable()
    layers = {"decoder": decoder_layers(model.language_model), "vision": vision_layers(model.vision_modules[0])}
    trainer = SimpleNamespace(
        packed_model=model, model_wrapped=model, ranks=SimpleNamespace(all_reduce=lambda counts, op: counts)
    )
    args = SimpleNamespace(device=torch.device("cuda"))

    def tried(self, row):
        kept = 120 * sum(not layer.gradient_checkpointing for layer in layers["decoder"])
        kept += 300 * sum(not layer.gradient_checkpointing for layer in layers["vision"])
        return kept, 500 + kept

    monkeypatch.setattr(CheckpointByMemory, "_tried", tried)
    monkeypatch.setattr(CheckpointByMemory, "_free", lambda self, peak: 1000 - peak)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000))
    with caplog.at_level("INFO", logger=activation_checkpointing.__name__):
        CheckpointByMemory(trainer, 512, 16).on_train_begin(args, None, None)
    kept = {name: sum(not layer.gradient_checkpointing for layer in these) for name, these in layers.items()}
    assert 120 * kept["decoder"] + 300 * kept["vision"] <= 500
    assert kept in ({"decoder": 2, "vision": 0}, {"decoder": 1, "vision": 1})
    assert f"{kept['decoder']} of 2 decoder layers and {kept['vision']} of 2 vision layers keep" in caplog.text


@pytest.mark.parametrize(("given", "meant"), [("True", True), ("false", False), ("Auto", AUTO), (True, True)])
def test_the_option_is_true_false_or_auto(given, meant):
    assert ModelArguments(model_name_or_path="x", grad_checkpoint=given).grad_checkpoint == meant


def test_another_value_is_refused():
    with pytest.raises(UserError, match="--grad_checkpoint some: give True, False or auto"):
        ModelArguments(model_name_or_path="x", grad_checkpoint="some")
