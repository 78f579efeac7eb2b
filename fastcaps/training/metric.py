"""The metrics; tables and files call their value accuracy."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fastcaps.checks import shape_text


def right(metric: str, logits: Tensor, target: Tensor, threshold: float) -> Tensor:
    """Return which samples are classified correctly, bool ``[B]``.

    - ``accuracy``: the highest logit is the sample's class (with mixup, its most probable one).
    - ``exact-match``: the classes with logits above ``threshold`` are exactly those in the image.
    - ``top-2``: every class in the image is among the two highest logits.

    Logits are ``[B, M]``, the target is as for a loss.
    """
    if metric == "accuracy":
        if target.dim() == 2 and not target.is_floating_point():
            raise ValueError(f"metric: accuracy needs one class per sample, got targets {shape_text(target)}")
        return logits.argmax(1) == (target.argmax(1) if target.dim() == 2 else target)
    there = (F.one_hot(target, logits.shape[1]) if target.dim() == 1 else target) > 0
    if metric == "exact-match":
        return ((logits > threshold) == there).all(1)
    highest = logits.topk(min(2, logits.shape[1]), 1).indices
    return there.sum(1) == there.gather(1, highest).sum(1)
