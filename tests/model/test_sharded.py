"""A model in parts on two ranks: unlike rows give the gradients of one process, whatever the family."""

from __future__ import annotations

import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import native_samples
from helpers.model_samples import mixed_segments, packed_batch, segment, text_segments, tiny_packed
from helpers.ranks import run

from internvl_pack.errors import UserError
from internvl_pack.model.sharded import shard
from internvl_pack.testing.tiny import tiny_tokenizer

NATIVE = ("qwen2_5_vl", "qwen3_vl", "glm4v", "qwen3_5", "qwen3_vl_moe")
INTERNVL = {"qwen2": {}, "tied": {"tie_word_embeddings": True}, "qwen3_moe": {"llm": "qwen3_moe"}}
INTERNVL["gpt_oss"] = {"llm": "gpt_oss"}
MODELS = (*INTERNVL, *NATIVE)


def model_and_rows(name: str):
    """The model, and a row for each rank: one with pictures and many labels, one of text alone and few."""
    if name in INTERNVL:
        tokenizer = tiny_tokenizer(["a tiny tokenizer of bytes"], vocab_size=400)
        packed = tiny_packed(tokenizer, **INTERNVL[name])
        rows = [mixed_segments(tokenizer), text_segments(tokenizer)[:1]]
        return packed, [packed_batch(row) for row in rows], packed_batch([segment(tokenizer, [("text", 6)])])
    tokenizer = native_samples.native_tokenizer(name)
    packed = native_samples.tiny_packed(tokenizer, name)
    segments = native_samples.segments_of(tokenizer, name)
    text = [each for each in segments if not native_samples.pictures(each)[0]] or segments[:1]
    collated = partial(native_samples.collated, tokenizer, name)
    return packed, [collated(segments), collated(text)], collated(text)


def compare(names: list[str]) -> None:
    """Of each model, loss and gradients of both ranks' rows, in parts against whole."""
    from torch import distributed as dist

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    for name in names:
        whole, rows, unlabelled = model_and_rows(name)
        packed, *_ = model_and_rows(name)
        losses = [whole(**row, loss_normalizer=1.0).loss for row in rows]
        (sum(losses) / 2).backward()
        shard(packed, torch.device("cpu"), torch.float32)
        packed.eval()
        with torch.no_grad():
            packed(**unlabelled)
        packed.train()
        loss = packed(**rows[rank], loss_normalizer=1.0).loss
        loss.backward()
        torch.testing.assert_close(loss, losses[rank], rtol=1e-5, atol=0)
        expected = {n: p.grad for n, p in whole.named_parameters()}
        for n, p in packed.named_parameters():
            got = torch.zeros(p.shape) if p.grad is None else p.grad.full_tensor()
            if expected[n] is not None:
                far = (got - expected[n]).norm()
                assert far <= 1e-5 * expected[n].norm() + 1e-6, f"{name}, {n}: {far} of {expected[n].norm()}"
        print(name, "agrees", flush=True)
    dist.destroy_process_group()


def test_layers_of_another_name_are_refused():
    decoder = torch.nn.Module()
    decoder.h = torch.nn.ModuleList()
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(model_type="gpt2"))
    packed = SimpleNamespace(language_model=decoder, config=config)
    with pytest.raises(UserError, match="--sharding fsdp2 with a 'gpt2' language model"):
        shard(packed, torch.device("cpu"), torch.float32)


@pytest.mark.slow
def test_two_ranks_with_unlike_rows_have_the_gradients_of_one_process(tmp_path):
    made = run(f"{__file__}:compare", list(MODELS), 2, tmp_path / "log")
    assert made.told().count("agrees") == 2 * len(MODELS)
