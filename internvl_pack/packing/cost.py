"""What a pack costs to train, in floating-point operations: the one place where this is written down.

    cost of a pack = token * tokens + attention * sum(length ** 2) + tile * tiles + picture * sum(tiles of one ** 2)

The last is of towers of native resolution, in which all patches of a picture see each other.

Of a prefix tree, whose branches of a_i tokens see the prefix of p and themselves, length ** 2 is
p ** 2 + sum(a_i * (2 * p + a_i)): the square of all its tokens less those pairs that are of different branches.

Only ratios between packs matter to the packer (ranks wait for the dearest pack of a step), so the model
counts matrix products and leaves out what is small or the same for every pack: norms, activations,
optimizer. Forward and backward together are three times the forward pass.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError

_FORWARD_AND_BACKWARD = 3
_FLOPS = 2  # a multiplication and an addition


@dataclass(frozen=True, slots=True)
class CostModel:
    """Operations of forward and backward (integers, so that sums do not depend on their order).

    Args:
        token: per token of the row: the language model's matrices and its head.
        attention: per squared token of a segment: causal attention, half of the full square.
        tile: per tile: the vision tower with the attention within a tile or a window, and the projector.
        picture: per squared tile of a picture: attention over all of it.
    """

    token: int
    attention: int
    tile: int
    picture: int = 0

    def of(self, num_tokens: Any, num_tiles: Any, num_unseen_pairs: Any = 0, num_tile_pairs: Any = 0) -> Any:
        """The cost of one segment, or of one tree with its `num_unseen_pairs`; arrays give an array."""
        square = num_tokens * num_tokens - num_unseen_pairs
        tower = self.tile * num_tiles + self.picture * num_tile_pairs
        return num_tokens * self.token + self.attention * square + tower

    def of_pack(self, segments: Iterable[tuple[int, ...]]) -> int:
        """The cost of a pack given as the arguments of `of` for each of its segments."""
        return sum(self.of(*segment) for segment in segments)

    def numbers(self) -> list[int]:
        """What it is compared by."""
        return [self.token, self.attention, self.tile, *([self.picture] if self.picture else ())]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> CostModel:
        """From a model's `config.json`, in transformers' own layout or InternVL's (`llm_config`).

        Raises:
            UserError: a number that is needed is missing.
        """
        text = config.get("text_config") or config.get("llm_config")
        vision = config.get("vision_config")
        if not isinstance(text, Mapping) or not isinstance(vision, Mapping):
            raise UserError(
                "the config has no text_config (or llm_config) and vision_config: give a vision-language model's"
            )
        mixing = TokenMixing.of(text)
        rows = mixing.rows + feed_forward_rows(text) + _number(text, "vocab_size")

        tower = VisionSide.of(config)
        times = _FORWARD_AND_BACKWARD * _FLOPS
        per_patch = 2 * tower.width * tower.rows  # scores and values, with each patch that it sees
        return cls(
            token=times * (rows * _number(text, "hidden_size") + mixing.token),
            attention=times * mixing.full * mixing.queries,  # scores and values, halved by the causal mask
            tile=times * (tower.rows * tower.layers + per_patch * tower.seen + tower.tokens * tower.projector),
            picture=times * per_patch * tower.rows * tower.whole,
        )

    @classmethod
    def from_name(cls, name: str) -> CostModel:
        """Of a `model_config`.

        Raises:
            UserError: there is none of this name, or a number that is needed is missing.
        """
        return cls.from_config(model_config(name))


def model_config(name: str) -> Mapping[str, Any]:
    """The config of one of SIZES, or of a `config.json` or the folder that holds one.

    Raises:
        UserError: it is neither.
    """
    if name.upper() in SIZES:
        text, vision = SIZES[name.upper()]
        return {"text_config": text, "vision_config": vision}
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise UserError(f"model size {name!r} is neither one of {', '.join(SIZES)} nor a config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise UserError(f"{path} holds no JSON object: give a model's config.json")
    return config


def layer_kinds(text: Mapping[str, Any]) -> list[str]:
    """Of each layer of a language model, as transformers names them."""
    layers = _number(text, "num_hidden_layers")
    if kinds := text.get("layer_types"):
        return list(kinds[:layers])
    every = 1 if "linear_num_value_heads" not in text else text.get("full_attention_interval") or 4
    return ["linear_attention" if (index + 1) % every else "full_attention" for index in range(layers)]


@dataclass(frozen=True, slots=True)
class TokenMixing:
    """What mixes a language model's tokens, over all layers: attention, and linear attention.

    Attributes:
        rows: of its matrices, each as long as the model's width.
        queries, keys: width of a layer's queries, and of its keys or values.
        full: layers whose queries see all of their segment before them.
        token: multiplications of a token that are by no weight: with the keys and values of windows, which count in
            full (segments are taken to be longer), and three with the state of each linear layer: to read it, to
            correct it and to query it. The short convolution is left out.
    """

    rows: int
    queries: int
    keys: int
    full: int
    token: int

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> TokenMixing:
        """Of a language model's config; linear layers are as Qwen3-Next's, beside which attention has a gate.

        Raises:
            UserError: a number that is needed is missing.
        """
        kinds = layer_kinds(text)
        linear, sliding = (sum(kind == f"{name}_attention" for kind in kinds) for name in ("linear", "sliding"))
        heads = _number(text, "num_attention_heads")
        head = int(text.get("head_dim") or _number(text, "hidden_size") // heads)
        queries, keys = heads * head, int(text.get("num_key_value_heads") or heads) * head
        rows = (len(kinds) - linear) * ((3 if linear else 2) * queries + 2 * keys)
        token = 2 * sliding * int(text.get("sliding_window") or 0) * queries
        if linear:
            key_heads, key = (_number(text, f"linear_{n}") for n in ("num_key_heads", "key_head_dim"))
            value_heads, value = (_number(text, f"linear_{n}") for n in ("num_value_heads", "value_head_dim"))
            rows += linear * (2 * key_heads * key + 3 * value_heads * value + 2 * value_heads)
            token += linear * 3 * value_heads * key * value
        return cls(rows, queries, keys, len(kinds) - sliding - linear, token)


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The feed-forward parts of all layers: dense ones, or experts and a router.

    Attributes:
        dense, sparse: how many layers are without experts, and with.
        width: of the matrices of a dense layer.
        experts, active: how many a layer of experts has, and how many of them a token goes to.
        inner: width of an expert's matrices.
        shared: width of the matrices of an expert that every token goes to, beside the others; 0 for none.
    """

    dense: int
    sparse: int
    width: int
    experts: int
    active: int
    inner: int
    shared: int = 0

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> FeedForward:
        """Of a language model's config.

        Layers are of experts as Qwen3-MoE's config says (`decoder_sparse_step`, `mlp_only_layers`), or all of them, as
        GPT-OSS's (whose experts have `intermediate_size`).

        Raises:
            UserError: a number that is needed is missing.
        """
        layers = _number(text, "num_hidden_layers")
        experts = text.get("num_experts") or text.get("num_local_experts") or 0
        if not experts:
            return cls(layers, 0, _number(text, "intermediate_size"), 0, 0, 0)
        step, dense = text.get("decoder_sparse_step") or 1, set(text.get("mlp_only_layers") or ())
        sparse = sum(index not in dense and (index + 1) % step == 0 for index in range(layers))
        inner, shared = text.get("moe_intermediate_size"), text.get("shared_expert_intermediate_size") or 0
        width = 0 if sparse == layers and inner else _number(text, "intermediate_size")
        active = _number(text, "num_experts_per_tok")
        return cls(layers - sparse, sparse, width, int(experts), active, int(inner or width), int(shared))

    def rows(self, experts: int) -> int:
        """Rows of all matrices, with so many experts of each layer: three of a width, and a router's one an expert.

        A shared expert has a gate of one row.
        """
        beside = 3 * self.shared + (1 if self.shared else 0)
        return 3 * self.dense * self.width + self.sparse * (3 * experts * self.inner + self.experts + beside)


