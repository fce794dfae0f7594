"""Our policies beside a plain loop and a first-fit-decreasing over the same window, on real lengths.

    python benchmarks/packing.py [LENGTHS.csv] [--budgets 8192/40 16384/48 32768/96 8192/24] [--buffer 64]

One lane, the file's order, the whole finite stream with its last packs. "bound" is the highest lower bound of
packing/bounds.py. First-fit-decreasing packs each window of `--buffer` records by itself.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from internvl_pack.errors import SampleError
from internvl_pack.packing.bounds import LowerBounds
from internvl_pack.packing.budget import Budget
from internvl_pack.packing.packer import LanePacker
from internvl_pack.packing.split import split
from internvl_pack.records import Record, Span

POLICIES = ("next_fit", "greedy", "subset_sum")


@dataclass
class Result:
    packs: int
    microseconds: float  # CPU time a sample
    longest_wait: int  # arrivals between a sample and its pack


def fragments_of(path: str, budget: Budget) -> list:
    """The file's samples as fragments; what cannot be cut (an image over the budget) is left out."""
    out = []
    with open(path, encoding="utf-8") as file:
        for position, row in enumerate(csv.DictReader(file)):
            tokens, tiles = int(row["num_tokens"]), int(row["num_tiles"])
            images = min(int(row.get("num_images") or 0), tiles)
            spans = [Span(tokens - 256 * tiles)] if tokens > 256 * tiles else []
            share = [tiles // images + (i < tiles % images) for i in range(images)] if images else []
            spans += [Span(256 * n, n) for n in share]
            try:
                out += split(Record(str(position), tokens, tiles, spans=tuple(spans)), position, budget)
            except SampleError:
                continue
    return out


def run_policy(fragments: list, budget: Budget, policy: str, buffer_size: int) -> Result:
    packer = LanePacker(budget, policy=policy, buffer_size=buffer_size)
    arrived = {f.key: number for number, f in enumerate(fragments)}
    packs = longest = given = 0
    started = time.process_time()
    while given < len(fragments) or packer.waiting:
        while given < len(fragments) and not packer.full:
            packer.add(fragments[given])
            given += 1
        packs += 1
        for fragment in packer.pop():
            longest = max(longest, given - 1 - arrived[fragment.key])
    return Result(packs, 1e6 * (time.process_time() - started) / len(fragments), longest)


def run_first_fit_decreasing(fragments: list, budget: Budget, window: int) -> Result:
    packs = 0
    started = time.process_time()
    for start in range(0, len(fragments), window):
        open_packs: list[list[int]] = []
        for f in sorted(fragments[start : start + window], key=lambda f: -f.num_tokens):
            for pack in open_packs:
                if pack[0] + f.num_tokens <= budget.max_tokens and pack[1] + f.num_tiles <= budget.max_tiles:
                    pack[0] += f.num_tokens
                    pack[1] += f.num_tiles
                    break
            else:
                open_packs.append([f.num_tokens, f.num_tiles])
        packs += len(open_packs)
    return Result(packs, 1e6 * (time.process_time() - started) / len(fragments), window)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lengths", nargs="?", default=str(Path(__file__).with_name("real_mix_a.csv")))
    parser.add_argument("--budgets", nargs="+", default=["8192/40", "16384/48", "32768/96", "8192/24"])
    parser.add_argument("--buffer", type=int, default=64)
    args = parser.parse_args()
    print(f"| budget | bound | policy | packs | packs / bound | us a sample | longest wait |\n|{' --- |' * 7}")
    for name in args.budgets:
        tokens, tiles = map(int, name.split("/"))
        budget = Budget(tokens, tiles)
        fragments = fragments_of(args.lengths, budget)
        bounds = LowerBounds(budget)
        for fragment in fragments:
            bounds.add(fragment.num_tokens, fragment.num_tiles)
        bound = bounds.best()
        results = {policy: run_policy(fragments, budget, policy, args.buffer) for policy in POLICIES}
        results[f"first_fit_decreasing of {args.buffer}"] = run_first_fit_decreasing(fragments, budget, args.buffer)
        for policy, r in results.items():
            ratio = f"{r.packs / bound:.4f}"
            print(f"| {name} | {bound} | {policy} | {r.packs} | {ratio} | {r.microseconds:.1f} | {r.longest_wait} |")


if __name__ == "__main__":
    main()
