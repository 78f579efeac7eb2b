"""What all routing layers have in common: sizes, window, weights, and the checks of flat poses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastcaps.nn.poses import flatten_gate, flatten_grid, pose_shape, positive, require_tensor, shape_of
from fastcaps.votes import Window, window_extent

__all__ = ["RoutingLayer"]


class RoutingLayer(nn.Module):
    """Base of the routing layers; it holds ``weight`` and, if asked for, ``bias``.

    Parameters
    ----------
    in_capsules, out_capsules : int
        Children and parents of a set; their types at one position of a grid.
    in_dim, out_dim : int
        Numbers in a child's pose and in a parent's.
    pose : "matrix" or "vector"
        See :func:`fastcaps.nn.poses.pose_shape`.
    kernel_size : int, pair, "all" or None
        None routes a set; otherwise a window of that size slides over a grid. "all" is one window as large as the grid
        whatever its size, where a layer allows it: it needs ``share``, and the result is a set.
    stride, padding, dilation : int or pair
        As in a convolution.
    share : bool
        Children share matrices: all of a set, those of one type over a window.
    bias : bool
        Learn a bias of the votes.
    """

    whole_grid_allowed = True

    def __init__(
        self,
        in_capsules: int,
        out_capsules: int,
        in_dim: int,
        out_dim: int,
        *,
        pose: str,
        kernel_size: int | tuple[int, int] | str | None,
        stride: int | tuple[int, int],
        padding: int | tuple[int, int],
        dilation: int | tuple[int, int],
        share: bool,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.in_capsules = positive(in_capsules, "in_capsules")
        self.out_capsules = positive(out_capsules, "out_capsules")
        self.in_dim = positive(in_dim, "in_dim")
        self.out_dim = positive(out_dim, "out_dim")
        self.pose = pose
        self.pose_shape = pose_shape(in_dim, out_dim, pose)
        self.share = bool(share)
        self.whole_grid = self.whole_grid_allowed and kernel_size == "all"
        self.window: Window | None = None
        if kernel_size is not None and not self.whole_grid:
            self.window = Window(kernel_size, stride, padding, dilation)  # type: ignore[arg-type]
        elif stride not in (1, (1, 1)) or padding not in (0, (0, 0)) or dilation not in (1, (1, 1)):
            raise ValueError(
                "stride, padding and dilation need a kernel_size of numbers; "
                + ("a window over all of a grid has none" if self.whole_grid else "kernel_size=None routes a set")
            )
        if self.whole_grid and not self.share:
            raise ValueError("kernel_size='all' must have share=True: there cannot be matrices for every size of grid")
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        rows, columns, out_columns = self.pose_shape
        self.weight = nn.Parameter(torch.empty(self.groups, out_capsules, columns, out_columns, **options))
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(self.own_children, out_capsules, rows, out_columns, **options))

    @property
    def kernel_size(self) -> tuple[int, int] | str | None:
        """The window's size, "all", or None for a set."""
        if self.whole_grid:
            return "all"
        return None if self.window is None else self.window.spec[:2]  # type: ignore[return-value]

    @property
    def children_per_position(self) -> int:
        """I: the children that one position sees (of a whole grid: at each place)."""
        if self.window is None:
            return self.in_capsules
        return self.window.positions * self.in_capsules

    @property
    def groups(self) -> int:
        """G: how many children have matrices of their own; child i uses group i mod G."""
        if not self.share:
            return self.children_per_position
        return self.in_capsules if self.on_grid else 1

    @property
    def own_children(self) -> int:
        """How many children have entries of their own in tables beside the weights: I, or 1 where they share."""
        return 1 if self.share else self.children_per_position

    @property
    def on_grid(self) -> bool:
        """Whether children come as a grid ``[B, N, H, W, d]``."""
        return self.window is not None or self.whole_grid

    def output_size(self, size: tuple[int, int]) -> tuple[int, int] | None:
        """The parents' grid (height, width) for children on a grid of ``size``; None where parents are a set, which has
        no grid."""
        return None if self.window is None else self.window.output_size(*size)

    def as_read(self, children: Any, numbers: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return checked children and the numbers that come with them, a grid flattened where the layer reads a set."""
        require_tensor(children, "children")
        if not self.on_grid and children.dim() == 5:
            children, numbers = flatten_grid(children), flatten_gate(numbers)
        self.check_children(children)
        return children, numbers

    def check_children(self, children: Tensor) -> None:
        """What the functional API cannot know: flat poses of the right length, and the number of capsules this layer
        was built for."""
        wanted = f"[B, {self.in_capsules}, H, W, {self.in_dim}]" if self.on_grid else f"[B, I, {self.in_dim}]"
        if children.dim() != (5 if self.on_grid else 3) or children.shape[-1] != self.in_dim:
            raise ValueError(f"children must be {wanted}, got {shape_of(children)}")
        free = self.share and not self.on_grid
        if not free and children.shape[1] != self.in_capsules:
            what = "child types at a position" if self.on_grid else "children"
            raise ValueError(
                f"children must hold the {self.in_capsules} {what} that this layer was built for, "
                f"got {children.shape[1]} in {shape_of(children)}"
            )

    def window_over(self, children: Tensor) -> Window | None:
        """Return the window for a call: the layer's, or the one that spans the children's grid."""
        return Window((children.shape[2], children.shape[3])) if self.whole_grid else self.window

    def as_set(self, result: Tensor) -> Tensor:
        """Return a result over a whole grid without its single position: ``[B, M, 1, 1, ...]`` as ``[B, M, ...]``."""
        return result.squeeze((2, 3)) if self.whole_grid else result

    def coefficients_as_set(self, coefficients: Tensor) -> Tensor:
        """Return coefficients over a whole grid without its single position: ``[B, 1, 1, I, M]`` as ``[B, I, M]``."""
        return coefficients.squeeze((1, 2)) if self.whole_grid else coefficients

    def smallest_inputs(self) -> list[Tensor]:
        """Children of the smallest call that this layer takes: a batch of 1, on a grid a single position of parents."""
        grid = [1, 1] if self.whole_grid else []
        if self.window is not None:
            extent, padding = window_extent(self.window.spec), self.window.spec[4:6]
            grid = [max(1, size - 2 * pad) for size, pad in zip(extent, padding, strict=True)]
        return [self.weight.new_zeros((1, self.in_capsules, *grid, self.in_dim))]

    def sizes_repr(self) -> str:
        """The sizes, and of the window what differs from its defaults."""
        text = f"{self.in_capsules}, {self.out_capsules}, {self.in_dim}, {self.out_dim}, pose={self.pose!r}"
        if self.whole_grid:
            text += ", kernel_size='all'"
        if self.window is not None:
            text += f", kernel_size={self.window.kernel_size}"
            for name, default in (("stride", (1, 1)), ("padding", (0, 0)), ("dilation", (1, 1))):
                value = getattr(self.window, name)
                text += f", {name}={value}" if value != default else ""
        text += ", share=True" if self.share else ""
        return text + (", bias=True" if self.bias is not None else "")
