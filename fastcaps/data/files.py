"""What the readers share: errors that say what to do next, files and what they need, arrays behind a header."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

GZIP_MAGIC = b"\x1f\x8b"
MOST_BYTES = 2**31
"""An array whose header states more is refused: the largest of these data sets, smallNORB, has 448 MB a file."""


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


@contextmanager
def needing(package: str, extra: str, what: str) -> Iterator[None]:
    """Import in this block what an extra of ours brings; MissingDataError names it where it is not installed."""
    try:
        yield
    except ImportError as error:
        told = f"{what} need {package}, which is not installed: pip install 'fastcaps[{extra}]'"
        raise MissingDataError(told) from error


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


class Format(NamedTuple):
    """Files that are a header and an array: a magic number, the number of dimensions, their sizes, the elements."""

    kind: str  # what such a file is called
    example: str  # the first bytes of one of images
    types: dict[bytes, str]  # magic numbers to the dtypes of elements
    head: str  # how :mod:`struct` reads magic number and dimensions,
    size: str  # and then a size
    fewest: int = 0  # sizes that are written at least; those beyond the dimensions mean nothing


def _header(stream: IO[bytes], path: Path, form: Format, dtype: npt.DTypeLike) -> tuple[int, ...]:
    """The sizes that a file's header states."""
    begin = stream.read(struct.calcsize(form.head))
    magic, dims = struct.unpack(form.head, begin) if len(begin) == struct.calcsize(form.head) else (b"", 0)
    if magic not in form.types:
        raise CorruptDataError(f"{path}: not {form.kind}; {first_bytes(begin)}, one of images with {form.example}")
    if (held := np.dtype(form.types[magic])) != np.dtype(dtype):
        raise CorruptDataError(f"{path}: elements of type {held.name}, want {np.dtype(dtype).name}")
    if dims > 64:
        raise CorruptDataError(f"{path}: its header states {dims:,} dimensions, want 64 or fewer")
    header = stream.read(4 * max(dims, form.fewest))
    if len(header) < 4 * max(dims, form.fewest):
        raise CorruptDataError(f"{path}: {len(begin + header)} bytes, too short for the header of {dims} dimensions")
    return tuple(size for (size,) in struct.iter_unpack(form.size, header))[:dims]


def read_array(
    path: str | Path, form: Format, dtype: npt.DTypeLike, shape: tuple[int | None, ...] | None = None
) -> npt.NDArray[Any]:
    """Read an array behind a header, plain or gzip, no further than the header has passed its checks.

    The first bytes say whether a file is packed, not its name (a browser may unpack and keep the name). ``dtype`` and
    ``shape`` are what the caller wants, ``None`` where any size will do.

    Raises
    ------
    MissingDataError, CorruptDataError
        If there is no such file; if it is of another kind, type or shape, there are fewer or more bytes than the header
        states, or gzip is damaged.
    """
    path = existing(path, f"{form.kind}, plain or gzip,")
    with path.open("rb") as file:
        packed = file.read(2) == GZIP_MAGIC
        file.seek(0)
        try:
            with gzip.open(file) if packed else file as opened:
                stream = cast(IO[bytes], opened)
                sizes = _header(stream, path, form, dtype)
                wanted = sizes if shape is None else shape
                if len(sizes) != len(wanted) or any(w not in (None, s) for s, w in zip(sizes, wanted, strict=True)):
                    raise CorruptDataError(f"{path}: holds {sizes_text(sizes)}, want {sizes_text(wanted)}")
                count = math.prod((np.dtype(dtype).itemsize, *sizes))  # a Python integer: it may exceed 64 bits
                stated = f"its header states {sizes_text(sizes)} = {count:,} bytes"
                if count > MOST_BYTES:
                    raise CorruptDataError(f"{path}: too large; {stated}, want {MOST_BYTES:,} or less")
                content = stream.read(count)
                found = len(content) + len(stream.read(1))  # reaching the end makes gzip compare its checksum too
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise CorruptDataError(f"{path}: gzip that ends early or is damaged ({error}); copy it again") from error
    if found != count:
        raise CorruptDataError(f"{path}: {'truncated' if found < count else 'too long'}; {stated}, found {found:,}")
    try:
        return np.frombuffer(content, dtype=dtype).reshape(sizes)
    except ValueError as error:  # of sizes like 0 x 4294967295 x 4294967295
        raise CorruptDataError(f"{path}: {stated}, which is no array ({error})") from error
