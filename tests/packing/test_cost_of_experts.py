"""What a token costs in a model whose layers are of experts, counted by hand."""

from __future__ import annotations

import pytest

from internvl_pack.packing.cost import CostModel, TokenMixing, feed_forward_rows

DENSE = {"num_hidden_layers": 6, "intermediate_size": 100}
QWEN3_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 30}
GPT_OSS = {"num_local_experts": 32, "num_experts_per_tok": 4}


@pytest.mark.parametrize(
    "text, rows",
    [
        (DENSE, 6 * 3 * 100),
        (DENSE | QWEN3_MOE, 6 * (3 * 2 * 30 + 8)),
        (DENSE | QWEN3_MOE | {"mlp_only_layers": [0, 5]}, 4 * (3 * 2 * 30 + 8) + 2 * 3 * 100),
        (DENSE | QWEN3_MOE | {"decoder_sparse_step": 2}, 3 * (3 * 2 * 30 + 8) + 3 * 3 * 100),
        (DENSE | GPT_OSS, 6 * (3 * 4 * 100 + 32)),
        (DENSE | QWEN3_MOE | {"shared_expert_intermediate_size": 7}, 6 * (3 * 2 * 30 + 8 + 3 * 7 + 1)),
    ],
)
def test_rows_that_a_token_meets(text, rows):
    assert feed_forward_rows(text) == rows


def test_a_token_of_gpt_oss_20b_costs_what_its_active_experts_do():
    """24 layers of 2880, 64 heads of 64 and 8 of keys, 4 of 32 experts of 2880: 3.60 GFLOP forward with its head."""
    text = {"hidden_size": 2880, "num_hidden_layers": 24, "intermediate_size": 2880, "num_attention_heads": 64}
    text |= {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "sliding_window": 128} | GPT_OSS
    text["layer_types"] = ["sliding_attention", "full_attention"] * 12
    vision = {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096, "image_size": 448}
    cost = CostModel.from_config({"text_config": text, "vision_config": vision | {"patch_size": 14}})
    windows = 12 * 4 * 64 * 64 * 128
    assert cost.token / 3 - windows == pytest.approx(7.2e9, rel=0.02), "a multiplication and an addition"
    assert cost.attention / 3 == 2 * 12 * 64 * 64, "of the layers that see everything"


def test_layers_with_a_window_are_distinguished_from_those_that_see_everything():
    heads = {"num_attention_heads": 4, "head_dim": 5}
    for more in ({}, {"sliding_window": 8}):
        found = TokenMixing.of(DENSE | heads | more)
        assert (found.full, found.token) == (6, 0)
    kinds = ["sliding_attention"] * 2 + ["full_attention"]
    found = TokenMixing.of(DENSE | heads | {"layer_types": kinds, "sliding_window": 8})
    assert (found.full, found.token) == (1, 2 * 16 * 20)
