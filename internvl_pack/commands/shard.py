"""`internvl-pack shard META --out 'data-%06d.tar'`: write the datasets of a meta file as WebDataset shards.

A sample becomes its record, `<key>.json`, and its images and videos with their bytes as they are. Its key is the number
of its row. In the record only the names in `image` and `video` change: they name the members.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ..errors import SampleError, UserError, isolate_sample_errors
from ..options import count
from ..sources import DatasetSpec, RawSample, Source, load_meta, open_source, shard_index
from ..sources.index import index_path

HELP = "Write the datasets of a meta file as WebDataset shards, an index beside each, and a meta file that reads them."

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_ENDING = re.compile("[a-z0-9]{1,8}")
_KEPT = ("data_augment", "repeat_time", "weight", "max_dynamic_patch")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("meta", help="meta file (JSON) of the datasets")
    parser.add_argument(
        "--out",
        required=True,
        help="pattern of the shards, such as data-%%06d.tar; {name} in it stands for the dataset's name and is needed "
        "where there are several",
    )
    parser.add_argument("--max-size", default="3GB", help="a shard that has reached this is closed (default: 3GB)")
    parser.add_argument("--max-count", type=int, default=100_000, help="samples of a shard at most (default: 100000)")
    parser.add_argument(
        "--on_error",
        choices=("skip", "stop"),
        default="skip",
        help="a sample that cannot be read is left out and named, or ends the command (default: skip)",
    )


def run(args: argparse.Namespace) -> int:
    max_size = _bytes_of(args.max_size)
    if args.max_count < 1:
        raise UserError(f"--max-count must be at least 1, not {args.max_count}")
    specs = load_meta(args.meta)
    outputs = [_output_of(args.out, spec.name, alone=len(specs) == 1) for spec in specs]
    meta = _meta_path(args.out)
    _refuse_existing(outputs, meta)
    sources = [open_source(spec) for spec in specs]
    folder = os.path.dirname(os.path.abspath(meta))
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".shards-", dir=folder) as unfinished:
            entries: dict[str, Any] = {}
            moves: list[tuple[str, str]] = []
            for number, (spec, source, output) in enumerate(zip(specs, sources, outputs, strict=True)):
                pattern = os.path.join(unfinished.replace("%", "%%"), f"{number}-%06d.tar")
                written = _write(source, pattern, max_size, args.max_count, stop=args.on_error == "stop")
                _report(spec.name, written)
                if written.paths:
                    entries[spec.name] = _entry(spec, output, len(written.paths), folder)
                moves += [(path, output.path(place)) for place, path in enumerate(written.paths)]
            if not entries:
                raise UserError(f"{args.meta}: no sample of it could be written")
            with open(os.path.join(unfinished, "meta.json"), "w", encoding="utf-8") as file:
                json.dump(entries, file, ensure_ascii=False, indent=2)
                file.write("\n")
            moves += [(index_path(path), index_path(target)) for path, target in moves]
            _move([*moves, (file.name, meta)])
    except OSError as error:
        raise UserError(f"--out {args.out} cannot be written: {error.strerror or error}") from None
    print(f"{meta} reads them")
    return 0


# -- names ---------------------------------------------------------------------------------------------


class Output(NamedTuple):
    """The shards of one dataset: `path` gives that of each number."""

    start: str
    digits: str
    end: str

    def path(self, number: int) -> str:
        return f"{self.start}{f'%{self.digits}d' % number}{self.end}"


def _output_of(pattern: str, name: str, *, alone: bool) -> Output:
    """The output of one dataset.

    Args:
        alone: whether it is the meta file's only one.

    Raises:
        UserError: `pattern` is none, or has no {name} where there are several datasets.
    """
    if not alone and "{name}" not in pattern:
        raise UserError(
            f"--out {pattern}: the meta file has several datasets: write {{name}} where each one's name goes"
        )
    cut = re.fullmatch(r"([^%]*)%(0\d+|)d([^%/]*\.tar)", pattern)
    if (
        cut is None
        or "{name}" in cut[3]
        or any(mark in pattern.replace("{name}", "") for mark in ("{", "}", "::", "$"))
    ):
        raise UserError(
            f"--out {pattern}: give one number such as %06d in a file name that ends with .tar, no {{}}, :: or $"
        )
    return Output(cut[1].replace("{name}", re.sub(r"[^\w-]", "_", name) or "_"), cut[2], cut[3])


def _meta_path(pattern: str) -> str:
    """`data-%06d.tar` -> `data.json`; `meta.json` where the number or the dataset's name comes first."""
    folder, name = os.path.split(re.split(r"%|\{name\}", pattern)[0])
    return os.path.join(folder, f"{name.rstrip('-_.') or 'meta'}.json")


