"""The algebra of pooling routing (see :mod:`.forward`, :mod:`.backward`).

``a_im = scale <Q_m, K_im>``, ``r_im = g_i exp(a_im) / Z_m``, ``Z_m = sum_i g_i exp(a_im)``, ``S_m = sum_i r_im V_im``,
with keys K that are the votes or their directions (Zhao & Huang 2019). Children compete, so tiles of parents are
independent, and the softmax is online over the children, as in FlashAttention.

Results: (parents, S, log Z); sums of a range: S and Z relative to exp(top), and top; given gradients: (dS, S, log Z);
gradients of the parents: (dQ,).

Backward, with ``t_im = <dS_m, V_im> - <dS_m, S_m>`` and ``e_im = exp(a_im - log Z_m)``: ``da_im = r_im t_im``,
``dg_i = sum_m e_im t_im``, ``dQ_m = scale sum_i da_im K_im``, ``dK_im = scale da_im Q_m``, ``dV_im = r_im dS_m`` plus
dK, or ``(dK - K <K, dK>) / |V|`` for directions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_kernels import SQUASH, dfinish, dstart, load  # the query's, as there
from .forward import Algebra
from .tiles import STORE, directions, inner_product, load_each, load_pose, put_each, put_pose, spread, squash, unbroken


@triton.jit
def score(iteration, parents, vote, tile):
    """Return ``a_im = scale <Q_m, K_im>``; without a query all are 0."""
    if iteration.query is None:
        return tl.zeros([tile.BL, tile.BM], tl.float32)
    elif iteration.UNIT_KEYS:
        scaled, inverse, _ = directions(vote)
        return inner_product(parents[0], scaled) * inverse * iteration.scale
    else:
        return inner_product(parents[0], vote) * iteration.scale


@triton.jit
def start(iteration, tile):
    """Return (S, Z, top) of no children: S and Z relative to exp(top), which without a query is 1."""
    top = tl.zeros([tile.BL, tile.BM], tl.float32)
    if iteration.query is not None:
        top = tl.full([tile.BL, tile.BM], float("-inf"), tl.float32)
    return tl.zeros([tile.BC, tile.BE, tile.BL, tile.BM], tl.float32), tl.zeros([tile.BL, tile.BM], tl.float32), top


@triton.jit
def finite(top):
    """Return ``top``, or 0 without children: infinity minus itself must not make NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def add(iteration, parents, state, vote, child, normalizer, at, tile):
    """Add ``g_i exp(a_im)`` to Z and as many V_im to S; top rises to the largest a."""
    sums, total, top = state
    here = child.opened[:, None]
    if iteration.query is not None:
        logits = tl.where(here, score(iteration, parents, vote, tile), float("-inf"))
        higher = tl.maximum(top, logits)
        shift = finite(higher)
        fade = tl.exp(top - shift)
        coefficients = tl.where(here, tl.exp(logits - shift) * child.gate[:, None], 0.0)
        sums *= spread(fade)
        total *= fade
        top = higher
    else:
        coefficients = tl.where(here, child.gate[:, None], 0.0)
    return sums + spread(coefficients) * vote, total + coefficients, top


@triton.jit
def join(iteration, state, other):
    """Return the sums of two ranges of children, relative to the higher top."""
    higher = tl.maximum(state[2], other[2])
    shift = finite(higher)
    fade, rise = tl.exp(state[2] - shift), tl.exp(other[2] - shift)
    return state[0] * spread(fade) + other[0] * spread(rise), state[1] * fade + other[1] * rise, higher


@triton.jit
def finish(iteration, state, results, at, tile):
    """Store the parents, S and log Z; without children 0 and -infinity."""
    sums, total, top = state
    empty = total == 0.0
    sums *= spread(tl.where(empty, 0.0, 1.0 / total))
    put_pose(results[1], sums, at, STORE)
    if iteration.RULE == SQUASH:
        sums = squash(sums)
    put_pose(results[0], sums, at, STORE)
    logarithm = tl.log(tl.where(empty, 1.0, total)) + top
    put_each(results[2], tl.where(empty, float("-inf"), logarithm), at, STORE)


@triton.jit
def load_grads(grads, at):
    """Return the tile of dS, ``-<dS, S>``, log Z (0 without children), and which parents have no children."""
    slope, log_total = load_pose(grads[0], at), load_each(grads[2], at)
    empty = log_total == float("-inf")
    return slope, -inner_product(slope, load_pose(grads[1], at)), tl.where(empty, 0.0, log_total), empty


@triton.jit
def dscore(iteration, parents, grads, given, vote, child, normalizer, average, at, tile):
    """Return r_im, da_im, what this tile adds to dg_i; and da_im again, in place of gradients of betas."""
    slope, offset, log_total, empty = given
    here = child.opened[:, None]
    gains = inner_product(slope, vote) + offset
    free = tl.where(empty, 0.0, tl.exp(score(iteration, parents, vote, tile) - log_total))
    dgate = tl.sum(free * gains, axis=1)
    coefficients = tl.where(here, free * child.gate[:, None], 0.0)
    dscores = tl.where(here, coefficients * gains, 0.0)
    return coefficients, dscores, unbroken(dgate, dgate, child.opened), dscores, dscores


@triton.jit
def dvote(iteration, parents, given, vote, weights, dscores):
    """Return dV_im as a tile."""
    result = spread(weights) * given[0]
    if iteration.query is not None and not iteration.DETACH:
        pull = dscores * iteration.scale
        if iteration.UNIT_KEYS:
            scaled, inverse, scale = directions(vote)
            along = inner_product(parents[0], scaled) * inverse * inverse
            result += spread(pull * inverse * scale) * (parents[0] - spread(along) * scaled)
        else:
            result += spread(pull) * parents[0]
    return result


@triton.jit
def dadd(iteration, parents, state, results, vote, dscores):
    """Add ``scale da_im K_im`` to dQ."""
    dquery = state[0]
    if results[0] is not None:
        if iteration.UNIT_KEYS:
            scaled, inverse, _ = directions(vote)
            dquery += spread(dscores * iteration.scale * inverse) * scaled
        else:
            dquery += spread(dscores * iteration.scale) * vote
    return (dquery,)


POOLING = Algebra(load, score, start, add, join, finish, None, load_grads, None, dscore, dvote, dstart, dadd, dfinish)
