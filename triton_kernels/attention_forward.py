"""Forward kernels of the attention pass: the sums, the log-sum-exp of the first of two sweeps, and the finish."""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_tiles import (
    inner_product,
    is_present,
    kernel,
    position_origin,
    routing_weights,
    spread,
    tile_mask,
    tile_offsets,
    votes_of_child,
)


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
def store_parents(
    sums, parents, saved_sums, norm_weight, norm_bias, offsets, mask, inside, eps,
    NORMALIZE: tl.constexpr, C: tl.constexpr, E: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Store S, and LayerNorm(S) or S itself as the parents, in whatever dtype each has."""
    if NORMALIZE:
        tl.store(saved_sums + offsets, sums, mask=mask)
        sums, _ = standardise(sums, inside, eps, C * E)
        c = tl.arange(0, BC)[:, None, None, None]
        e = tl.arange(0, BE)[None, :, None, None]
        affine_mask = (c < C) & (e < E)
        if norm_weight is not None:
            sums *= tl.load(norm_weight + c * E + e, mask=affine_mask, other=0.0).to(tl.float32)
        if norm_bias is not None:
            sums += tl.load(norm_bias + c * E + e, mask=affine_mask, other=0.0).to(tl.float32)
    tl.store(parents + offsets, sums, mask=mask)


@kernel
def _attention_forward_kernel(
    children, weight, query, bias, gate, norm_weight, norm_bias, normalizer, parents, saved_sums,
    count, length, columns, height, width, types, groups, many, seen_children, blocks, tiles, per_split,
    cs_b, cs_h, cs_w, cs_n, cs_c, cs_d, ws_g, ws_m, ws_d, ws_e, bs_i, bs_m, gs_b, gs_h, gs_w, gs_n,
    scale, eps,
    KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BL: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, NORMALIZE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """S_m = sum_i g_i softmax_m(scale <Q_m, V_im>) V_im and parents = LayerNorm(S)  (Tsai et al. 2020).

    A program walks a range of the children of ``BL`` positions with ``BM`` parents, which stay on chip: those of all
    positions of a grid are told apart by (block of positions, tile of parents, range of children). Where its parents
    are not all, ``normalizer`` holds the log-sum-exp over all of them. Unless it is ``WHOLE`` (it walks all children),
    its sums go to ``saved_sums[range]`` and :func:`_attention_finish_kernel` adds them up.
    """
    program = tl.program_id(0)
    block = program % blocks
    tile = (program // blocks) % tiles
    split = program // blocks // tiles
    first = tile * BM
    p = block * BL + tl.arange(0, BL)
    exists = p < count
    sample, row, column = position_origin(p, count, length, columns, SH, SW, PH, PW)
    origin = sample.to(tl.int64) * cs_b + row.to(tl.int64) * cs_h + column.to(tl.int64) * cs_w
    gate_origin = sample.to(tl.int64) * gs_b + row.to(tl.int64) * gs_h + column.to(tl.int64) * gs_w
    row_p = block * BL + tl.arange(0, BL * BC) // BC
    row_exists = row_p < count
    row_sample, row_row, row_column = position_origin(row_p, count, length, columns, SH, SW, PH, PW)
    row_origin = row_sample.to(tl.int64) * cs_b + row_row.to(tl.int64) * cs_h + row_column.to(tl.int64) * cs_w
    inside = tile_mask(first, many, C, E, BC, BM, BE)
    offsets = tile_offsets(p, first, many, C, E, BC, BM, BE)
    mask = inside & exists[None, None, :, None]
    if query is not None:
        asked = tl.load(query + offsets, mask=mask, other=0.0).to(tl.float32)
    sums = tl.zeros([BC, BE, BL, BM], tl.float32)
    start = split * per_split
    for i in range(start, tl.minimum(start + per_split, seen_children)):
        slot = i // types
        n = (i - slot * types).to(tl.int64)
        dy = slot // KW * DH
        dx = slot % KW * DW
        seen = is_present(exists, row, column, dy, dx, height, width, PADDED)
        row_seen = is_present(row_exists, row_row, row_column, dy, dx, height, width, PADDED)
        child = children + (dy.to(tl.int64) * cs_h + dx.to(tl.int64) * cs_w + n * cs_n)
        matrix = weight + (i % groups).to(tl.int64) * ws_g
        child_bias = bias
        if bias is not None:
            child_bias = bias + tl.cast(i, tl.int64) * bs_i
        votes = votes_of_child(
            child, origin, row_origin, seen, row_seen, matrix, child_bias, first, many,
            cs_c, cs_d, ws_m, ws_d, ws_e, bs_m, inside, C, D, E, BL, BC, BM, BE, BK, PRECISION,
        )  # fmt: skip
        if query is not None:
            agreement = inner_product(asked, votes) * scale
            known = normalizer
            if normalizer is not None:
                known = tl.load(normalizer + p.to(tl.int64) * seen_children + i, mask=exists, other=0.0)
            shares = routing_weights(agreement, first, many, known, BM)
            if gate is not None:
                at = gate_origin + dy.to(tl.int64) * gs_h + dx.to(tl.int64) * gs_w + n * gs_n
                shares *= tl.load(gate + at, mask=seen, other=0.0).to(tl.float32)[:, None]
            sums += spread(shares) * votes
        elif gate is not None:
            at = gate_origin + dy.to(tl.int64) * gs_h + dx.to(tl.int64) * gs_w + n * gs_n
            sums += tl.load(gate + at, mask=seen, other=0.0).to(tl.float32)[None, None, :, None] * votes
        else:
            sums += votes
    if query is None:
        sums /= many
    if WHOLE:
        store_parents(
            sums, parents, saved_sums, norm_weight, norm_bias, offsets, mask, inside, eps, NORMALIZE, C, E, BC, BE
        )
    else:
        part = split.to(tl.int64) * count * (many * (C * E))
        tl.store(saved_sums + part + offsets, sums, mask=mask)


@kernel
def _attention_normalizer_kernel(
    children, weight, query, bias, grad, normalizer, heard,
    count, length, columns, height, width, types, groups, many, seen_children, blocks, tiles, per_split,
    cs_b, cs_h, cs_w, cs_n, cs_c, cs_d, ws_g, ws_m, ws_d, ws_e, bs_i, bs_m,
    scale,
    KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BL: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """normalizer_i = log sum_m exp(a_im), a_im = scale <Q_m, V_im>; heard_i = sum_m r_im <dS_m, V_im> with a ``grad``.

    The first of two sweeps, for parents that do not fit on chip: tiles of parents one after the other, with the running
    maximum of FlashAttention. Without a query all a are 0.
    """
    program = tl.program_id(0)
    block = program % blocks
    split = program // blocks
    p = block * BL + tl.arange(0, BL)
    exists = p < count
    sample, row, column = position_origin(p, count, length, columns, SH, SW, PH, PW)
    origin = sample.to(tl.int64) * cs_b + row.to(tl.int64) * cs_h + column.to(tl.int64) * cs_w
    row_p = block * BL + tl.arange(0, BL * BC) // BC
    row_exists = row_p < count
    row_sample, row_row, row_column = position_origin(row_p, count, length, columns, SH, SW, PH, PW)
    row_origin = row_sample.to(tl.int64) * cs_b + row_row.to(tl.int64) * cs_h + row_column.to(tl.int64) * cs_w
    start = split * per_split
    for i in range(start, tl.minimum(start + per_split, seen_children)):
        slot = i // types
        n = (i - slot * types).to(tl.int64)
        dy = slot // KW * DH
        dx = slot % KW * DW
        seen = is_present(exists, row, column, dy, dx, height, width, PADDED)
        row_seen = is_present(row_exists, row_row, row_column, dy, dx, height, width, PADDED)
        child = children + (dy.to(tl.int64) * cs_h + dx.to(tl.int64) * cs_w + n * cs_n)
        matrix = weight + (i % groups).to(tl.int64) * ws_g
        child_bias = bias
        if bias is not None:
            child_bias = bias + tl.cast(i, tl.int64) * bs_i
        top = tl.full([BL], float("-inf"), tl.float32)
        total = tl.zeros([BL], tl.float32)
        gain = tl.zeros([BL], tl.float32)
        for tile in range(tiles):
            first = tile * BM
            inside = tile_mask(first, many, C, E, BC, BM, BE)
            offsets = tile_offsets(p, first, many, C, E, BC, BM, BE)
            mask = inside & exists[None, None, :, None]
            votes = votes_of_child(
                child, origin, row_origin, seen, row_seen, matrix, child_bias, first, many,
                cs_c, cs_d, ws_m, ws_d, ws_e, bs_m, inside, C, D, E, BL, BC, BM, BE, BK, PRECISION,
            )  # fmt: skip
            agreement = tl.zeros([BL, BM], tl.float32)
            if query is not None:
                asked = tl.load(query + offsets, mask=mask, other=0.0).to(tl.float32)
                agreement = inner_product(asked, votes) * scale
            agreement = tl.where((first + tl.arange(0, BM) < many)[None, :], agreement, float("-inf"))
            higher = tl.maximum(top, tl.max(agreement, axis=1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)  # a tile of -inf alone must not make NaN
            fade = tl.exp(top - shift)
            shares = tl.exp(agreement - shift[:, None])
            total = total * fade + tl.sum(shares, axis=1)
            if heard is not None:
                slope = tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32)
                gain = gain * fade + tl.sum(shares * inner_product(slope, votes), axis=1)
            top = higher
        at = p.to(tl.int64) * seen_children + i
        tl.store(normalizer + at, top + tl.log(total), mask=exists)
        if heard is not None:
            tl.store(heard + at, gain / total, mask=exists)


@kernel
def _attention_finish_kernel(
    partial, parents, saved_sums, norm_weight, norm_bias, poses, splits, eps,
    C: tl.constexpr, E: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """S = sum of the parts of S over ranges of children, in their order, and parents = LayerNorm(S).

    ``partial`` is ``[splits, poses, C, E]``; a program finishes ``BL`` poses, whichever positions and parents they are.
    """
    p = tl.program_id(0) * BL + tl.arange(0, BL)
    exists = p < poses
    inside = tile_mask(0, 1, C, E, BC, 1, BE)
    offsets = tile_offsets(p, 0, 1, C, E, BC, 1, BE)
    mask = inside & exists[None, None, :, None]
    sums = tl.zeros([BC, BE, BL, 1], tl.float32)
    step = poses.to(tl.int64) * (C * E)
    for split in range(splits):
        sums += tl.load(partial + split * step + offsets, mask=mask, other=0.0)
    store_parents(
        sums, parents, saved_sums, norm_weight, norm_bias, offsets, mask, inside, eps, NORMALIZE, C, E, BC, BE
    )
