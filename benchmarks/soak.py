"""Whether a long run stays flat: memory, descriptors and time a batch over many epochs with reader processes.

    python benchmarks/soak.py [--batches 100000] [--epochs 10] [--workers 2] [--out soak.json]

Text and small images written to a temporary folder, as many as fill the epochs. Every `--every` batches the private
memory (USS) of this process and of its readers, their open descriptors and the processor time a batch are taken. Exit
code 1 where the last third of the run lies above the second third by more than the allowed shares below: the first
third fills caches.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from PIL import Image

from internvl_pack import EncodeConfig, PackedDataset, PackingConfig, build_loader
from internvl_pack.testing.tiny import WORDS, conversation_texts, tiny_tokenizer

# Shares by which the median of the last third may lie above that of the second.
ALLOWED = {"uss_mb": 0.03, "readers_uss_mb": 0.05, "descriptors": 0.02, "cpu_ms_a_batch": 0.25}
SAMPLES_A_BATCH = 2.02  # as rows of text of these lengths are packed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=100_000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--out", type=Path, help="write all measurements there, as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        count = round(SAMPLES_A_BATCH * args.batches / args.epochs)
        meta = write_rows(Path(folder), count, random.Random(0), images=64, words=(30, 60))
        taken = run(meta, args.batches, args.epochs, args.workers, args.every)
    if args.out:
        args.out.write_text(json.dumps(taken))
    growth = growth_of(taken)
    print(json.dumps({"batches": taken[-1]["batch"], "epochs": taken[-1]["epoch"] + 1, "last": taken[-1]} | growth))
    too_much = [name for name, allowed in ALLOWED.items() if growth["growth"][name] > allowed]
    print("flat" if not too_much else f"not flat: {', '.join(too_much)}")
    return int(bool(too_much))


def write_rows(
    folder: Path, count: int, draw: random.Random, *, images: int, words: tuple[int, int], long_ones: bool = False
) -> Path:
    """A meta file over rows of text, a third of them with one of `images` images of one colour, in three shapes.

    Args:
        words: of a question and of an answer at most.
        long_ones: with a system prompt, and one in forty has ten turns, so that it takes several packs.
    """
    for number in range(images):
        size = draw.choice(((56, 56), (112, 56), (56, 168)))
        Image.new("RGB", size, (240 * number // images, 255 - number, 90)).save(folder / f"{number}.png")
    with open(folder / "rows.jsonl", "w", encoding="utf-8") as lines:
        for number in range(count):
            record: dict[str, Any] = {"id": number, "conversations": []} | (
                {"system": "Be brief."} if long_ones else {}
            )
            for turn in range(10 if long_ones and number % 40 == 7 else 1):
                question, answer = (" ".join(draw.choices(WORDS, k=draw.randint(1, most))) for most in words)
                if number % 3 == 0 and turn == 0:
                    record["image"] = f"{draw.randrange(images)}.png"
                    question = f"<image>\n{question}"
                record["conversations"] += [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
            lines.write(json.dumps(record) + "\n")
    meta = folder / "meta.json"
    meta.write_text(json.dumps({"rows": {"root": str(folder), "annotation": "rows.jsonl"}}))
    return meta


def run(meta: Path, num_batches: int, num_epochs: int, num_workers: int, every: int) -> list[dict[str, float]]:
    """Iterate as a training loop does, and measure; ends with the epochs or after `num_batches`."""
    config = PackingConfig(max_packed_tokens=512, num_images_expected=24)
    encode = EncodeConfig(
        image_size=56, tokens_per_tile=4, max_dynamic_patch=6, dynamic_image_size=True, use_thumbnail=True
    )
    tokenizer = tiny_tokenizer(conversation_texts(meta.parent / "rows.jsonl")[:2000])
    loader = build_loader(PackedDataset.from_meta(meta, tokenizer, config, encode=encode), num_workers=num_workers)
    taken, batch_number, before = [], 0, (0, time.monotonic(), 0.0)
    for epoch in range(num_epochs):
        loader.set_epoch(epoch)
        for _ in loader:
            batch_number += 1
            if batch_number % every == 0:
                now = measured()
                cpu = now.pop("cpu_s")
                batches, seconds = batch_number - before[0], time.monotonic() - before[1]
                spent = max(0.0, cpu - before[2])  # of readers that have ended it is lost
                more = {"ms_a_batch": 1e3 * seconds / batches, "cpu_ms_a_batch": 1e3 * spent / batches}
                taken.append({"batch": batch_number, "epoch": epoch} | now | more)
                before = (batch_number, time.monotonic(), cpu)
                print(json.dumps(taken[-1]), flush=True)
            if batch_number >= num_batches:
                return taken
    return taken


def measured() -> dict[str, float]:
    """Of this process and its readers: private memory, descriptors, processor time so far."""
    here = psutil.Process()
    readers = [child for child in here.children(recursive=True) if child.is_running()]
    uss = [process.memory_full_info().uss / 1e6 for process in (here, *readers)]
    times = [sum(process.cpu_times()[:2]) for process in (here, *readers)]
    return {
        "uss_mb": uss[0],
        "readers_uss_mb": sum(uss[1:]),
        "readers": len(readers),
        "descriptors": sum(process.num_fds() for process in (here, *readers)),
        "cpu_s": sum(times),
    }


def growth_of(taken: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """{"growth": share by which the median of each figure rose from the second third of the run to the last}."""
    third = len(taken) // 3
    if not third:
        raise SystemExit("too few measurements: lower --every")
    growth = {}
    for name in ALLOWED:
        before, after = (
            statistics.median(each[name] for each in part) for part in (taken[third:-third], taken[-third:])
        )
        growth[name] = round(after / before - 1, 4) if before else 0.0
    return {"growth": growth}


if __name__ == "__main__":
    sys.exit(main())
