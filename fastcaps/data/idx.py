"""Reader for IDX files, the format of MNIST and Fashion-MNIST.

An IDX file is two zero bytes, one byte for the element type, one byte for the number of dimensions, one big-endian
32-bit size per dimension, and then the elements in C order.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import IO, cast

import numpy as np
import numpy.typing as npt

from fastcaps.data.errors import CorruptDataError
from fastcaps.data.files import read_array, require_shape

_UNSIGNED_BYTE = 0x08
_ELEMENT_NAMES = {8: "unsigned byte", 9: "signed byte", 11: "short", 12: "int", 13: "float", 14: "double"}


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
        If it is no IDX file, is truncated or too long, holds another element type, or has another shape. The header is
        checked before anything else is unpacked.
    """

    def parse(stream: IO[bytes], path: Path) -> tuple[np.dtype, tuple[int, ...]]:
        magic = stream.read(4)
        if len(magic) < 4 or magic[:2] != b"\x00\x00" or magic[2] not in _ELEMENT_NAMES:
            raise CorruptDataError(
                f"{path}: not an IDX file; it begins with the bytes {magic.hex(' ') or '(none)'}, "
                "and an IDX file of unsigned bytes with 3 dimensions begins with 00 00 08 03"
            )
        kind, dims = magic[2], magic[3]
        if kind != _UNSIGNED_BYTE:
            raise CorruptDataError(f"{path}: elements of type {_ELEMENT_NAMES[kind]}, want unsigned byte")
        header = stream.read(4 * dims)
        if len(header) < 4 * dims:
            raise CorruptDataError(
                f"{path}: {4 + len(header)} bytes, too short for the header of {dims} dimensions ({4 + 4 * dims} bytes)"
            )
        sizes = struct.unpack(f">{dims}I", header)
        require_shape(path, sizes, shape)
        return np.dtype(np.uint8), sizes

    return cast("npt.NDArray[np.uint8]", read_array(path, parse, "an IDX file"))
