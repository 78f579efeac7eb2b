"""``CapsuleFC`` and ``CapsuleCONV`` of Tsai et al. (2020).

There are two public versions of their ``CapsuleCONV``, with the same parameters. This is the one that the first author
maintains, in yaohungt/Capsules-Inverted-Attention-Routing, and that the paper describes. The other is the first commit
of both that repository and apple/ml-capsules-inverted-attention-routing. It gathers its windows with the positions last
and reads them as if the pose were last, so each child that it sees is made of numbers of several positions.
``CapsuleCONV(..., mixed_windows=True)`` does the same, for checkpoints trained with it.

What differs, each of it below what training can see:

- the coefficients are not divided by their sum + 1e-10 once more (the sum of a softmax is 1);
- a convolutional layer's result is a view whose memory order is ``b, h, w, m, d``: flatten it with ``reshape``, not
  ``view``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fastcaps.checks import check_count, shape_text
from fastcaps.nn.inverted_attention import route
from fastcaps.nn.layer import LayerCall
from fastcaps.nn.poses import every_argument_repr, flatten_grid, pose_shape, require_tensor
from fastcaps.votes import Window

__all__ = ["CapsuleCONV", "CapsuleFC"]


class _Capsule(nn.Module):
    """What the two layers share: names, initialisation and the pass itself."""

    in_n_capsules: int
    window: Window | None = None

    def _setup(
        self,
        lead: tuple[int, ...],
        in_d_capsules: int,
        out_n_capsules: int,
        out_d_capsules: int,
        matrix_pose: bool,
        dp: float,
    ) -> None:
        """Set the attributes and draw ``w``, whose leading dimensions ``lead`` count the children of one position."""
        self.in_d_capsules = check_count("in_d_capsules", in_d_capsules)
        self.out_n_capsules = check_count("out_n_capsules", out_n_capsules)
        self.out_d_capsules = check_count("out_d_capsules", out_d_capsules)
        self.matrix_pose = bool(matrix_pose)
        if matrix_pose and out_d_capsules != in_d_capsules:
            raise ValueError(
                "out_d_capsules must equal in_d_capsules with matrix_pose=True, "
                f"got {out_d_capsules} and {in_d_capsules}"
            )
        self.pose_shape = pose_shape(in_d_capsules, out_d_capsules, "matrix" if matrix_pose else "vector")
        if self.matrix_pose:
            self.sqrt_d = self.pose_shape[0]
        contracted = self.pose_shape[1]
        self.weight_init_const = math.sqrt(out_n_capsules / (contracted * math.prod(lead)))
        tail = (
            (contracted, contracted, out_n_capsules)
            if self.matrix_pose
            else (contracted, out_n_capsules, out_d_capsules)
        )
        self.w = nn.Parameter(torch.empty(*lead, *tail))
        self.dropout_rate = dp
        self.nonlinear_act = nn.LayerNorm(out_d_capsules)
        self.drop = nn.Dropout(dp)
        self.scale = 1.0 / math.sqrt(out_d_capsules)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        with torch.no_grad():
            self.w.normal_().mul_(self.weight_init_const)
        if isinstance(self.nonlinear_act, nn.LayerNorm):
            self.nonlinear_act.reset_parameters()

    @property
    def dp(self) -> float:
        """The probability of dropping a number."""
        return self.drop.p

    extra_repr = every_argument_repr

    def _weight(self) -> Tensor:
        """``w`` as the passes want it, ``[G, M, D, E]``; a view of FC's, and of CONV's with k, l and n joined."""
        w = self.w.flatten(0, -4)
        return w.permute(0, 3, 1, 2) if self.matrix_pose else w.permute(0, 2, 1, 3)

    def _pass(self, children: Tensor, parents: Tensor | None) -> Tensor:
        norm = self.nonlinear_act
        plain = type(norm) is nn.LayerNorm and norm.normalized_shape == (self.out_d_capsules,)
        normalised = self.out_d_capsules > 1
        poses = children.unflatten(-1, self.pose_shape[:2])
        poses, _ = route(
            LayerCall(poses, None, self._weight(), None, self.out_n_capsules, self.window),
            parents,
            self.pose_shape,
            scale=self.scale,
            norm=norm if plain and normalised else None,
            dropout=self.drop.p if self.drop.training else 0.0,
        )
        if normalised:
            return poses if plain else norm(poses)
        return poses.unsqueeze(-1) if self.matrix_pose else poses  # the authors' layer leaves 1 x 1 poses unflattened

    def _check(self, children: Tensor, parents: Tensor | None, wanted: str) -> None:
        if children.dim() != (3 if self.window is None else 5) or children.shape[-1] != self.in_d_capsules:
            raise ValueError(f"input must be {wanted}, got {shape_text(children)}")
        if children.shape[1] != self.in_n_capsules:
            raise ValueError(f"input must hold in_n_capsules = {self.in_n_capsules} capsules, got {children.shape[1]}")
        if parents is not None and (parents.dim() != children.dim() or parents.shape[-1] != self.out_d_capsules):
            grid = "" if self.window is None else "h, w, "
            want = f"[b, {self.out_n_capsules}, {grid}{self.out_d_capsules}]"
            raise ValueError(f"next_capsule_value must be {want}, got {shape_text(parents)}")


def _parents(value: Tensor | None, lead: int) -> Tensor | None:
    """The parents' flat poses; 1 x 1 ones may come as this module gives them, with a dimension more."""
    if value is None:
        return None
    require_tensor(value, "next_capsule_value")
    return value.flatten(lead) if value.dim() > lead else value


