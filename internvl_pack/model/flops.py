"""Floating-point operations a training step needs, for model FLOP utilisation.

A matrix product of (m, k) by (k, n) counts 2 m k n. The forward pass of a row is

    language   2 * P_layers                 a token          P_layers: weights of the decoder layers' matrices that a
                                                             token meets: of its experts, and all of the router
               2 * layers * Hq * D          a token^2 of each segment (causal: half of the square's 4)
               4 * window * Hq * D          a token, for a layer with a sliding window instead
               6 * Hv * Dk * Dv             a token, for a layer of linear attention instead (its state is read,
                                                             corrected and queried)
    head       2 * V * H                    a token that has a label
    vision     2 * P_tower * patches        a tile           patches: those of a tile and the class token
               4 * layers * Hv * D * patches^2               (every patch sees every patch; of native resolution
                                                             those of its window, or of a picture of 256 tokens)
               2 * P_projector * tokens_per_tile

and the backward pass twice that where weights are trained, once where only gradients pass through, nothing
before the first trained weight. What is computed again (gradient checkpointing, flash attention's own
backward) does not count, nor do padding, norms, rotary embeddings and the loss.

    MFU = operations of all ranks / (seconds * ranks * peak of the card in bfloat16, dense)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..packing.cost import TokenMixing, VisionSide, feed_forward_rows

# bfloat16, dense, operations a second, by a part of the card's name; from the makers' data sheets.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "H200": 989.4e12,
    "H800": 989.4e12,
    "H20": 148e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "4090": 165.2e12,
}


def peak_flops(card: str) -> float | None:
    """Of a card by the name its driver gives; None where it is not known."""
    named = [name for name in PEAK_FLOPS if name in card]
    return PEAK_FLOPS[max(named, key=len)] if named else None


@dataclass(frozen=True, kw_only=True)
class FlopCounts:
    """Operations of one training step by what a row holds.

    Attributes:
        per_token, per_squared_token, per_loss_token, per_tile, per_squared_tile: operations of forward and backward;
            the last of a picture's tiles, in towers of native resolution.
    """

    per_token: float = 0.0
    per_squared_token: float = 0.0
    per_loss_token: float = 0.0
    per_tile: float = 0.0
    per_squared_tile: float = 0.0

    def of(self, batch: Mapping[str, Any]) -> float:
        """Of a batch's real tokens and tiles; what is padded counts nothing.

        Args:
            batch: the counts of `packed_collate_fn`.
        """
        return (
            self.per_token * batch["num_real_tokens"]
            + self.per_squared_token * batch["sum_squared_lengths"]
            + self.per_loss_token * batch["num_loss_tokens"]
            + self.per_tile * batch["num_tiles"]
            + self.per_squared_tile * sum(_squared_tiles(*grid) for grid in batch.get("image_grids", ()))
        )


def flop_counts(
    config: Any,
    *,
    trains_vision: bool = True,
    trains_projector: bool = True,
    trains_language: bool = True,
    trains_head: bool = True,
) -> FlopCounts:
    """From a model's config and which of its parts are trained.

    Args:
        config: of InternVL, of a model of native resolution, or of a causal language model.
    """
    text = config.get_text_config()
    settings = text.to_dict()
    mixing = TokenMixing.of(settings)
    matrices = text.hidden_size * (mixing.rows + feed_forward_rows(settings))
    # Gradients pass through the language model wherever something before it is trained.
    trains_before = trains_vision or trains_projector
    language_passes = _passes(trains_language, trains_before)
    head_passes = _passes(trains_head, trains_language or trains_before)
    # Attention has no weights: its backward is twice its forward wherever gradients pass at all.
    attention_passes = 3 if trains_language or trains_before else 1
    tower = {"per_tile": 0.0}
    if hasattr(config, "vision_config"):
        tower = _tower(config, trains_vision, trains_projector)
    return FlopCounts(
        per_token=language_passes * 2 * matrices + attention_passes * 2 * mixing.token,
        per_squared_token=attention_passes * 2 * mixing.full * mixing.queries,
        per_loss_token=head_passes * 2 * text.vocab_size * text.hidden_size,
        **tower,
    )


def _squared_tiles(rows: int, columns: int, *times: int) -> int:
    """Of a picture, or of so many pairs of a video's frames, each of which is one."""
    return max(1, len(times)) * (rows * columns) ** 2


def _tower(config: Any, trains_vision: bool, trains_projector: bool) -> dict[str, float]:
    vision = VisionSide.of(config.to_dict())
    embedding = 2 * vision.pixels * vision.width
    layers = 2 * vision.rows * vision.layers
    attention = 4 * vision.rows * vision.width  # with each patch that is seen
    projector = 2 * vision.tokens * vision.projector
    vision_passes = 3 if trains_vision else 1
    # The first matrices need no gradient of their input, the pixels.
    tower = vision_passes * (layers + attention * vision.seen) + (2 if trains_vision else 1) * embedding
    return {
        "per_tile": tower + _passes(trains_projector, trains_vision) * projector,
        "per_squared_tile": vision_passes * attention * vision.rows * vision.whole,
    }


def _passes(trained: bool, gradient_passes: bool) -> int:
    """Forward, gradient of the input, gradient of the weights: in units of the forward."""
    return 1 + (trained or gradient_passes) + trained


def trained_parts(packed: Any) -> dict[str, bool]:
    """Keyword arguments of `flop_counts` for a `PackedModel`: which parts have a trained weight."""
    vision, projector = packed.vision_modules or (None, None)
    parts = {
        "trains_vision": vision,
        "trains_projector": projector,
        "trains_language": packed.language_model,
        "trains_head": packed.get_output_embeddings(),
    }
    return {name: part is not None and any(p.requires_grad for p in part.parameters()) for name, part in parts.items()}
