"""``DenseCapsule`` of CapsNet-Pytorch (X. Guo), the most used code of dynamic routing, with many copies.

What differs: it runs on any device, since the coefficients start on the children's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastcaps.compat.twin import DynamicTwin
from fastcaps.vectors import length

__all__ = ["DenseCapsule"]

EPS = 1e-8


class DenseCapsule(DynamicTwin):
    r"""A set of capsules routed to a set of parents by dynamic routing (Sabour et al., 2017), with Guo's names.

    The parents compete for each child. Gradients go through the last iteration alone: the coefficients are constants to
    them. Squashing is :math:`\frac{n^2}{1 + n^2} \frac{s}{n + 10^{-8}}` with :math:`n = \lVert s \rVert`.

    Parameters
    ----------
    in_num_caps, in_dim_caps : int
        Children, and the numbers in a child's pose.
    out_num_caps, out_dim_caps : int
        Parents, and the numbers in a parent's pose.
    routings : int
        Iterations, at least 1.

    Attributes
    ----------
    weight : Parameter
        ``[out_num_caps, in_num_caps, out_dim_caps, in_dim_caps]``, drawn from N(0, 0.01^2).

    Examples
    --------
    >>> import torch
    >>> layer = DenseCapsule(in_num_caps=1152, in_dim_caps=8, out_num_caps=10, out_dim_caps=16, routings=3)
    >>> layer(torch.randn(2, 1152, 8)).shape
    torch.Size([2, 10, 16])
    """

    _children = ("in_num_caps", "in_dim_caps")
    _known_by = (*_children, "out_num_caps", "out_dim_caps", "routings")

    def __init__(
        self, in_num_caps: int, in_dim_caps: int, out_num_caps: int, out_dim_caps: int, routings: int = 3
    ) -> None:
        super().__init__()
        self._count(in_num_caps=in_num_caps, in_dim_caps=in_dim_caps, out_num_caps=out_num_caps)
        self._count(out_dim_caps=out_dim_caps, routings=routings)
        self.weight = nn.Parameter(torch.empty(out_num_caps, in_num_caps, out_dim_caps, in_dim_caps))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameter anew."""
        with torch.no_grad():
            self.weight.normal_().mul_(0.01)

    def forward(self, x: Tensor) -> Tensor:
        """Route ``[batch, in_num_caps, in_dim_caps]`` to ``[batch, out_num_caps, out_dim_caps]``."""
        return shorten(self._route("x", x, self.weight.permute(1, 0, 3, 2), iterations=self.routings, detach=True))


def shorten(parents: Tensor) -> Tensor:
    """Return squashed vectors as Guo's formula squashes them, whose 1e-8 shortens those that were nearly 0 before.

    What was squashed to a length p was ``n = sqrt(p / (1 - p))`` long; its share that is left is ``n / (n + 1e-8)``.
    """
    size = length(parents, keepdim=True)
    zero = size == 0
    root = size.masked_fill(zero, 1.0).sqrt()
    rest = (1 - size).clamp(min=0).sqrt()
    return parents * (root / (root + EPS * rest)).masked_fill(zero, 0.0)
