"""Errors of the readers, and the search for files."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Arrays = tuple[Images, Labels]


class DataError(Exception):
    """Data cannot be used; the message names the file, what was found and what is wanted."""


class MissingDataError(DataError, FileNotFoundError):
    """A file or folder of a data set was not found."""


class CorruptDataError(DataError, ValueError):
    """A file was found, but it is truncated, too long, or of another kind than its name says."""


def spellings(name: str) -> list[str]:
    """Return the names that a file may have: plain or ``.gz``, and with ``.idx`` for ``-idx``."""
    return [stem + end for stem in (name, name.replace("-idx", ".idx")) for end in ("", ".gz")]


def find(folder: str | Path, name: str) -> Path:
    """Return the path of the first of a file's :func:`spellings` in a folder; MissingDataError if there is none."""
    for spelling in spellings(name):
        if (path := Path(folder) / spelling).is_file():
            return path
    raise MissingDataError(f"{Path(folder) / name}: no such file")


@dataclass(frozen=True)
class Place:
    """The files of a data set, and where to look for them."""

    title: str  # the data set's name in messages
    folders: tuple[str, ...]  # tried in the data directory, in this order, then the directory itself
    files: tuple[str, ...]  # some of their files
    where: str  # how to get the files

    def folder_under(self, data_dir: str | Path | None, others: Collection[str] = ()) -> Path:
        """Return the first folder that holds one of the files; MissingDataError if none does.

        The data directory itself is not tried if its name is one of ``others``, the folders of other data sets.
        """
        if data_dir is None:
            raise MissingDataError(f"{self.title} needs a data directory (--data-dir, data_dir=…) with {self.where}")
        root = Path(data_dir).expanduser()
        candidates = [root / folder for folder in self.folders] + [root] * (root.resolve().name not in others)
        for candidate in candidates:
            if any((candidate / each).exists() for name in self.files for each in spellings(name)):
                return candidate  # if only some files are there, the reader says which is not
        tried = ", ".join(map(str, candidates))
        raise MissingDataError(
            f"{self.title} not found under {root}; looked for {self.files[0]} in {tried}. Wanted: {self.where}"
        )


def check_labels(path: Path, labels: npt.NDArray[np.integer], classes: int, first: int = 0) -> None:
    """Raise CorruptDataError if there are no labels, or some are not one of ``classes`` numbers from ``first`` on."""
    if len(labels) == 0 or labels.min() < first or labels.max() >= first + classes:
        found = f"the labels {labels.min()} to {labels.max()}" if len(labels) else "no image"
        raise CorruptDataError(f"{path}: holds {found}, want labels from {first} to {first + classes - 1}")
