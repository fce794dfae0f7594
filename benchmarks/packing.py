"""Our policies beside a plain loop and a first-fit-decreasing over the same window, on real lengths.

    python benchmarks/packing.py [LENGTHS.csv] [--budgets 8192/40 16384/48 32768/96 8192/24] [--buffer 64] [--answers N]

One stream, the file's order, the whole finite stream with its last packs. "bound" is the highest lower bound of
packing/bounds.py. First-fit-decreasing packs each window of `--buffer` records by itself.

With `--answers N` every sample is a prefix tree of N answers, a pair at 2: its prefix has the sample's tiles and all of
its tokens but the supervised ones, each answer 0.5 to 1.5 times as many tokens as those (seeded), and one that begins
it. Trees over a budget are cut between answers, pairs over it are left out.

Without it, packing's share of the processor time: SAMPLES made samples are read, encoded and decoded to tiles, one JPEG
image each of as many tiles and texts of as many tokens as the file's samples have on average.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from internvl_pack.errors import SampleError
from internvl_pack.packing.bounds import LowerBounds
from internvl_pack.packing.budget import Budget
from internvl_pack.packing.packer import Packer
from internvl_pack.packing.split import split
from internvl_pack.records import Branch, Record, Span

POLICIES = ("next_fit", "greedy", "subset_sum")
SAMPLES = 40


@dataclass
class Result:
    packs: int
    microseconds: float  # CPU time a sample
    longest_wait: int  # arrivals between a sample and its pack


def cut(records: Iterable[Record], budget: Budget) -> list:
    """The samples as fragments; what cannot be cut (an image over the budget) is left out."""
    out = []
    for position, record in enumerate(records):
        with suppress(SampleError):
            out += split(record, position, budget)
    return out


def samples_of(rows: list[dict[str, str]]) -> Iterator[Record]:
    for row in rows:
        tokens, tiles = int(row["num_tokens"]), int(row["num_tiles"])
        images = min(int(row.get("num_images") or 0), tiles)
        spans = [Span(tokens - 256 * tiles)] if tokens > 256 * tiles else []
        spans += [Span(256 * n, n) for n in (tiles // images + (i < tiles % images) for i in range(images))]
        yield Record("", tokens, tiles, spans=tuple(spans))


def trees_of(rows: list[dict[str, str]], answers: int) -> Iterator[Record]:
    """The samples as trees, see the module's docstring."""
    rng = random.Random(0)
    for row in rows:
        trained, tiles = int(row["num_loss_tokens"]), int(row["num_tiles"])
        lengths = [1 + max(1, round(trained * rng.uniform(0.5, 1.5))) for _ in range(answers)]
        branches = tuple(Branch(n, n - 1) for n in lengths)
        tokens = int(row["num_tokens"]) - trained + sum(lengths)
        yield Record("", tokens, tiles, branches=branches, is_pair=answers == 2)


def run_policy(fragments: list, budget: Budget, policy: str, buffer_size: int) -> Result:
    packer = Packer(budget, policy=policy, buffer_size=buffer_size)
    arrived = {f.key: number for number, f in enumerate(fragments)}
    packs = longest = given = 0
    started = time.process_time()
    while given < len(fragments) or packer.waiting:
        while given < len(fragments) and not packer.full:
            packer.add(fragments[given])
            given += 1
        packs += 1
        for fragment in packer.pop()[1]:
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


