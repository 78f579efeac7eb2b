"""What is odd but right, asked of every routing function: no samples, any strides, numbers that are not finite, very
long and very short poses, half precision, offsets beyond 32 bits; and calls that torch's own kernels do not survive.
"""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from cases import Case, apart
from features import ROUTINGS, WINDOWS, Leaves, Routing, training
from registry import Call
from registry import Routing as Op
from suite import every_backend, native_only
from suite import every_routing as every_op
from torch import Tensor

from fastcaps import BackendError, Votes, Window, backend, ops
from fastcaps.functional import (
    dynamic_routing,
    inverted_attention_routing,
    length,
    routing_pool,
    softmax,
    squash,
    unit,
)
from fastcaps.rules import Rule
from fastcaps.votes import VoteInputs

every_routing = pytest.mark.parametrize("routing", ROUTINGS, ids=str)
every_window = pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)


@every_window
@every_routing
def test_an_empty_batch(routing: Routing, window: Window | None) -> None:
    given = routing.tensors(window, batch=0)
    found = training(routing, given, window)
    assert all(len(found[name]) == 0 for name in routing.results)
    assert all(found[f"d{name}"].shape == leaf.shape and not found[f"d{name}"].any() for name, leaf in given.items())


@every_window
@pytest.mark.parametrize("routing", [row for row in ROUTINGS if row.child != "scores"], ids=str)
def test_booleans_are_gates_of_0_and_1(routing: Routing, window: Window | None) -> None:
    given = routing.tensors(window)
    mask = torch.arange(given[routing.child].numel()).view_as(given[routing.child]) % 3 > 0
    found = [routing.ours(given | {routing.child: gate}, window) for gate in (mask, mask.double())]
    torch.testing.assert_close(*found, rtol=0, atol=0)


@every_backend
@every_routing
def test_results_may_be_written_to(routing: Routing, name: str) -> None:
    leaves = {key: tensor.requires_grad_() for key, tensor in routing.tensors().items()}
    with backend(name):
        for key, result in routing.ours(leaves).items():
            if key == "poses":
                before = result.detach().clone()
                assert torch.equal(result.mul_(2), 2 * before)
                result.sum().backward()


@every_window
@every_routing
def test_results_are_contiguous(routing: Routing, window: Window | None) -> None:
    """On a grid with channels last; coefficients have no channels."""
    for name, result in routing.ours(routing.tensors(window), window, coefficients=True).items():
        assert (result if window is None or name == "coefficients" else result.movedim(1, 3)).is_contiguous(), name


def test_results_are_contiguous_as_those_of_torch() -> None:
    """Of contiguous arguments, so that ``view`` works."""
    vectors, children, weight = torch.randn(2, 4, 3), torch.randn(2, 4, 2, 3), torch.randn(4, 5, 3, 2)
    found = {f"{f.__name__} {dim}": f(vectors, dim) for f in (softmax, squash, unit, length) for dim in (0, 1, -1)}
    for groups, matrices in enumerate((None, weight[:1], weight[:2], weight)):
        votes = Votes(children, matrices, parents=5)
        parents, r = torch.randn(votes.parents_shape), torch.randn(votes.coefficients_shape)
        verbs = votes.agreement(parents), votes.distance(parents), votes.sum(r), votes.sum(1.0), votes.square_sum(r, 0)
        found |= {f"{groups} groups, {k}": result for k, result in enumerate(verbs)}
    assert [name for name, result in found.items() if not result.is_contiguous()] == []


@every_routing
def test_no_vote_outlives_a_call(routing: Routing) -> None:
    """Nothing of the size children x parents is among what a training step keeps."""
    leaves = {key: tensor.requires_grad_() for key, tensor in routing.tensors().items()}
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        found = routing.ours(leaves)
    assert found
    assert max(kept) < 3 * 5 * 3 * (2 * 5)  # samples, children, parents, values of a vote


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@every_window
@every_routing
def test_a_gate_of_0_hides_whatever_is_behind(routing: Routing, window: Window | None, number: float) -> None:
    """The child gets no gradient, its gate gets none where the child is broken, and nobody else sees a difference."""
    given = routing.tensors(window, types=8)
    shut = torch.zeros_like(given[routing.child], dtype=torch.bool)
    shut[:, 5] = shut[1, 7] = True
    given[routing.child].masked_fill_(shut, -torch.inf if routing.child == "scores" else 0.0)
    found = []
    for behind in (number, 0.0):
        children = given["children"].clone()
        children[..., 0, 1][shut] = behind  # one number of a pose is enough
        found.append(training(routing, {**given, "children": children}, window))
    broken, clean = found
    own = f"d{routing.child}"
    assert not broken["dchildren"][shut].any() and not broken[own][shut].any()
    for name, value in clean.items():
        there = ~shut if name == own else ...
        torch.testing.assert_close(broken[name][there], value[there], rtol=1e-8, atol=1e-9, msg=name)


