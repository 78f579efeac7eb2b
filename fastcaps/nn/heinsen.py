"""The layer of Heinsen routing, for sets and grids of capsules."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from typing_extensions import Unpack

from fastcaps import functional
from fastcaps.checks import check_choice, check_finite, check_flag
from fastcaps.functional.heinsen import MODELS
from fastcaps.nn.layer import LayerCall, LayerOptions, RoutingLayer
from fastcaps.results import Gaussians, RoutedGaussians


class HeinsenRouting(RoutingLayer[Gaussians, RoutedGaussians]):
    r"""Route child capsules with scores to parents with scores (Heinsen, 2019, Algorithm 1).

    The equation is that of :func:`fastcaps.functional.heinsen_routing`: the parents compete for each child. The kernels
    store no vote.

    Parameters
    ----------
    in_capsules, out_capsules, in_dim, out_dim, pose, kernel_size, stride, padding, dilation, share, matrices, bias,
    break_symmetry, iterations, device, dtype
        See :class:`~fastcaps.nn.layer.RoutingLayer`. ``out_capsules=None`` is section 2.1.1 of the paper. The author's
        code has ``bias=True`` and ``break_symmetry=True``, the paper ``break_symmetry=False``.
    model, eps
        See :func:`fastcaps.functional.heinsen_routing`.
    single_beta : bool
        Use one table of parameters both for the benefit of using a child and for the cost of ignoring it.

    Calls
    -----
    ``scores`` of the children are real values: minus infinity for a child that does not exist, plus infinity (the
    default for all) for one that certainly does. The result holds the parents' scores, ``[B, M]`` or
    ``[B, M, Ho, Wo]``, and the variances of their poses, which are means.

    Attributes
    ----------
    weight : Parameter
        ``[G, M or 1, D, E]`` with G the number of weight groups; drawn from N(0, 1) / D, as in the author's code.
    beta_use, beta_ignore : Parameter
        ``[I or 1, M or 1]``; zero at the start. With ``single_beta``, ``beta_ignore`` is None.

    Examples
    --------
    >>> import torch
    >>> layer = HeinsenRouting(None, 64, 16, 16, bias=True)
    >>> poses, scores, variances = layer(torch.randn(2, 300, 16), torch.zeros(2, 300))
    >>> classes = HeinsenRouting(64, 5, 16, 16, bias=True)
    >>> poses, scores, variances = classes(poses, scores)
    >>> poses.shape, scores.shape, variances.shape
    (torch.Size([2, 5, 16]), torch.Size([2, 5]), torch.Size([2, 5, 16]))
    >>> tokens = HeinsenRouting(None, None, 8, 8, pose="vector")
    >>> tokens(torch.randn(2, 7, 8), out_capsules=3).poses.shape
    torch.Size([2, 3, 8])
    """

    activity_name = "scores"
    head = "activations"
    beta_use: nn.Parameter
    beta_ignore: nn.Parameter | None

    def __init__(
        self,
        in_capsules: int | None,
        out_capsules: int | None,
        in_dim: int,
        out_dim: int,
        *,
        iterations: int = 3,
        model: str = "gaussian",
        single_beta: bool = False,
        eps: float = 1e-5,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(in_capsules, out_capsules, in_dim, out_dim, iterations=iterations, **options)
        check_choice("model", model, tuple(MODELS))
        self.model = model
        self.single_beta = check_flag("single_beta", single_beta)
        self.eps = check_finite("eps", eps, 0.0)
        table = (self.own_children, self.out_capsules or 1)
        self.new_parameter("beta_use", table)
        self.new_parameter("beta_ignore", table, not single_beta)
        self.reset_parameters()

    def first_std(self) -> float:
        """``1 / D``."""
        return 1.0 / self.pose_shape[1]

    def forward(  # type: ignore[override]
        self, children: Tensor, scores: Tensor | None = None, **options: Any
    ) -> Any:
        """Return the parents, as described under *Calls* of the class."""
        self.check_options(options)  # first, as the base class has a parameter named activations
        return super().forward(children, scores, **options)

    def run(self, call: LayerCall, iterations: int, return_coefficients: bool) -> Gaussians | RoutedGaussians:
        """Return the routing of a checked call."""
        return functional.heinsen_routing(
            call.children,
            call.activity,
            call.weight,
            call.bias,
            self.beta_use.expand(-1, call.parent_count),
            (self.beta_use if self.beta_ignore is None else self.beta_ignore).expand(-1, call.parent_count),
            iterations=iterations,
            model=self.model,
            eps=self.eps,
            window=call.window,
            return_coefficients=return_coefficients,
        )
