"""Speed of encoding on one core: planning from text and headers, decoding to tiles, InternVL's way.

    python benchmarks/encode.py --meta META.json [--tokenizer DIR]     planning over all samples of a meta file
    python benchmarks/encode.py --image FILE [--max-tiles 12]          decoding of one image, step by step

Prints milliseconds of processor time; each figure is the best of several runs.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def best_of(function: Callable[[], object], runs: int = 3) -> float:
    """Seconds of processor time of the fastest run."""
    times = []
    for _ in range(runs):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def tokenizer_for(meta: str, folder: str | None) -> Any:
    """That of a folder; without one a tiny one, trained on the data of a meta file."""
    from internvl_pack.sources import load_meta
    from internvl_pack.testing.tiny import conversation_texts, tiny_tokenizer

    if folder:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder)
    return tiny_tokenizer(t for spec in load_meta(meta) for t in conversation_texts(Path(spec.annotation)))


def pillow_tiles(image: Any, grid: Any) -> list:
    """As InternVL does it: one resize, crops, and a thumbnail, all Pillow images."""
    whole = image.resize((448 * grid.columns, 448 * grid.rows))
    boxes = [(448 * c, 448 * r) for r in range(grid.rows) for c in range(grid.columns)]
    tiles = [whole.crop((x, y, x + 448, y + 448)) for x, y in boxes]
    return tiles + [image.resize((448, 448))] * grid.thumbnail


def normalised(tiles: list) -> Any:
    """... and then a normalised float32 tensor a tile, (tiles, 3, 448, 448)."""
    import numpy as np
    import torch

    mean, std = (torch.tensor(v)[:, None, None] for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    pixels = [torch.from_numpy(np.array(tile)).permute(2, 0, 1).contiguous() for tile in tiles]
    return torch.stack([(tile.float().div(255) - mean) / std for tile in pixels])


def plan(meta: str, tokenizer_folder: str | None, runs: int) -> None:
    from internvl_pack.encode import Encoder
    from internvl_pack.sources import open_source
    from internvl_pack.sources.meta import load_meta

    tokenizer = tokenizer_for(meta, tokenizer_folder)
    sources = [(spec, open_source(spec)) for spec in load_meta(meta)]

    def read_all() -> list:
        return [(spec, source.read(row)) for spec, source in sources for row in range(len(source))]

    raws = read_all()

    def encode_all(encoder) -> None:
        for spec, raw in raws:
            encoder.encode(raw, spec)

    encoder = Encoder(tokenizer)
    encode_all(encoder)  # warms up imports and the file cache
    cold = best_of(lambda: encode_all(_without_memory(encoder)), runs)
    warm = best_of(lambda: encode_all(encoder), runs)
    read = best_of(read_all, runs)
    tokens = sum(encoder.encode(raw, spec).record.num_tokens for spec, raw in raws)
    print(f"{len(raws)} samples, {tokens} tokens")
    for name, seconds in {
        "read": read,
        "encode, no text seen before": cold,
        "encode, short texts remembered": warm,
        "read and encode": read + cold,
    }.items():
        print(f"{name:32s} {1e3 * seconds / len(raws):6.3f} ms a sample  {len(raws) / seconds:6.0f} samples/s")


def _without_memory(encoder):
    encoder._text._known.clear()
    return encoder


def decode(path: str, max_tiles: int, runs: int) -> None:
    import torch
    from PIL import Image

    from internvl_pack.encode.decoders import decode_rgb
    from internvl_pack.encode.headers import read_header
    from internvl_pack.encode.images import cut_tiles, decode_tiles, empty_tiles, image_size_of
    from internvl_pack.encode.tiles import plan_grid

    torch.set_num_threads(1)
    data = Path(path).read_bytes()
    ref = SimpleNamespace(name=path, read=lambda: data, head=lambda count: data[:count])
    size = image_size_of(ref)
    grid = plan_grid(*size, max_tiles=max_tiles)
    header = read_header(path, data, lambda: data, 1 << 40)
    target = (grid.columns * 448, grid.rows * 448)
    out = empty_tiles(grid.num_tiles, 448)
    pixels, scale = decode_rgb(path, data, header, target)
    stored = (header.width / scale, header.height / scale)

    def by_pillow() -> list:
        return pillow_tiles(Image.open(io.BytesIO(data)).convert("RGB"), grid)

    steps = {
        "header": lambda: image_size_of(ref),
        "decode": lambda: decode_rgb(path, data, header, target),
        "resize and cut": lambda: cut_tiles(pixels, grid, out, header.orientation, stored),
        "decode_tiles (all of it)": lambda: decode_tiles(ref, grid, 448),
        "Pillow, to uint8 tiles": by_pillow,
        "Pillow, to float32 normalised": lambda: normalised(by_pillow()),
    }
    print(f"{path}: {size[0]} x {size[1]}, {grid.num_tiles} tiles")
    result = {name: 1e3 * best_of(step, runs) for name, step in steps.items()}
    for name, milliseconds in result.items():
        print(f"{name:32s} {milliseconds:8.3f} ms")
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--meta", help="plan all samples of this meta file")
    what.add_argument("--image", help="decode this image")
    parser.add_argument("--tokenizer", help="folder of a tokenizer; a tiny one is trained on the data without it")
    parser.add_argument("--max-tiles", type=int, default=12)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.meta:
        plan(arguments.meta, arguments.tokenizer, arguments.runs)
    else:
        decode(arguments.image, arguments.max_tiles, arguments.runs)


if __name__ == "__main__":
    main()
