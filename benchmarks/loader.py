"""The loader on real data, one core: samples/s and tiles/s beside InternVL's way and beside bare decoding.

    python benchmarks/loader.py --meta META.json [--tokenizer DIR] [--runs 3] [--samples N]

    loader      PackLoader without workers: read, tokenise, pack, decode to uint8 tiles, collate
    plain loop  what InternVL's dataset does a sample: tokenise turn by turn, Pillow's decode and bicubic resize, crops,
                float32 tensor and normalise a tile
    bare        nothing but decoding and resizing the same images into uint8 tiles, by the loader's own decoders
    no tiles    the same with the results dropped: not even the tiles are written

They take turns, and the best run of each counts, in seconds of processor time: other work on the machine
disturbs them alike. Then one worker process at 16384 tokens and 48 tiles with 64 records of look-ahead: what goes
through its queue, and its peak memory. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import pickle
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

IMAGE_BLOCK = "<img>{}</img>"


def best_of(functions: dict[str, Callable[[], Any]], runs: int) -> dict[str, float]:
    """Seconds of processor time of each function's fastest run; they take turns."""
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(runs):
        for name, function in functions.items():
            start = time.process_time()
            function()
            best[name] = min(best[name], time.process_time() - start)
    return best


def plain_loop(sources, tokenizer, limit: int) -> Callable[[], None]:
    """A sample at a time as InternVL's LazySupervisedDataset prepares it (float32 tensors and all)."""
    import numpy as np
    import torch
    from PIL import Image

    from internvl_pack.encode.tiles import max_tiles_per_image, plan_grid

    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    std = torch.tensor([0.229, 0.224, 0.225])[:, None, None]

    def tiles_of(image: Image.Image, max_tiles: int) -> list[Image.Image]:
        grid = plan_grid(*image.size, max_tiles=max_tiles)
        whole = image.resize((448 * grid.columns, 448 * grid.rows))
        boxes = [(448 * c, 448 * r) for r in range(grid.rows) for c in range(grid.columns)]
        tiles = [whole.crop((x, y, x + 448, y + 448)) for x, y in boxes]
        return tiles + [image.resize((448, 448))] * grid.thumbnail

    def tensor_of(tile: Image.Image) -> torch.Tensor:
        pixels = torch.from_numpy(np.array(tile)).permute(2, 0, 1).contiguous()
        return (pixels.float().div(255) - mean) / std

    def prepare(raw) -> None:
        names = raw.data.get("image") or []
        names = [names] if isinstance(names, str) else names
        tiles: list[Image.Image] = []
        counts = []
        for name in names:
            image = Image.open(io.BytesIO(raw.resolve(name).read())).convert("RGB")
            found = tiles_of(image, max_tiles_per_image(12, len(names)))
            counts.append(len(found))
            tiles += found
        if tiles:
            torch.stack([tensor_of(tile) for tile in tiles])
        ids = []
        for turn in raw.data["conversations"]:
            text = turn["value"]
            while counts and "<image>" in text:
                text = text.replace("<image>", IMAGE_BLOCK.format("<IMG_CONTEXT>" * 256 * counts.pop(0)), 1)
            ids += tokenizer(f"<|im_start|>{turn['from']}\n{text}<|im_end|>\n", add_special_tokens=False).input_ids
        torch.tensor(ids)

    def run() -> None:
        for raw in rows_of(sources, limit):
            prepare(raw)

    return run


def rows_of(sources, limit: int):
    rows = [(source, row) for source in sources for row in range(len(source))]
    step = max(1, len(rows) // limit)
    return (source.read(row) for source, row in rows[::step][:limit])


def bare(dataset, rows) -> Callable[[], None]:
    """Decode each image into the tiles of its grid, in an array of its own."""
    from internvl_pack.encode.images import decode_tiles

    planned = [image for raw in rows for image in dataset.encoder.encode(raw, dataset.specs[0]).images]

    def run() -> None:
        for image in planned:
            decode_tiles(image.ref, image.grid, 448, size=image.size)

    return run


def no_tiles(dataset, rows) -> Callable[[], None]:
    """Decode each image and resize it to its grid and thumbnail; the result is dropped."""
    import torch
    from torch.nn.functional import interpolate

    from internvl_pack.encode.decoders import decode_rgb
    from internvl_pack.encode.headers import read_header

    work = []
    for raw in rows:
        encoded = dataset.encoder.encode(raw, dataset.specs[0])
        for image in encoded.images:
            header = read_header(image.ref.name, image.ref.read(), image.ref.read, 1 << 40)
            work.append((image.ref, header, image.grid))

    def run() -> None:
        for ref, header, grid in work:
            shape = (448 * grid.rows, 448 * grid.columns)
            if header.orientation >= 5:
                shape = shape[::-1]
            pixels, _ = decode_rgb(ref.name, ref.read(), header, shape[::-1])
            stored = torch.from_numpy(pixels).permute(2, 0, 1)[None]
            for wanted in [shape] + [(448, 448)] * grid.thumbnail:
                if stored.shape[2:] != wanted:
                    interpolate(stored, wanted, mode="bicubic", antialias=True)

    return run


def queue_and_memory(dataset) -> dict[str, float]:
    """One worker over an epoch: bytes of its batches by kind, and the most memory it held."""
    import torch

    from internvl_pack import build_loader

    loader = build_loader(dataset, num_workers=1, prefetch_factor=2)
    tensors = other = samples = tiles = batches = 0
    peak: dict[str, int] = {}
    for batch in loader:
        (worker,) = [p for p in multiprocessing.active_children() if p.pid is not None]
        peak = {**peak, **{k: max(v, peak.get(k, 0)) for k, v in memory_of(worker.pid).items()}}
        batches += 1
        samples += batch["num_samples"]
        tiles += batch["num_tiles"]
        tensors += sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor))
        other += len(pickle.dumps({k: v for k, v in batch.items() if not isinstance(v, torch.Tensor)}))
    return {
        "batches": batches,
        "MB_a_batch": tensors / batches / 1e6,
        "kB_a_batch_without_tensors": other / batches / 1e3,
        "bytes_a_tile": tensors / max(1, tiles),
        "worker_peak_MB": peak["VmHWM"] / 1e3,
        "worker_peak_MB_private": peak["private"] / 1e3,
        "parent_MB": memory_of(os.getpid())["VmHWM"] / 1e3,
    }


