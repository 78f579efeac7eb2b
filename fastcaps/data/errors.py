"""What can be wrong with data on disk. The messages say what to do next."""

from __future__ import annotations


class DataError(Exception):
    """The data asked for cannot be used; the message names the file, what was found and what is wanted."""


class MissingDataError(DataError, FileNotFoundError):
    """A file or folder of a data set is not where it was looked for."""

    def __str__(self) -> str:  # OSError would print its errno tuple
        return str(self.args[0])


class CorruptDataError(DataError, ValueError):
    """A file is there, but it is truncated, too long, or not of the kind that its name promises."""
