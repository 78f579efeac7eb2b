"""The attention pass as the skeletons of ``forward.py`` and ``backward.py`` want it, and LayerNorm's backward.

``r_im = softmax_m(scale <Q_m, V_im>)``, ``S_m = sum_i g_i r_im V_im``, ``parents = LayerNorm(S)`` (Tsai et al. 2020).
Tensors: (query, norm_weight, norm_bias); results: (parents, S), the parts of S where ranges of children meet;
given: (dS,); gradients: (dQ,).

Backward, with ``h_im = <dS_m, V_im>`` and ``hbar_i = sum_m r_im h_im``: ``da_im = g_i r_im (h_im - hbar_i)``,
``dV_im = g_i r_im dS_m + scale da_im Q_m``, ``dQ_m = scale sum_i da_im V_im``, ``dg_i = hbar_i``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import inner_product, kernel, routing_weights, spread, tile_mask, tile_offsets

NORMALIZE = tl.constexpr(1)
"""Bit of MODE: parents are LayerNorm(S), and S is kept."""
FROZEN = tl.constexpr(2)
"""Bit of MODE: backward takes the coefficients for constants."""


@triton.jit
def hold(tensors, places, MODE: tl.constexpr):
    """Return the query's tile."""
    asked = 0.0
    if tensors[0] is not None:
        asked = tl.load(tensors[0] + places[0], mask=places[1], other=0.0).to(tl.float32)
    return (asked,)


@triton.jit
def start(tensors, BL: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr):
    """Return S of no children."""
    return (tl.zeros([BC, BE, BL, BM], tl.float32),)


