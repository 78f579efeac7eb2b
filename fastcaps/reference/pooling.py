"""The reference of routings whose children compete: vector-normed pooling, and dynamic routing of that kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastcaps.checks import widen
from fastcaps.reference.derivatives import differentiate, inverse_or_zero
from fastcaps.reference.verbs import VoteBlocks, blocks_of
from fastcaps.rules import DETACH, Rule
from fastcaps.vectors import squash, unit
from fastcaps.votes import POSE, VoteInputs


def _logits(seen: VoteBlocks, query: Tensor | None, scale: float, normalize: bool) -> Tensor:
    """Return ``a_im = scale <Q_m, K_im>`` ``[*places, I, M]``, with ``K = V`` or ``V / |V|``; 0 without a query."""
    if query is None:
        return seen.zeros()
    return scale * (seen.mapped(lambda made: unit(made, POSE)) if normalize else seen).scores(query)


def _top(logits: Tensor, gate: Tensor | None) -> Tensor:
    """Return the largest logit among children with a gate, ``[..., 1, M]``; 0 if it is not finite."""
    if gate is not None:
        logits = logits.masked_fill(gate[..., None] == 0, -torch.inf)
    top = logits.detach().amax(-2, keepdim=True)
    return top.masked_fill(~top.isfinite(), 0.0)


def _exponentials(
    votes: VoteInputs | VoteBlocks, query: Tensor | None, scale: float, normalize: bool, logsumexp: Tensor | None = None
) -> tuple[VoteBlocks, Tensor, Tensor]:
    """Return the children without the broken ones, g exp(logits - shift), and the shift.

    The shift ``[B, Ho, Wo, 1, M]`` is ``logsumexp`` ``[B, Ho, Wo, M]`` if given, else the largest logit.
    """
    whole = blocks_of(votes)
    shift = None
    if logsumexp is not None:  # -inf: no child exists, and coefficients are 0 with any finite shift
        shift = logsumexp.masked_fill(logsumexp == -torch.inf, 0.0).unsqueeze(-2)

    def numbers() -> Tensor:
        every = _logits(whole, query, scale, normalize)
        return (every - (_top(every, whole.gate) if shift is None else shift)).exp()

    seen = whole.without_broken(numbers)
    found = _logits(seen, query, scale, normalize)
    shift = _top(found, seen.gate) if shift is None else shift
    exponents = found - shift
    if seen.absent is not None:
        exponents = exponents.masked_fill(seen.absent[..., None], 0.0)
    return seen, seen.gated(exponents.exp()), shift


def pooling_routing(
    votes: VoteInputs | VoteBlocks,
    query: Tensor | None,
    scale: float,
    normalize: bool,
    rule: int,
    iterations: int = 1,
    detach: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return one iteration in which the children compete for every parent (Zhao & Huang 2019).

    ``a_im = scale <Q_m, K_im>`` with the keys ``K = V``, or ``V / |V|`` over the C * E values if ``normalize``,
    ``r_im = g_i exp(a_im) / sum_j g_j exp(a_jm)``, ``S_m = sum_i r_im V_im``. Without a query all a are 0: S is the
    average of the votes, weighted by their gates.

    Gates, which must not be negative, act inside the softmax: a gate of 0 removes a child, as padding does. If no child
    exists, parents are 0 and the log-sum-exp is -infinity.

    Parameters
    ----------
    query : Tensor, optional
        Q, ``[B, Ho, Wo, M, C, E]``.
    rule : int
        ``UNIT`` (parents are S) or ``SQUASH``, see :class:`Rule`.
    detach : bool
        Treat r and the log-sum-exp as constants in the gradient, which then reaches neither query nor gate.

    Returns
    -------
    parents : Tensor
        ``[B, Ho, Wo, M, C, E]``, in the dtype of the children.
    sums : Tensor
        S, ``[1, B, Ho, Wo, M, C, E]``, in the dtype of the children.
    logsumexp : Tensor
        ``log sum_i g_i exp(a_im)``, ``[1, B, Ho, Wo, M]``, in the accumulation dtype.
    """
    dtype = blocks_of(votes).dtype
    (query,) = widen(dtype, query)
    seen, shares, shift = _exponentials(votes, query, scale, normalize)
    if detach:
        shares, shift = shares.detach(), shift.detach()
    total = shares.sum(-2)
    sums = seen.sums(shares) * inverse_or_zero(total)[..., None, None]
    stored = sums.to(dtype).contiguous()
    parents = squash(sums, POSE).to(dtype) if rule == Rule.SQUASH else stored.clone()
    empty = total == 0
    logsumexp = (total.masked_fill(empty, 1.0).log() + shift.squeeze(-2)).masked_fill(empty, -torch.inf)
    return parents, stored.unsqueeze(0), logsumexp.contiguous().unsqueeze(0)


def pooling_routing_backward(
    grad: Tensor,
    votes: VoteInputs,
    query: Tensor | None,
    sums: Tensor,
    logsumexp: Tensor,
    scale: float,
    normalize: bool,
    needs: int,
) -> tuple[Tensor, ...]:
    """Return the gradients of one iteration; ``grad`` is that of S, in the accumulation dtype.

    It differentiates ``sum_i g_i exp(a_im - logsumexp_m) (V_im - S_m)`` with S and the log-sum-exp as constants, which
    has the derivatives of S.
    """
    empty = (logsumexp == -torch.inf).unsqueeze(-2)

    def run(*tensors: Any) -> tuple[Tensor]:
        inputs, query = VoteInputs._make((*tensors[:4], votes.parents, votes.window)), tensors[4]
        query, means, known = widen(inputs.children.dtype, query, sums, logsumexp)
        seen, shares, _ = _exponentials(inputs, query, scale, normalize, known)
        shares = shares.masked_fill(empty, 0.0)
        return (seen.sums(shares.detach() if needs & DETACH else shares, means),)

    return differentiate(run, (*votes[:4], query), (grad,), needs)


@torch.no_grad()
def pooling_coefficients(votes: VoteInputs | VoteBlocks, query: Tensor | None, scale: float, normalize: bool) -> Tensor:
    """Return the coefficients r ``[B, Ho, Wo, I, M]`` in the accumulation dtype, without gradient.

    ``r[b, l, :, m]`` sums to 1 over the children; it is 0 for those that do not exist.
    """
    seen = blocks_of(votes)
    (query,) = widen(seen.dtype, query)
    logits = _logits(seen, query, scale, normalize)
    shares = (logits - _top(logits, seen.gate)).exp_()  # in place from here on, as they may be large
    if seen.gate is not None:
        shares.masked_fill_(seen.gate[..., None] == 0, 0.0).mul_(seen.gate[..., None])
    return shares.mul_(inverse_or_zero(shares.sum(-2, keepdim=True)))
