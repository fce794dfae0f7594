"""Text-only language models of other families: packed, they give what their own forward gives sample by sample."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from internvl_pack.batch.in_batch import in_batch_collate_fn
from internvl_pack.errors import UserError
from internvl_pack.model.attention import register_packed_attention
from internvl_pack.model.build import check_loadable
from internvl_pack.model.families import check_family
from internvl_pack.model.packed import PackedModel

TINY = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "intermediate_size": 48, "pad_token_id": 0}
GRANITE = {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}
LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4, "head_dim": 8}
LINEAR |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}


def tiny(family: str, **settings):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **(TINY | settings))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def packed(model) -> PackedModel:
    model.set_attn_implementation(register_packed_attention("sdpa"))
    return PackedModel(model)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *(("cohere", {}), ("cohere2", {"sliding_window": 4}), ("granite", GRANITE), ("gpt2", GPT2), ("mistral", {})),
        *(("qwen3_5_text", LINEAR), ("qwen3_next", LINEAR | EXPERTS)),
    ],
)
def test_a_pack_gives_the_loss_and_gradients_of_the_model_itself(family, settings):
    model = tiny(family, **settings)
    samples = []
    for length in (9, 2, 14, 5):
        ids = torch.randint(1, 96, (length,))
        samples.append({"input_ids": ids, "labels": ids.where(torch.arange(length) > length // 3, -100)})
    losses = [
        F.cross_entropy(
            model(input_ids=s["input_ids"][None], use_cache=False).logits[0, :-1], s["labels"][1:], reduction="sum"
        )
        for s in samples
    ]
    expected = sum(losses) / sum(int((s["labels"][1:] != -100).sum()) for s in samples)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    batch = partial(in_batch_collate_fn, max_packed_tokens=40)(samples)
    loss = packed(model)(**{key: value for key, value in batch.items() if key != "progress"}).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, p in model.named_parameters():
        assert (p.grad - gradients[name]).norm() <= 1e-5 * gradients[name].norm() + 1e-7, name


def test_families_with_attention_of_their_own_are_refused_before_they_are_loaded(tmp_path):
    for option in ("model_name_or_path", "llm_path"):
        (tmp_path / "config.json").write_text('{"model_type": "bloom"}')
        with pytest.raises(UserError, match=f"--{option} .*'bloom' computes attention itself"):
            check_loadable(**{option: tmp_path})
    with pytest.raises(UserError, match="'falcon' computes attention itself"):
        check_family(SimpleNamespace(model_type="falcon"))


@pytest.mark.parametrize(
    ("family", "settings", "named"),
    [
        ("gemma3_text", {"head_dim": 8, "final_logit_softcapping": 5.0}, "final_logit_softcapping 5.0"),
        ("llama4_text", {"head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 4}, "chunked_attention"),
    ],
)
def test_what_a_pack_cannot_reproduce_is_refused_by_name(family, settings, named):
    with pytest.raises(UserError, match=named):
        packed(tiny(family, **settings))
