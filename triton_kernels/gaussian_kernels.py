"""The algebra of Gaussian routing (see :mod:`.forward`, :mod:`.backward`), and the kernel before its backward.

``a_im = alpha_m - <p_m, (V_im - mu_m)^2>`` with ``p = 1 / (2 sigma^2)``, or 1 without a variance, ``w_im = g_i
softmax_m a_im``, and of these weights count, mean, variance and evidence (Hinton et al. 2018; Heinsen 2019).

Results: (counts, means, variances, evidence); given gradients: (A, B, K, means, devidence), see
:func:`_prepare_kernel`; gradients of the parents: (dmean, dvariance, dlog_weight).

**Moments** are kept as in West (1979): the mean as an offset ``lo`` from a *base*, and the sum of squares about it,
both corrected child by child; ranges of children are joined by Chan's formula. The base is the parents' mean, or
without one the first vote that counts. Then neither an offset that all votes share nor their distance from the base
costs digits.

Backward, with ``d_im = V_im - means_m``: ``t_im = K_m + <A_m + B_m d_im, d_im> + (beta_use_im + beta_ignore_im) dz_m``,
``da_im = w_im (t_im - sum_m' r_im' t_im')``, ``dg_i = sum_m r_im t_im - sum_m beta_ignore_im dz_m``,
``dV_im = w_im (A_m + 2 B_m d_im) - 2 p_m da_im (V_im - mu_m)``.

**The rest** ``sum_i w_im d_im`` is ``eps means_m`` on paper. But means are rounded, which shifts every d_im, and dV
with it unless A contains the rest of the same values; and weights made again do not quite sum to ``n_m``. This matters
if a parent has a single child: for such parents another sweep measures the rest and the count.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .forward import Algebra
from .tiles import (
    STORE,
    coefficients_of,
    equal_coefficients,
    inner_product,
    kernel,
    load_each,
    load_pose,
    place,
    put_each,
    put_pose,
    spread,
    unbroken,
)

TIGHT = tl.constexpr(2.0**-6)
"""A parent is tight, and its rest is measured, if a variance is below this share of its squared mean."""


class Gaussian(NamedTuple):
    """The tensors and numbers of a Gaussian routing.

    ``counts`` to ``variances`` are its results, to measure the rest; ``use_i`` to ``ignore_m`` are the betas' strides,
    0 if all children, or all parents, share them.
    """

    mean: Any
    variance: Any
    log_weight: Any
    beta_use: Any
    beta_ignore: Any
    counts: Any
    means: Any
    variances: Any
    eps: float
    use_i: int
    use_m: int
    ignore_i: int
    ignore_m: int


@triton.jit
def load(iteration, at, tile):
    """Return the tiles of mean and p, and the log-weights."""
    mean = 0.0
    precision = 1.0
    log_weight = 0.0
    if iteration.mean is not None:
        mean = load_pose(iteration.mean, at)
        if iteration.variance is not None:
            precision = 0.5 / load_pose(iteration.variance, at, 1.0)
    if iteration.log_weight is not None:
        log_weight = load_each(iteration.log_weight, at)
    return mean, precision, log_weight


@triton.jit
def beta(pointer, stride_i, stride_m, i, at, tile):
    """Return the betas of child i, ``[1, BM]``."""
    m = at.first + tl.arange(0, tile.BM)
    return tl.load(pointer + tl.cast(i, tl.int64) * stride_i + m * stride_m, mask=m < at.M, other=0.0)[None, :]


@triton.jit
def beta_use(iteration, i, at, tile):
    """Return beta_use of child i."""
    return beta(iteration.beta_use, iteration.use_i, iteration.use_m, i, at, tile)


@triton.jit
def beta_ignore(iteration, i, at, tile):
    """Return beta_ignore of child i."""
    return beta(iteration.beta_ignore, iteration.ignore_i, iteration.ignore_m, i, at, tile)


@triton.jit
def score(iteration, parents, vote, tile):
    """Return a_im; in a first iteration, without parents, all are the same."""
    result = tl.zeros([tile.BL, tile.BM], tl.float32)
    if iteration.mean is not None:
        apart = vote - parents[0]
        result -= inner_product(apart, apart * parents[1])
    if iteration.log_weight is not None:
        result += parents[2]
    return result


@triton.jit
def responsibilities(iteration, parents, vote, normalizer, at, tile):
    """Return ``r_im = softmax_m a_im``, 1 / M in the first iteration; ``normalizer``: see :func:`coefficients_of`."""
    if iteration.mean is not None or iteration.log_weight is not None:
        return coefficients_of(score(iteration, parents, vote, tile), normalizer, at, tile)
    else:
        return equal_coefficients(at, tile)


@triton.jit
def gate_of(child):
    """Return g_i as ``[BL, 1]``, 0 of an absent child."""
    return tl.where(child.opened, child.gate, 0.0)[:, None]


@triton.jit
def start(iteration, tile):
    """Return (lo, sum of squares, count, evidence) of no children, and the base if there is no mean."""
    pose = tl.zeros([tile.BC, tile.BE, tile.BL, tile.BM], tl.float32)
    each = tl.zeros([tile.BL, tile.BM], tl.float32)
    if iteration.mean is not None:
        return pose, pose, each, each
    else:
        return pose, pose, each, each, pose


@triton.jit
def add(iteration, parents, state, vote, child, normalizer, at, tile):
    """Add one vote of weight w_im to the moments."""
    mean, squares, count, evidence = state[0], state[1], state[2], state[3]
    base = parents[0]
    if iteration.mean is None:
        base = tl.where(spread(count == 0.0), vote, state[4])
    gate = gate_of(child)
    weight = tl.where(
        child.opened[:, None], responsibilities(iteration, parents, vote, normalizer, at, tile) * gate, 0.0
    )
    total = count + weight
    ratio = tl.where(total == 0.0, 0.0, weight / total)
    apart = (vote - base) - mean
    mean += spread(ratio) * apart
    squares += spread(count * ratio) * (apart * apart)
    if iteration.beta_use is not None:
        ignore = beta_ignore(iteration, child.i, at, tile)
        evidence += (beta_use(iteration, child.i, at, tile) + ignore) * weight - ignore * gate
    if iteration.mean is not None:
        return mean, squares, total, evidence
    else:
        return mean, squares, total, evidence, base


@triton.jit
def join(iteration, state, other):
    """Return the moments of two ranges of children (Chan et al. 1979)."""
    mean, squares, count = state[0], state[1], state[2]
    apart = other[0]
    if iteration.mean is None:
        base = tl.where(spread(count == 0.0), other[4], state[4])
        apart += other[4] - base
    total = count + other[2]
    ratio = tl.where(total == 0.0, 0.0, other[2] / total)
    apart -= mean
    mean += spread(ratio) * apart
    squares += other[1] + spread(count * ratio) * (apart * apart)
    if iteration.mean is not None:
        return mean, squares, total, state[3] + other[3]
    else:
        return mean, squares, total, state[3] + other[3], base


@triton.jit
def finish(iteration, state, results, at, tile):
    """Store count, mean, variance, evidence: moments of the weights and ``eps`` of weight at 0; 0 of no weight."""
    mean, squares, count = state[0], state[1], state[2]
    if iteration.mean is not None:
        mean += load_pose(iteration.mean, at)
    else:
        mean += state[4]
    inverse = tl.where(count + iteration.eps == 0.0, 0.0, 1.0 / (count + iteration.eps))
    toward = mean * spread(iteration.eps * inverse)
    put_each(results[0], count, at, STORE)
    put_pose(results[1], mean * spread(count * inverse), at, STORE)
    variance = (squares + spread(count) * (toward * toward)) * spread(inverse)
    put_pose(results[2], variance, at, STORE)
    if iteration.beta_use is not None:
        put_each(results[3], state[3], at, STORE)


@triton.jit
def load_grads(grads, at):
    """Return the tiles of A, B and the new means, and K and the evidence's gradient."""
    slope = load_pose(grads[0], at)
    bend = load_pose(grads[1], at)
    offset = load_each(grads[2], at)
    means = load_pose(grads[3], at)
    devidence = 0.0
    if grads[4] is not None:
        devidence = load_each(grads[4], at)
    return slope, bend, offset, means, devidence