@dataclass(frozen=True, slots=True)
class VisionSide:
    """A vision tower and its projector, by what a tile needs.

    A tile of a tower of native resolution is one token; what attention costs it depends on its picture.

    Attributes:
        width, depth: of the tower, and how many layers it has.
        layers: elements of the matrices of all layers.
        inner: width of a layer's MLP, of all its matrices that read the tower's width.
        patches: of a tile.
        rows: patches and the class token, where there is one.
        pixels: elements of a tile that its patches are made of.
        seen: patches that a patch sees in its tile or window, summed over the layers.
        whole: layers in which it sees all of a picture of many tiles.
        tokens: of a tile.
        projector: elements of the matrices that a token meets after the tower.
        positions: rows of the table of positions.
    """

    width: int
    depth: int
    layers: int
    inner: int
    patches: int
    rows: int
    pixels: int
    seen: int
    whole: int
    tokens: int
    projector: int
    positions: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> VisionSide:
        """Of a model's config, one of InternVL or one of native resolution (which says `spatial_merge_size`).

        Raises:
            UserError: a number that is needed is missing.
        """
        text, vision = config.get("text_config") or config["llm_config"], config["vision_config"]
        native = "spatial_merge_size" in vision
        if "embed_dim" in vision:  # Qwen2-VL, whose hidden_size is the decoder's
            width, ratio = _number(vision, "embed_dim"), _number(vision, "mlp_ratio")
            vision = {**vision, "hidden_size": width, "intermediate_size": ratio * width}
        hidden, width, patch = _number(text, "hidden_size"), _number(vision, "hidden_size"), _side(vision, "patch_size")
        depth = _number(vision, "depth" if native else "num_hidden_layers")
        if not native:
            inner, side = _number(vision, "intermediate_size"), _side(vision, "image_size") // patch
            shrink = float(config.get("downsample_ratio", 0.5))
            return cls(
                width=width,
                depth=depth,
                layers=depth * (4 * width * width + 2 * width * inner),
                inner=inner,
                patches=side * side,
                rows=side * side + 1,
                pixels=side * side * 3 * patch * patch,
                seen=depth * (side * side + 1),
                whole=0,
                tokens=round(side**2 * shrink**2),
                projector=round(width / shrink**2) * hidden + hidden * hidden,
                positions=side * side + 1,
            )
        merge = _number(vision, "spatial_merge_size")
        windows = vision.get("window_size")  # its towers have gated MLPs, too
        inner = _number(vision, "intermediate_size") * (2 if windows else 1)
        full = len(vision["fullatt_block_indexes"]) if windows else depth
        window = (int(windows) // patch) ** 2 if windows else 0
        merged = width * merge**2
        gates, after = _number(vision, "intermediate_size"), merged * merged + merged * hidden
        if vision.get("model_type") == "glm4v_vision":  # whose intermediate_size is the projector's
            after = merged * hidden + hidden * (hidden + 3 * gates)
            gates, inner = hidden, 2 * hidden
        return cls(
            width=width,
            depth=depth,
            layers=depth * (4 * width * width + width * (inner + gates)),
            inner=inner,
            patches=merge**2,
            rows=merge**2,
            pixels=merge**2 * 3 * int(vision.get("temporal_patch_size", 2)) * patch * patch,
            seen=(depth - full) * window,
            whole=full,
            tokens=1,
            projector=after * (1 + len(vision.get("deepstack_visual_indexes") or ())),
            positions=int(vision.get("num_position_embeddings") or 0),
        )


def feed_forward_rows(text: Mapping[str, Any]) -> int:
    """Rows of the feed-forward matrices that a token meets in all layers."""
    found = FeedForward.of(text)
    return found.rows(found.active)


def _number(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name} is {value!r} in the model's config: a whole number is needed")
    return value


def _side(config: Mapping[str, Any], name: str) -> int:
    """A square's side, which configs write as a number or as a pair."""
    value = config.get(name)
    return _number({name: value[0] if isinstance(value, (list, tuple)) and value else value}, name)


_TEXT = (
    *("hidden_size", "num_hidden_layers", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size", "head_dim"),
)
_VISION = ("hidden_size", "num_hidden_layers", "intermediate_size", "image_size", "patch_size")
_VIT_300M, _VIT_6B = (1024, 24, 4096, 448, 14), (3200, 45, 12800, 448, 14)
_QWEN_MOE: dict[str, Any] = {"num_experts": 128, "num_experts_per_tok": 8, "tie_word_embeddings": False}
_GPT_OSS: dict[str, Any] = {"num_local_experts": 32, "num_experts_per_tok": 4, "tie_word_embeddings": False}
_GPT_OSS |= {"layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128}

# Shapes of InternVL3 (over Qwen2.5 of 0.5B to 72B) and of InternVL3.5 (over Qwen3 of 0.6B to 32B, and over mixtures of
# experts: GPT-OSS and Qwen3-MoE): (language model, vision tower).
SIZES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    name: (dict(zip(_TEXT, text, strict=False)) | more, dict(zip(_VISION, vision, strict=True)))
    for name, text, vision, more in (
        ("1B", (896, 24, 4864, 14, 2, 151674), _VIT_300M, {}),
        ("2B", (1536, 28, 8960, 12, 2, 151674), _VIT_300M, {}),
        ("8B", (3584, 28, 18944, 28, 4, 151674), _VIT_300M, {}),
        ("14B", (5120, 48, 13824, 40, 8, 151674), _VIT_300M, {}),
        ("38B", (5120, 64, 27648, 40, 8, 151674), _VIT_6B, {}),
        ("78B", (8192, 80, 29568, 64, 8, 151674), _VIT_6B, {}),
        ("3.5-1B", (1024, 28, 3072, 16, 8, 151936, 128), _VIT_300M, {}),
        ("3.5-2B", (2048, 28, 6144, 16, 8, 151936, 128), _VIT_300M, {}),
        ("3.5-4B", (2560, 36, 9728, 32, 8, 151936, 128), _VIT_300M, {}),
        ("3.5-8B", (4096, 36, 12288, 32, 8, 151936, 128), _VIT_300M, {}),
        ("3.5-14B", (5120, 40, 17408, 40, 8, 151936, 128), _VIT_300M, {}),
        ("3.5-38B", (5120, 64, 25600, 64, 8, 151936, 128), _VIT_6B, {}),
        ("3.5-20B-A4B", (2880, 24, 2880, 64, 8, 201088, 64), _VIT_300M, _GPT_OSS),
        ("3.5-30B-A3B", (2048, 48, 6144, 32, 4, 151936, 128), _VIT_300M, _QWEN_MOE | {"moe_intermediate_size": 768}),
        ("3.5-241B-A28B", (4096, 94, 12288, 64, 4, 151936, 128), _VIT_6B, _QWEN_MOE | {"moe_intermediate_size": 1536}),
    )
}
