"""Memory of a GPU in training, by part, from a model's config alone. Pure Python.

P parameters, of which T are trained, in half precision with AdamW, N GPUs. In bytes, while gradients are made:

    weights       2 P                    2 P / N with ZeRO-3
    gradients     2 T                    2 T / N with ZeRO-3
    optimizer     12 T / N               float32 weights and two moments; 12 T without ZeRO
    buckets       of ZeRO over several GPUs: gradients being reduced; with ZeRO-3 the two largest layers, whole
    activations   of a full row: what each layer keeps, or its input where it computes again, and one layer's then

and in the optimizer's step, where there are no activations and no buckets, 8 T / N instead of the gradients: those of a
rank's own part as they are, once more in one piece, and that in float32. The larger of the two is the peak.

A compiled layer keeps of a token or a patch, in elements (h: width, i: of the MLP, k: of keys and values):

    decoder       4 h + 2 k + 2 i        inputs of its matrix products; norms and activations are made again
    of experts    4 h + 2 k + a (2 h + 2 i)    a token goes to a of them: its copies, their products, their outputs
    vision        8 h + 2 i              with norms' and GELU's outputs

Layers that are not compiled keep about a third more, those of experts twice as much. Where most memory is activations
and gradients, the sum of both is more than the peak, as gradients come while activations go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..packing.cost import FeedForward, TokenMixing, VisionSide, layer_kinds

HALF, FLOAT = 2, 4  # bytes
BUCKET = 500_000_000  # elements of a bucket of gradients, in the configs shipped
UNCOMPILED, UNCOMPILED_EXPERTS = 1.35, 2.1


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What memory depends on.

    Attributes:
        vision_layers, decoder_layers: parameters of all layers of a tower.
        rest: parameters of embeddings, head and projector.
        depths: how many layers, vision and decoder.
        kept: bytes that a compiled layer keeps of a tile, and of a token.
        inputs: bytes of a layer's input, likewise.
        uncompiled: how much more layers keep that are not compiled, likewise.
        vocabulary, width: of the head.
    """

    vision_layers: int
    decoder_layers: int
    rest: int
    depths: tuple[int, int]
    kept: tuple[int, int]
    inputs: tuple[int, int]
    uncompiled: tuple[float, float]
    vocabulary: int
    width: int

    @property
    def parameters(self) -> int:
        return self.vision_layers + self.decoder_layers + self.rest

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Sizes:
        """From a `config.json` of an InternVL, in transformers' layout or its own, or of a model of native resolution.

        Raises:
            UserError: a number that is needed is missing, or there are layers of linear attention.
        """
        text, vision = config.get("text_config") or config.get("llm_config"), config.get("vision_config")
        if not isinstance(text, Mapping) or not isinstance(vision, Mapping):
            raise UserError("the config has no text_config (or llm_config) and vision_config")
        try:
            h, layers = text["hidden_size"], text["num_hidden_layers"]
            vocabulary, mixing = text["vocab_size"], TokenMixing.of(text)
            tower = VisionSide.of(config)
        except KeyError as error:
            raise UserError(f"{error.args[0]} is missing in the model's config") from error
        if "linear_attention" in layer_kinds(text):
            raise UserError("the language model has layers of linear attention: what these keep was not measured")
        mlp = FeedForward.of(text)
        w = tower.width
        widest = mlp.active * (2 * h + 2 * mlp.inner) if mlp.sparse else 2 * mlp.width
        embedded = tower.pixels // tower.patches * w
        tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", h < SMALLEST_UNTIED))
        return cls(
            vision_layers=tower.layers,
            decoder_layers=h * mixing.rows + h * mlp.rows(mlp.experts),
            rest=vocabulary * h * (1 if tied else 2) + tower.projector + embedded + tower.positions * w,
            depths=(tower.depth, layers),
            kept=(HALF * tower.rows * (8 * w + 2 * tower.inner), HALF * (4 * h + 2 * mixing.keys + widest)),
            inputs=(HALF * tower.rows * w, HALF * h),
            uncompiled=(UNCOMPILED, UNCOMPILED_EXPERTS if mlp.sparse else UNCOMPILED),
            vocabulary=vocabulary,
            width=h,
        )


# Width from which on language models of the family have a head of their own (Qwen2.5: 0.5B to 3B are tied).
SMALLEST_UNTIED = 3000


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one GPU; see the top of this file."""

    weights: int
    gradients: int
    optimizer: int
    buckets: int
    activations: int
    step: int

    @property
    def peak(self) -> int:
        passes = self.weights + self.gradients + self.optimizer + self.buckets + self.activations
        return max(passes, self.weights + self.optimizer + self.step)


def memory(
    sizes: Sizes,
    *,
    gpus: int,
    zero: int,
    tokens: int,
    tiles: int,
    checkpointed: bool,
    compiled: bool = True,
    loss_chunk: int = 1024,
    trained: int | None = None,
) -> Memory:
    """Of a run.

    Args:
        trained: parameters that are trained, such as those of adapters; None for all.
        zero: the ZeRO stage, 0 for none.
        tokens, tiles: of a full row.
        checkpointed: whether every layer computes again, or none.
    """
    p, parts = sizes.parameters, gpus if zero else 1
    t = p if trained is None else trained
    here = p // gpus if zero == 3 else p
    layers = (sizes.vision_layers // max(1, sizes.depths[0]), sizes.decoder_layers // max(1, sizes.depths[1]))
    bucket = 0 if not zero or gpus == 1 else HALF * min(t, BUCKET) * (2 if zero == 2 else 1)
    if zero == 3:
        bucket = HALF * (2 * max(layers) + sizes.rest)
    row = (tiles, tokens)
    more = (1.0, 1.0) if compiled else sizes.uncompiled
    whole = [k * n * m for k, n, m in zip(sizes.kept, row, more, strict=True)]
    if checkpointed:
        activations = sum(i * n * d for i, n, d in zip(sizes.inputs, row, sizes.depths, strict=True)) + max(whole)
    else:
        activations = sum(layer * d for layer, d in zip(whole, sizes.depths, strict=True))
    logits = loss_chunk * sizes.vocabulary * (HALF + FLOAT) + HALF * sizes.vocabulary * sizes.width
    own = t // parts
    return Memory(
        weights=HALF * here,
        gradients=HALF * (t // gpus if zero >= 2 else t),
        optimizer=3 * FLOAT * own,
        buckets=bucket,
        activations=int(activations) + logits,
        step=(2 * HALF + FLOAT) * own,
    )
