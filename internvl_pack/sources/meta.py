"""The meta file: which datasets a run trains on, as InternVL writes it, with `shards` and `weight` added."""

from __future__ import annotations

import json
import logging
import math
import os
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..errors import UserError
from .addresses import is_remote, system_path
from .data_path import entry_of, fields_of_lines
from .names import meant
from .normalise import TURNS
from .parse import kind_of, refuse_constant
from .reach import hosts_of
from .tables import is_table, no_table

logger = logging.getLogger(__name__)

MAX_META_BYTES = 64 << 20
MAX_SHARDS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """One dataset of a meta file, checked, its paths resolved against the meta file's folder.

    Attributes:
        name: the key in the meta file; the first part of every sample id.
        root: folder that image names are joined to; empty where they are absolute or in shards.
        annotation: path of a file of JSON lines, or None where `shards` are given.
        shards: paths of tar shards, braces expanded, or None where `annotation` is given.
        caption: of shards without records: the question that each image's `.txt` member answers.
        data_augment: JPEG re-compression of the images.
        repeat_time: how often an epoch visits each sample; 0.5 is a half of them.
        weight: share in the mixture instead of `repeat_time` times its size; None for that.
        max_dynamic_patch: this dataset's limit of tiles an image instead of the run's.
        length: what the meta file claims; only compared with the real count.
        meta_file: the meta file, for messages.
        source: a registered kind of source instead of `annotation` and `shards`; see `register_source`.
        options: what its factory is called with.
        hosts: of all addresses in the meta file, as `reach.host_of` writes them: rows may name them too.
    """

    name: str
    root: str = ""
    annotation: str | None = None
    shards: tuple[str, ...] | None = None
    caption: str | None = None
    data_augment: bool = False
    repeat_time: float = 1.0
    weight: float | None = None
    max_dynamic_patch: int | None = None
    length: int | None = None
    meta_file: str = ""
    source: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    hosts: frozenset[str] = frozenset()

    @property
    def where_images_are(self) -> str:
        """Where images are looked for, and what to do if none is there; "" where names stand for themselves."""
        root = self.root or self.options.get("root")
        if not root or self.shards:
            return ""
        place = "in a meta file" if self.root else "in a meta file, beside a 'source' in its 'options'"
        return f"image names are joined to {root}; if they lie elsewhere, give that folder as 'root' {place}"


KEYS = tuple(each.name for each in fields(DatasetSpec) if each.name not in ("name", "meta_file", "hosts"))


def load_meta(path: str | os.PathLike[str]) -> tuple[DatasetSpec, ...]:
    """Read and check a meta file: `{name: {root, annotation | shards, data_augment, repeat_time, ...}}`.

    A path of data itself stands for a meta file beside it that names it alone (`data_path.entry_of`). Relative paths
    are looked for in the meta file's folder; where nothing is there but the working folder has it, as in InternVL's own
    meta files, that is taken, with a warning. Keys that start with `_` are comments.

    Returns:
        the datasets in the file's order.

    Raises:
        UserError: naming file, dataset and key: what is missing, of the wrong type, unknown or given twice. Every
            annotation file and shard must exist.
    """
    meta_file = os.fspath(path)
    content: Any = entry_of(meta_file) or _read_meta(meta_file)
    if not isinstance(content, dict):
        raise UserError(f"{meta_file}: a meta file is one JSON object {{name: {{...}}}}, not {kind_of(content)}")
    meta_file = _absolute(meta_file)  # rows are found also after the process has changed its folder
    specs = tuple(
        _dataset(meta_file, name, entry)
        for name, entry in content.items()
        if not name.startswith("_comment") and not (name.startswith("_") and not isinstance(entry, dict))
    )
    if not specs:
        raise UserError(f"{meta_file}: no dataset in it")
    hosts = hosts_of(address for spec in specs for address in (spec.root, spec.annotation, *(spec.shards or ())))
    return tuple(replace(spec, hosts=hosts) for spec in specs)


