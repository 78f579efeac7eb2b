"""The layer of EM routing, for sets and grids of capsules."""

from __future__ import annotations

import math

from torch import Tensor, nn
from typing_extensions import Unpack

from fastcaps import functional
from fastcaps.checks import check_choice, check_finite, check_flag
from fastcaps.functional.em import FIRST_COEFFICIENTS, InverseTemperature, inverse_temperatures
from fastcaps.nn.layer import LayerCall, LayerOptions, RoutingLayer
from fastcaps.results import Capsules, RoutedCapsules


class EMRouting(RoutingLayer[Capsules, RoutedCapsules]):
    r"""Route child capsules with activations to parents with activations by EM (Hinton et al., 2018, Procedure 1).

    The equation is that of :func:`fastcaps.functional.em_routing`: the parents compete for each child. Activations of 0
    and tiny variances never cause NaN. The kernels store no vote.

    Parameters
    ----------
    in_capsules, out_capsules, in_dim, out_dim, pose, kernel_size, stride, padding, dilation, share, matrices, bias,
    break_symmetry, iterations, device, dtype
        See :class:`~fastcaps.nn.layer.RoutingLayer`.
    inverse_temperature : float, sequence of float, callable, optional
        As in :func:`fastcaps.functional.em_routing`. A training schedule may set the attribute later. A layer with a
        lambda can be copied but not pickled; a function defined at the top of a module can be pickled.
    coordinates : bool
        Coordinate addition, for ``kernel_size="all"``: add the child's position in the grid, in (0, 1), to its votes
        (:func:`fastcaps.functional.coordinate_bias`), which otherwise do not depend on the position. A call may add
        other coordinates as ``bias``.
    first_coefficients, normalize_cost, eps
        See :func:`fastcaps.functional.em_routing`.

    Calls
    -----
    ``activations`` of the children are in [0, 1]: 0 for a child that does not exist. A call also takes another
    ``inverse_temperature``. The result holds the parents' activations, ``[B, M]`` or ``[B, M, Ho, Wo]``.

    Attributes
    ----------
    weight : Parameter
        ``[G, M, D, E]`` with G the number of weight groups; drawn from N(0, 1) / sqrt(D), which keeps the scale of
        poses.
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
        inverse_temperatures(inverse_temperature, self.iterations)  # raises if it is invalid
        self.inverse_temperature = inverse_temperature
        self.coordinates = check_flag("coordinates", coordinates)
        if self.coordinates and not self.whole_grid:
            raise ValueError("coordinates must be False without kernel_size='all', got True")
        self.normalize_cost = check_flag("normalize_cost", normalize_cost)
        if self.normalize_cost and self.out_capsules == 1:
            raise ValueError("normalize_cost must be False for one parent, whose cost equals the mean, got True")
        check_choice("first_coefficients", first_coefficients, FIRST_COEFFICIENTS)
        self.first_coefficients = first_coefficients
        self.eps = check_finite("eps", eps, 0.0)
        many = self.out_capsules or 1
        self.new_parameter("beta_u", (many,))
        self.new_parameter("beta_a", (many,))
        self.reset_parameters()

    def first_std(self) -> float:
        """``1 / sqrt(D)``."""
        return 1.0 / math.sqrt(self.pose_shape[1])

    def prepare(
        self, children: Tensor, activity: Tensor | None, out_capsules: int | None = None, bias: Tensor | None = None
    ) -> LayerCall:
        """Return a checked call, with the children's coordinates added to its bias."""
        if self.coordinates and isinstance(children, Tensor) and children.dim() == 5:
            _, types, height, width, _ = children.shape
            rows, _, columns = self.pose_shape
            like = {"device": children.device, "dtype": children.dtype}
            place = functional.coordinate_bias(height, width, types, rows, columns, **like)  # type: ignore[arg-type]
            bias = place if bias is None else bias + place
        return super().prepare(children, activity, out_capsules, bias)

    def run(
        self,
        call: LayerCall,
        iterations: int,
        return_coefficients: bool,
        *,
        inverse_temperature: InverseTemperature | None = None,
    ) -> Capsules | RoutedCapsules:
        """Return the routing of a checked call."""
        betas = self.beta_u.expand(call.parent_count), self.beta_a.expand(call.parent_count)
        given = self.inverse_temperature if inverse_temperature is None else inverse_temperature
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
            normalize_cost=self.normalize_cost,
        )
