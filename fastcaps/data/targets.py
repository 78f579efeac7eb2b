"""What the targets of a batch ask for: their dtype and shape say it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy, and which samples are right.

    Parameters
    ----------
    logits : Tensor
        ``[n, classes]``.
    targets : Tensor
        int64 ``[n]``: a class. Floating point ``[n, classes]``: shares of classes, as mixup makes them; the largest one
        is to be found. bool ``[n, classes]``: the classes that are there, each judged by a sigmoid of its own; a sample
        is right if all of them are found and no other (Tsai et al. 2020, section 6).

    Returns
    -------
    loss, right : Tensor
        The batch's mean, and bool ``[n]``.
    """
    if targets.dtype == torch.bool:
        right = ((logits > 0) == targets).all(1)
        return F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype)), right
    best = targets.argmax(1) if targets.dim() == 2 else targets
    return F.cross_entropy(logits, targets), logits.argmax(1) == best