def _read_meta(meta_file: str) -> Any:
    try:
        with open(system_path(meta_file), "rb") as file:
            is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            raw = file.read(MAX_META_BYTES + 1) if is_file else b""  # a pipe would wait
    except FileNotFoundError:
        raise UserError(f"meta file {meta_file} {no_table(meta_file)} (working folder: {os.getcwd()})") from None
    except IsADirectoryError:
        raise UserError(
            f"{meta_file} is a folder without a saved Dataset, Parquet files or tar shards: name a meta file or a file "
            "of data in it"
        ) from None
    except OSError as error:
        raise UserError(f"meta file {meta_file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"meta file {meta_file!r} cannot be a file name: {error}") from None
    if not is_file:
        raise UserError(f"meta file {meta_file} is not a file")
    if len(raw) > MAX_META_BYTES:
        raise UserError(f"{meta_file} is too large for a meta file: is it an annotation file?")
    try:
        return json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_no_duplicates, parse_constant=refuse_constant)
    except UnicodeDecodeError as error:
        raise UserError(f"{meta_file}: byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and (fields := fields_of_lines(raw)):
            near = next((hint for name in fields if "did you mean" in (hint := meant(name, TURNS, cutoff=0.75))), "")
            raise UserError(
                f"{meta_file} looks like JSON lines whose records have the fields {', '.join(map(repr, fields))}: the "
                f"turns are expected in 'conversations' or 'messages'{near}"
            ) from None
        hint = " (a meta file is one JSON object)" if error.msg == "Extra data" else ""
        raise UserError(f"{meta_file}: line {error.lineno}, column {error.colno}: {error.msg}{hint}") from None
    except RecursionError:
        raise UserError(f"{meta_file}: nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{meta_file}: {error}") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is given twice in one object: rename or remove one")
    return found


def _dataset(meta_file: str, name: str, entry: Any) -> DatasetSpec:
    where = f"{meta_file}: dataset {name!r}"
    if not name.strip():
        raise UserError(f"{where}: give it a name")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: the name holds half a surrogate pair, which is no character") from None
    if not isinstance(entry, dict):
        raise UserError(f"{where}: expected an object with the keys {', '.join(KEYS)}, found {kind_of(entry)}")
    _check_keys(where, entry)
    annotation = _text(where, entry, "annotation")
    patterns = _patterns(where, entry)
    source = _text(where, entry, "source")
    options = entry.get("options", {})
    if not isinstance(options, dict):
        raise UserError(f"{where}: 'options' must be an object, found {kind_of(options)}")
    if source is None and "options" in entry:
        raise UserError(f"{where}: 'options' belong to a 'source', which is not given")
    if source is not None and (annotation is not None or patterns is not None or entry.get("root")):
        raise UserError(f"{where}: 'source' stands alone: leave out 'annotation', 'shards' and 'root'")
    if source is None and (annotation is None) == (patterns is None):
        found = "both 'annotation' and 'shards'" if annotation is not None else "neither 'annotation' nor 'shards'"
        raise UserError(f"{where}: {found}: give exactly one of them")
    caption = _text(where, entry, "caption")
    if caption is not None and patterns is None:
        raise UserError(f"{where}: 'caption' belongs to 'shards', which are not given")
    folder = os.path.dirname(meta_file)
    root = _root(where, folder, _text(where, entry, "root"), needed=annotation is not None)
    if annotation is not None:
        (annotation,) = _existing_files(where, "annotation", folder, [annotation])
        if is_table(annotation):
            source, options = "datasets", {"path": os.path.abspath(annotation), "root": _absolute(root)}
            annotation, root = None, ""
    shards = None if patterns is None else tuple(_existing_shards(where, folder, patterns))
    repeat_time = _number(where, entry, "repeat_time", zero=False)
    return DatasetSpec(
        name=name,
        root=root,
        annotation=annotation,
        shards=shards,
        caption=caption,
        data_augment=_flag(where, entry, "data_augment"),
        repeat_time=1.0 if repeat_time is None else repeat_time,
        weight=_number(where, entry, "weight", zero=True),
        max_dynamic_patch=_count(where, entry, "max_dynamic_patch", at_least=1),
        length=_count(where, entry, "length", at_least=0),
        meta_file=meta_file,
        source=source,
        options=options,
    )


def _check_keys(where: str, entry: dict[str, Any]) -> None:
    for key in entry:
        if key in KEYS or key.startswith("_"):
            continue
        if "did you mean" in (hint := meant(key, KEYS, cutoff=0.75)):
            raise UserError(f"{where}: unknown key {key!r}{hint}")
        logger.warning("%s: unknown key %r is ignored (known: %s)", where, key, ", ".join(KEYS))


def _text(where: str, entry: dict[str, Any], key: str) -> str | None:
    value = entry.get(key)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: {key!r} must be a string, found {kind_of(value)}")
    if key != "root" and value == "":
        raise UserError(f"{where}: {key!r} is empty")
    return value


def _flag(where: str, entry: dict[str, Any], key: str) -> bool:
    value = entry.get(key, False)
    if not isinstance(value, bool):
        raise UserError(f"{where}: {key!r} must be true or false, found {value!r}")
    return value


def _number(where: str, entry: dict[str, Any], key: str, *, zero: bool) -> float | None:
    value = entry.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"{where}: {key!r} must be a number, found {value!r}")
    try:
        value = float(value)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise UserError(f"{where}: {key!r} must be {'at least' if zero else 'more than'} 0, found {value:g}")
    return value


