"""The gradients of matrices and biases in a fixed order, for the deterministic mode."""

from __future__ import annotations

import triton.language as tl

from .attention_backward import vote_gradient
from .attention_tiles import (
    is_present,
    kernel,
    load_poses,
    position_origin,
    tile_mask,
    tile_offsets,
    votes_of_child,
)


@kernel
def _attention_matrix_backward_kernel(
    children, weight, query, bias, gate, slope, normalizer, heard, dweight, dbias,
    count, length, columns, height, width, types, groups, many, seen_children,
    blocks, tiles, splits, per_split, group_children, position_splits,
    cs_b, cs_h, cs_w, cs_n, cs_c, cs_d, ws_g, ws_m, ws_d, ws_e, bs_i, bs_m, gs_b, gs_h, gs_w, gs_n,
    scale,
    KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BL: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
    VOTES_BK: tl.constexpr, PRECISION: tl.constexpr, OWN_BIAS: tl.constexpr,
):  # fmt: skip
    """dW_gm = sum over (b, l, i of group g) of P_i^T dV_im and dbias = sum dV, each sum in one order.

    A program has one group, one tile of parents, rows d to d + ``BK`` of the matrices, a range of the group's children
    and a range of positions. It leaves its part of dW in ``dweight[position range, child range, G, M, D, E]``, and of
    dbias in ``dbias[position range, I, M, C, E]`` (``OWN_BIAS``: every child has its own) or
    ``dbias[position range, child range, G, M, C, E]``; the parts are added up in order.
    """
    program = tl.program_id(0)
    group = program % groups
    tile = (program // groups) % tiles
    first = tile * BM
    rest = program // groups // tiles
    slices = tl.cdiv(D, BK)
    depth = rest % slices * BK
    split = rest // slices % splits
    chunk = rest // slices // splits
    inside = tile_mask(first, many, C, E, BC, BM, BE)
    c3 = tl.arange(0, BC)[:, None, None]
    e3 = tl.arange(0, BE)[None, :, None]
    m3 = first + tl.arange(0, BM)[None, None, :]
    bias_offsets = (m3 * C + c3) * E + e3
    bias_mask = (c3 < C) & (m3 < many) & (e3 < E)
    matrix = weight + group.to(tl.int64) * ws_g
    matrix_sum = tl.zeros([BK, BM * BE], tl.float32)
    bias_sum = tl.zeros([BC, BE, BM], tl.float32)
    for j in range(split * group_children, tl.minimum((split + 1) * group_children, seen_children // groups)):
        i = group + j * groups
        slot = i // types
        n = (i - slot * types).to(tl.int64)
        dy = slot // KW * DH
        dx = slot % KW * DW
        child = children + (dy.to(tl.int64) * cs_h + dx.to(tl.int64) * cs_w + n * cs_n)
        child_bias = bias
        if bias is not None:
            child_bias = bias + tl.cast(i, tl.int64) * bs_i
        for block in range(chunk * per_split, tl.minimum((chunk + 1) * per_split, blocks)):
            p = block * BL + tl.arange(0, BL)
            exists = p < count
            sample, row, column = position_origin(p, count, length, columns, SH, SW, PH, PW)
            origin = sample.to(tl.int64) * cs_b + row.to(tl.int64) * cs_h + column.to(tl.int64) * cs_w
            row_p = block * BL + tl.arange(0, BL * BC) // BC
            row_sample, row_row, row_column = position_origin(row_p, count, length, columns, SH, SW, PH, PW)
            row_origin = row_sample.to(tl.int64) * cs_b + row_row.to(tl.int64) * cs_h + row_column.to(tl.int64) * cs_w
            seen = is_present(exists, row, column, dy, dx, height, width, PADDED)
            row_seen = is_present(row_p < count, row_row, row_column, dy, dx, height, width, PADDED)
            offsets = tile_offsets(p, first, many, C, E, BC, BM, BE)
            mask = inside & exists[None, None, :, None]
            votes = votes_of_child(
                child, origin, row_origin, seen, row_seen, matrix, child_bias, first, many,
                cs_c, cs_d, ws_m, ws_d, ws_e, bs_m, inside, C, D, E, BL, BC, BM, BE, VOTES_BK, PRECISION,
            )  # fmt: skip
            gradient = tl.load(slope + offsets, mask=mask, other=0.0)
            asked = query
            if query is not None:
                asked = tl.load(query + offsets, mask=mask, other=0.0).to(tl.float32)
            gates = gate
            if gate is not None:
                at = sample.to(tl.int64) * gs_b + (row + dy).to(tl.int64) * gs_h + (column + dx).to(tl.int64) * gs_w
                gates = tl.load(gate + at + n * gs_n, mask=seen, other=0.0).to(tl.float32)
            known = normalizer
            known_heard = heard
            if normalizer is not None:
                known = tl.load(normalizer + p.to(tl.int64) * seen_children + i, mask=exists, other=0.0)
                known_heard = tl.load(heard + p.to(tl.int64) * seen_children + i, mask=exists, other=0.0)
            valid = inside & seen[None, None, :, None]
            dvotes, _, _ = vote_gradient(
                votes, asked, gradient, known_heard, known, gates, scale, first, many, valid, BL, BM
            )
            if dweight is not None:
                flat = tl.reshape(tl.permute(dvotes, (2, 0, 3, 1)), [BL * BC, BM * BE])
                poses = load_poses(child, row_origin, row_seen, depth, cs_c, cs_d, C, D, BL, BC, BK).to(tl.float32)
                matrix_sum = tl.dot(tl.trans(poses), flat, matrix_sum, input_precision=PRECISION)
            if dbias is not None:
                bias_sum += tl.sum(dvotes, axis=2)
        if dbias is not None and OWN_BIAS:
            if depth == 0:
                at = (chunk.to(tl.int64) * seen_children + i) * (many * (C * E))
                tl.store(dbias + at + bias_offsets, bias_sum, mask=bias_mask)
            bias_sum = tl.zeros([BC, BE, BM], tl.float32)
    part = (chunk.to(tl.int64) * splits + split) * groups + group
    if dbias is not None and not OWN_BIAS:
        if depth == 0:
            tl.store(dbias + part * (many * (C * E)) + bias_offsets, bias_sum, mask=bias_mask)
    if dweight is not None:
        cell = tl.arange(0, BM * BE)
        m, e = first + cell // BE, cell % BE
        d = depth + tl.arange(0, BK)
        at = dweight + part * (many.to(tl.int64) * (D * E)) + (d * E)[:, None]
        at += (m.to(tl.int64) * (D * E) + e)[None, :]
        tl.store(at, matrix_sum, mask=(d < D)[:, None] & ((m < many) & (e < E))[None, :])
