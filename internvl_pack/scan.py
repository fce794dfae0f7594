"""What planning knows of every row of the data, measured once and kept in files.

    rows -> Source.read -> Encoder.encode (text, image headers) -> chunk files -> `ScanTable`

Rows are measured in chunks, in this process or in worker processes. Each finished chunk is a file of its own, put in
place at once (written beside, then renamed): a scan that was killed goes on with the chunks that are missing. No
process keeps more than a chunk, whatever the size of the data.

Files of a scan, in one folder:

    scan.json                    what the lengths depend on; another scan's chunks are not taken over
    chunk-<dataset>-<row>.parquet  lengths, spans and refusals of CHUNK_ROWS rows from <row> on
    lengths-<dataset>.npy        int32 (rows, 3): tokens, tiles, supervised tokens; -1 tokens: the row is refused
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from .encode.sample import Encoder
from .errors import SampleError, UserError
from .records import Record, Span
from .sources import DatasetSpec, Source

logger = logging.getLogger(__name__)

CHUNK_ROWS = 2048
"""Rows of a chunk file: some seconds of text, and what a killed scan loses a worker."""
REFUSED = -1


def parquet() -> Any:
    """pyarrow's parquet module, imported where it is used: training by streaming needs none of it."""
    import pyarrow.parquet

    return pyarrow.parquet


class Scanner:
    """Measures rows. Picklable, for workers."""

    def __init__(self, sources: Sequence[Source], specs: Sequence[DatasetSpec], encoder: Encoder) -> None:
        self.sources = list(sources)
        self.specs = list(specs)
        self.encoder = encoder

    def settings(self, digests: Sequence[str]) -> dict[str, Any]:
        """What the lengths depend on, as JSON values. `digests` are the datasets' contents."""
        data = [
            {"name": spec.name, "rows": len(source), "max_dynamic_patch": spec.max_dynamic_patch, "digest": digest}
            for spec, source, digest in zip(self.specs, self.sources, digests, strict=True)
        ]
        return {"version": 2, "chunk_rows": CHUNK_ROWS, "data": data, "encode": self.encoder.fingerprint()}

    def measure(self, which: int, start: int, stop: int, path: Path) -> int:
        """Write the chunk file of rows [start, stop); returns their number."""
        columns: dict[str, list[Any]] = {name: [] for name in _SCHEMA}
        for row in range(start, stop):
            values: tuple[Any, ...]
            try:
                record = self.encoder.load(self.sources[which], row, self.specs[which]).record
            except SampleError as error:
                told = (self._without_folder(which, text or "") for text in (error.source, error.detail))
                values = (REFUSED, 0, 0, 0, [], [], [], error.reason, *told)
            else:
                spans = record.spans
                values = (
                    record.num_tokens,
                    record.num_tiles,
                    record.num_loss_tokens,
                    record.num_system_tokens,
                    [s.num_tokens for s in spans],
                    [s.num_tiles for s in spans],
                    [s.ends_turn for s in spans],
                    None,
                    None,
                    None,
                )
            for name, value in zip(_SCHEMA, values, strict=True):
                columns[name].append(value)
        write_table(path, columns, _SCHEMA)
        return stop - start

    def _without_folder(self, which: int, detail: str) -> str:
        """Paths below the meta file's folder relative to it: moved data must give the same preset."""
        folder = os.path.dirname(self.specs[which].meta_file)
        return detail.replace(folder + os.sep, "") if folder else detail


_SCHEMA = {
    "tokens": "int32",
    "tiles": "int32",
    "loss_tokens": "int32",
    "system_tokens": "int32",
    "span_tokens": "list<int32>",
    "span_tiles": "list<int32>",
    "span_ends": "list<bool>",
    "reason": "string",
    "source": "string",
    "detail": "string",
}


def arrow_schema(columns: dict[str, str]) -> Any:
    """A pyarrow schema from `{name: type}`; `list<T>` is a list of T."""
    import pyarrow as pa

    types = {"string": pa.string(), "bool": pa.bool_(), "int32": pa.int32(), "int64": pa.int64()}

    def of(kind: str) -> Any:
        return pa.list_(types[kind[5:-1]]) if kind.startswith("list<") else types[kind]

    return pa.schema([(name, of(kind)) for name, kind in columns.items()])


def write_table(path: Path, columns: dict[str, list[Any]], schema: dict[str, str]) -> None:
    """One parquet file that is there in full or not at all."""
    import pyarrow as pa

    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    parquet().write_table(pa.table(columns, schema=arrow_schema(schema)), beside, compression="zstd")
    os.replace(beside, path)


def scan(scanner: Scanner, settings: dict[str, Any], folder: Path, *, num_workers: int = 0) -> Iterator[int]:
    """Measure all rows that `folder` does not hold yet.

    Args:
        settings: of `Scanner.settings`; chunks that were made with others are removed.
        num_workers: processes; 0 measures in this one.

    Yields:
        rows done since the last time; those found done come first.

    Raises:
        UserError: the data cannot be gone on with, or a worker was killed.
    """
    prepare_folder(folder, "scan.json", settings)
    chunks = [
        (which, start, min(start + CHUNK_ROWS, len(source)), _chunk_path(folder, which, start))
        for which, source in enumerate(scanner.sources)
        for start in range(0, len(source), CHUNK_ROWS)
    ]
    missing = [chunk for chunk in chunks if not chunk[3].exists()]
    done = sum(stop - start for _, start, stop, path in chunks if path.exists())
    if done:
        yield done
    yield from parallel(scanner, "measure", missing, num_workers)
    for which, source in enumerate(scanner.sources):
        _join_lengths(folder, which, len(source))


