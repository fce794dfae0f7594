"""`internvl-pack estimate` beside what whole steps took on H200s, and what it refuses."""

from __future__ import annotations

import json

import pytest

from internvl_pack.cli import main
from internvl_pack.errors import UserError
from internvl_pack.model.memory import Sizes, memory
from internvl_pack.packing.cost import SIZES

ROW = {"tokens": 16384, "tiles": 48}
# Shape, how it ran, and the peak in GB that benchmarks/whole_step.py printed (compiled, flash-attn 2).
MEASURED = [
    ("1B", 24, {"gpus": 1, "zero": 1, "checkpointed": False}, 65.1),
    ("1B", 24, {"gpus": 2, "zero": 1, "checkpointed": False}, 61.3),
    ("8B", 8, {"gpus": 1, "zero": 1, "checkpointed": True}, 72.3),
    ("8B", 8, {"gpus": 2, "zero": 1, "checkpointed": True}, 40.0),
    ("8B", 8, {"gpus": 2, "zero": 3, "checkpointed": True}, 36.5),
]


def sizes(name: str, layers: int) -> Sizes:
    text, vision = SIZES[name]
    return Sizes.of({"text_config": text | {"num_hidden_layers": layers}, "vision_config": vision})


@pytest.mark.parametrize(("name", "layers", "how", "peak"), MEASURED)
def test_the_peak_is_within_five_per_cent_of_what_was_measured(name, layers, how, peak):
    assert memory(sizes(name, layers), **ROW, **how).peak / 1e9 == pytest.approx(peak, rel=0.05)


PARAMETERS = {("1B", 24): 802, ("8B", 8): 3283, ("3.5-20B-A4B", 24): 21_200}
PARAMETERS |= {("3.5-30B-A3B", 48): 30_800, ("3.5-241B-A28B", 94): 240_700}


@pytest.mark.parametrize(("name", "layers"), PARAMETERS)
def test_parameters_are_those_of_the_models(name, layers):
    assert sizes(name, layers).parameters / 1e6 == pytest.approx(PARAMETERS[name, layers], rel=0.01)


@pytest.mark.parametrize(("compiled", "peak"), [(True, 19.0), (False, 29.3)])
def test_layers_of_experts_keep_what_was_measured(compiled, peak):
    """Peaks in GiB that benchmarks/moe.py printed: 6 layers of 30B-A3B, when the backward pass begins."""
    found = sizes("3.5-30B-A3B", 6)
    needed = memory(found, gpus=1, zero=0, tokens=16384, tiles=0, checkpointed=False, compiled=compiled)
    weights = needed.weights - 2 * found.vision_layers
    assert (weights + needed.activations) / 2**30 == pytest.approx(peak, rel=0.05)


def test_experts_that_a_token_does_not_go_to_take_weights_but_no_activations():
    text, vision = SIZES["3.5-30B-A3B"]
    few, many = (
        Sizes.of({"text_config": text | {"num_experts": number}, "vision_config": vision}) for number in (64, 128)
    )
    assert few.kept == many.kept
    assert many.decoder_layers - few.decoder_layers == 48 * 64 * (3 * 768 + 1) * 2048


def test_more_gpus_and_higher_stages_need_less_of_each():
    eight = sizes("8B", 28)
    peaks = [
        memory(eight, gpus=gpus, zero=zero, checkpointed=True, **ROW).peak
        for gpus, zero in ((1, 0), (1, 1), (8, 1), (8, 2), (8, 3), (64, 3))
    ]
    assert peaks[1:] == sorted(peaks[1:], reverse=True)
    plain = memory(eight, gpus=8, zero=1, checkpointed=False, **ROW)
    assert plain.activations > memory(eight, gpus=8, zero=1, checkpointed=True, **ROW).activations
    assert memory(eight, gpus=8, zero=1, checkpointed=False, compiled=False, **ROW).activations > plain.activations


@pytest.fixture
def lengths(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("num_tokens,num_tiles\n" + "4096,3\n" * 100)
    return str(path)


def test_it_prints_parts_and_time(lengths, capsys):
    assert main(["estimate", "1B", lengths, "--gpus", "2", "--max_packed_tokens", "8192", "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert (one["packs"], one["tokens"], one["tiles"]) == (50, 409_600, 300)
    assert main(["estimate", "1B", lengths, "--gpus", "4", "--max_packed_tokens", "8192", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] == pytest.approx(one["seconds"] / 2)
    assert main(["estimate", "1B", lengths]) == 0
    out = capsys.readouterr().out
    assert all(part in out for part in ("weights", "gradients", "optimizer", "buckets", "activations", "step", "peak"))


def test_linear_attention_is_refused():
    text, vision = SIZES["3.5-1B"]
    linear = {f"linear_{name}": 4 for name in ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim")}
    with pytest.raises(UserError, match="layers of linear attention: what these keep was not measured"):
        Sizes.of({"text_config": text | linear, "vision_config": vision})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--zero", "4"], "--zero is 4: give 0 to 3"),
        (["--mfu", "2"], "--mfu 2.0: give a share"),
        (["--card", "Voodoo"], "--card Voodoo: its peak is not known"),
        (["--gpus", "0"], "--gpus is 0: give at least 1 GPU"),
    ],
)
def test_what_cannot_be_is_refused(lengths, words, message, capsys):
    assert main(["estimate", "1B", lengths, *words]) == 2
    assert message in capsys.readouterr().err
