"""``RoutingCapsules`` of capsule-network (D. Havir): what ``DenseCapsule`` computes, under other names.

What differs: it runs where its input is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastcaps.compat.dense_capsule import shorten
from fastcaps.compat.twin import DynamicTwin, Twin

__all__ = ["RoutingCapsules"]


class RoutingCapsules(DynamicTwin):
    """A set of capsules routed to a set of parents by dynamic routing, with that code's names.

    It computes what :class:`~fastcaps.compat.DenseCapsule` does.

    Parameters
    ----------
    in_dim, in_caps : int
        Numbers in a child's pose, and children.
    num_caps, dim_caps : int
        Parents, and the numbers in a parent's pose.
    num_routing : int
        Iterations, at least 1.
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

    _children = ("in_caps", "in_dim")
    _known_by = (*_children, "num_caps", "dim_caps", "num_routing")

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
        self._count(in_dim=in_dim, in_caps=in_caps, num_caps=num_caps, dim_caps=dim_caps, num_routing=num_routing)
        self.device = device
        self.W = nn.Parameter(torch.empty(1, num_caps, in_caps, dim_caps, in_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameter anew."""
        with torch.no_grad():
            self.W.normal_().mul_(0.01)

    def forward(self, x: Tensor) -> Tensor:
        """Route ``[batch, in_caps, in_dim]`` to ``[batch, num_caps, dim_caps]``."""
        return shorten(self._route("x", x, self.W[0].permute(1, 0, 3, 2), iterations=self.num_routing, detach=True))

    @classmethod
    def _like(cls, old: Any, **options: Any) -> Twin:
        return super()._like(old, device=getattr(old, "device", None), **options)  # some copies know no device
