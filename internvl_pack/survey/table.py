"""`SurveyTable`: the lengths of one dataset's rows, kept on disk for every run that reads them.

    <root>/<dataset>-<key>/
        about.json      what the lengths depend on: the data's content, the encoding options
        lengths.npy     uint64 (rows,), mapped into memory and written in place by any process, row by row
        notes.sqlite    rows of which eight bytes do not say all: where they may be cut, a tree's branches, or why they
                    cannot be used

An entry holds all there is to say of an ordinary row:

    bits 0-23 tokens   24-39 tiles   40-42 verdict   43-47 crowd   48-63 check

The crowd says how the tiles are shared among pictures, where that matters to what they cost (see `crowd_of`).

The check is a hash of the entry, its row and the table's key. So an entry is whole and this row's own, or it counts as
missing and is measured again. No lock is needed: a writer may be killed at any moment, two may write the same row,
and a damaged or foreign file costs time but is never trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import sqlite3
import tempfile
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..errors import SampleError, UserError
from ..records import Branch, Record, Span

logger = logging.getLogger(__name__)

VERSION = 5  # of the layout and of what is measured: another one where records get other ids
MISSING, PLAIN, CUTTABLE, REFUSED, TREE = range(5)
MAX_TOKENS = (1 << 24) - 1
MAX_TILES = (1 << 16) - 1
# 1,024 times 1, 2^1/4, 2^1/2 ...: the crowd n > 0 stands for as many pictures of one size.
_CROWDS = (0, *(round(1024 * 2 ** (n / 4)) for n in range(31)))
_VALUE_BITS = 48
_VALUE_MASK = (1 << _VALUE_BITS) - 1
_WAIT = 60  # seconds for another process's write

T = TypeVar("T")


def crowd_of(tiles: Sequence[int]) -> int:
    """How many pictures of one size have the same sum of squared tiles as these, to 9 %, as five bits.

    0 where there are no pictures; one picture, and 2, 4, 8 ... of one size, are exact.
    """
    if not tiles:
        return 0
    pictures = 1024 * sum(tiles) ** 2 / sum(n * n for n in tiles)
    return min(range(1, len(_CROWDS)), key=lambda n: max(_CROWDS[n] / pictures, pictures / _CROWDS[n]))


def crowds_of(pictures: np.ndarray) -> np.ndarray:
    """As `crowd_of`, from numbers of pictures of one size, at least 1."""
    return np.clip(1 + np.rint(4 * np.log2(pictures)), 1, len(_CROWDS) - 1)


def tile_pairs(num_tiles: int, crowd: int) -> int:
    """The sum of the pictures' squared tiles that a crowd stands for; 0 for the crowd 0."""
    return num_tiles**2 * 1024 // _CROWDS[crowd] if crowd else 0


class Note(NamedTuple):
    """What is noted of a row: of one that may be cut what a `Record` has, of a refused one its `error`.

    branches: of a tree, (tokens, supervised tokens) of each; what else there is of them does not matter to a plan. It
        has no spans.
    is_pair, is_joined: as a `Record` has them.
    """

    spans: tuple[Span, ...] = ()
    num_system_tokens: int = 0
    num_loss_tokens: int = 0
    error: tuple[str, str, str | None] | None = None  # reason, detail, source
    branches: tuple[tuple[int, int], ...] = ()
    is_pair: bool = False
    is_joined: bool = False

    def to_json(self) -> str:
        spans = [[s.num_tokens, s.num_tiles, int(s.ends_turn)] for s in self.spans]
        values: list[Any] = [spans, self.num_system_tokens, self.num_loss_tokens, self.error]
        if self.branches:
            values += [self.branches, 2 if self.is_joined else int(self.is_pair)]
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Note:
        """The note that `text` holds.

        Raises:
            ValueError, TypeError, OverflowError, RecursionError: it holds none.
        """
        spans, num_system_tokens, num_loss_tokens, error, *tree = json.loads(text)
        if error is not None:
            reason, detail, source = error
            error = (str(reason), str(detail), None if source is None else str(source))
        spans = tuple(Span(int(t), int(v), bool(e)) for t, v, e in spans)
        branches, kind = tree or ((), 0)
        found = tuple((int(n), int(trained)) for n, trained in branches)
        return cls(spans, int(num_system_tokens), int(num_loss_tokens), error, found, kind == 1, kind == 2)

    def record(self, sample_id: str, num_tokens: int, num_tiles: int, num_tile_pairs: int = 0) -> Record:
        """What planning knows of a row that may be cut."""
        row = sample_id if self.is_joined else ""
        branches = tuple(Branch(*each, sample_id=row) for each in self.branches)
        rest = (self.num_loss_tokens, self.spans, self.num_system_tokens, branches, self.is_pair)
        return Record(sample_id, num_tokens, num_tiles, *rest, num_tile_pairs=num_tile_pairs)