@every_backend
def test_a_closed_child_has_a_gradient_of_0_beside_one_that_is_nan(name: str) -> None:
    """With constant coefficients; the query of the last iteration is NaN."""
    children, gate = torch.randn(1, 4, 2, 3), torch.tensor([[0.0, 1.0, 1.0, 1.0]])
    children[0, 3, 0, 0] = torch.nan
    given = VoteInputs.unchecked(children.requires_grad_(), torch.randn(4, 5, 3, 2), None, gate, None, 5)
    own = ops.Attention(torch.randn(1, 5, 2, 2), rule=int(Rule.PLAIN), iterations=2, detach=True)
    with backend(name):
        (gradient,) = torch.autograd.grad(ops.attention_routing(given, own)[0].sum(), children)
    assert not gradient[0, 0].any() and gradient[0, 1].isnan().any()


# ---- numbers that are not finite, and half precision -----------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@every_window
@every_routing
def test_nan_and_infinity_come_out_where_they_went_in(routing: Routing, window: Window | None, value: float) -> None:
    """One bad child spoils its own sample, and no other, forward and back."""
    clean = {key: tensor.float() for key, tensor in routing.tensors(window).items()}
    bad: Leaves = {**clean, "children": clean["children"].clone()}
    bad["children"].select(0, 1).reshape(-1)[0] = value
    right, found = (routing.ours(given, window) for given in (clean, bad))
    assert not torch.isfinite(found["poses"][1]).all()
    for key, tensor in found.items():
        assert torch.equal(tensor[[0, 2]], right[key][[0, 2]]), key
    children = clean["children"].requires_grad_()
    poses = routing.ours(clean, window)["poses"]
    grad = torch.randn_like(poses)
    grad[(1, *[0] * (grad.dim() - 1))] = value
    (gradient,) = torch.autograd.grad(poses, children, grad)
    assert torch.isfinite(gradient[[0, 2]]).all() and not torch.isfinite(gradient[1]).all()


@pytest.mark.parametrize("routing", [row for row in ROUTINGS if row.ops], ids=str)
@pytest.mark.parametrize("name", [None, "cpu", "reference"])
def test_float16_on_the_cpu(name: str | None, routing: Routing) -> None:
    """The kernels of the CPU take none, and say so where they are forced; so the reference serves, sums in float32."""
    given = {key: 0.5 * tensor for key, tensor in routing.tensors(dtype=torch.float16).items()}
    with backend(name) if name else nullcontext():
        if name == "cpu":
            with pytest.raises(BackendError, match="float32, float64 and bfloat16, got float16"):
                routing.ours(given)
            return
        found = routing.ours(given)
    exact = routing.ours({key: tensor.double() for key, tensor in given.items()})
    for key, tensor in found.items():
        assert tensor.dtype == torch.float16
        assert (tensor.double() - exact[key]).abs().max().item() <= 2e-2 * exact[key].abs().max().item(), key


