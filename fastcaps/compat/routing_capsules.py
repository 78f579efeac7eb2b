"""``RoutingCapsules`` of capsule-network (D. Havir): what ``DenseCapsule`` computes, under other names.

What differs: it runs where its input is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastcaps.checks import check_count
from fastcaps.compat.dense_capsule import route
from fastcaps.nn.poses import every_argument_repr

__all__ = ["RoutingCapsules"]


class RoutingCapsules(nn.Module):
    """A set of capsules routed to a set of parents by dynamic routing, with that code's names.

    It computes what :class:`~fastcaps.compat.DenseCapsule` does.

    Parameters
    ----------
    in_dim, in_caps : int
        Numbers in a child's pose, and children.
    num_caps, dim_caps : int
        Parents, and the numbers in a parent's pose.
    num_routing : int
        Turns, at least 1.
    device : torch.device, optional
        Kept, and without effect: the published layer makes its logits there.

    Attributes
    ----------
    W : Parameter
        ``[1, num_caps, in_caps, dim_caps, in_dim]``, drawn from N(0, 0.01^2).

    Examples
    --------
    >>> import torch
    >>> layer = RoutingCapsules(in_dim=8, in_caps=1152, num_caps=10, dim_caps=16, num_routing=3)
    >>> layer(torch.randn(2, 1152, 8)).shape
    torch.Size([2, 10, 16])
    """

    def __init__(
        self,
        in_dim: int,
        in_caps: int,
        num_caps: int,
        dim_caps: int,
        num_routing: int,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_dim, self.in_caps = check_count("in_dim", in_dim), check_count("in_caps", in_caps)
        self.num_caps, self.dim_caps = check_count("num_caps", num_caps), check_count("dim_caps", dim_caps)
        self.num_routing = check_count("num_routing", num_routing)
        self.device = device
        self.W = nn.Parameter(torch.empty(1, num_caps, in_caps, dim_caps, in_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameter anew."""
        with torch.no_grad():
            self.W.normal_().mul_(0.01)

    def forward(self, x: Tensor) -> Tensor:
        """Route.

        Parameters
        ----------
        x : Tensor
            ``[batch, in_caps, in_dim]``.

        Returns
        -------
        Tensor
            ``[batch, num_caps, dim_caps]``.
        """
        return route(x, self.W[0], self.num_routing)

    extra_repr = every_argument_repr
