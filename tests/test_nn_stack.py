"""Stacks: concurrent and sequential routing against loops over the functional API; numbers of capsules computed."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from fastcaps import InvertedAttentionRouting, RoutingStack
from fastcaps import functional as routing
from fastcaps.nn import CapsuleSpec, RoutingTrace

SPECS = [CapsuleSpec(3, kernel_size=3, stride=2), CapsuleSpec(4, kernel_size=2), CapsuleSpec(6), CapsuleSpec(5)]


def make(iterations=2, routing="concurrent", **options) -> RoutingStack:
    """Two grid layers and two set layers: 7 x 9 -> 3 x 4 -> 2 x 3 positions -> sets of 6 and 5."""
    torch.manual_seed(0)
    stack = RoutingStack.build(
        SPECS,
        in_capsules=2,
        in_dim=4,
        size=(7, 9),
        iterations=iterations,
        routing=routing,
        dtype=torch.float64,
        **options,
    )
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return stack


def draw(batch=2) -> torch.Tensor:
    return torch.randn(batch, 2, 7, 9, 4, dtype=torch.float64)


def call(layer, children, parents):
    """One layer by the functional API, its children flattened by hand in the order n, h, w where it is a set layer."""
    if layer.window is None and children.dim() == 5:
        _, n, h, w, _ = children.shape
        children = torch.stack([children[:, i, y, x] for i in range(n) for y in range(h) for x in range(w)], 1)
    out = routing.inverted_attention_routing(
        children.unflatten(-1, (2, 2)),
        layer.weight,
        None if parents is None else parents.unflatten(-1, (2, 2)),
        norm_weight=layer.norm.weight,
        norm_bias=layer.norm.bias,
        window=layer.window,
    )
    return out.flatten(-2)


def concurrent(stack, children, iterations):
    """Procedure 2, every layer updated in every iteration."""
    values = [children]
    for layer in stack.layers:
        values.append(call(layer, values[-1], None))
    for _ in range(iterations - 1):
        values = [children] + [call(layer, values[k], values[k + 1]) for k, layer in enumerate(stack.layers)]
    return values


def sequential(stack, children, iterations):
    """Each layer's iterations before the next layer's."""
    values = [children]
    for layer in stack.layers:
        parents = None
        for _ in range(iterations):
            parents = call(layer, values[-1], parents)
        values.append(parents)
    return values


@pytest.mark.parametrize("iterations", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(("name", "loop"), [("concurrent", concurrent), ("sequential", sequential)])
def test_result_and_gradients_are_the_loops(name, loop, iterations):
    stack = make(iterations, name)
    children = draw().requires_grad_()
    got, want = stack(children), loop(stack, children, iterations)[-1]
    torch.testing.assert_close(got, want)
    weights = torch.randn_like(got)
    inputs = [children, *stack.parameters()]
    ours = torch.autograd.grad((got * weights).sum(), inputs)
    theirs = torch.autograd.grad((want * weights).sum(), inputs)
    for g, w in zip(ours, theirs, strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize(("name", "loop"), [("concurrent", concurrent), ("sequential", sequential)])
def test_trace_holds_every_layers_last_state(name, loop, iterations):
    stack = make(iterations, name)
    children = draw()
    poses, trace = stack(children, return_trace=True)
    assert isinstance(trace, RoutingTrace)
    torch.testing.assert_close(poses, stack(children))
    for got, want in zip(trace.poses, loop(stack, children, iterations), strict=True):
        torch.testing.assert_close(got, want)
    assert trace.activations == (None,) * 5
    assert [tuple(r.shape) for r in trace.coefficients] == [(2, 3, 4, 18, 3), (2, 2, 3, 12, 4), (2, 24, 6), (2, 6, 5)]
    for spread in trace.coefficients:
        torch.testing.assert_close(spread.sum(-1), torch.ones_like(spread[..., 0]))
    uniform = [bool((spread == spread[..., :1]).all()) for spread in trace.coefficients]
    assert uniform == [iterations == 1] * 4


def test_concurrent_and_sequential_agree_only_at_one_iteration():
    children = draw()
    torch.testing.assert_close(make(1, "concurrent")(children), make(1, "sequential")(children))
    assert not torch.allclose(make(2, "concurrent")(children), make(2, "sequential")(children))


@pytest.mark.parametrize(
    ("iterations", "passes"), [(1, [1, 1, 1, 1]), (2, [1, 1, 1, 2]), (3, [1, 1, 2, 3]), (5, [2, 3, 4, 5])]
)
def test_updates_that_cannot_reach_the_result_are_left_out(iterations, passes):
    stack = make(iterations)
    count = [0] * 4
    for index, layer in enumerate(stack.layers):
        layer.register_forward_hook(lambda *_, index=index: count.__setitem__(index, count[index] + 1))
    stack(draw())
    assert count == passes
    count[:] = [0] * 4
    stack(draw(), return_trace=True)
    assert count == [iterations] * 4


def test_iterations_of_one_call():
    stack = make(2)
    children = draw()
    torch.testing.assert_close(stack(children, iterations=4), make(4)(children))
    assert stack.iterations == 2


def test_children_counts_are_computed():
    stack = make()
    assert [layer.in_capsules for layer in stack.layers] == [2, 3, 24, 6]
    rows, columns = 21, 17
    wide = RoutingStack.build(SPECS, in_capsules=2, in_dim=4, size=(rows, columns))
    assert wide.layers[2].in_capsules == 4 * ((rows - 1) // 2 - 1) * ((columns - 1) // 2 - 1)
    assert wide(torch.randn(1, 2, rows, columns, 4)).shape == (1, 5, 4)
    changed = RoutingStack.build([CapsuleSpec(3, dim=7), CapsuleSpec(2)], in_capsules=4, in_dim=5, pose="vector")
    assert [(layer.in_dim, layer.out_dim) for layer in changed.layers] == [(5, 7), (7, 7)]


def test_a_shared_set_layer_serves_any_grid():
    specs = [CapsuleSpec(3, kernel_size=3), CapsuleSpec(5, share=True)]
    stack = RoutingStack.build(specs, in_capsules=2, in_dim=4, size=(7, 9))
    for size in ((7, 9), (5, 4), (12, 3)):
        assert stack(torch.randn(2, 2, *size, 4)).shape == (2, 5, 4)


@pytest.mark.parametrize("name", ["concurrent", "sequential"])
def test_activations_pass_from_layer_to_layer(name):
    stack = make(2, name, activations=True)
    children, gate = draw(), torch.rand(2, 2, 7, 9, dtype=torch.float64)
    (poses, activations), trace = stack(children, gate, return_trace=True)
    assert activations.shape == (2, 5) and [a.shape for a in trace.activations][:2] == [(2, 2, 7, 9), (2, 3, 3, 4)]
    if name == "sequential":
        below, active = children, gate
        for layer in stack.layers:
            parents, _ = layer(below, None, active)
            below, active = layer(below, parents, active)
        torch.testing.assert_close(poses, below)
        torch.testing.assert_close(activations, active)
    quiet = stack(children, torch.zeros_like(gate))[0]
    assert not torch.allclose(quiet, poses)


def test_layer_norm_off_and_dropout_reach_every_layer():
    assert all(layer.norm is None for layer in make(layer_norm=False).layers)
    assert [layer.dropout for layer in make(dropout=0.1).layers] == [0.1] * 4


@pytest.mark.parametrize("batch", [0, 1])
def test_batch_of_one_and_of_none(batch):
    stack = make(3)
    children = draw(batch).requires_grad_()
    result = stack(children)
    assert result.shape == (batch, 5, 4)
    result.sum().backward()
    assert children.grad.shape == children.shape


def test_compile_deepcopy_and_pickle():
    torch._dynamo.reset()
    stack = make(3)
    children = draw()
    want = stack(children)
    torch.testing.assert_close(torch.compile(stack, fullgraph=True, backend="aot_eager")(children), want)
    torch.testing.assert_close(copy.deepcopy(stack)(children), want)
    torch.testing.assert_close(pickle.loads(pickle.dumps(stack))(children), want)
    assert "iterations=3" in repr(stack) and "routing='sequential'" in repr(make(2, "sequential"))


def test_bfloat16_autocast():
    stack = make(3).float()
    children = draw().float()
    with torch.autocast("cpu", torch.bfloat16):
        got = stack(children)
    assert got.isfinite().all()
    got.float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in stack.parameters())


def test_a_stack_is_a_list_of_layers():
    layers = [InvertedAttentionRouting(6, 4, 4, 4), InvertedAttentionRouting(4, 3, 4, 4)]
    stack = RoutingStack(layers, iterations=1)
    children = torch.randn(2, 6, 4)
    torch.testing.assert_close(stack(children), layers[1](layers[0](children)))
    assert len(stack) == 2 and list(stack) == layers and stack[-1] is layers[1]


def layer(*sizes, **options):
    return InvertedAttentionRouting(*sizes, **options)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: RoutingStack([]), ValueError, "at least one routing layer"),
        (lambda: make(0), ValueError, "iterations must be an int >= 1"),
        (lambda: make(2.0), TypeError, "iterations must be an int"),
        (lambda: make(2, "parallel"), ValueError, "routing must be one of 'concurrent', 'sequential', got 'parallel'"),
        (lambda: make()(draw(), iterations=0), ValueError, "iterations must be an int >= 1"),
        (lambda: make()([1]), TypeError, "children must be a tensor"),
        (lambda: RoutingStack([layer(6, 4, 4, 4), layer(4, 3, 9, 9)]), ValueError, r"layers\[1\].in_dim must be 4"),
        (
            lambda: RoutingStack([layer(6, 4, 4, 4), layer(5, 3, 4, 4)]),
            ValueError,
            r"in_capsules, 5, does not fit the 4",
        ),
        (lambda: RoutingStack([layer(6, 4, 4, 4, kernel_size=2), layer(6, 3, 4, 4)]), ValueError, "does not fit the 4"),
        (lambda: RoutingStack([layer(6, 4, 4, 4), layer(4, 3, 4, 4, kernel_size=2)]), ValueError, "routes a grid"),
        (lambda: RoutingStack.build(SPECS, in_capsules=2, in_dim=4), ValueError, "layer 0 .*wants a grid"),
        (lambda: RoutingStack.build(SPECS, in_capsules=2, in_dim=4, size=(4, 4)), ValueError, "layer 1.*larger than"),
    ],
)
def test_wrong_arguments_are_named(build, error, message):
    with pytest.raises(error, match=message):
        build()
