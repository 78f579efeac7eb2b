"""Loops of the oracle's passes are the papers' procedures."""

from __future__ import annotations

import pytest
import torch
from oracle_routings import Votes, dynamic, em, heinsen, positions, vector_normed
from torch import Tensor

from fastcaps import reference
from fastcaps.votes import SET_WINDOW
from fastcaps.reference.routings import (
    default_inverse_temperature,
    dynamic_routing,
    em_routing,
    heinsen_routing,
    routing_pool,
)
from fastcaps.vectors import squash

CONV = (3, 2, 2, 1, 0, 0, 1, 1)
PADDED = (3, 3, 1, 2, 1, 1, 1, 1)
CLOSE = {"rtol": 1e-10, "atol": 1e-11}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lists(*tensors: Tensor | None) -> list:
    return [None if tensor is None else tensor.tolist() for tensor in tensors]


def layer(window: tuple[int, ...], groups: int | None = None, parents: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Return children, weight and bias of a small set or grid with 2 x 2 poses."""
    grid, types = ((1, 1), 5) if window == SET_WINDOW else ((5, 4), 2)
    count = types * window[0] * window[1]
    return draw(2, *grid, types, 2, 2), draw(groups or count, parents, 2, 2, seed=1), draw(count, parents, 2, 2, seed=2)


def expect(found: Tensor, expected: list) -> None:
    """Assert that one position's tensor has the numbers of nested lists, whatever way poses are cut."""
    torch.testing.assert_close(found.reshape(-1), torch.tensor(expected, dtype=torch.float64).reshape(-1), **CLOSE)


@pytest.mark.parametrize("window", [SET_WINDOW, CONV, PADDED])
@pytest.mark.parametrize("iterations", [1, 2, 4])
@pytest.mark.parametrize(
    "options", [{}, {"compete": "children"}, {"leaky": True}, {"detach": True}, {"detach": True, "leaky": True}]
)
def test_dynamic(window: tuple[int, ...], iterations: int, options: dict) -> None:
    children, weight, bias = layer(window)
    parents, shares = dynamic_routing(children, weight, bias, iterations=iterations, window=window, **options)
    oracle_options = {name: value for name, value in options.items() if name != "detach"}
    for place, seen in positions(*lists(children, weight, bias), None, window):
        v, c = dynamic([child.votes for child in seen], iterations, **oracle_options)
        expect(parents[place], v)
        expect(shares[place][[child.index for child in seen]], c)
    absent = reference.windows(torch.ones(children.shape[:4]), window) == 0
    assert (shares[absent] == 0).all()


def test_dynamic_with_one_bias_for_all_parents_may_leak() -> None:
    children, weight, bias = layer(SET_WINDOW)
    parents, _ = dynamic_routing(children, weight, bias[:1, :1], leaky=True)
    for place, seen in positions(*lists(children, weight, bias[:1, :1]), None, SET_WINDOW):
        expect(parents[place], dynamic([child.votes for child in seen], 3, leaky=True)[0])
    with pytest.raises(ValueError, match="compete='parents'"):
        dynamic_routing(children, weight, leaky=True, compete="children")


@pytest.mark.parametrize("compete", ["parents", "children"])
def test_detached_dynamic_routing_differentiates_the_last_sum_alone(compete: str) -> None:
    children, weight, bias = (t.requires_grad_() for t in layer(SET_WINDOW))
    parents, shares = dynamic_routing(children, weight, bias, compete=compete, detach=True)
    votes = reference.votes(children, weight, bias, SET_WINDOW)
    expected = squash(torch.einsum("bhwim,bhwimce->bhwmce", shares, votes), (-2, -1))
    grad = draw(*parents.shape, seed=3)
    found = torch.autograd.grad(parents, (children, weight, bias), grad)
    for gradient, wanted in zip(found, torch.autograd.grad(expected, (children, weight, bias), grad), strict=True):
        torch.testing.assert_close(gradient, wanted, **CLOSE)
    whole, _ = dynamic_routing(children, weight, bias, compete=compete)
    torch.testing.assert_close(whole, parents, **CLOSE)
    assert not torch.allclose(torch.autograd.grad(whole, children, grad)[0], found[0])


def test_dynamic_of_zero_children_has_finite_gradients() -> None:
    children, weight, _ = layer(SET_WINDOW)
    children = torch.zeros_like(children).requires_grad_()
    for compete in ("parents", "children"):
        parents, _ = dynamic_routing(children, weight, compete=compete)
        assert (parents == 0).all()
        assert torch.autograd.grad(parents.sum(), children)[0].isfinite().all()


@pytest.mark.parametrize("iterations", [0, 1, 3])
@pytest.mark.parametrize("window", [SET_WINDOW, CONV, PADDED])
def test_pooling(window: tuple[int, ...], iterations: int) -> None:
    for matrices in (True, False):
        children, weight, bias = layer(window)
        weight, bias = (weight, bias) if matrices else (None, None)
        pooled, _ = routing_pool(children, weight, bias, iterations=iterations, sharpness=1.7, window=window)
        for place, seen in positions(*lists(children, weight, bias), None, window):
            expect(pooled[place], vector_normed([child.votes for child in seen], iterations, 1.7))


def test_pooling_with_sharpness_0_is_average_pooling() -> None:
    features = draw(2, 12, 5, 6)
    capsules = features.unflatten(1, (3, 4)).movedim((3, 4), (1, 2)).unsqueeze(-2)  # 3 groups of 4 channels
    pooled, shares = routing_pool(capsules[:, :, :, :1], sharpness=0.0, window=(5, 6, 1, 1, 0, 0, 1, 1))
    torch.testing.assert_close(pooled.flatten(), features[:, :4].mean((2, 3)).flatten(), **CLOSE)
    torch.testing.assert_close(shares, torch.full_like(shares, 1 / 30), **CLOSE)


def test_very_sharp_pooling_picks_one_child() -> None:
    children = draw(1, 1, 1, 9, 1, 4)
    pooled, _ = routing_pool(children, sharpness=1e4)
    assert (pooled[0, 0, 0, 0] - children[0, 0, 0]).abs().amax((-2, -1)).min() < 1e-9


@pytest.mark.parametrize("eps", [0.0, 1e-3])
@pytest.mark.parametrize("window", [SET_WINDOW, CONV])
@pytest.mark.parametrize("groups", [None, 1])
def test_em(window: tuple[int, ...], groups: int | None, eps: float) -> None:
    children, weight, bias = layer(window, groups)
    activations = torch.rand(children.shape[:4], generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    beta_u, beta_a = draw(3, seed=6), draw(3, seed=7)

    def schedule(turn: int) -> float:
        return 0.3 * (turn + 1)

    arguments = (children, activations, weight, beta_u, beta_a, bias)
    poses, active, shares = em_routing(*arguments, iterations=3, inverse_temperature=schedule, eps=eps, window=window)
    temperatures = [schedule(turn) for turn in range(3)]
    for place, seen in positions(*lists(children, weight, bias, activations), window):
        gates = [child.gate for child in seen]
        mu, a, r = em([child.votes for child in seen], gates, *lists(beta_u, beta_a), temperatures, eps)
        expect(poses[place], mu)
        expect(active[place], a)
        expect(shares[place], r)


def test_em_schedule() -> None:
    assert [round(default_inverse_temperature(turn), 9) for turn in range(3)] == [0.0005, 0.000975, 0.00142625]


def test_coordinate_addition_is_a_bias() -> None:
    """Hinton et al. 2018: a child's place is added to the first two numbers of the right-hand column of its votes."""
    weight = layer(SET_WINDOW)[1]
    rows, columns = 3, 4
    grid = draw(2, rows, columns, 2, 2, 2)
    bias = torch.zeros(rows, columns, 2, 1, 2, 2, dtype=torch.float64)
    bias[..., 0, 1] = ((torch.arange(rows, dtype=torch.float64) + 0.5) / rows)[:, None, None, None]
    bias[..., 1, 1] = ((torch.arange(columns, dtype=torch.float64) + 0.5) / columns)[:, None, None]
    weight = weight[:2]  # one for each type: shared over space
    activations = torch.rand(grid.shape[:4], dtype=torch.float64)
    beta = draw(3, seed=6)
    window = (rows, columns, 1, 1, 0, 0, 1, 1)
    poses, active, _ = em_routing(grid, activations, weight, beta, beta, bias.flatten(0, 2), window=window)
    for b in range(2):
        votes: Votes = []
        for y in range(rows):
            for x in range(columns):
                for n in range(2):
                    child = [grid[b, y, x, n] @ weight[n, m] for m in range(3)]
                    for vote in child:
                        vote[0, 1] += (y + 0.5) / rows
                        vote[1, 1] += (x + 0.5) / columns
                    votes.append([vote.flatten().tolist() for vote in child])
        gates = activations[b].flatten().tolist()
        temperatures = [default_inverse_temperature(turn) for turn in range(3)]
        mu, a, _ = em(votes, gates, *lists(beta, beta), temperatures, eps=1e-8)
        expect(poses[b, 0, 0], mu)
        expect(active[b, 0, 0], a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_em_stays_finite_at_the_edges(dtype: torch.dtype) -> None:
    """Equal votes (variances of eps = 1e-12), activations of exactly 0 and 1, saturated parents, nobody there."""
    children, weight, _ = layer(SET_WINDOW)
    for k, pattern in enumerate(([0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1])):
        same = children[:, :, :, :1].expand(-1, -1, -1, 5, -1, -1).to(dtype).requires_grad_()
        shared = weight[:1].to(dtype).requires_grad_()
        activations = torch.tensor(pattern, dtype=dtype).expand(2, 1, 1, 5).clone().requires_grad_()
        beta_u, beta_a = (draw(3, seed=k).to(dtype).mul(100).requires_grad_() for k in (6, 7))
        leaves = (same, activations, shared, beta_u, beta_a)
        poses, active, shares = em_routing(*leaves, inverse_temperature=lambda turn: 10.0, eps=1e-12)
        assert poses.isfinite().all() and active.isfinite().all() and shares.isfinite().all(), k
        gradients = torch.autograd.grad(poses.sum() + active.sum(), leaves)
        assert all(gradient.isfinite().all() for gradient in gradients), k


@pytest.mark.parametrize("model", ["gaussian", "kmeans"])
@pytest.mark.parametrize("form", ["fixed", "variable inputs", "variable inputs and outputs"])
@pytest.mark.parametrize("iterations", [1, 3])
def test_heinsen(model: str, form: str, iterations: int) -> None:
    children, weight, bias = layer(SET_WINDOW)
    use, ignore = draw(5, 3, seed=4), draw(5, 3, seed=5)
    if form != "fixed":
        weight, bias, use, ignore = weight[:1], bias[:1], use[:1], ignore[:1]
    if form == "variable inputs and outputs":  # as many parents as children, told apart by nothing
        weight, bias, use, ignore = weight[:, :1].expand(-1, 5, -1, -1), bias[:, :1], use[:, :1], ignore[:, :1]
    scores = draw(2, 1, 1, 5, seed=6)
    arguments = (children, scores, weight, bias, use, ignore)
    found = heinsen_routing(*arguments, model=model, iterations=iterations)
    tables = lists(use.expand(-1, weight.shape[1]), ignore.expand(-1, weight.shape[1]))
    for place, seen in positions(*lists(children, weight, bias, scores), SET_WINDOW):
        inputs = [child.votes for child in seen], [child.gate for child in seen]
        for tensor, wanted in zip(found, heinsen(*inputs, *tables, iterations, model), strict=True):
            expect(tensor[place], wanted)


@pytest.mark.parametrize("model", ["gaussian", "kmeans"])
def test_infinite_scores_are_masks(model: str) -> None:
    children, weight, bias = layer(SET_WINDOW, groups=1)
    use, ignore = draw(1, 3, seed=4), draw(1, 3, seed=5)
    scores = torch.full((2, 1, 1, 5), torch.inf, dtype=torch.float64)
    few = heinsen_routing(children[:, :, :, :3], scores[..., :3], weight, bias[:1], use, ignore, model=model)
    scores[..., 3:] = -torch.inf
    children[:, :, :, 3] = torch.nan
    children[:, :, :, 4] = torch.inf
    leaves = [t.clone().requires_grad_() for t in (children, scores, weight, bias[:1], use, ignore)]
    found = heinsen_routing(*leaves, model=model)
    for tensor, wanted in zip(found[:3], few[:3], strict=True):
        torch.testing.assert_close(tensor, wanted, **CLOSE)
    gradients = torch.autograd.grad(sum(tensor.sum() for tensor in found[:3]), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][:, :, :, 3:] == 0).all() and (gradients[1] == 0).all()


def test_heinsen_on_a_grid() -> None:
    children, weight, bias = layer(CONV)
    use, ignore, scores = draw(12, 3, seed=4), draw(12, 3, seed=5), draw(2, 5, 4, 2, seed=6)
    found = heinsen_routing(children, scores, weight, bias, use, ignore, window=CONV)
    for place, seen in positions(*lists(children, weight, bias, scores), CONV):
        inputs = [child.votes for child in seen], [child.gate for child in seen]
        for tensor, wanted in zip(found, heinsen(*inputs, *lists(use, ignore), 3), strict=True):
            expect(tensor[place], wanted)


def test_gradients_of_whole_routings() -> None:
    children, weight, bias = (t.requires_grad_() for t in layer(SET_WINDOW))
    gates = torch.rand(2, 1, 1, 5, dtype=torch.float64, requires_grad=True)
    beta = draw(5, 3, seed=4).requires_grad_()
    leaves = children, weight, bias, gates, beta
    for run in (
        lambda: dynamic_routing(children, weight, bias)[0],
        lambda: dynamic_routing(children, weight, bias, compete="children")[0],
        lambda: routing_pool(children, weight, bias, gates)[0],
        lambda: em_routing(children, gates, weight, beta[0], beta[1], bias, eps=1e-3)[:2],
        lambda: heinsen_routing(children, gates, weight, bias, beta, beta)[:3],
        lambda: heinsen_routing(children, gates, weight, bias, beta, beta, model="kmeans")[:3],
    ):
        assert torch.autograd.gradcheck(lambda *_, run=run: run(), leaves, fast_mode=True)
