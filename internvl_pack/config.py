"""`PackingConfig`: the options that decide which samples share a row."""

from __future__ import annotations

import logging
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Any

from .errors import UserError
from .packing.budget import Budget, Room
from .packing.cost import CostModel
from .packing.split import OVERSIZE, split
from .records import Fragment, Record

if TYPE_CHECKING:
    from .encode.sample import Encoder

logger = logging.getLogger(__name__)

ON_ERROR = ("skip", "stop")
# Options of earlier releases: one plan has no lanes, and its step groups are of like cost by themselves.
NOT_NEEDED = ("num_lanes", "balance_reservoir")

_NO_EFFECT_ON_PACKS = ("on_error", "max_bad_fraction", "survey_dir", *NOT_NEEDED)


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """What decides which samples share a row. A saved run can only go on with the same values.

    Attributes:
        max_packed_tokens: tokens of a row.
        num_images_expected: tiles of a row, thumbnails included (InternVL's name).
        max_seq_length: tokens of one segment; longer samples follow `oversize`. None: `max_packed_tokens`.
        max_buffer_size: records of look-ahead.
        packing_policy: `subset_sum`, `greedy` or `next_fit`; see packing/.
        oversize: `split`, `truncate`, `drop` or `error`.
        repeat_system_prompt: fragments after the first begin with the sample's system turn, untrained.
        max_attention_cost: sum of squared segment lengths of a row, or None.
        pad_to_multiple_of: tokens; each segment's length is rounded up to it inside the budget.
        cost_model: whose operations packs are balanced by: a size (`1B` to `78B`) or a model's config.json.
        packing: False gives one sample a row, for the padded comparison.
        seed: of the order.
        shuffle_buffer_size: samples shuffled together in an order that reads shard after shard, for slow disks and
            shards far away; None shuffles all data at once.
        shuffle, replacement, use_data_resampling: see order/mixture.py.
        on_error: `skip` counts a bad sample and goes on, `stop` ends the run with its reason.
        max_bad_fraction: the share of bad samples above which the run stops.
        survey_dir: folder of the surveyed lengths; None: INTERNVL_PACK_CACHE, or the user's cache.
        num_lanes, balance_reservoir: accepted and not needed any more.
    """

    max_packed_tokens: int = 8192
    num_images_expected: int = 40
    max_seq_length: int | None = None
    max_buffer_size: int = 64
    packing_policy: str = "subset_sum"
    oversize: str = "split"
    repeat_system_prompt: bool = False
    max_attention_cost: int | None = None
    pad_to_multiple_of: int = 1
    cost_model: str = "1B"
    packing: bool = True
    seed: int = 42
    shuffle: bool = True
    shuffle_buffer_size: int | None = None
    replacement: bool = False
    use_data_resampling: bool = False
    on_error: str = "skip"
    max_bad_fraction: float = 1.0
    survey_dir: str | None = None
    num_lanes: int | None = None
    balance_reservoir: int | None = None

    def __post_init__(self) -> None:
        if self.oversize not in OVERSIZE:
            raise UserError(f"oversize {self.oversize!r} is unknown: use one of {', '.join(OVERSIZE)}")
        if self.on_error not in ON_ERROR:
            raise UserError(f"on_error {self.on_error!r} is unknown: use one of {', '.join(ON_ERROR)}")
        if self.max_buffer_size < 1:
            raise UserError(f"max_buffer_size is {self.max_buffer_size}: give at least 1 record of look-ahead")
        if self.max_seq_length is not None and self.max_seq_length < 1:
            raise UserError(f"max_seq_length is {self.max_seq_length}: give at least 1 token")
        if self.shuffle_buffer_size is not None:
            if self.shuffle_buffer_size < 1:
                raise UserError(f"shuffle_buffer_size is {self.shuffle_buffer_size}: give at least 1 sample")
            if self.replacement:
                raise UserError(
                    "shuffle_buffer_size with replacement: samples that are drawn anew each time lie anywhere; leave "
                    "one of the two out"
                )
        for name in NOT_NEEDED:
            if getattr(self, name) is not None:
                logger.warning("%s is not needed any more: all readers follow one plan, leave it out", name)
                object.__setattr__(self, name, None)
        if not 0.0 <= self.max_bad_fraction <= 1.0:
            raise UserError(f"max_bad_fraction is {self.max_bad_fraction}: give a share between 0 and 1")
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
        return options | {"cost_model": list(astuple(CostModel.from_name(self.cost_model)))}  # its file may move

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
