"""Memory and processor time to load and to convert an InternVLChatModel checkpoint.

    python benchmarks/checkpoints.py FOLDER [--max_shard_size 100MB]

Each measurement runs in a process of its own. Memory is the peak of what the process holds itself (RssAnon of Linux),
above what it held before; pages of the mapped files, which the system takes back when it needs them, do not count.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def anonymous_gb() -> float:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024 / 1e9
    raise SystemExit("RssAnon is not in /proc/self/status: this benchmark needs Linux")


def load(folder: str, dtype: str, _: str) -> None:
    import torch

    from internvl_pack.checkpoints.tokenizers import load_tokenizer
    from internvl_pack.model.build import build_model

    build_model(folder, tokenizer=load_tokenizer(folder), device="cpu", dtype=getattr(torch, dtype))


def convert(folder: str, _: str, shard_size: str) -> None:
    from internvl_pack.cli import main as cli

    with tempfile.TemporaryDirectory(dir=Path.cwd()) as target:
        cli(["convert", folder, target, "--to", "hf", "--max_shard_size", shard_size])


def measure(what, arguments: tuple[str, ...], results) -> None:
    import torch  # noqa: F401  what is imported anyway does not count
    import transformers  # noqa: F401

    import internvl_pack.model.build  # noqa: F401

    before, peak, done = anonymous_gb(), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], anonymous_gb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.process_time()
    what(*arguments)
    seconds = time.process_time() - started
    done.set()
    watcher.join()
    results.put((peak[0] - before, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--max_shard_size", default="100MB", help="of the converted checkpoint")
    args = parser.parse_args()
    size = sum(p.stat().st_size for pattern in ("*.safetensors", "*.bin") for p in Path(args.folder).glob(pattern))
    print(f"{args.folder}: {size / 1e9:.2f} GB of weights")
    context = multiprocessing.get_context("spawn")
    for what, dtype in ((load, "bfloat16"), (load, "float32"), (convert, "")):
        results = context.SimpleQueue()
        process = context.Process(target=measure, args=(what, (args.folder, dtype, args.max_shard_size), results))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{what.__name__} {dtype} failed")
        peak, seconds = results.get()
        print(f"{what.__name__:8}{dtype:10} peak {peak:.2f} GB, {seconds:.1f} s of processor time")


if __name__ == "__main__":
    main()
