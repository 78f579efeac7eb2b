"""The algebra of attention routing (see :mod:`.forward`, :mod:`.backward`), and LayerNorm's backward.

``r_im = softmax_m(scale <Q_m, V_im>)``, ``S_m = sum_i g_i r_im V_im`` (Tsai et al. 2020; Sabour et al. 2017).
Results: (parents, S); sums of a range: (S,); given gradients: (dS,); gradients of the parents: (dQ,).

Backward, with ``h_im = <dS_m, V_im>`` and ``hbar_i = sum_m r_im h_im``: ``da_im = g_i r_im (h_im - hbar_i)``,
``dV_im = g_i r_im dS_m + scale da_im Q_m``, ``dQ_m = scale sum_i da_im V_im``, ``dg_i = hbar_i``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .forward import Algebra
from .tiles import equal_shares, inner_product, kernel, place, put, shares_of, spread, squash

LAYER_NORM, PLAIN, SQUASH, UNIT = (tl.constexpr(rule) for rule in range(4))
"""What parents are: LayerNorm(S), S, squash(S); S of pooling, whose directions add up."""


class Attention(NamedTuple):
    """The tensors and numbers of an attention or pooling routing."""

    query: Any
    norm_weight: Any
    norm_bias: Any
    scale: float
    eps: float
    RULE: tl.constexpr
    DETACH: tl.constexpr  # whether backward takes the coefficients for constants
    UNIT_KEYS: tl.constexpr  # of pooling: whether keys are the votes' directions


@triton.jit
def load(routing, at, tile):
    """Return the query's tile."""
    query = 0.0
    if routing.query is not None:
        query = tl.load(routing.query + at.base + at.pose, mask=at.pose_mask, other=0.0).to(tl.float32)
    return (query,)


@triton.jit
def score(routing, own, votes, tile):
    """Return ``a_im = scale <Q_m, V_im>``; without a query all are 0."""
    if routing.query is not None:
        return inner_product(own[0], votes) * routing.scale
    else:
        return tl.zeros([tile.BL, tile.BM], tl.float32)


@triton.jit
def start(routing, tile):
    """Return S of no children."""
    return (tl.zeros([tile.BC, tile.BE, tile.BL, tile.BM], tl.float32),)


@triton.jit
def add(routing, own, state, votes, child, known, at, tile):
    """Add ``g_i r_im V_im`` to S; without a query ``g_i V_im / M``."""
    if routing.query is not None:
        shares = shares_of(score(routing, own, votes, tile), known, at, tile)
    else:
        shares = equal_shares(at, tile)
    if child.gates is not None:
        shares *= child.gates[:, None]
    return (state[0] + spread(shares) * votes,)


@triton.jit
def join(routing, state, other):
    """Return S of two ranges of children."""
    return (state[0] + other[0],)


@triton.jit
def standardise(sums, inside, eps, SIZE: tl.constexpr):
    """Return a tile with mean 0 and variance 1 over each pose, and 1 / sqrt(variance + eps) of ``[BL, BM]``.

    Centred twice, as the reference does: what is left of the mean is then that of the differences.
    """
    centred = tl.where(inside, sums - spread(tl.sum(tl.sum(sums, axis=0), axis=0) / SIZE), 0.0)
    centred = tl.where(inside, centred - spread(tl.sum(tl.sum(centred, axis=0), axis=0) / SIZE), 0.0)
    inverse = tl.rsqrt(inner_product(centred, centred) / SIZE + eps)
    return centred * spread(inverse), inverse


@triton.jit
def finish(routing, state, results, at, tile):
    """Store S and the parents in whatever dtype each has."""
    parents = state[0]
    tl.store(results[1] + at.base + at.pose, parents, mask=at.pose_mask)
    if routing.RULE == SQUASH:
        parents = squash(parents)
    if routing.RULE == LAYER_NORM:
        parents, _ = standardise(parents, at.inside, routing.eps, tile.C * tile.E)
        c, e = tl.arange(0, tile.BC)[:, None, None, None], tl.arange(0, tile.BE)[None, :, None, None]
        mask = (c < tile.C) & (e < tile.E)
        if routing.norm_weight is not None:
            parents *= tl.load(routing.norm_weight + c * tile.E + e, mask=mask, other=0.0).to(tl.float32)
        if routing.norm_bias is not None:
            parents += tl.load(routing.norm_bias + c * tile.E + e, mask=mask, other=0.0).to(tl.float32)
    tl.store(results[0] + at.base + at.pose, parents, mask=at.pose_mask)


@triton.jit
def load_grads(grads, at):
    """Return the tile of dS."""
    return (tl.load(grads[0] + at.base + at.pose, mask=at.pose_mask, other=0.0).to(tl.float32),)


