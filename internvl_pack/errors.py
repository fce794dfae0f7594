"""The two kinds of bad input: a user's mistake that ends the run, and a sample that leaves it."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

logger = logging.getLogger(__name__)

# Errors of the machine, not of a sample: too many open files, no memory for the kernel.
MACHINE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class UserError(ValueError):
    """A mistake in options, meta file or environment: one line that names what to change.

    Command-line programs print it without a traceback and exit with a non-zero code.
    """


def first_line(error: BaseException) -> str:
    """Of what an error says; its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Put `where`, an option or a folder, in front of a UserError that is raised inside."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}{error}") from error


class SampleError(ValueError):
    """One sample cannot be trained on.

    It leaves the run, counted under `reason`; its neighbours are unaffected.

    Attributes:
        reason: a short slug, one line of the ledger, such as `image_truncated`.
        detail: one sentence that names the image, key or field, but not the sample's place.
        source: that place, `file:line 12` or `shard:key@byte`; None until a caller that knows it sets it.
    """

    def __init__(self, reason: str, detail: str, source: str | None = None) -> None:
        super().__init__(reason, detail, source)
        self.reason = reason
        self.detail = detail
        self.source = source

    def __str__(self) -> str:
        return f"{self.reason}: {self.located_detail}"

    @property
    def located_detail(self) -> str:
        """`source: detail`, for outputs without a separate source column."""
        return f"{self.source}: {self.detail}" if self.source else self.detail


class RemoteDataError(Exception):
    """A remote file was about to be read inside `addresses.local_only()`."""


_traces: ContextVar[bool] = ContextVar("_traces", default=True)


@contextmanager
def without_traces() -> Iterator[None]:
    """Log no traceback inside: for a first look at samples that are read, and reported, again later."""
    token = _traces.set(False)
    try:
        yield
    finally:
        _traces.reset(token)


@contextmanager
def isolate_sample_errors(what: str = "", *, source: Callable[[], str] | None = None) -> Iterator[None]:
    """Turn any exception raised inside into a SampleError of the sample that is read, encoded or decoded there.

    Readers, decoders and templates may raise anything, a user's own among them, and one sample of millions must not
    end a run. The SampleError names the exception: `out_of_memory` (MemoryError), `unreadable` (OSError) or
    `unexpected_error`, whose traceback is logged. A fault in every sample still stops the run: none of a dataset's
    first samples loads, or `max_bad_fraction` is passed.

    Passed through are UserError, ImportError (a missing package), RemoteDataError, the machine's own errors
    (MACHINE_ERRORS), and what is no `Exception`: KeyboardInterrupt, SystemExit.

    Args:
        what: the thing that is read, for the message: an image, a part of the sample.
        source: gives the sample's place, for a SampleError without one. Called only then: for a row of a shard it costs
            a read.

    Raises:
        SampleError: any other exception.
    """
    try:
        yield
    except SampleError as error:
        if source is not None and error.source is None:
            error.source = source()
        raise
    except (UserError, ImportError, RemoteDataError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in MACHINE_ERRORS:
            raise
        place = None if source is None else source()
        reason = "unexpected_error"
        if isinstance(error, MemoryError):
            reason = "out_of_memory"
        elif isinstance(error, OSError):
            reason = "unreadable"
        elif _traces.get():
            logger.warning("%s: a fault in reading one sample, which is left out", place or what, exc_info=True)
        text = " ".join(str(error).split())[:500].encode("utf-8", "backslashreplace").decode()
        detail = ": ".join(filter(None, (what, type(error).__name__, text)))
        raise SampleError(reason, detail, place) from error
