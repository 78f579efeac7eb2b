"""Time and memory of one routing pass, measured in a fresh process: ``python -m fastcaps.measure NAME BACKEND``.

For a person's first look, in the demo; ``bench/`` measures in earnest, with alternatives and quantiles.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastcaps import backends
from fastcaps.functional import Window, inverted_attention_routing


@dataclass(frozen=True)
class Workload:
    """A routing pass with parents: 4 x 4 poses, a set or a grid of children.

    Attributes
    ----------
    title : str
        What it is, for a table.
    batch, types, size, parents : int
        Images; child types; height and width of their grid (0 makes a set of ``types`` children); parents.
    window : Window or None
        The grid's window.
    """

    title: str
    batch: int
    types: int
    size: int
    parents: int
    window: Window | None = None

    def tensors(self, batch: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Children, weight and parents at random."""
        torch.manual_seed(0)
        count = self.batch if batch is None else batch
        if self.window is None:
            children = torch.randn(count, self.types, 4, 4)
            parents = torch.randn(count, self.parents, 4, 4)
            groups = self.types
        else:
            # as layers hand it on: a position's capsules together in memory
            children = torch.randn(count, self.size, self.size, self.types, 4, 4).permute(0, 3, 1, 2, 4, 5)
            rows, columns = self.window.output_size(self.size, self.size)
            parents = torch.randn(count, rows, columns, self.parents, 4, 4).permute(0, 3, 1, 2, 4, 5)
            groups = self.types * self.window.positions
        weight = torch.randn(groups, self.parents, 4, 4) * (self.parents / (4 * groups)) ** 0.5
        return children, weight, parents

    def votes_mb(self) -> float:
        """What storing all votes once takes, in MB (10^6 bytes) of float32."""
        if self.window is None:
            return self.batch * self.types * self.parents * 16 * 4 / 1e6
        rows, columns = self.window.output_size(self.size, self.size)
        return self.batch * rows * columns * self.types * self.window.positions * self.parents * 16 * 4 / 1e6


WORKLOADS = {
    "conv1": Workload("conv 1: 16² × 32 → 7² × 32", 8, 32, 16, 32, Window(3, stride=2)),
    "conv2": Workload("conv 2: 7² × 32 → 5² × 32", 8, 32, 7, 32, Window(3)),
    "classes": Workload("classes: 800 → 10", 64, 800, 0, 10),
}


@dataclass(frozen=True)
class Figures:
    """What was measured: medians in milliseconds; memory that a training step adds at its peak, in MB (10^6 bytes)."""

    forward_ms: float
    step_ms: float
    step_mb: float


def _status(field: str) -> float | None:
    """A field of this process's status in bytes, or None where there is no such file (not Linux)."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return float(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _highest() -> float:
    """The most memory this process ever held, in bytes."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def peak_growth(run: Callable[[], object]) -> float:
    """Bytes by which the resident memory of this process grows at the peak of ``run``.

    On Linux the kernel's record of the peak is reset first; elsewhere the growth counts from the highest value so far.
    """
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
    except OSError:
        before = None
    start = _highest() if before is None else before
    run()
    end = _highest() if before is None else (_status("VmHWM") or start)
    return max(0.0, end - start)


def median_ms(run: Callable[[], object], seconds: float = 0.5) -> float:
    """The median of repeated runs within about ``seconds``, three at least."""
    times: list[float] = []
    while len(times) < 3 or (sum(times) < seconds and len(times) < 200):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times)


def measure(name: str, backend: str) -> Figures:
    """Measure a workload on a backend, here and now; memory means something only in a process that did nothing else."""
    workload = WORKLOADS[name]

    def step(tensors: tuple[Tensor, ...]) -> None:
        children, weight, parents = tensors
        result = inverted_attention_routing(children, weight, parents, window=workload.window)
        assert isinstance(result, Tensor)  # a pair only with return_coefficients
        result.backward(torch.ones_like(result))
        for tensor in tensors:
            tensor.grad = None

    with backends.backend(backend):
        # a first, small step: threads, code and caches that every later call shares are not part of the figure
        step(tuple(tensor.requires_grad_() for tensor in workload.tensors(batch=1)))
        tensors = tuple(tensor.requires_grad_() for tensor in workload.tensors())
        grown = peak_growth(lambda: step(tensors))
        step_ms = median_ms(lambda: step(tensors))
        with torch.no_grad():
            children, weight, parents = tensors
            forward_ms = median_ms(
                lambda: inverted_attention_routing(children, weight, parents, window=workload.window)
            )
    return Figures(forward_ms, step_ms, grown / 1e6)


def measure_apart(name: str, backend: str) -> Figures:
    """:func:`measure` in a fresh process.

    Raises
    ------
    RuntimeError
        With that process's last words, if it fails.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "fastcaps.measure", name, backend]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"measuring {name} on {backend} failed: {done.stderr.strip().splitlines()[-1:]}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return Figures(**figures)


def main(arguments: list[str] | None = None) -> int:
    """Print the figures of one workload and backend as JSON."""
    given = sys.argv[1:] if arguments is None else arguments
    if len(given) != 2 or given[0] not in WORKLOADS or given[1] not in backends.NAMES:
        print(
            f"usage: python -m fastcaps.measure {{{','.join(WORKLOADS)}}} {{{','.join(backends.NAMES)}}}",
            file=sys.stderr,
        )
        return 2
    print(json.dumps(vars(measure(given[0], given[1]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
