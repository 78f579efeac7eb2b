"""scikit-learn's handwritten digits: real data that ships with a package, so that a fresh machine needs no download."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fastcaps.data.files import needing

_TEST_SHARE = 5  # one in five of every class is held out
_SPLIT_SEED = 0


def read_digits() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """All 1,797 images: uint8 ``[1797, 1, 8, 8]`` with 0 to 255 (the package stores 0 to 16), and int64 ``[1797]``.

    Raises
    ------
    MissingDataError
        If scikit-learn is not installed.
    """
    with needing("scikit-learn", "demo", "its digits"):
        from sklearn.datasets import load_digits
    bunch = load_digits()
    # 16 levels of ink; 15.9375 = 255 / 16 puts white at 0 and full ink at 255, as in the other data sets
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    return images, bunch.target.astype(np.int64)


def split_digits(labels: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The fixed stratified split: indices for training and for testing, a fifth of every class held out.

    The permutation comes from NumPy's legacy generator, whose stream is frozen, so the split is the same everywhere and
    with every version. It mixes writers: the figure is that of new digits by known hands.
    """
    random = np.random.RandomState(_SPLIT_SEED)
    test = []
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        test.append(members[: round(len(members) / _TEST_SHARE)])
    held_out = np.sort(np.concatenate(test))
    return np.setdiff1d(np.arange(len(labels)), held_out), held_out
