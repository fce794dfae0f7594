"""From packs to tensors.

A worker hands out `PackRow`s (numpy arrays of the chosen fragments); `packed_collate_fn` concatenates
the segments of one or more of them into one row. `padded_collate_fn` stacks one sample a row, for
`use_packed_ds=False`. Both train on the same data through the same model code.

A row of three segments and a pad (strict mode), N = 16:

    input_ids      a a a a a b b b b b b c c p p p
    position_ids   0 1 2 3 4 0 1 2 3 4 5 0 1 0 1 2
    cu_seqlens     0         5           11  13    16

A tree's prefix and branches are segments of their own. One with a prefix of 4 tokens and two branches:

    input_ids      a a a a b b b c c
    position_ids   0 1 2 3 4 5 6 4 5
    cu_seqlens     0       4     7   9
    prefix_of      -1      0     0
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..encode.families.native import grid_positions as positions_by_grid
from .loss_weights import IGNORE_INDEX, token_weights
from .row import PackRow, Segment

INT32_MAX = 2**31 - 1
PAD_ID = "<pad>"
PREFIX_ID = "<prefix>"
FILLER_ID = "<filler>"
NO_SAMPLES = (PAD_ID, PREFIX_ID, FILLER_ID)  # ids of segments that are no sample
FILLER_TOKENS = 2  # the shortest row with a next token


def packed_collate_fn(
    rows: Sequence[PackRow],
    *,
    pad_token_id: int = 0,
    image_size: int = 448,
    loss_reduction: str = "token",
    pad_to: int | Sequence[int] | None = None,
    pad_seq_to_mult: int = 1,
    pad_cu_seqlens_to: int | None = None,
    image_token_id: int | Sequence[int] | None = None,
    grid_positions: bool = False,
    pairs: bool = False,
    branch_keys: bool = False,
) -> dict[str, Any]:
    """One or more packs flattened into one row of N tokens with S segments, T tiles.

    Args:
        pad_token_id: fills the pad segment and filler rows.
        image_size: side of a tile, for rows without any.
        loss_reduction: `token`, `sample` or `square`; see loss_weights.py.
        pad_to: pad the row with one isolated, unlabelled segment to this length (strict mode), or to
            the smallest of several lengths that holds it.
        pad_seq_to_mult: pad every segment to a multiple of this many tokens, as context parallelism and
            FP8 want; the pads are unlabelled and come after all tokens that could see them.
        pad_cu_seqlens_to: also give the boundaries at this constant length, for CUDA graphs.
        image_token_id: of the tokens that image features replace, one or several (a video's may be others); given,
            they are counted.
        grid_positions: of a model of native resolution: positions of three axes, from the grids of the images. Needs
            `image_token_id`.
        pairs: every tree is a chosen and a rejected answer: say which segments they are.
        branch_keys: give each branch a key of what it says and shows, for stored log-probabilities.

    Returns:
        input_ids, labels, position_ids: int64 (1, N); the label of each segment's first token is IGNORE_INDEX.
            With `grid_positions` positions are (3, 1, N), by time, height and width.
        loss_weight: float32 (1, N), of each token as a target; 0 where not trained.
        cu_seqlens: int32 (S+1,), strictly increasing from 0 to N, pad segment included.
        max_seqlen: int.
        cu_seqlens_padded: with `pad_seq_to_mult` above 1 only, also where nothing had to be padded: where the
            segments lie in the row, from 0 to N, each a multiple. `cu_seqlens` then are the boundaries without the pads
            within segments, of tokens that count, and end before N; `max_seqlen` is of the padded ones.
        cu_seqlens_static: int32 (pad_cu_seqlens_to,), with that option only: where the segments lie in the row, the
            last boundary N repeated. Empty segments: for kernels that allow them, which `cu_seqlens` never asks.
        pixel_values: uint8 (T, 3, image_size, image_size), in memory as the segments' tiles are: those that are decoded
            here have a pixel's colours together, torch.channels_last.
        image_grids: list of (rows, columns) of tokens of each image, only with `grid_positions`; of pairs of a video's
            frames (rows, columns, times...), the position of each pair after the first one's: they share a run of
            tokens. No tensor, since the vision tower's inputs are made from it on the host.
        second_frames: uint8 like `pixel_values`, only in rows with such pairs: of their tiles, in order, the second
            frames'.
        image_offsets: int32 (images+1,); segment_tile_offsets: int32 (S+1,).
        sample_ids: list of S strings; `<pad>`, `<filler>` and `<prefix>` mark segments that are no sample.
        fragments: list of S (index, count) pairs.
        num_samples, num_segments, num_tokens (N), num_real_tokens, num_tiles, num_loss_tokens, num_packs:
        ints; num_samples counts a split sample at its first fragment.
        sum_squared_lengths: int, of the real segments: what attention costs. A branch of R tokens after a prefix of P
            counts 2 P R + R^2.
        num_image_tokens: int, only with `image_token_id`.
        prefix_of: int32 (S,), only in rows with trees: of a branch the number of its prefix's segment, else -1.
        branch_rewards: float32 (S,), only where a branch has one; NaN for the others.
        pairs: int32 (P, 2), only with that option: the segments of each chosen and rejected answer; num_pairs (P) and
            num_chosen_tokens, ints: supervised targets of the chosen ones.
        branch_keys: list of S strings, only with that option; "" for what is no branch.

    Raises:
        ValueError: no rows, an empty segment, a row longer than `pad_to` or than int32 boundaries hold, or more
            segments than `pad_cu_seqlens_to` has room for.
    """
    if not rows:
        raise ValueError("packed_collate_fn got no rows: a batch needs at least one pack")
    segments = [s for row in rows for s in row.segments]
    _check_segments(segments)
    pieces = [piece for s in segments for piece in _pieces(s)]
    has_trees = len(pieces) > len(segments)
    if has_trees and pad_seq_to_mult > 1:
        raise ValueError(f"pad_seq_to_mult {pad_seq_to_mult} with prefix trees: their segments cannot be padded")
    ids, fragments, lengths, padded = _laid_out(pieces, pad_seq_to_mult, pad_to)
    others = len(lengths) - len(pieces)  # segments without a sample: the row's pad, or what fills an empty one

    places = _offsets(padded)  # where the segments lie
    input_ids, labels, weights = _joined(pieces, places, pad_token_id, loss_reduction)
    prefix_of = _prefix_of(pieces, len(lengths))
    starts = places[:-1].numpy().astype(np.int64)
    begun = np.where(prefix_of < 0, 0, np.asarray(padded)[prefix_of])  # positions before a segment's first
    if grid_positions:
        position_ids = _grid_positions(pieces, prefix_of, places, image_token_id)
    else:
        position_ids = np.arange(len(input_ids), dtype=np.int64) - np.repeat(starts - begun, padded)

    tile_counts = [piece.num_tiles for piece in pieces] + [0] * others
    image_counts = [n for s in segments for n in s.tiles_per_image]
    assert sum(image_counts) == sum(tile_counts), "tiles_per_image does not cover the tiles"
    batch = {
        "input_ids": torch.from_numpy(input_ids)[None],
        "labels": torch.from_numpy(labels)[None],
        "position_ids": torch.from_numpy(position_ids).unsqueeze(-2),
        "loss_weight": torch.from_numpy(weights)[None],
        "cu_seqlens": _offsets(lengths),
        "max_seqlen": max(padded),
        "pixel_values": _pixels(rows, image_size),
        "image_offsets": _offsets(image_counts),
        "segment_tile_offsets": _offsets(tile_counts),
        "sample_ids": ids,
        "fragments": fragments,
        "num_samples": sum(map(_num_samples, segments)),
        "num_segments": len(pieces),
        "num_packs": sum(bool(row.segments) for row in rows),
        "num_tokens": len(input_ids),
        "num_real_tokens": sum(len(s.input_ids) for s in segments),
        "num_tiles": sum(tile_counts),
        "num_loss_tokens": int((labels != IGNORE_INDEX).sum()),
        "sum_squared_lengths": sum(_seen_pairs(piece, p) for piece, p in zip(pieces, begun.tolist(), strict=False)),
    }
    if pad_seq_to_mult > 1:
        batch["cu_seqlens_padded"] = places
    if pad_cu_seqlens_to is not None:
        batch["cu_seqlens_static"] = _static(places, pad_cu_seqlens_to)
    if image_token_id is not None:
        batch["num_image_tokens"] = int(np.isin(input_ids, image_token_id).sum())
    if grid_positions:
        batch["image_grids"] = [grid for s in segments for grid in s.image_grids]
    second_tiles = [s.second_tiles for s in segments if s.second_tiles is not None]
    if second_tiles:
        batch["second_frames"] = torch.from_numpy(np.concatenate(second_tiles))
    if has_trees:
        batch["prefix_of"] = torch.from_numpy(prefix_of)
    batch |= _rewards([*(piece.reward for piece in pieces), *[None] * others])
    if pairs:
        batch |= _pairs(segments)
    if branch_keys:
        batch["branch_keys"] = [key for s in segments for key in _keys(s)] + [""] * others
    return batch


# Of a packed batch what the model checks without waiting for the device.
ON_HOST = ("cu_seqlens", "cu_seqlens_padded", "prefix_of")


def to_device(batch: Mapping[str, Any], device: torch.device, on_host: Sequence[str] = ON_HOST) -> dict[str, Any]:
    """The batch with its tensors on the device, but for those that stay on the host."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) and name not in on_host else value
        for name, value in batch.items()
    }


