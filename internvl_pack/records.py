"""The words of the package as frozen dataclasses: what planning knows, without pixels or tensors.

sample    one conversation with its images, as the user wrote it
record    what planning knows of a sample: id, tokens, tiles, where it may be cut
fragment  a part of a sample after splitting; most samples are one fragment
segment   a fragment's place in a pack: one attention span, positions restart at 0
pack      the segments that share one row
tile      one image_size x image_size crop, one row of `pixel_values`; a thumbnail is a tile
tree      a sample of several answers: their common beginning with its images, the prefix, and a branch for each answer
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Span:
    """A run of a sample's tokens as splitting sees it.

    `num_tiles > 0` marks an image's block (`<img>`, context tokens, `</img>`), which is never cut.
    `ends_turn` marks a turn border after the span, where a cut is preferred.
    """

    num_tokens: int
    num_tiles: int = 0
    ends_turn: bool = False


class Branch(NamedTuple):
    """One continuation of a tree's prefix.

    It begins with the last token of what its answer follows, untrained, and the prefix ends before it: so its first
    answer token is predicted within the branch, as any other.

    Attributes:
        num_tokens: that first token included.
        num_loss_tokens: supervised targets of prefix and branch, those that the branch would have alone.
        weight: of its tokens in the loss.
        reward: as the data gives it, for reinforcement learning.
        sample_id: of the row that it was, where rows were joined to a tree; else "".
    """

    num_tokens: int
    num_loss_tokens: int
    weight: float = 1.0
    reward: float | None = None
    sample_id: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """What planning knows of a sample.

    `spans` cover its tokens in order (their sums are `num_tokens` and `num_tiles`); empty means
    one run of text without tiles. The first `num_system_tokens` tokens are the system turn.
    Of a tree the last tokens are its `branches`, before them its prefix with all tiles; a pair is not cut between them.

    `num_tile_pairs` sums over its pictures the squares of their tiles, in families in which the tiles of a picture see
    each other; 0 in others.
    """

    sample_id: str
    num_tokens: int
    num_tiles: int = 0
    num_loss_tokens: int = 0
    spans: tuple[Span, ...] = ()
    num_system_tokens: int = 0
    branches: tuple[Branch, ...] = ()
    is_pair: bool = False
    num_tile_pairs: int = 0

    @property
    def is_joined(self) -> bool:
        """Whether it is a tree of rows that are samples of their own."""
        return any(branch.sample_id for branch in self.branches)

    @property
    def num_prefix_tokens(self) -> int:
        """Of a tree, tokens before its branches."""
        return self.num_tokens - sum(branch.num_tokens for branch in self.branches)


class Fragment(NamedTuple):
    """Part `index` of `count` of a sample: tokens [token_start, token_stop), tiles [tile_start, tile_stop).

    `position` is the sample's place in the epoch's order; (position, index) identifies the fragment within an epoch.
    `num_prefix_tokens` counts the system turn's tokens repeated before it as unsupervised context; of a tree, whose
    parts hold some of its branches each, the tokens of its prefix, whose tiles each part has, too.
    `num_context_tokens` is 1 where the cut falls inside a run of text: the token before the cut is
    repeated, unsupervised, so that the first token's target has something to be predicted from.

    A part of a sample (`count` above 1) lies in the sample's spans [span_start, span_stop), which have `span_tokens`
    tokens, `span_offset` of them before the part's own: enough to encode it without the rest of the sample.
    `num_loss_tokens` are the supervised ones of the whole sample, which weigh its tokens in the loss.

    Of a tree it has `num_branches` of the branches. Each alone, they would take `num_saved_tokens` more, and
    `num_unseen_pairs` pairs of its tokens (a, b) do not see each other: those of different branches, both orders.
    `num_tile_pairs` are its own, as a `Record` has them.
    """

    position: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody asks a fragment for
    count: int  # type: ignore[assignment]
    token_start: int
    token_stop: int
    tile_start: int
    tile_stop: int
    num_prefix_tokens: int = 0
    num_context_tokens: int = 0
    span_start: int = 0
    span_stop: int = 0
    span_offset: int = 0
    span_tokens: int = 0
    num_loss_tokens: int = 0
    num_branches: int = 0
    num_saved_tokens: int = 0
    num_unseen_pairs: int = 0
    num_tile_pairs: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens it takes in a row, repeated ones included, before any alignment."""
        return self.num_prefix_tokens + self.num_context_tokens + self.token_stop - self.token_start

    @property
    def num_tiles(self) -> int:
        return self.tile_stop - self.tile_start

    @property
    def key(self) -> tuple[int, int]:
        return self.position, self.index


def whole(position: int, num_tokens: int, num_tiles: int, num_tile_pairs: int = 0) -> Fragment:
    """The single fragment of a sample that is not split."""
    return Fragment(position, 0, 1, 0, num_tokens, 0, num_tiles, num_tile_pairs=num_tile_pairs)
