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

from fastcaps.rules import Rule

from .forward import Algebra
from .tiles import (
    STORE,
    coefficients_of,
    equal_coefficients,
    inner_product,
    kernel,
    load_pose,
    place,
    pose_offsets,
    put_pose,
    spread,
    squash,
    unbroken,
)

LAYER_NORM, SQUASH = tl.constexpr(Rule.LAYER_NORM.value), tl.constexpr(Rule.SQUASH.value)
"""Rules by which parents are LayerNorm(S) or squash(S); by any other rule they are S."""


class Attention(NamedTuple):
    """The tensors and numbers of an attention or pooling iteration."""

    query: Any
    norm_weight: Any
    norm_bias: Any
    scale: float
    eps: float
    RULE: tl.constexpr
    DETACH: tl.constexpr  # whether the coefficients are constants in backward
    UNIT_KEYS: tl.constexpr  # of pooling: whether keys are the votes' directions


@triton.jit
def load(iteration, at, tile):
    """Return the query's tile."""
    query = 0.0
    if iteration.query is not None:
        query = load_pose(iteration.query, at)
    return (query,)


@triton.jit
def score(iteration, parents, vote, tile):
    """Return ``a_im = scale <Q_m, V_im>``; without a query all are 0."""
    if iteration.query is not None:
        return inner_product(parents[0], vote) * iteration.scale
    else:
        return tl.zeros([tile.BL, tile.BM], tl.float32)


@triton.jit
def start(iteration, tile):
    """Return S of no children."""
    return (tl.zeros([tile.BC, tile.BE, tile.BL, tile.BM], tl.float32),)


@triton.jit
def add(iteration, parents, state, vote, child, normalizer, at, tile):
    """Add ``g_i r_im V_im`` to S; without a query ``g_i V_im / M``."""
    if iteration.query is not None:
        coefficients = coefficients_of(score(iteration, parents, vote, tile), normalizer, at, tile)
    else:
        coefficients = equal_coefficients(at, tile)
    coefficients = tl.where(child.opened[:, None], coefficients * child.gate[:, None], 0.0)
    return (state[0] + spread(coefficients) * vote,)


@triton.jit
def join(iteration, state, other):
    """Return S of two ranges of children."""
    return (state[0] + other[0],)


@triton.jit
def standardise(sums, inside, eps, SIZE: tl.constexpr):
    """Return a tile with mean 0 and variance 1 over each pose, and 1 / sqrt(variance + eps), or 0, of ``[BL, BM]``.

    It centres twice, as the reference does: the second time removes what rounding left of the mean.
    """
    centred = tl.where(inside, sums - spread(tl.sum(tl.sum(sums, axis=0), axis=0) / SIZE), 0.0)
    centred = tl.where(inside, centred - spread(tl.sum(tl.sum(centred, axis=0), axis=0) / SIZE), 0.0)
    variance = inner_product(centred, centred) / SIZE + eps
    inverse = tl.where(variance == 0.0, 0.0, tl.rsqrt(tl.where(variance == 0.0, 1.0, variance)))
    return centred * spread(inverse), inverse


