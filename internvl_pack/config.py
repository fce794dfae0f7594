"""The options of rows: which samples share one (`PackingConfig`), and how it is laid out (`RowOptions`)."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .errors import UserError
from .options import check_options, option
from .packing.budget import Budget, Room
from .packing.cost import CostModel
from .packing.policies import POLICIES
from .packing.split import OVERSIZE, split
from .records import Fragment, Record

if TYPE_CHECKING:
    from .encode.sample import Encoder

logger = logging.getLogger(__name__)

ON_ERROR = ("skip", "stop")
LOSS_REDUCTIONS = ("token", "sample", "square")  # batch/loss_weights.py has their formulas
# Options of earlier releases: one plan has no lanes, and its step groups are of like cost by themselves.
NOT_NEEDED = ("num_lanes", "balance_reservoir")

_NO_EFFECT_ON_PACKS = ("on_error", "max_bad_fraction", "survey_dir", *NOT_NEEDED)


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """What decides which samples share a row. A saved run can only go on with the same values."""

    max_packed_tokens: int = option(8192, "Token budget of a row.", unit="tokens", at_least=1, page="packing.md")
    num_images_expected: int = option(
        40,
        "Tile budget of a row, thumbnails included; with models of native resolution its image tokens, as many as "
        "max_packed_tokens by default.",
        unit="tiles",
        at_least=0,
        from_checkpoint=True,
    )
    max_seq_length: int | None = option(
        None,
        "Tokens of one sample at most; longer ones follow --oversize. Default: the token budget of a row.",
        unit="tokens",
        at_least=1,
    )
    max_buffer_size: int = option(64, "Look-ahead of the packer, without pixels.", unit="records", at_least=1)
    packing_policy: str = option("subset_sum", "How packs are chosen.", choices=POLICIES, page="packing.md")
    oversize: str = option(
        "split",
        "A sample that exceeds a budget: split (at turns), truncate, drop (counted) or error (stops the run).",
        choices=OVERSIZE,
    )
    repeat_system_prompt: bool = option(
        False, "Begin each later part of a split sample with its system turn, untrained."
    )
    share_prefix: bool = option(
        False,
        "Compute what neighbouring rows of a dataset begin with once: their images, or the same prompt.",
        page="packing.md#shared-beginnings",
    )
    max_attention_cost: int | None = option(
        None,
        "Sum of squared sample lengths of a row at most: bounds the slowest step. Default: no bound.",
        unit="tokens^2",
        at_least=1,
    )
    pad_to_multiple_of: int = option(
        1, "Round each sample's share of the budget up to a multiple of this.", unit="tokens", at_least=1
    )
    cost_model: str = option(
        "1B", "Whose operations the packs of a step are balanced by: a size from 1B to 78B, or a model's config.json."
    )
    packing: bool = option(True, "False: one sample a row, for the padded comparison.", flag="")
    seed: int = option(42, "Seed of the order.")
    shuffle: bool = option(True, "False: the order of the files.", flag="")
    shuffle_buffer_size: int | None = option(
        None,
        "Samples shuffled together in an order that reads shard after shard, for slow disks and remote shards. "
        "Default: all data is shuffled at once.",
        unit="samples",
        at_least=1,
        page="resume.md#the-order-of-an-epoch",
    )
    replacement: bool = option(
        False, "Draw samples with replacement by the datasets' weights, instead of each once an epoch."
    )
    use_data_resampling: bool = option(False, "Weigh datasets by the square root of their length.")
    on_error: str = option(
        "skip", "A sample that cannot be used: skip (counted) or stop (ends the run).", choices=ON_ERROR
    )
    max_bad_fraction: float = option(
        1.0, "Stop when more than this share of the samples read could not be used.", at_least=0, at_most=1
    )
    survey_dir: str | None = option(
        None,
        "Folder of the surveyed lengths, which later runs use again. Default: INTERNVL_PACK_CACHE, or the user's "
        "cache.",
        page="packing.md",
    )
    num_lanes: int | None = option(None, "Accepted and not needed any more.", flag="")
    balance_reservoir: int | None = option(None, "Accepted and not needed any more.", flag="")

    def __post_init__(self) -> None:
        check_options(self)
        if self.shuffle_buffer_size is not None and self.replacement:
            raise UserError(
                "shuffle_buffer_size with replacement: samples that are drawn anew each time lie anywhere; leave "
                "one of the two out"
            )
        for name in NOT_NEEDED:
            if getattr(self, name) is not None:
                logger.warning("%s is not needed any more: all readers follow one plan, leave it out", name)
                object.__setattr__(self, name, None)
        self.budget()

    def budget(self) -> Budget:
        """What a pack may hold."""
        return Budget(
            self.max_packed_tokens, self.num_images_expected, self.max_attention_cost, self.pad_to_multiple_of
        )

    @property
    def room(self) -> Room:
        """The largest sample that need not be cut."""
        budget = self.budget()
        limit = budget.max_segment_tokens if self.max_seq_length is None else self.max_seq_length
        return Room(min(budget.max_segment_tokens, limit), budget.max_tiles)

    def fingerprint(self) -> dict[str, Any]:
        """The options that packs depend on, by name, as JSON values."""
        options = {name: value for name, value in asdict(self).items() if name not in _NO_EFFECT_ON_PACKS}
        if not self.share_prefix:
            del options["share_prefix"]  # as before there was one
        return options | {"cost_model": CostModel.from_name(self.cost_model).numbers()}  # its file may move

    def cut(self, record: Record, position: int) -> list[Fragment]:
        """The fragments of a sample, by `oversize` and its options; see packing/split.py, which may refuse it."""
        return split(
            record,
            position,
            self.budget(),
            oversize=self.oversize,
            max_segment_tokens=self.max_seq_length,
            repeat_system_prompt=self.repeat_system_prompt,
        )


@dataclass(kw_only=True)
class RowOptions:
    """How a packed row is laid out and weighed: options of training that `preview` and `stats` look at, too."""

    loss_reduction: str = option(
        "token",
        "A supervised token of a sample with n of them weighs 1 (token), 1/n (sample) or 1/sqrt(n) (square).",
        choices=LOSS_REDUCTIONS,
    )
    strict_mode: bool = option(
        False, "Pad each row to the token budget by one isolated, unlabelled segment: rows of one static shape."
    )
    pad_seq_to_mult: int = option(
        1,
        "Pad each sample of a row to a multiple of this, as context parallelism and FP8 want.",
        unit="tokens",
        at_least=1,
        page="offline.md#alignment",
    )


def check_budget(config: PackingConfig, encoder: Encoder) -> None:
    """Check that at least one tile fits into a row.

    Raises:
        UserError: none does; names the option.
    """
    needed = encoder.config.tokens_per_tile + 2
    if config.max_packed_tokens < needed:
        raise UserError(
            f"max_packed_tokens {config.max_packed_tokens} is smaller than one tile with its borders: "
            f"raise it to {needed} tokens or more"
        )
    if config.max_seq_length is not None and config.max_seq_length < needed:
        raise UserError(
            f"max_seq_length {config.max_seq_length} is smaller than one tile with its borders: "
            f"raise it to {needed} tokens or more, or leave it out"
        )
    if config.num_images_expected < 1:
        raise UserError(f"num_images_expected is {config.num_images_expected}: give at least 1 tile")
