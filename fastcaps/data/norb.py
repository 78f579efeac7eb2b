"""Reader for the binary matrices of smallNORB (LeCun, Huang and Bottou, 2004): ``.mat`` files that are not MATLAB's.

A file is a little-endian 32-bit number for the element type, one for the number of dimensions, a size per dimension (at
least three are written), and then the elements in C order.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from fastcaps.data.files import Format, check_labels, find, read_array

STEMS = {
    "train": "smallnorb-5x46789x9x18x6x2x96x96-training",
    "test": "smallnorb-5x01235x9x18x6x2x96x96-testing",
}
_TYPES = {0x51: "<f4", 0x53: "<f8", 0x54: "<i4", 0x55: "u1", 0x56: "<i2"}
NORB = Format(
    "a binary matrix of smallNORB (MATLAB's are others)",
    "55 4c 3d 1e",
    {bytes((kind, 0x4C, 0x3D, 0x1E)): name for kind, name in _TYPES.items()},
    head="<4sI",
    size="<I",
    fewest=3,
)


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
    stem = STEMS["train" if train else "test"]
    images, categories, info = (find(Path(folder), f"{stem}-{kind}.mat") for kind in ("dat", "cat", "info"))
    # the small files first: what does not belong together is refused before 448 MB are unpacked
    labels = read_array(categories, NORB, np.int32, (None,)).astype(np.int64)
    check_labels(categories, labels, 0, 4)
    count = len(labels)
    rest = read_array(info, NORB, np.int32, (count, 4)).astype(np.int64)
    return read_array(images, NORB, np.uint8, (count, 2, 96, 96)), labels, rest
