"""Files that are a header and an array, plain or gzip: what the header states is checked before the rest is read."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast

import numpy as np
import numpy.typing as npt

from fastcaps.data.errors import CorruptDataError, MissingDataError

GZIP_MAGIC = b"\x1f\x8b"
MOST_BYTES = 2**31
"""An array whose header states more is refused: the largest of these data sets, smallNORB, has 448 MB a file."""

ParseHeader = Callable[[IO[bytes], Path], tuple[np.dtype, tuple[int, ...]]]


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


def sizes_text(sizes: tuple[int, ...]) -> str:
    """``3 x 28 x 28``."""
    return " x ".join(map(str, sizes))


def require_shape(path: Path, sizes: tuple[int, ...], wanted: tuple[int | None, ...] | None) -> None:
    """Raise if a file does not hold the wanted shape; ``None`` stands for any size."""
    if wanted is None:
        return
    if len(sizes) != len(wanted) or any(w not in (None, s) for s, w in zip(sizes, wanted, strict=True)):
        text = " x ".join("any" if w is None else str(w) for w in wanted)
        raise CorruptDataError(f"{path}: holds {sizes_text(sizes)}, want {text}")


def _read(stream: IO[bytes], path: Path, parse: ParseHeader, plain_bytes: int | None) -> npt.NDArray[np.generic]:
    dtype, sizes = parse(stream, path)
    count = dtype.itemsize  # in Python integers: a damaged header may state sizes whose product overflows 64 bits
    for size in sizes:
        count *= size
    stated = f"its header states {sizes_text(sizes)} = {count:,} bytes"
    if plain_bytes is not None and plain_bytes - stream.tell() != count:
        found = plain_bytes - stream.tell()
        raise CorruptDataError(f"{path}: {'truncated' if found < count else 'too long'}; {stated}, found {found:,}")
    if count > MOST_BYTES:
        raise CorruptDataError(f"{path}: too large; {stated}, want {MOST_BYTES:,} or less")
    content = stream.read(count)
    if len(content) < count:
        raise CorruptDataError(f"{path}: truncated; {stated}, found {len(content):,}")
    if stream.read(1):  # reaching the end makes gzip compare its checksum too
        raise CorruptDataError(f"{path}: too long; {stated}, found more")
    try:
        return np.frombuffer(content, dtype=dtype).reshape(sizes)
    except ValueError as error:  # NumPy takes 64 dimensions, and no sizes like 0 x 4294967295 x 4294967295
        raise CorruptDataError(f"{path}: {stated}, which is no array ({error})") from error


def read_array(path: str | Path, parse: ParseHeader, kind: str) -> npt.NDArray[np.generic]:
    """Read an array behind a header, no further than the header has passed its checks.

    Parameters
    ----------
    path : str or Path
        The file, plain or gzip; its first bytes say which, not its name (a browser may unpack and keep the name).
    parse : callable
        Reads the header from the stream, raises CorruptDataError if it is not what is wanted, and returns the
        elements' dtype and the array's sizes.
    kind : str
        What the file should be, for the message, e.g. ``"an IDX file"``.

    Raises
    ------
    MissingDataError
        If there is no such file.
    CorruptDataError
        If ``parse`` says so, or there are fewer or more bytes than the header states, or gzip is damaged.
    """
    path = Path(path)
    if not path.is_file():
        raise MissingDataError(f"{path}: no such file; {kind}, plain or gzip, is wanted here")
    size = path.stat().st_size
    with path.open("rb") as file:
        packed = file.read(2) == GZIP_MAGIC
        file.seek(0)
        if not packed:
            return _read(file, path, parse, size)
        try:
            with gzip.open(file) as stream:
                return _read(cast(IO[bytes], stream), path, parse, None)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise CorruptDataError(
                f"{path}: {size:,} bytes of gzip that end early or are damaged ({error}); copy or fetch the file again"
            ) from error
