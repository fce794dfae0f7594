"""`estimate --measure`: a row timed on a few layers stands for the whole model."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import InternVLForConditionalGeneration

from internvl_pack.cli import main
from internvl_pack.errors import UserError
from internvl_pack.model import rate
from internvl_pack.model.memory import Sizes
from internvl_pack.model.parts import decoder_layers, vision_layers
from internvl_pack.packing.cost import SIZES, CostModel
from internvl_pack.testing.tiny import LANGUAGE_MODELS, tiny_internvl_config


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_the_model_of_a_size_has_the_parameters_that_the_estimate_counts(name):
    text, vision = SIZES[name]
    settings = {"text_config": text, "vision_config": vision}
    config = rate.full_config(settings)
    config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = False
    with torch.device("meta"):
        model = InternVLForConditionalGeneration._from_config(config)
    counted = Sizes.of({"text_config": text | {"tie_word_embeddings": False}, "vision_config": vision}).parameters
    assert model.num_parameters() == pytest.approx(counted, rel=0.005)


def test_rows_are_halved_and_their_last_sample_is_cut():
    samples = [(700, 2), (500, 9), (600, 0)]
    whole, half = rate.rows_of(samples, (1500, 4), 256)
    assert whole == [(700, 2), (500, 1), (300, 0)]
    assert half == [(700, 2), (50, 0)]
    with pytest.raises(UserError, match="no samples"):
        rate.rows_of([], (1024, 4), 256)


@pytest.mark.slow
@pytest.mark.parametrize("llm", LANGUAGE_MODELS)
def test_seconds_are_those_of_all_layers(llm, tokenizer, monkeypatch):
    settings = tiny_internvl_config(tokenizer, llm, num_vision_layers=7, num_hidden_layers=12).to_dict()
    seen = []

    def seconds(packed, row, repeats=None):
        if repeats is None:
            assert torch.isfinite(packed(**rate._batch(packed, row)).loss)
            seen.append(row)
        depths = len(vision_layers(packed.vision_modules[0])), len(decoder_layers(packed.language_model))
        return 0.01 + 0.02 * depths[0] + 0.05 * depths[1]

    monkeypatch.setattr(rate, "_seconds", seconds)
    found = rate.measure_rate(settings, [(900, 3), (200, 1)] * 9, (2048, 8))
    assert found.seconds == pytest.approx(0.01 + 0.02 * 7 + 0.05 * 12)
    assert (found.tokens, found.tiles) == (2048, 8), "a full one, where there is time"
    assert found.operations_per_second == CostModel.from_config(settings).of_pack(seen[0]) / found.seconds


def test_tiles_of_more_tokens_leave_room_for_text(tokenizer):
    settings = tiny_internvl_config(tokenizer, patch_size=7).to_dict()  # 16 tokens a tile, not 4
    found = rate.measure_rate(settings, [(20, 3)] * 20, (256, 99))
    assert (found.tokens, found.tiles) == (256, 12)


@pytest.mark.slow
def test_the_command_measures(tokenizer, tmp_path, capsys):
    tiny_internvl_config(tokenizer).save_pretrained(tmp_path)
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("num_tokens,num_tiles\n" + "300,3\n" * 40)
    words = ["estimate", str(tmp_path), str(lengths), "--max_packed_tokens", "1024", "--num_images_expected", "8"]
    assert main([*words, "--measure", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    measured = found["measured"]
    assert (measured["tokens"], measured["device"], measured["compiled"]) == (1024, "CPU", False)
    operations = CostModel.from_name(str(tmp_path)).of(300, 3) * 40
    assert found["seconds"] == pytest.approx(operations / measured["operations_per_second"])
    assert main([*words, "--measure"]) == 0
    assert "measured on CPU: " in capsys.readouterr().out
