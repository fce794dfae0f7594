"""The loader on real data, one core: samples/s and tiles/s beside InternVL's way and beside bare decoding.

    python benchmarks/loader.py --meta META.json [--tokenizer DIR] [--runs 3]

    loader      PackLoader without workers: read, tokenise, pack, decode to uint8 tiles, collate
    plain loop  what InternVL's dataset does a sample: tokenise turn by turn, Pillow's decode and bicubic resize, crops,
                float32 tensor and normalise a tile
    bare        read, decode and resize the same images to the grid and the thumbnail of each, and copy the tiles out
                into an array of their own: the loader's decoders, torch's antialiased bicubic, plain code around them
    own tiles   the same by the loader's own function, which leaves the colours of a pixel together, as they come
    no tiles    bare with the resized pictures dropped: no tile is written

They take turns pack by pack: the loader makes a pack, the others do the same samples. What counts is processor time
of this process, all threads (torch has one); there are no children. Of each pack and way the fastest run counts, so
that other work on the machine, which slows memory and takes time from shared cores, disturbs all alike.

Then one worker process at 16384 tokens and 48 tiles with 64 records of look-ahead: what goes through its queue, and
its memory, seen every 20 ms. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import multiprocessing
import os
import pickle
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.encode import normalised, pillow_tiles, tokenizer_for

IMAGE_BLOCK = "<img>{}</img>"


def fastest(ways: dict[str, Callable[[list[str]], None]], loader, runs: int) -> tuple[dict[str, float], int, int]:
    """(seconds of each way, samples, tiles). Each way does the samples of each pack after the loader has made it."""
    best: dict[tuple[str, int], float] = {}
    samples = tiles = 0
    for run in range(runs + 1):  # the first warms up: imports, the file cache
        samples = tiles = 0
        loader.packed_dataset.encoder._text._known.clear()  # no text seen before
        batches = iter(loader)
        for number in range(1 << 62):
            start = time.process_time()
            batch = next(batches, None)
            seconds = {"loader": time.process_time() - start}
            if batch is None:
                break
            samples += batch["num_samples"]
            tiles += batch["num_tiles"]
            ids = batch["sample_ids"]
            for name, way in ways.items():
                start = time.process_time()
                way(ids)
                seconds[name] = time.process_time() - start
            for name, found in seconds.items():
                if run:
                    best[name, number] = min(found, best.get((name, number), found))
    sums = dict.fromkeys(["loader", *ways], 0.0)
    for (name, _), found in best.items():
        sums[name] += found
    return sums, samples, tiles


def plain_loop(raws: dict, tokenizer) -> Callable[[list[str]], None]:
    """A sample at a time as InternVL's LazySupervisedDataset prepares it (float32 tensors and all)."""
    import torch
    from PIL import Image

    from internvl_pack.encode.tiles import max_tiles_per_image, plan_grid

    def prepare(raw) -> None:
        names = raw.data.get("image") or []
        names = [names] if isinstance(names, str) else names
        tiles: list[Image.Image] = []
        counts = []
        for name in names:
            image = Image.open(io.BytesIO(raw.resolve(name).read())).convert("RGB")
            found = pillow_tiles(image, plan_grid(*image.size, max_tiles=max_tiles_per_image(12, len(names))))
            counts.append(len(found))
            tiles += found
        if tiles:
            normalised(tiles)
        ids = []
        for turn in raw.data["conversations"]:
            text = turn["value"]
            while counts and "<image>" in text:
                text = text.replace("<image>", IMAGE_BLOCK.format("<IMG_CONTEXT>" * 256 * counts.pop(0)), 1)
            ids += tokenizer(f"<|im_start|>{turn['from']}\n{text}<|im_end|>\n", add_special_tokens=False).input_ids
        torch.tensor(ids)

    def run(sample_ids: list[str]) -> None:
        for sample_id in sample_ids:
            source, row = raws[sample_id]
            prepare(source.read(row))

    return run


def own_tiles(planned: dict) -> Callable[[list[str]], None]:
    """Decode each image into the tiles of its grid, in an array of its own."""
    from internvl_pack.encode.images import decode_tiles

    def run(sample_ids: list[str]) -> None:
        for sample_id in sample_ids:
            for image in planned[sample_id]:
                decode_tiles(image.ref, image.grid, 448, size=image.size)

    return run


def bare(planned: dict, keep: bool) -> Callable[[list[str]], None]:
    """Decode each image and resize it to its grid and thumbnail; the result is cut into tiles, or dropped."""
    import torch
    from torch.nn.functional import interpolate

    from internvl_pack.encode.decoders import decode_rgb
    from internvl_pack.encode.headers import read_header

    def tiles_of(picture: torch.Tensor, columns: int, rows: int) -> torch.Tensor:
        cells = picture.view(3, rows, 448, columns, 448).permute(1, 3, 0, 2, 4)
        return cells.reshape(columns * rows, 3, 448, 448)

    def run(sample_ids: list[str]) -> None:
        for image in (image for sample_id in sample_ids for image in planned[sample_id]):
            data = image.ref.read()
            header = read_header(image.ref.name, data, image.ref.read, 1 << 40)
            cells = [(image.grid.columns, image.grid.rows)] + [(1, 1)] * image.grid.thumbnail
            if header.orientation >= 5:
                cells = [(rows, columns) for columns, rows in cells]
            pixels, _ = decode_rgb(image.ref.name, data, header, (448 * cells[0][0], 448 * cells[0][1]))
            stored = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)  # the order that torch is fast with
            for columns, rows in cells:
                shape, picture = (448 * rows, 448 * columns), stored
                if stored.shape[2:] != shape:
                    picture = interpolate(stored, shape, mode="bicubic", antialias=True)
                if keep:
                    tiles_of(picture[0], columns, rows)

    return run


