"""The two kinds of bad input: a user's mistake that ends the run, and a sample that leaves it."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

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
        detail: one sentence that names the image, key or field, but not the sample's place.
        source: that place, `file:line 12` or `shard:key@byte`; None until somebody who knows it has told.
    """

    def __init__(self, reason: str, detail: str, source: str | None = None) -> None:
        super().__init__(reason, detail, source)
        self.reason = reason
        self.detail = detail
        self.source = source

    def __str__(self) -> str:
        return f"{self.reason}: {self.told}"

    @property
    def told(self) -> str:
        """The detail behind its place, for where the place has no field of its own."""
        return f"{self.source}: {self.detail}" if self.source else self.detail


class FarAwayError(Exception):
    """Data would have to be fetched from a server where only what is near may be read; see `addresses.only_near`."""


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
def costs_one_sample(what: str = "", *, source: Callable[[], str] | None = None) -> Iterator[None]:
    """Whatever goes wrong inside is the trouble of the one sample that is read, encoded or decoded there.

    Readers, decoders and templates, a user's own among them, raise what they like, and one sample of millions must not
    end a run. Everything becomes a SampleError that names the exception: `out_of_memory` (MemoryError), `unreadable`
    (OSError) or `unexpected_error`, whose traceback is logged. A fault that is in all samples stops the run all the
    same, since none of the first ones loads, or by `max_bad_fraction`.

    Passed on are UserError, ImportError (something is not installed), FarAwayError, errors of the machine
    (MACHINE_ERRORS), and what is no `Exception`: KeyboardInterrupt, SystemExit.

    Args:
        what: is read there, for the message: an image, a part of the sample.
        source: tells where the sample stands, for any SampleError that does not say it. Called when there is one only:
            it takes a read to tell it of a row of a shard.
    """
    try:
        yield
    except SampleError as error:
        if source is not None and error.source is None:
            error.source = source()
        raise
    except (UserError, ImportError, FarAwayError):
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
