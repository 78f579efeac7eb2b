"""How right answers are counted; torchmetrics takes the mean over an epoch.

Tables and files call it accuracy whichever metric it is. It is a share of 1.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy, MultilabelExactMatch

from fastcaps.checks import check_choice, shape_text

METRICS = ("accuracy", "exact-match", "top-2")


class Count(MeanMetric):
    """The share of samples that are right.

    Parameters
    ----------
    right : Tensor
        ``update`` takes bool ``[B]``.
    """

    def update(self, right: Tensor, weight: Any = None) -> None:  # type: ignore[override]
        super().update(right.float())


class Accuracy:
    """One of ``METRICS``.

    - ``accuracy``: the highest logit is the sample's class (with mixup, its largest share).
    - ``exact-match``: the classes whose logits are above ``threshold`` are exactly those that are there.
    - ``top-2``: every class that is there is among the two highest logits.
    """

    def __init__(self, metric: str, classes: int, threshold: float) -> None:
        check_choice("metric", metric, METRICS)
        self.metric, self.classes, self.threshold = metric, classes, threshold

    def fresh(self) -> Metric:
        """A metric that has seen nothing."""
        if self.metric == "accuracy":
            return MulticlassAccuracy(self.classes, average="micro", validate_args=False)
        if self.metric == "exact-match":
            return MultilabelExactMatch(self.classes, validate_args=False)
        return Count()

    def update(self, metric: Metric, logits: Tensor, target: Tensor) -> None:
        """Show a batch to a metric that :meth:`fresh` made: logits ``[B, M]`` and targets as a loss takes them."""
        if self.metric == "accuracy":
            if target.dim() == 2 and not target.is_floating_point():
                raise ValueError(f"metric: accuracy wants one class a sample, got targets {shape_text(target)}")
            metric.update(logits.argmax(1), target.argmax(1) if target.dim() == 2 else target)
            return
        there = F.one_hot(target, self.classes) if target.dim() == 1 else target
        there = there > 0
        if self.metric == "exact-match":
            metric.update((logits > self.threshold).int(), there.int())
            return
        highest = logits.topk(min(2, self.classes), 1).indices
        metric.update(there.sum(1) == there.gather(1, highest).sum(1))
