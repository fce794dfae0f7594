"""Parquet files of a preset: a row a pack, in the order of the epochs and of the packs in them.

Each epoch begins a row group, and a group holds `per_group` packs: where a pack lies follows from its number.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError

_KEPT_GROUPS = 4


def parquet() -> Any:
    """pyarrow's parquet module, imported where it is used: training by streaming needs none of it."""
    import pyarrow.parquet

    return pyarrow.parquet


# Types by name: an alias of pyarrow's, `[alias]` for a list of it, or `Columns` of a list of records.
Columns = Mapping[str, Any]


def arrow_schema(columns: Columns) -> Any:
    import pyarrow as pa

    def of(kind: Any) -> Any:
        if isinstance(kind, str):
            return pa.type_for_alias(kind)
        return pa.list_(of(kind[0]) if isinstance(kind, list) else pa.struct([(k, of(v)) for k, v in kind.items()]))

    return pa.schema([(name, of(kind)) for name, kind in columns.items()])


class RowWriter:
    """Writes rows, `per_group` a row group. Use it as a context."""

    def __init__(self, path: Path, columns: Columns, per_group: int) -> None:
        self._schema, self._per_group = arrow_schema(columns), per_group
        self._writer = parquet().ParquetWriter(path, self._schema, compression="zstd", write_page_checksum=True)
        self._rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if len(self._rows) == self._per_group:
            self.end_group()

    def end_group(self) -> None:
        """What comes next begins a row group."""
        import pyarrow as pa

        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
            self._rows = []

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_group()
        self._writer.close()


class PackRows:
    """Reads the row of a pack; keeps a few row groups. Picklable, and a forked process opens its own file.

    Args:
        path: the file.
        counts: packs of each epoch.
        per_group: packs of a row group.
        columns: that are read.
        rows_of: a group's table as a sequence of rows; a function of a module.
    """

    def __init__(
        self,
        path: Path,
        counts: Sequence[int],
        per_group: int,
        columns: Sequence[str],
        rows_of: Callable[[Any], Sequence[Any]],
    ) -> None:
        self.path, self._per_group, self._columns, self._rows_of = path, per_group, list(columns), rows_of
        self._first_group = [0]
        for count in counts:
            self._first_group.append(self._first_group[-1] - (-count // per_group))
        self._open()

    def _open(self) -> None:
        self._file: tuple[int, Any] | None = None
        self._kept: OrderedDict[int, Sequence[Any]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_file", "_kept")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def row(self, epoch: int, number: int) -> Any:
        """The row of pack `number` of an epoch.

        Raises:
            UserError: the file is damaged.
        """
        group, at = divmod(number, self._per_group)
        group += self._first_group[epoch]
        if group not in self._kept:
            try:
                self._kept[group] = self._read(group)
            except (OSError, ValueError, LookupError, TypeError, NotImplementedError, MemoryError) as error:
                reason = " ".join(str(error).split())[:120] or type(error).__name__
                raise UserError(f"preset {self.path} is damaged ({reason}): plan it again") from None
            while len(self._kept) > _KEPT_GROUPS:
                self._kept.popitem(last=False)
        if at >= len(self._kept[group]):
            raise UserError(f"preset {self.path} is damaged (it has no pack {number:,}): plan it again")
        return self._kept[group][at]

    def _read(self, group: int) -> Sequence[Any]:
        if self._file is None or self._file[0] != os.getpid():
            self._file = os.getpid(), parquet().ParquetFile(self.path, page_checksum_verification=True)
        return self._rows_of(self._file[1].read_row_group(group, columns=self._columns, use_threads=False))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A file that is there in full or not at all."""
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)
