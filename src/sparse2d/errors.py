"""The exceptions that users are meant to see."""


class UserError(ValueError):
    """A wrong input or option, told in one line with the numbers and the remedy.

    Entry points print its text and exit non-zero; any other exception is a bug and keeps its traceback.
    """


class BusyError(UserError):
    """Another process is at the same run; a sweep does its other jobs first."""
