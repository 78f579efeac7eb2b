"""The Gaussian pass as the skeletons of ``forward.py`` and ``backward.py`` want it, and what prepares its backward.

``a_im = alpha_m - <p_m, (V_im - mu_m)^2>`` with ``p = 1 / (2 sigma^2)``, or 1 without a variance, ``w_im = g_i
softmax_m a_im``, and of these weights count, mean, variance and evidence (Hinton et al. 2018; Heinsen 2019).

Tensors: (mean, variance, log_weight, beta_use, beta_ignore); results: (counts, means, variances, evidence); given:
(A, B, K, means, devidence) of :func:`_gaussian_prepare_kernel`; gradients: (dmean, dvariance, dlog_weight).

**Moments** are kept as West (1979) does: the mean as an offset ``lo`` from a *base*, and the sum of squares about it,
both corrected child by child; ranges of children meet by Chan's formula. The base is the parents' mean, or without one
the first vote that counts. No offset that all votes have in common then costs a digit, nor do votes far from the base.

Backward, with ``d_im = V_im - means_m``: ``t_im = K_m + <A_m + B_m d_im, d_im> + (beta_use_im + beta_ignore_im) dz_m``,
``da_im = w_im (t_im - sum_m' r_im' t_im')``, ``dg_i = sum_m r_im t_im - sum_m beta_ignore_im dz_m``,
``dV_im = w_im (A_m + 2 B_m d_im) - 2 p_m da_im (V_im - mu_m)``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import inner_product, kernel, routing_weights, spread, tile_mask, tile_offsets, unbroken

USE_OWN = tl.constexpr(1)
"""Bits of MODE: whether every child, and every parent, has its own beta_use; the same of beta_ignore."""
USE_EACH = tl.constexpr(2)
IGNORE_OWN = tl.constexpr(4)
IGNORE_EACH = tl.constexpr(8)


@triton.jit
def hold(tensors, places, MODE: tl.constexpr):
    """Return the tiles of mean and p, and the log-weights."""
    mean = 0.0
    precision = 1.0
    log_weight = 0.0
    if tensors[0] is not None:
        mean = tl.load(tensors[0] + places[0], mask=places[1], other=0.0)
        if tensors[1] is not None:
            precision = 0.5 / tl.load(tensors[1] + places[0], mask=places[1], other=1.0)
    if tensors[2] is not None:
        log_weight = tl.load(tensors[2] + places[2], mask=places[3], other=0.0)
    return mean, precision, log_weight


@triton.jit
def beta(pointer, i, first, many, OWN: tl.constexpr, EACH: tl.constexpr, BM: tl.constexpr):
    """Return the betas of child i, ``[1, BM]``."""
    m = first + tl.arange(0, BM)
    at = m * 0
    if EACH:
        at = m
    if OWN and EACH:
        at = tl.cast(i, tl.int64) * many + m
    elif OWN:
        at = m * 0 + i
    return tl.load(pointer + at, mask=m < many, other=0.0)[None, :]


@triton.jit
def beta_use(tensors, i, first, many, MODE: tl.constexpr, BM: tl.constexpr):
    """Return beta_use of child i."""
    return beta(tensors[3], i, first, many, (USE_OWN & MODE) != 0, (USE_EACH & MODE) != 0, BM)


@triton.jit
def beta_ignore(tensors, i, first, many, MODE: tl.constexpr, BM: tl.constexpr):
    """Return beta_ignore of child i."""
    return beta(tensors[4], i, first, many, (IGNORE_OWN & MODE) != 0, (IGNORE_EACH & MODE) != 0, BM)


@triton.jit
def logits(tensors, own, votes, scale, BL: tl.constexpr, BM: tl.constexpr):
    """Return a_im; the same for all parents where they are nothing yet."""
    result = tl.zeros([BL, BM], tl.float32)
    if tensors[0] is not None:
        apart = votes - own[0]
        squares = apart * apart
        if tensors[1] is not None:
            squares *= own[1]
        result -= tl.sum(tl.sum(squares, axis=0), axis=0)
    if tensors[2] is not None:
        result += own[2]
    return result


@triton.jit
def responsibilities(tensors, own, votes, known, first, many, scale, BL: tl.constexpr, BM: tl.constexpr):
    """Return ``r_im = softmax_m a_im``, 1 / M in the first turn; ``known``: the log-sum-exp if it is known."""
    if tensors[0] is not None or tensors[2] is not None:
        return routing_weights(logits(tensors, own, votes, scale, BL, BM), first, many, known, BM)
    else:
        real = (first + tl.arange(0, BM) < many)[None, :]
        return tl.where(real, tl.full([BL, BM], 1.0, tl.float32) / many, 0.0)


@triton.jit
def whole_gate(gates, opened):
    """Return g_i as ``[BL, 1]``, 0 of an absent child."""
    if gates is None:
        return tl.where(opened, 1.0, 0.0)[:, None]
    else:
        return tl.where(opened, gates, 0.0)[:, None]


@triton.jit
def start(tensors, BL: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr):
    """Return (lo, sum of squares, count, evidence) of no children, and the base if there is no mean."""
    tile = tl.zeros([BC, BE, BL, BM], tl.float32)
    each = tl.zeros([BL, BM], tl.float32)
    if tensors[0] is not None:
        return tile, tile, each, each
    else:
        return tile, tile, each, each, tile


@triton.jit
def add(
    state, tensors, own, votes, gates, opened, known, i, first, many, scale,
    MODE: tl.constexpr, BL: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Add one vote of weight w_im to the moments."""
    mean, squares, count, evidence = state[0], state[1], state[2], state[3]
    base = own[0]
    if tensors[0] is None:
        base = tl.where(spread(count == 0.0), votes, state[4])
    whole = whole_gate(gates, opened)
    shares = responsibilities(tensors, own, votes, known, first, many, scale, BL, BM)
    weight = tl.where(opened[:, None], shares * whole, 0.0)
    total = count + weight
    ratio = tl.where(total == 0.0, 0.0, weight / total)
    apart = (votes - base) - mean
    mean += spread(ratio) * apart
    squares += spread(count * ratio) * (apart * apart)
    if tensors[3] is not None:
        ignore = beta_ignore(tensors, i, first, many, MODE, BM)
        evidence += (beta_use(tensors, i, first, many, MODE, BM) + ignore) * weight - ignore * whole
    if tensors[0] is not None:
        return mean, squares, total, evidence
    else:
        return mean, squares, total, evidence, base