# ---- any length -----------------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("window", [None, Window(2)], ids=["set", "grid"])
@pytest.mark.parametrize("scale", [10.0**k for k in (-30, -20, -15, 19, 22, 30)])
def test_pooling_knows_no_scale(scale: float, window: Window | None, name: str) -> None:
    """Keys and proposals are unit vectors: poses a million times as long are pooled a million times as long."""
    shape = (2, 7, 1, 5) if window is None else (2, 3, 4, 3, 1, 5)
    children = torch.randn(shape, dtype=torch.float64)
    wanted, shares = routing_pool(children, window=window, sharpness=2.0, return_coefficients=True)
    given = (scale * children).float().requires_grad_()
    with backend(name):
        found, asked = routing_pool(given, window=window, sharpness=2.0, return_coefficients=True)
        (gradient,) = torch.autograd.grad(found.sum(), given)
    torch.testing.assert_close(found.double() / scale, wanted, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(asked.double(), shares, rtol=2e-5, atol=2e-6)
    exact = children.clone().requires_grad_()
    (slope,) = torch.autograd.grad(routing_pool(exact, window=window, sharpness=2.0).sum(), exact)
    torch.testing.assert_close(gradient.double(), slope, rtol=2e-4, atol=2e-5)


# ---- a first iteration that torch's own convolution does not survive -------------------------------------------------

FATAL = [  # grid, kernel, stride, padding, dilation: no output column sees an input column
    ((4, 1), (3, 1), (3, 3), (5, 2), (2, 2)),
    ((1, 1), (1, 2), (1, 2), (5, 5), (3, 2)),
    ((4, 3), (3, 1), (1, 4), (1, 9), (2, 4)),
]


@pytest.mark.parametrize(("grid", "window"), [(grid, Window(*window)) for grid, *window in FATAL], ids=str)
def test_first_iteration_where_no_window_sees_a_column(grid: tuple[int, int], window: Window) -> None:
    """If such a call reaches oneDNN's bfloat16 convolution, it reads a null pointer, which ends the process."""
    for types, pose in ((1, 4), (3, 1), (16, 4)):
        count = types * window.positions
        children = torch.randn(2, types, *grid, pose, pose)
        leaves = [children, torch.randn(count, 3, pose, pose), torch.randn(count, 3, pose, pose)]
        gate = torch.rand(2, types, *grid)
        found = []
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            given = [tensor.bfloat16().to(dtype).requires_grad_() for tensor in (*leaves, gate)]
            routed = inverted_attention_routing(
                *given[:2], bias=given[2], gate=given[3], window=window, normalize=False
            )
            found.append([routed, *torch.autograd.grad(routed.sum(), given)])
        for half, single, exact in zip(*found, strict=True):
            torch.testing.assert_close(half.double(), exact, rtol=0.05, atol=0.05 * (1 + exact.abs().max().item()))
            torch.testing.assert_close(single.double(), exact, rtol=1e-4, atol=1e-4)


@native_only
@pytest.mark.parametrize("number", [0.0, 1e-30, 1e30, math.nan])
def test_an_odd_vote_changes_no_bit_of_other_samples(number: float) -> None:
    """Samples share the lanes of a vector; a vote whose square leaves the range of float32 is measured apart."""
    weight, children = torch.randn(6, 3, 4, 4), torch.randn(16, 6, 4, 4)
    found = []
    for odd in (False, True):
        given = children.clone()
        if odd:
            given[0, 2] = number
        given.requires_grad_()
        routed = routing_pool(given, weight=weight, sharpness=1.5)
        (gradient,) = torch.autograd.grad(routed.square().sum(), given)
        found.append((routed[1:], gradient[1:]))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@every_backend
@pytest.mark.parametrize("compete", ["parents", "children"])
def test_a_length_beyond_the_dtype_leaves_gradients_finite(compete: str, name: str) -> None:
    """S is finite where its length is not: squashed, it is a unit vector, whose gradient is nothing."""
    children = torch.ones(2, 1, 2, 2)
    children[1] = 3e38
    weight = torch.eye(2)[None, None].clone().requires_grad_()
    with backend(name):
        parents = dynamic_routing(children, weight, iterations=1, compete=compete)
        alone = dynamic_routing(children[:1], weight, iterations=1, compete=compete)
        found, wanted = (torch.autograd.grad(p.sum(), weight)[0] for p in (parents, alone))
    torch.testing.assert_close(found, wanted)


# ---- sizes beyond 2^31 -----------------------------------------------------------------------------------------------


def _far_apart(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    try:
        return apart(tensor, strides)
    except OSError as error:
        pytest.skip(f"no address space for strides {strides}: {error}")


def _same_bits(call: Call, far: Call) -> None:
    """Assert that results and gradients do not depend on where tensors lie."""
    found, wanted = far.training(Call.by_op), call.training(Call.by_op)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that is committed on first use")
@every_op
@pytest.mark.parametrize("dimension", range(6), ids=["batch", "row", "column", "type", "pose-row", "pose-column"])
def test_children_whose_extent_exceeds_32_bits(routing: Op, dimension: int) -> None:
    """Real offsets beyond 2^31 numbers: the stride of one dimension after another is 2^30 + 1."""
    sizes = {"grid": (3, 3), "types": 3, "pose": (3, 3, 2), "window": (2, 2, 1, 1, 0, 0, 1, 1)}
    call = routing.call(Case("far", routing.cases[0].rule, 3, parents=4, dtype=torch.bfloat16, **sizes))
    shape = tuple(call.given["children"].shape)
    strides = [0] * 6
    step = 1
    for k in (k for k in reversed(range(6)) if k != dimension):
        strides[k], step = step, step * shape[k]
    strides[dimension] = 2**30 + 1
    assert max((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) > 2**31
    far = _far_apart(call.given["children"], tuple(strides))
    _same_bits(call, replace(call, given={**call.given, "children": far}))


@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that is committed on first use")
@every_op
def test_state_gate_and_gradients_whose_extent_exceeds_32_bits(routing: Op) -> None:
    call = routing.call(Case("far", routing.cases[0].rule, 3, parents=4, gate="some", dtype=torch.bfloat16))

    def far(tensor: Tensor) -> Tensor:
        return _far_apart(tensor, (2**30 + 1, *tensor.stride()[1:]))

    moved = ("gate", *routing.state)
    given = {n: far(v) if n in moved and v is not None else v for n, v in call.given.items()}
    _same_bits(call, replace(call, given=given, grads={n: far(v) for n, v in call.grads.items()}))


@native_only
@pytest.mark.slow
def test_more_children_than_32_bits_count() -> None:
    """Stride-0 children whose virtual extent passes 2^31 numbers; 2^27 + 1 children of 16, all alike."""
    count = 2**27 + 1
    child = torch.randn(1, 1, 1, 16).bfloat16()
    weight, parents = torch.randn(1, 1, 16, 1).bfloat16(), torch.randn(1, 1, 1, 1).bfloat16()
    children = child.expand(1, count, 1, 16)
    assert children.numel() > 2**31
    routed = inverted_attention_routing(children, weight, parents)
    # one parent takes every child whole: the sum is the vote times the count
    vote = (child.double() @ weight[0].double()).item()
    assert routed.shape == (1, 1, 1, 1)
    torch.testing.assert_close(routed.double().item(), vote * count, rtol=2**-7, atol=0.0)