def prepare_folder(folder: Path, name: str, settings: dict[str, Any]) -> None:
    """An emptied folder with `settings` in the file `name`, or the folder as it is where these settings made it."""
    text = json.dumps(settings, indent=1, sort_keys=True)
    mark = folder / name
    if folder.exists():
        if mark.is_file() and mark.read_text(encoding="utf-8") == text:
            return
        logger.warning("%s was made with other data or settings and is begun anew", folder)
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    mark.write_text(text, encoding="utf-8")


def _chunk_path(folder: Path, which: int, start: int) -> Path:
    return folder / f"chunk-{which:03d}-{start:012d}.parquet"


def _join_lengths(folder: Path, which: int, num_rows: int) -> None:
    """The chunks' lengths as one array, which planning maps into memory."""
    path = folder / f"lengths-{which:03d}.npy"
    if path.exists():
        return
    beside = path.with_name(f"{path.name}.part")
    lengths = np.lib.format.open_memmap(beside, mode="w+", dtype=np.int32, shape=(num_rows, 3))
    for start in range(0, num_rows, CHUNK_ROWS):
        chunk = parquet().read_table(_chunk_path(folder, which, start), columns=["tokens", "tiles", "loss_tokens"])
        for column in range(3):
            lengths[start : start + chunk.num_rows, column] = chunk.column(column).to_numpy()
    lengths.flush()
    os.replace(beside, path)


class ScanTable:
    """A finished scan. Picklable; maps the lengths, reads other columns a chunk at a time when they are needed."""

    def __init__(self, folder: Path, num_datasets: int) -> None:
        self._folder = folder
        self._num_datasets = num_datasets
        self._open()

    def _open(self) -> None:
        self._lengths = [
            np.load(self._folder / f"lengths-{which:03d}.npy", mmap_mode="r") for which in range(self._num_datasets)
        ]
        self._chunk = lru_cache(maxsize=16)(self._read_chunk)

    def __getstate__(self) -> tuple[Path, int]:
        return self._folder, self._num_datasets

    def __setstate__(self, state: tuple[Path, int]) -> None:
        self._folder, self._num_datasets = state
        self._open()

    def lengths(self, which: int, row: int) -> tuple[int, int, int]:
        """(tokens, tiles, supervised tokens) of a row.

        Raises:
            SampleError: the row is refused.
        """
        tokens, tiles, loss = self._lengths[which][row].tolist()
        if tokens == REFUSED:
            chunk, i = self._chunk_of(which, row)
            raise SampleError(*(chunk[name][i].as_py() for name in ("reason", "detail", "source")))
        return tokens, tiles, loss

    def record(self, which: int, row: int, sample_id: str) -> Record:
        """The record of a row with its spans, for splitting."""
        tokens, tiles, loss = self.lengths(which, row)
        chunk, i = self._chunk_of(which, row)
        spans = zip(*(chunk[name][i].as_py() for name in ("span_tokens", "span_tiles", "span_ends")), strict=True)
        system = chunk["system_tokens"][i].as_py()
        return Record(sample_id, tokens, tiles, loss, tuple(Span(*span) for span in spans), system)

    def _chunk_of(self, which: int, row: int) -> tuple[Any, int]:
        start = row - row % CHUNK_ROWS
        return self._chunk(which, start), row - start

    def _read_chunk(self, which: int, start: int) -> Any:
        return parquet().read_table(_chunk_path(self._folder, which, start))


# -- processes ---------------------------------------------------------------------------------------

_worker: Any = None


def _start(worker: Any) -> None:
    global _worker
    _worker = worker


def _call(method: str, args: tuple[Any, ...]) -> Any:
    return getattr(_worker, method)(*args)


def parallel(worker: Any, method: str, tasks: Iterable[tuple[Any, ...]], num_workers: int) -> Iterator[Any]:
    """`worker.method(*task)` of every task, each result as it is finished.

    Args:
        worker: picklable; each process has a copy of its own.
        num_workers: processes; 0 works in this one.

    Raises:
        UserError: a process was killed; and what the method raises.
    """
    if num_workers == 0:
        for task in tasks:
            yield getattr(worker, method)(*task)
        return
    context = multiprocessing.get_context("spawn")  # takes over nothing of this process, such as threads
    tasks = iter(tasks)
    waiting: set[Future] = set()
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start, initargs=(worker,)) as pool:
        try:
            while True:
                for task in islice(tasks, 3 * num_workers - len(waiting)):
                    waiting.add(pool.submit(_call, method, task))
                if not waiting:
                    return
                finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in finished:
                    yield future.result()
        except BrokenProcessPool:
            raise UserError("a worker of --workers was killed (out of memory?): use fewer, and start again") from None
        finally:
            for future in waiting:
                future.cancel()