def memory_of(pid: int) -> dict[str, int]:
    """kB. VmHWM: the peak of all that is resident, shared or not; private: what is its own now."""
    status = Path(f"/proc/{pid}/status").read_text()
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    private = sum(int(found) for found in re.findall(r"Private_(?:Clean|Dirty):\s+(\d+)", rollup))
    return {"VmHWM": int(re.search(r"VmHWM:\s+(\d+)", status)[1]), "private": private}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meta", required=True)
    parser.add_argument("--tokenizer", help="folder of a tokenizer; a tiny one is trained on the data without it")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=10**9, help="of the plain loop and bare decoding, evenly spread")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    import torch

    from internvl_pack import PackedDataset, PackingConfig, build_loader
    from internvl_pack.sources import load_meta
    from internvl_pack.tiny import conversation_texts, tiny_tokenizer

    torch.set_num_threads(1)
    if arguments.tokenizer:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    else:
        specs = load_meta(arguments.meta)
        tokenizer = tiny_tokenizer(t for spec in specs for t in conversation_texts(Path(spec.annotation)))
    config = PackingConfig(max_packed_tokens=16384, num_images_expected=48, max_buffer_size=64, num_lanes=1)
    dataset = PackedDataset.from_meta(arguments.meta, tokenizer, config)
    result = queue_and_memory(dataset)  # first: workers are forked from a small process

    loader = build_loader(dataset)
    counts = {"samples": 0, "tiles": 0}

    def ours() -> None:
        dataset.encoder._text._known.clear()  # no text seen before
        counts["samples"] = counts["tiles"] = 0
        for batch in loader:
            counts["samples"] += batch["num_samples"]
            counts["tiles"] += batch["num_tiles"]

    rows = list(rows_of(dataset.sources, arguments.samples))
    ways = {
        "loader": ours,
        "plain loop": plain_loop(dataset.sources, tokenizer, arguments.samples),
        "bare": bare(dataset, rows),
        "no tiles": no_tiles(dataset, rows),
    }
    for function in ways.values():
        function()  # warms up imports and the file cache
    seconds = best_of(ways, arguments.runs)
    part = len(rows) / counts["samples"]  # of the samples, for the two that can be sampled
    rates = {"loader": 1.0, "plain loop": part, "bare": part, "no tiles": part}
    for name, share in rates.items():
        samples, tiles = counts["samples"] * share / seconds[name], counts["tiles"] * share / seconds[name]
        result[f"{name}: samples_a_second"], result[f"{name}: tiles_a_second"] = samples, tiles
        print(f"{name:12s} {samples:8.1f} samples/s {tiles:8.1f} tiles/s a core")
    result["times_the_plain_loop"] = seconds["plain loop"] / part / seconds["loader"]
    result["share_of_bare_speed"] = seconds["bare"] / part / seconds["loader"]
    result["share_of_speed_without_tiles"] = seconds["no tiles"] / part / seconds["loader"]
    print(f"loader: {result['times_the_plain_loop']:.2f} times the plain loop, ", end="")
    print(f"{100 * result['share_of_bare_speed']:.0f} % of the speed of bare decoding and resizing ", end="")
    print(f"({100 * result['share_of_speed_without_tiles']:.0f} % with the tiles dropped)")
    print(
        f"queue: {result['MB_a_batch']:.1f} MB of tensors a batch ({result['bytes_a_tile']:.0f} bytes a tile, "
        f"float32 would be {4 * 3 * 448 * 448}), {result['kB_a_batch_without_tensors']:.1f} kB besides"
    )
    print(
        f"worker: {result['worker_peak_MB_private']:.0f} MB of its own at most; {result['worker_peak_MB']:.0f} MB "
        f"resident at its peak with what it shares with its parent of {result['parent_MB']:.0f} MB"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
