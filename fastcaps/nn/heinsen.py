"""The routing layer of Heinsen 2019, for sets and for grids of capsules, of fixed or variable number."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastcaps import functional
from fastcaps.checks import check_choice
from fastcaps.nn.layer import RoutingLayer
from fastcaps.nn.poses import positive

__all__ = ["HeinsenRouting"]


class HeinsenRouting(RoutingLayer):
    r"""Route child capsules with scores to parents with scores (Heinsen, 2019, Algorithm 1).

    .. math::
        v_{ij} &= P_i W_{ij} + b_{ij}, \quad
        r_{ij} = \operatorname{softmax}_j \bigl(\ln \operatorname{sigmoid}(a_j) + \ln p_j(v_{ij})\bigr), \quad
        D_{ij} = \operatorname{sigmoid}(a_i)\, r_{ij}, \\
        a_j &= \sum_i \beta^{use}_{ij} D_{ij} - \sum_i \beta^{ign}_{ij} (\operatorname{sigmoid}(a_i) - D_{ij}), \\
        \mu_j &= \frac{\sum_i D_{ij} v_{ij}}{\sum_i D_{ij} + \epsilon}, \quad
        \sigma_j^2 = \frac{\sum_i D_{ij} (v_{ij} - \mu_j)^2}{\sum_i D_{ij} + \epsilon} + \epsilon

    The parents j compete for each child; :math:`p_j` is a Gaussian with mean :math:`\mu_j` and diagonal variance
    :math:`\sigma_j^2`, or for k-means :math:`\exp(-\lVert v - \mu_j \rVert^2)`. No vote is ever stored.

    Parameters
    ----------
    in_capsules : int or None
        Children of a set; child types at one grid position of a grid. None: any number of children, which share their
        parameters; samples of different sizes go into one batch with scores of minus infinity for those that are not
        there.
    out_capsules : int or None
        Parents. None: any number of them (section 2.1.1 of the paper), which share their parameters: as many as there
        are children, or as a call says.
    in_dim, out_dim : int
        Numbers in a child's pose (d) and in a parent's (d').
    pose : "matrix" or "vector"
        A matrix pose of d numbers is a ``sqrt(d) x sqrt(d)`` matrix, and d' must equal d; a vector pose takes any pair.
    iterations : int
        Turns.
    model : "gaussian" or "kmeans"
        How likely a vote is under a parent.
    single_beta : bool
        The cost of ignoring a child is the benefit of using it: one table of parameters for both.
    break_symmetry : bool
        For ``out_capsules=None``, where nothing would tell the parents apart: learn one pose more, of which parent j
        adds -1 to 1 times, evenly spaced, to its votes, as in the author's code; zero at the start. False is the paper.
    kernel_size : int, pair, "all" or None
        None routes a set; otherwise a window of that size slides over a grid. "all" is one window as large as the
        children's grid, whatever its size: it needs ``share=True``, and the parents are a set.
    stride, padding, dilation : int or pair
        As in a convolution. Padded positions hold no children: they vote for nothing.
    share : bool
        False: every child of a set (of a window) has its own parameters. True: a set's children share theirs, which
        ``in_capsules=None`` implies; a grid's children of one type share matrices over the window, and all of them
        biases and betas.
    bias : bool
        Learn a bias of the votes, one per child and parent (one per parent where children share); zero at the start.
    eps : float
        As in the equations.

    Attributes
    ----------
    weight : Parameter
        ``[G, M or 1, D, E]`` with G the number of weight groups; drawn from N(0, 1) / D, as in the author's code.
    bias : Parameter or None
        ``[I or 1, M or 1, C, E]``.
    beta_use, beta_ignore : Parameter
        ``[I or 1, M or 1]``; zero at the start. With ``single_beta`` the latter is None.
    bias_step : Parameter or None
        ``[1, 1, C, E]``, of ``break_symmetry``.

    Examples
    --------
    >>> import torch
    >>> layer = HeinsenRouting(None, 64, 16, 16)
    >>> scores, poses, variances = layer(torch.randn(2, 300, 16), torch.zeros(2, 300))
    >>> classes = HeinsenRouting(64, 5, 16, 16)
    >>> scores, poses, variances = classes(poses, scores)
    >>> scores.shape, poses.shape, variances.shape
    (torch.Size([2, 5]), torch.Size([2, 5, 16]), torch.Size([2, 5, 16]))
    >>> tokens = HeinsenRouting(None, None, 8, 8, pose="vector")
    >>> tokens(torch.randn(2, 7, 8), out_capsules=3)[1].shape
    torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        in_capsules: int | None,
        out_capsules: int | None,
        in_dim: int,
        out_dim: int,
        *,
        pose: str = "matrix",
        iterations: int = 3,
        model: str = "gaussian",
        single_beta: bool = False,
        break_symmetry: bool = True,
        kernel_size: int | tuple[int, int] | str | None = None,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        share: bool = False,
        bias: bool = True,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if in_capsules is None and kernel_size is not None:
            raise ValueError("in_capsules must be an int with a kernel_size: a grid has a number of child types")
        super().__init__(
            1 if in_capsules is None else in_capsules,
            1 if out_capsules is None else out_capsules,
            in_dim,
            out_dim,
            pose=pose,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            share=share or in_capsules is None,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        self.any_children = in_capsules is None
        self.any_parents = out_capsules is None
        self.iterations = positive(iterations, "iterations")
        check_choice("model", model, ("gaussian", "kmeans"))
        self.model = model
        self.eps = float(eps)
        table = (self.own_children, self.out_capsules)
        self.beta_use = nn.Parameter(torch.empty(table, device=device, dtype=dtype))
        self.beta_ignore: nn.Parameter | None = None
        if not single_beta:
            self.beta_ignore = nn.Parameter(torch.empty(table, device=device, dtype=dtype))
        self.bias_step: nn.Parameter | None = None
        if self.any_parents and break_symmetry:
            rows, _, out_columns = self.pose_shape
            self.bias_step = nn.Parameter(torch.empty((1, 1, rows, out_columns), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        nn.init.normal_(self.weight, std=1.0 / self.pose_shape[1])
        for parameter in (self.bias, self.beta_use, self.beta_ignore, self.bias_step):
            if parameter is not None:
                nn.init.zeros_(parameter)

    def forward(
        self,
        children: Tensor,
        scores: Tensor | None = None,
        *,
        out_capsules: int | None = None,
        iterations: int | None = None,
        return_coefficients: bool = False,
    ) -> tuple[Tensor, ...]:
        """Route.

        Parameters
        ----------
        children : Tensor
            ``[B, I, d]`` for a set, ``[B, N, H, W, d]`` for a grid. A set layer also takes a grid and reads it as the
            set ``[B, N*H*W, d]``, n slowest.
        scores : Tensor, optional
            The children's, ``[B, I]`` or ``[B, N, H, W]``: any numbers, minus infinity for a child that is not there,
            plus infinity for one that certainly is; all of them certainly are if None.
        out_capsules : int, optional
            The number of parents, for a layer that leaves it open; None is the number of children that a parent sees.
        iterations : int, optional
            Another number of turns for this call.
        return_coefficients : bool
            Also return the last turn's routing coefficients, ``[B, I, M]`` or ``[B, Ho, Wo, I, M]``.

        Returns
        -------
        tuple
            The parents' scores ``[B, M]`` or ``[B, M, Ho, Wo]``; their poses (means) and variances ``[B, M, d']`` or
            ``[B, M, Ho, Wo, d']``; then the coefficients if asked for.

        Raises
        ------
        ValueError, TypeError
            Naming the argument whose shape, dtype or device does not fit.
        """
        children, scores = self.as_read(children, scores)
        window = self.window_over(children)
        seen = children.shape[1] * (1 if window is None else window.positions)
        weight, bias = self._for_parents(seen, out_capsules)
        rows, columns, _ = self.pose_shape
        active, means, variances, *coefficients = functional.heinsen_routing(
            children.unflatten(-1, (rows, columns)),
            scores,
            weight,
            bias,
            self.beta_use,
            self.beta_use if self.beta_ignore is None else self.beta_ignore,
            iterations=self.iterations if iterations is None else iterations,
            model=self.model,
            eps=self.eps,
            window=window,
            return_coefficients=return_coefficients,
        )
        result = (self.as_set(active), self.as_set(means).flatten(-2), self.as_set(variances).flatten(-2))
        return (*result, *(self.coefficients_as_set(shares) for shares in coefficients))

    def _for_parents(self, seen: int, out_capsules: int | None) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias for the number of parents of a call, of which every child sees ``seen``."""
        if not self.any_parents:
            if out_capsules is not None:
                raise ValueError(
                    f"out_capsules must be None, since this layer has {self.out_capsules} parents; got {out_capsules}"
                )
            return self.weight, self.bias
        many = seen if out_capsules is None else positive(out_capsules, "out_capsules")
        bias: Tensor | None = self.bias
        if self.bias_step is not None:
            places = torch.linspace(-1, 1, many, device=self.bias_step.device, dtype=self.bias_step.dtype)
            steps = self.bias_step * places[:, None, None]
            bias = steps if bias is None else bias + steps
        return self.weight.expand(-1, many, -1, -1), bias

    def extra_repr(self) -> str:
        """The arguments that differ from their defaults."""
        text = self.sizes_repr().removesuffix(", bias=True")
        sizes = text.split(", ", 2)
        text = ", ".join(
            ("None" if self.any_children else sizes[0], "None" if self.any_parents else sizes[1], sizes[2])
        )
        text += f", iterations={self.iterations}"
        text += f", model={self.model!r}" if self.model != "gaussian" else ""
        text += ", single_beta=True" if self.beta_ignore is None else ""
        text += ", break_symmetry=False" if self.any_parents and self.bias_step is None else ""
        text += ", bias=False" if self.bias is None else ""
        return text + (f", eps={self.eps}" if self.eps != 1e-5 else "")