def padded_collate_fn(
    rows: Sequence[PackRow], *, pad_token_id: int = 0, pairs: bool = False, branch_keys: bool = False, **options: Any
) -> dict[str, Any]:
    """The same samples unpacked: one sample a row, padded on the right to the longest; of a tree a row a branch.

    Args:
        options: image_size, loss_reduction, image_token_id and grid_positions, as `packed_collate_fn`.

    Returns:
        input_ids, labels, position_ids, attention_mask: int64 (B, L), with `grid_positions` positions (3, B, L);
        loss_weight: float32 (B, L); image_grids and second_frames as `packed_collate_fn`;
        pixel_values, image_offsets, sample_ids, fragments and the counts as `packed_collate_fn`. No cu_seqlens.
        branch_rewards, pairs, branch_keys: as there, of rows instead of segments.

    Raises:
        ValueError: no rows, or a row that holds several segments.
    """
    if not rows:
        raise ValueError("padded_collate_fn got no rows: a batch needs at least one sample")
    for row in rows:
        if len(row.segments) > 1:
            raise ValueError(f"padded_collate_fn takes one sample a row, a row has {len(row.segments)}")
    segments = [s for row in rows for s in row.segments]
    alone = [PackRow([one]) for s in segments for one in s.unshared()]
    singles = [packed_collate_fn([row], pad_token_id=pad_token_id, **options) for row in alone or rows[:1]]
    length = max(one["num_tokens"] for one in singles)
    batch: dict[str, Any] = {}
    fills = {"input_ids": pad_token_id, "labels": IGNORE_INDEX, "position_ids": 0, "loss_weight": 0}
    for key, fill in fills.items():
        axes = singles[0][key].shape[:-2]  # of positions
        batch[key] = torch.full((*axes, len(singles), length), fill, dtype=singles[0][key].dtype)
        for i, one in enumerate(singles):
            batch[key][..., i, : one["num_tokens"]] = one[key][..., 0, :]
    branches = [branch for s in segments for branch in (s.branches or [None])]
    for weights, branch in zip(batch["loss_weight"], branches, strict=False):
        weights *= 1.0 if branch is None else branch.weight
    lengths = torch.tensor([one["num_tokens"] for one in singles])
    batch["attention_mask"] = (torch.arange(length) < lengths[:, None]).long()
    batch["pixel_values"] = torch.cat([one["pixel_values"] for one in singles])
    if second_frames := [one["second_frames"] for one in singles if "second_frames" in one]:
        batch["second_frames"] = torch.cat(second_frames)
    counts = [n for one in singles for n in one["image_offsets"].diff().tolist()]
    batch["image_offsets"] = _offsets(counts)
    for key in singles[0]:
        if key in ("sample_ids", "fragments", "image_grids"):
            batch[key] = [value for one in singles for value in one[key]]
        elif key in _SUMS:
            batch[key] = sum(one[key] for one in singles)
    batch["num_samples"] = sum(map(_num_samples, segments))
    batch["num_tokens"] = length * len(singles)
    batch |= _rewards([None if branch is None else branch.reward for branch in branches])
    if pairs:
        batch |= _pairs(segments)
        batch["pairs"] = torch.arange(2 * batch["num_pairs"], dtype=torch.int32).view(-1, 2)
    if branch_keys:
        keys = [key for s in segments for key in (_keys(s)[1:] or [""])]
        batch["branch_keys"] = keys or [""]
    return batch