def make_samples(folder: Path, tokens: float, tiles: float) -> Path:
    """A meta file of SAMPLES samples with about this many tokens and tiles each. The pictures are smooth with grain."""
    import numpy as np
    from PIL import Image

    rng = random.Random(0)
    noise = np.random.default_rng(0)
    columns = max(1, round(tiles) - 1)  # and the thumbnail
    with open(folder / "made.jsonl", "w", encoding="utf-8") as lines:
        for number in range(SAMPLES):
            coarse = noise.integers(0, 256, (12, 12 * columns, 3), dtype=np.uint8)
            picture = np.asarray(Image.fromarray(coarse).resize((448 * columns, 448), Image.Resampling.BICUBIC))
            grain = noise.integers(-8, 9, picture.shape)
            made = Image.fromarray(np.clip(picture + grain, 0, 255).astype(np.uint8))
            made.save(folder / f"{number}.jpg", quality=90)
            words = [rng.choice(("one", "two", "rows", "packs", "of", "the")) for _ in range(int(tokens))]
            half = len(words) // 2
            turns = [("human", "<image>\n" + " ".join(words[:half])), ("gpt", " ".join(words[half:]))]
            record = {
                "image": f"{number}.jpg",
                "conversations": [{"from": who, "value": text} for who, text in turns],
            }
            lines.write(json.dumps(record) + "\n")
    meta = {
        "made": {"root": ".", "annotation": "made.jsonl", "data_augment": False, "repeat_time": 1, "length": SAMPLES}
    }
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return folder / "meta.json"


def encode_and_decode(tokens: float, tiles: float) -> tuple[float, float, float]:
    """(seconds of processor time, tokens of text, tiles) of a made sample, the fastest of three runs."""
    from internvl_pack.samples import Samples
    from internvl_pack.testing.tiny import conversation_texts, tiny_tokenizer

    with tempfile.TemporaryDirectory() as name:
        meta = make_samples(Path(name), tokens, tiles)
        tokenizer = tiny_tokenizer(conversation_texts(Path(name) / "made.jsonl"))
        best = float("inf")
        for _ in range(3):
            samples = Samples.from_meta(meta, tokenizer)  # a new encoder remembers no text
            text = found = 0
            started = time.process_time()
            for row in range(SAMPLES):
                encoded = samples.encode(0, row)
                found += len(samples.encoder.decode(encoded))
                text += encoded.record.num_tokens - 256 * encoded.record.num_tiles
            best = min(best, time.process_time() - started)
    return best / SAMPLES, text / SAMPLES, found / SAMPLES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lengths", nargs="?", default=str(Path(__file__).with_name("real_mix_a.csv")))
    parser.add_argument("--budgets", nargs="+", default=["8192/40", "16384/48", "32768/96", "8192/24"])
    parser.add_argument("--buffer", type=int, default=64)
    parser.add_argument("--answers", type=int, default=0, help="answers of each sample; default: no trees")
    args = parser.parse_args()
    with open(args.lengths, encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    print(f"| budget | bound | policy | packs | packs / bound | us a sample | longest wait |\n|{' --- |' * 7}")
    dearest = 0.0
    for name in args.budgets:
        tokens, tiles = map(int, name.split("/"))
        budget = Budget(tokens, tiles)
        fragments = cut(trees_of(rows, args.answers) if args.answers else samples_of(rows), budget)
        bounds = LowerBounds(budget)
        for fragment in fragments:
            bounds.add(fragment.num_tokens, fragment.num_tiles)
        bound = bounds.best()
        results = {policy: run_policy(fragments, budget, policy, args.buffer) for policy in POLICIES}
        results[f"first_fit_decreasing of {args.buffer}"] = run_first_fit_decreasing(fragments, budget, args.buffer)
        for policy, r in results.items():
            ratio = f"{r.packs / bound:.4f}"
            print(f"| {name} | {bound} | {policy} | {r.packs} | {ratio} | {r.microseconds:.1f} | {r.longest_wait} |")
        dearest = max(dearest, results["subset_sum"].microseconds)
    if args.answers:
        return
    sizes = [(int(row["num_tokens"]), int(row["num_tiles"])) for row in rows]
    tiles = sum(v for _, v in sizes) / len(sizes)
    seconds, text, found = encode_and_decode(sum(max(0, t - 256 * v) for t, v in sizes) / len(sizes), tiles)
    print(
        f"\nA sample of {text:.0f} tokens of text and {found:.1f} tiles takes {seconds * 1e3:.2f} ms to read, encode "
        f"and decode; packing by subset_sum takes {dearest:.1f} us at most, {dearest / seconds / 1e6:.2%} of it"
    )


if __name__ == "__main__":
    main()