class Measured(NamedTuple):
    """One row: its size and verdict, and a note where there is more to say."""

    num_tokens: int
    num_tiles: int
    verdict: int
    note: Note | None = None
    crowd: int = 0

    @classmethod
    def of_record(cls, record: Record, *, cuttable: bool, crowd: int = 0) -> Measured:
        if record.branches:
            branches = tuple((branch.num_tokens, branch.num_loss_tokens) for branch in record.branches)
            note = Note((), 0, record.num_loss_tokens, None, branches, record.is_pair, record.is_joined)
            return cls(record.num_tokens, record.num_tiles, TREE, note, crowd)
        if cuttable:
            note = Note(record.spans, record.num_system_tokens, record.num_loss_tokens)
            return cls(record.num_tokens, record.num_tiles, CUTTABLE, note, crowd)
        return cls(record.num_tokens, record.num_tiles, PLAIN, None, crowd)

    @classmethod
    def of_error(cls, error: SampleError) -> Measured:
        return cls(0, 0, REFUSED, Note(error=(error.reason, error.detail, error.source)))

    def fits_note(self) -> bool:
        """Whether the note is one of this row: spans that add up, or an error where the row is refused."""
        if self.verdict == PLAIN:
            return self.note is None
        if self.note is None or (self.verdict == REFUSED) != (self.note.error is not None):
            return False
        spans, branches = self.note.spans, self.note.branches
        if self.verdict == TREE:
            positive = bool(branches) and all(n > 0 <= trained for n, trained in branches)
            return positive and sum(n for n, _ in branches) < self.num_tokens
        return self.verdict == REFUSED or (
            self.num_tokens >= self.note.num_system_tokens >= 0
            and self.num_tokens >= self.note.num_loss_tokens >= 0
            and not branches
            and all(s.num_tokens >= 0 <= s.num_tiles for s in spans)
            and sum(s.num_tokens for s in spans) == self.num_tokens
            and sum(s.num_tiles for s in spans) == self.num_tiles
        )


class Lengths(NamedTuple):
    """Rows as arrays (n,): int64 tokens, int64 tiles, uint8 verdicts, uint8 crowds."""

    tokens: np.ndarray
    tiles: np.ndarray
    verdicts: np.ndarray
    crowds: np.ndarray


