"""InternVLChatModel by hand: tiny checkpoints in its layout, and its forward pass in plain torch, functional.

Written from the published architecture, apart from the code under test: weights are used where and as the original
format stores them (qkv of the vision tower and wqkv of InternLM2 in one matrix, experts one by one).
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F

VISION_300M = {"norm_type": "layer_norm", "qkv_bias": True, "qk_normalization": False}
VISION_6B = {"norm_type": "rms_norm", "qkv_bias": False, "qk_normalization": True}
ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
}
CODE = "raise AssertionError('the code of a checkpoint was run')\n"


def chat_config(tokenizer, llm="qwen2", vision=None, **changes):
    """config.json of a tiny InternVLChatModel, with the keys that published ones have."""
    hidden, heads = 64, 4
    text = {
        "_name_or_path": f"someone/{llm}",
        "architectures": [ARCHITECTURES[llm]],
        "model_type": llm,
        "attention_dropout": 0.0,
        "bad_words_ids": None,  # configs of transformers 4 list such defaults
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "num_attention_heads": heads,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "pad_token_id": None,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": len(tokenizer),
    }
    if llm == "internlm2":
        text |= {"attn_implementation": "eager", "bias": False, "rope_scaling": {"factor": 2.0, "type": "dynamic"}}
        text |= {"auto_map": {"AutoConfig": "configuration_internlm2.InternLM2Config"}, "rms_norm_eps": 1e-5}
    if llm == "qwen2":
        text |= {"sliding_window": 512, "use_sliding_window": False, "max_window_layers": 21, "rope_scaling": None}
    if llm in ("qwen3", "qwen3_moe"):
        text |= {"head_dim": 24, "attention_bias": False}  # heads x head_dim is not the hidden size
    if llm == "qwen3_moe":
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True}
        text |= {"decoder_sparse_step": 1, "mlp_only_layers": [0]}
    tower = {
        "architectures": ["InternVisionModel"],
        "model_type": "intern_vit_6b",
        "attention_dropout": 0.0,
        "drop_path_rate": 0.0,
        "dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_size": 32,
        "image_size": 56,
        "initializer_factor": 0.1,
        "initializer_range": 1e-10,
        "intermediate_size": 48,
        "layer_norm_eps": 1e-6,
        "num_attention_heads": 2,
        "num_channels": 3,
        "num_hidden_layers": 3,
        "patch_size": 14,
        "torch_dtype": "bfloat16",
        "use_flash_attn": True,
    }
    return {
        "_commit_hash": None,
        "architectures": ["InternVLChatModel"],
        "auto_map": {
            "AutoConfig": "configuration_internvl_chat.InternVLChatConfig",
            "AutoModel": "modeling_internvl_chat.InternVLChatModel",
        },
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "force_image_size": 56,
        "llm_config": text | changes.pop("llm_config", {}),
        "max_dynamic_patch": 12,
        "min_dynamic_patch": 1,
        "model_type": "internvl_chat",
        "ps_version": "v2",
        "select_layer": -1,
        "template": "internvl2_5",
        "torch_dtype": "float32",
        "use_backbone_lora": 0,
        "use_llm_lora": 0,
        "use_thumbnail": True,
        "vision_config": tower | (vision or VISION_300M) | changes.pop("vision_config", {}),
        **changes,
    }


def chat_weights(config, seed=0):
    """Random weights by the original names; no value is special, so that every one of them shows in the logits."""
    text, vision = config["llm_config"], config["vision_config"]
    shapes = _vision_shapes(vision)
    merged = vision["hidden_size"] * 4
    hidden = text["hidden_size"]
    shapes |= {"mlp1.0.weight": (merged,), "mlp1.0.bias": (merged,)}
    shapes |= {"mlp1.1.weight": (hidden, merged), "mlp1.1.bias": (hidden,)}
    shapes |= {"mlp1.3.weight": (hidden, hidden), "mlp1.3.bias": (hidden,)}
    shapes |= {f"language_model.{name}": shape for name, shape in _text_shapes(text).items()}
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in shapes.items():
        scale = 0.3 if len(shape) == 1 else 1.5 / math.sqrt(math.prod(shape[1:]))
        scale = 0.3 if "embed" in name else scale
        out[name] = scale * torch.randn(shape, generator=generator) + (1.0 if is_norm(name) else 0.0)
    return out


def is_norm(name):
    return "norm" in name and name.endswith("weight")


def _vision_shapes(v):
    d, inner = v["hidden_size"], v["intermediate_size"]
    patches = (v["image_size"] // v["patch_size"]) ** 2
    out = {
        "embeddings.class_embedding": (1, 1, d),
        "embeddings.patch_embedding.weight": (d, v["num_channels"], v["patch_size"], v["patch_size"]),
        "embeddings.patch_embedding.bias": (d,),
        "embeddings.position_embedding": (1, patches + 1, d),
    }
    for i in range(v["num_hidden_layers"]):
        layer = {"attn.qkv.weight": (3 * d, d), "attn.proj.weight": (d, d), "attn.proj.bias": (d,)}
        layer |= {"ls1": (d,), "ls2": (d,), "norm1.weight": (d,), "norm2.weight": (d,)}
        layer |= {"mlp.fc1.weight": (inner, d), "mlp.fc1.bias": (inner,)}
        layer |= {"mlp.fc2.weight": (d, inner), "mlp.fc2.bias": (d,)}
        if v["norm_type"] == "layer_norm":
            layer |= {"norm1.bias": (d,), "norm2.bias": (d,)}
        if v["qkv_bias"]:
            layer["attn.qkv.bias"] = (3 * d,)
        if v["qk_normalization"]:
            layer |= {"attn.q_norm.weight": (d,), "attn.k_norm.weight": (d,)}
        out |= {f"encoder.layers.{i}.{name}": shape for name, shape in layer.items()}
    return {f"vision_model.{name}": shape for name, shape in out.items()}


def _head_dim(t):
    return t.get("head_dim") or t["hidden_size"] // t["num_attention_heads"]


def _text_shapes(t):
    h, inner, vocab = t["hidden_size"], t["intermediate_size"], t["vocab_size"]
    q, kv = t["num_attention_heads"] * _head_dim(t), t["num_key_value_heads"] * _head_dim(t)
    if t["model_type"] == "internlm2":
        out = {"model.tok_embeddings.weight": (vocab, h), "model.norm.weight": (h,), "output.weight": (vocab, h)}
        for i in range(t["num_hidden_layers"]):
            layer = {"attention.wqkv.weight": (q + 2 * kv, h), "attention.wo.weight": (h, q)}
            if t["bias"]:
                layer |= {"attention.wqkv.bias": (q + 2 * kv,), "attention.wo.bias": (h,)}
            layer |= {"feed_forward.w1.weight": (inner, h), "feed_forward.w3.weight": (inner, h)}
            layer |= {"feed_forward.w2.weight": (h, inner), "attention_norm.weight": (h,), "ffn_norm.weight": (h,)}
            out |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
        return out
    out = {"model.embed_tokens.weight": (vocab, h), "model.norm.weight": (h,)}
    if not t["tie_word_embeddings"]:
        out["lm_head.weight"] = (vocab, h)
    for i in range(t["num_hidden_layers"]):
        layer = {"self_attn.q_proj.weight": (q, h), "self_attn.o_proj.weight": (h, q)}
        layer |= {f"self_attn.{name}.weight": (kv, h) for name in ("k_proj", "v_proj")}
        layer |= {f"{name}.weight": (h,) for name in ("input_layernorm", "post_attention_layernorm")}
        if t["model_type"] == "qwen2":
            layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
        if t["model_type"].startswith("qwen3"):
            layer |= {f"self_attn.{name}.weight": (_head_dim(t),) for name in ("q_norm", "k_norm")}
        mlps = {"mlp.": inner}
        if t["model_type"] == "qwen3_moe" and i not in t["mlp_only_layers"]:
            layer["mlp.gate.weight"] = (t["num_experts"], h)
            mlps = {f"mlp.experts.{e}.": t["moe_intermediate_size"] for e in range(t["num_experts"])}
        for path, width in mlps.items():
            layer |= {f"{path}gate_proj.weight": (width, h), f"{path}up_proj.weight": (width, h)}
            layer[f"{path}down_proj.weight"] = (h, width)
        out |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return out


# --- the forward pass -----------------------------------------------------------------------------


class _Weights:
    """The weights below a path: w["a.b"] or None, and w.at("a") for those below."""

    def __init__(self, state, path=""):
        self.state, self.path = state, path

    def at(self, path):
        return _Weights(self.state, f"{self.path}{path}.")

    def __getitem__(self, name):
        return self.state.get(f"{self.path}{name}")

    def linear(self, name, x):
        return F.linear(x, self[f"{name}.weight"], self[f"{name}.bias"])


def rms_norm(x, weight, eps):
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def chat_logits(config, state, input_ids, pixels, image_token_id):
    """Logits (N, V) of one sample: ids (N,), normalised tiles (T, 3, S, S) in order."""
    text, w = config["llm_config"], _Weights(state)
    language = w.at("language_model")
    embeddings = "tok_embeddings" if text["model_type"] == "internlm2" else "embed_tokens"
    x = language[f"model.{embeddings}.weight"][input_ids]
    if len(pixels):
        x = x.clone()
        x[input_ids == image_token_id] = image_features(config, state, pixels).flatten(0, 1)
    for i in range(text["num_hidden_layers"]):
        x = _decoder_layer(text, language.at(f"model.layers.{i}"), x)
    x = rms_norm(x, language["model.norm.weight"], text["rms_norm_eps"])
    head = language["output.weight"] if text["model_type"] == "internlm2" else language["lm_head.weight"]
    return x @ (head if head is not None else language["model.embed_tokens.weight"]).T


def image_features(config, state, pixels):
    """(T, tokens a tile, hidden) of normalised tiles."""
    v, w = config["vision_config"], _Weights(state)
    tower = w.at("vision_model")
    embedding = tower.at("embeddings")
    x = F.conv2d(pixels, embedding["patch_embedding.weight"], embedding["patch_embedding.bias"], stride=v["patch_size"])
    x = x.flatten(2).transpose(1, 2)
    x = torch.cat([embedding["class_embedding"].expand(len(x), -1, -1), x], 1) + embedding["position_embedding"]
    states = [x]
    for i in range(v["num_hidden_layers"]):
        states.append(_vision_layer(v, tower.at(f"encoder.layers.{i}"), states[-1]))
    x = states[config["select_layer"]][:, 1:]
    # Pixel shuffle: the 2 x 2 neighbours of a grid of patches side by side, the row of the pair varying slowest.
    tiles, patches, width = x.shape
    side = math.isqrt(patches)
    x = x.reshape(tiles, side // 2, 2, side // 2, 2, width).permute(0, 1, 3, 2, 4, 5)
    x = x.reshape(tiles, patches // 4, 4 * width)
    x = F.layer_norm(x, (4 * width,), w["mlp1.0.weight"], w["mlp1.0.bias"])
    return w.linear("mlp1.3", F.gelu(w.linear("mlp1.1", x)))


def _vision_layer(v, w, x):
    eps, heads = v["layer_norm_eps"], v["num_attention_heads"]

    def norm(name, x):
        if v["norm_type"] == "rms_norm":
            return rms_norm(x, w[f"{name}.weight"], eps)
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)

    tiles, n, d = x.shape
    qkv = w.linear("attn.qkv", norm("norm1", x)).view(tiles, n, 3, heads, d // heads)
    q, k, value = qkv.permute(2, 0, 3, 1, 4)
    if v["qk_normalization"]:  # over all heads together
        q, k = (
            rms_norm(part.transpose(1, 2).flatten(2), w[f"attn.{name}.weight"], eps)
            .view(tiles, n, heads, d // heads)
            .transpose(1, 2)
            for name, part in (("q_norm", q), ("k_norm", k))
        )
    attended = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(d // heads), -1) @ value
    x = x + w["ls1"] * w.linear("attn.proj", attended.transpose(1, 2).reshape(tiles, n, d))
    return x + w["ls2"] * w.linear("mlp.fc2", F.gelu(w.linear("mlp.fc1", norm("norm2", x))))


def _decoder_layer(t, w, x):
    eps, is_internlm2 = t["rms_norm_eps"], t["model_type"] == "internlm2"
    first, second = ("attention_norm", "ffn_norm") if is_internlm2 else ("input_layernorm", "post_attention_layernorm")
    attention = _grouped_attention if is_internlm2 else _attention
    x = x + attention(t, w, rms_norm(x, w[f"{first}.weight"], eps))
    return x + _feed_forward(t, w, rms_norm(x, w[f"{second}.weight"], eps))


def _attention(t, w, x):
    heads, kv_heads, d = t["num_attention_heads"], t["num_key_value_heads"], _head_dim(t)
    w = w.at("self_attn")
    q = w.linear("q_proj", x).view(-1, heads, d)
    k = w.linear("k_proj", x).view(-1, kv_heads, d)
    v = w.linear("v_proj", x).view(-1, kv_heads, d)
    if t["model_type"].startswith("qwen3"):  # each head by itself
        q = rms_norm(q, w["q_norm.weight"], t["rms_norm_eps"])
        k = rms_norm(k, w["k_norm.weight"], t["rms_norm_eps"])
    out = [_one_head(t, q[:, h], k[:, h // (heads // kv_heads)], v[:, h // (heads // kv_heads)]) for h in range(heads)]
    return w.linear("o_proj", torch.cat(out, -1))


def _grouped_attention(t, w, x):
    """InternLM2: the rows of wqkv go from one key-value head to the next, each with its q heads, then k, then v."""
    kv_heads, d = t["num_key_value_heads"], _head_dim(t)
    queries = t["num_attention_heads"] // kv_heads
    qkv = w.linear("attention.wqkv", x)
    out, start = [], 0
    for _ in range(kv_heads):
        block = qkv[:, start : start + (queries + 2) * d].split(d, dim=-1)
        out += [_one_head(t, q, block[queries], block[queries + 1]) for q in block[:queries]]
        start += (queries + 2) * d
    return w.linear("attention.wo", torch.cat(out, -1))


def _one_head(t, q, k, v):
    n, d = q.shape
    scores = _rotate(q, t) @ _rotate(k, t).T / math.sqrt(d)
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(future, -math.inf), -1) @ v


def _rotate(x, t):
    """Rotary positions 0, 1, ..: element j goes with element j + d/2."""
    n, d = x.shape
    base, longest = t["rope_theta"], t["max_position_embeddings"]
    scaling = t.get("rope_scaling") or {}
    positions = torch.arange(n, dtype=torch.float32)
    if scaling.get("type") == "linear":
        positions = positions / scaling["factor"]
    if scaling.get("type") == "dynamic" and n > longest:
        base = base * (scaling["factor"] * n / longest - scaling["factor"] + 1) ** (d / (d - 2))
    angle = positions[:, None] * base ** (-torch.arange(0, d, 2, dtype=torch.float32) / d)
    cos, sin = angle.cos(), angle.sin()
    first, second = x[:, : d // 2], x[:, d // 2 :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _feed_forward(t, w, x):
    if t["model_type"] == "internlm2":
        w = w.at("feed_forward")
        return w.linear("w2", F.silu(w.linear("w1", x)) * w.linear("w3", x))
    w = w.at("mlp")
    if w["gate.weight"] is None:
        return _swiglu(w, x)
    shares = torch.softmax(w.linear("gate", x), -1)
    rows = []
    for row, share in zip(x, shares, strict=True):
        best = share.argsort(descending=True)[: t["num_experts_per_tok"]].tolist()
        total = share[best].sum() if t["norm_topk_prob"] else 1.0
        rows.append(sum(share[e] / total * _swiglu(w.at(f"experts.{e}"), row) for e in best))
    return torch.stack(rows)


def _swiglu(w, x):
    return w.linear("down_proj", F.silu(w.linear("gate_proj", x)) * w.linear("up_proj", x))


# --- folders --------------------------------------------------------------------------------------


def write_chat_checkpoint(folder, config, state, tokenizer, num_files=1, bins=False):
    """A folder as published: config, weights in one or several files, tokenizer, code that must not run."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    ending, stem = ("bin", "pytorch_model") if bins else ("safetensors", "model")
    names = sorted(state)
    files = {f"{stem}-{i + 1:05d}-of-{num_files:05d}.{ending}": names[i::num_files] for i in range(num_files)}
    if num_files == 1:
        files = {f"{stem}.{ending}": names}
    for file, part in files.items():
        weights = {name: state[name] for name in part}
        torch.save(weights, folder / file) if bins else save_file(weights, folder / file, {"format": "pt"})
    if num_files > 1:
        index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
        (folder / f"{stem}.{ending}.index.json").write_text(json.dumps(index), encoding="utf-8")
    tokenizer.save_pretrained(folder)
    for module in ("configuration_internvl_chat", "modeling_internvl_chat"):
        (folder / f"{module}.py").write_text(CODE, encoding="utf-8")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2]}', encoding="utf-8")
    return folder


def tiny_chat_checkpoint(folder, tokenizer, llm="qwen2", vision=None, seed=0, **changes):
    config = chat_config(tokenizer, llm, vision, **changes)
    return write_chat_checkpoint(folder, config, chat_weights(config, seed), tokenizer)
