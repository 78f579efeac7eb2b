"""Reader for the cropped digits of SVHN (Netzer et al. 2011), MATLAB files that SciPy reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastcaps.data.files import CorruptDataError, check_labels, existing, needing, sizes_text


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
        If it is no such MATLAB file, is damaged, or holds other arrays. Sizes are checked before arrays are unpacked.
    """
    path = existing(path, "a MATLAB file of SVHN's cropped digits")
    with needing("SciPy", "data", f"{path}: MATLAB files"):
        from scipy.io import loadmat, whosmat
    with _telling(path):
        held: dict[str, tuple[tuple[int, ...], str]] = {name: (sizes, kind) for name, sizes, kind in whosmat(path)}
    sizes, kind = held.get("X", ((), "absent"))
    count = sizes[3] if len(sizes) == 4 else 0
    of_labels, plain = held.get("y", ((), ""))
    if kind != "uint8" or sizes != (32, 32, 3, count) or count == 0 or of_labels != (count, 1) or plain == "cell":
        found = ", ".join(f"{name} ({kind} {sizes_text(sizes)})" for name, (sizes, kind) in held.items()) or "nothing"
        raise CorruptDataError(
            f"{path}: truncated or wrong file: holds {found}; want X (uint8 32 x 32 x 3 x n) and y (n x 1)"
        )
    with _telling(path), np.errstate(invalid="ignore"):  # a NaN is told below
        arrays: dict[str, Any] = loadmat(path, variable_names=["X", "y"])
        images, given = arrays["X"], arrays["y"][:, 0]
        labels = given.astype(np.int64)
    if not (same := labels == given).all():  # MATLAB keeps whole numbers as doubles, too
        raise CorruptDataError(f"{path}: holds the label {given[same.argmin()]}, want whole numbers from 1 to 10")
    check_labels(path, labels, 1, 10)
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels % 10
