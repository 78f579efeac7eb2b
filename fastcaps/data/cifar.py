"""Reader for the binary versions of CIFAR-10 and CIFAR-100.

Each record is its label bytes (CIFAR-10: the class; CIFAR-100: the coarse class, then the fine one), then 3,072 bytes
of image: 32 x 32 red, then green, then blue, row by row.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from fastcaps.data.files import GZIP_MAGIC, CorruptDataError, check_labels, existing

_HINTS = {
    GZIP_MAGIC: " (it looks like a gzip archive; unpack it first)",
    b"\x80\x02": " (it looks like the Python version of CIFAR; the binary version is wanted)",
}


def read_cifar(
    path: str | Path, *, label_bytes: int, classes: int, records: int | None = None
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Read one binary CIFAR file.

    Parameters
    ----------
    path : str or Path
        For example ``data_batch_1.bin`` or ``train.bin``.
    label_bytes, classes : int
        Labels before each image, of which the last one is the class that is returned; and how many classes there are.
    records : int, optional
        How many records the file must hold; any number if not given.

    Returns
    -------
    images, labels : numpy.ndarray
        uint8 ``[n, 3, 32, 32]`` and int64 ``[n]``.

    Raises
    ------
    MissingDataError
        If there is no such file.
    CorruptDataError
        If its size is not a whole number of records (or not the wanted number), or a label is out of range.
    """
    path = existing(path, "a binary CIFAR file")
    size, record = path.stat().st_size, label_bytes + 3 * 32 * 32
    if size == 0 or size % record or records not in (None, size // record):
        with path.open("rb") as file:
            hint = _HINTS.get(file.read(2), "")
        wanted = "a multiple of" if records is None else f"{records:,} records of"
        raise CorruptDataError(f"{path}: truncated or wrong file: {size:,} bytes, want {wanted} {record:,}{hint}")
    table = np.fromfile(path, dtype=np.uint8).reshape(-1, record)
    labels = table[:, label_bytes - 1].astype(np.int64)
    check_labels(path, labels, 0, classes - 1)
    return table[:, label_bytes:].reshape(-1, 3, 32, 32), labels
