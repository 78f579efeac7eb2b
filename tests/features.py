"""The public routing functions, small and with odd sizes: what every suite must know of one.

:data:`ROUTINGS` has a row for each function and setting; suites of torch's features, of odd arguments, of explanations
and of processes iterate it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastcaps import Window
from fastcaps.functional import dynamic_routing, em_routing, heinsen_routing, inverted_attention_routing, routing_pool

WINDOWS = {"set": None, "grid": Window((2, 3), (2, 1), (1, 0), (1, 1))}
Leaves = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """B, the children's types of a set or of each position of a grid, its height and width, M, C, D and E."""

    batch: int = 3
    types: int = 5
    grid: tuple[int, ...] = ()
    parents: int = 3
    pose: tuple[int, int, int] = (2, 3, 5)

    def shapes(self, window: Window | None) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors that a routing function can be given."""
        rows, depth, columns = self.pose
        count = self.types * (1 if window is None else window.positions)
        size = () if window is None else window.output_size(*self.grid)
        table = (count, self.parents)
        return {
            "children": (self.batch, self.types, *self.grid, rows, depth),
            "weight": (*table, depth, columns),
            "bias": (*table, rows, columns),
            **dict.fromkeys(("gate", "activations", "scores"), (self.batch, self.types, *self.grid)),
            "parents": (self.batch, self.parents, *size, rows, columns),
            **dict.fromkeys(("norm_weight", "norm_bias"), (rows * columns,)),
            **dict.fromkeys(("beta_u", "beta_a"), (self.parents,)),
            **dict.fromkeys(("beta_use", "beta_ignore", "prior"), table),
        }


@dataclass(frozen=True)
class Routing:
    """A public function with some settings.

    ``leaves``: the tensors that it is given, of which ``child`` has a number for each child. ``results``: the parts of
    what it returns. ``iterations``: how often its votes are read; ``first``: whether the first has no query and no
    state; ``moments``: the sums over the votes of an iteration. ``library``: whether the library may run the first
    iteration; ``ops``: the calls of an op.
    """

    name: str
    function: Callable[..., Any]
    leaves: tuple[str, ...]
    settings: Mapping[str, Any]
    child: str = "gate"
    results: tuple[str, ...] = ("poses",)
    iterations: int = 3
    first: bool = True
    moments: int = 1
    library: bool = False
    ops: int = 1

    def __str__(self) -> str:
        return self.name

    def ours(self, given: Leaves, window: Window | None = None, coefficients: bool = False, **other: Any) -> Leaves:
        """Return what the public function does, by name."""
        found = self.function(**given, window=window, return_coefficients=coefficients, **{**self.settings, **other})
        names = self.results + (("coefficients",) if coefficients else ())
        return {name: found if isinstance(found, Tensor) else getattr(found, name) for name in names}

    def tensors(
        self,
        window: Window | None = None,
        dtype: torch.dtype = torch.float64,
        batch: int = 3,
        seed: int = 7,
        **sizes: Any,
    ) -> Leaves:
        """Return its tensors, drawn anew but always the same."""
        some = {"types": 2, "grid": (4, 5), **sizes} if window is not None else {**sizes, "grid": ()}
        if "weight" not in self.leaves:
            rows, depth, _ = some.get("pose", (2, 3, 3))
            some["pose"] = rows, depth, depth
        shapes = Sizes(batch, **some).shapes(window)
        draw = torch.Generator().manual_seed(seed)
        given = {name: torch.randn(shapes[name], generator=draw, dtype=torch.float64) for name in self.leaves}
        if self.child in given and self.child != "scores":  # which are logits
            given[self.child] = given[self.child].sigmoid()
        return {name: tensor.to(dtype) for name, tensor in given.items()}


VOTES = ("children", "weight", "bias", "gate")
AFFINE = ("norm_weight", "norm_bias")


def _attention(name: str, *more: str, **settings: Any) -> Routing:
    iterations, first = settings.get("iterations", 1), "parents" not in more
    options = {"iterations": iterations, "first": first, "library": first, "ops": int(iterations > 1 or not first)}
    return Routing(name, inverted_attention_routing, (*VOTES, *more), settings, **options)


def _dynamic(name: str, *more: str, **settings: Any) -> Routing:
    ops = 3 if "eps" in settings else 1  # then every iteration is a separate op
    return Routing(name, dynamic_routing, (*VOTES, *more), {"iterations": 3, **settings}, ops=ops)


def _pool(name: str, *leaves: str) -> Routing:
    return Routing(name, routing_pool, leaves, {"iterations": 2, "sharpness": 0.7})


def _heinsen(model: str) -> Routing:
    leaves, results = (*VOTES[:3], "scores", "beta_use", "beta_ignore"), ("poses", "scores", "variances")
    settings = {"iterations": 3, "model": model}
    return Routing(f"heinsen-{model}", heinsen_routing, leaves, settings, "scores", results, moments=2)


ROUTINGS = [
    _attention("attention-uniform", *AFFINE),
    _attention("attention-1", "parents", *AFFINE),
    _attention("attention-3", *AFFINE, iterations=3),
    _attention("attention-3-plain", "parents", iterations=3, normalize=False),
    _dynamic("dynamic-parents"),
    _dynamic("dynamic-children", compete="children"),
    _dynamic("dynamic-detach", detach=True),
    _dynamic("dynamic-children-detach", compete="children", detach=True),
    _dynamic("dynamic-leaky", leaky=True),
    _dynamic("dynamic-prior", "prior", eps=1e-3),
    _dynamic("dynamic-children-prior", "prior", compete="children", eps=1e-3),
    _pool("pool", "children", "gate"),
    _pool("pool-weights", *VOTES),
    Routing(
        "em",
        em_routing,
        (*VOTES[:3], "activations", "beta_u", "beta_a"),
        {"iterations": 3, "inverse_temperature": 0.3},
        "activations",
        ("poses", "activations"),
        moments=2,
    ),
    _heinsen("gaussian"),
    _heinsen("kmeans"),
]
BY_NAME = {routing.name: routing for routing in ROUTINGS}
FUNCTIONS = {
    row.function.__name__: row for row in sorted(ROUTINGS, key=lambda row: len(row.leaves)) if "prior" not in row.leaves
}
"""The row of each function that is given most, by the function's name."""