@triton.jit
def save(parts, part, state, places, poses, SIZE: tl.constexpr):
    """Leave the sums of a range of children."""
    at = part.to(tl.int64) * poses
    tl.store(parts[0] + at * SIZE + places[0], state[0], mask=places[1])
    tl.store(parts[1] + at * SIZE + places[0], state[1], mask=places[1])
    tl.store(parts[2] + at + places[2], state[2], mask=places[3])
    tl.store(parts[3] + at + places[2], state[3], mask=places[3])
    if len(parts) > 4:
        tl.store(parts[4] + at * SIZE + places[0], state[4], mask=places[1])


@triton.jit
def load(parts, part, tensors, places, poses, SIZE: tl.constexpr):
    """Return what :func:`save` left."""
    at = tl.cast(part, tl.int64) * poses
    mean = tl.load(parts[0] + at * SIZE + places[0], mask=places[1], other=0.0)
    squares = tl.load(parts[1] + at * SIZE + places[0], mask=places[1], other=0.0)
    count = tl.load(parts[2] + at + places[2], mask=places[3], other=0.0)
    evidence = tl.load(parts[3] + at + places[2], mask=places[3], other=0.0)
    if tensors[0] is not None:
        return mean, squares, count, evidence
    else:
        return mean, squares, count, evidence, tl.load(parts[4] + at * SIZE + places[0], mask=places[1], other=0.0)


