"""``CapsuleLayer`` of gram-ai's capsule-networks: dynamic routing in which children compete, and primary capsules.

What differs: a parent whose votes add up to zero is zero, not NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastcaps.checks import check_count, require_tensor
from fastcaps.compat.twin import DynamicTwin, Twin
from fastcaps.vectors import squash

__all__ = ["CapsuleLayer"]


class CapsuleLayer(DynamicTwin):
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
        Iterations.
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

    _children = ("num_route_nodes", "in_channels")
    _known_by = ("num_capsules", "num_route_nodes", "num_iterations")

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
        self._count(num_capsules=num_capsules, in_channels=in_channels, out_channels=out_channels)
        self._count(num_iterations=num_iterations)
        self.num_route_nodes = -1 if num_route_nodes == -1 else check_count("num_route_nodes", num_route_nodes)
        self.kernel_size, self.stride = kernel_size, stride
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
        """Route ``[batch, num_route_nodes, in_channels]`` to ``[num_capsules, batch, 1, 1, out_channels]``.

        Or make of a map ``[batch, in_channels, h, w]`` primary capsules ``[batch, out_channels * h' * w',
        num_capsules]``.
        """
        if self.num_route_nodes == -1:
            require_tensor(x, "x")
            return squash(torch.stack([convolution(x).flatten(1) for convolution in self.capsules], dim=-1))
        options = {"prior": self.route_logits.flatten(1).T} if self.learned_logits else {}
        weight = self.route_weights.transpose(0, 1)
        parents = self._route("x", x, weight, iterations=self.num_iterations, compete="children", **options)
        return parents.transpose(0, 1)[:, :, None, None]

    @classmethod
    def _unfit(cls, old: Any) -> str:
        return "makes primary capsules by convolutions, routes nothing" if old.num_route_nodes == -1 else ""

    @classmethod
    def _like(cls, old: Any, **options: Any) -> Twin:
        _, _, in_channels, out_channels = old.route_weights.shape  # the layer keeps no sizes of poses
        options["learned_logits"] = hasattr(old, "route_logits")  # as its first versions have
        return super()._like(old, in_channels=in_channels, out_channels=out_channels, **options)
