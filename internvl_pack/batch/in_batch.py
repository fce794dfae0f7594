"""In-batch packing: the samples of an ordinary micro-batch, one after the other in one row without padding.

    DataLoader(dataset, batch_size=4, sampler=..., collate_fn=partial(in_batch_collate_fn, max_packed_tokens=8192))

For a DataLoader of your own: which samples meet is its sampler's choice, and it resumes as the sampler does. Rows are
as full as `batch_size` makes them. The batch is that of `packed_collate_fn`, and `PackedModel` trains on it. In this
package's own loader the same rows are a kind of its plan: `PackingConfig(packing=False)` and several packs a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import UserError
from ..options import count
from .collate import packed_collate_fn
from .loss_weights import IGNORE_INDEX
from .row import PackRow, Segment

_SAMPLE_KEYS = ("input_ids", "labels")


def in_batch_collate_fn(
    samples: Sequence[Segment | PackRow | Mapping[str, Any]],
    *,
    max_packed_tokens: int | None = None,
    num_images_expected: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The samples of a micro-batch as one row.

    Args:
        samples: each a `Segment`, a row of one sample, or a mapping as `sample_segment` takes it.
        max_packed_tokens, num_images_expected: what the row may hold, in tokens (with the pads of `pad_seq_to_mult`)
            and tiles; None for no limit.
        options: of `packed_collate_fn`.

    Returns:
        the batch of `packed_collate_fn`.

    Raises:
        UserError: a row that holds several samples (a preset's or a packer's), or a micro-batch beyond a budget.
        ValueError: a mapping that is no sample.
    """
    rows = [_row(sample, number) for number, sample in enumerate(samples)]
    segments = [s for row in rows for s in row.segments]
    multiple = options.get("pad_seq_to_mult", 1)
    tokens = sum(-(-len(s.input_ids) // multiple) * multiple for s in segments)
    tiles = sum(len(s.tiles) for s in segments)
    _check("max_packed_tokens", "tokens", tokens, max_packed_tokens, segments, [len(s.input_ids) for s in segments])
    _check("num_images_expected", "tiles", tiles, num_images_expected, segments, [len(s.tiles) for s in segments])
    batch = packed_collate_fn(rows, **options)
    batch["num_packs"] = int(bool(segments))  # one row, however many samples
    return batch


def sample_segment(sample: Mapping[str, Any], number: int = 0) -> Segment:
    """An ordinary dataset's sample as a segment.

    Args:
        sample: `input_ids` and `labels` (n,), integers, not shifted and not padded; `attention_mask`, of ones only.
            With images `pixel_values`, uint8 (t, 3, S, S), and `tiles_per_image`, which sums to t (default: each tile
            is an image). `sample_id` says which it is (default: its place in the batch).

    Raises:
        ValueError: something is missing, padded or of another form; names the sample and the key.
    """
    name = str(sample.get("sample_id", f"sample {number}"))
    for key in _SAMPLE_KEYS:
        if key not in sample:
            raise ValueError(f"{name}: {key!r} is missing; it has {', '.join(map(str, sample))}")
    ids, labels = (np.asarray(sample[key], dtype=np.int64) for key in _SAMPLE_KEYS)
    if ids.ndim != 1 or ids.shape != labels.shape:
        raise ValueError(f"{name}: input_ids {ids.shape} and labels {labels.shape} must be (n,) and of one length")
    if "attention_mask" in sample and not np.asarray(sample["attention_mask"]).all():
        raise ValueError(f"{name}: its attention_mask masks tokens: samples are packed without padding, leave it out")
    tiles = np.asarray(sample["pixel_values"]) if sample.get("pixel_values") is not None else None
    if tiles is not None and (tiles.dtype != np.uint8 or tiles.ndim != 4):
        raise ValueError(
            f"{name}: pixel_values is {tiles.dtype} of shape {tiles.shape}: give uint8 tiles (t, 3, S, S), they are "
            "normalised on the device"
        )
    if tiles is None:
        tiles = np.empty((0, 3, 0, 0), dtype=np.uint8)
    per_image = tuple(int(n) for n in sample.get("tiles_per_image", [1] * len(tiles)))
    if sum(per_image) != len(tiles):
        raise ValueError(f"{name}: tiles_per_image sums to {sum(per_image)}, pixel_values has {len(tiles)} tiles")
    # The first token is nobody's target.
    num_loss_tokens = int((labels[1:] != IGNORE_INDEX).sum())
    return Segment(name, (0, 1), ids.astype(np.int32), labels.astype(np.int32), tiles, per_image, num_loss_tokens)


def _row(sample: Segment | PackRow | Mapping[str, Any], number: int) -> PackRow:
    if isinstance(sample, PackRow):
        if len(sample.segments) > 1:
            raise UserError(
                f"packing in_batch got a row of {len(sample.segments)} samples: the data is packed already, use "
                "packing stream or preset"
            )
        return sample
    return PackRow([sample if isinstance(sample, Segment) else sample_segment(sample, number)])


def _check(
    option: str, unit: str, total: int, limit: int | None, segments: Sequence[Segment], sizes: Sequence[int]
) -> None:
    if limit is None or total <= limit:
        return
    largest = max(range(len(segments)), key=sizes.__getitem__)
    raise UserError(
        f"{option} {limit}: a micro-batch of {count(len(segments), 'samples')} has {total} {unit}, the largest is "
        f"{segments[largest].sample_id} with {sizes[largest]}: lower the batch size, limit the samples, or "
        f"raise {option}"
    )
