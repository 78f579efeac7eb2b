"""The routing layers that there are: one row each, which the suites of layers iterate.

A row says what a layer returns, which of the paper's loops it must agree with, and with which of its options.
A new layer needs a row here. Below: small values in public layout, and positions as the oracle has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import oracle_routings as loops
import torch
from features import number
from oracle_routings import Seen, positions
from torch import Tensor

from fastcaps import Window, nn
from fastcaps.results import Capsules, Gaussians, Routed, RoutedCapsules, RoutedGaussians
from fastcaps.votes import SET_WINDOW, as_grid, to_op

SIZE = 5, 4  # of all grids
FORMS: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "set": ((6, 3, 4, 4), {"bias": True}),
    "vector": ((6, 3, 3, 5), {"pose": "vector"}),
    "rows": ((6, 3, 6, 9), {"pose": 3, "share": True, "bias": True}),
    "grid": ((2, 3, 3, 2), {"pose": "vector", "kernel_size": (3, 2), "stride": 2, "padding": 1, "bias": True}),
    "dilated": ((2, 3, 4, 4), {"kernel_size": 2, "dilation": 2, "share": True, "bias": True}),
    "identity": ((2, 3, 4, 4), {"matrices": False, "kernel_size": 2, "bias": True}),
    "all": ((2, 3, 4, 4), {"kernel_size": "all", "share": True}),
}


def attention(layer: Any, seen: Seen, iterations: int) -> tuple[Any, ...]:
    poses, shares = layer.first_poses, None
    for _ in range(iterations):
        poses, shares = loops.attend(seen, poses, layer.out_dim**-0.5)
        if layer.norm is not None:
            poses = loops.layer_norm(poses, layer.norm.weight, layer.norm.bias, layer.eps)
    return poses, shares


def dynamic(layer: Any, seen: Seen, iterations: int) -> tuple[Any, ...]:
    prior = None if layer.prior is None else layer.prior[[i % layer.groups for i in seen.index]]
    return loops.dynamic(seen, iterations, layer.compete, layer.leaky, prior, layer.eps)


def em(layer: Any, seen: Seen, iterations: int) -> tuple[Any, ...]:
    given, first = layer.inverse_temperature, 1.0 if layer.first_coefficients == "ones" else None
    if given is None:
        given = (lambda _: 1.0) if layer.normalize_cost else lambda t: 0.01 * (1 - 0.95 ** (t + 1))
    given = given if isinstance(given, list) else [given] * iterations
    temperatures = [each(t) if callable(each) else each for t, each in enumerate(given)]
    return loops.em(seen, layer.beta_u, layer.beta_a, temperatures, layer.eps, first, layer.normalize_cost)


def heinsen(layer: Any, seen: Seen, iterations: int) -> tuple[Any, ...]:
    ignore = layer.beta_use if layer.beta_ignore is None else layer.beta_ignore
    return loops.heinsen(seen, layer.beta_use, ignore, iterations, layer.model, layer.eps)


def pool(layer: Any, seen: Seen, iterations: int) -> tuple[Any, ...]:
    return loops.vector_normed(seen, iterations, layer.sharpness)


@dataclass(frozen=True)
class Row:
    """One class of routing layers."""

    name: str
    kind: Any  # the class
    results: tuple[type, type]  # what it returns without and with coefficients
    # the paper's procedure at one position, of a layer, the children seen there and a number of iterations: it returns
    # the parts of the result, then the coefficients
    loop: Callable[[Any, Seen, int], tuple[Any, ...]]
    std: Callable[[int, int, int], float]  # the standard deviation of the matrices at the start, of M, D and I
    parameters: set[str]  # the names of all its parameters with a bias
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)  # options of its own for which the loop holds
    options: dict[str, Any] = field(default_factory=dict)  # of every layer here: they make the loop well conditioned
    positive: str = "eps"  # an option of its own that must be a finite number, at least 0

    def __str__(self) -> str:
        return self.name

    def make(self, form: str = "set", **changes: Any) -> Any:
        """Return a layer in float64, every parameter random so that none is invisible."""
        sizes, options = FORMS[form]
        return self.drawn(*sizes, **{**options, **self.options, **changes})

    def drawn(self, *sizes: Any, **options: Any) -> Any:
        """Return a layer of the class in float64 with random parameters."""
        torch.manual_seed(0)
        layer = self.kind(*sizes, **{"dtype": torch.float64, **options})
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn_like(parameter))
        return layer

    def call(self, layer: Any, children: Tensor, numbers: Tensor | None = None, **options: Any) -> tuple[Tensor, ...]:
        """Return the parts of a result; ``numbers`` of the children are activations or scores."""
        found = layer(children, *((None,) if layer.takes_parents else ()), numbers, **options)
        return found if isinstance(found, tuple) else (found,)


LAYERS = (
    Row("attention", nn.InvertedAttentionRouting, (Tensor, Routed), attention,
        lambda parents, depth, seen: (parents / (depth * seen)) ** 0.5, {"weight", "bias", "norm.weight", "norm.bias"},
        {"plain": {"layer_norm": False}, "learned": {"start": "learned"}, "random": {"start": "random"}},
        {"iterations": 3}),
    Row("dynamic", nn.DynamicRouting, (Tensor, Routed), dynamic,
        lambda parents, depth, seen: (parents / (depth * seen)) ** 0.5, {"weight", "bias"}, {
            "children": {"compete": "children"},
            "leaky": {"leaky": True},
            "detach": {"detach": True},
            "prior": {"prior": "learned", "eps": 0.3},
            "random": {"prior": "random", "compete": "children"},
        }),
    Row("em", nn.EMRouting, (Capsules, RoutedCapsules), em,
        lambda parents, depth, seen: depth**-0.5, {"weight", "bias", "beta_u", "beta_a"}, {
            "customary": {"inverse_temperature": None},
            "numbers": {"inverse_temperature": [0.1, 0.2, 0.3]},
            "function": {"inverse_temperature": lambda t: 0.2 * (t + 1), "iterations": 4},
            "ones": {"first_coefficients": "ones"},
            "normalized": {"normalize_cost": True, "inverse_temperature": None},
            "all": {"normalize_cost": True, "first_coefficients": "ones", "inverse_temperature": [0.5, 1.0, 2.0]},
        }, {"eps": 1e-3, "inverse_temperature": 0.5}),
    Row("heinsen", nn.HeinsenRouting, (Gaussians, RoutedGaussians), heinsen,
        lambda parents, depth, seen: 1 / depth, {"weight", "bias", "beta_use", "beta_ignore"},
        {"kmeans": {"model": "kmeans"}, "single-beta": {"single_beta": True, "iterations": 2}}),
    Row("pool", nn.RoutingPool, (Tensor, Routed), pool, lambda parents, depth, seen: depth**-0.5, {"weight", "bias"},
        {"sharp": {"sharpness": 3.0, "detach": True}, "average": {"iterations": 0}}, positive="sharpness"),
)  # fmt: skip


def draw_for(layer: Any, batch: int = 2) -> tuple[Tensor, Tensor]:
    """Return children, and a number for each that serves as activation and as score."""
    generator = torch.Generator().manual_seed(1)
    grid = SIZE if layer.on_grid else ()
    children = torch.randn((batch, layer.in_capsules, *grid, layer.in_dim), generator=generator, dtype=torch.float64)
    return children, torch.rand(children.shape[:-1], generator=generator, dtype=torch.float64)


# ---- small numbers, and single positions -----------------------------------------------------------------------------

CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(groups: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Return children, weight and bias of a small set in public layout."""
    return draw(2, 6, 2, 2), draw(groups, 3, 2, 2, seed=1), draw(6, 3, 2, 2, seed=2)


def seen_by(
    window: Window | None, children: Tensor, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None
) -> Iterator[tuple[tuple[int, int, int], Seen]]:
    """Yield every position with its children, as the oracle wants them."""
    place = as_grid if window is None else lambda tensor: to_op(tensor, window)
    gates = None if gate is None else place(gate)
    yield from positions(place(children), weight, bias, gates, SET_WINDOW if window is None else window.spec)


def expect(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.flatten(), expected.flatten(), **CLOSE)


def at(result: Tensor, window: Window | None, place: tuple[int, int, int], coefficients: bool = False) -> Tensor:
    """Return one position of a public result."""
    if window is None:
        return as_grid(result)[place]
    return (result if coefficients else to_op(result, window))[place]


def gradients(results: tuple[Tensor, ...], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(number(results), leaves, allow_unused=True, materialize_grads=True)
