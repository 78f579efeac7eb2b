"""The algebra of Gaussian routing (see :mod:`.forward`, :mod:`.backward`), and what prepares its backward.

``a_im = alpha_m - <p_m, (V_im - mu_m)^2>`` with ``p = 1 / (2 sigma^2)``, or 1 without a variance, ``w_im = g_i
softmax_m a_im``, and of these weights count, mean, variance and evidence (Hinton et al. 2018; Heinsen 2019).

Results: (counts, means, variances, evidence); given gradients: (A, B, K, means, devidence), see
:func:`_prepare_kernel`; gradients of the parents: (dmean, dvariance, dlog_weight).

**Moments** are kept as West (1979) does: the mean as an offset ``lo`` from a *base*, and the sum of squares about it,
both corrected child by child; ranges of children meet by Chan's formula. The base is the parents' mean, or without one
the first vote that counts. No offset that all votes have in common then costs a digit, nor do votes far from the base.

Backward, with ``d_im = V_im - means_m``: ``t_im = K_m + <A_m + B_m d_im, d_im> + (beta_use_im + beta_ignore_im) dz_m``,
``da_im = w_im (t_im - sum_m' r_im' t_im')``, ``dg_i = sum_m r_im t_im - sum_m beta_ignore_im dz_m``,
``dV_im = w_im (A_m + 2 B_m d_im) - 2 p_m da_im (V_im - mu_m)``.

**The rest** ``sum_i w_im d_im`` is ``eps means_m`` on paper. But means are rounded, so that every d_im is off by the
same, and dV with it unless A knows the rest of the numbers at hand; nor is ``n_m`` quite the sum of weights that are
made again. That shows where one child makes a parent: there a sweep of its own measures the rest and the count.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .forward import Algebra
from .tiles import equal_shares, inner_product, kernel, place, put, shares_of, spread, unbroken

NARROW = tl.constexpr(2.0**-6)
"""A parent is narrow, and its rest measured, where a variance is below this share of its squared mean."""


class Gaussian(NamedTuple):
    """The tensors and numbers of a Gaussian routing; ``counts`` to ``variances`` are its results, for the rest."""

    mean: Any
    variance: Any
    log_weight: Any
    beta_use: Any
    beta_ignore: Any
    counts: Any
    means: Any
    variances: Any
    eps: float
    USE_OWN: tl.constexpr  # whether every child, and every parent, has a beta_use of its own
    USE_EACH: tl.constexpr
    IGNORE_OWN: tl.constexpr
    IGNORE_EACH: tl.constexpr


@triton.jit
def load(routing, at, tile):
    """Return the tiles of mean and p, and the log-weights."""
    mean = 0.0
    precision = 1.0
    log_weight = 0.0
    if routing.mean is not None:
        mean = tl.load(routing.mean + at.base + at.pose, mask=at.pose_mask, other=0.0)
        if routing.variance is not None:
            precision = 0.5 / tl.load(routing.variance + at.base + at.pose, mask=at.pose_mask, other=1.0)
    if routing.log_weight is not None:
        log_weight = tl.load(routing.log_weight + at.each, mask=at.each_mask, other=0.0)
    return mean, precision, log_weight


@triton.jit
def beta(pointer, i, at, OWN: tl.constexpr, EACH: tl.constexpr, tile):
    """Return the betas of child i, ``[1, BM]``."""
    m = at.first + tl.arange(0, tile.BM)
    there = m * 0
    if EACH:
        there = m
    if OWN and EACH:
        there = tl.cast(i, tl.int64) * at.M + m
    elif OWN:
        there = m * 0 + i
    return tl.load(pointer + there, mask=m < at.M, other=0.0)[None, :]


@triton.jit
def beta_use(routing, i, at, tile):
    """Return beta_use of child i."""
    return beta(routing.beta_use, i, at, routing.USE_OWN, routing.USE_EACH, tile)


@triton.jit
def beta_ignore(routing, i, at, tile):
    """Return beta_ignore of child i."""
    return beta(routing.beta_ignore, i, at, routing.IGNORE_OWN, routing.IGNORE_EACH, tile)


@triton.jit
def score(routing, own, votes, tile):
    """Return a_im; the same for all parents where they are nothing yet."""
    result = tl.zeros([tile.BL, tile.BM], tl.float32)
    if routing.mean is not None:
        apart = votes - own[0]
        result -= inner_product(apart, apart * own[1])
    if routing.log_weight is not None:
        result += own[2]
    return result


@triton.jit
def responsibilities(routing, own, votes, known, at, tile):
    """Return ``r_im = softmax_m a_im``, 1 / M in the first turn; ``known``: the log-sum-exp if it is known."""
    if routing.mean is not None or routing.log_weight is not None:
        return shares_of(score(routing, own, votes, tile), known, at, tile)
    else:
        return equal_shares(at, tile)


@triton.jit
def whole_gate(child):
    """Return g_i as ``[BL, 1]``, 0 of an absent child."""
    if child.gates is None:
        return tl.where(child.opened, 1.0, 0.0)[:, None]
    else:
        return tl.where(child.opened, child.gates, 0.0)[:, None]


@triton.jit
def start(routing, tile):
    """Return (lo, sum of squares, count, evidence) of no children, and the base if there is no mean."""
    pose = tl.zeros([tile.BC, tile.BE, tile.BL, tile.BM], tl.float32)
    each = tl.zeros([tile.BL, tile.BM], tl.float32)
    if routing.mean is not None:
        return pose, pose, each, each
    else:
        return pose, pose, each, each, pose


@triton.jit
def add(routing, own, state, votes, child, known, at, tile):
    """Add one vote of weight w_im to the moments."""
    mean, squares, count, evidence = state[0], state[1], state[2], state[3]
    base = own[0]
    if routing.mean is None:
        base = tl.where(spread(count == 0.0), votes, state[4])
    whole = whole_gate(child)
    weight = tl.where(child.opened[:, None], responsibilities(routing, own, votes, known, at, tile) * whole, 0.0)
    total = count + weight
    ratio = tl.where(total == 0.0, 0.0, weight / total)
    apart = (votes - base) - mean
    mean += spread(ratio) * apart
    squares += spread(count * ratio) * (apart * apart)
    if routing.beta_use is not None:
        ignore = beta_ignore(routing, child.i, at, tile)
        evidence += (beta_use(routing, child.i, at, tile) + ignore) * weight - ignore * whole
    if routing.mean is not None:
        return mean, squares, total, evidence
    else:
        return mean, squares, total, evidence, base


@triton.jit
def join(routing, state, other):
    """Return the moments of two ranges of children (Chan et al. 1979)."""
    mean, squares, count = state[0], state[1], state[2]
    apart = other[0]
    if routing.mean is None:
        base = tl.where(spread(count == 0.0), other[4], state[4])
        apart += other[4] - base
    total = count + other[2]
    ratio = tl.where(total == 0.0, 0.0, other[2] / total)
    apart -= mean
    mean += spread(ratio) * apart
    squares += other[1] + spread(count * ratio) * (apart * apart)
    if routing.mean is not None:
        return mean, squares, total, state[3] + other[3]
    else:
        return mean, squares, total, state[3] + other[3], base


@triton.jit
def finish(routing, state, results, at, tile):
    """Store count, mean, variance, evidence: moments of the weights and ``eps`` of weight at 0; 0 of no weight."""
    mean, squares, count = state[0], state[1], state[2]
    if routing.mean is not None:
        mean += tl.load(routing.mean + at.base + at.pose, mask=at.pose_mask, other=0.0)
    else:
        mean += state[4]
    inverse = tl.where(count + routing.eps == 0.0, 0.0, 1.0 / (count + routing.eps))
    toward = mean * spread(routing.eps * inverse)
    tl.store(results[0] + at.each, count, mask=at.each_mask)
    tl.store(results[1] + at.base + at.pose, mean * spread(count * inverse), mask=at.pose_mask)
    variance = (squares + spread(count) * (toward * toward)) * spread(inverse)
    tl.store(results[2] + at.base + at.pose, variance, mask=at.pose_mask)
    if routing.beta_use is not None:
        tl.store(results[3] + at.each, state[3], mask=at.each_mask)


@triton.jit
def load_grads(grads, at):
    """Return the tiles of A, B and the new means, and K and the evidence's gradient."""
    slope = tl.load(grads[0] + at.base + at.pose, mask=at.pose_mask, other=0.0)
    bend = tl.load(grads[1] + at.base + at.pose, mask=at.pose_mask, other=0.0)
    offset = tl.load(grads[2] + at.each, mask=at.each_mask, other=0.0)
    means = tl.load(grads[3] + at.base + at.pose, mask=at.pose_mask, other=0.0)
    devidence = 0.0
    if grads[4] is not None:
        devidence = tl.load(grads[4] + at.each, mask=at.each_mask, other=0.0)
    return slope, bend, offset, means, devidence