@dataclass(frozen=True)
class SurveyKey:
    """What the lengths of a dataset depend on.

    Attributes:
        name: the dataset's, for people who look into the folder.
        num_rows: rows of the data.
        facts: JSON values: the content of the data and the options of encoding.
    """

    name: str
    num_rows: int
    facts: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that stand for all of it."""
        facts = {"version": VERSION, "rows": self.num_rows, "facts": dict(self.facts)}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def folder(self) -> str:
        return f"{re.sub(r'[^A-Za-z0-9._-]+', '_', self.name)[:48]}-{self.digest}"


class SurveyTable:
    """Reads and writes the lengths of one dataset. Picklable; a forked process opens its own files.

    Args:
        root: the folder of all tables; None keeps this one in a folder that goes with the process.
        key: what the lengths depend on.

    Raises:
        UserError: there is no room for the table.
    """

    def __init__(self, root: Path | None, key: SurveyKey) -> None:
        self.key = key
        self._seed = int(key.digest, 16)
        self.folder = self._make_folder(root)
        self._notes: tuple[int, sqlite3.Connection] | None = None
        self._entries = self._open_lengths()

    # -- files ---------------------------------------------------------------------------------------

    def _make_folder(self, root: Path | None) -> Path:
        if root is not None:
            folder = root / self.key.folder
            try:
                folder.mkdir(parents=True, exist_ok=True)
                _write_about(folder / "about.json", self.key)
                return folder
            except OSError as error:
                logger.warning(
                    "survey %s cannot be kept (%s): lengths are measured for this run alone", folder, error.strerror
                )
        self._temporary = tempfile.TemporaryDirectory(prefix="internvl-pack-survey-")
        return Path(self._temporary.name)

    def _open_lengths(self) -> np.ndarray:
        path = self.folder / "lengths.npy"
        if not path.exists():
            self._make_lengths(path)
        try:
            return self._mapped(path)
        except (OSError, ValueError, SyntaxError, tokenize.TokenError) as error:  # numpy parses the header as Python
            logger.warning("survey %s is damaged (%s) and is made anew", path, error)
            path.unlink(missing_ok=True)
            self._make_lengths(path)
            return self._mapped(path)

    def _mapped(self, path: Path) -> np.ndarray:
        """The table, written in place; what is measured beside another user's table stays with this process."""
        found = np.lib.format.open_memmap(path, mode="c")  # which, unlike "r+", refuses a cut file
        if (found.shape, found.dtype) != ((self.key.num_rows,), np.dtype(np.uint64)):
            raise ValueError("it is of another shape")
        return np.lib.format.open_memmap(path, mode="r+") if os.access(path, os.W_OK) else found

    def _make_lengths(self, path: Path) -> None:
        """An empty file with its space reserved: a map over a full disk would end the process. Another's stays."""
        beside = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            np.lib.format.open_memmap(beside, mode="w+", dtype=np.uint64, shape=(self.key.num_rows,))
            with open(beside, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
            with contextlib.suppress(FileExistsError):
                os.link(beside, path)
        except OSError as error:
            free = shutil.disk_usage(self.folder).free
            raise UserError(
                f"survey {path}: no room for {8 * self.key.num_rows:,} bytes ({free:,} are free): {error.strerror}; "
                "give another folder with survey_dir"
            ) from None
        finally:
            beside.unlink(missing_ok=True)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_notes": None, "_entries": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._entries = self._open_lengths()

    # -- entries -------------------------------------------------------------------------------------

    def lengths(self, rows: np.ndarray) -> Lengths:
        """Of these rows, int64 (n,); the verdict is MISSING where nothing valid is known."""
        entries = self._entries[rows]
        values = entries & np.uint64(_VALUE_MASK)
        valid = (entries >> np.uint64(_VALUE_BITS)) == self._checks(values, rows)
        states = (values >> np.uint64(40)).astype(np.uint8)
        verdicts = np.where(valid, states & np.uint8(7), np.uint8(MISSING))
        verdicts[verdicts > TREE] = MISSING
        tokens = (values & np.uint64(MAX_TOKENS)).astype(np.int64)
        tiles = (values >> np.uint64(24) & np.uint64(MAX_TILES)).astype(np.int64)
        return Lengths(tokens, tiles, verdicts, states >> np.uint8(3))

    def _checks(self, values: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """16 bits a row: splitmix64's finaliser over value, row and key, as order/permutation.py has it."""
        x = values ^ (rows.astype(np.uint64) * np.uint64(0xD6E8FEB86659FD93)) ^ np.uint64(self._seed)
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (x ^ (x >> np.uint64(31))) >> np.uint64(48)

    def put(self, rows: Sequence[int], measured: Sequence[Measured]) -> None:
        """Keep what was measured of these rows. Notes go first, so that no entry lacks its own."""
        notes = [(row, one.note.to_json()) for row, one in zip(rows, measured, strict=True) if one.note is not None]
        if notes:
            self._on_notes(lambda c: c.executemany("INSERT OR REPLACE INTO notes VALUES (?, ?)", notes))
        sizes = [(one.num_tokens, one.num_tiles, one.verdict | one.crowd << 3) for one in measured]
        assert all(0 <= n <= MAX_TOKENS and 0 <= t <= MAX_TILES for n, t, _ in sizes), "a row beyond its entry"
        values = np.array([n | t << 24 | state << 40 for n, t, state in sizes], np.uint64)
        where = np.asarray(rows)
        self._entries[where] = values | self._checks(values, where) << np.uint64(_VALUE_BITS)

    def note(self, row: int) -> Note | None:
        """The note of a row, or None where there is none or it is damaged."""
        found = self._on_notes(lambda c: c.execute("SELECT note FROM notes WHERE row = ?", (row,)).fetchone())
        try:
            return None if found is None else Note.from_json(found[0])
        except (ValueError, TypeError, OverflowError, RecursionError):
            return None

    def forget_refusals(self) -> None:
        """Rows that an earlier run refused count as missing again: the user may have mended them.

        Before any process of a run reads the table.
        """
        refusals = "FROM notes WHERE note LIKE '[[],0,0,[%'"
        found = self._on_notes(lambda c: c.execute(f"SELECT row {refusals}").fetchall())
        if not found:
            return
        rows = np.array([n for (n,) in found if isinstance(n, int) and 0 <= n < self.key.num_rows], np.int64)
        self._entries[rows[self.lengths(rows).verdicts == REFUSED]] = 0
        self._on_notes(lambda c: c.execute(f"DELETE {refusals}"))

    @property
    def num_known(self) -> int:
        """Rows that need not be measured again."""
        return sum(int((verdicts != MISSING).sum()) for verdicts in self.verdicts())

    def verdicts(self) -> Iterator[np.ndarray]:
        """Of all rows, some at a time."""
        for start in range(0, self.key.num_rows, 1 << 20):
            yield self.lengths(np.arange(start, min(start + (1 << 20), self.key.num_rows))).verdicts

    # -- notes ---------------------------------------------------------------------------------------

    def _on_notes(self, action: Callable[[sqlite3.Connection], T]) -> T:
        """`action` on the notes: on a new file where theirs is damaged, in memory where it cannot be used."""
        path = self.folder / "notes.sqlite"
        try:
            return action(self._connection(path))
        except sqlite3.OperationalError as error:  # another process holds it, the disk is full, not ours to write
            logger.warning("survey %s cannot be used (%s): its rows are measured for this process alone", path, error)
            place = ":memory:"
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # a damaged schema is not even text
            logger.warning("survey %s is damaged (%s) and is made anew", path, error)
            for file in (path, path.with_name(f"{path.name}-journal")):  # the old journal is none of the new file
                file.unlink(missing_ok=True)
            place = str(path)
        self._notes = (os.getpid(), _open_notes(place))
        return action(self._notes[1])

    def _connection(self, path: Path) -> sqlite3.Connection:
        """This process's own: SQLite's must not cross a fork."""
        if self._notes is None or self._notes[0] != os.getpid():
            self._notes = (os.getpid(), _open_notes(str(path)))
        return self._notes[1]


def _open_notes(place: str) -> sqlite3.Connection:
    """Raises sqlite3.DatabaseError."""
    # Losing the last notes to a power cut is no harm: their rows are measured again.
    connection = sqlite3.connect(place, timeout=_WAIT, isolation_level=None)
    connection.text_factory = bytes  # what is no UTF-8 is a damaged note, not a damaged file
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("CREATE TABLE IF NOT EXISTS notes (row INTEGER PRIMARY KEY, note TEXT NOT NULL)")
    columns = [name for _, name, *_ in connection.execute("PRAGMA table_info(notes)")]
    if columns != [b"row", b"note"]:
        raise sqlite3.DatabaseError("it has other columns")
    connection.execute("SELECT count(*) FROM (SELECT 1 FROM notes LIMIT 1)").fetchone()
    return connection


def _write_about(path: Path, key: SurveyKey) -> None:
    if not path.exists():
        beside = path.with_name(f"{path.name}.{os.getpid()}.part")
        about = {"version": VERSION, "dataset": key.name, "rows": key.num_rows, **key.facts}
        beside.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, path)


def root_of(survey_dir: str | None) -> Path:
    """The folder of all tables: `survey_dir`, or below INTERNVL_PACK_CACHE, or below the user's cache."""
    if survey_dir:
        return Path(survey_dir).absolute()  # a process that changes its folder finds it again
    cache = os.environ.get("INTERNVL_PACK_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "internvl_pack"
    )
    return Path(cache).absolute() / "survey"
