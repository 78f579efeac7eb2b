"""Images in memory as a torch data set, and the augmentation of the paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

Augmentation = Callable[[Tensor], Tensor]


class RandomCropFlip:
    """The paper's augmentation (Tsai et al. 2020, A.2): pad with zeros, crop at random to the old size, flip half.

    Every image of a batch draws its own shift and flip from torch's global generator. Flip only what has the
    same class in the mirror: a mirrored 2 is no 2.

    Parameters
    ----------
    padding : int
        Zero pixels added on each side; the paper has 4.
    flip : bool
        Flip left and right with probability 1/2.
    """

    def __init__(self, padding: int = 4, flip: bool = False) -> None:
        if padding < 0:
            raise ValueError(f"padding: got {padding}, want 0 or more")
        self.padding = padding
        self.flip = flip

    def __call__(self, images: Tensor) -> Tensor:
        """``[n, c, h, w]`` in, the same shape and dtype out."""
        n, _, height, width = images.shape
        pad = self.padding
        padded = torch.nn.functional.pad(images, (pad, pad, pad, pad))
        rows = torch.randint(2 * pad + 1, (n, 1)) + torch.arange(height)
        columns = torch.randint(2 * pad + 1, (n, 1)) + torch.arange(width)
        if self.flip:
            columns = torch.where(torch.rand(n, 1) < 0.5, columns.flip(1), columns)
        # advanced indices around a slice come first in the result: [n, h, w, c]
        picked = padded[torch.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        return picked.permute(0, 3, 1, 2).contiguous()


class ImageDataset(Dataset[tuple[Tensor, Tensor]]):
    """Labelled images held in memory as bytes, handed out as normalised float32.

    Parameters
    ----------
    images : numpy.ndarray
        uint8 ``[n, c, h, w]``.
    labels : numpy.ndarray
        int64 ``[n]``.
    mean, std : sequence of float
        One per channel, of pixel values scaled to 0..1; an item is ``(image / 255 - mean) / std``.
    augment : callable, optional
        Applied to the bytes of a whole batch, before normalisation (so that padding is black, as in the authors' code).
    """

    def __init__(
        self,
        images: npt.NDArray[np.uint8],
        labels: npt.NDArray[np.int64],
        *,
        mean: Sequence[float],
        std: Sequence[float],
        augment: Augmentation | None = None,
    ) -> None:
        if images.ndim != 4 or images.shape[0] != labels.shape[0]:
            raise ValueError(f"images {images.shape} and labels {labels.shape}: want [n, c, h, w] and [n]")
        if len(mean) != images.shape[1] or len(std) != images.shape[1]:
            raise ValueError(f"mean and std: got {len(mean)} and {len(std)} numbers for {images.shape[1]} channels")
        self.images = torch.from_numpy(np.array(images))  # a copy: torch wants memory that it may write to
        self.labels = torch.from_numpy(np.array(labels, dtype=np.int64))
        self.mean = torch.tensor(mean, dtype=torch.float32).view(1, -1, 1, 1)
        self.std = torch.tensor(std, dtype=torch.float32).view(1, -1, 1, 1)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Sequence[int] | slice) -> tuple[Tensor, Tensor]:
        """Several items at once: float32 ``[n, c, h, w]`` and int64 ``[n]``."""
        images, labels = self.images[indices], self.labels[indices]
        if self.augment is not None:
            images = self.augment(images)
        return (images.to(torch.float32) / 255 - self.mean) / self.std, labels

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} images")
        images, labels = self.batch([index])
        return images[0], labels[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        """A batch for torch's DataLoader, which looks for this name: one augmentation and normalisation for all."""
        return list(zip(*self.batch(indices), strict=True))
