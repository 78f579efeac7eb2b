"""The routing layer of EM routing, for sets and for grids of capsules."""

from __future__ import annotations

import math
import pickle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from fastcaps import functional, ops
from fastcaps.checks import accumulation_dtype, check_choice, check_count, check_finite
from fastcaps.functional.em import (
    FIRST_COEFFICIENTS,
    InverseTemperature,
    inverse_temperatures,
    result_dtype,
    weighed_by_ones,
)
from fastcaps.nn.layer import LayerCall, LayerOptions, RoutingLayer
from fastcaps.reference.gaussian import log_sigmas
from fastcaps.results import Capsules, RoutedCapsules
from fastcaps.rules import Rule
from fastcaps.votes import Votes, from_op

__all__ = ["EMRouting"]


class EMRouting(RoutingLayer[Capsules, RoutedCapsules]):
    r"""Route child capsules with activations to parents with activations by EM (Hinton et al., 2018, Procedure 1).

    .. math::
        v_{ij} &= P_i W_{ij} + b_{ij}, \quad
        r_{ij} = \operatorname{softmax}_j \Bigl(\ln a_j
                 - \sum_h \ln \sigma_{jh} - \sum_h \frac{(v_{ijh} - \mu_{jh})^2}{2 \sigma_{jh}^2}\Bigr), \quad
        n_j = \sum_i a_i r_{ij}, \\
        \mu_j &= \frac{1}{n_j} \sum_i a_i r_{ij} v_{ij}, \quad
        \sigma_j^2 = \frac{1}{n_j} \sum_i a_i r_{ij} (v_{ij} - \mu_j)^2, \quad
        a_j = \operatorname{sigmoid}\Bigl(\lambda_t \bigl(\beta_{a,j} - \sum_h (\beta_{u,j} + \ln \sigma_{jh}) n_j
              \bigr)\Bigr)

    The parents j compete for each child. All is computed from logarithms: neither activations of 0 nor tiny variances
    make a NaN. The kernels store no vote.

    Parameters
    ----------
    in_capsules, out_capsules, in_dim, out_dim, pose, kernel_size, stride, padding, dilation, share, matrices, bias, \
break_symmetry, iterations, device, dtype
        As :class:`~fastcaps.nn.layer.RoutingLayer` has them.
    inverse_temperature : float, sequence of float, callable, optional
        :math:`\lambda_t`: a number, one for each turn, or a function of the turn, which counts from 0. None is the
        customary ``0.01 (1 - 0.95^(turn + 1))``. May be set later, to follow a schedule of training. A layer with a
        lambda can be copied, but not pickled; one with a function defined at the top of a module can.
    coordinates : bool
        Coordinate addition, for ``kernel_size="all"``: the child's place in the grid, in (0, 1), is added to its votes
        (:func:`fastcaps.functional.coordinate_bias`), which otherwise would not know it. Other coordinates may come
        with a call, as ``bias``.
    normalize_cost : bool
        Normalise what the sigmoid of the activations takes, :math:`\beta_a` less the cost, to mean 0 and variance 1
        over the parents j of a place, before :math:`\lambda_t` (Li et al., 2018, appendix A: small :math:`\sigma`
        otherwise make it so large that all activations are 1). Over whom, and that 1 is then the default of
        :math:`\lambda_t`, is our reading. Every turn is then a call of its own.
    first_coefficients : "uniform" or "ones"
        r of the first turn: 1 / M, or 1 as in SR-CapsNet's code, which makes its n M times as large.
    eps : float
        Added to the variances, and to n under the moments.

    Attributes
    ----------
    weight : Parameter
        ``[G, M, D, E]`` with G the number of weight groups; drawn from N(0, 1) / sqrt(D), which leaves the size of
        poses as it is.
    beta_u, beta_a : Parameter
        ``[M or 1]``, one per parent type; zero at the start.

    Examples
    --------
    >>> import torch
    >>> conv = EMRouting(8, 16, 16, 16, kernel_size=3, stride=2)
    >>> poses, activations = conv(torch.randn(2, 8, 9, 9, 16), torch.rand(2, 8, 9, 9))
    >>> poses.shape, activations.shape
    (torch.Size([2, 16, 4, 4, 16]), torch.Size([2, 16, 4, 4]))
    >>> classes = EMRouting(16, 5, 16, 16, kernel_size="all", share=True, coordinates=True)
    >>> poses, activations = classes(poses, activations)
    >>> poses.shape, activations.shape
    (torch.Size([2, 5, 16]), torch.Size([2, 5]))
    """

    beta_u: nn.Parameter
    beta_a: nn.Parameter

    def __init__(
        self,
        in_capsules: int | None,
        out_capsules: int | None,
        in_dim: int,
        out_dim: int,
        *,
        iterations: int = 3,
        inverse_temperature: InverseTemperature | None = None,
        coordinates: bool = False,
        normalize_cost: bool = False,
        first_coefficients: str = "uniform",
        eps: float = 1e-8,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(in_capsules, out_capsules, in_dim, out_dim, iterations=iterations, **options)
        inverse_temperatures(inverse_temperature, self.iterations)  # raises where it is wrong
        self.inverse_temperature = inverse_temperature
        self.coordinates = bool(coordinates)
        if self.coordinates and not self.whole_grid:
            raise ValueError("coordinates must be False without kernel_size='all': a small window says where it is")
        self.normalize_cost = bool(normalize_cost)
        if self.normalize_cost and self.out_capsules == 1:
            raise ValueError("normalize_cost must be False for one parent: there are no others to compare it with")
        check_choice("first_coefficients", first_coefficients, FIRST_COEFFICIENTS)
        self.first_coefficients = first_coefficients
        self.eps = check_finite("eps", eps, 0.0)
        many = self.out_capsules or 1
        self.new_parameter("beta_u", (many,), options)
        self.new_parameter("beta_a", (many,), options)
        self.reset_parameters()

    def first_std(self) -> float:
        """``1 / sqrt(D)``."""
        return 1.0 / math.sqrt(self.pose_shape[1])

    def forward(
        self,
        children: Tensor,
        activations: Tensor | None = None,
        *,
        out_capsules: int | None = None,
        bias: Tensor | None = None,
        iterations: int | None = None,
        inverse_temperature: InverseTemperature | None = None,
        return_coefficients: bool = False,
    ) -> Capsules | RoutedCapsules:
        """Route, as :class:`~fastcaps.nn.layer.RoutingLayer` tells of all layers.

        Parameters
        ----------
        activations : Tensor, optional
            The children's, in [0, 1], ``[B, I]`` or ``[B, N, H, W]``; 0 for a child that is not there, all 1 if None.
        inverse_temperature : float, sequence of float, callable, optional
            Another schedule for this call.

        Returns
        -------
        Capsules or RoutedCapsules
            The parents' poses; their activations ``[B, M]`` or ``[B, M, Ho, Wo]``; then the coefficients if asked for.
        """
        if self.coordinates and isinstance(children, Tensor) and children.dim() == 5:
            _, types, height, width, _ = children.shape
            pose = self.pose_shape[0], self.pose_shape[2]
            place = functional.coordinate_bias(
                height, width, types, *pose, device=children.device, dtype=children.dtype
            )
            bias = place if bias is None else bias + place
        call = self.prepare(children, activations, out_capsules, bias)
        betas = self.beta_u.expand(call.parent_count), self.beta_a.expand(call.parent_count)
        turns = self.iterations if iterations is None else iterations
        given = self.inverse_temperature if inverse_temperature is None else inverse_temperature
        if self.normalize_cost:
            temperatures = inverse_temperatures(1.0 if given is None else given, check_count("iterations", turns))
            own = (self.first_coefficients == "ones", self.eps, return_coefficients)
            return self.flat(_with_normalized_cost(call, betas, temperatures, *own))
        found = functional.em_routing(
            call.children,
            call.activity,
            call.weight,
            *betas,
            iterations=turns,
            inverse_temperature=given,
            bias=call.bias,
            eps=self.eps,
            window=call.window,
            return_coefficients=return_coefficients,
            first_coefficients=self.first_coefficients,
        )
        return self.flat(found)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "inverse_temperature": _Schedule(self.inverse_temperature)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        given = state["inverse_temperature"]
        super().__setstate__({**state, "inverse_temperature": given.given if isinstance(given, _Schedule) else given})


def _with_normalized_cost(
    call: LayerCall,
    betas: tuple[Tensor, Tensor],
    temperatures: list[float],
    ones: bool,
    eps: float,
    return_coefficients: bool,
) -> Capsules | RoutedCapsules:
    """Route by EM, turn by turn, the sigmoid's argument normalised over the parents: poses ``[..., C, E]``.

    The moments of a turn are those of Heinsen's; with a benefit of 1 and a cost of 0 its scores are the counts n.
    """
    parts = (call.children, call.weight, call.bias, call.activity)
    votes = Votes.of(*parts, call.window, call.parent_count, "activations")
    wide = accumulation_dtype(votes.children.dtype)
    beta_u, beta_a = (beta.to(wide) for beta in betas)
    one = votes.children.new_ones((1, 1), dtype=wide)
    state: tuple[Tensor | None, ...] = (None, None, None)
    means = scores = coefficients = votes.children
    for turn, temperature in enumerate(temperatures):
        flags = (int(Rule.HEINSEN), eps, return_coefficients and turn + 1 == len(temperatures))
        whole = ones and turn == 0
        counts, means, variances, *_, coefficients = ops.gaussian_routing(
            weighed_by_ones(votes) if whole else votes, *state, one, torch.zeros_like(one), [1.0], *flags
        )
        coefficients = coefficients * votes.parents if whole and flags[-1] else coefficients
        log_sigma = log_sigmas(variances)
        numbers = means.shape[-2] * means.shape[-1]
        benefit = beta_a - (numbers * beta_u + log_sigma) * counts
        scores = temperature * F.layer_norm(benefit, benefit.shape[-1:])
        state = (means, variances, F.logsigmoid(scores) - log_sigma)
    dtype = result_dtype(votes)
    active = from_op(scores.sigmoid(), call.window).to(dtype)
    poses = from_op(means, call.window).to(dtype)
    if not return_coefficients:
        return Capsules(poses, active)
    return RoutedCapsules(poses, active, coefficients)


class _Schedule:
    """An inverse temperature on its way through a copy or a pickle: says what cannot be pickled, and what can."""

    def __init__(self, given: InverseTemperature | None) -> None:
        self.given = given

    def __deepcopy__(self, memo: dict[int, Any]) -> _Schedule:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if "<" in getattr(self.given, "__qualname__", ""):
            raise pickle.PicklingError(
                "inverse_temperature is a lambda or a function inside another, which cannot be pickled; let it be a "
                "number, one for each turn, or a function defined at the top of a module"
            )
        return _Schedule, (self.given,)
