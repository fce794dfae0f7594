"""Sequence parallelism: one packed row over the N ranks of a group (`--sequence_parallel_size N`).

    group = make_groups(dist.get_world_size(), 4, "ulysses")
    enable_sequence_parallel(packed_model, group)

From then on `PackedModel.forward` takes the same whole row on every rank of the group and computes this rank's
share of it: its slice of the tokens, its share of the tiles, the loss of the targets in its slice. Losses and
gradients of the ranks add up to those of the row: where they are averaged over all W processes afterwards, as DDP
and every ZeRO stage do, the loss normaliser is (sum of weights over the data-parallel ranks) / W, exactly as
without sequence parallelism.

What the caller gives and gets, beside `PackedModel.forward`'s own words:

* every rank of a group gets the same batch (input_ids, labels, loss_weight, ... of the whole row); `pixel_values`
  may stay on the host, where each rank takes its tiles from;
* `num_loss_tokens` is that of the whole row, as the collator counted it. `num_slice_loss_tokens`, of
  `count_slice_targets(batch, group)` on the host, saves waiting for the device once a forward;
* `loss`, `weighted_sum`, `weight_sum`, `ce_sum`, `num_targets`, `target_losses` are of this rank's slice: the sums
  over a group are the row's. `target_positions` are places in the whole row;
* `logits`, where asked for, are those of the whole row, on every rank.
"""

from .group import MODES, SequenceGroup, enable_sequence_parallel, make_groups

__all__ = ["MODES", "SequenceGroup", "enable_sequence_parallel", "make_groups"]
