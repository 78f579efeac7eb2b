"""Shared by the readers: errors, the search for files, and optional packages."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def existing(path: str | Path, kind: str) -> Path:
    """Return the path of an existing file; MissingDataError with the ``kind`` of file that is wanted."""
    path = Path(path)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "no such file"
        raise MissingDataError(f"{path}: {what}; {kind} is wanted here")
    return path


def spellings(name: str) -> list[str]:
    """Return the names that a file may have: plain or ``.gz``, and with ``.idx`` for ``-idx``."""
    stems = dict.fromkeys((name, name.replace("-idx", ".idx")))
    return [stem + end for stem in stems for end in ("", ".gz")]


def find(folder: Path, name: str) -> Path:
    """Return the path of the first of a file's :func:`spellings` in a folder; MissingDataError if there is none."""
    for spelling in spellings(name):
        if (folder / spelling).is_file():
            return folder / spelling
    raise MissingDataError(f"{folder / name}: no such file, nor {name}.gz")


@dataclass(frozen=True)
class Place:
    """The files of a data set, and where to look for them."""

    title: str  # the data set's name in messages
    folders: tuple[str, ...]  # tried in the data directory, in this order, then the directory itself
    files: tuple[str, ...]  # their files
    where: str  # how to get the files

    def folder_under(self, data_dir: str | Path | None, others: Collection[str] = ()) -> Path:
        """Return the first folder that holds one of the files; MissingDataError if none does.

        The data directory itself is not tried if its name is one of ``others``, the folders of other data sets.
        """
        if data_dir is None:
            raise MissingDataError(f"{self.title} needs a data directory (--data-dir, data_dir=…) with {self.where}")
        root = Path(data_dir).expanduser()
        if not root.is_dir():
            raise MissingDataError(f"{root}: no such folder; it should hold {self.where}")
        candidates = [root / folder for folder in self.folders]
        if root.resolve().name not in others:
            candidates.append(root)
        wanted = [spelling for name in self.files for spelling in spellings(name)]
        for candidate in candidates:
            if any((candidate / name).exists() for name in wanted):  # if only some are, the reader says which is not
                return candidate
        tried = ", ".join(map(str, candidates))
        found = ", ".join(sorted(entry.name for entry in root.iterdir())[:8]) or "nothing"
        raise MissingDataError(
            f"{self.title} not found under {root} (it holds: {found}); looked for {self.files[0]} in {tried}. "
            f"Wanted: {self.where}"
        )


@contextmanager
def read_by(library: str, path: Path, kind: str) -> Iterator[None]:
    """Import a library and read a file with it in this block; CorruptDataError for any error of its decoders."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        with path.open("rb") as file:
            begin = first_bytes(file.read(4))
        raise CorruptDataError(
            f"{path}: {path.stat().st_size:,} bytes that {library} cannot read as {kind}; {begin} "
            f"({type(error).__name__}: {error})"
        ) from error


def sizes_text(sizes: tuple[int | None, ...]) -> str:
    """Return sizes as text, such as ``any x 28 x 28``."""
    return " x ".join("any" if size is None else str(size) for size in sizes)


def first_bytes(content: bytes) -> str:
    """Return a file's first bytes as text for a message."""
    return f"it begins with the bytes {content[:4].hex(' ') or '(none)'}"


def check_labels(path: Path, labels: npt.NDArray[Any], first: int, last: int) -> None:
    """Raise CorruptDataError if there are no labels, or some are not from ``first`` to ``last``."""
    if len(labels) == 0:
        raise CorruptDataError(f"{path}: holds no image")
    if labels.min() < first or labels.max() > last:
        raise CorruptDataError(f"{path}: holds the labels {labels.min()} to {labels.max()}, want {first} to {last}")