@triton.jit
def add(
    state, tensors, own, votes, gates, opened, known, i, first, many, scale,
    MODE: tl.constexpr, BL: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Add ``g_i r_im V_im`` to S; without a query ``g_i V_im``, and 1 / M comes in the end."""
    sums = state[0]
    if tensors[0] is not None:
        shares = routing_weights(inner_product(own[0], votes) * scale, first, many, known, BM)
        if gates is not None:
            shares *= gates[:, None]
        sums += spread(shares) * votes
    elif gates is not None:
        sums += gates[None, None, :, None] * votes
    else:
        sums += votes
    return (sums,)


@triton.jit
def save(parts, part, state, places, poses, SIZE: tl.constexpr):
    """Leave S of a range of children."""
    tl.store(parts[0] + part.to(tl.int64) * poses * SIZE + places[0], state[0], mask=places[1])


@triton.jit
def load(parts, part, tensors, places, poses, SIZE: tl.constexpr):
    """Return what :func:`save` left."""
    at = tl.cast(part, tl.int64) * poses * SIZE + places[0]
    return (tl.load(parts[0] + at, mask=places[1], other=0.0),)


@triton.jit
def merge(state, other, tensors):
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
def finish(
    state, tensors, results, places, inside, many, eps,
    MODE: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
    BL: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Store S, and LayerNorm(S) or S itself as the parents, in whatever dtype each has."""
    sums = state[0]
    if tensors[0] is None:
        sums /= many
    if NORMALIZE & MODE:
        tl.store(results[1] + places[0], sums, mask=places[1])
        sums, _ = standardise(sums, inside, eps, C * E)
        c = tl.arange(0, BC)[:, None, None, None]
        e = tl.arange(0, BE)[None, :, None, None]
        affine_mask = (c < C) & (e < E)
        if tensors[1] is not None:
            sums *= tl.load(tensors[1] + c * E + e, mask=affine_mask, other=0.0).to(tl.float32)
        if tensors[2] is not None:
            sums += tl.load(tensors[2] + c * E + e, mask=affine_mask, other=0.0).to(tl.float32)
    tl.store(results[0] + places[0], sums, mask=places[1])


@triton.jit
def logits(tensors, own, votes, scale, BL: tl.constexpr, BM: tl.constexpr):
    """Return ``a_im = scale <Q_m, V_im>``; without a query all are 0."""
    agreement = tl.zeros([BL, BM], tl.float32)
    if tensors[0] is not None:
        agreement = inner_product(own[0], votes) * scale
    return agreement


@triton.jit
def hold_given(given, places):
    """Return the tile of dS."""
    return (tl.load(given[0] + places[0], mask=places[1], other=0.0),)


@triton.jit
def gain(tensors, given, held, votes, i, first, many, MODE: tl.constexpr, BM: tl.constexpr):
    """Return ``h_im = <dS_m, V_im>``."""
    return inner_product(held[0], votes)


@triton.jit
def differentiate(
    tensors, own, given, held, votes, clean, gates, opened, known, known_heard, i, first, many, scale, valid,
    MODE: tl.constexpr, BL: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Return dV_im as a tile (zero outside ``valid``), da_im ``[BL, BM]`` and hbar_i ``[BL]`` of one child.

    ``known_heard`` is hbar_i where the tile does not hold all parents, else None.
    """
    slope = held[0]
    heard = inner_product(slope, votes)
    if tensors[0] is not None:
        shares = routing_weights(inner_product(own[0], votes) * scale, first, many, known, BM)
    else:
        real = (first + tl.arange(0, BM) < many)[None, :]
        shares = tl.where(real, tl.full([BL, BM], 1.0, tl.float32) / many, 0.0)
    if known_heard is None:
        mean_gain = tl.sum(shares * heard, axis=1)
    else:
        mean_gain = known_heard
    gated = shares
    if gates is not None:
        gated = shares * gates[:, None]
    dvotes = spread(gated) * slope
    dlogits = gated * (heard - mean_gain[:, None])
    if tensors[0] is not None and not (FROZEN & MODE):
        dvotes += spread(dlogits * scale) * own[0]
    return tl.where(valid, dvotes, 0.0), dlogits, mean_gain, dlogits, dlogits


@triton.jit
def start_gradients(results, BL: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr):
    """Return dQ of no children."""
    dquery = 0.0
    if results[0] is not None:
        dquery = tl.zeros([BC, BE, BL, BM], tl.float32)
    return (dquery,)


@triton.jit
def gather(state, tensors, own, results, votes, dlogits, scale, MODE: tl.constexpr):
    """Add ``scale da_im V_im`` to dQ."""
    dquery = state[0]
    if results[0] is not None:
        dquery += spread(dlogits * scale) * votes
    return (dquery,)


@triton.jit
def leave(state, tensors, results, places, part, poses, SIZE: tl.constexpr, ORDERED: tl.constexpr):
    """Store dQ of a range of children; ``ORDERED``: add to what is there."""
    if results[0] is not None:
        dquery = state[0]
        at = results[0] + part.to(tl.int64) * poses * SIZE + places[0]
        if ORDERED:
            dquery += tl.load(at, mask=places[1], other=0.0)
        tl.store(at, dquery, mask=places[1])


@kernel
def _attention_norm_backward_kernel(
    grad_parents, grad_sums, saved_sums, norm_weight, slope, affine, poses, per_split, eps,
    C: tl.constexpr, E: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """dS = (u - mean u - x mean(u x)) / sigma + dsums, u = dy norm_weight, x = LayerNorm(S); dnorm_weight = sum dy x.

    A program walks ``per_split`` blocks of poses and leaves its share of the affine's gradients in
    ``affine[program, 2, C * E]``; they are added up in that order.
    """
    inside = tile_mask(0, 1, C, E, BC, 1, BE)
    c = tl.arange(0, BC)[:, None, None, None]
    e = tl.arange(0, BE)[None, :, None, None]
    affine_mask = (c < C) & (e < E)
    weight_sum = tl.zeros([BC, BE, 1, 1], tl.float32)
    bias_sum = tl.zeros([BC, BE, 1, 1], tl.float32)
    for block in range(tl.program_id(0) * per_split, (tl.program_id(0) + 1) * per_split):
        p = tl.cast(block, tl.int64) * BL + tl.arange(0, BL)
        offsets = tile_offsets(p, 0, 1, C, E, BC, 1, BE)
        mask = inside & (p < poses)[None, None, :, None]
        result = tl.zeros([BC, BE, BL, 1], tl.float32)
        if grad_parents is not None:
            sums = tl.load(saved_sums + offsets, mask=mask, other=0.0).to(tl.float32)
            grad = tl.load(grad_parents + offsets, mask=mask, other=0.0).to(tl.float32)
            standard, inverse = standardise(sums, inside, eps, C * E)
            standard = tl.where(mask, standard, 0.0)
            if affine is not None:
                weight_sum += tl.sum(grad * standard, axis=2, keep_dims=True)
                bias_sum += tl.sum(grad, axis=2, keep_dims=True)
            if norm_weight is not None:
                grad *= tl.load(norm_weight + c * E + e, mask=affine_mask, other=0.0).to(tl.float32)
            mean = tl.sum(tl.sum(grad, axis=0), axis=0) / (C * E)
            slant = inner_product(grad, standard) / (C * E)
            result = (grad - spread(mean) - standard * spread(slant)) * spread(inverse)
        if grad_sums is not None:
            result += tl.load(grad_sums + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(slope + offsets, result, mask=mask)
    if affine is not None:
        at = affine + tl.program_id(0).to(tl.int64) * (2 * C * E) + c * E + e
        tl.store(at, weight_sum, mask=affine_mask)
        tl.store(at + C * E, bias_sum, mask=affine_mask)