@triton.jit
def load_affine(pointer, tile):
    """Return LayerNorm's weight or bias for each value of a pose."""
    offsets, mask = pose_offsets(tile)
    return tl.load(pointer + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def finish(iteration, state, results, at, tile):
    """Store S and the parents, each in its own dtype."""
    parents = state[0]
    put_pose(results[1], parents, at, STORE)
    if iteration.RULE == SQUASH:
        parents = squash(parents)
    if iteration.RULE == LAYER_NORM:
        parents, _ = standardise(parents, at.inside, iteration.eps, tile.C * tile.E)
        if iteration.norm_weight is not None:
            parents *= load_affine(iteration.norm_weight, tile)
        if iteration.norm_bias is not None:
            parents += load_affine(iteration.norm_bias, tile)
    put_pose(results[0], parents, at, STORE)


@triton.jit
def load_grads(grads, at):
    """Return the tile of dS."""
    return (load_pose(grads[0], at),)


@triton.jit
def gain(iteration, grads, given, vote, i, at, tile):
    """Return ``h_im = <dS_m, V_im>``."""
    return inner_product(given[0], vote)


@triton.jit
def dscore(iteration, parents, grads, given, vote, child, normalizer, average, at, tile):
    """Return g_i r_im, da_im, dg_i; and da_im again, in place of gradients of betas, which this routing lacks."""
    gains = gain(iteration, grads, given, vote, child.i, at, tile)
    if iteration.query is not None:
        coefficients = coefficients_of(score(iteration, parents, vote, tile), normalizer, at, tile)
    else:
        coefficients = equal_coefficients(at, tile)
    dgate = average
    if average is None:
        dgate = tl.sum(coefficients * gains, axis=1)
    opened = child.opened[:, None]
    coefficients = tl.where(opened, coefficients * child.gate[:, None], 0.0)
    dscores = tl.where(opened, coefficients * (gains - dgate[:, None]), 0.0)
    return coefficients, dscores, unbroken(dgate, dgate, child.opened), dscores, dscores


@triton.jit
def dvote(iteration, parents, given, vote, weights, dscores):
    """Return dV_im as a tile."""
    result = spread(weights) * given[0]
    if iteration.query is not None and not iteration.DETACH:
        result += spread(dscores * iteration.scale) * parents[0]
    return result


@triton.jit
def dstart(results, tile):
    """Return dQ of no children."""
    dquery = 0.0
    if results[0] is not None:
        dquery = tl.zeros([tile.BC, tile.BE, tile.BL, tile.BM], tl.float32)
    return (dquery,)


@triton.jit
def dadd(iteration, parents, state, results, vote, dscores):
    """Add ``scale da_im V_im`` to dQ."""
    dquery = state[0]
    if results[0] is not None:
        dquery += spread(dscores * iteration.scale) * vote
    return (dquery,)


@triton.jit
def dfinish(iteration, state, results, part, at, poses, tile, HOW: tl.constexpr):
    """Store dQ of a range of children."""
    if results[0] is not None:
        begin = part.to(tl.int64) * poses * (tile.C * tile.E)
        put_pose(results[0] + begin, state[0], at, HOW)


ATTENTION = Algebra(load, score, start, add, join, finish, None, load_grads, gain, dscore, dvote, dstart, dadd, dfinish)


@kernel
def _norm_backward_kernel(
    grad_parents, sums, norm_weight, slope, affine, poses, per_split, eps, tile, ROUTING: tl.constexpr
):
    """dS = (u - mean u - x mean(u x)) / sigma, u = dy norm_weight, x = LayerNorm(S); dnorm_weight = sum dy x.

    A program walks ``per_split`` blocks of poses and stores its part of the affine's gradients in
    ``affine[program, 2, C * E]``; the parts are added up in order.
    """
    size = tile.C * tile.E
    weight_sum = tl.zeros([tile.BC, tile.BE, 1, 1], tl.float32)
    bias_sum = tl.zeros([tile.BC, tile.BE, 1, 1], tl.float32)
    for block in range(tl.program_id(0) * per_split, (tl.program_id(0) + 1) * per_split):
        p = tl.cast(block, tl.int64) * tile.BL + tl.arange(0, tile.BL)
        at = place(tile, p, p < poses, 0, 1)
        grad = load_pose(grad_parents, at)
        standard, inverse = standardise(load_pose(sums, at), at.inside, eps, size)
        if affine is not None:
            weight_sum += tl.sum(grad * standard, axis=2, keep_dims=True)
            bias_sum += tl.sum(grad, axis=2, keep_dims=True)
        if norm_weight is not None:
            grad *= load_affine(norm_weight, tile)
        mean = tl.sum(tl.sum(grad, axis=0), axis=0) / size
        along = inner_product(grad, standard) / size
        put_pose(slope, (grad - spread(mean) - standard * spread(along)) * spread(inverse), at, STORE)
    if affine is not None:
        offsets, mask = pose_offsets(tile)
        offsets = tl.program_id(0).to(tl.int64) * (2 * size) + offsets
        tl.store(affine + offsets, weight_sum, mask=mask)
        tl.store(affine + size + offsets, bias_sum, mask=mask)
