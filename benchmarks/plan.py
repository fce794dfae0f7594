"""Planning of a preset from a table of lengths: seconds, peak memory and fill.

    python benchmarks/plan.py --lengths lengths.csv --samples 1000000 --workers 2

The lengths are drawn from a file with the columns num_tokens, num_tiles and num_loss_tokens, tokens varied by up to 5 %
so that they do not repeat. Measuring the rows of real data comes before this and is not in the figures.
"""

from __future__ import annotations

import argparse
import csv
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from internvl_pack.config import PackingConfig
from internvl_pack.errors import SampleError
from internvl_pack.packing.offline import OFFLINE_POLICIES
from internvl_pack.planning import Planner, plan, write_preset
from internvl_pack.records import Record
from internvl_pack.sources.mixture import MixturePart

OVERSIZE_DETAIL = "an image cannot be cut without its spans"


class LengthTable:
    """Lengths in a file of int32 (samples, 3); stands for a scan."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lengths = np.load(path, mmap_mode="r")

    def __getstate__(self) -> Path:
        return self.path

    def __setstate__(self, path: Path) -> None:
        self.__init__(path)  # type: ignore[misc]

    def lengths(self, which: int, row: int) -> tuple[int, int, int]:
        tokens, tiles, loss = self._lengths[row].tolist()
        return tokens, tiles, loss

    def record(self, which: int, row: int, sample_id: str) -> Record:
        tokens, tiles, loss = self.lengths(which, row)
        if tiles:
            raise SampleError("oversized_dropped", OVERSIZE_DETAIL)
        return Record(sample_id, tokens, tiles, loss)


class Ids:
    def sample_id(self, row: int) -> str:
        return f"synthetic/{row}"

    origin = sample_id


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", required=True, help="CSV of measured lengths")
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max_packed_tokens", type=int, default=8192)
    parser.add_argument("--num_images_expected", type=int, default=40)
    parser.add_argument("--packing_policy", default="subset_sum")
    parser.add_argument("--num_lanes", type=int, default=64)
    args = parser.parse_args()
    policy = args.packing_policy if args.packing_policy in OFFLINE_POLICIES else None
    options: dict[str, Any] = {} if policy else {"packing_policy": args.packing_policy}
    config = PackingConfig(
        max_packed_tokens=args.max_packed_tokens,
        num_images_expected=args.num_images_expected,
        num_lanes=args.num_lanes,
        **options,
    )
    with tempfile.TemporaryDirectory() as folder:
        table = make_lengths(Path(args.lengths), args.samples, Path(folder) / "lengths.npy")
        parts = [MixturePart(name="synthetic", num_rows=args.samples)]
        planner = Planner(table, parts, [Ids()], config, policy)
        out = Path(folder) / "preset"
        started = time.perf_counter()
        for _ in plan(planner, {"benchmark": True}, out / "work", epochs=1, num_workers=args.workers):
            pass
        planned = time.perf_counter()
        facts = {"meta_sha256": "", "data": [], "encode": {}}
        content = write_preset(out, out / "work", config=config, policy=policy, epochs=1, facts=facts)
        written = time.perf_counter()
        size = sum(f.stat().st_size for f in out.glob("*.parquet"))
    figures = content["statistics"]
    own, children = (
        resource.getrusage(who).ru_maxrss / 2**20 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    print(f"{args.samples:,} samples, {args.packing_policy}, {args.workers} workers, {args.num_lanes} lanes")
    print(
        f"planned in {planned - started:.1f} s, joined in {written - planned:.1f} s, {size / 2**20:.0f} MiB of preset"
    )
    print(f"peak memory: {own:.2f} GiB in the main process, {children:.2f} GiB in the largest worker")
    print(
        f"packs {figures['packs']:,}, over the bound {figures['packs_over_bound']:.4f}, token fill "
        f"{figures['token_fill']:.2%}, tile fill {figures['tile_fill']:.2%}, refused {figures['refused']}"
    )


def make_lengths(source: Path, samples: int, path: Path) -> LengthTable:
    with open(source, encoding="utf-8") as file:
        rows = [tuple(int(r[k]) for k in ("num_tokens", "num_tiles", "num_loss_tokens")) for r in csv.DictReader(file)]
    rng = np.random.default_rng(0)
    lengths = np.array(rows, np.int32)[rng.integers(0, len(rows), samples)]
    lengths[:, 0] = np.maximum(2, lengths[:, 0] * rng.uniform(0.95, 1.05, samples))
    np.save(path, lengths)
    return LengthTable(path)


if __name__ == "__main__":
    main()
