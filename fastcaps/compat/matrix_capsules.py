"""``ConvCaps`` of Matrix-Capsules-EM-PyTorch (yl-1993): EM routing over a window or a whole grid.

What differs: it runs on any device and any grid, square or not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastcaps import functional
from fastcaps.checks import require_tensor, shape_text
from fastcaps.compat.twin import Draw, Twin
from fastcaps.votes import Window


class ConvCaps(Twin):
    r"""EM routing over a window or a whole grid, with the published names.

    As in that code, a child's coefficients times its activation a are divided by their sum: its weight is
    :math:`a / (a + 10^{-8})`, about 1 for all activations but 0. :math:`\lambda` is 0.001 in every iteration.

    It routes ``[b, h, w, B * (P * P + 1)]``, P x P poses and then activations of B child types, to
    ``[b, h', w', C * (P * P + 1)]`` in ``iters`` iterations, over windows of K x K with a ``stride``. With
    ``w_shared``, for which K and ``stride`` must be 1, the whole grid is one window with shared matrices, and the
    result is activations ``[b, C]``; ``coor_add`` then adds a child's position to its votes. The parameter ``weights``,
    ``[1, K * K * B, C, P, P]``, is drawn from N(0, 1); ``beta_u`` and ``beta_a``, ``[C]``, are zero at the start.

    Examples
    --------
    >>> import torch
    >>> conv, classes = ConvCaps(8, 16, 3, 4, stride=2), ConvCaps(16, 10, 1, 4, stride=1, coor_add=True, w_shared=True)
    >>> grid = conv(torch.rand(2, 9, 9, 8 * 17))
    >>> grid.shape, classes(grid).shape
    (torch.Size([2, 4, 4, 272]), torch.Size([2, 10]))
    """

    B: int
    K: int
    P: int
    stride: int
    iters: int
    _known_by = ("B", "C", "K", "P", "stride", "iters", "coor_add", "w_shared")
    _drawn = "weights"
    _probes = (("iters", range(1, 7)),)

    def __init__(
        self,
        B: int = 32,
        C: int = 32,
        K: int = 3,
        P: int = 4,
        stride: int = 2,
        iters: int = 3,
        coor_add: bool = False,
        w_shared: bool = False,
    ) -> None:
        super().__init__()
        self._count(B=B, C=C, K=K, P=P, stride=stride, iters=iters)
        self.psize = P * P
        self.coor_add, self.w_shared = bool(coor_add), bool(w_shared)
        if w_shared and (K, stride) != (1, 1):
            raise ValueError(f"K and stride must be 1 with w_shared=True, got {K} and {stride}")
        self.eps, self._lambda = 1e-8, 1e-3
        self.beta_u, self.beta_a = nn.Parameter(torch.empty(C)), nn.Parameter(torch.empty(C))
        self.weights = nn.Parameter(torch.empty(1, K * K * B, C, P, P))
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Return the parents' poses and activations, or with ``w_shared`` their activations."""
        require_tensor(x, "x")
        numbers = self.B * self.psize
        if x.dim() != 4 or x.shape[-1] != numbers + self.B:
            raise ValueError(f"x must be [b, h, w, {numbers + self.B}], got {shape_text(x)}")
        _, height, width, _ = x.shape
        bias = None
        if self.w_shared and self.coor_add:
            flat = x.new_zeros(height, width, self.B, 1, self.psize)
            down, across = (torch.arange(size, device=x.device, dtype=x.dtype) / size for size in (height, width))
            flat[..., 0] += down.view(-1, 1, 1, 1)
            flat[..., 1 % self.psize] += across.view(-1, 1, 1)
            bias = flat.view(-1, 1, self.P, self.P)
        active = x[..., numbers:].movedim(-1, 1)
        found = functional.em_routing(
            x[..., :numbers].unflatten(-1, (self.B, self.P, self.P)).movedim(3, 1),
            active / (active + max(self.eps, torch.finfo(x.dtype).tiny)),
            self.weights[0],
            self.beta_u,
            self.beta_a,
            iterations=self.iters,
            inverse_temperature=self._lambda,
            bias=bias,
            eps=self.eps,
            window=Window((height, width) if self.w_shared else self.K, 1 if self.w_shared else self.stride),
        )
        if self.w_shared:
            return found.activations.flatten(1)
        return torch.cat([found.poses.movedim(1, 3).flatten(3), found.activations.movedim(1, 3)], dim=3)

    def _calls(self, draw: Draw) -> list[tuple[Any, ...]]:
        size = self.K + 2 * self.stride - 1  # two windows per side, also by the formula of the first versions
        activations = draw(2, size, size, self.B).sigmoid()
        return [(torch.cat([draw(2, size, size, self.B * self.psize), activations], dim=3),)]