@triton.jit
def gain(iteration, grads, given, vote, i, at, tile):
    """Return t_im."""
    apart = vote - given[3]
    result = given[2] + inner_product(given[0] + given[1] * apart, apart)
    if grads[4] is not None:
        result += (beta_use(iteration, i, at, tile) + beta_ignore(iteration, i, at, tile)) * given[4]
    return result


@triton.jit
def dscore(iteration, parents, grads, given, vote, child, normalizer, average, at, tile):
    """Return w_im, da_im, dg_i, and the gradients of the betas.

    With betas dg_i is only this tile's part; that of the softmax over all parents is in the first tile's.
    """
    gains = gain(iteration, grads, given, vote, child.i, at, tile)
    coefficients = responsibilities(iteration, parents, vote, normalizer, at, tile)
    mean = average
    if average is None:
        mean = tl.sum(coefficients * gains, axis=1)
    opened = child.opened[:, None]
    gate = gate_of(child)
    weights = tl.where(opened, coefficients * gate, 0.0)
    dscores = tl.where(opened, weights * (gains - mean[:, None]), 0.0)
    dgate = mean
    duse = dscores  # of a form that Triton can return; unused without betas
    dignore = dscores
    if grads[4] is not None:
        duse = weights * given[4]
        dignore = (weights - gate) * given[4]
        if at.first > 0:
            dgate = mean * 0.0
        dgate -= tl.sum(beta_ignore(iteration, child.i, at, tile) * given[4], axis=1)
    return weights, dscores, unbroken(dgate, mean, child.opened), duse, dignore


