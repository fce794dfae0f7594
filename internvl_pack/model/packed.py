"""`PackedModel`: an unmodified Hugging Face model, run on packs.

    input_ids -> embeddings --+
    pixel_values (uint8) -> normalise -> vision tower -> projector -> image places
                              +-> language model (boundaries by cu_seqlens) -> labelled positions -> loss

The vision side runs in every forward, on a tile of zeros where the row has none, and the head runs once:
every rank makes the same collective calls whatever its row holds.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..batch.loss_weights import IGNORE_INDEX, normalized, shift_targets
from ..errors import UserError
from ..parallel.group import SequenceGroup
from ..parallel.slices import RowSlice, gather_row, gather_tiles, own_tiles, row_slice
from .attention import (
    Kernel,
    Stretches,
    TreeLinks,
    check_boundaries,
    keep_states_apart,
    kernel_of,
    linear_layers,
    packed_row,
)
from .attention import stretches as make_stretches
from .attention import tree_links as make_tree_links
from .experts import RoutingSums, real_tokens
from .families import check_family, logit_scale, longest_exact_segment, tree_problem
from .fill_row import MULTIPLE, fill_row
from .fp8 import MULTIPLE as FP8_MULTIPLE
from .holder import ModelHolder
from .images import join_without_images, place_features, zero_tile
from .loss import DEFAULT_CHUNK_TOKENS, LabelledHead
from .towers import Features, make_tower

# Places in the flat row, int64 (M,), and for each of the first decoder layers what is added there, (M, H).
_DeepFeatures = tuple[Tensor, tuple[Tensor, ...]]


@dataclass
class PackedOutput(ModelOutput):
    """What a forward gives; the sums are detached float32 or int64 scalars on the device.

    Over a sequence group (parallel/) the loss and the sums are of this rank's slice of the row, and add up over the
    group to the row's; logits are the row's.

    Attributes:
        loss: sum of w * ce / loss_normalizer.
        weighted_sum, weight_sum: sums of w * ce and of w over the labelled targets.
        ce_sum, num_targets: the same unweighted, for metrics.
        target_losses, target_positions: ce of each labelled target, float32 (M,), and where in the flat
            row it is predicted, int64 (M,); the target itself is the next token.
        target_logprobs: float32 (M,) with their gradient, in place of a loss, when asked for.
        logits: (B, N, V), only without labels or when asked for.
        router_counts, router_probabilities: of a mixture of experts with a balance loss, see experts.RoutingSums.
    """

    loss: Tensor | None = None
    weighted_sum: Tensor | None = None
    weight_sum: Tensor | None = None
    ce_sum: Tensor | None = None
    num_targets: Tensor | None = None
    target_losses: Tensor | None = None
    target_positions: Tensor | None = None
    target_logprobs: Tensor | None = None
    logits: Tensor | None = None
    router_counts: Tensor | None = None
    router_probabilities: Tensor | None = None


class PackedModel(ModelHolder):
    """Runs packs (and padded batches) through `model` and returns the weighted loss.

    Args:
        model: InternVLForConditionalGeneration, or a causal language model, whose text config uses an
            implementation of `register_packed_attention`. Known families are listed in families.py.
        head_chunk_tokens: labelled tokens whose logits exist at once.
        vision_micro_tiles: tiles that go through the vision tower at once; None for all.
        family: the one by whose rules its pictures go, where it is not the model's own; compared by family_check.py.

    Raises:
        UserError: a family that cannot be packed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        head_chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
        vision_micro_tiles: int | None = None,
        family: str | None = None,
    ) -> None:
        super().__init__(model)
        self.vision_micro_tiles = vision_micro_tiles
        self.is_compiled = False  # whether the blocks are, see compiled.py
        self.fp8: str | None = None  # the recipe of its products, see fp8.py
        self.fused_vision = False  # whether the tower's layers run as vision/fused.py writes them out
        self.sequence_group: SequenceGroup | None = None  # that shares rows, see enable_sequence_parallel
        self.routing: RoutingSums | None = None  # see balance_routers
        self.tower = make_tower(model, family)
        text_config = model.config.get_text_config()
        self.family_is_known = check_family(text_config)
        # InternVL's own forward takes the head's logits as they are, whatever its language model would do to them.
        self._logit_scale = 1.0 if self.has_vision else logit_scale(text_config)
        self._longest_exact_segment = longest_exact_segment(text_config)
        if not str(text_config._attn_implementation).startswith("internvl_pack_"):
            raise ValueError(
                f"the language model's attention is {text_config._attn_implementation!r}: load it with build_model, or "
                'call model.set_attn_implementation({"text_config": register_packed_attention()})'
            )
        keep_states_apart(self.language_model)
        self._has_linear_layers = bool(linear_layers(self.language_model))
        self.head = LabelledHead(model.get_output_embeddings, head_chunk_tokens)

    # --- parts -------------------------------------------------------------------------------------

    @property
    def has_vision(self) -> bool:
        return self.tower is not None

    @property
    def language_model(self) -> nn.Module:
        """The decoder without its head."""
        if self.has_vision:
            return self.model.get_submodule("model.language_model")
        return self.model.get_submodule("model") if hasattr(self.model, "model") else self.model.base_model

    @property
    def attn_kernel(self) -> Kernel:
        """The kernel of the language model's attention."""
        return kernel_of(self.config.get_text_config()._attn_implementation)

    @property
    def vision_modules(self) -> list[nn.Module]:
        """The vision tower and the projector; empty for a text-only model."""
        return [] if self.tower is None else self.tower.modules

    @property
    def tokens_per_tile(self) -> int:
        assert self.tower is not None, "asked of models that have one"
        return self.tower.tokens_per_tile

    @property
    def grid_positions(self) -> bool:
        """Whether it is a model of native resolution: positions are made from the grids of images."""
        return self.tower is not None and self.tower.grid_positions

    @property
    def picture_token_ids(self) -> tuple[int, ...]:
        """Of the tokens that features replace: of images, with native resolution of videos, too."""
        image = self.config.image_token_id
        return (image, self.config.video_token_id) if self.grid_positions else (image,)

    def is_picture(self, ids: Tensor) -> Tensor:
        """Which tokens are those that features replace: bool like `ids`."""
        return functools.reduce(torch.logical_or, [ids == token_id for token_id in self.picture_token_ids])

    def as_text(self, ids: Tensor) -> Tensor:
        """`ids` with another token of the vocabulary in the place of those that features replace."""
        pictures = self.picture_token_ids
        other = next(token_id for token_id in range(len(pictures) + 1) if token_id not in pictures)
        return torch.where(self.is_picture(ids), other, ids)

    # --- forward -----------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_padded: Tensor | None = None,
        prefix_of: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grids: Sequence[tuple[int, ...]] = (),
        second_frames: Tensor | None = None,
        labels: Tensor | None = None,
        loss_weight: Tensor | None = None,
        loss_normalizer: Tensor | float | None = None,
        attention_mask: Tensor | None = None,
        num_loss_tokens: int | None = None,
        num_image_tokens: int | None = None,
        num_slice_loss_tokens: int | None = None,
        num_real_tokens: int | None = None,
        routing_only: bool = False,
        return_logits: bool = False,
        return_logprobs: bool = False,
        **_other_batch_keys: Any,
    ) -> PackedOutput:
        """One row of packed segments, or a padded batch.

        Args:
            input_ids, position_ids: (1, N) int64, positions restarting at 0 in each segment; or (B, L)
                padded on the right, with `attention_mask` and without `cu_seqlens`. Positions of a model of native
                resolution are (3, 1, N) or (3, B, L).
            cu_seqlens: int32 (S+1,), and max_seqlen, an int; validated here where it is on the host, by
                the collator otherwise.
            cu_seqlens_padded: like cu_seqlens, where segments carry pads of their own (pad_seq_to_mult): where they lie
                in the row. Attention is causal, so no token sees the pads after it.
            prefix_of: int32 (S,), where the row has prefix trees: of each segment the number of the one that is its
                prefix, -1 for none. On the host, as cu_seqlens then: a CUDA tensor is waited for. A branch follows its
                prefix, and its positions go on at the prefix's end (batch/collate.py).
            pixel_values: uint8 (T, 3, S, S) in placeholder order; floats are taken as normalised.
            image_grids, second_frames: as `packed_collate_fn` makes them, for a model of native resolution.
            labels: not shifted; loss_weight: float32 like labels, None for 1 everywhere.
            loss_normalizer: what the weighted sum is divided by, None for this row's own sum of weights.
            num_loss_tokens, num_image_tokens: labelled targets and image tokens as the collator counted
                them on the host; with them a CUDA device is not waited for. They are still checked there.
            num_slice_loss_tokens: over a sequence group, where each rank gets the same row: labelled targets of this
                rank's slice (`parallel.slices.count_slice_targets`), likewise.
            num_real_tokens: tokens of samples, for the sums of a router's balance loss: the rest is pads.
            routing_only: give those sums and nothing else, without running the head.
            return_logits: also return all logits, for checks and evaluation.
            return_logprobs: give the labelled targets' log-probabilities, with their gradient, in place of a loss.

        Raises:
            ValueError: shapes, boundaries or image tokens that do not fit together.
        """
        _check_shapes(input_ids, position_ids, self.grid_positions, labels=labels, loss_weight=loss_weight)
        cu_seqlens_unpadded = cu_seqlens
        if cu_seqlens_padded is not None:
            cu_seqlens = cu_seqlens_padded
        tree_links = linear = None
        if cu_seqlens is not None:
            row = (input_ids, position_ids, attention_mask, prefix_of)
            check_boundaries(cu_seqlens, max_seqlen, *row, self._longest_exact_segment)
            if prefix_of is not None:
                if problem := self.tree_problem:
                    raise UserError(problem)
                if cu_seqlens_padded is not None:
                    raise UserError("prefix trees have no pads between segments: leave --pad_seq_to_mult at 1")
                tree_links = make_tree_links(cu_seqlens.cpu(), prefix_of.cpu(), input_ids.device)
            if self._has_linear_layers:
                prefixes = None if prefix_of is None else prefix_of.cpu()
                linear = make_stretches(cu_seqlens.cpu(), prefixes, input_ids.device)
        on_device = None if cu_seqlens is None else cu_seqlens.to(input_ids.device, non_blocking=True)
        part = RowSlice.whole(on_device, max_seqlen)
        if (group := self.sequence_group) is not None:
            if cu_seqlens is None or max_seqlen is None:
                raise ValueError("sequence parallelism cuts packed rows only: the batch has no cu_seqlens")
            part = row_slice(cu_seqlens, max_seqlen, group.rank, group.size, group.mode, input_ids.device)
            num_loss_tokens = num_slice_loss_tokens
        if pixel_values is not None and len(pixel_values) and not self.has_vision:
            raise ValueError(f"{len(pixel_values)} tiles for {type(self.model).__name__}, which has no vision tower")

        embeddings = self.model.get_input_embeddings()(part.take(input_ids))
        deep: _DeepFeatures | None = None
        if self.has_vision:
            found = (input_ids, pixel_values, image_grids, second_frames, num_image_tokens)
            embeddings, deep = self._with_images(embeddings, *found, part)
        places = None if position_ids is None else part.take(position_ids)
        routing = self.routing if self.training else None
        if routing is not None:
            given = (num_real_tokens, cu_seqlens_unpadded, cu_seqlens_padded, attention_mask)
            routing.begin(part.take(real_tokens(input_ids, *given), False))
        hidden = self._decode(embeddings, places, part, attention_mask, tree_links, deep, linear)
        if self._logit_scale != 1.0:
            hidden = hidden * self._logit_scale  # the head is linear: its logits are scaled by as much

        output = PackedOutput()
        if routing is not None:
            output.router_counts, output.router_probabilities = routing.take()
        if routing_only:
            return output
        if labels is not None:
            targets, weights = shift_targets(labels, loss_weight, on_device)
            own_weights = None if return_logprobs else weights
            self._add_loss(output, hidden, targets, own_weights, loss_normalizer, num_loss_tokens, part)
        if labels is None or return_logits:
            logits = self.model.get_output_embeddings()(hidden)
            output.logits = gather_row(logits, cu_seqlens, group)
        return output

    def balance_routers(self) -> None:
        """Give the sums of a balance loss with every training forward.

        Raises:
            UserError: a model without experts.
        """
        self.routing = RoutingSums(self.language_model)

    @property
    def tree_problem(self) -> str | None:
        """Why rows with prefix trees do not go through it as it is set up; None where they do."""
        if self.sequence_group is not None and self.sequence_group.mode == "ring":
            return "prefix trees with --sequence_parallel_mode ring: use ulysses"
        return tree_problem(self.config.get_text_config())

    def _with_images(
        self,
        embeddings: Tensor,
        input_ids: Tensor,
        pixel_values: Tensor | None,
        image_grids: Sequence[tuple[int, ...]],
        second_frames: Tensor | None,
        num_image_tokens: int | None,
        part: RowSlice,
    ) -> tuple[Tensor, _DeepFeatures | None]:
        """Of this rank's tokens, (1, n, H): each rank encodes its share of the row's tiles, and gets all features.

        Second, what is to be added after the first decoder layers, and where.
        """
        num_tiles = 0 if pixel_values is None else len(pixel_values)
        positions = self._image_positions(input_ids, num_tiles, num_image_tokens)
        mine = None if pixel_values is None else own_tiles(pixel_values, self.sequence_group)
        features, deep = self._features(
            self._tiles_or_zeros(mine, embeddings.device),
            image_grids if num_tiles else [(1, 1)],
            None if second_frames is None else second_frames.to(embeddings.device, non_blocking=True),
        )
        if not num_tiles:
            for each in (features, *deep):
                embeddings = join_without_images(embeddings, each)
            return embeddings, None
        features = gather_tiles(features, num_tiles, self.sequence_group)
        here = part.local(positions, input_ids.shape[1])
        placed = place_features(embeddings, features.reshape(-1, features.shape[-1]), here, part.places is not None)
        return placed, (here, deep) if deep else None

    def _image_positions(self, input_ids: Tensor, num_tiles: int, num_image_tokens: int | None) -> Tensor:
        """Where the row's image tokens are, int64 (num_tiles * tokens_per_tile,)."""
        is_image = self.is_picture(input_ids.reshape(-1))
        on_host = num_image_tokens is None or input_ids.device.type == "cpu"
        positions = true_positions(is_image, None if on_host else num_image_tokens)
        if len(positions) != num_tiles * self.tokens_per_tile:
            raise ValueError(
                f"{len(positions)} image tokens (id {self.picture_token_ids[0]}) for {num_tiles} tiles of "
                f"{self.tokens_per_tile} tokens: --force_image_size, --down_sample_ratio and the tokenizer must be the "
                "model's; in Python, make the dataset's EncodeConfig by encode_config_of(checkpoint)"
            )
        return positions

    def _tiles_or_zeros(self, pixel_values: Tensor | None, device: torch.device) -> Tensor:
        """The tiles on the device, or where there are none one of zeros."""
        assert self.tower is not None, "called for models that have one"
        size = self.tower.tile_size
        if pixel_values is None or not len(pixel_values):
            return zero_tile(size, device, self.tower.dtype)
        if tuple(pixel_values.shape[-2:]) != size:
            raise ValueError(f"tiles of {tuple(pixel_values.shape[-2:])}, the model's are {size}")
        return pixel_values.to(device, non_blocking=True)

    def image_features(self, tiles: Tensor) -> Tensor:
        """Tiles (T, 3, S, S), uint8 or normalised, to (T, tokens_per_tile, H); no graph where all of it is frozen."""
        return self._features(tiles).tokens

    def _features(
        self, tiles: Tensor, grids: Sequence[tuple[int, ...]] = (), second_frames: Tensor | None = None
    ) -> Features:
        assert self.tower is not None, "called for models that have one"
        trained = any(p.requires_grad for module in self.vision_modules for p in module.parameters())
        chunks = tiles.split(self.vision_micro_tiles or len(tiles))
        with contextlib.nullcontext() if trained or tiles.requires_grad else torch.no_grad():
            if len(chunks) == 1:
                return self.tower.features(tiles, grids, second_frames, is_compiled=self.is_compiled)
            features = [self.tower.features(chunk, is_compiled=self.is_compiled).tokens for chunk in chunks]
            return Features(torch.cat(features))

    def _decode(
        self,
        embeddings: Tensor,
        position_ids: Tensor | None,
        part: RowSlice,
        attention_mask: Tensor | None,
        tree_links: TreeLinks | None,
        deep: _DeepFeatures | None = None,
        linear: Stretches | None = None,
    ) -> Tensor:
        """Hidden states (B, N, H)."""
        num_tokens = embeddings.shape[1]
        if multiple := self._row_multiple(part):
            row = embeddings, position_ids, part, attention_mask
            embeddings, position_ids, part, attention_mask = fill_row(*row, multiple)
        # The default of use_cache makes a cache, and with it a leak.
        inputs: dict[str, Any] = {"inputs_embeds": embeddings, "position_ids": position_ids, "use_cache": False}
        if deep is not None:
            inputs["deep_features"] = deep
        if part.cu_seqlens is None:
            hidden = self.language_model(**inputs, attention_mask=attention_mask).last_hidden_state
        else:
            assert part.max_seqlen is not None, "as of any pack"
            # Stands for a finished 4D mask, which packed attention does not read: without one transformers asks the
            # device whether positions restart, before it asks us for a mask.
            mask = embeddings.new_zeros((1, 1, 1, 1))
            with packed_row(part.cu_seqlens, part.max_seqlen, self.sequence_group, tree_links, linear) as names:
                hidden = self.language_model(**inputs, attention_mask=mask, **names).last_hidden_state
        return hidden[:, :num_tokens]

    def _row_multiple(self, part: RowSlice) -> int | None:
        """What the number of tokens is filled up to a multiple of; None: it stays as it is."""
        if self.is_compiled and part.cu_seqlens is not None and self.sequence_group is None and self.routing is None:
            return MULTIPLE
        return FP8_MULTIPLE if self.fp8 else None

    def _add_loss(
        self,
        output: PackedOutput,
        hidden: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        loss_normalizer: Tensor | float | None,
        num_loss_tokens: int | None,
        part: RowSlice,
    ) -> None:
        """The weighted loss, or without `weights` the log-probabilities, and the sums that go with either."""
        targets = part.take(targets.reshape(-1), IGNORE_INDEX)
        positions = true_positions(targets != IGNORE_INDEX, num_loss_tokens)
        self.head.share_with_zero3()
        labelled = hidden.reshape(-1, hidden.shape[-1]).index_select(0, positions), targets[positions]
        if weights is None:
            output.target_logprobs, losses = self.head(*labelled, None)
        else:
            weights = weights.reshape(-1)
            if loss_normalizer is None:
                loss_normalizer = weights.sum()
            weights = part.take(weights, 0.0)
            weighted, losses = self.head(*labelled, weights[positions])
            output.loss = normalized(weighted, loss_normalizer)
            output.weighted_sum, output.weight_sum = weighted.detach(), weights.sum()
        output.ce_sum = losses.sum()
        output.target_losses = losses
        output.target_positions = part.in_row(positions)
        output.num_targets = torch.full((), len(positions), device=hidden.device)


