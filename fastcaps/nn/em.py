"""The routing layer of EM routing, for sets and for grids of capsules."""

from __future__ import annotations

import math
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


class EMRouting(RoutingLayer[Capsules, RoutedCapsules]):
    r"""Route child capsules with activations to parents with activations by EM (Hinton et al., 2018, Procedure 1).

    The equation is that of :func:`fastcaps.functional.em_routing`: the parents compete for each child. Neither
    activations of 0 nor tiny variances make a NaN. The kernels store no vote.

    Parameters
    ----------
    in_capsules, out_capsules, in_dim, out_dim, pose, kernel_size, stride, padding, dilation, share, matrices, bias, \
break_symmetry, iterations, device, dtype
        As :class:`~fastcaps.nn.layer.RoutingLayer` has them.
    inverse_temperature : float, sequence of float, callable, optional
        As that function has it. May be set later, to follow a schedule of training. A layer with a lambda can be
        copied, but not pickled; one with a function defined at the top of a module can.
    coordinates : bool
        Coordinate addition, for ``kernel_size="all"``: the child's place in the grid, in (0, 1), is added to its votes
        (:func:`fastcaps.functional.coordinate_bias`), which otherwise would not know it. Other coordinates may come
        with a call, as ``bias``.
    normalize_cost : bool
        Normalise what the sigmoid of the activations takes, :math:`\beta_a` less the cost, to mean 0 and variance 1
        over the parents j of a place, before :math:`\lambda_t` (Li et al., 2018, appendix A: small :math:`\sigma`
        otherwise make it so large that all activations are 1). Over whom, and that 1 is then the default of
        :math:`\lambda_t`, is our reading. Every iteration is then a call of its own.
    first_coefficients, eps
        As :func:`fastcaps.functional.em_routing` has them.

    Calls
    -----
    ``activations`` of the children lie in [0, 1]: 0 for a child that is not there. A call may also give another
    ``inverse_temperature``. The result has the parents' activations, ``[B, M]`` or ``[B, M, Ho, Wo]``.

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

    head = "activations"
    call_options = ("inverse_temperature",)
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

    def prepare(
        self, children: Tensor, activity: Tensor | None, out_capsules: int | None = None, bias: Tensor | None = None
    ) -> LayerCall:
        """Check a call, and add the children's places to the bias of its votes."""
        if self.coordinates and isinstance(children, Tensor) and children.dim() == 5:
            _, types, height, width, _ = children.shape
            rows, _, columns = self.pose_shape
            like = {"device": children.device, "dtype": children.dtype}
            place = functional.coordinate_bias(height, width, types, rows, columns, **like)  # type: ignore[arg-type]
            bias = place if bias is None else bias + place
        return super().prepare(children, activity, out_capsules, bias)

    def route(
        self,
        call: LayerCall,
        iterations: int,
        return_coefficients: bool,
        *,
        inverse_temperature: InverseTemperature | None = None,
    ) -> Capsules | RoutedCapsules:
        """Route a checked call."""
        betas = self.beta_u.expand(call.parent_count), self.beta_a.expand(call.parent_count)
        given = self.inverse_temperature if inverse_temperature is None else inverse_temperature
        if self.normalize_cost:
            temperatures = inverse_temperatures(1.0 if given is None else given, check_count("iterations", iterations))
            own = (self.first_coefficients == "ones", self.eps, return_coefficients)
            return _with_normalized_cost(call, betas, temperatures, *own)
        return functional.em_routing(
            call.children,
            call.activity,
            call.weight,
            *betas,
            iterations=iterations,
            inverse_temperature=given,
            bias=call.bias,
            eps=self.eps,
            window=call.window,
            return_coefficients=return_coefficients,
            first_coefficients=self.first_coefficients,
        )


def _with_normalized_cost(
    call: LayerCall,
    betas: tuple[Tensor, Tensor],
    temperatures: list[float],
    ones: bool,
    eps: float,
    return_coefficients: bool,
) -> Capsules | RoutedCapsules:
    """Route by EM, the sigmoid's argument normalised over the parents: poses ``[..., C, E]``.

    Every iteration is an op of its own. Its moments are those of Heinsen's; with a benefit of 1 and a cost of 0 its
    scores are the counts n.
    """
    parts = (call.children, call.weight, call.bias, call.activity)
    votes = Votes.of(*parts, call.window, call.parent_count, "activations")
    wide = accumulation_dtype(votes.children.dtype)
    beta_u, beta_a = (beta.to(wide) for beta in betas)
    one = votes.children.new_ones((1, 1), dtype=wide)
    weighed = weighed_by_ones(votes) if ones else votes
    cost = {"beta_use": one, "beta_ignore": torch.zeros_like(one)}
    rule, coefficients = int(Rule.HEINSEN), return_coefficients
    own = ops.Gaussian(**cost, temperatures=temperatures, rule=rule, eps=eps, coefficients=coefficients)

    def run(votes: Votes, own: ops.Gaussian) -> Any:
        return ops.gaussian_routing(weighed if own.mean is None else votes, own)

    def scored(temperature: float, results: Any) -> tuple[Tensor, Tensor]:
        counts, means, variances = results[:3]
        log_sigma = log_sigmas(variances)
        benefit = beta_a - (means.shape[-2] * means.shape[-1] * beta_u + log_sigma) * counts
        return temperature * F.layer_norm(benefit, benefit.shape[-1:]), log_sigma

    def advance(own: ops.Gaussian, results: Any) -> dict[str, Tensor | None]:
        scores, log_sigma = scored(own.temperatures[0], results)
        return {"mean": results[1], "variance": results[2], "log_weight": F.logsigmoid(scores) - log_sigma}

    last = ops.gaussian_routing.iterate(run, votes, own, advance)[-1]
    dtype = result_dtype(votes)
    active = from_op(scored(temperatures[-1], last)[0].sigmoid(), call.window).to(dtype)
    poses = from_op(last[1], call.window).to(dtype)
    if not return_coefficients:
        return Capsules(poses, active)
    return RoutedCapsules(poses, active, last[-1] * votes.parents if ones and len(temperatures) == 1 else last[-1])