# What a batch counts that adds up over its rows.
_SUMS = (
    *("num_segments", "num_packs", "num_real_tokens", "num_tiles", "num_loss_tokens", "num_image_tokens"),
    "sum_squared_lengths",
)


def padded_length(num_tokens: int, pad_to: int | Sequence[int] | None) -> int:
    """The length a row is padded to: the smallest of `pad_to` that holds it.

    Raises:
        ValueError: none does.
    """
    if pad_to is None:
        return num_tokens
    choices = [pad_to] if isinstance(pad_to, int) else list(pad_to)
    fitting = [n for n in choices if n >= num_tokens]
    if not fitting:
        raise ValueError(
            f"a row of {num_tokens} tokens is longer than pad_to {max(choices)}: with several packs a batch "
            f"pad_to must be a multiple of max_packed_tokens"
        )
    return min(fitting)


def row_boundaries(batch: dict[str, Any]) -> Tensor:
    """Where the segments of a packed batch lie in its row: int32 (S+1,), from 0 to N."""
    return batch.get("cu_seqlens_padded", batch["cu_seqlens"])


def _static(places: Tensor, count: int) -> Tensor:
    if len(places) > count:
        raise ValueError(
            f"a row of {len(places) - 1} segments (pads included) needs {len(places)} boundaries: raise "
            f"pad_cu_seqlens_to from {count}"
        )
    return torch.cat([places, places[-1:].expand(count - len(places))])


