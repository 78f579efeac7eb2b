"""The routing layer of EM routing, for sets and for grids of capsules."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fastcaps import functional
from fastcaps.functional.em import InverseTemperature, schedule
from fastcaps.nn.layer import RoutingLayer
from fastcaps.nn.poses import positive

__all__ = ["EMRouting"]


class EMRouting(RoutingLayer):
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
    make a NaN. No vote is ever stored.

    Parameters
    ----------
    in_capsules : int
        Children of a set; child types at one grid position of a grid.
    out_capsules : int
        Parents of a set; parent types at one position of a grid.
    in_dim, out_dim : int
        Numbers in a child's pose (d) and in a parent's (d').
    pose : "matrix" or "vector"
        A matrix pose of d numbers is a ``sqrt(d) x sqrt(d)`` matrix, and d' must equal d; a vector pose takes any pair.
    iterations : int
        Turns.
    inverse_temperature : float, sequence of float, callable, optional
        :math:`\lambda_t`: a number, one for each turn, or a function of the turn, which counts from 0. None is the
        customary ``0.01 (1 - 0.95^(turn + 1))``. May be set later, to follow a schedule of training.
    coordinates : bool
        Coordinate addition, for ``kernel_size="all"``: the child's place in the grid, in (0, 1), is added to its votes
        (:func:`fastcaps.functional.coordinate_bias`), which otherwise would not know it.
    kernel_size : int, pair, "all" or None
        None routes a set; otherwise a window of that size slides over a grid. "all" is one window as large as the
        children's grid, whatever its size, as for the paper's class capsules: it needs ``share=True``, and the parents
        are a set.
    stride, padding, dilation : int or pair
        As in a convolution. Padded positions hold no children: they vote for nothing.
    share : bool
        False: every child of a set (of a window) has its own matrices. True: a set's children share one set of
        matrices, and then their number may differ from call to call; a grid's children of one type share theirs over
        the window.
    bias : bool
        Learn a bias of the votes, one per child and parent (one per parent where ``share`` is set); zero at the start.
    eps : float
        Added to the variances, and to n under the moments.

    Attributes
    ----------
    weight : Parameter
        ``[G, M, D, E]`` with G the number of weight groups; drawn from N(0, 1) / sqrt(D), which leaves the size of
        poses as it is.
    beta_u, beta_a : Parameter
        ``[M]``, one per parent type; zero at the start.
    bias : Parameter or None
        ``[I or 1, M, C, E]``.

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

    def __init__(
        self,
        in_capsules: int,
        out_capsules: int,
        in_dim: int,
        out_dim: int,
        *,
        pose: str = "matrix",
        iterations: int = 3,
        inverse_temperature: InverseTemperature | None = None,
        coordinates: bool = False,
        kernel_size: int | tuple[int, int] | str | None = None,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        share: bool = False,
        bias: bool = False,
        eps: float = 1e-8,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_capsules,
            out_capsules,
            in_dim,
            out_dim,
            pose=pose,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            share=share,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        self.iterations = positive(iterations, "iterations")
        schedule(inverse_temperature, self.iterations)  # raises where it is wrong
        self.inverse_temperature = inverse_temperature
        self.coordinates = bool(coordinates)
        if self.coordinates and not self.whole_grid:
            raise ValueError("coordinates must be False without kernel_size='all': a small window says where it is")
        if self.coordinates and bias:
            raise ValueError("bias must be False with coordinates=True, which is a bias of the votes already")
        self.eps = float(eps)
        self.beta_u = nn.Parameter(torch.empty(out_capsules, device=device, dtype=dtype))
        self.beta_a = nn.Parameter(torch.empty(out_capsules, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        nn.init.normal_(self.weight, std=1.0 / math.sqrt(self.pose_shape[1]))
        for parameter in (self.beta_u, self.beta_a, self.bias):
            if parameter is not None:
                nn.init.zeros_(parameter)

    def forward(
        self,
        children: Tensor,
        activations: Tensor | None = None,
        *,
        iterations: int | None = None,
        return_coefficients: bool = False,
    ) -> tuple[Tensor, ...]:
        """Route.

        Parameters
        ----------
        children : Tensor
            ``[B, I, d]`` for a set, ``[B, N, H, W, d]`` for a grid. A set layer also takes a grid and reads it as the
            set ``[B, N*H*W, d]``, n slowest.
        activations : Tensor, optional
            The children's, in [0, 1], ``[B, I]`` or ``[B, N, H, W]``; 0 for a child that is not there, all 1 if None.
        iterations : int, optional
            Another number of turns for this call.
        return_coefficients : bool
            Also return the last turn's routing coefficients, ``[B, I, M]`` or ``[B, Ho, Wo, I, M]``.

        Returns
        -------
        tuple
            The parents' poses ``[B, M, d']`` or ``[B, M, Ho, Wo, d']``; their activations ``[B, M]`` or
            ``[B, M, Ho, Wo]``; then the coefficients if asked for.

        Raises
        ------
        ValueError, TypeError
            Naming the argument whose shape, dtype or device does not fit.
        """
        children, activations = self.as_read(children, activations)
        rows, columns, out_columns = self.pose_shape
        bias: Tensor | None = self.bias
        if self.coordinates:
            _, types, height, width, _ = children.shape
            bias = functional.coordinate_bias(
                height, width, types, rows, out_columns, device=children.device, dtype=children.dtype
            )
        poses, active, *coefficients = functional.em_routing(
            children.unflatten(-1, (rows, columns)),
            activations,
            self.weight,
            self.beta_u,
            self.beta_a,
            iterations=self.iterations if iterations is None else iterations,
            inverse_temperature=self.inverse_temperature,
            bias=bias,
            eps=self.eps,
            window=self.window_over(children),
            return_coefficients=return_coefficients,
        )
        result = (self.as_set(poses).flatten(-2), self.as_set(active))
        return (*result, *(self.coefficients_as_set(shares) for shares in coefficients))

    def extra_repr(self) -> str:
        """The arguments that differ from their defaults."""
        text = f"{self.sizes_repr()}, iterations={self.iterations}"
        if self.inverse_temperature is not None:
            name = getattr(self.inverse_temperature, "__name__", repr(self.inverse_temperature))
            text += f", inverse_temperature={name}"
        text += ", coordinates=True" if self.coordinates else ""
        return text + (f", eps={self.eps}" if self.eps != 1e-8 else "")
