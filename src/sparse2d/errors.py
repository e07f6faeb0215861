"""The exceptions that users are meant to see."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

# What a file system refuses for reasons of the user's: no room, no permission, a file where a folder should be.
REFUSALS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
}


class UserError(ValueError):
    """A wrong input or option, told in one line with the numbers and the remedy.

    Entry points print its text and exit non-zero; any other exception is a bug and keeps its traceback.
    """


class BusyError(UserError):
    """Another process is at the same run; a sweep does its other jobs first."""


@contextmanager
def refusals_told(results_dir: str) -> Iterator[None]:
    """Raise what the file system refuses as the user's error.

    Raises:
        UserError: for an ``OSError`` of ``REFUSALS``; any other one is a bug.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        # A write to an open file does not know its name.
        reason = ": ".join(filter(None, (error.filename, error.strerror)))
        raise UserError(f"{reason}; results_dir={results_dir} must be writable, with room") from error
