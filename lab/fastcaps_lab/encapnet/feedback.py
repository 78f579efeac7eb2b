"""EncapNet's feedback-agreement unit (Li et al., 2018, section 3.2): a loss between two layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastcaps_lab.checks import check_choice
from fastcaps_lab.encapnet.cap_conv import rectified_squash
from fastcaps_lab.encapnet.sinkhorn import SinkhornDivergence


def convolutions(channels: int, layers: Iterable[tuple[int, int, int]]) -> nn.Sequential:
    """Return convolutions, each with BatchNorm and ReLU, of given widths, kernel sizes and strides."""
    made = nn.Sequential()
    for width, kernel, stride in layers:
        made.append(nn.Conv2d(channels, width, kernel, stride=stride, padding=kernel // 2))
        made.extend([nn.BatchNorm2d(width), nn.ReLU()])
        channels = width
    return made


class FeedbackAgreement(nn.Module):
    r"""Reconstruct a lower layer from a higher one; the loss is the divergence between the two.

    A *generator* maps the higher layer to :math:`x`, in the shape of the lower layer :math:`y`: a 3 x 3 transposed
    convolution, BatchNorm, ReLU, and a squash. A *critic* reduces both: two convolutions of stride 2, to a quarter of
    the channels and to one, each with BatchNorm and ReLU. The loss is the
    :class:`~fastcaps_lab.encapnet.SinkhornDivergence` between the results of a batch:

    .. math:: L = 2 W(x, y) - W(x, x) - W(y, y)

    The critic reduces maps of 4 x 4 or less to a single value that is not negative. There is no angle between two of
    these, so the cosine cost has no effect there; ``cost="l2"`` has.

    A network's loss adds it, times 10 in the paper, in training only: in evaluation mode the unit returns 0 and
    computes nothing.

    Parameters
    ----------
    higher_channels, lower_channels, stride : int
        Channels of the two layers, and the size of the lower map relative to the higher one's, 1 or 2.
    types : int or None
        Capsule types, for capsules in channels: the generator is grouped by type, and squashes. None: feature maps of
        any convolutional network, or the paper's *vanilla* generator between capsules (d4 of Table 3).
    critic : bool
        False: compare the layers without a critic (d3).
    divergence : "ot" or "kl"
        "kl" is Kullback and Leibler's divergence (b) as we read it: a softmax over the critic's values of a sample is a
        distribution; the divergence of y's from x's, averaged over samples.
    **options
        cost, eps, iterations, bias_fix, through_plan of :class:`~fastcaps_lab.encapnet.SinkhornDivergence`:
        ``bias_fix=False`` is d1 of Table 3, ``through_plan=True`` d2, ``cost="l2"`` d5.

    Examples
    --------
    >>> import torch
    >>> unit = FeedbackAgreement(64, 32, types=16, stride=2)
    >>> higher, lower = torch.rand(3, 64, 4, 4), torch.rand(3, 32, 7, 8)
    >>> unit(higher, lower).shape, unit.eval()(higher, lower).item()
    (torch.Size([]), 0.0)
    """

    def __init__(
        self,
        higher_channels: int,
        lower_channels: int,
        *,
        types: int | None = None,
        stride: int = 1,
        critic: bool = True,
        divergence: str = "ot",
        **options: Any,
    ) -> None:
        super().__init__()
        if stride not in (1, 2):
            raise ValueError(f"stride must be 1 or 2, got {stride}")
        check_choice("divergence", divergence, ("ot", "kl"))
        self.types, self.stride, self.divergence = types, stride, divergence
        self.sinkhorn = SinkhornDivergence(**options)
        groups = types or 1
        self.generator = nn.ConvTranspose2d(higher_channels, lower_channels, 3, stride, padding=1, groups=groups)
        self.norm = nn.BatchNorm2d(lower_channels)
        layers = [(max(1, lower_channels // 4), 3, 2), (1, 3, 2)]
        self.critic = convolutions(lower_channels, layers) if critic else None

    def forward(self, higher: Tensor, lower: Tensor) -> Tensor:
        """Return the loss, a scalar, float32 or float64; 0 in evaluation mode.

        The layers are ``[B, higher_channels, h, w]`` and ``[B, lower_channels, H, W]``; H and W divided by the stride
        and rounded up are h and w.
        """
        if not self.training:
            return lower.new_zeros((), dtype=torch.promote_types(lower.dtype, torch.float32))
        x, y = self.norm(self.generator(higher, output_size=lower.shape[2:])), lower
        x = x.relu() if self.types is None else rectified_squash(x, self.types).flatten(1, 2)
        if self.critic is not None:
            x, y = self.critic(x), self.critic(y)
        if self.divergence == "ot":
            return self.sinkhorn(x, y)
        with torch.autocast(x.device.type, enabled=False):
            x, y = (z.flatten(1).to(torch.promote_types(z.dtype, torch.float32)).log_softmax(1) for z in (x, y))
            return F.kl_div(x, y, reduction="batchmean", log_target=True)
