"""torch.compile in one graph with free sizes, and torch.export: every routing and every layer.

``aot_eager`` does all that inductor does but generate code; one test goes through inductor. After a second size a graph
must serve every further one: torch counts how many graphs it made. A row of each op and a few layers run always, the
others are marked slow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from features import BY_NAME, ROUTINGS, WINDOWS, Leaves, Routing, close, number
from torch import Tensor, nn
from torch._dynamo.utils import counters, maybe_enable_compiled_autograd
from torch.export import Dim

import fastcaps
from fastcaps import Window, backend
from fastcaps.compat.heinsen_routing import GenerativeMatrixRouting

ONE_OF_EACH_OP = ["attention-1", "attention-uniform", "dynamic-parents", "pool-weights", "em"]
SOME_LAYERS = ["attention-grid", "dynamic-set", "pool-window", "em-all-coordinates"]
SLOW = pytest.mark.slow
every_routing = pytest.mark.parametrize(
    "routing", [pytest.param(row, marks=() if row.name in ONE_OF_EACH_OP else SLOW) for row in ROUTINGS], ids=str
)
one_of_each_op = pytest.mark.parametrize("routing", [BY_NAME[name] for name in ONE_OF_EACH_OP], ids=str)
every_backend = pytest.mark.parametrize("name", ["cpu", "reference"])


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()
    counters.clear()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def compiled(
    function: Callable[..., Any], engine: str = "aot_eager", dynamic: bool | None = True
) -> Callable[..., Any]:
    return torch.compile(function, backend=engine, fullgraph=True, dynamic=dynamic)


@pytest.mark.parametrize("window", [None, pytest.param(WINDOWS["grid"], marks=pytest.mark.slow)], ids=WINDOWS)
@every_routing
def test_training_step_in_one_graph_for_any_batch(routing: Routing, window: Window | None) -> None:
    run = compiled(lambda leaves: routing.ours(leaves, window, coefficients=True))
    for batch in (2, 5, 7):
        leaves = {k: t.requires_grad_() for k, t in routing.tensors(window, batch=batch).items()}
        found, wanted = run(leaves), routing.plain(leaves, window, coefficients=True)
        close(found, wanted)
        gradients = []
        for results in (found, wanted):
            results.pop("coefficients")
            values = torch.autograd.grad(
                number(results), list(leaves.values()), allow_unused=True, materialize_grads=True
            )
            gradients.append(dict(zip(leaves, values, strict=True)))
        close(*gradients)
    assert graphs() <= 2


@one_of_each_op
def test_inductor(routing: Routing) -> None:
    run = compiled(lambda leaves: routing.ours(leaves), "inductor")
    for batch in (2, 5):
        given = routing.tensors(dtype=torch.float32, batch=batch)
        close(run(given), routing.ours(given), rtol=1e-4, atol=1e-5)


@one_of_each_op
def test_autocast_in_one_graph(routing: Routing) -> None:
    given = routing.tensors(dtype=torch.float32)

    def call(leaves: Leaves) -> Leaves:
        with torch.autocast("cpu", torch.bfloat16):
            return routing.ours(leaves)

    wanted, found = call(given), compiled(call)(given)
    assert {key: tensor.dtype for key, tensor in found.items()} == {key: t.dtype for key, t in wanted.items()}
    close(found, wanted, rtol=2e-2, atol=2e-2)


# ---- layers, with free sizes -----------------------------------------------------------------------------------------

Shapes = list[tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class Case:
    """A layer with inputs of many sizes; ``free`` names the dimensions of each input that may change."""

    make: Callable[[], nn.Module]
    shapes: Shapes
    free: tuple[str, ...]

    def inputs(self, shapes: tuple[tuple[int, ...], ...]) -> tuple[Tensor, ...]:
        return tuple(torch.rand(shape) if k else torch.randn(shape) for k, shape in enumerate(shapes))

    def dims(self) -> tuple[dict[int, Any], ...]:
        """Free sizes, of which export finds the least; one that was frozen fails when the program meets another."""
        return tuple({k: Dim.AUTO for k, letter in enumerate(text) if letter != "."} for text in self.free)


def grids(channels: int, *rest: int) -> Shapes:
    sizes = [(2, 6, 7), (3, 9, 5), (4, 8, 8), (5, 7, 11), (2, 10, 6)]
    return [((b, channels, h, w, *rest),) for b, h, w in sizes]


def with_numbers(shapes: Shapes) -> Shapes:
    """The same with a second input: a number for each child."""
    return [(shape, shape[:-1]) for (shape,) in shapes]


SETS: Shapes = [((b, i, 4),) for b, i in ((2, 6), (3, 9), (4, 5), (5, 13), (6, 7))]
HEINSEN: Shapes = [((b, i), (b, i, 2, 4)) for b, i in ((2, 6), (3, 9), (4, 5), (5, 13), (6, 7))]
CASES = {
    "attention-set": Case(lambda: fastcaps.InvertedAttentionRouting(6, 3, 4, 4, share=True), SETS, ("bi.",)),
    "attention-parents": Case(
        lambda: fastcaps.InvertedAttentionRouting(6, 3, 4, 4),
        [((b, 6, 4), (b, 3, 4)) for b in (4, 5, 2)],
        ("b..", "b.."),
    ),
    "attention-grid": Case(
        lambda: fastcaps.InvertedAttentionRouting(2, 3, 4, 4, kernel_size=3, stride=2, bias=True),
        grids(2, 4),
        ("b.hw.",),
    ),
    "dynamic-set": Case(lambda: fastcaps.DynamicRouting(6, 3, 4, 5, pose="vector", share=True), SETS, ("bi.",)),
    "dynamic-all": Case(
        lambda: fastcaps.DynamicRouting(2, 3, 4, 5, pose="vector", share=True, kernel_size="all"),
        grids(2, 4),
        ("b.hw.",),
    ),
    "em-grid": Case(
        lambda: fastcaps.EMRouting(2, 3, 4, 4, kernel_size=3), with_numbers(grids(2, 4)), ("b.hw.", "b.hw")
    ),
    "em-all-coordinates": Case(
        lambda: fastcaps.EMRouting(2, 3, 4, 4, kernel_size="all", share=True, coordinates=True),
        with_numbers(grids(2, 4)),
        ("b.hw.", "b.hw"),
    ),
    "heinsen-set": Case(
        lambda: fastcaps.HeinsenRouting(None, 3, 4, 4), [((b, i, 4), (b, i)) for ((b, i, _),) in SETS], ("bi.", "bi")
    ),
    "heinsen-compat": Case(lambda: GenerativeMatrixRouting(-1, 3, 2, 4, 4), HEINSEN, ("bi", "bi..")),
    "pool": Case(lambda: fastcaps.RoutingPool2d(4), grids(8), ("b.hw",)),
    "pool-window": Case(lambda: fastcaps.RoutingPool2d(4, kernel_size=2), grids(8), ("b.hw",)),
    "pool-one": Case(lambda: fastcaps.RoutingPool2d(4, parents=1), grids(8), ("b.hw",)),
    "pool-parents": Case(lambda: fastcaps.RoutingPool2d(4, parents=3, in_channels=8), grids(8), ("b.hw",)),
    "pool-average": Case(lambda: fastcaps.RoutingPool2d(4, sharpness=0.0), grids(8), ("b.hw",)),
}
every_layer = pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=() if name in SOME_LAYERS else SLOW) for name, case in CASES.items()]
)
some_layers = pytest.mark.parametrize("case", [CASES[name] for name in SOME_LAYERS], ids=SOME_LAYERS)


def flat(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


def same(found: Any, wanted: Any) -> None:
    for got, want in zip(flat(found), flat(wanted), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@every_layer
def test_layer_in_one_graph_for_any_size(case: Case) -> None:
    """As users compile and train: the first size is taken as fixed, the second makes a graph for all."""
    layer = case.make()
    run = compiled(layer, dynamic=None)
    for shapes in case.shapes:
        inputs = tuple(tensor.requires_grad_() for tensor in case.inputs(shapes))
        found = run(*inputs)
        same(found, layer(*inputs))
        sum(tensor.sum() for tensor in flat(found)).backward()
    assert graphs() <= 3, "a graph for almost every size"


@some_layers
def test_layer_with_sizes_free_from_the_start(case: Case) -> None:
    layer = case.make()
    run = compiled(layer)
    for shapes in case.shapes[:2]:
        inputs = case.inputs(shapes)
        same(run(*inputs), layer(*inputs))


@pytest.mark.parametrize("kind", [pytest.param("primary", marks=SLOW), "matrix", pytest.param("vector", marks=SLOW)])
def test_inductor_takes_images_of_two_sizes(kind: str) -> None:
    """Behind a convolution, whose result has sizes that are no mere symbols."""
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3), fastcaps.PrimaryCapsules(8, 2, 4)]
    if kind != "primary":
        layers.append(fastcaps.InvertedAttentionRouting(2, 3, 4, 4, pose=kind, kernel_size=2))
        layers.append(fastcaps.InvertedAttentionRouting(3, 5, 4, 4, pose=kind, kernel_size="all", share=True))
    model = nn.Sequential(*layers)
    run = compiled(model, "inductor", None if kind == "primary" else True)
    for size in ((9, 8), (7, 11)):
        images = torch.randn(2, 3, *size)
        same(run(images), model(images))


@every_layer
def test_exported_program_serves_every_size(case: Case) -> None:
    layer = case.make().eval()
    run = torch.export.export(layer, case.inputs(case.shapes[0]), dynamic_shapes=case.dims()).module()
    for shapes in case.shapes:
        inputs = case.inputs(shapes)
        same(run(*inputs), layer(*inputs))


@every_backend
@some_layers
def test_exported_by_one_backend_and_run_by_another(case: Case, name: str) -> None:
    """A backend that was forced while exporting is not part of the program, and no size is frozen by it."""
    layer = case.make().eval()
    with backend(name):
        run = torch.export.export(layer, case.inputs(case.shapes[0]), dynamic_shapes=case.dims()).module()
    inputs = case.inputs(case.shapes[-1])
    same(run(*inputs), layer(*inputs))
    with backend("reference"):
        same(run(*inputs), layer(*inputs))


@every_routing
def test_exported_program_holds_ops_not_formulas(routing: Routing) -> None:
    """What is exported is served by the kernels of the machine that loads it; no vote is stored there."""

    class Layer(nn.Module):
        def forward(self, given: Leaves) -> Leaves:
            return routing.ours(given)

    program = torch.export.export(Layer(), (routing.tensors(),))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    if routing.name != "attention-uniform":  # which is a matrix product
        assert any(name.startswith("fastcaps.") for name in names), names


def test_large_own_weights_in_one_graph() -> None:
    """From 2**23 numbers on the first iteration goes another way, which must not break the graph."""
    layer = fastcaps.InvertedAttentionRouting(32, 8, 64, 64, pose="vector", kernel_size=3)
    children = torch.randn(1, 32, 4, 3, 64)
    assert layer.weight.numel() >= 2**23
    with torch.no_grad():
        found = compiled(layer)(children)
        torch.testing.assert_close(found, layer(children), rtol=1e-4, atol=1e-4)


def test_compiled_autograd_sees_an_eager_graph() -> None:
    children, weight = torch.randn(2, 5, 2, 3, requires_grad=True), torch.randn(5, 3, 3, 2, requires_grad=True)
    found = []
    for compiled in (False, True):
        with maybe_enable_compiled_autograd(compiled, fullgraph=False, dynamic=False):
            loss = fastcaps.functional.dynamic_routing(children, weight).square().sum()
            found.append(torch.autograd.grad(loss, (children, weight)))
    torch.testing.assert_close(found[1], found[0])


def test_each_window_makes_its_own_graph_and_no_more() -> None:
    routing = ROUTINGS[2]
    given = routing.tensors(WINDOWS["grid"])
    run = compiled(lambda leaves, window: routing.ours(leaves, window))
    for _ in range(2):
        run(given, WINDOWS["grid"])
        run(given, Window((2, 3), (2, 1), (1, 0), (1, 1)))
    assert graphs() == 1
