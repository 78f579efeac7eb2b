"""``CapsuleFC`` and ``CapsuleCONV`` of Tsai et al. (2020).

``CapsuleCONV`` has two public versions. This is the one that the first author maintains and the paper describes;
``CapsuleCONV(..., mixed_windows=True)`` computes what the first commit does, for checkpoints trained with it.
docs/relation.md compares the two.

What differs, with no effect on training: the coefficients are not divided again by their sum + 1e-10 (the sum of a
softmax is 1).
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastcaps.checks import require_tensor, shape_text
from fastcaps.compat.twin import Draw, Twin
from fastcaps.nn.inverted_attention import attend
from fastcaps.nn.layer import LayerCall
from fastcaps.nn.poses import pose_shape
from fastcaps.votes import Window


class _Capsule(Twin):
    """The base of the two layers: names, initialisation and the pass."""

    in_n_capsules: int
    in_d_capsules: int
    out_n_capsules: int
    out_d_capsules: int
    kernel_size: int
    stride: int
    window: Window | None = None
    _known_by: ClassVar[tuple[str, ...]] = (
        "in_n_capsules", "in_d_capsules", "out_n_capsules", "out_d_capsules", "matrix_pose", "nonlinear_act", "drop",
    )  # fmt: skip

    def _make(self, sides: tuple[int, ...], matrix_pose: bool, dp: float) -> None:
        """Create what the layer holds; on a grid, ``sides`` are the window's."""
        n, d, m, e = self.in_n_capsules, self.in_d_capsules, self.out_n_capsules, self.out_d_capsules
        self.matrix_pose = bool(matrix_pose)
        if matrix_pose and d != e:
            raise ValueError(f"out_d_capsules must equal in_d_capsules with matrix_pose=True, got {e} and {d}")
        self.pose_shape = pose_shape(d, e, "matrix" if matrix_pose else "vector")
        if matrix_pose:
            self.sqrt_d = self.pose_shape[0]
        inner = self.pose_shape[1]
        self.weight_init_const = math.sqrt(m / (inner * math.prod(sides) * n))
        self.w = nn.Parameter(torch.empty(*sides, n, inner, *((inner, m) if matrix_pose else (m, e))))
        self.dropout_rate = dp
        self.nonlinear_act = nn.LayerNorm(e)
        self.drop = nn.Dropout(dp)
        self.scale = 1.0 / math.sqrt(e)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the parameters."""
        with torch.no_grad():
            self.w.normal_().mul_(self.weight_init_const)
        if isinstance(self.nonlinear_act, nn.LayerNorm):
            self.nonlinear_act.reset_parameters()

    @property
    def dp(self) -> float:
        """The probability of dropping a value."""
        return self.drop.p

    def forward(self, input: Tensor, num_iter: int, next_capsule_value: Tensor | None = None) -> Tensor:
        """Return the parents after one iteration.

        ``input`` is ``[b, n, d]``, or a grid ``[b, n, h, w, d]``, which :class:`CapsuleFC` flattens.
        ``next_capsule_value`` are the parents' last poses, of the result's shape; None spreads every child evenly.
        ``num_iter`` is unused, as in the authors' layer: a call is one iteration. The result is ``[b, m, d]``, of
        :class:`CapsuleCONV` ``[b, m, h', w', d]``.
        """
        children = self._checked("input", input, self.in_n_capsules, self.in_d_capsules)
        parents = next_capsule_value
        if parents is not None:
            parents = self._checked("next_capsule_value", parents, self.out_n_capsules, self.out_d_capsules)
        return self._pass(children, parents)

    def _checked(self, name: str, poses: Tensor, count: int, numbers: int) -> Tensor:
        """Return flat poses; raise unless the argument ``name`` has ``count`` poses of ``numbers`` values."""
        require_tensor(poses, name)
        lead, grid = (2, "") if self.window is None else (4, "h, w, ")
        if poses.dim() == lead + 2:  # as this module returns 1 x 1 poses
            poses = poses.flatten(lead)
        if poses.dim() != lead + 1 or (poses.shape[1], poses.shape[-1]) != (count, numbers):
            raise ValueError(f"{name} must be [b, {count}, {grid}{numbers}], got {shape_text(poses)}")
        return poses

    def _pass(self, children: Tensor, parents: Tensor | None) -> Tensor:
        norm = self.nonlinear_act
        plain = type(norm) is nn.LayerNorm and norm.normalized_shape == (self.out_d_capsules,)
        normalised = self.out_d_capsules > 1
        w = self.w.flatten(0, -4)  # joins CONV's k, l and n; then a view [G, M, D, E]
        weight = w.permute(0, 3, 1, 2) if self.matrix_pose else w.permute(0, 2, 1, 3)
        poses, _ = attend(
            LayerCall(
                children.unflatten(-1, self.pose_shape[:2]), None, weight, None, self.out_n_capsules, self.window
            ),
            None if parents is None else parents.unflatten(-1, self.pose_shape[::2]),
            scale=self.scale,
            norm=norm if plain and normalised else None,
            dropout=self.drop.p if self.drop.training else 0.0,
        )
        poses = poses.flatten(-2)
        if normalised:
            return poses if plain else norm(poses)
        return poses.unsqueeze(-1) if self.matrix_pose else poses  # the authors' layer leaves 1 x 1 poses unflattened

    @classmethod
    def _like(cls, old: Any, *parts: Any, **options: Any) -> Twin:
        return super()._like(old, *parts, dp=old.drop.p, **options)

    def _adopt(self, old: Any) -> None:
        super()._adopt(old)
        for name in ("weight_init_const", "dropout_rate", "scale"):
            setattr(self, name, getattr(old, name, getattr(self, name)))
        self.scale = float(self.scale)

    def _calls(self, draw: Draw) -> list[tuple[Any, ...]]:
        grid, above = ((), ()) if self.window is None else ((self.kernel_size, self.kernel_size + self.stride), (1, 2))
        children = draw(2, self.in_n_capsules, *grid, self.in_d_capsules)
        return [(children, 0, None), (children, 0, draw(2, self.out_n_capsules, *above, self.out_d_capsules))]


class CapsuleFC(_Capsule):
    """Routing from a set of capsules to a set of parents, with the authors' names.

    With ``matrix_pose`` poses are square matrices (then the two ``d`` must be equal squares), otherwise vectors. ``dp``
    is the dropout between the sum and LayerNorm. The parameter ``w`` is ``[n, x, d, m]`` for matrix poses, ``[n, a, m,
    d]`` for vectors. ``nonlinear_act`` is a LayerNorm over a parent's values, skipped if there is only one.

    Examples
    --------
    >>> import torch
    >>> layer = CapsuleFC(72, 16, 10, 16, matrix_pose=True, dp=0.0)
    >>> parents = layer(torch.randn(2, 8, 3, 3, 16), 0)  # a grid is flattened in the order n, h, w
    >>> layer(torch.randn(2, 72, 16), 1, parents).shape
    torch.Size([2, 10, 16])
    """

    def __init__(
        self,
        in_n_capsules: int,
        in_d_capsules: int,
        out_n_capsules: int,
        out_d_capsules: int,
        matrix_pose: bool,
        dp: float,
    ) -> None:
        super().__init__()
        self._count(in_n_capsules=in_n_capsules, in_d_capsules=in_d_capsules)
        self._count(out_n_capsules=out_n_capsules, out_d_capsules=out_d_capsules)
        self._make((), matrix_pose, dp)

    def _checked(self, name: str, poses: Tensor, count: int, numbers: int) -> Tensor:
        require_tensor(poses, name)
        return super()._checked(name, poses.flatten(1, 3) if poses.dim() == 5 else poses, count, numbers)


class CapsuleCONV(_Capsule):
    """Routing from a grid of capsules to a grid of parents in sliding windows, with the authors' names.

    It is like :class:`CapsuleFC`, with square windows of ``kernel_size`` and ``stride``, without padding. Capsules are
    counted per position. The parameter ``w`` is ``[k, l, n, x, d, m]`` for matrix poses, ``[k, l, n, a, m, d]`` for
    vectors. ``coordinate_add`` is stored without effect; the authors' ``forward`` does not read it either.

    ``mixed_windows=True`` mixes the positions of a window, as the first commit of the authors' code does; this copies
    the windows. Only for checkpoints trained with that commit.

    Examples
    --------
    >>> import torch
    >>> layer = CapsuleCONV(8, 16, 4, 16, kernel_size=3, stride=2, matrix_pose=True, dp=0.0)
    >>> layer(torch.randn(2, 8, 7, 7, 16), 0).shape
    torch.Size([2, 4, 3, 3, 16])
    """

    _known_by = (*_Capsule._known_by, "kernel_size", "stride")
    _versions = ({}, {"mixed_windows": True})

    def __init__(
        self,
        in_n_capsules: int,
        in_d_capsules: int,
        out_n_capsules: int,
        out_d_capsules: int,
        kernel_size: int,
        stride: int,
        matrix_pose: bool,
        dp: float,
        coordinate_add: bool = False,
        *,
        mixed_windows: bool = False,
    ) -> None:
        super().__init__()
        self._count(in_n_capsules=in_n_capsules, in_d_capsules=in_d_capsules, kernel_size=kernel_size, stride=stride)
        self._count(out_n_capsules=out_n_capsules, out_d_capsules=out_d_capsules)
        self._make((kernel_size, kernel_size), matrix_pose, dp)
        self.coordinate_add, self.mixed_windows = coordinate_add, bool(mixed_windows)
        self.window = Window(kernel_size, kernel_size if mixed_windows else stride)

    def _pass(self, children: Tensor, parents: Tensor | None) -> Tensor:
        found = super()._pass(self._mixed(children) if self.mixed_windows else children, parents)
        return found.contiguous()  # callers may use view

    def _mixed(self, input: Tensor) -> Tensor:
        """Return the windows side by side, ``[b, n, h' * k, w' * k, d]``, with values mixed as in the first commit."""
        size, step = self.kernel_size, self.stride
        if min(input.shape[2:4]) < size:
            wanted = f"a grid no smaller than the window, {size} x {size}"
            raise ValueError(f"input must have {wanted}, got {shape_text(input)}")
        seen = input.unfold(2, size, step).unfold(3, size, step).permute(0, 1, 5, 6, 4, 2, 3)  # b n k l d h w
        mixed = seen.reshape(*seen.shape[:4], *seen.shape[5:], self.in_d_capsules)  # read as h w d
        return mixed.permute(0, 1, 4, 2, 5, 3, 6).flatten(4, 5).flatten(2, 3)
