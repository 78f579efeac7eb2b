"""``DenseCapsule`` of CapsNet-Pytorch (X. Guo), the most used code of dynamic routing, with many copies.

What differs: it runs on any device, since the coefficients start on the children's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastcaps import functional
from fastcaps.checks import check_count, shape_text
from fastcaps.nn.poses import every_argument_repr, require_tensor
from fastcaps.vectors import length

__all__ = ["DenseCapsule"]

EPS = 1e-8


class DenseCapsule(nn.Module):
    r"""A set of capsules routed to a set of parents by dynamic routing (Sabour et al., 2017), with Guo's names.

    The parents compete for each child. Gradients go through the last turn alone: the coefficients are constants to
    them. Squashing is :math:`\frac{n^2}{1 + n^2} \frac{s}{n + 10^{-8}}` with :math:`n = \lVert s \rVert`.

    Parameters
    ----------
    in_num_caps, in_dim_caps : int
        Children, and the numbers in a child's pose.
    out_num_caps, out_dim_caps : int
        Parents, and the numbers in a parent's pose.
    routings : int
        Turns, at least 1.

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

    def __init__(
        self, in_num_caps: int, in_dim_caps: int, out_num_caps: int, out_dim_caps: int, routings: int = 3
    ) -> None:
        super().__init__()
        self.in_num_caps = check_count("in_num_caps", in_num_caps)
        self.in_dim_caps = check_count("in_dim_caps", in_dim_caps)
        self.out_num_caps = check_count("out_num_caps", out_num_caps)
        self.out_dim_caps = check_count("out_dim_caps", out_dim_caps)
        self.routings = check_count("routings", routings)
        self.weight = nn.Parameter(torch.empty(out_num_caps, in_num_caps, out_dim_caps, in_dim_caps))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameter anew."""
        with torch.no_grad():
            self.weight.normal_().mul_(0.01)

    def forward(self, x: Tensor) -> Tensor:
        """Route.

        Parameters
        ----------
        x : Tensor
            ``[batch, in_num_caps, in_dim_caps]``.

        Returns
        -------
        Tensor
            ``[batch, out_num_caps, out_dim_caps]``.

        Raises
        ------
        ValueError, TypeError
            If ``x`` does not fit.
        """
        return route(x, self.weight, self.routings)

    extra_repr = every_argument_repr


def route(x: Tensor, weight: Tensor, iterations: int) -> Tensor:
    """Route ``[batch, i, d]`` by matrices ``[m, i, e, d]`` to ``[batch, m, e]``."""
    require_tensor(x, "x")
    _, children, _, numbers = weight.shape
    if x.dim() != 3 or x.shape[1:] != (children, numbers):
        raise ValueError(f"x must be [batch, {children}, {numbers}], got {shape_text(x)}")
    weight = weight.permute(1, 0, 3, 2)  # [G, M, D, E]
    parents = functional.dynamic_routing(x.unsqueeze(-2), weight, iterations=iterations, detach=True)
    assert isinstance(parents, Tensor)
    return _shorten(parents.squeeze(-2))


def _shorten(parents: Tensor) -> Tensor:
    """Return squashed vectors as Guo's formula squashes them, whose 1e-8 shortens those that were nearly 0 before.

    What was squashed to a length p was ``n = sqrt(p / (1 - p))`` long; its share that is left is ``n / (n + 1e-8)``.
    """
    size = length(parents, keepdim=True)
    zero = size == 0
    root = size.masked_fill(zero, 1.0).sqrt()
    rest = (1 - size).clamp(min=0).sqrt()
    return parents * (root / (root + EPS * rest)).masked_fill(zero, 0.0)