@triton.jit
def dvote(iteration, parents, given, vote, weights, dscores):
    """Return dV_im as a tile."""
    result = spread(weights) * (given[0] + 2.0 * given[1] * (vote - given[3]))
    if iteration.mean is not None:
        result -= spread(2.0 * dscores) * (vote - parents[0]) * parents[1]
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
def dadd(iteration, parents, state, results, vote, dscores):
    """Add one child's part."""
    first, second, zeroth = state
    if results[0] is not None:
        first += spread(dscores) * (vote - parents[0])
    if results[1] is not None:
        second += spread(dscores) * ((vote - parents[0]) * (vote - parents[0]))
    if results[2] is not None:
        zeroth += dscores
    return first, second, zeroth


@triton.jit
def dfinish(iteration, state, results, part, at, poses, tile, HOW: tl.constexpr):
    """Store dmean, dvariance and dlog_weight of a range of children."""
    begin = part.to(tl.int64) * poses
    begin_pose = begin * (tile.C * tile.E)
    precision = 1.0
    if iteration.variance is not None:
        precision = 0.5 / load_pose(iteration.variance, at, 1.0)
    if results[0] is not None:
        put_pose(results[0] + begin_pose, 2.0 * precision * state[0], at, HOW)
    if results[1] is not None:
        put_pose(results[1] + begin_pose, 2.0 * precision * precision * state[1], at, HOW)
    if results[2] is not None:
        put_each(results[2] + begin, state[2], at, HOW)


GAUSSIAN = Algebra(load, score, start, add, join, finish, None, load_grads, gain, dscore, dvote, dstart, dadd, dfinish)


@triton.jit
def tight_parents(iteration, at):
    """Return which parents ``[BL, BM]`` have a variance that is tiny beside its squared mean, and the means."""
    means = load_pose(iteration.means, at)
    tight = (at.pose_mask & (load_pose(iteration.variances, at) < means * means * TIGHT)).to(tl.int32)
    return tl.max(tl.max(tight, axis=0), axis=0) > 0, means


@triton.jit
def load_rest(iteration, at, tile):
    """Return the tiles of mean and p, the log-weights; the new means, and whether no parent is tight."""
    mean, precision, log_weight = load(iteration, at, tile)
    tight, means = tight_parents(iteration, at)
    return mean, precision, log_weight, means, tl.max(tl.max(tight.to(tl.int32), axis=0), axis=0) == 0


@triton.jit
def idle_rest(iteration, parents):
    """Return whether no parent of the tile is tight."""
    return parents[4]


@triton.jit
def start_rest(iteration, tile):
    """Return rest and count of no children."""
    pose = tl.zeros([tile.BC, tile.BE, tile.BL, tile.BM], tl.float32)
    return pose, tl.zeros([tile.BL, tile.BM], tl.float32)


@triton.jit
def add_rest(iteration, parents, state, vote, child, normalizer, at, tile):
    """Add ``w_im d_im`` and ``w_im``."""
    coefficients = responsibilities(iteration, parents, vote, normalizer, at, tile) * gate_of(child)
    weight = tl.where(child.opened[:, None], coefficients, 0.0)
    apart = tl.where(child.opened[None, None, :, None], vote - parents[3], 0.0)
    return state[0] + spread(weight) * apart, state[1] + weight


@triton.jit
def join_rest(iteration, state, other):
    """Return rest and count of two ranges of children."""
    return state[0] + other[0], state[1] + other[1]


@triton.jit
def finish_rest(iteration, state, results, at, tile):
    """Store rest and count: as measured for tight parents, as on paper for others."""
    tight, means = tight_parents(iteration, at)
    put_pose(results[0], tl.where(spread(tight), state[0], iteration.eps * means), at, STORE)
    put_each(results[1], tl.where(tight, state[1], load_each(iteration.counts, at)), at, STORE)


REST = Algebra(load_rest, score, start_rest, add_rest, join_rest, finish_rest, idle_rest)


@kernel
def _prepare_kernel(
    grad_counts, grad_means, grad_variances, counts, variances, rest, slope, bend, offset, poses, eps, tile,
    ROUTING: tl.constexpr,
):  # fmt: skip
    """A = dmu / N, B = dvariance / N, K = dn - <B, variance>, with N = n + eps, dmu = dmean - 2 rest dvariance / N.

    From them follows t_im, the gradient of a weight, through count, mean and variance.
    """
    p = tl.program_id(0).to(tl.int64) * tile.BL + tl.arange(0, tile.BL)
    at = place(tile, p, p < poses, 0, 1)
    total = load_each(counts, at) + eps
    inverse = tl.where(total == 0.0, 0.0, 1.0 / total)
    constant = tl.zeros([tile.BL, 1], tl.float32)
    if grad_counts is not None:
        constant += load_each(grad_counts, at)
    first = tl.zeros([tile.BC, tile.BE, tile.BL, 1], tl.float32)
    second = tl.zeros([tile.BC, tile.BE, tile.BL, 1], tl.float32)
    if grad_means is not None:
        first += load_pose(grad_means, at)
    if grad_variances is not None:
        second += load_pose(grad_variances, at) * spread(inverse)
        first -= 2.0 * load_pose(rest, at) * second
        constant -= inner_product(second, load_pose(variances, at))
    put_pose(slope, first * spread(inverse), at, STORE)
    put_pose(bend, second, at, STORE)
    put_each(offset, constant, at, STORE)
