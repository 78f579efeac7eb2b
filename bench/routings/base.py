"""What every kind of routing tells the benchmark of itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

import fastcaps
from bench.inputs import Draw
from bench.layouts import Layout

if TYPE_CHECKING:
    from bench.workloads import Workload

__all__ = ["Implementation", "Routing"]

Implementation = Callable[..., tuple[Tensor, ...]]
"""Takes a routing's arguments by name, in public layout; returns its results in the order of ``Routing.results``."""


class _Call(torch.nn.Module):
    """A call as a module, as ``fastcaps.explain`` takes it."""

    def __init__(self, run: Implementation, arguments: dict[str, Tensor]) -> None:
        super().__init__()
        self._run, self._arguments = run, arguments

    def forward(self, children: Tensor) -> tuple[Tensor, ...]:
        return self._run(**{**self._arguments, "children": children})


class Routing(ABC):
    """A kind of routing: all turns of it are one call.

    Attributes
    ----------
    results
        Names of what it returns.
    fixed
        Arguments that no training step differentiates.
    subject
        The pass that its turns are made of: ``attention``, ``pooling`` or ``gaussian``.
    stored
        How many times the bytes of its votes each alternative needs: a forward call, and a training step. Measured for
        poses of 16 numbers, and rounded up; small layers and poses need more.
    """

    results: ClassVar[tuple[str, ...]] = ("parents",)
    fixed: ClassVar[tuple[str, ...]] = ()
    subject: ClassVar[str] = "attention"
    stored: ClassVar[dict[str, tuple[float, float]]]

    @abstractmethod
    def arguments(self, workload: Workload, draw: Draw) -> dict[str, Tensor]:
        """Return arguments of one call, by name and in order."""

    def grads(self, workload: Workload, draw: Draw) -> dict[str, Tensor]:
        """Return a cotangent of each result, by name and in order."""
        return {"parents": draw.parents(workload.rows, workload.columns_out)}

    @property
    @abstractmethod
    def passes(self) -> int:
        """How many passes it is."""

    @abstractmethod
    def operations(self, workload: Workload) -> int:
        """Count useful operations for a vote, a multiplication or an addition each; what is only recomputed is not."""

    @abstractmethod
    def ours(self, workload: Workload) -> Implementation:
        """Return the package's own routing."""

    @abstractmethod
    def reference(self, workload: Workload) -> Implementation:
        """Return the reference under the functional contract: same arguments and results, votes stored."""

    @abstractmethod
    def batched_matmul(self, workload: Workload, layout: Layout) -> Implementation:
        """Return the routing over stored votes that a batched matmul makes, in a layout."""

    def explain(self, workload: Workload, arguments: dict[str, Tensor]) -> str:
        """Return which backend serves the package's own call, in the words of ``fastcaps.explain``."""
        told = fastcaps.explain(_Call(self.ours(workload), arguments), arguments["children"])
        return str(told).splitlines()[0]

    def exact(self, workload: Workload) -> Implementation:
        """Return what the gate computes in float64, for one of the workload's equal copies of the children."""
        if workload.copies > 1:
            raise NotImplementedError(f"{type(self).__name__} cannot count a child more than once")
        return self.reference(workload)

    @abstractmethod
    def layout(self, workload: Workload) -> str:
        """Return the layout of the votes that serves the batched matmul best, by ``bench/layout_report.py``."""
