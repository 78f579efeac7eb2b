"""The Sinkhorn divergence between two sets of vectors: optimal transport as a loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastcaps.functional import unit
from fastcaps_lab.checks import check_choice


class SinkhornDivergence(nn.Module):
    r"""The divergence between two sets of vectors (Genevay et al., 2017; Li et al., 2018, section 3.2).

    .. math::
        D(x, y) = 2 W(x, y) - W(x, x) - W(y, y), \quad W(x, y) = \sum_{ij} \pi_{ij} C_{ij}

    :math:`C_{ij}` is the cost of moving :math:`x_i` to :math:`y_j`. The plan :math:`\pi`, whose rows have equal sums,
    as have its columns, comes from the kernel :math:`\exp(-C / \epsilon)` by Sinkhorn's iterations, in logarithms, so
    that :math:`\epsilon` may be small.

    Parameters
    ----------
    cost : "cosine" or "l2"
        1 minus the cosine of the angle between two vectors (1 for a zero vector), or their distance.
    eps, iterations
        :math:`\epsilon`: the larger, the more evenly the plan spreads; iterations are over rows and columns. 1 in the
        authors' code and 10 in the paper.
    bias_fix, through_plan : bool
        Without the fix, only W(x, y), which is not 0 for equal sets. Whether the gradient flows through the plan, too;
        the paper's does not, and was slightly better.

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> divergence = SinkhornDivergence("l2", eps=0.01)
    >>> divergence(x, x + 1)  # each moves to its own, by (1, 1)
    tensor(2.8284)
    >>> divergence(x, x)
    tensor(0.)
    """

    def __init__(
        self,
        cost: str = "cosine",
        *,
        eps: float = 1.0,
        iterations: int = 10,
        bias_fix: bool = True,
        through_plan: bool = False,
    ) -> None:
        super().__init__()
        check_choice("cost", cost, ("cosine", "l2"))
        if not eps > 0:
            raise ValueError(f"eps must be above 0, got {eps}")
        self.cost, self.eps, self.iterations = cost, eps, iterations
        self.bias_fix, self.through_plan = bias_fix, through_plan

    def costs(self, x: Tensor, y: Tensor) -> Tensor:
        """Return C, ``[n, m]``, of vectors ``[n, d]`` and ``[m, d]``."""
        if self.cost == "cosine":
            return 1 - unit(x) @ unit(y).T
        return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")  # gradient 0 for equal vectors

    def plan(self, costs: Tensor) -> Tensor:
        r"""Return :math:`\pi`, ``[n, m]``, of costs ``[n, m]``: columns sum to 1 / m, rows converge to 1 / n."""
        kernel = -costs / self.eps
        # 1 / n and 1 / m in logarithms, by sums, as n and m may be symbols
        of_row, of_column = (-costs.new_zeros(size).logsumexp(0) for size in costs.shape)
        columns = of_column.expand(costs.shape[1])
        rows = of_row.expand(costs.shape[0])
        for _ in range(self.iterations):
            rows = of_row - (kernel + columns).logsumexp(1)
            columns = of_column - (kernel + rows.unsqueeze(1)).logsumexp(0)
        return (rows.unsqueeze(1) + kernel + columns).exp()

    def transport(self, x: Tensor, y: Tensor) -> Tensor:
        """Return W, of vectors ``[n, d]`` and ``[m, d]``."""
        costs = self.costs(x, y)
        plan = self.plan(costs if self.through_plan else costs.detach())
        return (plan * costs).sum()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the divergence of n and m vectors ``[n, ...]`` and ``[m, ...]``: a scalar; 0 for two empty sets.

        Half types are computed in float32, also under autocast.
        """
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
            x, y = x.flatten(1).to(dtype), y.flatten(1).to(dtype)
            found = self.transport(x, y)
            if not self.bias_fix:
                return found
            return 2 * found - self.transport(x, x) - self.transport(y, y)
