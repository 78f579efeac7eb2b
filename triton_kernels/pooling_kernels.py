"""The pooling pass as the skeletons of ``forward.py`` and ``backward.py`` want it.

``a_im = scale <Q_m, K_im>``, ``r_im = g_i exp(a_im) / Z_m``, ``Z_m = sum_i g_i exp(a_im)``, ``S_m = sum_i r_im V_im``,
with keys K that are the votes or their directions (Zhao & Huang 2019). Children compete, so that a tile of parents need
not know of others, and the softmax goes along with the walk over children, as FlashAttention's does.

Tensors: (query,); results: (S, log Z); parts: S and Z about exp(top), and top; given: (dS, S, log Z, dlog Z);
gradients: (dQ,). Backward, with ``t_im = <dS_m, V_im> - <dS_m, S_m> + dlogZ_m`` and ``e_im = exp(a_im - log Z_m)``:
``da_im = r_im t_im``, ``dg_i = sum_m e_im t_im``, ``dQ_m = scale sum_i da_im K_im``, ``dK_im = scale da_im Q_m``,
``dV_im = r_im dS_m`` plus dK, or ``(dK - K <K, dK>) / |V|`` for directions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_kernels import FROZEN, hold, leave, start_gradients  # the query's, as there
from .tiles import inner_product, spread, unbroken

__all__ = [
    "FROZEN", "NORMALIZE", "add", "differentiate", "finish", "gather", "hold", "hold_given", "leave", "load", "merge",
    "save", "start", "start_gradients",
]  # fmt: skip

NORMALIZE = tl.constexpr(1)
"""Bit of MODE: keys are the votes' directions."""


@triton.jit
def directions(votes):
    """Return u, 1 / |u| and 1 / |V|, where u is V times a number that lets no square overflow or vanish.

    Both inverses are 0 for a vote of zero.
    """
    largest = tl.max(tl.max(tl.abs(votes), axis=0), axis=0)
    size = 1.0 / tl.minimum(tl.maximum(largest, 2.0**-125), 2.0**126)
    scaled = votes * spread(size)
    length = tl.sqrt(inner_product(scaled, scaled))
    inverse = tl.where(length == 0.0, 0.0, 1.0 / length)
    return scaled, inverse, inverse * size


@triton.jit
def agreement(asked, votes, scale, MODE: tl.constexpr):
    """Return ``a_im = scale <Q_m, K_im>``."""
    if NORMALIZE & MODE:
        scaled, inverse, _ = directions(votes)
        return inner_product(asked, scaled) * inverse * scale
    else:
        return inner_product(asked, votes) * scale


@triton.jit
def start(tensors, BL: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr):
    """Return (S, Z, top) of no children: S and Z about exp(top), which without a query is 1."""
    top = tl.zeros([BL, BM], tl.float32)
    if tensors[0] is not None:
        top = tl.full([BL, BM], float("-inf"), tl.float32)
    return tl.zeros([BC, BE, BL, BM], tl.float32), tl.zeros([BL, BM], tl.float32), top


@triton.jit
def finite(top):
    """Return ``top``, or 0 where nobody is there: infinity less itself must not make NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def add(
    state, tensors, own, votes, gates, opened, known, i, first, many, scale,
    MODE: tl.constexpr, BL: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Add ``g_i exp(a_im)`` to Z and as many V_im to S; top rises to the largest a."""
    sums, total, top = state
    here = opened[:, None]
    if tensors[0] is not None:
        logits = tl.where(here, agreement(own[0], votes, scale, MODE), float("-inf"))
        higher = tl.maximum(top, logits)
        shift = finite(higher)
        fade = tl.exp(top - shift)
        shares = tl.exp(logits - shift)
        if gates is not None:
            shares = tl.where(here, shares * gates[:, None], 0.0)
        sums = sums * spread(fade) + spread(shares) * votes
        total = total * fade + shares
        top = higher
    else:
        shares = tl.where(here, 1.0, 0.0)
        if gates is not None:
            shares = tl.where(here, gates[:, None], 0.0)
        sums += spread(shares) * votes
        total += shares
    return sums, total, top


