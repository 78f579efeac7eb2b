"""Reader for the cropped digits of SVHN (Netzer et al. 2011), MATLAB files that SciPy reads."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastcaps.data.files import MOST_BYTES, CorruptDataError, check_labels, existing, needing, sizes_text

_SIDE = 32
_COMPRESSED = 15  # MATLAB's number for a part that zlib has packed
_HEADERS = 2**16  # bytes, and more than the headers of two arrays take


def _unpacked_bytes(path: Path) -> int:
    """How many bytes the packed parts of a MATLAB file hold: counted without keeping them, to just over MOST_BYTES."""
    total = 0
    with path.open("rb") as file:
        order = ">" if file.read(128)[126:] == b"MI" else "<"
        while total <= MOST_BYTES and len(tag := file.read(8)) == 8:
            kind, size = struct.unpack(f"{order}II", tag)
            end, unpacker = file.tell() + size, zlib.decompressobj()
            with suppress(zlib.error):  # SciPy says so
                while kind == _COMPRESSED and total <= MOST_BYTES and not unpacker.eof:
                    packed = unpacker.unconsumed_tail or file.read(min(2**16, end - file.tell()))
                    if not packed:
                        break
                    total += len(unpacker.decompress(packed, 2**20))
            file.seek(end)
    return total


@contextmanager
def _telling(path: Path) -> Iterator[None]:
    """SciPy raises whatever its parsers meet."""
    try:
        yield
    except Exception as error:
        raise CorruptDataError(
            f"{path}: {path.stat().st_size:,} bytes that SciPy cannot read as a MATLAB file "
            f"({type(error).__name__}: {error}); copy or fetch the file again"
        ) from error


def read_svhn(path: str | Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Read one file of cropped digits, e.g. ``train_32x32.mat``.

    Returns
    -------
    images, labels : numpy.ndarray
        uint8 ``[n, 3, 32, 32]`` and int64 ``[n]``; the file's label 10 is the digit 0.

    Raises
    ------
    MissingDataError
        If there is no such file, or SciPy is not installed.
    CorruptDataError
        If it is no such MATLAB file, is damaged, or holds other arrays. Sizes are checked before anything is unpacked.
    """
    path = existing(path, "a MATLAB file of SVHN's cropped digits")
    with needing("SciPy", "data", f"{path}: MATLAB files"):
        from scipy.io import loadmat, whosmat
    if (unpacked := _unpacked_bytes(path)) > MOST_BYTES:
        raise CorruptDataError(f"{path}: unpacks to more than {MOST_BYTES:,} bytes, which is too large")
    with _telling(path):
        held: dict[str, tuple[tuple[int, ...], str]] = {name: (sizes, kind) for name, sizes, kind in whosmat(path)}
    sizes, kind = held.get("X", ((), "absent"))
    count = sizes[3] if len(sizes) == 4 else 0
    if kind != "uint8" or sizes != (_SIDE, _SIDE, 3, count) or count == 0 or held.get("y", ((),))[0] != (count, 1):
        found = ", ".join(f"{name} ({kind} {sizes_text(sizes)})" for name, (sizes, kind) in held.items()) or "nothing"
        raise CorruptDataError(
            f"{path}: truncated or wrong file: holds {found}; want X (uint8 32 x 32 x 3 x n) and y (n x 1)"
        )
    if unpacked > count * (3 * _SIDE**2 + 8) + _HEADERS:
        raise CorruptDataError(
            f"{path}: unpacks to more bytes than {count:,} images of {_SIDE} x {_SIDE} x 3 and their labels have"
        )
    with _telling(path), np.errstate(invalid="ignore"):  # a NaN is told below
        arrays: dict[str, Any] = loadmat(path, variable_names=["X", "y"])
        images, given = arrays["X"], arrays["y"][:, 0]
        labels = given.astype(np.int64)
    if not (same := labels == given).all():  # MATLAB keeps whole numbers as doubles, too
        raise CorruptDataError(f"{path}: holds the label {given[same.argmin()]}, want whole numbers from 1 to 10")
    check_labels(path, labels, 1, 10)
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels % 10