def _count(where: str, entry: dict[str, Any], key: str, *, at_least: int) -> int | None:
    value = entry.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise UserError(f"{where}: {key!r} must be a whole number of at least {at_least}, found {value!r}")
    return value


def _patterns(where: str, entry: dict[str, Any]) -> list[str] | None:
    value = entry.get("shards")
    if value is None:
        return None
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, list) or not all(isinstance(p, str) and p for p in patterns):
        raise UserError(f"{where}: 'shards' must be a path, a brace pattern or a list of them, found {value!r:.200}")
    if not patterns:
        raise UserError(f"{where}: 'shards' is an empty list")
    return patterns


def _existing_shards(where: str, folder: str, patterns: list[str]) -> list[str]:
    paths = [path for pattern in patterns for path in _expand(where, pattern)]
    if len(paths) > MAX_SHARDS:
        raise UserError(f"{where}: 'shards' expands to {len(paths)} paths, more than {MAX_SHARDS}")
    found = _existing_files(where, "shards", folder, paths)
    real = [os.path.realpath(path) for path in found]
    if len(set(real)) < len(real):
        twice = Counter(real).most_common(1)[0][0]
        raise UserError(f"{where}: 'shards' names {twice} twice: use 'repeat_time' to repeat samples")
    return found


def _expand(where: str, pattern: str) -> list[str]:
    """Braces, `::` and `${WDS_...}` as the webdataset library expands them."""
    if not any(mark in pattern for mark in ("{", "}", "::", "$")):
        return [pattern]  # the import below costs seconds
    from webdataset.shardlists import expand_urls

    try:
        return expand_urls(pattern)
    except ValueError as error:
        raise UserError(f"{where}: 'shards' {pattern!r} cannot be expanded: {error or type(error).__name__}") from None
    except KeyError as error:
        raise UserError(f"{where}: 'shards' {pattern!r}: the environment has no {error}") from None


def _existing_files(where: str, key: str, folder: str, paths: list[str]) -> list[str]:
    """The paths against the meta file's folder, or all of them against the working folder; each a readable file.

    Addresses stand for themselves, and are asked for when the data is opened.
    """
    if any(map(is_remote, paths)):
        local = [path for path in paths if not is_remote(path)]
        found = iter(_existing_files(where, key, folder, local) if local else ())
        return [path if is_remote(path) else next(found) for path in paths]
    beside = [os.path.join(folder, path) for path in paths]
    tables = key == "annotation"
    first = _problem(beside[0], tables)
    if first == "does not exist" and not os.path.isabs(paths[0]) and _problem(paths[0], tables) is None:
        logger.warning("%s: %r %s is not in the meta file's folder; the working folder's is used", where, key, paths[0])
        beside = [os.path.abspath(path) for path in paths]
    for path in beside:
        problem = _problem(path, tables)
        if problem is not None:
            hint = ""
            if tables and problem in ("does not exist", "is a folder, not a file"):
                problem = no_table(path)
            if key == "shards" and any(mark in path for mark in "*?["):
                hint = "; patterns are written with braces, such as shard-{0000..0127}.tar"
            raise UserError(f"{where}: {key!r}: {path} {problem}{hint}")
    return beside


def _problem(path: str, tables: bool) -> str | None:
    """Why a path is no readable file, nor, where `tables` may be, one of these."""
    if tables and "\0" not in path and is_table(path):
        return None
    try:
        raw = system_path(path)
        mode = os.stat(raw).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "does not exist"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except ValueError as error:
        return f"cannot be a file name: {error}"
    if stat.S_ISDIR(mode):
        return "is a folder, not a file"
    if not stat.S_ISREG(mode):
        return "is not a regular file"
    return None if os.access(raw, os.R_OK) else "cannot be read: permission denied"


def _absolute(root: str) -> str:
    return root if is_remote(root) else os.path.abspath(root)


def _root(where: str, folder: str, root: str | None, *, needed: bool) -> str:
    if not root:
        return folder if needed else ""
    if is_remote(root):
        return root
    beside = os.path.join(folder, root)
    if os.path.isdir(beside):
        return beside
    if not os.path.isabs(root) and os.path.isdir(root):
        logger.warning("%s: 'root' %s is not in the meta file's folder; the working folder's is used", where, root)
        return os.path.abspath(root)
    if needed:
        logger.warning("%s: 'root' %s is not a folder: no image will be found there", where, beside)
    return beside
