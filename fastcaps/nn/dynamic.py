"""The routing layer of dynamic routing, for sets and for grids of capsules."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fastcaps import functional
from fastcaps.checks import check_choice
from fastcaps.nn.layer import RoutingLayer
from fastcaps.nn.poses import positive

__all__ = ["DynamicRouting"]


class DynamicRouting(RoutingLayer):
    r"""Route child capsules to parents by dynamic routing (Sabour et al., 2017, Procedure 1), all turns in one call.

    .. math::
        v_{ij} = P_i W_{ij} + b_{ij}, \quad
        r_{ij} = \operatorname{softmax}_j \Bigl\langle v_{ij}, \sum_{\tau < t} p_j^\tau \Bigr\rangle, \quad
        p_j^t = \operatorname{squash}\Bigl(\sum_i r_{ij} v_{ij}\Bigr)

    The softmax runs over the **parents** j, unless ``compete="children"``. The length of a parent's pose, below 1, says
    how certain its being there is (:func:`fastcaps.losses.length`); children, too, are best squashed. No vote is ever
    stored: the log-priors are linear in the votes, so the sum of a parent's poses so far stands for all of them.

    Parameters
    ----------
    in_capsules : int
        Children of a set; child types at one grid position of a grid.
    out_capsules : int
        Parents of a set; parent types at one position of a grid.
    in_dim, out_dim : int
        Numbers in a child's pose (d) and in a parent's (d').
    pose : "vector" or "matrix"
        A vector pose takes any pair of d and d'; a matrix pose of d numbers is a ``sqrt(d) x sqrt(d)`` matrix, and d'
        must equal d.
    iterations : int
        Turns.
    compete : "parents" or "children"
        Over which of them the softmax runs. The paper says parents; published codes differ.
    detach : bool
        No gradient through the coefficients: it flows through the last turn's sum alone.
    leaky : bool
        A child may also go to none of the parents (one more logit, of 0). For ``compete="parents"``.
    kernel_size : int, pair, "all" or None
        None routes a set; otherwise a window of that size slides over a grid. "all" is one window as large as the
        children's grid, whatever its size: it needs ``share=True``, and the parents are a set.
    stride, padding, dilation : int or pair
        As in a convolution. Padded positions hold no children: they vote for nothing.
    share : bool
        False: every child of a set (of a window) has its own matrices. True: a set's children share one set of
        matrices, and then their number may differ from call to call; a grid's children of one type share theirs over
        the window.
    bias : bool
        Learn a bias of the votes, one per child and parent (one per parent where ``share`` is set); zero at the start.
    std : float, optional
        Of the weights at the start; ``sqrt(M / (D * I))`` by default, I the children that one position sees (child
        types, for "all").

    Attributes
    ----------
    weight : Parameter
        ``[G, M, D, E]`` with G the number of weight groups.
    bias : Parameter or None
        ``[I or 1, M, C, E]``.

    Examples
    --------
    >>> import torch
    >>> layer = DynamicRouting(1152, 10, 8, 16)  # the class layer of the paper
    >>> layer(torch.randn(2, 1152, 8)).shape
    torch.Size([2, 10, 16])
    >>> shared = DynamicRouting(32, 64, 8, 16, kernel_size="all", share=True)  # 32 types, matrices shared over space
    >>> shared(torch.randn(2, 32, 6, 6, 8)).shape
    torch.Size([2, 64, 16])
    >>> parents, r = DynamicRouting(5, 3, 4, 4)(torch.randn(2, 5, 4), return_coefficients=True)
    >>> r.shape, bool((r.sum(-1) - 1).abs().max() < 1e-6)
    (torch.Size([2, 5, 3]), True)
    """

    def __init__(
        self,
        in_capsules: int,
        out_capsules: int,
        in_dim: int,
        out_dim: int,
        *,
        pose: str = "vector",
        iterations: int = 3,
        compete: str = "parents",
        detach: bool = False,
        leaky: bool = False,
        kernel_size: int | tuple[int, int] | str | None = None,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        share: bool = False,
        bias: bool = False,
        std: float | None = None,
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
        check_choice("compete", compete, ("parents", "children"))
        self.compete = compete
        self.detach = bool(detach)
        self.leaky = bool(leaky)
        if self.leaky and compete == "children":
            raise ValueError("leaky must be False with compete='children': a child cannot leak from a parent's softmax")
        self.std = None if std is None else float(std)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        std = math.sqrt(self.out_capsules / (self.pose_shape[1] * self.children_per_position))
        nn.init.normal_(self.weight, std=std if self.std is None else self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        children: Tensor,
        activations: Tensor | None = None,
        *,
        iterations: int | None = None,
        return_coefficients: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Route.

        Parameters
        ----------
        children : Tensor
            ``[B, I, d]`` for a set, ``[B, N, H, W, d]`` for a grid. A set layer also takes a grid and reads it as the
            set ``[B, N*H*W, d]``, n slowest.
        activations : Tensor, optional
            ``[B, I]`` or ``[B, N, H, W]``: each child's gate, 0 for a child that is not there; all 1 if None.
        iterations : int, optional
            Another number of turns for this call.
        return_coefficients : bool
            Also return the last turn's routing coefficients, ``[B, I, M]`` or ``[B, Ho, Wo, I, M]``.

        Returns
        -------
        Tensor or tuple
            The parents' poses ``[B, M, d']`` or ``[B, M, Ho, Wo, d']``; then the coefficients if asked for.

        Raises
        ------
        ValueError, TypeError
            Naming the argument whose shape, dtype or device does not fit.
        """
        children, activations = self.as_read(children, activations)
        rows, columns, _ = self.pose_shape
        result = functional.dynamic_routing(
            children.unflatten(-1, (rows, columns)),
            self.weight,
            iterations=self.iterations if iterations is None else iterations,
            bias=self.bias,
            gate=activations,
            compete=self.compete,
            detach=self.detach,
            leaky=self.leaky,
            window=self.window_over(children),
            return_coefficients=return_coefficients,
        )
        poses, *coefficients = result if isinstance(result, tuple) else (result,)
        poses = self.as_set(poses).flatten(-2)
        return (poses, self.coefficients_as_set(coefficients[0])) if coefficients else poses

    def extra_repr(self) -> str:
        """The arguments that differ from their defaults."""
        text = f"{self.sizes_repr()}, iterations={self.iterations}"
        text += f", compete={self.compete!r}" if self.compete != "parents" else ""
        text += ", detach=True" if self.detach else ""
        return text + (", leaky=True" if self.leaky else "")
