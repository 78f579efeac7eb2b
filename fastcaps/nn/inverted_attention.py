"""The layer of inverted dot-product attention, for sets and grids of capsules."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from fastcaps import functional
from fastcaps.checks import check_choice, check_finite, check_flag, require_tensor, shape_text
from fastcaps.nn.layer import LayerCall, LayerOptions, RoutingLayer
from fastcaps.nn.poses import normalize_poses
from fastcaps.results import Capsules, Routed, RoutedCapsules

Plain = TypeVar("Plain", Tensor, Capsules)
Full = TypeVar("Full", Routed, RoutedCapsules)


class AttentionOptions(LayerOptions, total=False):
    """Keyword arguments of the layer except ``iterations`` and ``activations``."""

    dropout: float
    layer_norm: bool
    start: str
    eps: float


class InvertedAttentionRouting(RoutingLayer[Plain, Full]):
    r"""Route child capsules to parents by inverted dot-product attention (Tsai et al., 2020, Procedure 1).

    The equation is that of :func:`fastcaps.functional.inverted_attention_routing`: the softmax runs over the
    **parents**, which compete for each child. ``layer(children)`` runs the first iteration, in which all
    coefficients are equal, r = 1/M; ``layer(children, parents)`` runs another. The kernels store no vote.

    Parameters
    ----------
    in_capsules, out_capsules, in_dim, out_dim, pose, kernel_size, stride, padding, dilation, share, matrices, bias,
    break_symmetry, iterations, device, dtype
        See :class:`~fastcaps.nn.layer.RoutingLayer`; one iteration per call by default.
    dropout : float
        Probability of dropping a value of a parent's sum, before LayerNorm, in training.
    layer_norm : bool
        LayerNorm over the d' values, with one affine map for all parents. False is the paper's ablation A. Skipped
        if d' = 1.
    activations : bool
        The paper's ablation C, by our formula: the layer also returns the parents' activations,
        ``sigmoid(<u_m, Q_m> + c_m)`` with u and c learned per parent type. The children's are their gates g.
    start : "zero", "random" or "learned"
        The parents before the first iteration, if a call passes none. "zero" is the paper's: all coefficients are
        equal. The others are in its footnote 1: poses drawn from N(0, 1) once, then fixed or learned; one per parent
        (on a grid, per parent type), the same for all samples. The paper does not say when to draw. Here
        :meth:`reset_parameters` draws, so that a network is deterministic.
    eps : float
        Added to the variance in LayerNorm.

    Calls
    -----
    ``layer(children, parents, activations)``: ``parents`` are the parents' last poses, shaped as the result; None
    starts from ``start``. They also set the number of parents if the layer leaves it open. ``activations`` gate the
    children's votes: 0 for a child that does not exist. Several ``iterations`` equal a loop of calls. With
    ``activations=True`` the result holds the parents' activations, ``[B, M]`` or ``[B, M, Ho, Wo]``.

    Attributes
    ----------
    weight : Parameter
        ``[G, M, D, E]`` with G the number of weight groups; drawn from N(0, 1) times ``sqrt(M / (D * I))``, I the
        children in one window, as in the authors' code.
    first_poses : Parameter, Tensor or None
        ``[M or 1, d']``, the parents' start; None for zero.
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

    takes_parents = True
    call_options: tuple[str, ...] = ("parents",)
    activation_weight: nn.Parameter | None
    activation_bias: nn.Parameter | None
    first_poses: Tensor | None

    @overload
    def __init__(
        self: InvertedAttentionRouting[Tensor, Routed],
        in_capsules: int | None,
        out_capsules: int | None,
        in_dim: int,
        out_dim: int,
        *,
        iterations: int = 1,
        activations: Literal[False] = False,
        **options: Unpack[AttentionOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: InvertedAttentionRouting[Capsules, RoutedCapsules],
        in_capsules: int | None,
        out_capsules: int | None,
        in_dim: int,
        out_dim: int,
        *,
        iterations: int = 1,
        activations: Literal[True],
        **options: Unpack[AttentionOptions],
    ) -> None: ...
    def __init__(
        self,
        in_capsules: int | None,
        out_capsules: int | None,
        in_dim: int,
        out_dim: int,
        *,
        iterations: int = 1,
        dropout: float = 0.0,
        layer_norm: bool = True,
        activations: bool = False,
        start: str = "zero",
        eps: float = 1e-5,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(in_capsules, out_capsules, in_dim, out_dim, iterations=iterations, **options)
        self.dropout = check_finite("dropout", dropout)
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        self.layer_norm = check_flag("layer_norm", layer_norm)
        self.activations = check_flag("activations", activations)
        self.eps = check_finite("eps", eps, 0.0)
        self.scale = 1.0 / math.sqrt(self.out_dim)
        self.norm: nn.LayerNorm | None = None
        if layer_norm and self.out_dim > 1:
            self.norm = nn.LayerNorm(self.out_dim, eps=self.eps, **self._place)
        many = self.out_capsules or 1
        self.new_parameter("activation_weight", (many, self.out_dim), self.activations)
        self.new_parameter("activation_bias", (many,), self.activations)
        check_choice("start", start, ("zero", "random", "learned"))
        self.start = start
        self.new_parameter("first_poses", (many, self.out_dim), start)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the parameters, and draw a random start."""
        super().reset_parameters()
        if self.norm is not None:
            self.norm.reset_parameters()
        if self.activation_weight is not None:
            bound = 1.0 / math.sqrt(self.out_dim)
            nn.init.uniform_(self.activation_weight, -bound, bound)
        if self.first_poses is not None:
            nn.init.normal_(self.first_poses)

    def forward(  # type: ignore[override]
        self,
        children: Tensor,
        parents: Tensor | None = None,
        activations: Tensor | None = None,
        *,
        out_capsules: int | None = None,
        **options: Any,
    ) -> Any:
        """Return the parents, as described under *Calls* of the class."""
        if parents is not None:
            self._check_parents(parents)
            if self.out_capsules is None and out_capsules is None:
                out_capsules = parents.shape[1]
        return super().forward(children, activations, out_capsules=out_capsules, parents=parents, **options)

    def run(
        self, call: LayerCall, iterations: int, return_coefficients: bool, *, parents: Tensor | None = None
    ) -> Tensor | Capsules | Routed | RoutedCapsules:
        """Return the routing of a checked call."""
        if parents is None:
            call = self.with_parent_count(call)
            parents = self.first_parents(call)
        else:
            parents = self.unflattened(parents[:, :, None, None] if self.whole_grid else parents)
        poses, coefficients = attend(
            call,
            parents,
            scale=self.scale,
            norm=self.norm,
            dropout=self.dropout if self.training else 0.0,
            iterations=iterations,
            return_coefficients=return_coefficients,
        )
        if not self.activations:
            return poses if coefficients is None else Routed(poses, coefficients)
        active = self.read_activations(poses.flatten(-2))
        return Capsules(poses, active) if coefficients is None else RoutedCapsules(poses, active, coefficients)

    def unflattened(self, parents: Tensor) -> Tensor:
        """Return flat poses of parents as C x E matrices."""
        return parents.view(*parents.shape[:-1], *self.pose_shape[::2])

    def with_parent_count(self, call: LayerCall) -> LayerCall:
        """Return the call with a bias of as many parents as the call has, if it has no weight, from which M is read."""
        if call.weight is not None:
            return call
        bias = call.children.new_zeros((1, 1, *call.children.shape[-2:])) if call.bias is None else call.bias
        return call._replace(bias=bias.expand(-1, call.parent_count, -1, -1))

    def first_parents(self, call: LayerCall) -> Tensor | None:
        """Return the parents that a call starts from, ``[B, M, C, E]`` or ``[B, M, Ho, Wo, C, E]``; None for zero."""
        if self.first_poses is None:
            return None
        poses, batch = self.unflattened(self.first_poses).expand(call.parent_count, -1, -1), call.children.shape[0]
        if call.window is None:
            return poses.expand(batch, -1, -1, -1)
        size = call.window.output_size(call.children.shape[2], call.children.shape[3])
        return poses[:, None, None].expand(batch, -1, *size, -1, -1)

    def read_activations(self, poses: Tensor) -> Tensor:
        """Return ``sigmoid(<u_m, p_m> + c_m)`` of the parents' flat ``poses``: ``[B, M]`` or ``[B, M, Ho, Wo]``."""
        if self.activation_weight is None or self.activation_bias is None:
            raise ValueError("this layer has no activations; build it with activations=True")
        stored = poses if poses.dim() == 3 else poses.permute(0, 2, 3, 1, 4)  # [B, Ho, Wo, M, d'], as it lies in memory
        active = torch.sigmoid((stored * self.activation_weight).sum(-1) + self.activation_bias)
        return active if poses.dim() == 3 else active.permute(0, 3, 1, 2)

    def _check_parents(self, parents: Tensor) -> None:
        require_tensor(parents, "parents")
        grid = "" if self.window is None else "Ho, Wo, "
        fits = parents.dim() == (5 if grid else 3) and parents.shape[-1] == self.out_dim
        if not fits or (self.out_capsules is not None and parents.shape[1] != self.out_capsules):
            wanted = f"[B, {self.out_capsules or 'M'}, {grid}{self.out_dim}]"
            raise ValueError(f"parents must be {wanted}, got {shape_text(parents)}")


def attend(
    call: LayerCall,
    parents: Tensor | None,
    *,
    scale: float,
    norm: nn.LayerNorm | None,
    dropout: float = 0.0,
    iterations: int = 1,
    return_coefficients: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the parents' C x E poses, and the coefficients or None.

    ``parents`` are the last poses, ``[B, M, C, E]`` or ``[B, M, Ho, Wo, C, E]``; None for the first iteration. ``norm``
    is over the C*E values. Dropout acts between the sum and LayerNorm, as in the authors' code. If it is active, every
    iteration is a separate call, followed by LayerNorm; otherwise the kernel does both.
    """
    drops = dropout > 0.0
    calls, each = (iterations, 1) if drops and iterations > 1 else (1, iterations)
    fused = None if drops else norm
    coefficients = None
    for k in range(calls):
        found = functional.inverted_attention_routing(
            call.children,
            call.weight,
            parents,
            bias=call.bias,
            gate=call.activity,
            norm_weight=None if fused is None else fused.weight,
            norm_bias=None if fused is None else fused.bias,
            eps=1e-5 if norm is None else norm.eps,
            scale=scale,
            window=call.window,
            normalize=fused is not None,
            iterations=each,
            return_coefficients=return_coefficients and k == calls - 1,
        )
        parents, coefficients = found if isinstance(found, tuple) else (found, None)
        if drops:
            parents = F.dropout(parents, dropout)
            if norm is not None:
                parents = normalize_poses(parents.flatten(-2), norm).view_as(parents)
    assert parents is not None
    return parents, coefficients
