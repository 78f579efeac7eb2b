"""Stacks of layers of any kind: concurrent and sequential routing against loops over layers, sizes computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nn_layers import draw as numbers
from torch import Tensor, nn

from fastcaps import InvertedAttentionRouting, RoutingStack
from fastcaps.nn import CapsuleSpec, DynamicRouting, EMRouting, HeinsenRouting, RoutingPool, RoutingTrace
from fastcaps.nn.stack import as_scores
from fastcaps.results import Gaussians

DOUBLE: dict[str, Any] = {"dtype": torch.float64}
WINDOW: dict[str, Any] = {"kernel_size": 2, "stride": 2}
SPECS = [CapsuleSpec(3, kernel_size=3, stride=2), CapsuleSpec(4, kernel_size=2), CapsuleSpec(6), CapsuleSpec(5)]
STACKS: dict[str, tuple[list[CapsuleSpec], dict[str, Any]]] = {
    "attention": (SPECS, {}),  # 7 x 9 -> 3 x 4 -> 2 x 3 positions -> sets of 6 and 5
    "activations": (SPECS, {"activations": True}),
    "learned": (SPECS[1:3], {"start": "learned"}),
    "dynamic-pool": ([CapsuleSpec(4, layer=DynamicRouting, **WINDOW), CapsuleSpec(3, layer=RoutingPool)], {}),
    "em": (
        [CapsuleSpec(4, **WINDOW), CapsuleSpec(3, kernel_size="all", share=True, options={"coordinates": True})],
        {"layer": EMRouting},
    ),
    "heinsen-em": ([CapsuleSpec(4, layer=HeinsenRouting, **WINDOW), CapsuleSpec(3, layer=EMRouting)], {}),
    "mixed": (
        [
            CapsuleSpec(4, kernel_size=2, options={"activations": True}),
            CapsuleSpec(4, layer=EMRouting, kernel_size=2),
            CapsuleSpec(5, layer=HeinsenRouting, options={"bias": True}),
            CapsuleSpec(4, layer=DynamicRouting),
            CapsuleSpec(3),
        ],
        {},
    ),
}


def make(iterations: int = 2, routing: str = "concurrent", kind: str = "attention", **options: Any) -> RoutingStack:
    torch.manual_seed(0)
    specs, settings = STACKS[kind]
    given = {"in_capsules": 2, "in_dim": 4, "size": (7, 9), **DOUBLE, **settings, **options}
    stack = RoutingStack.build(specs, iterations=iterations, routing=routing, **given)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return stack


def draw(batch: int = 2) -> tuple[Tensor, Tensor]:
    """Children of a stack and their activations."""
    return numbers(batch, 2, 7, 9, 4), numbers(batch, 2, 7, 9, seed=1).sigmoid()


def step(layer: Any, below: Any, parents: Any = None, iterations: int = 1) -> Any:
    """What a layer makes of poses, what is known of them, and whether that is a score; from its last state."""
    poses, activity, scores = below
    wanted = layer.activity_name == "scores"
    if activity is not None and scores != wanted:
        activity = activity.logit() if wanted else activity.sigmoid()
    for _ in range(iterations if layer.takes_parents else 1):
        last = None if parents is None else parents[0]
        found = layer(poses, *((last,) if layer.takes_parents else ()), activity)
        parts = (found, None) if isinstance(found, Tensor) else found[:2]
        parents = (*parts, isinstance(found, Gaussians))
    return parents


def concurrent(layers: Any, values: list[Any], iterations: int) -> list[Any]:
    """Procedure 2, every layer updated in every iteration."""
    start = values[0]
    for layer in layers:
        values = [*values, step(layer, values[-1])]
    for _ in range(iterations - 1):
        values = [start, *(step(layer, values[k], values[k + 1]) for k, layer in enumerate(layers))]
    return values


def sequential(layers: Any, values: list[Any], iterations: int) -> list[Any]:
    """Each layer's iterations before the next layer's."""
    for layer in layers:
        values = [*values, step(layer, values[-1], None, iterations)]
    return values


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("loop", [concurrent, sequential])
@pytest.mark.parametrize("kind", STACKS)
def test_results_traces_and_gradients_are_the_loops(kind: str, loop: Any, iterations: int) -> None:
    stack = make(iterations, loop.__name__, kind)
    children, activity = draw()
    children.requires_grad_()
    wanted = loop(stack.layers, [(children, activity, stack.layers[0].activity_name == "scores")], iterations)
    found = stack(children, activity)
    poses = found if isinstance(found, Tensor) else found[0]
    torch.testing.assert_close(poses, wanted[-1][0])
    weights, inputs = torch.randn_like(poses), [children, *stack.parameters()]
    options = {"allow_unused": True, "materialize_grads": True}
    ours, theirs = (torch.autograd.grad((p * weights).sum(), inputs, **options) for p in (poses, wanted[-1][0]))
    torch.testing.assert_close(ours, theirs)
    result, trace = stack(children, activity, return_trace=True)
    torch.testing.assert_close(result, found)
    assert isinstance(trace, RoutingTrace) and len(trace.coefficients) == len(stack)
    for k, (found_poses, found_activity, value) in enumerate(zip(*trace[:2], wanted, strict=True)):
        torch.testing.assert_close(found_poses, value[0])
        assert (found_activity is None) == (value[1] is None)
        if found_activity is not None:
            torch.testing.assert_close(found_activity, value[1])
        if k and stack[k - 1].takes_parents and kind != "learned":
            spread = trace.coefficients[k - 1]
            torch.testing.assert_close(spread.sum(-1), torch.ones_like(spread[..., 0]))
            assert bool((spread == spread[..., :1]).all()) == (iterations == 1)
    if all(layer.takes_parents for layer in stack):  # the others make their own number of iterations
        torch.testing.assert_close(make(3, loop.__name__, kind)(children, activity, iterations=iterations), found)


def test_updates_that_cannot_reach_the_result_are_left_out() -> None:
    for iterations, passes in ((1, [1, 1, 1, 1]), (2, [1, 1, 1, 2]), (3, [1, 1, 2, 3]), (5, [2, 3, 4, 5])):
        stack = make(iterations)
        count = [0] * 4
        for index, layer in enumerate(stack.layers):
            layer.register_forward_hook(lambda *_, n=index, count=count: count.__setitem__(n, count[n] + 1))
        stack(draw()[0])
        assert count == passes
        count[:] = [0] * 4
        stack(draw()[0], return_trace=True)
        assert count == [iterations] * 4
    stack, calls = make(4, kind="em"), [0, 0]  # layers without parents route once what did not change
    for index, layer in enumerate(stack.layers):
        layer.register_forward_hook(lambda *_, n=index: calls.__setitem__(n, calls[n] + 1))
    stack(*draw())
    assert calls == [1, 1]
    given = draw()[0]
    torch.testing.assert_close(stack(given, iterations=1)[0], stack[1](*stack[0](given, iterations=1), iterations=1)[0])


def test_children_counts_are_computed() -> None:
    assert [layer.in_capsules for layer in make().layers] == [2, 3, 24, 6]
    rows, columns = 21, 17
    wide = RoutingStack.build(SPECS, in_capsules=2, in_dim=4, size=(rows, columns))
    assert wide.layers[2].in_capsules == 4 * ((rows - 1) // 2 - 1) * ((columns - 1) // 2 - 1)
    changed = RoutingStack.build([CapsuleSpec(3, dim=7), CapsuleSpec(2)], in_capsules=4, in_dim=5, pose="vector")
    assert [(layer.in_dim, layer.out_dim) for layer in changed.layers] == [(5, 7), (7, 7)]
    specs = [CapsuleSpec(3, kernel_size=3), CapsuleSpec(5, share=True)]
    shared = RoutingStack.build(specs, in_capsules=2, in_dim=4, size=(7, 9))
    for size in ((7, 9), (12, 3)):
        assert shared(torch.randn(2, 2, *size, 4)).shape == (2, 5, 4)


def test_scores_of_activations() -> None:
    activations = torch.tensor([0.0, 0.25, 1.0], requires_grad=True)
    scores = as_scores(activations)
    torch.testing.assert_close(scores.sigmoid(), activations)
    assert scores[0] == -torch.inf and scores[2] == torch.inf
    scores[1].backward()
    assert activations.grad.tolist() == [0.0, pytest.approx(1 / (0.25 * 0.75)), 0.0]


def test_a_set_is_read_as_types_at_places() -> None:
    specs = [CapsuleSpec(6, kernel_size="all", share=True), CapsuleSpec(4, kernel_size="all", share=True, types=2)]
    options = {"in_capsules": 3, "in_dim": 4, "size": (3, 5), "layer": EMRouting, **DOUBLE}
    stack = RoutingStack.build(specs, **options)
    first, last = stack.layers
    assert last.weight.shape == (2, 4, 2, 2)
    children, gate = numbers(2, 3, 3, 5, 4), torch.rand(2, 3, 3, 5, **DOUBLE)
    poses, active = first(children, gate)
    wanted = last(poses.view(2, 2, 1, 3, 4), active.view(2, 2, 1, 3))
    torch.testing.assert_close(tuple(stack(children, gate)), tuple(wanted))
    unshared = DynamicRouting(6, 4, 4, 4, **DOUBLE)  # the same matrices for capsules 0 to 2, and for 3 to 5
    shared = DynamicRouting(2, 4, 4, 4, kernel_size="all", share=True, **DOUBLE)
    unshared.weight = nn.Parameter(shared.weight.detach().repeat_interleave(3, 0))
    below, children = DynamicRouting(3, 6, 4, 4, **DOUBLE), numbers(2, 3, 4)
    torch.testing.assert_close(RoutingStack([below, shared])(children), unshared(below(children)))
    for message, spec in [
        ("types, 4, must divide the 6 capsules", CapsuleSpec(4, kernel_size="all", share=True, types=4)),
        ("needs a grid", CapsuleSpec(4, kernel_size="all", share=True)),
        ("needs a grid", CapsuleSpec(4, kernel_size=2, types=2)),
    ]:
        with pytest.raises(ValueError, match=message):
            RoutingStack.build([specs[0], spec], **options)
    with pytest.raises(ValueError, match="must divide the 6 capsules below"):
        RoutingStack([below, DynamicRouting(4, 4, 4, 4, kernel_size="all", share=True, **DOUBLE)])


def test_wrong_arguments_are_named() -> None:
    layer, build = InvertedAttentionRouting, RoutingStack.build
    below, wide = layer(6, 4, 4, 4), layer(6, 4, 4, 4, kernel_size=2)
    for error, message, run in [
        (ValueError, "at least one routing layer", lambda: RoutingStack([])),
        (TypeError, r"layers\[1\] must be a routing layer, got Linear", lambda: RoutingStack([below, nn.Linear(4, 4)])),
        (ValueError, "iterations must be an int >= 1", lambda: make()(draw()[0], iterations=0)),
        (ValueError, r"layers\[1\].in_dim must be 4", lambda: RoutingStack([below, layer(4, 3, 9, 9)])),
        (ValueError, r"in_capsules, 5, does not fit the 4", lambda: RoutingStack([below, layer(5, 3, 4, 4)])),
        (ValueError, "does not fit the 4", lambda: RoutingStack([wide, layer(6, 3, 4, 4)])),
        (ValueError, "routes a grid", lambda: RoutingStack([below, layer(4, 3, 4, 4, kernel_size=2)])),
        (ValueError, "layer 0 .*needs a grid", lambda: build(SPECS, in_capsules=2, in_dim=4)),
        (ValueError, "1 x 1 children and needs 2 x 2", lambda: build(SPECS, in_capsules=2, in_dim=4, size=(4, 4))),
        (TypeError, "layers must be a list .*got Inverted", lambda: RoutingStack(below)),
        (TypeError, "specs must be a list .*got \\[3, 4", lambda: build([3, 4], in_capsules=2, in_dim=4)),
        (TypeError, "layer must be .*got Linear", lambda: CapsuleSpec(3, layer=nn.Linear)),
        (TypeError, "layer must be .*got 'EM'", lambda: build(SPECS, in_capsules=2, in_dim=4, size=(7, 9), layer="EM")),
        (ValueError, "capsules must be an int >= 1, got 0", lambda: CapsuleSpec(0)),
        (TypeError, "did you mean kernel_size.*options=", lambda: CapsuleSpec(8, kernal_size=3)),
    ]:
        with pytest.raises(error, match=message):
            run()