def close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], rtol: float = 1e-8, atol: float = 1e-9) -> None:
    """Assert that two sets of results are equal, name by name."""
    torch.testing.assert_close(dict(found), dict(wanted), rtol=rtol, atol=atol)


class Largest(TorchDispatchMode):
    """Sees how many numbers the largest tensor has that anything makes, or that autograd keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.see, lambda x: x)

    def see(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            self.see(x)
        return result


class NothingRuns(TorchDispatchMode):
    """Within it no routing and no product of the library may start: what is wrong must be said before."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fastcaps" or func.overloadpacket in _PRODUCTS:
            raise AssertionError(f"{func} ran")
        return func(*args, **(kwargs or {}))


_PRODUCTS = {
    getattr(torch.ops.aten, name) for name in ("mm", "bmm", "addmm", "baddbmm", "convolution", "native_layer_norm")
}


def number(results: Mapping[str, Tensor]) -> Tensor:
    """Return one number that depends on all results, in different ways."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in results.values():
        slope = torch.linspace(-1, 2, tensor.numel(), dtype=torch.float64).view(tensor.shape)
        total = total + (tensor.double() * slope).sum()
    return total


def training(routing: Routing, leaves: Leaves, window: Window | None = None) -> Leaves:
    """Return results, and the gradients of :func:`number` of them, by name."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in leaves.items()}
    found = routing.ours(leaves, window)
    gradients = torch.autograd.grad(number(found), list(leaves.values()), materialize_grads=True, allow_unused=True)
    return found | {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
