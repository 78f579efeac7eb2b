"""The function of dynamic routing (Sabour et al. 2017)."""

from __future__ import annotations

from types import EllipsisType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcaps import ops
from fastcaps.checks import check_choice, check_count, check_finite, check_table, known_arguments
from fastcaps.functional.verbs import Votes, inputs_of
from fastcaps.made import MadeVotes
from fastcaps.ops import products
from fastcaps.results import Routed
from fastcaps.rules import Rule
from fastcaps.vectors import squash
from fastcaps.votes import POSE, VoteInputs, Window, pose_of, positions_of, seen_of


@known_arguments
def dynamic_routing(
    children: Tensor | Votes,
    weight: Tensor | EllipsisType | None = ...,
    *,
    iterations: int = 3,
    parents: int | None = None,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    compete: str = "parents",
    detach: bool = False,
    leaky: bool = False,
    prior: Tensor | None = None,
    eps: float = 0.0,
    window: Window | None = None,
    return_coefficients: bool = False,
) -> Tensor | Routed:
    r"""Route children to parents by dynamic routing (Sabour et al. 2017, Procedure 1).

    .. math::
        V_{im} = P_i W_{i \bmod G, m} + \text{bias}_{im}, \quad
        r_{im} = \operatorname{softmax}_m \Bigl\langle V_{im}, \sum_{\tau < t} \operatorname{squash}(S_m^\tau)
                 \Bigr\rangle, \quad
        S_m^t = \sum_i g_i r_{im} V_{im}

    The paper stores a logit for each pair of child and parent, and adds the vote's agreement with the parent in each
    iteration. The logits are linear in the votes, so the sum of the parents so far is enough: the state is M poses
    instead of I * M values, and no vote is stored. In the first iteration ``r = 1 / M``. The parents are ``squash(S)``,
    ``|S|^2 / (1 + |S|^2) S / |S|``, with derivative 0 at the zero vector; the length is over the C * E values.

    Parameters
    ----------
    children, weight, bias, window
        See :class:`~fastcaps.Votes`; ``[B, I, C, D]`` or ``[B, N, H, W, C, D]``, ``[G, M, D, E]`` and
        ``[I or 1, M or 1, C, E]``. Children may also be :class:`~fastcaps.Votes`, which hold the others.
    iterations : int
        At least 1.
    parents : int, optional
        M; by default that of ``weight``, else of ``bias`` or ``prior``, else 1.
    gate : Tensor, optional
        g, ``[B, I]`` or ``[B, N, H, W]``, or booleans; 0 for a child that does not exist. The paper has none.
    compete : "parents" or "children"
        What the softmax runs over. The paper says parents; in many published implementations the children compete for
        each parent. With "children", the gates, which must not be negative, act inside the softmax, coefficients add up
        to 1 over the children, and ``r_i = g_i / sum(g)`` in the first iteration.
    detach : bool
        Treat the coefficients as constants in the gradient: it flows to children and weights through the last
        iteration's sum only. Many published implementations do so.
    leaky : bool
        Let a child belong to no parent: the softmax has one more logit of 0, whose coefficient is dropped. Only for
        ``compete="parents"``. It pads the weights (and the bias) by a parent of zeros.
    prior : Tensor, optional
        Logits that every iteration starts from, ``[I or 1, M]``: the paper's log prior probabilities, which it learns.
        Not with ``leaky``.
    eps : float
        Added under the root in squash, as many published implementations do: ``|s|^2 / (1 + |s|^2) s / sqrt(|s|^2 +
        eps)``. With a prior or an eps every iteration is a separate op, except in eager calls without matrices: on a
        CPU, and of sets on a GPU (32 parents of up to 64 values, 24 of up to 128, 15 of up to 256).
    return_coefficients : bool
        Also return the r of the last iteration.

    Returns
    -------
    Tensor
        The parents, ``[B, M, C, E]`` or ``[B, M, Ho, Wo, C, E]``; the latter in the memory order B, Ho, Wo, M, C, E.
        With ``return_coefficients`` a :class:`~fastcaps.results.Routed` of them and r, ``[B, I, M]`` or
        ``[B, Ho, Wo, I, M]``, without gradient; 0 for a padded child.

    Raises
    ------
    TypeError, ValueError, BackendError
        As in :mod:`fastcaps.functional`.

    Examples
    --------
    >>> import torch
    >>> children, weight = torch.randn(2, 6, 1, 8), torch.randn(6, 3, 8, 16)
    >>> parents, r = dynamic_routing(children, weight, return_coefficients=True)
    >>> parents.shape, r.shape
    (torch.Size([2, 3, 1, 16]), torch.Size([2, 6, 3]))
    >>> bool(torch.allclose(r.sum(-1), torch.ones(2, 6)))  # each child spreads over the parents
    True
    """
    at = 1 if isinstance(prior, Tensor) and prior.dim() == 2 else None
    votes = inputs_of(children, weight, bias, gate, window, parents, others=(prior,), parents_at=at, check=_check)
    check_choice("compete", compete, ("parents", "children"))
    if compete == "parents" and not leaky:
        votes = products.with_one_vote(votes)
    many, eps = votes.parents, check_finite("eps", eps, 0.0)
    own: Any = ops.Attention if compete == "parents" else ops.Pooling
    own = own(
        iterations=check_count("iterations", iterations), detach=bool(detach), coefficients=bool(return_coefficients)
    )
    if leaky:
        if compete == "children":
            raise ValueError("leaky must be False with compete='children': a child cannot leak from a parent's softmax")
        if prior is not None:
            raise ValueError("leaky must be False with a prior: the prior has no column for the leak")
        votes = _with_leak(votes)
    routing: Any = ops.attention_routing if compete == "parents" else ops.pooling_routing
    if prior is None and eps == 0:
        results = routing(votes, own)
    elif compete == "parents" and not return_coefficients and products.takes_dynamic(votes, prior):

        def formula(votes: VoteInputs, prior: Tensor | None) -> Tensor:
            return _one_by_one(routing, votes, own, prior, eps)[0]

        results = (products.dynamic(routing, votes, own, prior, eps, formula),)
    else:
        results = _one_by_one(routing, votes, own, prior, eps)
    routed = results[0].narrow(-3, 0, many).contiguous() if leaky else results[0]
    routed = votes.from_op(routed)
    return Routed(routed, votes.pairs_from_op(results[-1][..., :many].contiguous())) if return_coefficients else routed


