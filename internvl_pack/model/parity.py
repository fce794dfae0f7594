"""Parity: a pack gives the loss and the gradients that the model's own forward gives, sample by sample.

Isolation alone does not show it (selfcheck.py): a model whose image tokens see those after them is packed without a
leak and trained otherwise than it is used. What is compared is the model as transformers has it, with its own attention
and the inputs of its own image processor. The tests of the known families and `--family_check` are this code.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..batch.collate import packed_collate_fn
from ..batch.loss_weights import IGNORE_INDEX
from ..batch.row import PackRow, Segment
from .attention import register_packed_attention
from .experts import expert_blocks
from .packed import PackedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOSS_TOLERANCE = 1e-6  # relative, in float32
GRADIENT_TOLERANCE = 1e-5  # relative to each gradient's norm
ZERO = 1e-9  # of the whole gradient's norm: rounding of one that is zero, as a key bias's without rotary positions
PLAIN_TOKENS = 256  # ids of made-up text are below it

# A sample with pictures to the model's inputs of them, by name; see `pictures`.
Process = Callable[[Segment], Mapping[str, Any]]
# ("text" | "answer", number of tokens) and ("image", (rows, columns) of tiles, or their number).
Plan = Sequence[tuple[str, Any]]

# Pictures of many sizes, several in a sample, beside each other, none.
PLANS: dict[str, Plan] = {
    "two images": [("text", 5), ("image", (2, 3)), ("text", 3), ("image", (4, 2)), ("text", 4), ("answer", 9)],
    "text only, two turns": [("text", 8), ("answer", 6), ("text", 5), ("answer", 11)],
    "image first": [("image", (5, 6)), ("text", 3), ("answer", 7)],
    "shortest": [("text", 1), ("answer", 1)],
    "one token": [("text", 2), ("image", (1, 1)), ("text", 6), ("answer", 4)],
    "side by side": [("text", 2), ("image", (1, 7)), ("image", (9, 1)), ("answer", 5)],
}


def make_segment(
    plan: Plan,
    *,
    side: int = 1,
    image_token_id: int = -1,
    tokens_per_tile: int = 1,
    around: tuple[Sequence[int], Sequence[int]] = ((), ()),
    seed: int = 0,
    name: str | None = None,
) -> Segment:
    """A sample of random text and pictures.

    Args:
        side: of a tile in pixels.
        around: ids before and after a picture's tokens.
    """
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    labels: list[int] = []
    counts: list[int] = []
    grids: list[tuple[int, ...]] = []
    for kind, what in plan:
        if kind == "image":
            counts.append(int(np.prod(what)))
            if isinstance(what, tuple):
                grids.append(what)
            new = [*around[0], *[image_token_id] * (counts[-1] * tokens_per_tile), *around[1]]
        else:
            words: Any = rng.integers(0, PLAIN_TOKENS, what)
            new = words.tolist()
        ids += new
        labels += new if kind == "answer" else [IGNORE_INDEX] * len(new)
    return Segment(
        sample_id=name or f"synthetic/{seed}",
        fragment=(0, 1),
        input_ids=np.array(ids, dtype=np.int32),
        labels=np.array(labels, dtype=np.int32),
        tiles=rng.integers(0, 256, (sum(counts), 3, side, side), dtype=np.uint8),
        tiles_per_image=tuple(counts),
        num_loss_tokens=sum(label != IGNORE_INDEX for label in labels[1:]),
        image_grids=tuple(grids),
    )


def perturbed(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with no weight at a special value, so that every gradient says something."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def pack_on_cpu(model: PreTrainedModel, kernel: str = "sdpa", family: str | None = None) -> PackedModel:
    """A model in float32 as a PackedModel in training.

    Args:
        family: whose rules it is packed by, if not its own.
    """
    name = register_packed_attention(kernel, "cpu", torch.float32)
    model.set_attn_implementation({"text_config": name} if hasattr(model.config, "vision_config") else name)
    return PackedModel(model, family=family).train()


def own_model(packed: PackedModel) -> PreTrainedModel:
    """The same weights in transformers' own model with its own attention, eager where it has no other."""
    from transformers import PreTrainedConfig

    twin = copy.deepcopy(packed.model)
    own = "sdpa" if twin._supports_sdpa else "eager"
    for config in (getattr(module, "config", None) for module in twin.modules()):
        if isinstance(config, PreTrainedConfig):
            config._attn_implementation = own
    return twin.train()


def pictures(segment: Segment) -> list[np.ndarray]:
    """The pictures that a segment's tiles are of, (height, width, 3) uint8; without grids each tile is one."""
    found, done = [], 0
    for rows, columns in segment.image_grids or [(1, 1)] * len(segment.tiles):
        found.append(picture(segment.tiles[done : done + rows * columns], rows))
        done += rows * columns
    return found


