"""What the readers share: errors that say what to do next, files and what they need."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt


class DataError(Exception):
    """The data asked for cannot be used; the message names the file, what was found and what is wanted."""


class MissingDataError(DataError, FileNotFoundError):
    """A file or folder of a data set is not where it was looked for."""

    def __str__(self) -> str:  # OSError would print its errno tuple
        return str(self.args[0])


class CorruptDataError(DataError, ValueError):
    """A file is there, but it is truncated, too long, or not of the kind that its name promises."""


def existing(path: str | Path, kind: str) -> Path:
    """The path of a file that is there; MissingDataError, with the kind of file that is wanted, if it is not."""
    path = Path(path)
    if not path.is_file():
        raise MissingDataError(f"{path}: no such file; {kind} is wanted here")
    return path


def spellings(name: str) -> list[str]:
    """The names that a file may have: plain or ``.gz``, and of an IDX file with ``.idx`` in the place of ``-idx``."""
    stems = dict.fromkeys((name, name.replace("-idx", ".idx")))
    return [stem + end for stem in stems for end in ("", ".gz")]


def find(folder: Path, name: str) -> Path:
    """A file of a folder, in the first of its :func:`spellings` that is there; MissingDataError if none is."""
    for spelling in spellings(name):
        if (folder / spelling).is_file():
            return folder / spelling
    raise MissingDataError(f"{folder / name}: no such file, nor {name}.gz")


@dataclass(frozen=True)
class Place:
    """Where the files of a data set lie."""

    title: str  # the data set's name in messages
    folders: tuple[str, ...]  # looked for under the data directory, in this order, before it itself
    files: tuple[str, ...]  # what is in them
    where: str  # how the files are had

    def folder_under(self, data_dir: str | Path | None, others: Collection[str] = ()) -> Path:
        """The first folder that holds one of the files; MissingDataError if none does.

        A data directory whose name is one of ``others``, the folders of other data sets, is not taken itself.
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
def needing(package: str, extra: str, what: str) -> Iterator[None]:
    """Import in this block what an extra of ours brings; MissingDataError names it where it is not installed."""
    try:
        yield
    except ImportError as error:
        told = f"{what} need {package}, which is not installed: pip install 'fastcaps[{extra}]'"
        raise MissingDataError(told) from error


@contextmanager
def read_by(library: str, path: Path, kind: str) -> Iterator[None]:
    """Import a library and read a file by it in this block; CorruptDataError tells whatever its decoders raise."""
    try:
        with needing(library, "data", f"{path}: files like this"):
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
    """``any x 28 x 28``."""
    return " x ".join("any" if size is None else str(size) for size in sizes)


def first_bytes(content: bytes) -> str:
    """How a file begins that is none of those that are wanted."""
    return f"it begins with the bytes {content[:4].hex(' ') or '(none)'}"


def check_labels(path: Path, labels: npt.NDArray[Any], first: int, last: int) -> None:
    """Raise if there are no labels, or some are not from ``first`` to ``last``."""
    if len(labels) == 0:
        raise CorruptDataError(f"{path}: holds no image")
    if labels.min() < first or labels.max() > last:
        raise CorruptDataError(f"{path}: holds the labels {labels.min()} to {labels.max()}, want {first} to {last}")
