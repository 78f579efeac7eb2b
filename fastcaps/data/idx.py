"""Reader for IDX files, the format of MNIST and Fashion-MNIST.

An IDX file is two zero bytes, one byte for the element type, one byte for the number of dimensions, one big-endian
32-bit size per dimension, and then the elements in C order.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from fastcaps.data.files import Format, read_array

_TYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_IDX = Format(
    "an IDX file", "00 00 08 03", {bytes((0, 0, kind)): name for kind, name in _TYPES.items()}, head=">3sB", size=">I"
)


def read_idx(path: str | Path, *, shape: tuple[int | None, ...] | None = None) -> npt.NDArray[np.uint8]:
    """Read one IDX file of unsigned bytes, plain or gzip; ``shape`` is what the caller wants, ``None`` for any size.

    Raises
    ------
    MissingDataError
        If there is no such file.
    CorruptDataError
        If it is no IDX file, is truncated or too long, or holds another type or shape. The header is checked first.
    """
    return read_array(path, _IDX, np.uint8, shape)