class CapsuleFC(_Capsule):
    """A set of capsules routed to a set of parents, with the authors' names.

    Parameters
    ----------
    in_n_capsules, in_d_capsules : int
        Children, and the numbers in a child's pose.
    out_n_capsules, out_d_capsules : int
        Parents, and the numbers in a parent's pose.
    matrix_pose : bool
        Poses are square matrices (then the two ``d`` must be equal squares); False: vectors.
    dp : float
        Dropout between the sum and LayerNorm.

    Attributes
    ----------
    w : Parameter
        ``[n, x, d, m]`` for matrix poses, ``[n, a, m, d]`` for vectors.
    nonlinear_act : nn.LayerNorm
        Over a parent's numbers. Skipped where there is only one.

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
        self.in_n_capsules = check_count("in_n_capsules", in_n_capsules)
        self._setup((in_n_capsules,), in_d_capsules, out_n_capsules, out_d_capsules, matrix_pose, dp)

    def forward(self, input: Tensor, num_iter: int, next_capsule_value: Tensor | None = None) -> Tensor:
        """Route once.

        Parameters
        ----------
        input : Tensor
            ``[b, n, d]``, or a grid ``[b, n, h, w, d]``.
        num_iter : int
            Not used, as in the authors' layer: a call is one iteration.
        next_capsule_value : Tensor, optional
            The parents' last poses ``[b, m, d]``; None spreads every child evenly.

        Returns
        -------
        Tensor
            ``[b, m, d]``.
        """
        require_tensor(input, "input")
        if input.dim() == 5:
            input = flatten_grid(input)
        elif input.dim() == 4:
            input = input.flatten(2)
        parents = _parents(next_capsule_value, 2)
        self._check(input, parents, f"[b, {self.in_n_capsules}, {self.in_d_capsules}] or [b, n, h, w, d]")
        return self._pass(input, parents)


class CapsuleCONV(_Capsule):
    """A grid of capsules routed to a grid of parents through a sliding window, with the authors' names.

    Parameters
    ----------
    in_n_capsules, in_d_capsules, out_n_capsules, out_d_capsules, matrix_pose, dp
        As :class:`CapsuleFC` has them; capsules are counted per position.
    kernel_size, stride : int
        Of the window, which is square. There is no padding.
    coordinate_add : bool
        Kept, shown, and without effect: the authors' forward does not read it either.
    mixed_windows : bool
        Mix the positions of a window, as the first commit of the authors' code does (the module tells how); this copies
        the windows. Checkpoints trained with that commit need it, and only they do.

    Attributes
    ----------
    w : Parameter
        ``[k, l, n, x, d, m]`` for matrix poses, ``[k, l, n, a, m, d]`` for vectors.

    Examples
    --------
    >>> import torch
    >>> layer = CapsuleCONV(8, 16, 4, 16, kernel_size=3, stride=2, matrix_pose=True, dp=0.0)
    >>> layer(torch.randn(2, 8, 7, 7, 16), 0).shape
    torch.Size([2, 4, 3, 3, 16])
    """

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
        self.in_n_capsules = check_count("in_n_capsules", in_n_capsules)
        self.kernel_size = check_count("kernel_size", kernel_size)
        self.stride = check_count("stride", stride)
        self.coordinate_add = coordinate_add
        self.mixed_windows = bool(mixed_windows)
        self.window = Window(kernel_size, kernel_size if mixed_windows else stride)
        lead = (kernel_size, kernel_size, in_n_capsules)
        self._setup(lead, in_d_capsules, out_n_capsules, out_d_capsules, matrix_pose, dp)

    def forward(self, input: Tensor, num_iter: int, next_capsule_value: Tensor | None = None) -> Tensor:
        """Route once.

        Parameters
        ----------
        input : Tensor
            ``[b, n, h, w, d]``.
        num_iter : int
            Not used, as in the authors' layer: a call is one iteration.
        next_capsule_value : Tensor, optional
            The parents' last poses ``[b, m, h', w', d]``; None spreads every child evenly.

        Returns
        -------
        Tensor
            ``[b, m, h', w', d]``.
        """
        require_tensor(input, "input")
        if input.dim() == 6:
            input = input.flatten(4)
        parents = _parents(next_capsule_value, 4)
        self._check(input, parents, f"[b, {self.in_n_capsules}, h, w, {self.in_d_capsules}]")
        return self._pass(self._mixed(input) if self.mixed_windows else input, parents)

    def _mixed(self, input: Tensor) -> Tensor:
        """The windows side by side, ``[b, n, h' * k, w' * k, d]``, their numbers mixed as the first commit does it."""
        size, step = self.kernel_size, self.stride
        if min(input.shape[2:4]) < size:
            wanted = f"a grid no smaller than the window, {size} x {size}"
            raise ValueError(f"input must have {wanted}, got {shape_text(input)}")
        seen = input.unfold(2, size, step).unfold(3, size, step).permute(0, 1, 5, 6, 4, 2, 3)  # b n k l d h w
        mixed = seen.reshape(*seen.shape[:4], *seen.shape[5:], self.in_d_capsules)  # read as h w d
        return mixed.permute(0, 1, 4, 2, 5, 3, 6).flatten(4, 5).flatten(2, 3)
