"""torch.compile in one graph with free sizes, and torch.export: every routing, and layers of many sizes.

``aot_eager`` does all that inductor does but generate code; inductor runs once for each op and for a network. A graph
with free sizes must serve every size: torch counts how many graphs it made. A row of each function runs always, the
others are marked slow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from features import BY_NAME, FUNCTIONS, ROUTINGS, WINDOWS, Leaves, Routing, close, training, with_gradients
from torch import Tensor, nn
from torch._dynamo.utils import counters, maybe_enable_compiled_autograd
from torch.export import Dim

import fastcaps
from fastcaps import Window, backend

ONE_OF_EACH = list(FUNCTIONS.values())
SLOW = pytest.mark.slow
every_routing = pytest.mark.parametrize(
    "routing", [pytest.param(row, marks=() if row in ONE_OF_EACH else SLOW) for row in ROUTINGS], ids=str
)
one_of_each = pytest.mark.parametrize("routing", ONE_OF_EACH, ids=str)


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


@every_routing
def test_training_step_in_one_graph_for_any_batch(routing: Routing) -> None:
    window = None if routing in ONE_OF_EACH else WINDOWS["grid"]
    run = compiled(lambda leaves: routing.ours(leaves, window))
    for batch in (7, 11):  # equal to no other size, which a graph would take for the same
        leaves = {k: t.requires_grad_() for k, t in routing.tensors(window, batch=batch).items()}
        close(with_gradients(run(leaves), leaves), training(routing, leaves, window))
    assert graphs() == 1


@pytest.mark.parametrize("name", ["attention-1", "pool-weights", "em"])
def test_inductor(name: str) -> None:
    routing = BY_NAME[name]
    run = compiled(lambda leaves: routing.ours(leaves, coefficients=True), "inductor")
    for batch in (2, 5):
        given = routing.tensors(dtype=torch.float32, batch=batch)
        close(run(given), routing.ours(given, coefficients=True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["attention-1", "heinsen-gaussian"])
def test_autocast_in_one_graph(name: str) -> None:
    routing = BY_NAME[name]
    given = routing.tensors(dtype=torch.float32)

    def call(leaves: Leaves) -> Leaves:
        with torch.autocast("cpu", torch.bfloat16):
            return routing.ours(leaves)

    close(compiled(call)(given), call(given), rtol=2e-2, atol=2e-2)  # dtypes too


# ---- layers, with free sizes -----------------------------------------------------------------------------------------

SETS = [((b, i, 4),) for b, i in ((2, 6), (3, 9), (4, 5), (5, 13), (6, 7))]
SIZES = [(2, 6, 7), (3, 9, 5), (4, 8, 8), (5, 7, 11), (2, 10, 6)]
GRIDS, MAPS = [((b, 2, h, w, 4),) for b, h, w in SIZES], [((b, 8, h, w),) for b, h, w in SIZES]
EM = [(shape, shape[:-1]) for (shape,) in GRIDS]
CASES: dict[str, tuple[Callable[[], nn.Module], list[Any], tuple[str, ...]]] = {
    "attention-grid": (
        lambda: fastcaps.InvertedAttentionRouting(2, 3, 4, 4, kernel_size=3, stride=2, bias=True), GRIDS, ("b.hw.",)
    ),
    "dynamic-set": (lambda: fastcaps.DynamicRouting(6, 3, 4, 5, pose="vector", share=True), SETS, ("bi.",)),
    "em-all-coordinates": (
        lambda: fastcaps.EMRouting(2, 3, 4, 4, kernel_size="all", share=True, coordinates=True), EM, ("b.hw.", "b.hw")
    ),
    "pool-window": (lambda: fastcaps.RoutingPool2d(4, kernel_size=2), MAPS, ("b.hw",)),
}  # fmt: skip
every_layer = pytest.mark.parametrize("layer", CASES)


def inputs(shapes: tuple[tuple[int, ...], ...]) -> tuple[Tensor, ...]:
    return tuple(torch.rand(shape) if k else torch.randn(shape) for k, shape in enumerate(shapes))


def same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@every_layer
def test_layer_in_one_graph_for_any_size(layer: str) -> None:
    """As users compile and train: the first size is taken as fixed, the second makes a graph for all."""
    make, sizes, _ = CASES[layer]
    module = make()
    run = compiled(module, dynamic=None)
    for shapes in sizes:
        given = tuple(tensor.requires_grad_() for tensor in inputs(shapes))
        found = run(*given)
        same(found, module(*given))
        sum(tensor.sum() for tensor in ((found,) if isinstance(found, Tensor) else found)).backward()
    assert graphs() <= 3, "a graph for almost every size"


@every_layer
def test_exported_program_serves_every_size(layer: str) -> None:
    """A backend that was forced while exporting is not part of the program; a size that was frozen would fail."""
    make, sizes, free = CASES[layer]
    module = make().eval()
    dims = tuple({k: Dim.AUTO for k, letter in enumerate(text) if letter != "."} for text in free)
    with backend("reference"):
        run = torch.export.export(module, inputs(sizes[0]), dynamic_shapes=dims).module()
    for shapes in sizes:
        given = inputs(shapes)
        same(run(*given), module(*given))


@torch.no_grad()
def test_inductor_takes_images_of_two_sizes() -> None:
    """Grids behind a convolution have sizes that are no mere symbols; the results are views whose strides are products
    of them."""
    before = nn.Sequential(nn.Conv2d(3, 8, 3), fastcaps.PrimaryCapsules(8, 2, 4))
    routings = [kind(2, 3, 4, 4, kernel_size=2) for kind in (fastcaps.InvertedAttentionRouting, fastcaps.EMRouting)]

    def network(images: Tensor) -> tuple[Tensor, ...]:
        children = before(images)
        return routings[0](children), *routings[1](children)

    run = torch._inductor.config.patch(force_disable_caches=True)(compiled(network, "inductor"))  # they hide failures
    for size in ((2, 3, 9, 8), (5, 3, 7, 11)):
        images = torch.randn(size)
        same(run(images), network(images))


@every_routing
def test_exported_program_holds_ops_not_formulas(routing: Routing) -> None:
    """What is exported is served by the kernels of the machine that loads it; no vote is stored there."""

    class Layer(nn.Module):
        def forward(self, given: Leaves) -> Leaves:
            return routing.ours(given)

    program = torch.export.export(Layer(), (routing.tensors(),))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    if routing.ops:  # else it is a matrix product
        assert any(name.startswith("fastcaps.") for name in names), names


def test_large_own_weights_in_one_graph() -> None:
    """From 2**23 numbers on the first iteration goes another way, which must not break the graph."""
    layer = fastcaps.InvertedAttentionRouting(32, 8, 64, 64, pose="vector", kernel_size=3)
    children = torch.randn(1, 32, 4, 3, 64)
    assert layer.weight.numel() >= 2**23
    with torch.no_grad():
        torch.testing.assert_close(compiled(layer)(children), layer(children), rtol=1e-4, atol=1e-4)


def test_compiled_autograd_sees_an_eager_graph() -> None:
    children, weight = torch.randn(2, 5, 2, 3, requires_grad=True), torch.randn(5, 3, 3, 2, requires_grad=True)
    found = []
    for compiled in (False, True):
        with maybe_enable_compiled_autograd(compiled, fullgraph=False, dynamic=False):
            loss = fastcaps.functional.dynamic_routing(children, weight).square().sum()
            found.append(torch.autograd.grad(loss, (children, weight)))
    torch.testing.assert_close(found[1], found[0])


def test_a_window_that_is_equal_makes_no_other_graph() -> None:
    given = BY_NAME["attention-1"].tensors(WINDOWS["grid"])
    run = compiled(lambda leaves, window: BY_NAME["attention-1"].ours(leaves, window))
    for window in (WINDOWS["grid"], Window((2, 3), (2, 1), (1, 0), (1, 1))):
        run(given, window)
    assert graphs() == 1
