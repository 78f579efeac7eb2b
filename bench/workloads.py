"""The registry of workloads: layers of published capsule networks, by name, with their sizes and their work.

One workload is one routing pass of one layer. ``bench/`` and the tests name the same layer by the same name, so a
figure can be followed from a table to the network that it comes from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastcaps.functional import Window

__all__ = ["WORKLOADS", "Goal", "Inputs", "Workload", "find"]

EPS = 1e-5
"""Of LayerNorm, in every workload."""


@dataclass(frozen=True)
class Goal:
    """What a workload ought to reach at its default batch; a report marks what falls short.

    Attributes
    ----------
    forward, training
        Speed-up against the fastest alternative.
    share
        Share of the sgemm rate that the forward pass's useful operations reach.
    """

    forward: float
    training: float
    share: float = 0.45


@dataclass(frozen=True)
class Inputs:
    """Arguments of one pass, and the cotangent of its result for the training step.

    Public layout: ``children`` ``[B, I, C, D]`` or ``[B, N, H, W, C, D]``, ``weight`` ``[G, M, D, E]``, ``parents`` and
    ``grad`` ``[B, M, C, E]`` or ``[B, M, Ho, Wo, C, E]``, ``norm_weight`` and ``norm_bias`` ``[C * E]``. Grids lie in
    memory with a position's capsules together (B, H, W, N, C, D), as the layer before leaves them. ``parents`` is None
    for a uniform pass, ``norm_*`` without LayerNorm.
    """

    children: Tensor
    weight: Tensor
    parents: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    grad: Tensor

    NAMES = ("children", "weight", "parents", "norm_weight", "norm_bias")

    def arguments(self) -> tuple[Tensor | None, ...]:
        """Return the arguments of the pass in the order of ``NAMES``."""
        return (self.children, self.weight, self.parents, self.norm_weight, self.norm_bias)

    def present(self) -> dict[str, Tensor]:
        """Return the arguments that this pass has, by name: those that a training step differentiates."""
        return {name: t for name, t in zip(self.NAMES, self.arguments(), strict=True) if t is not None}

    def to(self, dtype: torch.dtype) -> Inputs:
        """Return the same numbers in another dtype, memory order kept."""
        cast: list[Any] = [None if t is None else t.detach().to(dtype) for t in (*self.arguments(), self.grad)]
        return Inputs(*cast)

    def on(self, device: torch.device) -> Inputs:
        """Return the same numbers on another device, memory order kept."""
        moved: list[Any] = [None if t is None else t.detach().to(device) for t in (*self.arguments(), self.grad)]
        return Inputs(*moved)

    def samples(self, part: slice) -> Inputs:
        """Return the samples ``part`` of the batch (views); what has no batch stays whole."""
        parents = None if self.parents is None else self.parents[part]
        return replace(self, children=self.children[part], parents=parents, grad=self.grad[part])

    def require_grad(self) -> Inputs:
        """Let every argument of the pass require its gradient, in place; return self."""
        for tensor in self.present().values():
            tensor.requires_grad_()
        return self


@dataclass(frozen=True)
class Workload:
    """One routing pass of one layer. Symbols: children ``[B, L positions, I, C, D]``, parents ``[B, L, M, C, E]``.

    Attributes
    ----------
    name, source
        As in the tables; where the layer is published.
    batch
        Default batch.
    types
        Child types N at one grid position, or children I of a set.
    parents, rows, columns_in, columns_out
        M, C, D, E.
    grid
        (H, W) of the children; None for a set.
    kernel_size, stride
        Of the window.
    uniform
        True for a pass without parents: r = 1 / M.
    normalize
        Whether LayerNorm over the C * E numbers of a parent, with affine, ends the pass.
    goal
        What it ought to reach; None if nothing was promised.
    """

    name: str
    source: str
    batch: int
    types: int
    parents: int
    rows: int
    columns_in: int
    columns_out: int
    grid: tuple[int, int] | None = None
    kernel_size: int = 1
    stride: int = 1
    uniform: bool = False
    normalize: bool = True
    goal: Goal | None = None

    @property
    def window(self) -> Window | None:
        """The window of a grid layer; None for a set."""
        return None if self.grid is None else Window(self.kernel_size, self.stride)

    @property
    def output_grid(self) -> tuple[int, ...]:
        """(Ho, Wo), or () for a set."""
        if self.grid is None:
            return ()
        return tuple((size - self.kernel_size) // self.stride + 1 for size in self.grid)

    @property
    def positions(self) -> int:
        """L, output positions of one sample."""
        count = 1
        for size in self.output_grid:
            count *= size
        return count

    @property
    def children(self) -> int:
        """I, children that one position sees. Every child has its own matrices: G = I."""
        return self.kernel_size**2 * self.types

    def votes(self, batch: int) -> int:
        """Count the votes B * L * I * M, each of C * E numbers."""
        return batch * self.positions * self.children * self.parents

    def votes_bytes(self, batch: int, itemsize: int = 4) -> int:
        """Bytes that storing every vote would take; the passes of this package never do."""
        return self.votes(batch) * self.rows * self.columns_out * itemsize

    def operations(self, batch: int, training: bool = False) -> int:
        """Count useful operations (a multiplication or an addition each), recomputation left out.

        Forward, with parents: ``2 (C D E + 2 C E)`` per vote: the vote itself, its agreement with the parent, and its
        share of the sum. A uniform pass: ``2 C D E`` per vote, since it is linear: one convolution, whose inner
        dimension the sum over children is part of. Softmax and LayerNorm are not counted.

        A training step counts three times the forward pass. For the pass with parents that is exact: its backward
        takes 2 C E each for <dS, V> and dQ, 4 C E for dV, and 2 C D E each for dP and dW.
        """
        pose = self.rows * self.columns_out
        per_vote = 2 * pose * (self.columns_in if self.uniform else self.columns_in + 2)
        return self.votes(batch) * per_vote * (3 if training else 1)

    def inputs(self, batch: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Inputs:
        """Make the inputs of one pass: the same seed gives the same numbers in every process and dtype.

        Children and parents are standard normal, as LayerNorm leaves them; weights N(0, 1) * sqrt(M / (D I)), as the
        authors initialise; the affine is near (1, 0).
        """
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        rows, inner, columns, many = self.rows, self.columns_in, self.columns_out, self.parents
        children = normal(batch, *(self.grid or ()), self.types, rows, inner)
        weight = normal(self.children, many, inner, columns) * (many / (inner * self.children)) ** 0.5
        queries = normal(batch, *self.output_grid, many, rows, columns)
        grad = normal(batch, *self.output_grid, many, rows, columns)
        norm_weight = 1 + 0.1 * normal(rows * columns)
        norm_bias = 0.1 * normal(rows * columns)
        if self.grid is not None:
            children, queries, grad = (tensor.movedim(3, 1) for tensor in (children, queries, grad))
        made = Inputs(
            children,
            weight,
            None if self.uniform else queries,
            norm_weight if self.normalize else None,
            norm_bias if self.normalize else None,
            grad,
        )
        return made.to(dtype)

    def miniature(self) -> Workload:
        """Return the same kind of layer in its smallest size: what a process runs once to have its code loaded."""
        grid = None if self.grid is None else (self.kernel_size, self.kernel_size)
        return replace(self, batch=1, types=1, parents=2, grid=grid)


_MATRIX = Goal(forward=25, training=12)
_VECTOR = Goal(forward=3, training=2.5)
_TSAI = "Tsai et al. 2020, Table"

_ALL = (
    Workload(
        "tsai-c10-conv1",
        f"{_TSAI} 8",
        8,
        32,
        32,
        4,
        4,
        4,
        grid=(16, 16),
        kernel_size=3,
        stride=2,
        goal=Goal(forward=35, training=12),
    ),
    Workload("tsai-c10-conv2", f"{_TSAI} 8", 16, 32, 32, 4, 4, 4, grid=(7, 7), kernel_size=3, goal=_MATRIX),
    Workload("tsai-c10-fc", f"{_TSAI} 8", 128, 800, 10, 4, 4, 4, goal=_MATRIX),
    Workload("tsai-c100-conv1", f"{_TSAI} 9", 4, 32, 32, 6, 6, 6, grid=(16, 16), kernel_size=3, stride=2, goal=_MATRIX),
    Workload("tsai-c100-fc1", f"{_TSAI} 9", 64, 800, 20, 6, 6, 6, goal=_MATRIX),
    Workload("tsai-c100-fc2", f"{_TSAI} 9", 128, 20, 100, 6, 6, 6, goal=_MATRIX),
    Workload("tsai-dmm-matrix-conv", f"{_TSAI} 10", 8, 16, 16, 8, 8, 8, grid=(8, 8), kernel_size=3, goal=_MATRIX),
    Workload("tsai-dmm-matrix-set", f"{_TSAI} 10", 64, 576, 10, 8, 8, 8, goal=_MATRIX),
    Workload("tsai-dmm-vector-conv", f"{_TSAI} 11", 4, 16, 16, 1, 64, 64, grid=(8, 8), kernel_size=3, goal=_VECTOR),
    Workload("tsai-dmm-vector-set", f"{_TSAI} 11", 64, 576, 10, 1, 64, 64, goal=_VECTOR),
    Workload(
        "barham",
        "Barham & Isard 2019, Table 1",
        64,
        32,
        32,
        4,
        4,
        4,
        grid=(15, 15),
        kernel_size=3,
        stride=2,
        uniform=True,
        normalize=False,
    ),
)

WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in _ALL}


def find(name: str) -> Workload:
    """Return the workload ``name``; raise ValueError with the names there are if it is unknown."""
    if name not in WORKLOADS:
        raise ValueError(f"unknown workload {name!r}; there are: {', '.join(WORKLOADS)}")
    return WORKLOADS[name]
