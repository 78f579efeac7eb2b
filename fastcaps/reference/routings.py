"""The oracle's routings: every algorithm of the papers as a short loop of passes.

Arguments are in op layout (see :mod:`fastcaps.reference`): children ``[B, H, W, N, C, D]``, weight ``[G, M, D, E]``,
bias ``[I | 1, M | 1, C, E]``, gates, activations and scores of children ``[B, H, W, N]``, a window of eight numbers.
Poses of parents are ``[B, Ho, Wo, M, C, E]``, their activations and scores ``[B, Ho, Wo, M]``.

Every function also returns the routing coefficients of its last turn, ``[B, Ho, Wo, I, M]``, without gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcaps.geometry import SET_WINDOW
from fastcaps.reference import attention, gaussian, pooling
from fastcaps.reference.sight import votes, windows
from fastcaps.vectors import squash, unit

__all__ = ["default_inverse_temperature", "dynamic_routing", "em_routing", "heinsen_routing", "routing_pool"]

POSE = (-2, -1)


def dynamic_routing(
    children: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    iterations: int = 3,
    compete: Literal["parents", "children"] = "parents",
    detach: bool = False,
    leaky: bool = False,
    window: Sequence[int] = SET_WINDOW,
) -> tuple[Tensor, Tensor]:
    """Route as Sabour et al. 2017: the log-priors are ``b_im = <V_im, sum of v_m so far>``, ``v = squash(S)``.

    So each turn is an attention pass with the running sum of the parents as its query and a scale of 1; where the
    children compete, a pooling pass.

    ``detach``: coefficients are constants to the gradient, which so flows through the last turn's sum alone.
    ``leaky``: one logit of 0 more for every child, whose share is dropped; that is a parent whose matrix and bias are
    zeros. It needs the parents to compete. Gates are as in the passes: factors of the coefficients where the parents
    compete, inside the softmax where the children do.
    """
    if leaky and compete == "children":
        raise ValueError("leaky routing has a parent too many: it needs compete='parents'")
    many = weight.shape[1]
    if leaky:
        weight = F.pad(weight, (0, 0, 0, 0, 0, 1))
        if bias is not None:
            bias = F.pad(bias.expand(-1, many, -1, -1), (0, 0, 0, 0, 0, 1))

    def shares(query: Tensor | None) -> Tensor:
        if compete == "children":
            return pooling.coefficients(children, weight, query, bias, gate, 1.0, False, window)
        return attention.coefficients(children, weight, query, bias, 1.0, window)

    def route(query: Tensor | None) -> Tensor:
        if detach:  # the shares have no gradient, and so none reaches the query either
            used = shares(query)
            if gate is not None and compete == "parents":
                used = used * windows(gate, window)[..., None]
            return torch.einsum("bhwim,bhwimce->bhwmce", used, votes(children, weight, bias, window))
        if compete == "children":
            return pooling.pooling_pass(children, weight, query, bias, gate, 1.0, False, window)[0]
        return attention.attention_pass(children, weight, query, bias, gate, None, None, 1.0, 0.0, False, window)[0]

    query = None
    for _ in range(iterations - 1):
        parents = squash(route(query), POSE)
        query = parents if query is None else query + parents
    return squash(route(query), POSE)[:, :, :, :many], shares(query)[..., :many]


def routing_pool(
    children: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    iterations: int = 3,
    sharpness: float = 0.5,
    window: Sequence[int] = SET_WINDOW,
) -> tuple[Tensor, Tensor]:
    """Pool as Zhao & Huang 2019: the children compete, keys and proposals are unit vectors, λ is the sharpness.

    ``iterations`` turns find the coefficients, one more pass sums up with them. λ = 0 is average pooling. The
    activation that follows is the caller's.
    """
    query = None
    for _ in range(iterations):
        sums, _ = pooling.pooling_pass(children, weight, query, bias, gate, sharpness, True, window)
        proposal = unit(sums, POSE)
        query = proposal if query is None else query + proposal
    settings = (sharpness, True, window)
    sums, _ = pooling.pooling_pass(children, weight, query, bias, gate, *settings)
    return sums, pooling.coefficients(children, weight, query, bias, gate, *settings)


def default_inverse_temperature(turn: int) -> float:
    """Return EM routing's customary λ of a turn that counts from 0: ``0.01 (1 - 0.95^(turn + 1))``."""
    return 0.01 * (1 - 0.95 ** (turn + 1))