@triton.jit
def save(parts, part, state, places, poses, SIZE: tl.constexpr):
    """Leave the sums of a range of children."""
    at = part.to(tl.int64) * poses
    tl.store(parts[0] + at * SIZE + places[0], state[0], mask=places[1])
    tl.store(parts[1] + at + places[2], state[1], mask=places[3])
    tl.store(parts[2] + at + places[2], state[2], mask=places[3])


@triton.jit
def load(parts, part, tensors, places, poses, SIZE: tl.constexpr):
    """Return what :func:`save` left."""
    at = tl.cast(part, tl.int64) * poses
    sums = tl.load(parts[0] + at * SIZE + places[0], mask=places[1], other=0.0)
    total = tl.load(parts[1] + at + places[2], mask=places[3], other=0.0)
    return sums, total, tl.load(parts[2] + at + places[2], mask=places[3], other=0.0)


@triton.jit
def merge(state, other, tensors):
    """Return the sums of two ranges of children, about the higher top."""
    higher = tl.maximum(state[2], other[2])
    shift = finite(higher)
    fade, rise = tl.exp(state[2] - shift), tl.exp(other[2] - shift)
    return state[0] * spread(fade) + other[0] * spread(rise), state[1] * fade + other[1] * rise, higher


@triton.jit
def finish(
    state, tensors, results, places, inside, many, eps,
    MODE: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
    BL: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Store S and log Z; 0 and -infinity where nobody is there."""
    sums, total, top = state
    empty = total == 0.0
    inverse = tl.where(empty, 0.0, 1.0 / total)
    tl.store(results[0] + places[0], sums * spread(inverse), mask=places[1])
    logarithm = tl.log(tl.where(empty, 1.0, total)) + top
    tl.store(results[1] + places[2], tl.where(empty, float("-inf"), logarithm), mask=places[3])


@triton.jit
def hold_given(given, places):
    """Return the tile of dS, ``dlogZ - <dS, S>``, log Z (0 where nobody is there), and where that is."""
    slope = tl.load(given[0] + places[0], mask=places[1], other=0.0).to(tl.float32)
    sums = tl.load(given[1] + places[0], mask=places[1], other=0.0).to(tl.float32)
    offset = -inner_product(slope, sums)
    if given[3] is not None:
        offset += tl.load(given[3] + places[2], mask=places[3], other=0.0).to(tl.float32)
    normalizer = tl.load(given[2] + places[2], mask=places[3], other=0.0)
    empty = normalizer == float("-inf")
    return slope, offset, tl.where(empty, 0.0, normalizer), empty


@triton.jit
def differentiate(
    tensors, own, given, held, votes, clean, gates, opened, known, known_heard, i, first, many, scale, valid,
    MODE: tl.constexpr, BL: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Return dV_im as a tile (zero outside ``valid``), da_im ``[BL, BM]``, and what this tile adds to dg_i."""
    slope, offset, normalizer, empty = held
    here = opened[:, None]
    heard = inner_product(slope, votes) + offset
    logits = tl.zeros([BL, BM], tl.float32)
    if tensors[0] is not None:
        logits = agreement(own[0], votes, scale, MODE)
    free = tl.where(empty, 0.0, tl.exp(logits - normalizer))
    gate_gain = tl.sum(free * heard, axis=1)
    shares = free
    if gates is not None:
        gate_gain = unbroken(gate_gain, gate_gain, opened)
        shares *= gates[:, None]
    shares = tl.where(here, shares, 0.0)
    dlogits = tl.where(here, shares * heard, 0.0)
    dvotes = spread(shares) * slope
    if tensors[0] is not None and not (FROZEN & MODE):
        if NORMALIZE & MODE:
            scaled, inverse, inverse_length = directions(clean)
            dvotes += spread(dlogits * inverse_length * scale) * own[0]
            dvotes -= spread(dlogits * inverse_length * logits * inverse) * scaled
        else:
            dvotes += spread(dlogits * scale) * own[0]
    return tl.where(valid, dvotes, 0.0), dlogits, gate_gain, dlogits, dlogits


@triton.jit
def gather(state, tensors, own, results, votes, dlogits, scale, MODE: tl.constexpr):
    """Add ``scale da_im K_im`` to dQ."""
    dquery = state[0]
    if results[0] is not None:
        if NORMALIZE & MODE:
            scaled, inverse, _ = directions(votes)
            dquery += spread(dlogits * scale * inverse) * scaled
        else:
            dquery += spread(dlogits * scale) * votes
    return (dquery,)
