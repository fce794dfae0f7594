"""The two kinds of bad input: a user's mistake that ends the run, and a sample that leaves it."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

logger = logging.getLogger(__name__)

#: The machine's trouble, whatever sample is read: too many open files, no memory for the kernel.
MACHINE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class UserError(ValueError):
    """A mistake in options, meta file or environment: one line that names what to change.

    Command-line programs print it without a traceback and exit with a non-zero code.
    """


class SampleError(ValueError):
    """One sample cannot be trained on.

    It leaves the run, counted under `reason`; its neighbours are unaffected.

    Attributes:
        reason: a short slug, one line of the ledger, such as `image_truncated`.
        detail: one sentence that names the file, row, key or field.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[SampleError], tuple[Any, ...]]:  # ValueError would unpickle with one argument
        return type(self), (self.reason, self.detail)


def without_place(detail: str, source: str) -> str:
    """An error's detail without the place that it begins with, where `source`, told beside it, is that place.

    `source` may be the longer path to it: details of planned packs name paths below the meta file's folder.
    """
    place, colon, rest = detail.partition(": ")
    return rest if colon and (source == place or source.endswith("/" + place)) else detail


class FarAwayError(Exception):
    """Data would have to be fetched from a server where only what is near may be read; see `refs.only_near`."""


_traces: ContextVar[bool] = ContextVar("_traces", default=True)


@contextmanager
def without_traces() -> Iterator[None]:
    """No traceback is logged inside: for a look ahead at samples that are read, and told of, again."""
    token = _traces.set(False)
    try:
        yield
    finally:
        _traces.reset(token)


@contextmanager
def costs_one_sample(where: str | Callable[[], str]) -> Iterator[None]:
    """Whatever goes wrong inside is the trouble of the one sample that is read, encoded or decoded there.

    Readers, decoders and templates, a user's own among them, raise what they like, and one sample of millions must not
    end a run. Everything becomes a SampleError that names the exception: `out_of_memory` (MemoryError), `unreadable`
    (OSError) or `unexpected_error`, whose traceback is logged. A fault that is in all samples stops the run all the
    same, since none of the first ones loads, or by `max_bad_fraction`.

    Passed on are UserError, ImportError (something is not installed), FarAwayError, errors of the machine
    (MACHINE_ERRORS), and what is no `Exception`: KeyboardInterrupt, SystemExit.

    Args:
        where: what was read, for the message: a file and line, an image. Called when there is a fault, if it must be
            looked up: where a row of a shard stands takes a read.
    """
    try:
        yield
    except (SampleError, UserError, ImportError, FarAwayError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in MACHINE_ERRORS:
            raise
        place = where if isinstance(where, str) else where()
        reason = "unexpected_error"
        if isinstance(error, MemoryError):
            reason = "out_of_memory"
        elif isinstance(error, OSError):
            reason = "unreadable"
        elif _traces.get():
            logger.warning("%s: a fault in reading one sample, which is left out", place, exc_info=True)
        text = " ".join(str(error).split())[:500].encode("utf-8", "backslashreplace").decode()
        raise SampleError(reason, f"{place}: {type(error).__name__}{': ' * bool(text)}{text}") from error
