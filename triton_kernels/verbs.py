"""The verbs of votes in Triton: scores, sums and pull, see :mod:`fastcaps.ops.verbs`.

They are three algebras for the kernels of all routings (:mod:`.forward`, :mod:`.backward`). Instead of a
softmax over parents they take a table of coefficients, one for each position, child and parent. With r
the coefficients, Y the targets (or means) and p the precisions (1 if absent):

``scores``: ``a_im = <Y_m, V_im>``, or squared ``<p_m, (V_im - Y_m)^2>``, one value for each pair.
``sums``: ``S_m = sum_i r_im (V_im - Y_m)``, or squared ``sum_i r_im (V_im - Y_m)^2``; Y is 0 if absent.
``pull``: ``dV_im = r_im Y_m``, or squared ``2 r_im p_m (V_im - Y_m)``, and from it dP, dW and dbias.

Workspace, see :mod:`.launches`: scores have none. Coefficients are read in place, unless their batch and grid
dimensions have no common stride: then they are copied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fastcaps.votes import VoteInputs

from .call import Call, Routing, current
from .forward import Algebra
from .launches import Answer, Gradients, forward, shapes_of
from .schedule import LIMITS, Limits, Traits
from .tiles import STORE, inner_product, load_pose, put_pose, spread


class Verb(NamedTuple):
    """The tensors of a verb.

    ``pairs``: one value for each position, child and parent, with its three strides: the resulting scores, or the
    coefficients.
    """

    targets: Any
    precisions: Any
    pairs: Any
    pairs_p: int
    pairs_i: int
    pairs_m: int
    SQUARED: tl.constexpr


@triton.jit
def load(verb, at, tile):
    """Return the tiles of Y and p."""
    targets = 0.0
    precisions = 1.0
    if verb.targets is not None:
        targets = load_pose(verb.targets, at)
    if verb.precisions is not None:
        precisions = load_pose(verb.precisions, at)
    return targets, precisions


@triton.jit
def pairs_of(verb, i, at, tile):
    """Return pointers to the values of child i, ``[BL, BM]``."""
    m = (at.first + tl.arange(0, tile.BM)).to(tl.int64)
    start = at.positions * verb.pairs_p + tl.cast(i, tl.int64) * verb.pairs_i
    return verb.pairs + start[:, None] + (m * verb.pairs_m)[None, :]


@triton.jit
def coefficients_of(verb, child, at, tile):
    """Return r_im, 0 of an absent child."""
    mask = at.each_mask & child.seen[:, None]
    return tl.load(pairs_of(verb, child.i, at, tile), mask=mask, other=0.0)


@triton.jit
def score(verb, parents, vote, tile):
    """Return a_im."""
    if verb.SQUARED:
        apart = vote - parents[0]
        return inner_product(apart, apart * parents[1])
    else:
        return inner_product(parents[0], vote)


@triton.jit
def start_scores(verb, tile):
    """Return no sums: scores are stored child by child."""
    return (0.0,)


@triton.jit
def store_scores(verb, parents, state, vote, child, normalizer, at, tile):
    """Store a_im, 0 of an absent child."""
    scores = tl.where(child.seen[:, None], score(verb, parents, vote, tile), 0.0)
    tl.store(pairs_of(verb, child.i, at, tile), scores, mask=at.each_mask)
    return state


@triton.jit
def finish_scores(verb, state, results, at, tile):
    """Do nothing."""


@triton.jit
def start_sums(verb, tile):
    """Return S of no children."""
    return (tl.zeros([tile.BC, tile.BE, tile.BL, tile.BM], tl.float32),)


@triton.jit
def add_sums(verb, parents, state, vote, child, normalizer, at, tile):
    """Add ``r_im (V_im - Y_m)``, or its square."""
    if verb.targets is not None:
        # The votes of an absent child are 0; its distance from a mean is not, and may be NaN.
        vote = tl.where(child.seen[None, None, :, None], vote - parents[0], 0.0)
    if verb.SQUARED:
        vote = vote * vote
    return (state[0] + spread(coefficients_of(verb, child, at, tile)) * vote,)


@triton.jit
def join_sums(verb, state, other):
    """Return S of two ranges of children."""
    return (state[0] + other[0],)


@triton.jit
def finish_sums(verb, state, results, at, tile):
    """Store S."""
    put_pose(results[0], state[0], at, STORE)


@triton.jit
def load_nothing(grads, at):
    """Return no given gradients: pull starts from r and Y."""
    return 0.0


@triton.jit
def weigh(verb, parents, grads, given, vote, child, normalizer, average, at, tile):
    """Return r_im five times: verbs have no scores, gates or betas."""
    weights = coefficients_of(verb, child, at, tile)
    return weights, weights, weights, weights, weights


@triton.jit
def dvote(verb, parents, given, vote, weights, dscores):
    """Return dV_im as a tile."""
    if verb.SQUARED:
        return spread(2.0 * weights) * (parents[1] * (vote - parents[0]))
    else:
        return spread(weights) * parents[0]


@triton.jit
def start_pull(results, tile):
    """Return no sums: parents get no gradient."""
    return (0.0,)


@triton.jit
def add_pull(verb, parents, state, results, vote, dscores):
    """Return the state unchanged."""
    return state


@triton.jit
def finish_pull(verb, state, results, part, at, poses, tile, HOW: tl.constexpr):
    """Do nothing."""


# All three make votes with the same bits: a distance may be a small difference between a vote and a mean.
TRAITS = Traits(competing=False, same_votes=True)
SCORES = Routing(
    "vote_scores", Algebra(load, score, start_scores, store_scores, None, finish_scores), sums=(), traits=TRAITS
)
SUMS = Routing(
    "vote_sums", Algebra(load, score, start_sums, add_sums, join_sums, finish_sums), sums=("pose",), traits=TRAITS
)
PULL = Routing(
    "vote_pull",
    Algebra(
        *(load, score, None, None, None, None, None),
        *(load_nothing, None, weigh, dvote, start_pull, add_pull, finish_pull),
    ),
    sums=(),
    traits=TRAITS,
)
refusal = SUMS.refusal


def verb_of(call: Call, targets: Tensor | None, precisions: Tensor | None, pairs: Tensor, squared: bool) -> Verb:
    """Return the tensors of a verb as the kernels take them."""
    dense = (None if tensor is None else tensor.contiguous() for tensor in (targets, precisions))
    pairs = pairs.reshape(call.positions, call.children, call.parents)
    return Verb(*dense, pairs, *pairs.stride(), tl.constexpr(squared))  # type: ignore[arg-type, call-arg]


def vote_scores(
    votes: VoteInputs,
    targets: Tensor,
    precisions: Tensor | None,
    squared: bool,
    options: int,
    limits: Limits = LIMITS,
) -> Tensor:
    """Return ``<Y_m, V_im>``, or squared ``<p_m, (V_im - Y_m)^2>``: ``[B, Ho, Wo, I, M]`` in float32.

    ``votes``: the six leading arguments of the ops. The same input gives the same bits whatever the options.
    ``limits``: what a program may hold; tests make it small.
    """
    call = Call(SCORES, votes, options, limits)
    scores = call.empty(*call.shape[:-3], call.children, call.parents)
    if call.poses:
        with current(call.device):
            forward(call, verb_of(call, targets, precisions, scores, squared), (), False)
    return scores


def vote_sums(
    votes: VoteInputs,
    coefficients: Tensor,
    means: Tensor | None,
    power: int,
    options: int,
    limits: Limits = LIMITS,
) -> Tensor:
    """Return ``sum_i r_im (V_im - mean_m)^power``: ``[B, Ho, Wo, M, C, E]`` in float32.

    The same input gives the same bits whatever the options.
    """
    call = Call(SUMS, votes, options, limits)
    sums = call.empty(*call.shape)
    if call.poses:
        with current(call.device):
            forward(call, verb_of(call, means, None, coefficients, power == 2), (sums,), False)
    return sums


def vote_pull(
    votes: VoteInputs,
    coefficients: Tensor,
    targets: Tensor,
    precisions: Tensor | None,
    squared: bool,
    needs: int,
    options: int,
    limits: Limits = LIMITS,
) -> tuple[Tensor, ...]:
    """Return dchildren, dweight and dbias of ``sum_im r_im a_im``, a the scores; empty unless in ``needs``.

    Option 1: as for :func:`fastcaps.triton_kernels.attention.attention_routing_backward`.
    """
    call = Call(PULL, votes, options, limits)
    answer = Answer(call, shapes_of(*votes[:3]), needs)
    if call.poses == 0 or not any(answer.wanted):
        return answer.of([None] * 3)
    made = Gradients(call, [*answer.wanted, False], [])
    with current(call.device):
        made.add(verb_of(call, targets, precisions, coefficients, squared), (), False)
    return answer.of(made.all()[:3])
