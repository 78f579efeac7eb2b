"""Reader for the binary versions of CIFAR-10 and CIFAR-100.

Each record is its label bytes (CIFAR-10: the class; CIFAR-100: the coarse class, then the fine one), then 3,072 bytes
of image: 32 x 32 red, then green, then blue, row by row.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from fastcaps.data.errors import CorruptDataError, MissingDataError
from fastcaps.data.files import GZIP_MAGIC

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE
_PICKLE_MAGIC = b"\x80"


def read_cifar(
    path: str | Path, *, label_bytes: int, classes: int, records: int | None = None
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Read one binary CIFAR file.

    Parameters
    ----------
    path : str or Path
        For example ``data_batch_1.bin`` or ``train.bin``.
    label_bytes : int
        Labels before each image: 1 in CIFAR-10, 2 in CIFAR-100. The last one is the class that is returned.
    classes : int
        Number of classes; a label outside raises, as it shows that records are out of step.
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
    path = Path(path)
    if not path.is_file():
        raise MissingDataError(f"{path}: no such file; a binary CIFAR file is wanted here")
    size = path.stat().st_size
    record = label_bytes + _PIXELS
    found = f"{size:,} bytes"
    with path.open("rb") as file:
        head = file.read(2)
    if head == GZIP_MAGIC:
        raise CorruptDataError(f"{path}: a gzip archive; unpack it first, the binary file itself is wanted")
    if size == 0 or size % record or (records is not None and size != records * record):
        pickled = head[:1] == _PICKLE_MAGIC
        hint = " (it looks like the Python version of CIFAR; the binary version is wanted)" if pickled else ""
        wanted = f"{records:,} records of {record:,}" if records is not None else f"a multiple of {record:,}"
        total = f" = {records * record:,} bytes" if records is not None else " bytes, not zero"
        raise CorruptDataError(f"{path}: truncated or wrong file: {found}, want {wanted}{total}{hint}")
    data = np.fromfile(path, dtype=np.uint8)
    table = data.reshape(-1, record)
    labels = table[:, label_bytes - 1].astype(np.int64)
    if labels.max(initial=0) >= classes:
        at = int((labels >= classes).argmax())
        raise CorruptDataError(
            f"{path}: record {at} has the label {labels[at]}, want 0 to {classes - 1}; "
            "is this the file of another data set?"
        )
    return table[:, label_bytes:].reshape(-1, 3, _SIDE, _SIDE), labels
