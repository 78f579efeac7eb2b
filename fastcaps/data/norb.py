"""Reader for the binary matrices of smallNORB (LeCun, Huang and Bottou, 2004): ``.mat`` files that are not MATLAB's.

A file is a little-endian 32-bit number for the element type, one for the number of dimensions, a size per dimension (at
least three are written; those beyond the dimensions mean nothing), and then the elements in C order.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from fastcaps.data.errors import CorruptDataError
from fastcaps.data.files import find, read_array, require_shape

TRAIN_STEM = "smallnorb-5x46789x9x18x6x2x96x96-training"
TEST_STEM = "smallnorb-5x01235x9x18x6x2x96x96-testing"

_MOST_DIMS = 8
_TYPES = {0x1E3D4C51: "<f4", 0x1E3D4C53: "<f8", 0x1E3D4C54: "<i4", 0x1E3D4C55: "|u1", 0x1E3D4C56: "<i2"}


def read_norb_matrix(
    path: str | Path, *, dtype: npt.DTypeLike, shape: tuple[int | None, ...] | None = None
) -> npt.NDArray[np.generic]:
    """Read one binary matrix.

    Parameters
    ----------
    path : str or Path
        The file, plain or gzip.
    dtype : dtype
        The element type that is wanted: uint8 for images, int32 for categories and the rest.
    shape : tuple of (int or None), optional
        What the caller wants, ``None`` where any size will do.

    Raises
    ------
    MissingDataError
        If there is no such file.
    CorruptDataError
        If it is no binary matrix, is truncated or too long, or holds other elements or another shape. The header is
        checked before anything else is unpacked.
    """
    wanted = np.dtype(dtype)

    def parse(stream: IO[bytes], path: Path) -> tuple[np.dtype, tuple[int, ...]]:
        begin = stream.read(8)
        if len(begin) < 8 or struct.unpack("<I", begin[:4])[0] not in _TYPES:
            matlab = " (it looks like one of MATLAB's)" if begin.startswith(b"MATLAB") else ""
            raise CorruptDataError(
                f"{path}: not a binary matrix of NORB; it begins with the bytes {begin[:4].hex(' ') or '(none)'}, "
                f"and one of images begins with 55 4c 3d 1e{matlab}"
            )
        magic, dims = struct.unpack("<II", begin)
        held = np.dtype(_TYPES[magic])
        if held != wanted:
            raise CorruptDataError(f"{path}: elements of type {held.name}, want {wanted.name}")
        if dims > _MOST_DIMS:
            raise CorruptDataError(f"{path}: its header states {dims:,} dimensions, want {_MOST_DIMS} or fewer")
        header = stream.read(4 * max(dims, 3))
        if len(header) < 4 * max(dims, 3):
            raise CorruptDataError(
                f"{path}: {8 + len(header)} bytes, too short for the header of {dims} dimensions "
                f"({8 + 4 * max(dims, 3)} bytes)"
            )
        sizes = struct.unpack(f"<{dims}I", header[: 4 * dims])
        require_shape(path, sizes, shape)
        return held, sizes

    return read_array(path, parse, "a binary matrix of smallNORB")


def read_norb(
    folder: str | Path, *, train: bool
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """One half of smallNORB: pairs of images, their categories, and how each toy was photographed.

    Returns
    -------
    images, labels, info : numpy.ndarray
        uint8 ``[n, 2, 96, 96]`` (left and right camera); int64 ``[n]``, 0 to 4; int64 ``[n, 4]``: the toy's number, its
        elevation (0 to 8), azimuth (0 to 34, even) and lighting (0 to 5).

    Raises
    ------
    MissingDataError, CorruptDataError
        If one of the three files is missing or wrong, or they do not belong together.
    """
    folder = Path(folder)
    stem = TRAIN_STEM if train else TEST_STEM
    paths = {kind: find(folder, f"{stem}-{kind}.mat") for kind in ("dat", "cat", "info")}
    # the small files first: what does not belong together is refused before 448 MB are unpacked
    labels = read_norb_matrix(paths["cat"], dtype=np.int32, shape=(None,)).astype(np.int64)
    count = len(labels)
    if count == 0:
        raise CorruptDataError(f"{paths['cat']}: holds no category")
    if labels.min() < 0 or labels.max() > 4:
        raise CorruptDataError(f"{paths['cat']}: holds the categories {labels.min()} to {labels.max()}, want 0 to 4")
    info = read_norb_matrix(paths["info"], dtype=np.int32, shape=(count, 4)).astype(np.int64)
    images = read_norb_matrix(paths["dat"], dtype=np.uint8, shape=(count, 2, 96, 96))
    return images.astype(np.uint8, copy=False), labels, info
