"""Dynamic routing with learned priors and with an eps under squash's root, against loops that store every vote."""

from __future__ import annotations

import pytest
import torch

from fastcaps import DynamicRouting
from fastcaps.functional import Window, dynamic_routing
from fastcaps.reference.seen import make_votes, see
from fastcaps.votes import Votes


def by_loops(votes, prior, iterations, eps, compete, detach):
    """Procedure 1 of Sabour et al. with the logits of all pairs kept, as published codes write it."""
    seen = see(votes)
    every = make_votes(seen)  # [B, Ho, Wo, I, M, C, E]
    logits = torch.zeros(every.shape[:5], dtype=every.dtype) + (0 if prior is None else prior)
    for _ in range(iterations):
        if compete == "parents":
            shares = seen.gated(logits.softmax(-1))
        else:
            there = torch.ones(1) if seen.gate is None else seen.gate[..., None]
            shares = there * logits.exp()
            shares = shares / shares.sum(3, keepdim=True)
        if detach:
            shares = shares.detach()
        sums = (shares[..., None, None] * every).sum(3)
        square = sums.square().sum((-2, -1), keepdim=True)
        parents = square / (1 + square) * sums / (square + eps).sqrt()
        agreement = (every * parents.unsqueeze(3)).sum((-2, -1))
        logits = logits + (agreement.detach() if detach else agreement)
    return parents


@pytest.mark.parametrize("compete", ["parents", "children"])
@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize(("with_prior", "eps"), [(True, 0.0), (False, 1e-3), (True, 1e-3)])
@pytest.mark.parametrize("weighted", [True, False])
def test_prior_and_eps_are_the_loops(compete, detach, iterations, with_prior, eps, weighted):
    torch.manual_seed(0)
    window = Window(2, stride=2, padding=1)  # every position sees a child: the loops divide by lengths
    children = torch.randn(2, 3, 3, 5, 2, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(12, 4, 3, 2, dtype=torch.float64, requires_grad=True) if weighted else None
    bias = torch.randn(1, 4, 2, 2 if weighted else 3, dtype=torch.float64, requires_grad=True)
    gate = torch.rand(2, 3, 3, 5, dtype=torch.float64)
    prior = torch.randn(12, 4, dtype=torch.float64, requires_grad=True) if with_prior else None
    found = dynamic_routing(
        children, weight, iterations=iterations, bias=bias, gate=gate, compete=compete, detach=detach, prior=prior,
        eps=eps, window=window,
    )  # fmt: skip
    votes = Votes.of(children, weight, bias, gate, window)
    exact = by_loops(votes, prior, iterations, eps, compete, detach).movedim(3, 1)
    torch.testing.assert_close(found, exact)
    inputs = [x for x in (children, weight, bias, prior) if x is not None]
    grad = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, grad, allow_unused=True),
        torch.autograd.grad(exact, inputs, grad, allow_unused=True),
        strict=True,
    ):
        if theirs is None or ours is None:
            assert (ours is None or not ours.any()) and (theirs is None or not theirs.any())
        else:
            torch.testing.assert_close(ours, theirs)


def test_a_prior_of_another_shape_is_refused_by_name():
    children, weight = torch.randn(2, 5, 1, 4), torch.randn(5, 3, 4, 4)
    with pytest.raises(ValueError, match=r"prior must have shape \[I or 1, M\] = \[5 or 1, 3\], got \[5, 4\]"):
        dynamic_routing(children, weight, prior=torch.zeros(5, 4))
    with pytest.raises(ValueError, match="leaky must be False with a prior"):
        dynamic_routing(children, weight, prior=torch.zeros(5, 3), leaky=True)
    with pytest.raises(ValueError, match="leaky must be False with prior='learned'"):
        DynamicRouting(5, 3, 4, 4, prior=True, leaky=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("batch", [1, 3, 40])
def test_votes_without_matrices_have_the_bias_of_their_parent(batch, iterations, rows, dtype):
    torch.manual_seed(1)
    children, bias = torch.randn(batch, 5, 1, 4, dtype=dtype), torch.randn(rows, 3, 1, 4, dtype=dtype)
    own = torch.eye(4, dtype=dtype).expand(5, 3, 4, 4).contiguous()
    found = dynamic_routing(children, None, bias=bias, iterations=iterations)
    torch.testing.assert_close(found, dynamic_routing(children, own, bias=bias, iterations=iterations))