def queue_and_memory(dataset) -> dict[str, float]:
    """One worker over an epoch: bytes of its batches by kind, and the most memory it held."""
    import torch

    from internvl_pack import build_loader

    loader = build_loader(dataset, num_workers=1, prefetch_factor=2)
    tensors = other = samples = tiles = batches = 0
    batches_of = iter(loader)
    first = next(batches_of)
    (worker,) = multiprocessing.active_children()
    watch = Watch(worker.pid)
    for batch in itertools.chain([first], batches_of):
        batches += 1
        samples += batch["num_samples"]
        tiles += batch["num_tiles"]
        tensors += sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor))
        other += len(pickle.dumps({k: v for k, v in batch.items() if not isinstance(v, torch.Tensor)}))
    peak = watch.stop()
    return {
        "batches": batches,
        "MB_a_batch": tensors / batches / 1e6,
        "kB_a_batch_without_tensors": other / batches / 1e3,
        "bytes_a_tile": tensors / max(1, tiles),
        **{f"worker_peak_{kind}_MB": value / 1e3 for kind, value in peak.items()},
        "parent_MB": memory_of(os.getpid())["RSS"] / 1e3,
    }


class Watch(threading.Thread):
    """The most memory that a process holds, by kind, until it ends or `stop`."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._ended = pid, threading.Event()
        self.peak: dict[str, int] = {}
        self.start()

    def run(self) -> None:
        while not self._ended.wait(0.02):
            try:
                found = memory_of(self._pid)
            except (OSError, TypeError):  # it has ended
                return
            self.peak = {kind: max(value, self.peak.get(kind, 0)) for kind, value in found.items()}

    def stop(self) -> dict[str, int]:
        self._ended.set()
        self.join()
        return self.peak


def memory_of(pid: int) -> dict[str, int]:
    """kB. RSS: all that is resident, shared with the parent or not, the kernel's own high-water mark of it; PSS: of
    pages that n processes share each has 1/n; USS: what is its own and would be free without it."""
    status = Path(f"/proc/{pid}/status").read_text()
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    private = sum(int(found) for found in re.findall(r"Private_(?:Clean|Dirty):\s+(\d+)", rollup))
    return {
        "RSS": int(re.search(r"VmHWM:\s+(\d+)", status)[1]),
        "PSS": int(re.search(r"Pss:\s+(\d+)", rollup)[1]),
        "USS": private,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meta", required=True)
    parser.add_argument("--tokenizer", help="folder of a tokenizer; a tiny one is trained on the data without it")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    import torch

    from internvl_pack import PackedDataset, PackingConfig, build_loader

    torch.set_num_threads(1)
    tokenizer = tokenizer_for(arguments.meta, arguments.tokenizer)
    config = PackingConfig(max_packed_tokens=16384, num_images_expected=48, max_buffer_size=64)
    dataset = PackedDataset.from_meta(arguments.meta, tokenizer, config)
    result = queue_and_memory(dataset)  # first: workers are forked from a small process

    raws, planned = {}, {}
    for number, source in enumerate(dataset.samples.sources):
        for row in range(len(source)):
            raws[source.sample_id(row)] = source, row
            planned[source.sample_id(row)] = dataset.samples.encode(number, row).images
    ways = {
        "plain loop": plain_loop(raws, tokenizer),
        "bare": bare(planned, True),
        "own tiles": own_tiles(planned),
        "no tiles": bare(planned, False),
    }
    seconds, samples, tiles = fastest(ways, build_loader(dataset), arguments.runs)
    for name, found in seconds.items():
        result[f"{name}: samples_a_second"], result[f"{name}: tiles_a_second"] = samples / found, tiles / found
        print(f"{name:12s} {samples / found:8.1f} samples/s {tiles / found:8.1f} tiles/s a core")
    result["times_the_plain_loop"] = seconds["plain loop"] / seconds["loader"]
    shares = {name: seconds[name] / seconds["loader"] for name in ("bare", "own tiles", "no tiles")}
    result |= {f"share_of_speed: {name}": share for name, share in shares.items()}
    print(
        f"loader: {result['times_the_plain_loop']:.2f} times the plain loop; "
        f"{100 * shares['bare']:.0f} % of the speed of bare decoding, resizing and cutting, "
        f"{100 * shares['own tiles']:.0f} % of its own function for that alone, "
        f"{100 * shares['no tiles']:.0f} % of decoding and resizing with the tiles dropped"
    )
    print(
        f"queue: {result['MB_a_batch']:.1f} MB of tensors a batch ({result['bytes_a_tile']:.0f} bytes a tile, "
        f"float32 would be {4 * 3 * 448 * 448}), {result['kB_a_batch_without_tensors']:.1f} kB besides"
    )
    print(
        f"worker at its peak: RSS {result['worker_peak_RSS_MB']:.0f} MB, shared with its parent in part; "
        f"PSS {result['worker_peak_PSS_MB']:.0f} MB; USS, its own, {result['worker_peak_USS_MB']:.0f} MB. "
        f"Parent: RSS {result['parent_MB']:.0f} MB"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
