"""Small calls that take every path of the kernels, held to the float64 reference: what compute-sanitizer watches.

compute-sanitizer --tool memcheck python bench/sanitize.py --device cuda --backend cuda
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fastcaps import backends
from fastcaps.functional import Window, inverted_attention_routing

__all__ = ["CALLS", "Call", "check", "main"]


@dataclass(frozen=True)
class Call:
    """One call: children ``[batch, (types, *grid) or types, C, D]`` to so many parents ``[C, E]``."""

    name: str
    batch: int
    types: int
    parents: int
    pose: tuple[int, int, int]
    grid: tuple[int, int] | None = None
    window: Window | None = None
    shared: bool = False
    extras: bool = False

    def tensors(self, device: str) -> dict[str, Tensor]:
        """Return the arguments of the call, in float64."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        rows, inner, columns = self.pose
        grid = self.grid or ()
        places: tuple[int, ...] = ()
        seen = self.types
        if self.window is not None and self.grid is not None:
            places = self.window.output_size(*self.grid)
            seen *= self.window.spec[0] * self.window.spec[1]
        groups = 1 if self.shared else seen
        found = {
            "children": normal(self.batch, self.types, *grid, rows, inner),
            "weight": normal(groups, self.parents, inner, columns) * inner**-0.5,
            "parents": normal(self.batch, self.parents, *places, rows, columns),
        }
        if rows * columns > 1:  # LayerNorm of one number is left out
            found["norm_weight"] = 1 + 0.1 * normal(rows * columns)
            found["norm_bias"] = 0.1 * normal(rows * columns)
        if self.extras:
            found["bias"] = 0.1 * normal(seen, self.parents, rows, columns)
            found["gate"] = torch.rand(self.batch, self.types, *grid, generator=generator, dtype=torch.float64)
        return {name: tensor.to(device) for name, tensor in found.items()}


_GRID = Window(3, stride=2)
_PADDED = Window((2, 3), padding=1)

CALLS = (
    Call("4x4 grid", 2, 3, 32, (4, 4, 4), (5, 5), _GRID),
    Call("4x4 set, few parents", 3, 33, 10, (4, 4, 4), extras=True),
    Call("4x4 padded, two warps of parents", 1, 2, 40, (4, 4, 4), (3, 4), _PADDED, extras=True),
    Call("6x6 set", 2, 9, 20, (6, 6, 6)),
    Call("6x6 many parents", 2, 3, 100, (6, 6, 6)),
    Call("8x8 grid", 1, 2, 16, (8, 8, 8), (3, 3), Window(3)),
    Call("1x8 to 1x16", 2, 17, 10, (1, 8, 16), extras=True),
    Call("1x16", 2, 7, 33, (1, 16, 16), shared=True),
    Call("1x64 set", 2, 5, 10, (1, 64, 64)),
    Call("1x64 grid", 1, 2, 16, (1, 64, 64), (3, 3), Window(3)),
    Call("any pose", 2, 4, 5, (3, 5, 7), (4, 3), Window(2), extras=True),
    Call("any vector", 2, 6, 3, (1, 5, 11), shared=True),
    Call("more parents than a block holds", 1, 2, 700, (4, 4, 4)),
    Call("one of everything", 1, 1, 1, (1, 1, 1)),
)


def _run(call: Call, tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the result and every gradient of a call."""
    leaves = {name: tensor.to(dtype).requires_grad_() for name, tensor in tensors.items()}
    result = inverted_attention_routing(**leaves, window=call.window)  # type: ignore[arg-type]
    assert isinstance(result, Tensor)
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result)
    gradients = torch.autograd.grad(result, tuple(leaves.values()), cotangent)
    return {"result": result.detach(), **dict(zip(leaves, gradients, strict=True))}


def check(call: Call, device: str, backend: str | None, dtype: torch.dtype, deterministic: bool) -> dict[str, float]:
    """Return the errors of a call against the reference in float64, as shares of the largest number of each result."""
    tensors = {name: tensor.to(dtype).double() for name, tensor in call.tensors(device).items()}
    with backends.backend("reference"):
        exact = _run(call, tensors, torch.float64)
    torch.use_deterministic_algorithms(deterministic)
    try:
        with nullcontext() if backend is None else backends.backend(backend):
            found = _run(call, tensors, dtype)
    finally:
        torch.use_deterministic_algorithms(False)
    errors = {}
    for name, tensor in exact.items():
        difference: Any = (found[name].double() - tensor).abs().max() / tensor.abs().max().clamp_min(1e-3)
        errors[name] = float(difference)
    return errors


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description="Small calls for compute-sanitizer, checked.")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backend", default=None, help="force one (default: the one that comes first)")
    parser.add_argument("--only", default="", help="calls with this in their name")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    given = parser.parse_args(None if arguments is None else list(arguments))
    dtype = getattr(torch, given.dtype)
    allowed = 1e-4 if dtype == torch.float32 else 64 * torch.finfo(dtype).eps
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's matmuls ask for it in deterministic mode
    wrong = 0
    for call in CALLS:
        if given.only not in call.name:
            continue
        for deterministic in (False, True):
            errors = check(call, given.device, given.backend, dtype, deterministic)
            worst = max(errors, key=lambda name: errors[name])
            good = errors[worst] <= allowed
            wrong += not good
            what = f"{call.name}, {'deterministic' if deterministic else 'free'}"
            print(f"{'ok' if good else 'WRONG':<6} {what}: {worst} errs by {errors[worst]:.1e}", flush=True)
    print(f"{wrong} wrong" if wrong else "all agree with the reference")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
