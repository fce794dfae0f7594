"""Tiles of another size and a tokenizer with new tokens: the model is made to fit as InternVL's training does it."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from helpers.original_samples import chat_config, chat_weights, write_chat_checkpoint
from transformers import AutoModelForCausalLM

from internvl_pack.checkpoints.internvl_format_files import save_internvl_format
from internvl_pack.errors import UserError
from internvl_pack.model.build import build_model
from internvl_pack.model.resize import fit_vocabulary, interpolated
from internvl_pack.testing.tiny import save_tiny_checkpoint, tiny_text_config


def build(path, tokenizer, **options):
    return build_model(path, tokenizer=tokenizer, device="cpu", dtype=torch.float32, **options)


def positions_of(packed):
    return packed.vision_modules[0].embeddings.position_embeddings.detach()


def test_a_plane_stays_a_plane_and_the_class_token_stays():
    """A position's embedding that is its own row and column: bicubic keeps straight lines, away from the border."""
    side, wide = 8, 16
    axis = torch.arange(side, dtype=torch.float32)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), dim=-1).reshape(1, side * side, 2)
    found = interpolated(torch.cat([torch.full((1, 1, 2), 7.0), grid], dim=1), wide)
    assert found.shape == (1, 1 + wide * wide, 2) and found[0, 0].tolist() == [7.0, 7.0]
    expected = (torch.arange(wide) + 0.5) / 2 - 0.5  # centres of pixels fall on centres
    rows = found[0, 1:].reshape(wide, wide, 2)
    inner = slice(4, wide - 4)
    assert torch.allclose(rows[inner, 5, 0], expected[inner], atol=0.06)  # the kernel bends straight lines a little
    assert torch.allclose(rows[5, inner, 1], expected[inner], atol=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("size", [28, 112])
def test_a_model_is_trained_on_tiles_of_another_size(size, tokenizer, tmp_path, caplog):
    checkpoint = save_tiny_checkpoint(tmp_path / "tiny", tokenizer)
    before = positions_of(build(checkpoint, tokenizer))
    with caplog.at_level(logging.INFO):
        packed = build(checkpoint, tokenizer, force_image_size=size)
    assert f"position embeddings resized from tiles of 56 to {size} pixels" in caplog.text
    side = size // 14
    assert torch.equal(positions_of(packed), interpolated(before, side))
    assert packed.tokens_per_tile == (side // 2) ** 2
    assert packed.image_features(torch.rand(2, 3, size, size)).shape[:2] == (2, packed.tokens_per_tile)
    packed.save_pretrained(tmp_path / "saved")
    again = build(tmp_path / "saved", tokenizer, force_image_size=size)
    assert torch.equal(positions_of(again), positions_of(packed))


def test_the_tiles_of_the_model_itself_change_nothing(tokenizer, tmp_path, caplog):
    checkpoint = save_tiny_checkpoint(tmp_path, tokenizer)
    with caplog.at_level(logging.INFO):
        build(checkpoint, tokenizer, force_image_size=56)
    assert "position embeddings" not in caplog.text


@pytest.mark.slow
def test_the_new_size_is_written_in_internvls_own_format(tokenizer, tmp_path):
    config = chat_config(tokenizer)
    folder = write_chat_checkpoint(tmp_path / "chat", config, chat_weights(config), tokenizer)
    packed = build(folder, tokenizer, force_image_size=112)
    save_internvl_format(tmp_path / "back", packed.config, packed.model.state_dict())
    content = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (content["force_image_size"], content["vision_config"]["image_size"]) == (112, 112)
    again = build(tmp_path / "back", tokenizer, force_image_size=112)
    assert torch.equal(positions_of(again), positions_of(packed))


def language_model(size, tied=False):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_text_config("qwen2", vocab_size=size, tie_word_embeddings=tied))


class Tokenizer:
    """Of so many tokens."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def get_vocab(self):
        return {f"token {number}": number for number in range(self.size)}


def test_spare_rows_go_and_the_heads_rows_of_new_tokens_are_the_mean_of_the_others():
    """Qwen2.5: 151,936 rows for 151,665 tokens; with InternVL's nine there are 151,674."""
    model = language_model(120)
    head, embeddings = model.lm_head.weight.detach().clone(), model.get_input_embeddings().weight.detach().clone()
    fit_vocabulary(model, Tokenizer(109), num_new=9)
    assert model.config.vocab_size == 109 == len(model.lm_head.weight) == len(model.get_input_embeddings().weight)
    assert torch.equal(model.lm_head.weight[:100], head[:100])
    assert torch.allclose(model.lm_head.weight[100:], head[:100].mean(dim=0).expand(9, -1))
    assert torch.equal(model.get_input_embeddings().weight, embeddings[:109]), "spare rows of the model"


def test_rows_that_the_model_lacks_begin_as_the_mean():
    model = language_model(100)
    embeddings = model.get_input_embeddings().weight.detach().clone()
    fit_vocabulary(model, Tokenizer(109), num_new=9)
    assert torch.allclose(model.get_input_embeddings().weight[100:], embeddings.mean(dim=0).expand(9, -1))


def test_a_tied_head_is_changed_once():
    model = language_model(120, tied=True)
    head = model.lm_head.weight.detach().clone()
    fit_vocabulary(model, Tokenizer(109), num_new=9)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert torch.allclose(model.lm_head.weight[100:], head[:100].mean(dim=0).expand(9, -1))


def test_without_new_tokens_a_model_stays_as_it_is():
    model = language_model(120)
    fit_vocabulary(model, Tokenizer(100), num_new=0)
    assert model.config.vocab_size == 120


def test_no_id_of_a_vocabulary_with_gaps_is_cut_off():
    model = language_model(120)
    tokenizer = Tokenizer(100)
    tokenizer.get_vocab = lambda: {"a": 0, "b": 111}
    fit_vocabulary(model, tokenizer, num_new=2)
    assert model.config.vocab_size == 112


def test_new_tokens_are_found_by_the_language_models_own_tokenizer(tokenizer, tmp_path, caplog):
    import copy

    from internvl_pack.testing.tiny import tiny_tokenizer

    own = tiny_tokenizer(["a b c"], vocab_size=300)
    language_model(400).save_pretrained(tmp_path / "llm")
    own.save_pretrained(tmp_path / "llm")
    other = copy.deepcopy(own)
    other.add_tokens(["<new>", "<newer>"], special_tokens=True)
    vision = save_tiny_checkpoint(tmp_path / "vision", tokenizer)
    with caplog.at_level(logging.INFO):
        packed = build(None, other, vision_path=vision, llm_path=tmp_path / "llm")
    rows = packed.get_output_embeddings().weight.detach()
    assert len(rows) == len(other)
    assert torch.allclose(rows[-2:], rows[:-2].mean(dim=0).expand(2, -1), atol=1e-6)
    assert f"400 rows, now {len(other)}, those of 2 new tokens the mean" in caplog.text


@pytest.mark.parametrize("size", [60, 13])
def test_a_size_that_is_no_whole_number_of_patches_is_refused(size, tokenizer, tmp_path):
    checkpoint = save_tiny_checkpoint(tmp_path, tokenizer)
    with pytest.raises(UserError, match=f"--force_image_size {size}: .* give a multiple of 14"):
        build(checkpoint, tokenizer, force_image_size=size)
