"""``DigitCaps`` of the tutorial capsule_net_pytorch (C. Camacho, cezannec): dynamic routing in which children compete.

What differs: a parent whose votes add up to zero is zero, not NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastcaps.checks import check_count
from fastcaps.compat.capsule_network import route
from fastcaps.nn.poses import every_argument_repr

__all__ = ["DigitCaps"]


class DigitCaps(nn.Module):
    """A set of capsules routed to a set of parents in three turns of dynamic routing, with that code's names.

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

    def __init__(
        self,
        num_capsules: int = 10,
        previous_layer_nodes: int = 32 * 6 * 6,
        in_channels: int = 8,
        out_channels: int = 16,
    ) -> None:
        super().__init__()
        self.num_capsules = check_count("num_capsules", num_capsules)
        self.previous_layer_nodes = check_count("previous_layer_nodes", previous_layer_nodes)
        self.in_channels = check_count("in_channels", in_channels)
        self.out_channels = check_count("out_channels", out_channels)
        self.W = nn.Parameter(torch.empty(num_capsules, previous_layer_nodes, in_channels, out_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameter anew."""
        nn.init.normal_(self.W)

    def forward(self, u: Tensor) -> Tensor:
        """Route.

        Parameters
        ----------
        u : Tensor
            ``[batch, previous_layer_nodes, in_channels]``.

        Returns
        -------
        Tensor
            ``[num_capsules, batch, 1, 1, out_channels]``.
        """
        return route(u, "u", self.W, iterations=3)

    extra_repr = every_argument_repr