@triton.jit
def dshare(routing, grads, held, votes, i, at, tile):
    """Return ``h_im = <dS_m, V_im>``."""
    return inner_product(held[0], votes)


@triton.jit
def dscore(routing, own, grads, held, votes, child, known, heard, at, tile):
    """Return g_i r_im, da_im, dg_i, and nothing for betas. ``heard``: hbar_i where the tile has not all parents."""
    gain = dshare(routing, grads, held, votes, child.i, at, tile)
    if routing.query is not None:
        shares = shares_of(score(routing, own, votes, tile), known, at, tile)
    else:
        shares = equal_shares(at, tile)
    mean_gain = heard
    if heard is None:
        mean_gain = tl.sum(shares * gain, axis=1)
    if child.gates is not None:
        shares *= child.gates[:, None]
    return shares, shares * (gain - mean_gain[:, None]), mean_gain, None, None


@triton.jit
def dvote(routing, own, held, votes, weights, dscores):
    """Return dV_im as a tile."""
    result = spread(weights) * held[0]
    if routing.query is not None and not routing.DETACH:
        result += spread(dscores * routing.scale) * own[0]
    return result


@triton.jit
def dstart(results, tile):
    """Return dQ of no children."""
    dquery = 0.0
    if results[0] is not None:
        dquery = tl.zeros([tile.BC, tile.BE, tile.BL, tile.BM], tl.float32)
    return (dquery,)


@triton.jit
def dadd(routing, own, state, results, votes, dscores):
    """Add ``scale da_im V_im`` to dQ."""
    dquery = state[0]
    if results[0] is not None:
        dquery += spread(dscores * routing.scale) * votes
    return (dquery,)


@triton.jit
def dfinish(routing, state, results, part, at, poses, tile, HOW: tl.constexpr):
    """Put dQ of a range of children where it belongs."""
    if results[0] is not None:
        begin = part.to(tl.int64) * poses * (tile.C * tile.E)
        put(results[0] + begin + at.base + at.pose, state[0], at.pose_mask, HOW)


ATTENTION = Algebra(
    load, score, start, add, join, finish, None, load_grads, dshare, dscore, dvote, dstart, dadd, dfinish
)


@kernel
def _norm_backward_kernel(
    grad_parents, sums, norm_weight, slope, affine, poses, per_split, eps, tile, ROUTING: tl.constexpr
):
    """dS = (u - mean u - x mean(u x)) / sigma, u = dy norm_weight, x = LayerNorm(S); dnorm_weight = sum dy x.

    A program walks ``per_split`` blocks of poses and leaves its share of the affine's gradients in
    ``affine[program, 2, C * E]``; they are added up in that order.
    """
    size = tile.C * tile.E
    c, e = tl.arange(0, tile.BC)[:, None, None, None], tl.arange(0, tile.BE)[None, :, None, None]
    affine_mask = (c < tile.C) & (e < tile.E)
    weight_sum = tl.zeros([tile.BC, tile.BE, 1, 1], tl.float32)
    bias_sum = tl.zeros([tile.BC, tile.BE, 1, 1], tl.float32)
    for block in range(tl.program_id(0) * per_split, (tl.program_id(0) + 1) * per_split):
        p = tl.cast(block, tl.int64) * tile.BL + tl.arange(0, tile.BL)
        at = place(tile, p, p < poses, 0, 1)
        grad = tl.load(grad_parents + at.base + at.pose, mask=at.pose_mask, other=0.0).to(tl.float32)
        standard, inverse = standardise(
            tl.load(sums + at.base + at.pose, mask=at.pose_mask, other=0.0), at.inside, eps, size
        )
        standard = tl.where(at.pose_mask, standard, 0.0)  # without eps poses beyond the last are no numbers
        if affine is not None:
            weight_sum += tl.sum(grad * standard, axis=2, keep_dims=True)
            bias_sum += tl.sum(grad, axis=2, keep_dims=True)
        if norm_weight is not None:
            grad *= tl.load(norm_weight + c * tile.E + e, mask=affine_mask, other=0.0).to(tl.float32)
        mean = tl.sum(tl.sum(grad, axis=0), axis=0) / size
        slant = inner_product(grad, standard) / size
        result = (grad - spread(mean) - standard * spread(slant)) * spread(inverse)
        tl.store(slope + at.base + at.pose, result, mask=at.pose_mask)
    if affine is not None:
        there = affine + tl.program_id(0).to(tl.int64) * (2 * size) + c * tile.E + e
        tl.store(there, weight_sum, mask=affine_mask)
        tl.store(there + size, bias_sum, mask=affine_mask)
