"""Prefix trees in a loop of one's own: a prompt with its images once, and the log-probabilities of all its answers.

    trees = [Tree(prompt=ids, answers=rollouts, tiles=tiles), ...]
    answers = logprobs(model, trees)                # float32, a value a token, with their gradient

What reinforcement learning on rollouts asks of a model (docs/library.md has a step of GRPO). Batches of a loader whose
records have several answers (docs/data.md) go the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .batch.collate import packed_collate_fn, to_device
from .batch.loss_weights import IGNORE_INDEX
from .batch.row import PackRow, Segment
from .options import count
from .records import Branch


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A prompt and its answers.

    Attributes:
        prompt: token ids, at least two, with a token of its own for each feature of an image, as the model reads them.
            The last one, with which each answer's branch begins, is no such token.
        answers: token ids of each answer, whose end-of-turn token is part of it; none is empty.
        tiles: uint8 (T, 3, S, S), of the prompt's images in their order; None without images.
        image_grids: of a model of native resolution, (rows, columns) of tiles of each of these images.
    """

    prompt: Sequence[int]
    answers: Sequence[Sequence[int]]
    tiles: Tensor | np.ndarray | None = None
    image_grids: Sequence[tuple[int, int]] = ()


def tree_batch(
    trees: Sequence[Tree], *, pad_token_id: int = 0, picture_token_ids: Sequence[int] = ()
) -> dict[str, Any]:
    """One row of the trees, one after the other, as `packed_collate_fn` gives it: what `PackedModel` takes.

    All tokens of answers are labelled.

    Args:
        picture_token_ids: of a model of native resolution, its `picture_token_ids`: positions are made by them.

    Raises:
        ValueError: no trees, a prompt of fewer than two tokens or one that ends with an image, a tree without answers
            or with an empty one, ids or tiles of another shape or kind, grids that are not of the tiles or not of the
            prompt's picture tokens.
    """
    _check_ends(trees, picture_token_ids)
    segments = [_segment(number, tree, bool(picture_token_ids)) for number, tree in enumerate(trees)]
    native: dict[str, Any] = {}
    if picture_token_ids:
        native = {"image_token_id": tuple(picture_token_ids), "grid_positions": True}
    return packed_collate_fn([PackRow(segments)] if segments else [], pad_token_id=pad_token_id, **native)


def logprobs(model: Any, trees: Sequence[Tree] | Mapping[str, Any]) -> list[Tensor]:
    """The log-probability of every trained token of every branch, in one forward pass.

    Args:
        model: a `PackedModel`, or what wraps one (DeepSpeed's engine, DDP); without `torch.no_grad()` the result has
            its gradient.
        trees: of one row; or a packed batch that holds trees: `tree_batch`'s, or a loader's.

    Returns:
        Tree by tree and branch by branch, float32 (n,) on the model's device.

    Raises:
        ValueError: a batch without `cu_seqlens`, a model that shares its rows over GPUs, what `tree_batch` refuses.
    """
    packed = model
    while hasattr(packed, "module"):
        packed = packed.module
    if packed.sequence_group is not None:
        raise ValueError("log-probabilities of branches are of whole rows: the model shares them over a sequence group")
    batch: Mapping[str, Any]
    if isinstance(trees, Mapping):
        batch = trees
    else:
        _check_ends(trees, packed.picture_token_ids)
        batch = tree_batch(trees, picture_token_ids=packed.picture_token_ids if packed.grid_positions else ())
    if "cu_seqlens" not in batch:
        raise ValueError("the batch is padded: log-probabilities of branches are of packed rows (cu_seqlens)")
    device = next(model.parameters()).device
    out = model(**to_device(batch, device), return_logprobs=True)
    bounds = batch["cu_seqlens"]
    none = torch.full((len(bounds) - 1,), -1, dtype=torch.int32)
    is_branch = (batch.get("prefix_of", none) >= 0).tolist()
    ends = bounds[1:].to(device, torch.int64)
    counts = torch.searchsorted(out.target_positions, ends).diff(prepend=ends.new_zeros(1)).tolist()
    parts = out.target_logprobs.split(counts)
    return [part for part, wanted in zip(parts, is_branch, strict=True) if wanted]


def _check_ends(trees: Sequence[Tree], picture_token_ids: Sequence[int]) -> None:
    for number, tree in enumerate(trees):
        if len(tree.prompt) and tree.prompt[-1] in picture_token_ids:
            raise ValueError(
                f"tree {number}: its prompt ends with an image's token ({tree.prompt[-1]}), which every branch would "
                "begin with: end it with what the chat format writes before an answer"
            )


def _segment(number: int, tree: Tree, native: bool) -> Segment:
    prompt = np.asarray(tree.prompt, dtype=np.int32)
    answers = [np.asarray(answer, dtype=np.int32) for answer in tree.answers]
    if any(ids.ndim != 1 for ids in (prompt, *answers)):
        raise ValueError(f"tree {number}: token ids of a prompt and of each answer are (n,)")
    if len(prompt) < 2:
        raise ValueError(f"tree {number}: a prompt of {len(prompt)} tokens, it needs two")
    if not answers or not all(len(answer) for answer in answers):
        raise ValueError(f"tree {number}: {'an empty answer' if answers else 'no answers'}")
    untrained = np.full(len(prompt), IGNORE_INDEX, dtype=np.int32)
    ids, labels = [prompt[:-1]], [untrained[:-1]]
    for answer in answers:  # a branch begins with the prompt's last token, which predicts its first
        ids += [prompt[-1:], answer]
        labels += [untrained[-1:], answer]
    tiles = np.zeros((0, 3, 1, 1), dtype=np.uint8) if tree.tiles is None else np.asarray(tree.tiles)
    if tiles.dtype != np.uint8 or tiles.ndim != 4:
        raise ValueError(f"tree {number}: tiles of {tiles.dtype} {tiles.shape}, they are uint8 (T, 3, S, S)")
    counts: tuple[int, ...] = (len(tiles),) if len(tiles) else ()
    if native:
        counts = tuple(rows * columns for rows, columns in tree.image_grids)
        if sum(counts) != len(tiles):
            raise ValueError(f"tree {number}: {count(len(tiles), 'tiles')} for image_grids {list(tree.image_grids)}")
    elif tree.image_grids:
        raise ValueError(f"tree {number}: image_grids are of a model of native resolution: give its picture_token_ids")
    branches = tuple(Branch(1 + len(answer), len(answer)) for answer in answers)
    return Segment(
        str(number), (0, 1), np.concatenate(ids), np.concatenate(labels), tiles,
        counts, sum(map(len, answers)), branches, image_grids=tuple(tree.image_grids) if native else (),
    )  # fmt: skip