def em_routing(
    children: Tensor,
    activations: Tensor,
    weight: Tensor,
    beta_u: Tensor,
    beta_a: Tensor,
    bias: Tensor | None = None,
    *,
    iterations: int = 3,
    inverse_temperature: Callable[[int], float] = default_inverse_temperature,
    eps: float = 1e-8,
    window: Sequence[int] = SET_WINDOW,
) -> tuple[Tensor, Tensor, Tensor]:
    """Route as Hinton et al. 2018; return poses, activations and coefficients.

    A Gaussian pass a turn, gates being the children's activations: ``cost_m = sum_ce (beta_u_m + ln sigma_m) n_m``,
    ``a_m = sigmoid(λ (beta_a_m - cost_m))``, and the next turn's log-weight is ``ln a_m - sum_ce ln sigma_m``; ln a is
    taken as a log-sigmoid, so that no activation of 0 is ever put into a logarithm. ``beta_u`` and ``beta_a`` are
    ``[M]``. ``eps`` is added to the counts under the moments and to the variances. Coordinate addition is a bias.
    """
    mean = variance = log_weight = None
    shares = score = None
    for turn in range(iterations):
        shares = gaussian.coefficients(children, weight, mean, variance, log_weight, bias, window)
        counts, mean, variance, _ = gaussian.gaussian_pass(
            children, weight, mean, variance, log_weight, bias, activations, None, None, eps, window
        )
        variance = variance + eps
        log_sigma = 0.5 * variance.log().sum(POSE)
        numbers = variance.shape[-2] * variance.shape[-1]
        score = inverse_temperature(turn) * (beta_a - (numbers * beta_u + log_sigma) * counts)
        log_weight = F.logsigmoid(score) - log_sigma
    assert mean is not None and score is not None and shares is not None
    return mean, score.sigmoid(), shares


def heinsen_routing(
    children: Tensor,
    scores: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    beta_use: Tensor,
    beta_ignore: Tensor,
    *,
    iterations: int = 3,
    model: Literal["gaussian", "kmeans"] = "gaussian",
    eps: float = 1e-5,
    window: Sequence[int] = SET_WINDOW,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Route as Heinsen 2019; return scores, means, variances and coefficients.

    A Gaussian pass a turn, gates being ``sigmoid(scores)``: a score of -∞ is a child that is not there, one of +∞ a
    child that certainly is. The evidence is the parents' score, the next log-weight ``logsigmoid(score_m) - sum_ce ln
    sigma_m``; k-means leaves sigma out of both. Betas are ``[I | 1, M | 1]``; with one row, weights of G = 1 and a bias
    of one row, any number of children will do, and with one column each, any number of parents (expand the weight).
    """
    gate = scores.sigmoid()
    mean: Tensor | None = None
    variance: Tensor | None = None
    log_weight: Tensor | None = None
    shares = score = None
    for _ in range(iterations):
        shape = variance if model == "gaussian" else None
        shares = gaussian.coefficients(children, weight, mean, shape, log_weight, bias, window)
        _, mean, variance, score = gaussian.gaussian_pass(
            children, weight, mean, shape, log_weight, bias, gate, beta_use, beta_ignore, eps, window
        )
        variance = variance + eps
        log_weight = F.logsigmoid(score)
        if model == "gaussian":
            log_weight = log_weight - 0.5 * variance.log().sum(POSE)
    assert mean is not None and variance is not None and score is not None and shares is not None
    return score, mean, variance, shares