def _refuse_existing(outputs: Sequence[Output], meta: str) -> None:
    twice = [start for start, count in Counter(output.start for output in outputs).items() if count > 1]
    if twice:
        raise UserError(f"--out: two datasets would both be written to {twice[0]}...: rename one in the meta file")
    if os.path.lexists(meta):
        raise UserError(f"--out: {meta} exists: choose another name, or remove it with its shards")
    for output in outputs:
        folder, name = os.path.split(output.start)
        with suppress(FileNotFoundError, NotADirectoryError):
            for found in os.listdir(folder or "."):
                if re.fullmatch(re.escape(name) + r"\d+" + re.escape(output.end), found):
                    raise UserError(f"--out: {os.path.join(folder, found)} exists: choose another name, or remove it")


def _entry(spec: DatasetSpec, output: Output, num_shards: int, folder: str) -> dict[str, Any]:
    """The dataset's entry in the new meta file, its shards as a brace pattern."""
    pattern = output.path(0)
    if num_shards > 1:
        first, last = (f"%{output.digits}d" % number for number in (0, num_shards - 1))
        pattern = f"{output.start}{{{first}..{last}}}{output.end}"
    default = DatasetSpec(name=spec.name)
    kept = {key: getattr(spec, key) for key in _KEPT if getattr(spec, key) != getattr(default, key)}
    return {"shards": os.path.relpath(os.path.abspath(pattern), folder), **kept}


def _bytes_of(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)B?", text.strip().upper())
    if found is None or float(found[1]) == 0:
        raise UserError(f"--max-size {text}: give a size such as 500MB or 3GB")
    return float(found[1]) * _UNITS[found[2]]


def _move(moves: Sequence[tuple[str, str]]) -> None:
    """Rename all files into place, or none."""
    done: list[str] = []
    try:
        for path, target in moves:
            os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
            if os.path.lexists(target):
                raise UserError(f"--out: {target} has come to exist meanwhile")
            os.rename(path, target)
            done.append(target)
    except BaseException:
        for target in done:
            os.unlink(target)
        raise


# -- samples -------------------------------------------------------------------------------------------


@dataclass
class Written:
    """`bad` counts the samples that were left out, by reason."""

    paths: list[str]
    num_samples: int
    num_bytes: int
    bad: Counter[str]


def _write(source: Source, pattern: str, max_size: float, max_count: int, *, stop: bool) -> Written:
    """Write one dataset.

    Raises:
        UserError: a bad sample, if `stop`.
        OSError: a shard cannot be written.
    """
    from tqdm import tqdm
    from webdataset.writer import ShardWriter

    written = Written([], 0, 0, Counter())

    def close(path: str) -> None:
        written.num_bytes += os.path.getsize(path)
        written.paths.append(path)
        shard_index.write_index(path)

    digits = len(str(max(1, len(source) - 1)))
    writer: Any = None
    try:
        for row in tqdm(range(len(source)), unit=" samples", desc=source.name, disable=None):
            try:
                with isolate_sample_errors(source=partial(source.origin, row)):
                    members = dict(members_of_sample(source.read(row), f"{row:0{digits}d}"))
            except SampleError as error:
                if stop:
                    raise UserError(f"--on_error stop: {error}") from None
                written.bad[error.reason] += 1
                tqdm.write(f"left out: {error}")
                continue
            if writer is None:  # it opens its first shard at once
                shape: dict[str, Any] = {"maxcount": max_count, "maxsize": max_size, "encoder": False, "mtime": 0}
                writer = ShardWriter(pattern, post=close, verbose=0, **shape)
            writer.write({"__key__": f"{row:0{digits}d}", **members})
            written.num_samples += 1
    finally:
        if writer is not None:
            writer.close()
    return written


def members_of_sample(sample: RawSample, key: str) -> Iterator[tuple[str, bytes]]:
    """(ending, bytes) of each member of a sample in a shard: its images, its video, its record.

    Raises:
        SampleError: an image or the video cannot be read, or JSON cannot hold the record.
    """
    from ..encode.conversation import image_names_of
    from ..encode.headers import file_ending
    from ..encode.video import video_of

    data = dict(sample.data)
    if names := image_names_of(data):
        members = []
        for place, name in enumerate(names):
            content = sample.resolve(name).read()
            ending = _suffix(name) or file_ending(content)
            members.append(ending if len(names) == 1 else f"{place}.{ending}")
            yield members[-1], content
        named = [f"{key}.{member}" for member in members]
        data["image"] = named[0] if isinstance(data["image"], str) else named
    elif (video := video_of(data)) is not None:
        with sample.resolve(video[0]).open() as file:
            ending = _suffix(video[0]) or "mp4"
            yield ending, file.read()
        member = f"{key}.{ending}"
        data["video"] = member if isinstance(data["video"], str) else [member]
    try:
        yield "json", json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SampleError("record_not_json", str(error), sample.origin) from None


def _suffix(name: str) -> str:
    suffix = os.path.splitext(name)[1][1:].lower()
    return suffix if _ENDING.fullmatch(suffix) and suffix != "json" else ""


def _report(name: str, written: Written) -> None:
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in written.bad.most_common())
    print(
        f"dataset {name!r}: {count(written.num_samples, 'samples')} in {count(len(written.paths), 'shards')}, "
        f"{written.num_bytes / 1e6:,.1f} MB" + (f"; left out: {left_out}" if left_out else "")
    )
