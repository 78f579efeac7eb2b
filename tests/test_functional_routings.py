"""The routing functions against the papers' loops, and what is peculiar to one of them.

``test_functional_extremes`` asks of all of them what all must do; ``test_errors`` gives them wrong arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from functional_cases import CLOSE, GROUPS, WINDOWS, at, draw, expect, gradients, layer, seen_by
from oracle_routings import dynamic, em, heinsen, vector_normed
from torch import Tensor

from fastcaps import Window, backend, functional, vectors
from fastcaps._testing.judge import Bar
from fastcaps.reference.seen import make_votes, see
from fastcaps.votes import SET_WINDOW, Votes, as_grid


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize(
    "options",
    [{}, {"compete": "children"}, {"leaky": True}, {"detach": True, "leaky": True}, {"iterations": 1}],
    ids=["parents", "children", "leaky", "detach", "one-turn"],
)
def test_dynamic_is_the_procedure(window: Window | None, options: dict, groups: str) -> None:
    children, weight, bias, _ = layer(window, groups=groups)
    settings = {"iterations": 3, **options}
    found, r = functional.dynamic_routing(
        children, weight, bias=bias, window=window, return_coefficients=True, **settings
    )
    asked = {name: value for name, value in settings.items() if name in ("compete", "leaky")}
    for place, seen in seen_by(window, children, weight, bias, None):
        v, c = dynamic([child.votes for child in seen], settings["iterations"], **asked)
        expect(at(found, window, place), v)
        expect(at(r, window, place, True)[[child.index for child in seen]], c)
    assert not r.requires_grad and r.shape[-1] == 3


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("iterations", [0, 1, 3])
@pytest.mark.parametrize("matrices", [True, False])
def test_pooling_is_the_procedure(window: Window | None, iterations: int, matrices: bool) -> None:
    children, weight, bias, _ = layer(window)
    weight, bias = (weight, bias) if matrices else (None, None)
    options = {"iterations": iterations, "sharpness": 1.7, "window": window}
    found, r = functional.routing_pool(children, weight=weight, bias=bias, return_coefficients=True, **options)
    for place, seen in seen_by(window, children, weight, bias, None):
        expect(at(found, window, place), vector_normed([child.votes for child in seen], iterations, 1.7))
    assert r.shape[-1] == (3 if matrices else 1)
    torch.testing.assert_close(r.sum(-2), torch.ones_like(r.sum(-2)))


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("window", [WINDOWS["set"], WINDOWS["conv"]], ids=["set", "conv"])
@pytest.mark.parametrize("pose", [(2, 2, 2), (1, 3, 5)], ids=["matrix", "vector"])
def test_em_is_the_procedure(window: Window | None, groups: str, pose: tuple[int, int, int]) -> None:
    children, weight, bias, gate = layer(window, pose, groups)
    beta_u, beta_a = draw(3, seed=6), draw(3, seed=7)
    temperatures = [0.3, 0.6, 0.9]
    poses, active, r = functional.em_routing(
        children, gate, weight, beta_u, beta_a, bias=bias, window=window, eps=1e-3,
        inverse_temperature=temperatures, return_coefficients=True,
    )  # fmt: skip
    for place, seen in seen_by(window, children, weight, bias, gate):
        gates = [child.gate for child in seen]
        wanted = em([c.votes for c in seen], gates, beta_u.tolist(), beta_a.tolist(), temperatures, 1e-3)
        expect(at(poses, window, place), wanted[0])
        expect(at(active, window, place), wanted[1])
        expect(at(r, window, place, True), wanted[2])


@pytest.mark.parametrize("model", ["gaussian", "kmeans"])
@pytest.mark.parametrize("window", [WINDOWS["set"], WINDOWS["conv"]], ids=["set", "conv"])
@pytest.mark.parametrize("pose", [(2, 2, 2), (1, 3, 5)], ids=["matrix", "vector"])
@pytest.mark.parametrize("iterations", [1, 3])
def test_heinsen_is_the_procedure(window: Window | None, model: str, pose: tuple, iterations: int) -> None:
    children, weight, bias, _ = layer(window, pose)
    scores = draw(*children.shape[:-2], seed=6)
    use, ignore = draw(len(bias), 3, seed=4), draw(len(bias), 3, seed=5)
    *found, r = functional.heinsen_routing(
        children, scores, weight, bias, use, ignore, model=model, window=window, iterations=iterations,
        return_coefficients=True,
    )  # fmt: skip
    for place, seen in seen_by(window, children, weight, bias, scores):
        inputs = [child.votes for child in seen], [child.gate for child in seen]
        wanted = heinsen(*inputs, use.tolist(), ignore.tolist(), iterations, model)
        for tensor, numbers in zip(found, (wanted[1], wanted[0], wanted[2]), strict=True):
            expect(at(tensor, window, place), numbers)
        expect(at(r, window, place, True), wanted[3])


# ---- what is peculiar to one routing ---------------------------------------------------------------------------------


def test_dynamic_of_zero_children_has_a_gradient() -> None:
    _, weight, _, _ = layer(None)
    for options in ({}, {"compete": "children"}, {"detach": True}, {"leaky": True}):
        children = torch.zeros(2, 6, 2, 2, dtype=torch.float64, requires_grad=True)
        found = functional.dynamic_routing(children, weight, **options)
        assert (found == 0).all()
        assert torch.autograd.grad(found.sum(), children)[0].isfinite().all(), options


def test_detached_coefficients_are_constants() -> None:
    children, weight, bias, _ = (tensor.requires_grad_() for tensor in layer(None))
    for compete in ("parents", "children"):
        found, r = functional.dynamic_routing(
            children, weight, bias=bias, detach=True, compete=compete, return_coefficients=True
        )
        votes = make_votes(see(Votes(as_grid(children), weight, bias, None, 3, SET_WINDOW)))[:, 0, 0]
        wanted = vectors.squash(torch.einsum("bim,bimce->bmce", r, votes), (-2, -1))
        grad = draw(*found.shape, seed=3)
        leaves = [children, weight, bias]
        pairs = zip(torch.autograd.grad(found, leaves, grad), torch.autograd.grad(wanted, leaves, grad), strict=True)
        for got, want in pairs:
            torch.testing.assert_close(got, want, **CLOSE)


def test_leaky_shares_leave_some_for_nobody() -> None:
    children, weight, _, _ = layer(None)
    _, r = functional.dynamic_routing(children, weight, leaky=True, return_coefficients=True)
    assert ((r.sum(-1) > 0.3) & (r.sum(-1) < 1)).all()
    _, first = functional.dynamic_routing(children, weight, leaky=True, iterations=1, return_coefficients=True)
    torch.testing.assert_close(first, torch.full_like(first, 1 / 4))


def test_pool_with_sharpness_0_averages_whatever_the_turns() -> None:
    children, *_ = layer(None)
    wanted = children.mean(1, keepdim=True)
    for iterations in (0, 3):
        found = functional.routing_pool(children, sharpness=0.0, iterations=iterations)
        torch.testing.assert_close(found, wanted, **CLOSE)


def test_pool_activations_and_parents() -> None:
    children, weight, bias, _ = layer(None)
    plain = functional.routing_pool(children, weight=weight)
    for name, function in {
        "relu": torch.relu,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "squash": lambda poses: vectors.squash(poses, (-2, -1)),
    }.items():
        torch.testing.assert_close(functional.routing_pool(children, weight=weight, activation=name), function(plain))
    torch.testing.assert_close(functional.routing_pool(children, weight=weight, activation=torch.exp), plain.exp())
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


GATED: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "attention-first": lambda x, g, w: functional.inverted_attention_routing(x, w, gate=g),
    "attention": lambda x, g, w: functional.inverted_attention_routing(x, w, gate=g, iterations=3),
    "dynamic": lambda x, g, w: functional.dynamic_routing(x, w, gate=g),
    "attention-bias": lambda x, g, w: functional.inverted_attention_routing(
        x, w, gate=g, bias=torch.linspace(-1, 1, 15).view(1, 1, 3, 5)
    ),
    "dynamic-children": lambda x, g, w: functional.dynamic_routing(x, w, gate=g, compete="children"),
    "pooling": lambda x, g, w: functional.routing_pool(x, gate=g, weight=w),
    "em": lambda x, g, w: functional.em_routing(x, g, w, w[0, :, 0, 0], w[0, :, 0, 1]),
    "heinsen": lambda x, g, w: functional.heinsen_routing(
        x, g.masked_fill(g == 0, -torch.inf), w, None, w[:1, :, 0, 0], w[:1, :, 0, 1]
    ),
}


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("groups", [24, 8, 1])
@pytest.mark.parametrize("name", GATED)
def test_a_gate_of_0_hides_whatever_is_behind(name: str, groups: int, number: float) -> None:
    """The child gets no gradient, its gate gets none where the child is broken, and nobody else sees a difference."""
    generator = torch.Generator().manual_seed(1)
    children, weight = (torch.randn(s, generator=generator) for s in ((2, 24, 3, 4), (groups, 3, 4, 5)))
    gate = torch.rand(2, 24, generator=generator).clamp(0.1, 0.9)
    gate[:, 5] = gate[1, 7] = 0.0
    shut = gate == 0
    found = []
    for behind in (number, 0.0):
        given = [children.clone(), gate.clone(), weight.clone()]
        given[0][:, 5, 1] = given[0][1, 7, 0, 2] = behind  # one number of a pose is enough
        given = [one.requires_grad_() for one in given]
        routed = GATED[name](*given)
        results = [routed] if isinstance(routed, Tensor) else [x for x in routed if isinstance(x, Tensor)]
        total = sum((result.sin() * (k + 1)).sum() for k, result in enumerate(results))
        found.append([*results, *torch.autograd.grad(total, given)])
    dchildren, dgate = found[0][-3:-1]
    assert (dchildren[shut] == 0).all() and (dgate[shut] == 0).all()
    for one in found:
        one[-2] = one[-2][~shut]
    for broken, clean in zip(*found, strict=True):
        torch.testing.assert_close(broken, clean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("columns", [2, 8])
@pytest.mark.parametrize("window", [None, Window(3, 2, 1)], ids=["set", "grid"])
def test_a_first_turn_in_half_precision_sums_wide(window: Window | None, columns: int) -> None:
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


def test_em_schedules() -> None:
    children, weight, _, gate = layer(None)
    beta = draw(3, seed=6)
    arguments = (children, gate, weight, beta, beta)
    by_default = functional.em_routing(*arguments, iterations=2)
    for same in ([0.0005, 0.000975], (0.0005, 0.000975), lambda turn: 0.01 * (1 - 0.95 ** (turn + 1))):
        for got, want in zip(
            functional.em_routing(*arguments, iterations=2, inverse_temperature=same), by_default, strict=True
        ):
            torch.testing.assert_close(got, want, **CLOSE)
    constant = functional.em_routing(*arguments, inverse_temperature=1e-3)
    assert not torch.equal(constant[1], functional.em_routing(*arguments)[1])
    torch.testing.assert_close(
        functional.em_routing(children, None, weight, beta, beta)[0],
        functional.em_routing(children, torch.ones_like(gate), weight, beta, beta)[0],
    )


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
    children, weight, bias, _ = layer(None, groups="one")
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


def test_heinsen_takes_any_number_of_children_and_parents() -> None:
    _, weight, _, _ = layer(None, groups="one")
    bias, beta = draw(1, 1, 2, 2, seed=2), draw(1, 1, seed=4)
    for count in (1, 5, 9):
        children, scores = draw(2, count, 2, 2, seed=count), draw(2, count, seed=7)
        own = functional.heinsen_routing(children, scores, weight[:, :1].expand(-1, count, -1, -1), bias, beta, beta)
        assert own.scores.shape == (2, count) and own.poses.shape == (2, count, 2, 2)
        one = functional.heinsen_routing(children, scores, weight, bias.expand(-1, 3, -1, -1), beta, beta)
        assert one.scores.shape == (2, 3)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("batch", [1, 3, 40])
def test_votes_without_matrices_have_the_bias_of_their_parent(batch: int, rows: int) -> None:
    children, bias = draw(batch, 5, 1, 4), draw(rows, 3, 1, 4, seed=1)
    own = torch.eye(4, dtype=torch.float64).expand(5, 3, 4, 4).contiguous()
    found = functional.dynamic_routing(children, None, bias=bias)
    torch.testing.assert_close(found, functional.dynamic_routing(children, own, bias=bias))
