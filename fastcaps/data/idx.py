"""Reader for IDX files, the format of MNIST and Fashion-MNIST.

An IDX file is two zero bytes, one byte for the element type, one byte for the number of dimensions, one big-endian
32-bit size per dimension, and then the elements in C order.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fastcaps.data.errors import CorruptDataError, MissingDataError

_GZIP_MAGIC = b"\x1f\x8b"
_UNSIGNED_BYTE = 0x08
_ELEMENT_NAMES = {8: "unsigned byte", 9: "signed byte", 11: "short", 12: "int", 13: "float", 14: "double"}


def _contents(path: Path) -> bytes:
    """The file's bytes, unpacked if they are gzip (their content says so: a browser may unpack and keep the name)."""
    if not path.is_file():
        raise MissingDataError(f"{path}: no such file; an IDX file, plain or gzip, is wanted here")
    raw = path.read_bytes()
    if not raw.startswith(_GZIP_MAGIC):
        return raw
    try:
        return gzip.decompress(raw)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CorruptDataError(
            f"{path}: {len(raw):,} bytes of gzip that end early or are damaged ({error}); copy or fetch the file again"
        ) from error


def read_idx(path: str | Path, *, shape: tuple[int | None, ...] | None = None) -> npt.NDArray[np.uint8]:
    """Read one IDX file of unsigned bytes.

    Parameters
    ----------
    path : str or Path
        The file, plain or gzip; its first bytes say which, not its name.
    shape : tuple of (int or None), optional
        What the caller wants, ``None`` where any size will do, e.g. ``(None, 28, 28)``.

    Returns
    -------
    numpy.ndarray
        uint8, of the shape that the file states.

    Raises
    ------
    MissingDataError
        If there is no such file.
    CorruptDataError
        If it is no IDX file, is truncated or too long, holds another element type, or has another shape.
    """
    path = Path(path)
    data = _contents(path)
    if len(data) < 4 or data[:2] != b"\x00\x00" or data[2] not in _ELEMENT_NAMES:
        raise CorruptDataError(
            f"{path}: not an IDX file; it begins with the bytes {data[:4].hex(' ') or '(none)'}, "
            "and an IDX file of unsigned bytes with 3 dimensions begins with 00 00 08 03"
        )
    kind, dims = data[2], data[3]
    if kind != _UNSIGNED_BYTE:
        raise CorruptDataError(f"{path}: elements of type {_ELEMENT_NAMES[kind]}, want unsigned byte")
    header = 4 + 4 * dims
    if len(data) < header:
        raise CorruptDataError(
            f"{path}: {len(data)} bytes, too short for the header of {dims} dimensions ({header} bytes)"
        )
    sizes = struct.unpack(f">{dims}I", data[4:header])
    fits = shape is None or (
        len(sizes) == len(shape) and all(w in (None, s) for s, w in zip(sizes, shape, strict=True))
    )
    if shape is not None and not fits:
        wanted = " x ".join("any" if w is None else str(w) for w in shape)
        raise CorruptDataError(f"{path}: holds {' x '.join(map(str, sizes))}, want {wanted}")
    count = 1  # in Python integers: a damaged header may state sizes whose product overflows 64 bits
    for size in sizes:
        count *= size
    if len(data) - header != count:
        what = "truncated" if len(data) - header < count else "too long"
        raise CorruptDataError(
            f"{path}: {what}; its header states {' x '.join(map(str, sizes))} = {count:,} bytes, "
            f"found {len(data) - header:,}"
        )
    return np.frombuffer(data, dtype=np.uint8, offset=header).reshape(sizes)
