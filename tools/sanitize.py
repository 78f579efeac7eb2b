"""Small calls that take every path of the kernels, held to the rule of ``tools.judge``: what compute-sanitizer watches.

compute-sanitizer --tool memcheck python tools/sanitize.py --device cuda --backend cuda
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fastcaps import backends, functional, ops
from fastcaps.functional import Window
from tools.judge import Bar

__all__ = ["CALLS", "Call", "SquashSum", "check", "main"]

_ROUTINGS = {
    "attention": functional.inverted_attention_routing,
    "dynamic": functional.dynamic_routing,
    "em": functional.em_routing,
    "heinsen": functional.heinsen_routing,
    "pool": functional.routing_pool,
}


@dataclass(frozen=True)
class Call:
    """One call: children ``[batch, (types, *grid) or types, C, D]`` to so many parents ``[C, E]``.

    ``extras`` are a bias and gates; of Heinsen's routing, children that are not there.
    """

    name: str
    batch: int
    types: int
    parents: int
    pose: tuple[int, int, int]
    grid: tuple[int, int] | None = None
    window: Window | None = None
    shared: bool = False
    extras: bool = False
    routing: str = "attention"
    options: tuple[tuple[str, Any], ...] = ()

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
        found = {"children": normal(self.batch, self.types, *grid, rows, inner)}
        if self.routing != "pool" or not self.shared:  # else votes are the poses themselves
            found["weight"] = normal(groups, self.parents, inner, columns) * inner**-0.5
        each = (self.batch, self.types, *grid)
        if self.routing == "attention":
            found["parents"] = normal(self.batch, self.parents, *places, rows, columns)
            if rows * columns > 1:  # LayerNorm of one number is left out
                found["norm_weight"] = 1 + 0.1 * normal(rows * columns)
                found["norm_bias"] = 0.1 * normal(rows * columns)
        if self.routing == "em":
            found["activations"] = normal(*each).sigmoid()
            found["beta_u"], found["beta_a"] = normal(self.parents), normal(self.parents)
        if self.routing == "heinsen":
            found["scores"] = normal(*each)
            found["beta_use"], found["beta_ignore"] = normal(groups, self.parents), normal(groups, self.parents)
        if self.extras and self.routing == "heinsen":
            found["scores"][:, -1] = -torch.inf
        elif self.extras and self.routing != "em":
            found["gate"] = normal(*each).sigmoid()
        if self.extras or self.routing == "heinsen":
            found["bias"] = 0.1 * normal(groups if self.shared else seen, self.parents, rows, columns)
        return {name: tensor.to(device) for name, tensor in found.items()}

    def run(self, tensors: dict[str, Tensor]) -> list[Tensor]:
        """Return the results of the call."""
        made = _ROUTINGS[self.routing](**tensors, **dict(self.options), window=self.window)  # type: ignore[arg-type]
        return [made] if isinstance(made, Tensor) else list(made)


@dataclass(frozen=True)
class SquashSum:
    """One call of squash_sum: its ``summands`` of capsules ``[batch, types * dim, *grid]``, with or without a ReLU."""

    name: str
    batch: int
    types: int
    dim: int
    grid: tuple[int, int]
    summands: str = "xayb"
    relu: bool = True

    def tensors(self, device: str) -> dict[str, Tensor]:
        """Return the arguments of the call, in float64."""
        generator = torch.Generator().manual_seed(0)
        channels = {"x": self.types * self.dim, "y": self.types * self.dim, "a": self.types, "b": self.types}
        shapes = {name: (self.batch, channels[name], *self.grid) for name in self.summands}
        made = {name: torch.randn(*shapes[name], generator=generator, dtype=torch.float64) for name in shapes}
        return {name: tensor.to(device) for name, tensor in made.items()}

    def run(self, tensors: dict[str, Tensor]) -> list[Tensor]:
        """Return the result of the call."""
        return [ops.squash_sum(**tensors, types=self.types, relu=self.relu)]


_GRID = Window(3, stride=2)
_PADDED = Window((2, 3), padding=1)

_ATTENTION = (
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
_WHOLE = (
    Call("dynamic, 1x8 to 1x16", 2, 17, 10, (1, 8, 16), routing="dynamic"),
    Call("dynamic, padded grid", 1, 2, 5, (2, 2, 3), (3, 4), _PADDED, extras=True, routing="dynamic"),
    Call("dynamic, children compete", 2, 9, 6, (1, 8, 16), routing="dynamic", options=(("compete", "children"),)),
    Call("dynamic, last turn only", 2, 9, 6, (1, 8, 16), routing="dynamic", options=(("detach", True),)),
    Call("pool, poses", 2, 40, 1, (1, 16, 16), shared=True, routing="pool"),
    Call("pool, many parents", 2, 5, 70, (1, 8, 16), extras=True, routing="pool"),
    Call("em, 4x4 grid", 1, 3, 32, (4, 4, 4), (5, 5), _GRID, routing="em"),
    Call("em, 4x4 set", 2, 33, 10, (4, 4, 4), extras=True, routing="em"),
    Call("em, more parents than a block holds", 1, 80, 530, (2, 2, 2), routing="em"),
    Call("heinsen, 4x4 shared", 2, 40, 64, (4, 4, 4), shared=True, extras=True, routing="heinsen"),
    Call("heinsen, 1x64 to 1x2", 2, 20, 64, (1, 64, 2), shared=True, extras=True, routing="heinsen"),
    Call("heinsen, k-means", 2, 12, 5, (1, 2, 2), routing="heinsen", options=(("model", "kmeans"),)),
)
_SQUASH_SUM = (
    SquashSum("squash_sum, 4 numbers", 2, 3, 4, (5, 7)),
    SquashSum("squash_sum, 16 numbers, several blocks", 1, 5, 16, (11, 13), "xy", relu=False),
    SquashSum("squash_sum, 19 numbers", 2, 2, 19, (3, 11), "xa"),
    SquashSum("squash_sum, one of everything", 1, 1, 1, (1, 1), "x", relu=False),
)
Calls = Call | SquashSum
CALLS: tuple[Calls, ...] = (*_ATTENTION, *_WHOLE, *_SQUASH_SUM)


def check(
    call: Call | SquashSum, device: str, backend: str | None, dtype: torch.dtype, deterministic: bool
) -> list[str]:
    """Return what is wrong with the results and gradients of a call, by the rule of :mod:`tools.judge`."""
    given = call.tensors(device)

    def run(tensors: Sequence[Tensor | None], name: str | None = "reference") -> dict[str, Tensor]:
        leaves = {key: tensor.requires_grad_() for key, tensor in zip(given, tensors, strict=True)}
        with nullcontext() if name is None else backends.backend(name):
            results = call.run(leaves)
            generator = torch.Generator().manual_seed(1)
            cotangents = [torch.randn(one.shape, generator=generator, dtype=torch.float64).to(one) for one in results]
            gradients = torch.autograd.grad(results, tuple(leaves.values()), cotangents)
        found = {f"result {k}" if k else "result": one.detach() for k, one in enumerate(results)}
        return found | {f"d{key}": gradient for key, gradient in zip(leaves, gradients, strict=True)}

    tensors = [tensor.to(dtype) for tensor in given.values()]
    bar = Bar(lambda moved: run([tensor.detach() for tensor in moved]), tensors)
    torch.use_deterministic_algorithms(deterministic)
    try:
        return bar.judge(run([tensor.detach() for tensor in tensors], backend)).complaints
    finally:
        torch.use_deterministic_algorithms(False)


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description="Small calls for compute-sanitizer, checked.")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backend", default=None, help="force one (default: the one that comes first)")
    parser.add_argument("--only", default="", help="calls with this in their name")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    given = parser.parse_args(None if arguments is None else list(arguments))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's matmuls ask for it in deterministic mode
    wrong = 0
    for call in CALLS:
        for deterministic in (False, True) if given.only in call.name else ():
            said = check(call, given.device, given.backend, getattr(torch, given.dtype), deterministic)
            wrong += bool(said)
            what = f"{call.name}, {'deterministic' if deterministic else 'free'}"
            print(f"{'WRONG' if said else 'ok':<6} {what}{': ' if said else ''}{'; '.join(said)}", flush=True)
    print(f"{wrong} wrong" if wrong else "all agree with the reference")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