def _check_segments(segments: Sequence[Segment]) -> None:
    for s in segments:
        if not len(s.input_ids):
            raise ValueError(f"segment {s.sample_id!r} has no tokens: repeated boundaries break the kernels")
        if len(s.labels) != len(s.input_ids):
            raise ValueError(f"segment {s.sample_id!r}: {len(s.input_ids)} tokens but {len(s.labels)} labels")


class _Piece(NamedTuple):
    """What becomes a segment of the row: a sample, a tree's prefix or one of its branches.

    num_tiles, reward: as of a segment and a branch. shares: (supervised targets, weight) of each sample that trains it.
    """

    sample_id: str
    fragment: tuple[int, int]
    input_ids: np.ndarray
    labels: np.ndarray
    num_tiles: int
    shares: tuple[tuple[int, float], ...]
    is_branch: bool = False
    reward: float | None = None
    segment: Segment | None = None  # whose images it has


def _pieces(s: Segment) -> Iterator[_Piece]:
    if not s.branches:
        share = (s.num_loss_tokens, 1.0)
        yield _Piece(s.sample_id, s.fragment, s.input_ids, s.labels, len(s.tiles), (share,), segment=s)
        return
    n = s.num_prefix_tokens
    if n < 1 or min(branch.num_tokens for branch in s.branches) < 1:
        raise ValueError(f"tree {s.sample_id!r}: its prefix or a branch has no tokens")
    shares = tuple((branch.num_loss_tokens, branch.weight) for branch in s.branches)
    yield _Piece(PREFIX_ID, s.fragment, s.input_ids[:n], s.labels[:n], len(s.tiles), shares, segment=s)
    for share, (branch, part) in zip(shares, s.branch_parts(), strict=True):
        name = branch.sample_id or s.sample_id
        place = (0, 1) if branch.sample_id else s.fragment  # a row that was joined is whole, wherever its tree is cut
        yield _Piece(name, place, s.input_ids[part], s.labels[part], 0, (share,), True, branch.reward)


