"""The loss of EncapNet (Li et al., 2018): margin loss, and what the feedback units return."""

from __future__ import annotations

from torch import Tensor

from fastcaps.checks import require_tensor, shape_text
from fastcaps.losses import margin_loss


def feedback_loss(
    lengths: Tensor, target: Tensor, feedback: Tensor, *, weight: float = 10.0, reduction: str = "mean"
) -> Tensor:
    r"""The loss of EncapNet (Li et al. 2018): margin loss, and the divergences between layers.

    .. math:: L = L_\mathrm{margin} + \lambda \sum_k D_k

    Parameters
    ----------
    lengths, target, reduction
        As :func:`~fastcaps.losses.margin_loss` has them.
    feedback : Tensor
        A scalar: the sum of what the network's :class:`~fastcaps.encapnet.FeedbackAgreement` units return.
    weight : float
        :math:`\lambda`; 10 in the paper.

    Returns
    -------
    Tensor
        A scalar, or ``[B]`` for ``"none"``.

    Examples
    --------
    >>> import torch
    >>> lengths = torch.tensor([[0.7, 0.3, 0.05]])
    >>> feedback_loss(lengths, torch.tensor([0]), torch.tensor(0.02))  # 0.06 + 10 * 0.02
    tensor(0.2600)
    """
    require_tensor(feedback, "feedback")
    if feedback.dim() != 0:
        raise ValueError(f"feedback must be a scalar, got {shape_text(feedback)}")
    return margin_loss(lengths, target, reduction=reduction) + weight * feedback
