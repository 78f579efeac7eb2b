"""Time and peak memory of a call, and of the demo's passes: ``python -m fastcaps_lab.measure NAME BACKEND``.

The full benchmark, with alternatives and quantiles, is in ``bench/``.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from fastcaps import backends
from fastcaps.functional import Window, inverted_attention_routing


def peak_growth(run: Callable[[], object]) -> int:
    """Return the bytes by which resident memory grows at the peak of ``run``, including its result.

    On Linux the kernel's record of the peak is reset first; elsewhere the growth counts from the highest value so far.
    """

    def resident(field: str) -> int:
        if not status.exists():
            import resource

            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith(field))

    status, library = Path("/proc/self/status"), ctypes.CDLL(None)
    gc.collect()
    if hasattr(library, "malloc_trim"):  # returns memory that the C library holds for reuse
        library.malloc_trim(0)
    if status.exists():
        status.with_name("clear_refs").write_text("5")
    before, kept = resident("VmRSS:"), run()
    highest = resident("VmHWM:")
    del kept
    return max(0, highest - before)


def median_ms(run: Callable[[], object], seconds: float = 0.5) -> float:
    """Return the median time in ms of repeated runs within about ``seconds``."""
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return 1000 * timer.blocked_autorange(min_run_time=seconds).median


def apart(module: str, *arguments: str) -> Any:
    """Run a module in a fresh process, so that its memory is its own; return the JSON that it prints.

    Raises RuntimeError with the process's last line of output if it fails.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        words = " ".join(done.stderr.strip().splitlines()[-1:])
        raise RuntimeError(f"measuring {' on '.join(arguments)} failed: {words}")
    return json.loads(done.stdout)


class Workload(NamedTuple):
    """A routing pass with parents: its title, and the shapes of children and parents, channels last on a grid."""

    title: str
    children: tuple[int, ...]
    parents: tuple[int, ...]
    window: Window | None = None

    def tensors(self, batch: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return random children, weight and parents, as layers pass them on."""
        torch.manual_seed(0)
        children, parents = (torch.randn(batch or shape[0], *shape[1:]) for shape in (self.children, self.parents))
        groups = self.children[-3] * (1 if self.window is None else self.window.positions)
        parent_count = self.parents[-3]
        weight = torch.randn(groups, parent_count, 4, 4) * (parent_count / (4 * groups)) ** 0.5
        if self.window is not None:
            children, parents = children.movedim(3, 1), parents.movedim(3, 1)
        return children, weight, parents


WORKLOADS = {
    "conv1": Workload("conv 1: 16² × 32 → 7² × 32", (8, 16, 16, 32, 4, 4), (8, 7, 7, 32, 4, 4), Window(3, stride=2)),
    "conv2": Workload("conv 2: 7² × 32 → 5² × 32", (8, 7, 7, 32, 4, 4), (8, 5, 5, 32, 4, 4), Window(3)),
    "classes": Workload("classes: 800 → 10", (64, 800, 4, 4), (64, 10, 4, 4)),
}


def measure(name: str, backend: str) -> dict[str, float]:
    """Return a workload's median times on a backend, and the memory that a training step adds at its peak.

    They are ``forward_ms``, ``step_ms`` and ``step_mb``, in 10^6 bytes, which is right only in a fresh process.
    """
    workload = WORKLOADS[name]

    def forward() -> Tensor:
        result = inverted_attention_routing(*tensors, window=workload.window)
        assert isinstance(result, Tensor)  # a pair only with return_coefficients
        return result

    def step() -> None:
        result = forward()
        result.backward(torch.ones_like(result))
        for tensor in tensors:
            tensor.grad = None

    with backends.backend(backend):
        # a first, small step creates threads, code and caches, which are not part of the figure
        tensors = tuple(tensor.requires_grad_() for tensor in workload.tensors(batch=1))
        step()
        tensors = tuple(tensor.requires_grad_() for tensor in workload.tensors())
        grown = peak_growth(step)
        step_ms = median_ms(step)
        with torch.no_grad():
            forward_ms = median_ms(forward)
    return {"forward_ms": forward_ms, "step_ms": step_ms, "step_mb": grown / 1e6}


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in WORKLOADS or sys.argv[2] not in backends.NAMES:
        sys.exit(f"usage: python -m fastcaps_lab.measure {{{','.join(WORKLOADS)}}} {{{','.join(backends.NAMES)}}}")
    print(json.dumps(measure(*sys.argv[1:])))