@triton.jit
def dshare(routing, grads, held, votes, i, at, tile):
    """Return t_im."""
    apart = votes - held[3]
    result = held[2] + inner_product(held[0] + held[1] * apart, apart)
    if grads[4] is not None:
        result += (beta_use(routing, i, at, tile) + beta_ignore(routing, i, at, tile)) * held[4]
    return result


@triton.jit
def dscore(routing, own, grads, held, votes, child, known, heard, at, tile):
    """Return w_im, da_im, dg_i, and what the betas get.

    With betas dg_i is this tile's part alone; the first tile's has what the softmax over all parents gives.
    """
    gain = dshare(routing, grads, held, votes, child.i, at, tile)
    shares = responsibilities(routing, own, votes, known, at, tile)
    mean_gain = heard
    if heard is None:
        mean_gain = tl.sum(shares * gain, axis=1)
    dgate = mean_gain
    here = child.opened[:, None]
    whole = whole_gate(child)
    weights = tl.where(here, shares * whole, 0.0)
    dscores = tl.where(here, weights * (gain - mean_gain[:, None]), 0.0)
    used = dscores  # of a form that Triton can return; nobody asks without betas
    ignored = dscores
    if grads[4] is not None:
        used = weights * held[4]
        ignored = (weights - whole) * held[4]
        if at.first > 0:
            dgate = mean_gain * 0.0
        dgate -= tl.sum(beta_ignore(routing, child.i, at, tile) * held[4], axis=1)
    return weights, dscores, unbroken(dgate, mean_gain, child.opened), used, ignored