def _check(votes: VoteInputs, prior: Any) -> None:
    if prior is not None:
        sizes = [(seen_of(votes), 1), (votes.parents,)]
        check_table("prior", prior, votes.children, sizes, "I or 1, M", votes.autocasts)


def _one_by_one(routing: Any, votes: VoteInputs, own: Any, prior: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return parents and coefficients of a routing whose iterations are separate ops.

    A prior becomes one more value in every vote, which the query multiplies by 1. That takes a table
    ``[I or 1, M, C, E + 1]`` and a copy of the weights in every call, which do not grow with the batch; where children
    without matrices compete, it takes a copy of the children.
    """
    rows, _, columns = pose_of(votes)
    own = own._replace(rule=int(Rule.PLAIN if routing is ops.attention_routing else Rule.UNIT))
    if prior is not None:
        votes = _with_prior(votes, prior)
        one = torch.zeros((rows, columns + 1), dtype=votes.children.dtype, device=votes.children.device)
        one[0, -1].fill_(1.0)  # assigning a number would copy it from the CPU, which a CUDA graph cannot hold
        own = own._replace(query=one.expand(*positions_of(votes), votes.parents, -1, -1))

    def squashed(results: Any) -> Tensor:
        return squash(results[0][..., :columns], POSE, eps)

    def advance(own: Any, results: Any) -> dict[str, Tensor | None]:
        step = squashed(results) if prior is None else F.pad(squashed(results), (0, 1))
        return {"query": step if own.query is None else own.query + step}

    # `route`, not `__call__`: the kernel also runs the first iteration, which torch's matmul would run otherwise
    last = routing.iterate(routing.route, votes, own, advance)[-1]
    return squashed(last), last[-1]


def _with_prior(votes: VoteInputs, prior: Tensor) -> VoteInputs:
    """Return votes with one more column, whose first value is the prior."""
    children, weight, bias, _, parents, _ = votes
    rows, _, columns = pose_of(votes)
    if isinstance(votes, MadeVotes):
        raise ValueError("prior must be None with votes that a function computes")
    table = prior.new_zeros((prior.shape[0], parents, rows, columns + 1))
    table[:, :, 0, columns] = prior
    if bias is not None:
        table = table + F.pad(bias, (0, 1))
    if weight is None:
        return votes._replace(children=F.pad(children, (0, 1)), bias=table)
    return votes._replace(weight=F.pad(weight, (0, 1)), bias=table)


def _with_leak(votes: VoteInputs) -> VoteInputs:
    """Return the votes with one more parent, for which all votes are 0."""
    if votes.weight is None:
        raise ValueError("leaky must be False without a weight: a parent of zeros needs a matrix of zeros")
    bias = votes.bias
    if bias is not None:
        bias = F.pad(bias.expand(-1, votes.parents, -1, -1), (0, 0, 0, 0, 0, 1))
    weight = F.pad(votes.weight, (0, 0, 0, 0, 0, 1))
    return votes._replace(weight=weight, bias=bias, parents=votes.parents + 1)