@triton.jit
def merge(state, other, tensors):
    """Return the moments of two ranges of children (Chan et al. 1979)."""
    mean, squares, count = state[0], state[1], state[2]
    apart = other[0]
    if tensors[0] is None:
        nobody = spread(count == 0.0)
        base = tl.where(nobody, other[4], state[4])
        apart += other[4] - base
    total = count + other[2]
    ratio = tl.where(total == 0.0, 0.0, other[2] / total)
    apart -= mean
    mean += spread(ratio) * apart
    squares += other[1] + spread(count * ratio) * (apart * apart)
    if tensors[0] is not None:
        return mean, squares, total, state[3] + other[3]
    else:
        return mean, squares, total, state[3] + other[3], base


@triton.jit
def finish(
    state, tensors, results, places, inside, many, eps,
    MODE: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
    BL: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Store count, mean, variance, evidence: moments of the weights and ``eps`` of weight at 0; 0 of no weight."""
    mean, squares, count = state[0], state[1], state[2]
    if tensors[0] is not None:
        mean += tl.load(tensors[0] + places[0], mask=places[1], other=0.0)
    else:
        mean += state[4]
    inverse = tl.where(count + eps == 0.0, 0.0, 1.0 / (count + eps))
    toward = mean * spread(eps * inverse)
    tl.store(results[0] + places[2], count, mask=places[3])
    tl.store(results[1] + places[0], mean * spread(count * inverse), mask=places[1])
    variance = (squares + spread(count) * (toward * toward)) * spread(inverse)
    tl.store(results[2] + places[0], variance, mask=places[1])
    if tensors[3] is not None:
        tl.store(results[3] + places[2], state[3], mask=places[3])


@triton.jit
def hold_given(given, places):
    """Return the tiles of A, B and the new means, and K and the evidence's gradient."""
    slope = tl.load(given[0] + places[0], mask=places[1], other=0.0)
    bend = tl.load(given[1] + places[0], mask=places[1], other=0.0)
    offset = tl.load(given[2] + places[2], mask=places[3], other=0.0)
    means = tl.load(given[3] + places[0], mask=places[1], other=0.0)
    devidence = 0.0
    if given[4] is not None:
        devidence = tl.load(given[4] + places[2], mask=places[3], other=0.0)
    return slope, bend, offset, means, devidence


@triton.jit
def gain(tensors, given, held, votes, i, first, many, MODE: tl.constexpr, BM: tl.constexpr):
    """Return t_im."""
    apart = votes - held[3]
    result = held[2] + inner_product(held[0] + held[1] * apart, apart)
    if given[4] is not None:
        betas = beta_use(tensors, i, first, many, MODE, BM) + beta_ignore(tensors, i, first, many, MODE, BM)
        result += betas * held[4]
    return result


@triton.jit
def differentiate(
    tensors, own, given, held, votes, clean, gates, opened, known, known_heard, i, first, many, scale, valid,
    MODE: tl.constexpr, BL: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Return dV_im as a tile (zero outside ``valid``), da_im ``[BL, BM]``, dg_i, and what the betas get.

    With betas dg_i is this tile's part alone; the first tile's has what the softmax over all parents gives.
    """
    here = opened[:, None]
    heard = gain(tensors, given, held, votes, i, first, many, MODE, BM)
    shares = responsibilities(tensors, own, votes, known, first, many, scale, BL, BM)
    if known_heard is None:
        mean_gain = tl.sum(shares * heard, axis=1)
    else:
        mean_gain = known_heard
    gate_gain = mean_gain
    whole = whole_gate(gates, opened)
    weight = tl.where(here, shares * whole, 0.0)
    dlogits = tl.where(here, weight * (heard - mean_gain[:, None]), 0.0)
    used = dlogits
    ignored = dlogits
    if given[4] is not None:
        used = weight * held[4]
        ignored = (weight - whole) * held[4]
        if first > 0:
            gate_gain = mean_gain * 0.0
        gate_gain -= tl.sum(beta_ignore(tensors, i, first, many, MODE, BM) * held[4], axis=1)
    gate_gain = unbroken(gate_gain, mean_gain, opened)
    dvotes = spread(weight) * (held[0] + 2.0 * held[1] * (clean - held[3]))
    if tensors[0] is not None:
        pull = spread(2.0 * dlogits) * (clean - own[0])
        if tensors[1] is not None:
            pull *= own[1]
        dvotes -= pull
    return tl.where(valid, dvotes, 0.0), dlogits, gate_gain, used, ignored


@triton.jit
def start_gradients(results, BL: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr):
    """Return the sums over no children of ``da (V - mu)``, ``da (V - mu)^2`` and da."""
    first = 0.0
    second = 0.0
    zeroth = 0.0
    if results[0] is not None:
        first = tl.zeros([BC, BE, BL, BM], tl.float32)
    if results[1] is not None:
        second = tl.zeros([BC, BE, BL, BM], tl.float32)
    if results[2] is not None:
        zeroth = tl.zeros([BL, BM], tl.float32)
    return first, second, zeroth


@triton.jit
def gather(state, tensors, own, results, votes, dlogits, scale, MODE: tl.constexpr):
    """Add one child's share."""
    first, second, zeroth = state
    if results[0] is not None:
        first += spread(dlogits) * (votes - own[0])
    if results[1] is not None:
        second += spread(dlogits) * ((votes - own[0]) * (votes - own[0]))
    if results[2] is not None:
        zeroth += dlogits
    return first, second, zeroth


@triton.jit
def put(pointer, values, mask, ORDERED: tl.constexpr):
    """Store, or add to what is there."""
    if ORDERED:
        values += tl.load(pointer, mask=mask, other=0.0)
    tl.store(pointer, values, mask=mask)


@triton.jit
def leave(state, tensors, results, places, part, poses, SIZE: tl.constexpr, ORDERED: tl.constexpr):
    """Store dmean, dvariance and dlog_weight of a range of children; ``ORDERED``: add to what is there."""
    at = part.to(tl.int64) * poses
    precision = 1.0
    if tensors[1] is not None:
        precision = 0.5 / tl.load(tensors[1] + places[0], mask=places[1], other=1.0)
    if results[0] is not None:
        put(results[0] + at * SIZE + places[0], 2.0 * precision * state[0], places[1], ORDERED)
    if results[1] is not None:
        put(results[1] + at * SIZE + places[0], 2.0 * precision * precision * state[1], places[1], ORDERED)
    if results[2] is not None:
        put(results[2] + at + places[2], state[2], places[3], ORDERED)


@kernel
def _gaussian_prepare_kernel(
    grad_counts, grad_means, grad_variances, counts, means, variances, slope, bend, offset, poses, eps,
    C: tl.constexpr, E: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """A = dmu / N, B = dvariance / N, K = dn - <B, variance>, with N = n + eps, dmu = dmean - 2 eps mean dvariance / N.

    They are what t_im is made of: the gradient of a weight, by way of count, mean and variance.
    """
    p = tl.program_id(0).to(tl.int64) * BL + tl.arange(0, BL)
    exists = (p < poses)[:, None]
    offsets = tile_offsets(p, 0, 1, C, E, BC, 1, BE)
    mask = tile_mask(0, 1, C, E, BC, 1, BE) & exists[None, None, :, :]
    each = p.to(tl.int64)[:, None]
    whole = tl.load(counts + each, mask=exists, other=0.0) + eps
    inverse = tl.where(whole == 0.0, 0.0, 1.0 / whole)
    constant = tl.zeros([BL, 1], tl.float32)
    if grad_counts is not None:
        constant += tl.load(grad_counts + each, mask=exists, other=0.0)
    first = tl.zeros([BC, BE, BL, 1], tl.float32)
    second = tl.zeros([BC, BE, BL, 1], tl.float32)
    if grad_means is not None:
        first += tl.load(grad_means + offsets, mask=mask, other=0.0)
    if grad_variances is not None:
        second += tl.load(grad_variances + offsets, mask=mask, other=0.0) * spread(inverse)
        first -= 2.0 * eps * tl.load(means + offsets, mask=mask, other=0.0) * second
        constant -= inner_product(second, tl.load(variances + offsets, mask=mask, other=0.0))
    tl.store(slope + offsets, first * spread(inverse), mask=mask)
    tl.store(bend + offsets, second, mask=mask)
    tl.store(offset + each, constant, mask=exists)