@triton.jit
def dvote(routing, own, held, votes, weights, dscores):
    """Return dV_im as a tile."""
    result = spread(weights) * (held[0] + 2.0 * held[1] * (votes - held[3]))
    if routing.mean is not None:
        result -= spread(2.0 * dscores) * (votes - own[0]) * own[1]
    return result


@triton.jit
def dstart(results, tile):
    """Return the sums over no children of ``da (V - mu)``, ``da (V - mu)^2`` and da."""
    first = 0.0
    second = 0.0
    zeroth = 0.0
    if results[0] is not None:
        first = tl.zeros([tile.BC, tile.BE, tile.BL, tile.BM], tl.float32)
    if results[1] is not None:
        second = tl.zeros([tile.BC, tile.BE, tile.BL, tile.BM], tl.float32)
    if results[2] is not None:
        zeroth = tl.zeros([tile.BL, tile.BM], tl.float32)
    return first, second, zeroth


@triton.jit
def dadd(routing, own, state, results, votes, dscores):
    """Add one child's share."""
    first, second, zeroth = state
    if results[0] is not None:
        first += spread(dscores) * (votes - own[0])
    if results[1] is not None:
        second += spread(dscores) * ((votes - own[0]) * (votes - own[0]))
    if results[2] is not None:
        zeroth += dscores
    return first, second, zeroth


@triton.jit
def dfinish(routing, state, results, part, at, poses, tile, HOW: tl.constexpr):
    """Put dmean, dvariance and dlog_weight of a range of children where they belong."""
    begin = part.to(tl.int64) * poses
    pose = begin * (tile.C * tile.E) + at.base + at.pose
    precision = 1.0
    if routing.variance is not None:
        precision = 0.5 / tl.load(routing.variance + at.base + at.pose, mask=at.pose_mask, other=1.0)
    if results[0] is not None:
        put(results[0] + pose, 2.0 * precision * state[0], at.pose_mask, HOW)
    if results[1] is not None:
        put(results[1] + pose, 2.0 * precision * precision * state[1], at.pose_mask, HOW)
    if results[2] is not None:
        put(results[2] + begin + at.each, state[2], at.each_mask, HOW)


GAUSSIAN = Algebra(
    load, score, start, add, join, finish, None, load_grads, dshare, dscore, dvote, dstart, dadd, dfinish
)


