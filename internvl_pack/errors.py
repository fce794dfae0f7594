"""The two kinds of bad input: a user's mistake that ends the run, and a sample that leaves it."""

from __future__ import annotations


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

    def __reduce__(self):  # ValueError would unpickle with one argument
        return type(self), (self.reason, self.detail)