def picture(tiles: np.ndarray, rows: int) -> np.ndarray:
    """Tiles (t, 3, S, S) in reading order, in so many rows, as one picture (height, width, 3)."""
    cells = tiles.reshape(rows, -1, *tiles.shape[1:])
    return cells.transpose(0, 3, 1, 4, 2).reshape(rows * tiles.shape[2], -1, 3)


def own_inputs(plain: PreTrainedModel, segment: Segment, process: Process | None) -> dict[str, Tensor]:
    """What the family's processor gives the model for one sample."""
    taken = inspect.signature(plain.forward).parameters
    ids = torch.from_numpy(segment.input_ids).long()[None]
    inputs = {"input_ids": ids}
    if process is None:
        return inputs
    image = (ids == plain.config.image_token_id).int()
    inputs |= {name: image for name in ("mm_token_type_ids", "token_type_ids") if name in taken}
    if len(segment.tiles):
        made = {name: value for name, value in process(segment).items() if name in taken}
        inputs |= {n: v.to(plain.dtype) if torch.is_floating_point(v) else v for n, v in made.items()}
    return inputs


def own_loss(
    plain: PreTrainedModel,
    segments: Sequence[Segment],
    process: Process | None = None,
    weight: Callable[[int], float] = lambda targets: 1.0,
) -> Tensor:
    """Sum of w * ce over the sum of w by the model's own forward, a sample at a time.

    Args:
        process: what the model's own processor makes of pictures; None for a language model.
        weight: of each target of a sample, by the number of them.
    """
    total, weights = torch.zeros(()), 0.0
    for segment in segments:
        logits = plain(**own_inputs(plain, segment, process), use_cache=False).logits[0]
        targets = torch.from_numpy(segment.labels).long()[1:]
        if count := int((targets != IGNORE_INDEX).sum()):
            ce = F.cross_entropy(logits[:-1], targets, ignore_index=IGNORE_INDEX, reduction="sum")
            total = total + weight(count) * ce
            weights += weight(count) * count
    return total / weights


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of each parameter that has one, by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative_error(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def gradient_errors(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative error of each gradient; where one is zero but for rounding, 0 if the other is, else infinity.

    Raises:
        ValueError: they are not of the same parameters.
    """
    if got.keys() != expected.keys():
        raise ValueError(f"gradients of one only: {', '.join(sorted(got.keys() ^ expected.keys())[:5])}")
    zero = ZERO * torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    return {
        name: (0.0 if got[name].norm() < zero else float("inf"))
        if gradient.norm() < zero
        else relative_error(got[name], gradient)
        for name, gradient in expected.items()
    }


def own_errors(
    packed: PackedModel, segments: Sequence[Segment], process: Process | None, expected: Mapping[str, Tensor]
) -> dict[str, float]:
    """How far the model's own gradients in float32 are from those in float64: what rounding does to them.

    It is most in sums over all tokens that nearly cancel, as those of the decays of linear attention.

    Args:
        expected: the gradients in float32.
    """
    exact = own_model(packed).double()
    if expert_blocks(exact):
        exact.set_experts_implementation("eager")  # grouped products are not made in float64
    own_loss(exact, segments, process).backward()
    return gradient_errors(expected, gradients(exact))


class Parity(NamedTuple):
    """How far a pack is from its samples one by one.

    Attributes:
        loss: relative error.
        gradient: the largest of all parameters', each relative to its norm, or 0 where it is below twice the model's
            own (`own_errors`); `parameter` is whose.
    """

    loss: float
    gradient: float
    parameter: str

    @property
    def holds(self) -> bool:
        """Whether both are within what rounding in float32 explains."""
        return self.loss <= LOSS_TOLERANCE and self.gradient <= GRADIENT_TOLERANCE

    def __str__(self) -> str:
        return (
            f"loss off by {self.loss:.1e} ({LOSS_TOLERANCE:.0e} allowed), worst gradient by {self.gradient:.1e} "
            f"({GRADIENT_TOLERANCE:.0e}), {self.parameter}"
        )


def measure_parity(
    packed: PackedModel, segments: Sequence[Segment], process: Process | None = None, **collation: Any
) -> Parity:
    """Compare a pack of these samples with the model's own forward, loss and every gradient.

    Args:
        packed: in float32 on the CPU.
        process: what the model's own processor makes of pictures; None for a language model.
        collation: options of `packed_collate_fn`.
    """
    plain = own_model(packed)
    expected = own_loss(plain, segments, process)
    expected.backward()
    packed.zero_grad(set_to_none=True)
    loss = packed(**packed_collate_fn([PackRow(list(segments))], **collation)).loss
    loss.backward()
    errors = gradient_errors(gradients(packed.model), gradients(plain))
    if max(errors.values()) > GRADIENT_TOLERANCE:
        own = own_errors(packed, segments, process, gradients(plain))
        errors = {name: error if error > 2 * own[name] else 0.0 for name, error in errors.items()}
    worst = max(errors, key=lambda name: errors[name])
    off = (loss - expected).abs() / expected.abs()
    return Parity(off.item(), errors[worst], worst)
