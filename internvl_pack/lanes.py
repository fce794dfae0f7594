"""The arithmetic of lanes, ranks and workers. Pure; tested over whole grids.

A run has a fixed number of lanes L, logical streams of samples that each have a packer of their own.
Sample k of an epoch belongs to lane k mod L; pack g of the run's global sequence comes from lane
g mod L. Neither depends on how many ranks and workers read them.

    global packs      0   1   2   3   4   5   6   7 | 8 ...        L = 8, R = 2 ranks, W = 2 workers
    lane              0   1   2   3   4   5   6   7 | 0
    rank              0   1   0   1   0   1   0   1 | 0
    rank's batch      0   0   1   1   2   2   3   3 | 4            B = 1 pack a batch
    worker            0   0   1   1   0   0   1   1 | 0            a loader takes its workers in turn

With B packs a batch, a rank's batch j is its packs j*B .. j*B+B-1 of that sequence, and comes from
worker j mod W. Every lane then has one reader exactly when R * W * B divides L.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UserError


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Who reads which lane.

    `first_pack` is the global pack at which this run starts: 0, or what a saved run had delivered.
    `num_workers` is a loader's option: 0 means one reader in the main process.

    Raises:
        UserError: `num_lanes` is not divisible by ranks x workers x packs a batch.
    """

    num_lanes: int
    num_ranks: int = 1
    num_workers: int = 0
    packs_per_batch: int = 1
    first_pack: int = 0

    def __post_init__(self) -> None:
        for name in ("num_lanes", "num_ranks", "packs_per_batch"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        readers = self.num_ranks * self.num_readers * self.packs_per_batch
        if self.num_lanes % readers:
            choices = ", ".join(str(d) for d in divisors(self.num_lanes))
            raise UserError(
                f"num_lanes {self.num_lanes} is not divisible by {self.num_ranks} ranks x {self.num_readers} workers x "
                f"{self.packs_per_batch} packs a batch = {readers}: choose dataloader_num_workers (or ranks) so that "
                f"the product is one of {choices}"
            )

    @property
    def num_readers(self) -> int:
        """Readers a rank: its workers, or its main process."""
        return max(1, self.num_workers)

    @property
    def lanes_per_reader(self) -> int:
        return self.num_lanes // (self.num_ranks * self.num_readers)

    def reader_lanes(self, rank: int, worker: int) -> tuple[int, ...]:
        """Lanes of one reader in the order in which it hands out their packs, over and over.

        Raises:
            UserError: there is no such rank or worker.
        """
        if not (0 <= rank < self.num_ranks and 0 <= worker < self.num_readers):
            raise UserError(
                f"rank {rank}, worker {worker} is outside {self.num_ranks} ranks x {self.num_readers} workers"
            )
        lanes = []
        for turn in range(self.lanes_per_reader):
            batch, place = divmod(turn, self.packs_per_batch)
            rank_pack = (batch * self.num_readers + worker) * self.packs_per_batch + place
            lanes.append((self.first_pack + rank_pack * self.num_ranks + rank) % self.num_lanes)
        return tuple(lanes)


def packs_before(first_pack: int, lane: int, num_lanes: int) -> int:
    """Packs of `lane` among the global packs 0 .. first_pack-1."""
    return (first_pack - lane + num_lanes - 1) // num_lanes


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
