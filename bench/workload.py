"""What a workload is: the sizes of one layer, the kind of its routing and its inputs; and a row of the benchmark."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from bench.votes import Layout, as_parents
from fastcaps.functional import Window

Implementation = Callable[..., tuple[Tensor, ...]]
"""Takes a routing's arguments by name, in public layout; returns its results in the order of ``Routing.results``."""


class Routing(ABC):
    """A kind of routing: all iterations of it are one call."""

    function: ClassVar[Callable[..., Any]]  # the public function that runs it
    results: ClassVar[tuple[str, ...]] = ("parents",)
    fixed: ClassVar[tuple[str, ...]] = ()  # arguments that no training step differentiates
    subject: ClassVar[str]  # the op, by its stem
    makes_votes: bool = True  # matrices make them; else they are the poses, or one matmul makes their sum
    iterations: int = 1

    @abstractmethod
    def arguments(self, work: Workload, draw: Draw) -> dict[str, Tensor]:
        """Return the tensors of one call, by the names of the public function's arguments."""

    def settings(self, work: Workload) -> dict[str, Any]:
        """Return the other arguments of the public function."""
        return {"iterations": self.iterations, "window": work.window}

    def ours(self, work: Workload) -> Implementation:
        """Return the package's own routing."""
        settings = self.settings(work)

        def run(**arguments: Tensor) -> tuple[Tensor, ...]:
            found = type(self).function(**arguments, **settings)
            return (found,) if isinstance(found, Tensor) else tuple(found)

        return run

    @abstractmethod
    def route(self, work: Workload, layout: Layout, copies: int, **arguments: Tensor) -> tuple[Tensor, ...]:
        """Route over votes as a skilled PyTorch user would, to results ``[P, M, ...]``; every child counts ``copies``
        times (Heinsen's)."""

    def routed(self, work: Workload, layout: Layout, copies: int = 1) -> Implementation:
        """Return :meth:`route` with results in public layout."""

        def run(**arguments: Tensor) -> tuple[Tensor, ...]:
            batch = arguments["children"].shape[0]
            return tuple(as_parents(one, work, batch) for one in self.route(work, layout, copies, **arguments))

        return run


