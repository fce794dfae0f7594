"""`internvl-pack index META`: write the index files that let every run open its data at once."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from ..config import PackingConfig
from ..errors import UserError
from ..options import add_options, count
from ..sources import jsonl, shard_index
from ..sources.files import Stamp, stamp_of
from ..sources.index import BadIndexError
from ..sources.meta import DatasetSpec, load_meta
from ..survey.workers import in_order
from ._options import (
    BUDGETS,
    META_HELP,
    WorkerOptions,
    add_encoding,
    measure_with_bar,
    num_workers,
    open_samples,
    packing_config,
    survey_root,
)

HELP = "Index the annotation files and shards of a meta file; with --lengths also survey all samples."


class DataFile(NamedTuple):
    """A file to index: `kind` is jsonl.KIND or shard_index.KIND."""

    kind: str
    path: str
    stamp: Stamp


class Indexed(NamedTuple):
    """A file that is done. `num_rows` counts samples, bad ones included; `complaints` are lines to show."""

    path: str
    num_rows: int
    complaints: tuple[str, ...] = ()


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("meta", help=META_HELP)
    add_options(parser, WorkerOptions)
    parser.add_argument("--force", action="store_true", help="write anew the indexes that are current, too")
    parser.add_argument(
        "--lengths", action="store_true", help="survey all samples, too: runs with the same options begin with that"
    )
    add_encoding(parser, "Needed by --lengths.")
    rows = parser.add_argument_group("budgets of the run that --lengths surveys for")
    add_options(rows, PackingConfig, *BUDGETS, "survey_dir")


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    processes = num_workers(args)
    if args.lengths and not args.tokenizer:
        raise UserError("--lengths: token counts depend on the model's tokenizer: give it with --tokenizer")
    specs = load_meta(args.meta)
    for spec in specs:
        if spec.source is not None:
            print(f"dataset {spec.name!r}: source {spec.source!r} needs no index")
    files = data_files(specs)
    stale = [file for file in files if args.force or not is_current(file)]
    num_bytes = sum(file.stamp.size for file in stale)
    started = time.perf_counter()
    num_rows = 0
    with tqdm(total=num_bytes, unit="B", unit_scale=True, desc="indexing", disable=None) as bar:
        for indexed, piece_bytes in index_files(stale, processes if stale else 0):
            bar.update(piece_bytes)
            if indexed is not None:
                num_rows += indexed.num_rows
                for line in indexed.complaints:
                    bar.write(line)
    seconds = time.perf_counter() - started
    current = f"; current already: {count(len(files) - len(stale), 'files')}" if len(stale) < len(files) else ""
    what = f"{count(num_rows, 'samples')} in {count(len(stale), 'files')}"
    print(f"indexed {what}, {num_bytes / 1e6:.1f} MB, in {seconds:.1f} s{current}")
    if args.lengths:
        survey_lengths(args, processes)
    return 0


def survey_lengths(args: argparse.Namespace, processes: int) -> None:
    """Measure all samples that the survey does not know, with a bar and a line of what was found."""
    from ..survey.survey import Survey

    samples = open_samples(args)
    survey = Survey(samples, packing_config(args).room, survey_root(args))
    known = survey.num_known
    started = time.perf_counter()
    measure_with_bar(survey, processes if known < samples.num_rows else 0)
    seconds = time.perf_counter() - started
    print(f"surveyed {count(samples.num_rows - known, 'samples')} in {seconds:.1f} s; {known} were known")
    for table in survey.tables:
        print(f"  {table.key.name}: {table.folder}")


def data_files(specs: Sequence[DatasetSpec]) -> list[DataFile]:
    """The annotation files and shards of the datasets, each once though several may name it."""
    found = {}
    for spec in specs:
        if spec.annotation is not None:
            stamp = stamp_of(spec.annotation)
            jsonl.check_format(spec.annotation, stamp)
            found[spec.annotation] = DataFile(jsonl.KIND, spec.annotation, stamp)
        for path in spec.shards or ():
            found[path] = DataFile(shard_index.KIND, path, stamp_of(path))
    return list(found.values())


def is_current(file: DataFile) -> bool:
    """Whether a usable index lies beside a file."""
    kind = jsonl if file.kind == jsonl.KIND else shard_index
    try:
        return kind.load_index(file.path, file.stamp) is not None
    except BadIndexError:
        return False


def index_files(files: Sequence[DataFile], num_workers: int = 0) -> Iterator[tuple[Indexed | None, int]]:
    """Index files, in order, a piece of them at a time.

    Yields:
        (the file that this piece completes or None, bytes dealt with) a piece.

    Raises:
        UserError: a file cannot be read or changes meanwhile, an index cannot be written, a worker dies.
    """
    with ExitStack() as stack:
        for (file, start, stop), result in in_order(_read, _pieces(files), num_workers):
            if file.kind == shard_index.KIND:
                yield result, stop - start
                continue
            if start == 0:
                writer = stack.enter_context(jsonl.JsonlIndexWriter(file.path, file.stamp))
            writer.add(result)
            if stop < file.stamp.size:
                yield None, stop - start
                continue
            if stamp_of(file.path) != file.stamp:
                raise UserError(f"annotation {file.path} changed while it was indexed: start again when it is finished")
            writer.finish()
            stack.close()
            yield Indexed(file.path, writer.num_rows), stop - start


def _pieces(files: Iterable[DataFile]) -> Iterator[tuple[DataFile, int, int]]:
    """(file, start, stop) of what one worker does at a time: a shard, or some of an annotation file's bytes."""
    for file in files:
        size = file.stamp.size
        step = max(1, size) if file.kind == shard_index.KIND else jsonl.PART_BYTES
        for start in range(0, max(1, size), step):
            yield file, start, min(start + step, size)


def _read(file: DataFile, start: int, stop: int) -> Any:
    """What there is to index in a piece, a shard's index written beside it; runs in a worker."""
    try:
        if file.kind == shard_index.KIND:
            index = shard_index.write_index(file.path)
            complaints = (*index.warnings, *(str(damage.error(file.path)) for damage in index.damage))
            return Indexed(file.path, len(index), complaints)
        return jsonl.scan_part(file.path, start, stop, file.stamp.size)
    except OSError as error:
        raise UserError(f"{file.path} cannot be read: {error.strerror or error}") from None
