"""The registry of workloads: layers of published capsule networks, by name, with their sizes and their work.

One workload is one layer's routing: an attention pass, or all turns of another routing. ``bench/`` and the tests name
the same layer by the same name, so a figure can be followed from a table to the network that it comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bench.inputs import Draw, Inputs
from bench.routings import AttentionPass, DynamicRouting, EMRouting, HeinsenRouting, Routing, RoutingPool
from fastcaps.functional import Window
from fastcaps.votes import SET_WINDOW

__all__ = ["WORKLOADS", "Goal", "Workload", "attention_passes", "find"]

OUTWEIGH = 10
"""Votes that take so many times the bytes of inputs and parameters ought not to be stored."""


@dataclass(frozen=True)
class Goal:
    """What a workload ought to reach; a report marks what falls short.

    Attributes
    ----------
    forward, training
        Speed-up against the fastest alternative, at the default batch.
    sgemm_share
        Share of the sgemm rate that the forward pass's useful operations reach, at the default batch.
    memory_share
        Peak memory beside inputs and results as a share of the votes, where these outweigh inputs and parameters.
    total
        A batch, and the bytes that all tensors of a training step may take there: inputs, parameters, results,
        gradients, and what is needed for a time.
    means
        Geometric means, forward and training, of the speed-ups of all rows that have them as their goal.
    """

    forward: float
    training: float
    sgemm_share: float | None = None
    memory_share: float | None = None
    total: tuple[int, float] | None = None
    means: tuple[float, float] | None = None


@dataclass(frozen=True)
class Workload:
    """One routing of one layer. Symbols: children ``[B, L positions, I, C, D]``, parents ``[B, L, M, C, E]``.

    Attributes
    ----------
    name, source
        As in the tables; where the layer is published.
    batches
        What is run: the default batch, and others.
    types
        Child types N at one grid position, or children I of a set.
    parents, rows, columns_in, columns_out
        M, C, D, E.
    grid
        (H, W) of the children; None for a set.
    kernel_size, stride
        Of the window.
    groups
        G; None where every child that a position sees has its own matrices, 0 where votes are the poses themselves.
    routing
        The kind of routing, with its options.
    goal
        What it ought to reach; None if nothing was promised.
    copies
        The children are so many copies of the first ones: the float64 result of a layer that is too large for it is
        found from one copy, each child of which counts as often as it is copied.
    checked
        At larger batches, only so many samples have a cotangent and are held to the float64 result; None for all.
    """

    name: str
    source: str
    batches: tuple[int, ...]
    types: int
    parents: int
    rows: int
    columns_in: int
    columns_out: int
    grid: tuple[int, int] | None = None
    kernel_size: int = 1
    stride: int = 1
    groups: int | None = None
    routing: Routing = field(default_factory=AttentionPass)
    goal: Goal | None = None
    copies: int = 1
    checked: int | None = None

    @property
    def batch(self) -> int:
        """The default batch."""
        return self.batches[0]

    @property
    def window(self) -> Window | None:
        """The window of a grid layer; None for a set."""
        return None if self.grid is None else Window(self.kernel_size, self.stride)

    @property
    def spec(self) -> tuple[int, ...]:
        """The window as the ops take it."""
        return SET_WINDOW if self.window is None else self.window.spec

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
        """I, children that one position sees."""
        return self.kernel_size**2 * self.types

    @property
    def matrices(self) -> int:
        """G, groups of children that share their matrices."""
        return self.children if self.groups is None else self.groups

    @property
    def pose(self) -> int:
        """C * E, numbers of a parent's pose."""
        return self.rows * self.columns_out

    def votes(self, batch: int) -> int:
        """Count the votes B * L * I * M, each of C * E numbers."""
        return batch * self.positions * self.children * self.parents

    def votes_bytes(self, batch: int, itemsize: int = 4) -> int:
        """Bytes that storing every vote would take; the passes of this package never do."""
        return self.votes(batch) * self.pose * itemsize

    def operations(self, batch: int, training: bool = False) -> int:
        """Count useful operations (a multiplication or an addition each), recomputation left out.

        What each kind of routing counts for a vote stands in its ``operations``. A training step counts three times
        the forward pass.
        """
        return self.votes(batch) * self.routing.operations(self) * (3 if training else 1)

    def samples_checked(self, batch: int) -> Sequence[int] | None:
        """Return the samples that are held to the float64 result, spread over the batch; None for all of them."""
        if self.checked is None or batch <= self.checked:
            return None
        return sorted({round(k * (batch - 1) / max(1, self.checked - 1)) for k in range(self.checked)})

    def inputs(self, batch: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Inputs:
        """Make the inputs of one call: the same seed gives the same numbers in every process and dtype."""
        draw = Draw(self, batch, seed)
        arguments = self.routing.arguments(self, draw)
        grads = self.routing.grads(self, draw)
        samples = self.samples_checked(batch)
        if samples is not None:
            for grad in grads.values():
                kept = grad[samples].clone()
                grad.zero_()
                grad[samples] = kept
        return Inputs(arguments, grads, self.routing.fixed).to(dtype)

    def goal_at(self, batch: int, training: bool) -> dict[str, float] | None:
        """Return the goals of one row by name (``speedup``, ``mean``, ``sgemm_share``, ``memory_share``, ``total``)."""
        goal, wanted = self.goal, {}
        if goal is None:
            return None
        if batch == self.batch:
            wanted["speedup"] = goal.training if training else goal.forward
            if goal.sgemm_share is not None and not training:
                wanted["sgemm_share"] = goal.sgemm_share
            if goal.means is not None:
                wanted["mean"] = goal.means[training]
        elif batch == 1:
            wanted["speedup"] = 1.0
        if goal.memory_share is not None and self.outweighs(batch):
            wanted["memory_share"] = goal.memory_share
        if goal.total is not None and training and batch == goal.total[0]:
            wanted["total"] = goal.total[1]
        return wanted or None

    def outweighs(self, batch: int) -> bool:
        """Tell whether the votes take ten times the bytes of inputs and parameters, or more."""
        return self.votes_bytes(batch) >= OUTWEIGH * self.inputs_bytes(batch)

    def inputs_bytes(self, batch: int) -> int:
        """Bytes of inputs and parameters, in float32: children, their gates, parents, and matrices."""
        height, width = self.grid or (1, 1)
        children = batch * height * width * self.types * (self.rows * self.columns_in + 1)
        parents = batch * self.positions * self.parents * self.pose
        return 4 * (children + parents + self.matrices * self.parents * self.columns_in * self.columns_out)

    def miniature(self) -> Workload:
        """Return the same kind of layer in its smallest size: what a process runs once to have its code loaded."""
        grid = None if self.grid is None else (self.kernel_size, self.kernel_size)
        return replace(
            self, batches=(1,), types=1, parents=min(2, self.parents), grid=grid, groups=self.groups and 1, copies=1
        )


_TSAI = "Tsai et al. 2020, Table"
_HEINSEN = "Heinsen 2019"
_MATRIX = Goal(forward=25, training=12, sgemm_share=0.45)
_VECTOR = Goal(forward=3, training=2.5, sgemm_share=0.45)
_WHOLE = Goal(forward=8, training=5, memory_share=0.05, means=(15, 8))
_CAPNET = replace(_WHOLE, total=(128, 1755e6))
_MATRIX_4, _MATRIX_6, _MATRIX_8 = (4, 4, 4), (6, 6, 6), (8, 8, 8)


def _attention() -> list[Workload]:
    """Return the attention passes."""
    conv1: dict[str, Any] = {"grid": (16, 16), "kernel_size": 3, "stride": 2}
    conv2 = {"grid": (7, 7), "kernel_size": 3}
    dmm = {"grid": (8, 8), "kernel_size": 3}
    best = replace(_MATRIX, forward=35)
    uniform = AttentionPass(uniform=True, normalize=False)
    sized: tuple[tuple[Any, ...], ...] = (
        ("tsai-c10-conv1", "8", 8, 32, 32, _MATRIX_4, conv1, best),
        ("tsai-c10-conv2", "8", 16, 32, 32, _MATRIX_4, conv2, _MATRIX),
        ("tsai-c10-fc", "8", 128, 800, 10, _MATRIX_4, {}, _MATRIX),
        ("tsai-c100-conv1", "9", 4, 32, 32, _MATRIX_6, conv1, _MATRIX),
        ("tsai-c100-fc1", "9", 64, 800, 20, _MATRIX_6, {}, _MATRIX),
        ("tsai-c100-fc2", "9", 128, 20, 100, _MATRIX_6, {}, _MATRIX),
        ("tsai-dmm-matrix-conv", "10", 8, 16, 16, _MATRIX_8, dmm, _MATRIX),
        ("tsai-dmm-matrix-set", "10", 64, 576, 10, _MATRIX_8, {}, _MATRIX),
        ("tsai-dmm-vector-conv", "11", 4, 16, 16, (1, 64, 64), dmm, _VECTOR),
        ("tsai-dmm-vector-set", "11", 64, 576, 10, (1, 64, 64), {}, _VECTOR),
    )
    made = [
        Workload(name, f"{_TSAI} {where}", (batch, 1), types, many, *pose, goal=goal, **places)  # type: ignore[misc]
        for name, where, batch, types, many, pose, places, goal in sized
    ]
    barham = {**conv1, "grid": (15, 15)}
    source = "Barham & Isard 2019, Table 1"
    return [*made, Workload("barham", source, (64, 1), 32, 32, *_MATRIX_4, routing=uniform, **barham)]


def _routings() -> list[Workload]:
    """Return the whole routings."""
    dynamic, heinsen = DynamicRouting(), HeinsenRouting()
    text = HeinsenRouting(layers=37)
    vector, capnet = (1, 8, 16), "Li et al. 2018, Table 1"
    sabour, norb, sst = "Sabour et al. 2017", f"{_HEINSEN}, Fig. 3", f"{_HEINSEN}, Fig. 5"
    made = (
        Workload("sabour-mnist", sabour, (64,), 1152, 10, *vector, routing=dynamic),
        Workload("tsai-dr-c10", f"{_TSAI} 4", (32,), 2048, 10, *vector, routing=dynamic),
        Workload("tsai-dr-c100", f"{_TSAI} 5", (8,), 2048, 100, *vector, routing=dynamic),
        Workload(
            "hinton-conv",
            f"{_TSAI} 6",
            (4,),
            32,
            32,
            *_MATRIX_4,
            grid=(16, 16),
            kernel_size=3,
            stride=2,
            routing=EMRouting(),
        ),
        Workload("hinton-fc", f"{_TSAI} 6", (64,), 800, 10, *_MATRIX_4, groups=32, routing=EMRouting(coordinates=True)),
        Workload("heinsen-norb-1", norb, (2,), 5184, 64, *_MATRIX_4, groups=1, routing=heinsen),
        Workload("heinsen-norb-2", norb, (256,), 64, 5, *_MATRIX_4, routing=heinsen),
        Workload("heinsen-sst-1", sst, (32,), 37 * 32, 64, 1, 64, 2, groups=1, routing=text),
        Workload("heinsen-sst-2", sst, (1024,), 64, 5, 1, 2, 2, routing=heinsen),
        Workload("zhao-pool", "Zhao & Huang 2019, Table 2", (128,), 256, 1, 1, 16, 16, groups=0, routing=RoutingPool()),
        Workload("vocabulary", f"{_HEINSEN}, §6", (1,), 1024, 30_000, 1, 16, 16, groups=1, routing=heinsen, copies=64),
        Workload("million", f"{_HEINSEN}, §1.2", (1,), 1_000_000, 64, 1, 16, 16, groups=1, routing=heinsen, copies=500),
    )
    large = [
        Workload(
            name, f"{capnet} {row}", (2, 128), 2048, 512, *vector, groups=32, routing=kind, goal=_CAPNET, checked=2
        )
        for name, row, kind in (("li-capnet-dynamic", "(a)", dynamic), ("li-capnet-em", "(b)", EMRouting()))
    ]
    whole = [replace(work, goal=_WHOLE) for work in made]
    return [*whole[:-2], *large, *whole[-2:]]


WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in (*_attention(), *_routings())}


def find(name: str) -> Workload:
    """Return the workload ``name``; raise ValueError with the names there are if it is unknown."""
    if name not in WORKLOADS:
        raise ValueError(f"unknown workload {name!r}; there are: {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def attention_passes() -> list[Workload]:
    """Return the workloads that are one attention pass with parents and LayerNorm."""
    return [work for work in WORKLOADS.values() if work.routing == AttentionPass()]