def _laid_out(
    pieces: Sequence[_Piece], pad_seq_to_mult: int, pad_to: int | Sequence[int] | None
) -> tuple[list[str], list[tuple[int, int]], list[int], list[int]]:
    """(ids, fragments, lengths, lengths with their pads) of the row's segments, its own pad as the last."""
    ids = [piece.sample_id for piece in pieces] or [FILLER_ID]
    fragments = [piece.fragment for piece in pieces] or [(0, 1)]
    lengths = [len(piece.input_ids) for piece in pieces] or [FILLER_TOKENS]
    padded = [-(-n // pad_seq_to_mult) * pad_seq_to_mult for n in lengths]
    target = padded_length(sum(padded), pad_to)
    if free := target - sum(padded):
        ids.append(PAD_ID)
        fragments.append((0, 1))
        lengths.append(free)
        padded.append(free)
    if target > INT32_MAX:
        raise ValueError(f"a row of {target} tokens is above int32 boundaries (2**31 - 1)")
    return ids, fragments, lengths, padded


def _seen_pairs(piece: _Piece, before: int) -> int:
    """Twice the pairs of a token and one that it sees, the segment's `before` of its prefix included."""
    n = len(piece.input_ids)
    return n * (n + 2 * before)


def _num_samples(s: Segment) -> int:
    """Samples that begin with this segment: rows that were joined to a tree are in one fragment each."""
    if any(branch.sample_id for branch in s.branches):
        return len(s.branches)
    return int(s.fragment[0] == 0)


def _prefix_of(pieces: Sequence[_Piece], num_segments: int) -> np.ndarray:
    prefix_of = np.full(num_segments, -1, dtype=np.int32)
    last = -1
    for number, piece in enumerate(pieces):
        if piece.is_branch:
            prefix_of[number] = last
        else:
            last = number
    return prefix_of


def _grid_positions(
    pieces: Sequence[_Piece], prefix_of: np.ndarray, places: Tensor, image_token_id: int | Sequence[int] | None
) -> np.ndarray:
    """Positions of the row's tokens by time, height and width, (3, N): a branch goes on after its prefix's last."""
    if image_token_id is None:
        raise ValueError("grid_positions needs image_token_id: images are found by their tokens")
    positions = np.empty((3, int(places[-1])), dtype=np.int64)
    after = [0] * (len(prefix_of) + 1)  # the position after each segment's last; the last of these is of no segment
    for number, (start, stop) in enumerate(pairwise(places.tolist())):
        if number < len(pieces):
            piece, begun = pieces[number], after[prefix_of[number]]
            grids = () if piece.segment is None else piece.segment.image_grids
            own = positions_by_grid(piece.input_ids, image_token_id, grids, begun)
        else:
            own = np.empty((3, 0), dtype=np.int64)
        last = start + own.shape[1]
        positions[:, start:last] = own
        after[number] = int(own.max(initial=-1)) + 1
        positions[:, last:stop] = np.arange(after[number], after[number] + stop - last)  # pads
    return positions


def _pairs(segments: Sequence[Segment]) -> dict[str, Any]:
    """The segments of the row that are each pair's answers, int32 (P, 2), and the counts that go with them."""
    pairs, number = [], 0
    for s in segments:
        if len(s.branches) != 2:
            raise ValueError(f"sample {s.sample_id!r} has {len(s.branches) or 'no'} branches: a pair has two")
        pairs.append((number + 1, number + 2))
        number += 3
    return {
        "pairs": torch.tensor(pairs, dtype=torch.int32).reshape(-1, 2),
        "num_pairs": len(pairs),
        "num_chosen_tokens": sum(s.branches[0].num_loss_tokens for s in segments),
    }


def _rewards(rewards: Sequence[float | None]) -> dict[str, Tensor]:
    """`branch_rewards`, where a branch has one."""
    if all(reward is None for reward in rewards):
        return {}
    return {"branch_rewards": torch.tensor([np.nan if reward is None else reward for reward in rewards])}


def _keys(s: Segment) -> list[str]:
    """Of each piece of a segment what identifies it, "" but for branches: ids, what is trained, and pixels."""
    if not s.branches:
        return [""]
    n = s.num_prefix_tokens
    common = hashlib.blake2b(digest_size=16)
    tiles = (s.tiles,) if s.second_tiles is None else (s.tiles, s.second_tiles)
    for values in (s.input_ids[:n], s.labels[:n], *tiles):
        common.update(np.ascontiguousarray(values).data)
    keys = [""]
    for _, part in s.branch_parts():
        own = common.copy()
        own.update(np.concatenate([s.input_ids[part], s.labels[part]]).tobytes())
        keys.append(own.hexdigest())
    return keys


def _joined(
    pieces: Sequence[_Piece], places: Tensor, pad_token_id: int, loss_reduction: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, labels and loss weights of the row, (N,) each, with the segments at their places."""
    target = int(places[-1])
    input_ids = np.full(target, pad_token_id, dtype=np.int64)
    labels = np.full(target, IGNORE_INDEX, dtype=np.int64)
    weights = np.zeros(target, dtype=np.float32)
    for piece, start in zip(pieces, places.tolist(), strict=False):
        stop = start + len(piece.input_ids)
        input_ids[start:stop] = piece.input_ids
        labels[start + 1 : stop] = piece.labels[1:]  # nothing before it in the segment predicts the first token
        for num_targets, weight in piece.shares:
            weights[start:stop] += weight * token_weights(labels[start:stop], loss_reduction, num_targets)
    return input_ids, labels, weights


def _pixels(rows: Sequence[PackRow], image_size: int) -> Tensor:
    """All tiles of the rows in placeholder order; those of a single pack are not copied."""
    parts = [tiles for row in rows for tiles in row.all_tiles() if len(tiles)]
    if not parts:
        return torch.empty((0, 3, image_size, image_size), dtype=torch.uint8)
    return torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts))


def _offsets(counts: Sequence[int]) -> Tensor:
    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    return torch.from_numpy(offsets)
