"""The public routing functions, small and with odd sizes: what every suite must know of one.

:data:`ROUTINGS` has a row for each function and setting; suites of torch's features, of odd arguments, of explanations
and of processes iterate it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
class Routing:
    """A public function with some settings."""

    name: str
    function: Callable[..., Any]
    leaves: tuple[str, ...]  # the tensors that it is given
    settings: Mapping[str, Any]
    child: str = "gate"  # the leaf that has a number for each child
    results: tuple[str, ...] = ("poses",)  # the parts of what it returns
    iterations: int = 3  # how often its votes are read
    first: bool = True  # whether the first iteration has no query and no state
    moments: int = 1  # the sums over the votes of an iteration
    library: bool = False  # whether the library may run the first iteration
    ops: int = 1  # the calls of an op; 0: it has none, and no library's first iteration

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
        types: int | None = None,
        grid: tuple[int, ...] = (4, 5),
        parents: int = 3,
        pose: tuple[int, int, int] = (2, 3, 5),
    ) -> Leaves:
        """Return its tensors, drawn anew but always the same; ``grid`` counts with a window alone."""
        types = types or (5 if window is None else 2)
        rows, depth, columns = pose if "weight" in self.leaves else (*pose[:2], pose[1])
        places = () if window is None else grid
        table = (types * (1 if window is None else window.positions), parents)
        shapes = {
            "children": (batch, types, *places, rows, depth),
            "weight": (*table, depth, columns),
            "bias": (*table, rows, columns),
            **dict.fromkeys(("gate", "activations", "scores"), (batch, types, *places)),
            "parents": (batch, parents, *(window.output_size(*grid) if window else ()), rows, columns),
            **dict.fromkeys(("norm_weight", "norm_bias"), (rows * columns,)),
            **dict.fromkeys(("beta_u", "beta_a"), (parents,)),
            **dict.fromkeys(("beta_use", "beta_ignore", "prior"), table),
        }
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
    Routing(
        "dynamic-same-prior",
        dynamic_routing,
        ("children", "gate", "prior"),
        {"iterations": 3, "weight": None, "parents": 3},
        ops=0,
    ),
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


class Called(TorchDispatchMode):
    """Notes the name and the arguments of every op that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func.name(), args))
        return func(*args, **(kwargs or {}))


class NothingRuns(TorchDispatchMode):
    """Within it no routing and no product of the library may start: what is wrong must be said before."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fastcaps" or func.overloadpacket in _PRODUCTS:
            raise AssertionError(f"{func} ran")
        return func(*args, **(kwargs or {}))


_PRODUCTS = {
    getattr(torch.ops.aten, name) for name in ("mm", "bmm", "addmm", "baddbmm", "convolution", "native_layer_norm")
}


def number(results: Mapping[str, Tensor] | Sequence[Tensor]) -> Tensor:
    """Return one number that depends on all results, in different ways."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in results.values() if isinstance(results, Mapping) else results:
        slope = torch.linspace(-1, 2, tensor.numel(), dtype=torch.float64).view(tensor.shape)
        total = total + (tensor.double() * slope).sum()
    return total


def with_gradients(found: Leaves, leaves: Leaves, **options: bool) -> Leaves:
    """Return results and the gradients of :func:`number` of them, by name."""
    given = list(leaves.values())
    gradients = torch.autograd.grad(number(found), given, materialize_grads=True, allow_unused=True, **options)
    return found | {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}


def training(routing: Routing, leaves: Leaves, window: Window | None = None) -> Leaves:
    """Return a routing's results and gradients by name."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in leaves.items()}
    return with_gradients(routing.ours(leaves, window), leaves)
