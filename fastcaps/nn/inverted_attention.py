"""The routing layer of inverted dot-product attention, for sets and for grids of capsules."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fastcaps.nn.layer import RoutingLayer
from fastcaps.nn.poses import probability, require_tensor, route, shape_of


class InvertedAttentionRouting(RoutingLayer):
    r"""Route child capsules to parents by inverted dot-product attention (Tsai et al., 2020, Procedure 1).

    .. math::
        v_{ij} = P_i W_{ij} + b_{ij}, \quad a_{ij} = \frac{\langle p_j, v_{ij} \rangle}{\sqrt{d'}}, \quad
        r_{ij} = \frac{\exp a_{ij}}{\sum_{j'} \exp a_{ij'}}, \quad
        p_j \leftarrow \mathrm{LayerNorm}\Big(\sum_i g_i\, r_{ij}\, v_{ij}\Big)

    The softmax runs over the **parents** j: they compete for each child. ``layer(children)`` is the first iteration,
    where the parents are zero and so every child spreads evenly, r = 1/M; ``layer(children, parents)`` is a further
    one. No vote is ever stored.

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
    kernel_size : int, pair or None
        None routes a set; otherwise a window of that size slides over a grid.
    stride, padding, dilation : int or pair
        As in a convolution. Padded positions hold no children: they vote for nothing.
    share : bool
        False: every child of a set (of a window) has its own matrices. True: a set's children share one set of
        matrices, and then their number may differ from call to call; a grid's children of one type share theirs over
        the window.
    bias : bool
        Learn a bias of the votes, one per child and parent (one per parent where ``share`` is set); zero at the start.
    dropout : float
        Probability of dropping a number of a parent's sum, before LayerNorm, in training.
    layer_norm : bool
        LayerNorm over the d' numbers, its affine shared by all parents. False is the paper's ablation A. Skipped
        where d' = 1.
    activations : bool
        The paper's ablation C: the layer returns ``(poses, activations)``. The paper says only that its activations
        are "as in EM routing"; the choice here is ours: a parent's activation is ``sigmoid(<u_j, p_j> + c_j)``, u and
        c learned per parent type, and the activations that come with the children gate their votes (the g of the
        equation).
    eps : float
        LayerNorm's.

    Attributes
    ----------
    weight : Parameter
        ``[G, M, D, E]`` with G the number of weight groups; drawn from N(0, 1) times ``sqrt(M / (D * I))``, I the
        children that one position sees, as in the authors' code.
    scale : float
        ``1 / sqrt(d')``; may be set.

    Examples
    --------
    >>> import torch
    >>> layer = InvertedAttentionRouting(32, 10, 16, 16)  # a set of 32 children with 4 x 4 poses
    >>> children = torch.randn(2, 32, 16)
    >>> parents = layer(children)  # the first iteration
    >>> layer(children, parents).shape  # a second one
    torch.Size([2, 10, 16])
    >>> grid = InvertedAttentionRouting(8, 4, 16, 16, kernel_size=3, stride=2)
    >>> grid(torch.randn(2, 8, 16, 16, 16)).shape
    torch.Size([2, 4, 7, 7, 16])
    """

    whole_grid_allowed = False

    def __init__(
        self,
        in_capsules: int,
        out_capsules: int,
        in_dim: int,
        out_dim: int,
        *,
        pose: str = "matrix",
        kernel_size: int | tuple[int, int] | None = None,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        share: bool = False,
        bias: bool = False,
        dropout: float = 0.0,
        layer_norm: bool = True,
        activations: bool = False,
        eps: float = 1e-5,
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
        self.dropout = probability(dropout, "dropout")
        self.activations = bool(activations)
        self.eps = float(eps)
        self.scale = 1.0 / math.sqrt(out_dim)

        kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.norm: nn.LayerNorm | None = None
        if layer_norm and out_dim > 1:
            self.norm = nn.LayerNorm(out_dim, eps=self.eps, **kwargs)
        self.activation_weight: nn.Parameter | None = None
        self.activation_bias: nn.Parameter | None = None
        if self.activations:
            self.activation_weight = nn.Parameter(torch.empty(out_capsules, out_dim, **kwargs))
            self.activation_bias = nn.Parameter(torch.empty(out_capsules, **kwargs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        std = math.sqrt(self.out_capsules / (self.pose_shape[1] * self.children_per_position))
        nn.init.normal_(self.weight, std=std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.norm is not None:
            self.norm.reset_parameters()
        if self.activation_weight is not None and self.activation_bias is not None:
            bound = 1.0 / math.sqrt(self.out_dim)
            nn.init.uniform_(self.activation_weight, -bound, bound)
            nn.init.zeros_(self.activation_bias)

    def forward(
        self,
        children: Tensor,
        parents: Tensor | None = None,
        activations: Tensor | None = None,
        *,
        iterations: int = 1,
        return_coefficients: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """Route once, or several times in a row.

        Parameters
        ----------
        children : Tensor
            ``[B, I, d]`` for a set, ``[B, N, H, W, d]`` for a grid. A set layer also takes a grid and reads it as the
            set ``[B, N*H*W, d]``, n slowest.
        parents : Tensor, optional
            The parents' last poses, shaped as the result. None is the first iteration.
        activations : Tensor, optional
            ``[B, I]`` or ``[B, N, H, W]``: each child's gate, 0 for a child that is not there; all 1 if None.
        iterations : int
            Turns, each with the parents of the one before: what a loop of calls would do, in one.
        return_coefficients : bool
            Also return the last turn's routing coefficients, ``[B, I, M]`` or ``[B, Ho, Wo, I, M]``.

        Returns
        -------
        Tensor or tuple
            The parents' poses ``[B, M, d']`` or ``[B, M, Ho, Wo, d']``; then, where ``activations=True`` was chosen,
            their activations ``[B, M]`` or ``[B, M, Ho, Wo]``; then the coefficients if asked for.

        Raises
        ------
        ValueError, TypeError
            Naming the argument whose shape, dtype or device does not fit.
        """
        children, activations = self.as_read(children, activations)
        self._check_parents(children, parents)
        poses, coefficients = route(
            children,
            self.weight,
            parents,
            self.pose_shape,
            window=self.window,
            scale=self.scale,
            norm=self.norm,
            dropout=self.dropout if self.training else 0.0,
            bias=self.bias,
            gate=activations,
            iterations=iterations,
            return_coefficients=return_coefficients,
        )
        result: tuple[Tensor, ...] = (poses,)
        if self.activations:
            result += (self.read_activations(poses),)
        if coefficients is not None:
            result += (coefficients,)
        return result if len(result) > 1 else poses

    def read_activations(self, poses: Tensor) -> Tensor:
        """``sigmoid(<u_m, p_m> + c_m)`` of the parents' ``poses``: ``[B, M]`` or ``[B, M, Ho, Wo]``."""
        if self.activation_weight is None or self.activation_bias is None:
            raise ValueError("this layer has no activations; build it with activations=True")
        if poses.dim() == 3:
            return torch.sigmoid((poses * self.activation_weight).sum(-1) + self.activation_bias)
        stored = poses.permute(0, 2, 3, 1, 4)  # [B, Ho, Wo, M, d'], as it lies in memory
        return torch.sigmoid((stored * self.activation_weight).sum(-1) + self.activation_bias).permute(0, 3, 1, 2)

    def _check_parents(self, children: Tensor, parents: Tensor | None) -> None:
        """What the functional API cannot know: flat poses of the right length."""
        if parents is None:
            return
        require_tensor(parents, "parents")
        if (
            parents.dim() != children.dim()
            or parents.shape[1] != self.out_capsules
            or parents.shape[-1] != self.out_dim
        ):
            grid = "" if self.window is None else "Ho, Wo, "
            raise ValueError(f"parents must be [B, {self.out_capsules}, {grid}{self.out_dim}], got {shape_of(parents)}")

    def smallest_inputs(self) -> list[Tensor]:
        """Children and parents of the smallest call that this layer takes."""
        (children,) = super().smallest_inputs()
        grid = [] if self.window is None else self.window.output_size(children.shape[2], children.shape[3])
        return [children, self.weight.new_zeros((1, self.out_capsules, *grid, self.out_dim))]

    def extra_repr(self) -> str:
        """The arguments that differ from their defaults."""
        text = self.sizes_repr()
        text += f", dropout={self.dropout}" if self.dropout else ""
        text += ", layer_norm=False" if self.norm is None and self.out_dim > 1 else ""
        text += ", activations=True" if self.activations else ""
        return text + (f", eps={self.eps}" if self.eps != 1e-5 else "")