def true_positions(mask: Tensor, count: int | None) -> Tensor:
    """Indices (M,) int64 where `mask` (n,) is true.

    Args:
        count: M where it is known on the host: a CUDA device then checks it without being waited for,
            and stops the run if it is wrong.

    Raises:
        ValueError: `count` is wrong, on a CPU.
    """
    if count is None or mask.device.type != "cuda":
        positions = mask.nonzero().squeeze(1)
        if count is not None and len(positions) != count:
            raise ValueError(f"the batch was counted to hold {count} of these tokens, it holds {len(positions)}")
        return positions
    torch._assert_async(mask.sum() == count)
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=mask.device)
    return torch.nonzero_static(mask, size=count, fill_value=0).squeeze(1)


def _check_shapes(
    input_ids: Tensor, position_ids: Tensor | None, grid_positions: bool, **others: Tensor | None
) -> None:
    if input_ids.ndim != 2:
        raise ValueError(f"input_ids must be (1, N) or (B, L), is {tuple(input_ids.shape)}")
    shape = tuple(input_ids.shape)
    for name, tensor in others.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, input_ids is {shape}: they must agree")
    if position_ids is not None and position_ids.shape != ((3, *shape) if grid_positions else shape):
        rule = " with three axes before: collate with grid_positions=True" if grid_positions else ""
        raise ValueError(f"position_ids is {tuple(position_ids.shape)}, input_ids is {shape}: they must agree" + rule)