@dataclass(frozen=True)
class Workload:
    """One routing of one layer. Symbols: children ``[B, L positions, I, C, D]``, parents ``[B, L, M, C, E]``."""

    name: str  # as in the tables
    source: str  # where the layer is published
    batches: tuple[int, ...]  # what is run: the default batch, and others
    types: int  # N child types at one grid position, or children I of a set
    parents: int  # M
    rows: int  # C
    columns_in: int  # D
    columns_out: int  # E
    routing: Routing
    grid: tuple[int, int] | None = None  # (H, W) of the children; None for a set
    kernel_size: int = 1
    stride: int = 1
    groups: int | None = None  # G; None: every child of a position has its own matrices; 0: votes are the poses
    # The children are this many copies of the first ones: the float64 result of a layer that is too large for it is
    # found from one copy, each child of which counts as often as it is copied.
    copies: int = 1

    batch = property(lambda self: self.batches[0])  # the default batch
    window = property(lambda self: None if self.grid is None else Window(self.kernel_size, self.stride))
    # (Ho, Wo), or () for a set
    output_grid = property(lambda self: tuple((n - self.kernel_size) // self.stride + 1 for n in self.grid or ()))
    positions = property(lambda self: prod(self.output_grid))  # L
    children = property(lambda self: self.kernel_size**2 * self.types)  # I: those that one position sees
    matrices = property(lambda self: self.children if self.groups is None else self.groups)  # G
    pose = property(lambda self: self.rows * self.columns_out)  # C * E

    def votes(self, batch: int) -> int:
        """Count the votes B * L * I * M, each of C * E numbers."""
        return batch * self.positions * self.children * self.parents

    def votes_bytes(self, batch: int) -> int:
        """Bytes that storing every vote in float32 would take; the passes of this package never do."""
        return self.votes(batch) * self.pose * 4

    def inputs(self, batch: int, device: torch.device | str = "cpu") -> Inputs:
        """Make the inputs of one call, in float32: the same numbers in every process on a kind of device. The
        cotangents are those of results, in order; activations and scores are one number a parent."""
        draw = Draw(self, batch, device)
        arguments, numbers = self.routing.arguments(self, draw), {"activations", "scores"}
        poses = {name: () if name in numbers else (self.rows, self.columns_out) for name in self.routing.results}
        return Inputs(arguments, {name: draw.parents(*pose) for name, pose in poses.items()}, self.routing.fixed)


@dataclass(frozen=True)
class Precision:
    """A dtype, and what matrix products may round to."""

    dtype: torch.dtype  # of all tensors
    tf32: bool  # whether float32 matrix products may round their operands to 10 bits of mantissa
    epsilon: float  # one unit in the last place of what is multiplied

    def use(self) -> None:
        """Let matrix products and convolutions of this process run so."""
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = self.tf32


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(torch.float32, False, torch.finfo(torch.float32).eps),
    "tf32": Precision(torch.float32, True, 2.0**-10),
    "bf16": Precision(torch.bfloat16, False, torch.finfo(torch.bfloat16).eps),
}


@dataclass(frozen=True)
class Case:
    """One row: a workload at a batch, forward or a training step, in one precision."""

    workload: Workload
    batch: int
    training: bool
    precision: str = "fp32"

    mode = property(lambda self: "training step" if self.training else "forward")  # as the tables call it
    key = property(lambda self: (self.workload.name, self.batch, self.mode, self.precision))  # in a record

    def __str__(self) -> str:
        precision = "" if self.precision == "fp32" else f" {self.precision}"
        return f"{self.workload.name} batch {self.batch} {self.mode}{precision}"


def is_batched(name: str) -> bool:
    """Return whether an argument or a result, or its gradient ``d`` + name, has the batch as its first dimension."""
    return name.removeprefix("d") in {"children", "parents", "activations", "scores", "poses", "variances"}


def size_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the numbers in tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class Inputs:
    """Arguments of one routing, and the cotangents of its results for the training step, in public layout. Grids lie in
    memory with a position's capsules together (B, H, W, N, C, D), as the layer before leaves them."""

    arguments: dict[str, Tensor]  # by name; what is absent is not there
    grads: dict[str, Tensor]  # a cotangent for each result, by the result's name, in order
    fixed: tuple[str, ...] = ()  # arguments that no training step differentiates

    children = property(lambda self: self.arguments["children"])
    learned = property(lambda self: {name: one for name, one in self.arguments.items() if name not in self.fixed})

    def each(self, change: Callable[[str, Tensor], Tensor]) -> Inputs:
        """Return the same with every tensor changed."""
        arguments, grads = ({n: change(n, t) for n, t in given.items()} for given in (self.arguments, self.grads))
        return replace(self, arguments=arguments, grads=grads)

    def to(self, target: torch.dtype | torch.device) -> Inputs:
        """Return the same numbers in another dtype or on another device, cut off from any graph."""
        return self.each(lambda _, tensor: tensor.detach().to(target))

    def samples(self, part: slice | Sequence[int]) -> Inputs:
        """Return the samples ``part`` of the batch; what has no batch stays whole."""
        return self.each(lambda name, tensor: tensor[part] if is_batched(name) else tensor)

    def first_and_last(self, batch: int) -> Inputs:
        """Return ``batch`` samples: the first ones, but the last sample stays the last."""

        def shorter(name: str, tensor: Tensor) -> Tensor:
            if not is_batched(name) or tensor.shape[0] == batch:
                return tensor.detach()
            some = tensor[:batch].detach().clone()
            some[-1] = tensor[-1]
            return some

        return self.each(shorter)


class Draw:
    """Draws a workload's tensors from N(0, 1), the same numbers in every process on a kind of device."""

    def __init__(self, work: Workload, batch: int, device: torch.device | str = "cpu") -> None:
        self.work, self.batch, self.device = work, batch, device
        self.generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def children(self, *pose: int) -> Tensor:
        """Return a pose, or one number, of every child ``[B, I, *pose]`` or ``[B, N, H, W, *pose]``."""
        work = self.work
        if work.grid:
            return self.normal(self.batch, *work.grid, work.types, *pose).movedim(3, 1)
        return self.normal(self.batch, work.types // work.copies, *pose).repeat(1, work.copies, *[1] * len(pose))

    def weight(self, scale: float) -> Tensor:
        """Return matrices ``[G, M, D, E]`` of numbers from N(0, scale²)."""
        work = self.work
        return self.normal(work.matrices, work.parents, work.columns_in, work.columns_out) * scale

    def parents(self, *pose: int) -> Tensor:
        """Return a pose, or one number, of every parent ``[B, M, *pose]`` or ``[B, M, Ho, Wo, *pose]``."""
        made = self.normal(self.batch, *self.work.output_grid, self.work.parents, *pose)
        return made if self.work.grid is None else made.movedim(3, 1)
