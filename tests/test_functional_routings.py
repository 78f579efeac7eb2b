"""What is peculiar to one routing function.

That they are the papers' procedures, ``test_nn_layers`` shows by their layers; ``test_functional_extremes`` asks what
all must do, ``test_errors`` gives them wrong arguments.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from nn_layers import CLOSE, draw, gradients, layer
from suite import native_only
from torch import Tensor

from bench.judge import Bar
from fastcaps import Votes, Window, backend, explain, functional, vectors


def test_dynamic_of_zero_children_has_a_gradient() -> None:
    _, weight, _ = layer()
    for options in ({}, {"compete": "children"}, {"detach": True}, {"leaky": True}):
        children = torch.zeros(2, 6, 2, 2, dtype=torch.float64, requires_grad=True)
        found = functional.dynamic_routing(children, weight, **options)
        assert (found == 0).all()
        assert torch.autograd.grad(found.sum(), children)[0].isfinite().all(), options


def test_pool_activations_and_parents() -> None:
    children, weight, bias = layer()
    plain = functional.routing_pool(children, weight=weight)
    squash = partial(vectors.squash, dim=(-2, -1))
    for name in ("relu", "sigmoid", "tanh", squash, torch.exp):
        found = functional.routing_pool(children, weight=weight, activation="squash" if name is squash else name)
        torch.testing.assert_close(found, (getattr(torch, name) if isinstance(name, str) else name)(plain))
    assert functional.routing_pool(children, weight=weight, parents=3).shape == (2, 3, 2, 2)
    several, r = functional.routing_pool(children, parents=4, return_coefficients=True)
    assert several.shape == (2, 4, 2, 2) and r.shape == (2, 6, 4)
    torch.testing.assert_close(several[:, 3:], functional.routing_pool(children), **CLOSE)
    told_apart = functional.routing_pool(children, bias=bias)
    assert told_apart.shape == (2, 3, 2, 2) and not torch.allclose(told_apart[:, 0], told_apart[:, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_em_at_the_edges(dtype: torch.dtype) -> None:
    """Votes that agree exactly, so that variances are the eps of 1e-12; activations of exactly 0 and 1."""
    for k, pattern in enumerate(([0, 1, 1, 0, 1, 1], [0] * 6, [1] * 6)):
        children = draw(2, 1, 2, 2).expand(-1, 6, -1, -1).to(dtype).clone().requires_grad_()
        weight = draw(1, 3, 2, 2, seed=1).to(dtype).requires_grad_()
        gate = torch.tensor(pattern, dtype=dtype).expand(2, 6).clone().requires_grad_()
        betas = [draw(3, seed=seed).mul(100).to(dtype).requires_grad_() for seed in (6, 7)]
        leaves = [children, gate, weight, *betas]
        results = functional.em_routing(*leaves, inverse_temperature=10.0, eps=1e-12)
        assert all(result.isfinite().all() for result in results), k
        assert all(gradient.isfinite().all() for gradient in gradients(results, leaves)), k


@pytest.mark.parametrize("columns", [2, 8])
@pytest.mark.parametrize("window", [None, Window(3, 2, 1)], ids=["set", "grid"])
def test_a_first_iteration_in_half_precision_sums_wide(window: Window | None, columns: int) -> None:
    """What LayerNorm almost cancels, all of the gradient for a pose of two numbers, is not lost to a rounded sum."""
    seen = 9 if window is None else 27
    for dtype, groups in product((torch.bfloat16, torch.float16), (seen, seen // 3, 1)):
        generator = torch.Generator().manual_seed(groups)
        shapes = (2, 9 if window is None else 3, *(() if window is None else (5, 6)), 1, 8), (groups, 4, 8, columns)
        leaves = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        shape = functional.inverted_attention_routing(*leaves, window=window).shape
        grad = torch.randn(shape, generator=generator).to(dtype)

        def run(tensors: Any) -> dict[str, Tensor]:
            children, weight, grad = (x.detach().requires_grad_() for x in tensors)
            parents = functional.inverted_attention_routing(children, weight, window=window)
            found = torch.autograd.grad(parents, (children, weight), grad)
            return dict(zip(("parents", "dchildren", "dweight"), (parents.detach(), *found), strict=True))

        def by_reference(tensors: Any) -> dict[str, Tensor]:
            with backend("reference"):
                return run(tensors)

        Bar(by_reference, [*leaves, grad]).hold(run([*leaves, grad]))


@pytest.mark.parametrize("pose", [(2, 2), (3, 4), (1, 5)])
def test_coordinates_are_added_to_the_votes(pose: tuple[int, int]) -> None:
    bias = functional.coordinate_bias(3, 4, 2, *pose, dtype=torch.float64).unflatten(0, (3, 4, 2))
    assert bias.shape == (3, 4, 2, 1, *pose)
    for y in range(3):
        for x in range(4):
            wanted = torch.zeros(pose, dtype=torch.float64)
            first, second = ((0, 0), (0, 1)) if pose[0] == 1 else ((0, pose[1] - 1), (1, pose[1] - 1))
            wanted[first], wanted[second] = (y + 0.5) / 3, (x + 0.5) / 4
            assert torch.equal(bias[y, x, 0, 0], wanted) and torch.equal(bias[y, x, 1, 0], wanted)


@pytest.mark.parametrize("model", ["gaussian", "kmeans"])
def test_infinite_scores_are_masks(model: str) -> None:
    children, weight, bias = layer(groups=1)
    use, ignore = draw(1, 3, seed=4), draw(1, 3, seed=5)
    scores = torch.full((2, 6), torch.inf, dtype=torch.float64)
    few = functional.heinsen_routing(children[:, :4], scores[:, :4], weight, bias[:1], use, ignore, model=model)
    certain = functional.heinsen_routing(children[:, :4], None, weight, bias[:1], use, ignore, model=model)
    scores[:, 4:] = -torch.inf
    children[:, 4], children[:, 5] = torch.nan, torch.inf
    leaves = [tensor.clone().requires_grad_() for tensor in (children, scores, weight, bias[:1], use, ignore)]
    found = functional.heinsen_routing(*leaves, model=model)
    for got, want, same in zip(found, few, certain, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)
        torch.testing.assert_close(same, want, **CLOSE)
    by_leaf = gradients(found, leaves)
    assert all(gradient.isfinite().all() for gradient in by_leaf)
    assert (by_leaf[0][:, 4:] == 0).all() and (by_leaf[1] == 0).all()


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("batch", [1, 3, 40])
def test_votes_without_matrices_have_the_bias_of_their_parent(batch: int, rows: int) -> None:
    children, bias = draw(batch, 5, 1, 4), draw(rows, 3, 1, 4, seed=1)
    identity = torch.eye(4, dtype=torch.float64).expand(5, 3, 4, 4).contiguous()
    found = functional.dynamic_routing(children, None, bias=bias)
    torch.testing.assert_close(found, functional.dynamic_routing(children, identity, bias=bias))
    betas = draw(3, seed=2), draw(3, seed=3)  # which say how many parents there are
    without, by_matrices = (
        functional.em_routing(children, None, w, *betas, bias=bias[:1, :1]) for w in (None, identity)
    )
    torch.testing.assert_close(without.poses, by_matrices.poses)


FREE: list[tuple[Any, Any, dict[str, tuple[int, ...]]]] = [
    (functional.heinsen_routing, {"scores": None}, {"bias": (1, 1, 2, 3), "beta_use": (1, 1), "beta_ignore": (4, 1)}),
    (functional.em_routing, {"activations": None}, {"bias": (1, 1, 2, 3), "beta_u": (3,), "beta_a": (3,)}),
    (functional.inverted_attention_routing, {}, {"bias": (4, 1, 2, 3), "parents": (2, 3, 2, 3)}),
    (functional.inverted_attention_routing, {}, {"bias": (1, 1, 2, 3)}),
    (functional.dynamic_routing, {}, {"bias": (1, 1, 2, 3), "prior": (4, 3)}),
    (functional.routing_pool, {}, {"bias": (1, 1, 2, 3)}),
]


def test_without_matrices_any_table_may_set_the_number_of_parents() -> None:
    """The others may have one column, as beside votes that hold the number."""
    children = torch.randn(2, 4, 2, 3)
    for function, rest, shapes in FREE:
        wide = [name for name, shape in shapes.items() if shape[1:2] == (1,)] or [""]
        for widened in wide:
            given = {k: torch.randn((*x[:1], 3, *x[2:]) if k == widened else x) for k, x in shapes.items()}
            bias = {"bias": given.pop("bias")}
            takes_bias = {"bias": None} if function is functional.heinsen_routing else {}
            matrix = {"weight": None} if function is not functional.routing_pool else {}
            wanted = function(Votes(children, None, **bias, parents=3), **rest, **given, **takes_bias, **matrix)
            found = function(children, **rest, **given, **bias, **matrix)
            torch.testing.assert_close(found, wanted, msg=f"{function.__name__} {widened}")


def test_a_bias_under_a_padded_window_is_that_of_children_with_a_gate_of_1() -> None:
    children, weight, bias = draw(3, 2, 4, 5, 1, 4), draw(18, 3, 4, 2, seed=1), draw(18, 3, 1, 2, seed=2)
    gates = (None, torch.ones(3, 2, 4, 5, dtype=torch.float64))
    found, wanted = (
        functional.inverted_attention_routing(children, weight, bias=bias, gate=gate, window=Window(3, 2, 1))
        for gate in gates
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", ["dynamic_routing", "inverted_attention_routing"])
def test_one_matrix_for_all_parents_is_applied_first(name: str) -> None:
    routing, children, matrix = getattr(functional, name), torch.randn(3, 50, 1, 16), torch.randn(1, 1, 16, 24)
    others = {"prior": torch.randn(50, 4)} if name == "dynamic_routing" else {"parents": torch.randn(3, 4, 1, 24)}
    assert "no weights" in str(explain(routing, children, matrix.expand(1, 4, -1, -1), **others))
    leaves, found = [children.requires_grad_(), matrix.requires_grad_()], []
    for weight in (matrix.expand(1, 4, -1, -1), matrix.repeat(1, 4, 1, 1)):
        poses = routing(children, weight, **others)
        found.append([poses, *torch.autograd.grad(poses.sin().sum(), leaves)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@native_only
def test_one_channel_under_a_window() -> None:
    """Torch's convolution reads beyond such images, if it takes their strides for those of channels last."""
    children, weight = torch.randn(64, 1, 2, 3, 1, 1), torch.randn(6, 33, 1, 1)
    window = Window((2, 3), (1, 2), (1, 0))

    def run(children: Tensor) -> Tensor:
        given = weight.to(children)
        return functional.inverted_attention_routing(children, given, window=window, normalize=False)

    with backend("reference"):
        exact = run(children.double())
    torch.testing.assert_close(run(children).double(), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("options", [{}, {"eps": 0.3}, {"detach": True}, {"iterations": 1}, {"bias": True}], ids=str)
def test_a_prior_without_matrices_is_one_with_identities(options: dict[str, Any], rows: int) -> None:
    """Results, coefficients, and every gradient; a NaN behind a gate of 0 shows nowhere."""
    draw = torch.Generator().manual_seed(3)
    shapes = {"children": (2, 6, 2, 4), "prior": (rows, 3), "gate": (2, 6)}
    if options.get("bias"):
        shapes["bias"] = (6, 3, 2, 4)
    leaves = {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}
    leaves["gate"] = leaves["gate"].sigmoid().index_fill(1, torch.tensor([2]), 0.0)
    leaves["children"][:, 2] = torch.nan
    for leaf in leaves.values():
        leaf.requires_grad_()
    found = []
    identities = torch.eye(4, dtype=torch.float64).expand(1, 3, 4, 4)
    for weight, count in ((None, 3), (identities.clone(), None)):
        settings = {**options, **{name: leaf for name, leaf in leaves.items() if name != "children"}}
        call = partial(functional.dynamic_routing, leaves["children"], weight, parents=count, **settings)
        poses, shown = call(), call(return_coefficients=True)
        found.append([poses, shown.poses, shown.coefficients[:, [0, 1, 3, 4, 5]]])
        found[-1] += torch.autograd.grad(poses.sin().sum(), list(leaves.values()), materialize_grads=True)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
