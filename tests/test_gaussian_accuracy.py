"""EM and Heinsen's routing where a parent has about one effective child, against routings that keep their votes.

Such a parent's variance is rounding beside its mean, and its gradients are differences of numbers a hundred thousand
times their size. Eager autograd loses nothing there: it meets the same rounded numbers on the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cases import Case
from registry import GAUSSIAN, Call
from suite import native_only
from torch import Tensor

from fastcaps import functional
from fastcaps.rules import Rule
from tools.judge import Bar

SHAPES = {  # batch, children, parents, (C, D, E), groups: with lanes that are filled and not, positions and children
    "one-child": (2, 1, 3, (4, 4, 4), 1),
    "one-child-16": (16, 1, 3, (4, 4, 4), 1),
    "one-child-small-pose": (3, 1, 3, (1, 2, 2), 1),
    "one-child-vector": (2, 1, 5, (1, 8, 16), 1),
    "one-child-large-pose": (8, 1, 2, (16, 8, 6), 1),
    "more-parents": (2, 8, 10, (4, 4, 4), 8),
    "more-parents-19": (19, 8, 10, (4, 4, 4), 8),
    "more-parents-shared": (1, 24, 40, (1, 8, 16), 1),
    "children-in-lanes": (1, 20, 30, (2, 3, 2), 20),
}
TURNS = 3
Tensors = Sequence[Tensor]


def gaussians(votes: Tensor, gate: Tensor, share: Tensor, eps: float) -> tuple[Tensor, ...]:
    """Return w ``[B, I, M]``, counts, means and variances ``[B, M, C, E]`` without eps."""
    shares = gate[..., None] * share
    counts = shares.sum(1)
    inverse = 1 / (counts + eps)[..., None, None]
    means = torch.einsum("bim,bimce->bmce", shares, votes) * inverse
    return shares, counts, means, torch.einsum("bim,bimce->bmce", shares, (votes - means[:, None]).square()) * inverse


def eager(
    routing: str,
    children: Tensor,
    gate: Tensor,
    weight: Tensor,
    first: Tensor,
    second: Tensor,
    eps: float,
    heat: float | None = None,
):
    """Return scores, means and variances of the last turn."""
    matrices = weight.expand(children.shape[1], -1, -1, -1) if len(weight) == 1 else weight
    votes = torch.einsum("bicd,imde->bimce", children, matrices)
    share = votes.new_full(votes.shape[:3], 1 / votes.shape[2])
    for temperature in functional.em.inverse_temperatures(heat, TURNS):
        shares, counts, means, variances = gaussians(votes, gate, share, eps)
        variances = variances + eps
        log_sigma = 0.5 * variances.log().sum((-2, -1))
        if routing == "em":
            numbers = variances.shape[-2] * variances.shape[-1]
            scores = temperature * (second - (numbers * first + log_sigma) * counts)
        else:
            scores = (first * shares - second * (gate[..., None] - shares)).sum(1)
        distance = ((votes - means[:, None]).square() / (2 * variances[:, None])).sum((-2, -1))
        share = ((F.logsigmoid(scores) - log_sigma)[:, None] - distance).softmax(-1)
    return (scores.sigmoid() if routing == "em" else scores), means, variances


def ours(
    routing: str,
    children: Tensor,
    gate: Tensor,
    weight: Tensor,
    first: Tensor,
    second: Tensor,
    eps: float,
    heat: float | None = None,
):
    """Return what of that the public function returns."""
    if routing == "em":
        means, activations = functional.em_routing(
            children, gate, weight, first, second, iterations=TURNS, eps=eps, inverse_temperature=heat
        )
        return activations, means, None
    found = functional.heinsen_routing(
        children, torch.logit(gate), weight, None, first[None], second[None], iterations=TURNS, eps=eps
    )
    return found.scores, found.poses, found.variances


def tensors(shape: str, seed: int) -> list[Tensor]:
    """Return children, gates, matrices, the two betas, and gradients of scores, means and variances."""
    batch, count, parents, (rows, depth, columns), groups = SHAPES[shape]
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    given = [draw(batch, count, rows, depth), draw(batch, count).sigmoid(), draw(groups, parents, depth, columns)]
    given[2] *= depth**-0.5
    pose = (batch, parents, rows, columns)
    return [*given, draw(parents), draw(parents), draw(batch, parents), draw(*pose), draw(*pose)]


def training(
    run: Callable[..., tuple[Tensor | None, ...]], routing: str, eps: float, given: Tensors
) -> dict[str, Tensor]:
    """Return results and gradients by name."""
    leaves = [tensor.detach().requires_grad_() for tensor in given[:5]]
    finals = dict(zip(("scores", "means", "variances"), run(routing, *leaves, eps), strict=True))
    if routing == "em":
        del finals["variances"]  # which its function does not return
    found = torch.autograd.grad(list(finals.values()), leaves, list(given[5 : 5 + len(finals)]))
    names = ("dchildren", "dgate", "dweight", "dfirst", "dsecond")
    return {name: one.detach() for name, one in (*finals.items(), *zip(names, found, strict=True))}


@native_only
@pytest.mark.parametrize("eps", [1e-5, 1e-8, 1e-2], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("routing", ["heinsen", "em", "em-hot"])
def test_at_most_twice_the_error_of_eager(routing: str, shape: str, eps: float) -> None:
    """Of six draws of the numbers at most one may err more: eager is lucky now and then.

    ``hot``: activations are 1, or 0, so that no gradient comes by way of the last variances.
    """
    routing, _, hot = routing.partition("-")
    theirs, mine = (partial(run, heat=1.0 if hot else None) for run in (eager, ours))
    wrong = []
    for seed in range(6):
        given = tensors(shape, seed)
        bar = Bar(lambda numbers: training(theirs, routing, eps, numbers), given)
        complaints = bar.judge(training(mine, routing, eps, given)).complaints
        wrong += [complaints] if complaints else []
    assert len(wrong) <= 1, wrong


@native_only
@pytest.mark.parametrize("number", [torch.nan, torch.inf, 1e30, 1e19], ids=str)
@pytest.mark.parametrize("broken", [0, -1], ids=["children", "gradients"])
@pytest.mark.parametrize("shape", ["one-child-16", "more-parents-19"])
@pytest.mark.parametrize("routing", ["heinsen", "em"])
def test_a_broken_sample_costs_its_neighbours_nothing(routing: str, shape: str, broken: int, number: float) -> None:
    """The children of the other samples, which are a vector's other lanes, keep all their digits."""

    def neighbours(run: Callable[..., tuple[Tensor | None, ...]], given: Tensors) -> dict[str, Tensor]:
        found = training(run, routing, 1e-5, given)
        own = found.keys() - {"dweight", "dfirst", "dsecond"}  # what belongs to a sample
        return {name: torch.cat((found[name][:1], found[name][2:])) for name in own}

    wrong = []
    for seed in range(6):
        given = tensors(shape, seed)
        given[broken if routing == "heinsen" or broken == 0 else -2][1] = number  # EM returns no variances
        bar = Bar(lambda numbers: neighbours(eager, numbers), given)
        complaints = bar.judge(neighbours(ours, given)).complaints
        wrong += [complaints] if complaints else []
    assert len(wrong) <= 1, wrong


@native_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("batch", [2, 5])
def test_a_sample_has_the_same_bits_beside_any_other(batch: int, dtype: torch.dtype) -> None:
    """What is done for a parent with little variance is not done for those who share a vector with it."""
    case = Case("beside", Rule.EM, batch, types=7, parents=5, pose=(4, 4, 4), bias="IM", start=True, turns=2, betas="M")
    call = GAUSSIAN.call(replace(case, log_weight=True, dtype=dtype))
    clean = call.training(Call.by_op)
    for name, number in (("log_weight", torch.nan), ("children", 1e4), ("mean", torch.nan)):
        other = call.given[name].clone()
        other[0] = number
        found = replace(call, given={**call.given, name: other}).training(Call.by_op)
        for result in (*GAUSSIAN.results, "dchildren", "dmean", "dvariance", "dlog_weight"):
            assert torch.equal(found[result][1:], clean[result][1:]), (name, result)
