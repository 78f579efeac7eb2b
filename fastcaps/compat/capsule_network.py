"""``CapsuleLayer`` of gram-ai's capsule-networks: dynamic routing in which children compete, and primary capsules.

What differs: a parent whose votes add up to zero is zero, not NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastcaps import functional
from fastcaps.checks import check_count, shape_text
from fastcaps.nn.poses import every_argument_repr, require_tensor
from fastcaps.vectors import squash

__all__ = ["CapsuleLayer"]


class CapsuleLayer(nn.Module):
    """Capsules by dynamic routing, or primary capsules by convolutions, with that code's names.

    The **children** of a parent compete. The logits that the routing starts from are zero, or learned, as in that
    code's first revisions.

    Parameters
    ----------
    num_capsules : int
        Parents; of primary capsules, the numbers in a pose: one convolution for each.
    num_route_nodes : int
        Children; -1 makes primary capsules.
    in_channels, out_channels : int
        Numbers in a child's pose and in a parent's; of primary capsules, channels of the map and of each convolution.
    kernel_size, stride : int, optional
        Of primary capsules.
    num_iterations : int
        Turns.
    learned_logits : bool
        Hold ``route_logits``, which those first revisions and their checkpoints have.

    Attributes
    ----------
    route_weights : Parameter
        ``[num_capsules, num_route_nodes, in_channels, out_channels]``, drawn from N(0, 1).
    route_logits : Parameter
        With ``learned_logits``: ``[num_capsules, 1, num_route_nodes, 1, 1]``, zero at the start.
    capsules : nn.ModuleList
        Of primary capsules.

    Examples
    --------
    >>> import torch
    >>> primary = CapsuleLayer(8, -1, 256, 32, kernel_size=9, stride=2)
    >>> digits = CapsuleLayer(10, 32 * 6 * 6, 8, 16)
    >>> digits(primary(torch.randn(2, 256, 20, 20))).squeeze().transpose(0, 1).shape
    torch.Size([2, 10, 16])
    """

    def __init__(
        self,
        num_capsules: int,
        num_route_nodes: int,
        in_channels: int,
        out_channels: int,
        kernel_size: int | None = None,
        stride: int | None = None,
        num_iterations: int = 3,
        *,
        learned_logits: bool = False,
    ) -> None:
        super().__init__()
        self.num_capsules = check_count("num_capsules", num_capsules)
        self.num_route_nodes = -1 if num_route_nodes == -1 else check_count("num_route_nodes", num_route_nodes)
        self.in_channels = check_count("in_channels", in_channels)
        self.out_channels = check_count("out_channels", out_channels)
        self.kernel_size, self.stride = kernel_size, stride
        self.num_iterations = check_count("num_iterations", num_iterations)
        self.learned_logits = bool(learned_logits)
        if num_route_nodes == -1:
            size, step = check_count("kernel_size", kernel_size), check_count("stride", stride)
            self.capsules = nn.ModuleList(
                nn.Conv2d(in_channels, out_channels, size, stride=step) for _ in range(num_capsules)
            )
            return
        if learned_logits:
            self.route_logits = nn.Parameter(torch.empty(num_capsules, 1, num_route_nodes, 1, 1))
        self.route_weights = nn.Parameter(torch.empty(num_capsules, num_route_nodes, in_channels, out_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        if self.num_route_nodes == -1:
            for convolution in self.capsules:
                convolution.reset_parameters()  # type: ignore[operator]
        else:
            if self.learned_logits:
                nn.init.zeros_(self.route_logits)
            nn.init.normal_(self.route_weights)

    def forward(self, x: Tensor) -> Tensor:
        """Route, or make primary capsules.

        Parameters
        ----------
        x : Tensor
            ``[batch, num_route_nodes, in_channels]``, or a map ``[batch, in_channels, h, w]``.

        Returns
        -------
        Tensor
            ``[num_capsules, batch, 1, 1, out_channels]``, or primary capsules ``[batch, out_channels * h' * w',
            num_capsules]``.
        """
        require_tensor(x, "x")
        if self.num_route_nodes == -1:
            return squash(torch.stack([convolution(x).flatten(1) for convolution in self.capsules], dim=-1))
        prior = self.route_logits.flatten(1).T if self.learned_logits else None
        return route(x, "x", self.route_weights, self.num_iterations, prior)

    extra_repr = every_argument_repr


def route(x: Tensor, name: str, weight: Tensor, iterations: int, prior: Tensor | None = None) -> Tensor:
    """Route ``[batch, i, d]``, an argument called ``name``, by matrices ``[m, i, d, e]`` to ``[m, batch, 1, 1, e]``."""
    require_tensor(x, name)
    _, children, numbers, _ = weight.shape
    if x.dim() != 3 or x.shape[1:] != (children, numbers):
        raise ValueError(f"{name} must be [batch, {children}, {numbers}], got {shape_text(x)}")
    parents = functional.dynamic_routing(
        x.unsqueeze(-2), weight.transpose(0, 1), iterations=iterations, compete="children", prior=prior
    )
    assert isinstance(parents, Tensor)
    return parents.transpose(0, 1).unsqueeze(2)
