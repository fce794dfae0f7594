"""Speed of indexing and of random access: rows a second of JSON lines and of tar shards.

    python benchmarks/index.py [--rows 2000000] [--shard-samples 20000] [--json]

Everything runs on one core, on generated files (made in --folder, removed afterwards) that are in the page cache.
Seconds are CPU seconds of the process, user and system, so that other work on the machine does not count.
The yardstick is `for line in file`, which only counts lines: what a reader without an index pays at every start.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import resource
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.encode import best_of
from internvl_pack.commands.index import DataFile, index_files
from internvl_pack.sources import jsonl, shard_index
from internvl_pack.sources.files import stamp_of
from internvl_pack.sources.index import index_path
from internvl_pack.sources.jsonl import JsonlSource
from internvl_pack.sources.shards import ShardSource

WORDS = [f"word{i}" for i in range(2000)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows of the annotation file")
    parser.add_argument("--shard-samples", type=int, default=20_000, help="samples of the shard")
    parser.add_argument("--folder", default=None, help="where the files are made (default: the system's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines of text")
    parser.add_argument("--rss-of", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rss_of:
        print(rss_growth(args.rss_of))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = {**measure_jsonl(Path(folder), args.rows), **measure_shard(Path(folder), args.shard_samples)}
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:36} {value:>14,.1f}" if value >= 10 else f"{name:36} {value:>14,.3f}")


def measure_jsonl(folder: Path, num_rows: int) -> dict[str, float]:
    path = folder / "rows.jsonl"
    write_jsonl(path, num_rows)
    size = path.stat().st_size
    loop = best_of(lambda: count_lines(path))
    stamp = stamp_of(str(path))
    scan = best_of(lambda: jsonl.build_index(str(path), stamp))
    command = best_of(lambda: list(index_files([DataFile(jsonl.KIND, str(path), stamp)])))
    opening = best_of(lambda: JsonlSource("bench", str(path)))
    source = JsonlSource("bench", str(path))
    assert len(source) == num_rows
    rows = random.Random(0).sample(range(num_rows), min(num_rows, 20_000))
    reading = best_of(lambda: [source.read(row) for row in rows])
    grown = subprocess.run(
        [sys.executable, __file__, "--rss-of", str(path)], check=True, capture_output=True, text=True
    ).stdout
    return {
        "jsonl_bytes_a_row": size / num_rows,
        "jsonl_line_loop_rows_per_s": num_rows / loop,
        "jsonl_index_in_memory_rows_per_s": num_rows / scan,
        "jsonl_index_to_file_rows_per_s": num_rows / command,
        "jsonl_index_to_line_loop_ratio": loop / scan,
        "jsonl_open_with_index_ms": opening * 1e3,
        "jsonl_read_samples_per_s": len(rows) / reading,
        "jsonl_in_memory_index_rss_mb": float(grown),
    }


def measure_shard(folder: Path, num_samples: int) -> dict[str, float]:
    path = folder / "shard.tar"
    write_shard(path, num_samples)
    with tarfile.open(path) as tar:
        with_tarfile = best_of(lambda: sum(1 for _ in tar), 1)
    scan = best_of(lambda: shard_index.scan_shard(str(path)))
    shard_index.write_index(str(path))
    opening = best_of(lambda: ShardSource("bench", [str(path)]))
    source = ShardSource("bench", [str(path)])
    assert len(source) == num_samples
    rows = random.Random(0).sample(range(num_samples), min(num_samples, 20_000))
    reading = best_of(lambda: [source.read(row) for row in rows])
    names = best_of(lambda: [source.sample_id(row) for row in rows])
    return {
        "shard_tarfile_samples_per_s": num_samples / with_tarfile,
        "shard_index_samples_per_s": num_samples / scan,
        "shard_open_with_index_ms": opening * 1e3,
        "shard_read_samples_per_s": len(rows) / reading,
        "shard_sample_ids_per_s": len(rows) / names,
    }


def rss_growth(path: str) -> float:
    """MB that a process grows by while it indexes a file and keeps the index."""
    JsonlSource("warm", str(Path(__file__).with_name("real_mix_a.csv")))  # so that only the index counts
    Path(index_path(path)).unlink()
    before = rss_mb()
    source = JsonlSource("bench", path)
    assert len(source)
    return rss_mb() - before


def rss_mb() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def count_lines(path: Path) -> int:
    with open(path, "rb") as file:
        return sum(1 for _ in file)


def write_jsonl(path: Path, num_rows: int) -> None:
    rng = random.Random(0)
    bodies = [record(rng) for _ in range(2000)]
    with open(path, "wb") as file:
        for row in range(num_rows):
            file.write(b'{"id": "row-%d", %b\n' % (row, bodies[row % len(bodies)]))


def record(rng: random.Random) -> bytes:
    """All of a record after its id: one image, one question, an answer of 5 to 60 words."""
    answer = " ".join(rng.choices(WORDS, k=rng.randint(5, 60)))
    turns = [{"from": "human", "value": "<image>\nDescribe this."}, {"from": "gpt", "value": answer}]
    image = f"folder{rng.randrange(100)}/{rng.randrange(10**8):08}.jpg"
    return json.dumps({"image": image, "width": 640, "height": 480, "conversations": turns}).encode()[1:]


def write_shard(path: Path, num_samples: int) -> None:
    rng = random.Random(0)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(num_samples):
            for ending, data in (("jpg", bytes(rng.randrange(2000, 30000))), ("json", b"{" + record(rng))):
                info = tarfile.TarInfo(f"part/{number:09}.{ending}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


if __name__ == "__main__":
    main()
