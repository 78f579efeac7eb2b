"""``DigitCaps`` of the tutorial capsule_net_pytorch (C. Camacho, cezannec): dynamic routing in which children compete.

What differs: a parent whose votes add up to zero is zero, not NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastcaps.compat.twin import DynamicTwin, Twin

__all__ = ["DigitCaps"]


class DigitCaps(DynamicTwin):
    """A set of capsules routed to a set of parents in three iterations of dynamic routing, with that code's names.

    The **children** of a parent compete.

    Parameters
    ----------
    num_capsules : int
        Parents.
    previous_layer_nodes : int
        Children.
    in_channels, out_channels : int
        Numbers in a child's pose and in a parent's.

    Attributes
    ----------
    W : Parameter
        ``[num_capsules, previous_layer_nodes, in_channels, out_channels]``, drawn from N(0, 1).

    Examples
    --------
    >>> import torch
    >>> layer = DigitCaps(num_capsules=10, previous_layer_nodes=32 * 6 * 6, in_channels=8, out_channels=16)
    >>> layer(torch.randn(2, 1152, 8)).squeeze().transpose(0, 1).shape
    torch.Size([2, 10, 16])
    """

    _children = ("previous_layer_nodes", "in_channels")
    _known_by = ("num_capsules", *_children)

    def __init__(
        self,
        num_capsules: int = 10,
        previous_layer_nodes: int = 32 * 6 * 6,
        in_channels: int = 8,
        out_channels: int = 16,
    ) -> None:
        super().__init__()
        self._count(num_capsules=num_capsules, previous_layer_nodes=previous_layer_nodes)
        self._count(in_channels=in_channels, out_channels=out_channels)
        self.W = nn.Parameter(torch.empty(num_capsules, previous_layer_nodes, in_channels, out_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameter anew."""
        nn.init.normal_(self.W)

    def forward(self, u: Tensor) -> Tensor:
        """Route ``[batch, previous_layer_nodes, in_channels]`` to ``[num_capsules, batch, 1, 1, out_channels]``."""
        parents = self._route("u", u, self.W.transpose(0, 1), iterations=3, compete="children")
        return parents.transpose(0, 1)[:, :, None, None]

    @classmethod
    def _like(cls, old: Any, **options: Any) -> Twin:
        return super()._like(old, out_channels=old.W.shape[-1], **options)  # which it does not keep
