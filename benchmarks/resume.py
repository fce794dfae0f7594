"""What order and resume cost: a look-up of the permutation, the saved state, and coming back.

    python benchmarks/resume.py [--lanes 64] [--buffer 64] [--rows 2000000]

Text-only rows written to a temporary folder, one process. "late" resumes with every cursor at 90 % of the
data; restoring reads the records that wait again and nothing else, so it should cost what "early" costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from internvl_pack import EncodeConfig, PackedDataset, PackingConfig, build_loader
from internvl_pack.sources.order import Permutation
from internvl_pack.tiny import tiny_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--buffer", type=int, default=64)
    parser.add_argument("--rows", type=int, default=2_000_000)
    args = parser.parse_args()

    for n in (10**6, 10**9):
        print(f"permutation of {n:.0e}: {1e6 * lookup_seconds(n):.1f} us a look-up")

    with tempfile.TemporaryDirectory() as folder:
        meta = write_rows(Path(folder), args.rows)
        tokenizer = tiny_tokenizer(["question answer 0123456789"])
        config = PackingConfig(
            max_packed_tokens=4096, num_images_expected=40, num_lanes=args.lanes, max_buffer_size=args.buffer
        )

        def new_loader():
            return build_loader(PackedDataset.from_meta(meta, tokenizer, config, encode=EncodeConfig()))

        loader = new_loader()
        batches = iter(loader)
        for _ in range(2 * args.lanes):
            next(batches)
        early = loader.state_dict()
        size = len(json.dumps(early))
        print(f"state of {args.lanes} lanes x {args.buffer} records: {size:,} bytes, {size / args.lanes:,.0f} a lane")
        late = moved(early, int(args.rows * 0.9) // args.lanes, loader.packed_dataset)
        for name, state in (("early", early), ("late", late)):
            print(
                f"resume {name}: {statistics.median(restore_seconds(new_loader, state) for _ in range(3)):.2f} s "
                "to the first batch, sources already open"
            )


def lookup_seconds(n: int, lookups: int = 50_000) -> float:
    permutation = Permutation(n, seed=1)
    started = time.perf_counter()
    for k in range(lookups):
        permutation[k]
    return (time.perf_counter() - started) / lookups


def restore_seconds(new_loader, state) -> float:
    loader = new_loader()
    started = time.perf_counter()
    loader.load_state_dict(state)
    next(iter(loader))
    return time.perf_counter() - started


def moved(state: dict, samples: int, dataset: PackedDataset) -> dict:
    """The same state further on: every lane's cursor and what waits in it, `samples` positions of the lane later."""
    state = json.loads(json.dumps(state))
    lanes = len(state["lanes"])
    mixture = dataset.mixture(0)
    for lane in state["lanes"].values():
        lane["cursor"] += samples
        lane["packer"]["waiting"] = [[p + samples * lanes, i] for p, i in lane["packer"]["waiting"]]
        rows = [mixture.locate(position)[1] for position, _ in lane["packer"]["waiting"]]
        records = [dataset.encoder.encode(dataset.sources[0].read(row), dataset.specs[0]).record for row in rows]
        lane["extents"] = [[record.num_tokens, record.num_tiles] for record in records]
    return state


def write_rows(folder: Path, rows: int) -> Path:
    with open(folder / "rows.jsonl", "w", encoding="utf-8") as lines:
        for i in range(rows):
            answer = "answer " * (1 + i * 7919 % 60)
            lines.write(
                f'{{"conversations":[{{"from":"human","value":"question {i}"}},{{"from":"gpt","value":"{answer}"}}]}}\n'
            )
    meta = folder / "meta.json"
    meta.write_text(json.dumps({"rows": {"root": "", "annotation": "rows.jsonl", "repeat_time": 1}}))
    return meta


if __name__ == "__main__":
    main()