@triton.jit
def narrow(routing, at):
    """Return which parents ``[BL, BM]`` have a variance that is nothing beside its squared mean, and the means."""
    means = tl.load(routing.means + at.base + at.pose, mask=at.pose_mask, other=0.0)
    variances = tl.load(routing.variances + at.base + at.pose, mask=at.pose_mask, other=0.0)
    there = (at.pose_mask & (variances < means * means * NARROW)).to(tl.int32)
    return tl.max(tl.max(there, axis=0), axis=0) > 0, means


@triton.jit
def load_rest(routing, at, tile):
    """Return the tiles of mean and p, the log-weights; the new means, and whether no parent is narrow."""
    mean, precision, log_weight = load(routing, at, tile)
    there, means = narrow(routing, at)
    return mean, precision, log_weight, means, tl.max(tl.max(there.to(tl.int32), axis=0), axis=0) == 0


@triton.jit
def idle_rest(routing, own):
    """Return whether no parent of the tile is narrow."""
    return own[4]


@triton.jit
def start_rest(routing, tile):
    """Return rest and count of no children."""
    pose = tl.zeros([tile.BC, tile.BE, tile.BL, tile.BM], tl.float32)
    return pose, tl.zeros([tile.BL, tile.BM], tl.float32)


@triton.jit
def add_rest(routing, own, state, votes, child, known, at, tile):
    """Add ``w_im d_im`` and ``w_im``."""
    shares = responsibilities(routing, own, votes, known, at, tile) * whole_gate(child)
    weight = tl.where(child.opened[:, None], shares, 0.0)
    apart = tl.where(child.opened[None, None, :, None], votes - own[3], 0.0)
    return state[0] + spread(weight) * apart, state[1] + weight


@triton.jit
def join_rest(routing, state, other):
    """Return rest and count of two ranges of children."""
    return state[0] + other[0], state[1] + other[1]


@triton.jit
def finish_rest(routing, state, results, at, tile):
    """Store rest and count: what was measured of narrow parents, and of others what they are on paper."""
    there, means = narrow(routing, at)
    counts = tl.load(routing.counts + at.each, mask=at.each_mask, other=0.0)
    tl.store(results[0] + at.base + at.pose, tl.where(spread(there), state[0], routing.eps * means), mask=at.pose_mask)
    tl.store(results[1] + at.each, tl.where(there, state[1], counts), mask=at.each_mask)


REST = Algebra(load_rest, score, start_rest, add_rest, join_rest, finish_rest, idle_rest)


@kernel
def _prepare_kernel(
    grad_counts, grad_means, grad_variances, counts, variances, rest, slope, bend, offset, poses, eps, tile,
    ROUTING: tl.constexpr,
):  # fmt: skip
    """A = dmu / N, B = dvariance / N, K = dn - <B, variance>, with N = n + eps, dmu = dmean - 2 rest dvariance / N.

    They are what t_im is made of: the gradient of a weight, by way of count, mean and variance.
    """
    p = tl.program_id(0).to(tl.int64) * tile.BL + tl.arange(0, tile.BL)
    at = place(tile, p, p < poses, 0, 1)
    whole = tl.load(counts + at.each, mask=at.each_mask, other=0.0) + eps
    inverse = tl.where(whole == 0.0, 0.0, 1.0 / whole)
    constant = tl.zeros([tile.BL, 1], tl.float32)
    if grad_counts is not None:
        constant += tl.load(grad_counts + at.each, mask=at.each_mask, other=0.0)
    first = tl.zeros([tile.BC, tile.BE, tile.BL, 1], tl.float32)
    second = tl.zeros([tile.BC, tile.BE, tile.BL, 1], tl.float32)
    if grad_means is not None:
        first += tl.load(grad_means + at.base + at.pose, mask=at.pose_mask, other=0.0)
    if grad_variances is not None:
        second += tl.load(grad_variances + at.base + at.pose, mask=at.pose_mask, other=0.0) * spread(inverse)
        first -= 2.0 * tl.load(rest + at.base + at.pose, mask=at.pose_mask, other=0.0) * second
        constant -= inner_product(second, tl.load(variances + at.base + at.pose, mask=at.pose_mask, other=0.0))
    tl.store(slope + at.base + at.pose, first * spread(inverse), mask=at.pose_mask)
    tl.store(bend + at.base + at.pose, second, mask=at.pose_mask)
    tl.store(offset + at.each, constant, mask=at.each_mask)
