"""The gradients of matrices, biases and betas in a fixed order, for the deterministic mode of every pass."""

from __future__ import annotations

import triton.language as tl

from .tiles import (
    is_present,
    kernel,
    load_poses,
    place_of_child,
    tile_mask,
    tile_places,
    votes_of_child,
    windows,
)


@kernel
def _matrix_backward_kernel(
    children, weight, bias, gate, normalizer, heard, tensors, given, dweight, dbias, dbetas,
    count, length, columns, height, width, types, groups, many, seen_children,
    blocks, tiles, splits, per_split, group_children, position_splits,
    cs_b, cs_h, cs_w, cs_n, cs_c, cs_d, ws_g, ws_m, ws_d, ws_e, bs_i, bs_m, gs_b, gs_h, gs_w, gs_n,
    scale,
    KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BL: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
    VOTES_BK: tl.constexpr, PRECISION: tl.constexpr, OWN_BIAS: tl.constexpr, SILENT: tl.constexpr,
    MODE: tl.constexpr, PASS: tl.constexpr,
    HOLD: tl.constexpr, HOLD_GIVEN: tl.constexpr, DIFFERENTIATE: tl.constexpr,
):  # fmt: skip
    """dW_gm = sum over (b, l, i of group g) of P_i^T dV_im and dbias = sum dV, each sum in one order.

    A program has one group, one tile of parents, rows d to d + ``BK`` of the matrices, a range of the group's children
    and a range of positions. It leaves its part of dW in ``dweight[position range, child range, G, M, D, E]``, and of
    dbias in ``dbias[position range, I, M, C, E]`` (``OWN_BIAS``: every child has its own) or
    ``dbias[position range, child range, G, M, C, E]``, of the betas in ``dbetas[position range, 2, I, M]``; the parts
    are added up in order.
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
    c3, e3 = tl.arange(0, BC)[:, None, None], tl.arange(0, BE)[None, :, None]
    m3 = first + tl.arange(0, BM)[None, None, :]
    bias_offsets = (m3 * C + c3) * E + e3
    bias_mask = (c3 < C) & (m3 < many) & (e3 < E)
    matrix = weight
    if weight is not None:
        matrix = weight + group.to(tl.int64) * ws_g
    matrix_sum = tl.zeros([BK, BM * BE], tl.float32)
    bias_sum = tl.zeros([BC, BE, BM], tl.float32)
    for j in range(split * group_children, tl.minimum((split + 1) * group_children, seen_children // groups)):
        i = group + j * groups
        dy, dx, n = place_of_child(i, types, KW, DH, DW)
        child = children + (dy.to(tl.int64) * cs_h + dx.to(tl.int64) * cs_w + n * cs_n)
        child_bias = bias
        if bias is not None:
            child_bias = bias + tl.cast(i, tl.int64) * bs_i
        use_sum = tl.zeros([BM], tl.float32)
        ignore_sum = tl.zeros([BM], tl.float32)
        for block in range(chunk * per_split, tl.minimum((chunk + 1) * per_split, blocks)):
            p = tl.cast(block, tl.int64) * BL + tl.arange(0, BL)
            exists, sample, row, column, origin = windows(p, count, length, columns, cs_b, cs_h, cs_w, SH, SW, PH, PW)
            row_p = tl.cast(block, tl.int64) * BL + tl.arange(0, BL * BC) // BC
            row_exists, row_sample, row_row, row_column, row_origin = windows(
                row_p, count, length, columns, cs_b, cs_h, cs_w, SH, SW, PH, PW
            )
            seen = is_present(exists, row, column, dy, dx, height, width, PADDED)
            row_seen = is_present(row_exists, row_row, row_column, dy, dx, height, width, PADDED)
            places = tile_places(p, exists, first, many, C, E, BC, BM, BE)
            gates = gate
            opened, row_opened = seen, row_seen
            if gate is not None:
                at = sample.to(tl.int64) * gs_b + (row + dy).to(tl.int64) * gs_h + (column + dx).to(tl.int64) * gs_w
                gates = tl.load(gate + at + n * gs_n, mask=seen, other=0.0).to(tl.float32)
                if SILENT:
                    opened = seen & (gates != 0.0)
                    if dweight is not None:
                        at = row_sample.to(tl.int64) * gs_b + (row_row + dy).to(tl.int64) * gs_h
                        at += (row_column + dx).to(tl.int64) * gs_w + n * gs_n
                        row_opened = row_seen & (tl.load(gate + at, mask=row_seen, other=0.0) != 0.0)
            votes = votes_of_child(
                child, origin, row_origin, opened, row_seen, matrix, child_bias, first, many,
                cs_c, cs_d, ws_m, ws_d, ws_e, bs_m, inside, C, D, E, BL, BC, BM, BE, VOTES_BK, PRECISION,
            )  # fmt: skip
            held = HOLD_GIVEN(given, places)
            own = HOLD(tensors, places, MODE)
            known = normalizer
            known_heard = heard
            if normalizer is not None:
                known = tl.load(normalizer + p.to(tl.int64) * seen_children + i, mask=exists, other=0.0)
                known_heard = tl.load(heard + p.to(tl.int64) * seen_children + i, mask=exists, other=0.0)
            valid = inside & opened[None, None, :, None]
            dvotes, _, _, used, ignored = DIFFERENTIATE(
                tensors, own, given, held, votes, votes, gates, opened, known, known_heard, i, first, many, scale,
                valid, MODE, BL, BM,
            )  # fmt: skip
            if dweight is not None:
                flat = tl.reshape(tl.permute(dvotes, (2, 0, 3, 1)), [BL * BC, BM * BE])
                poses = load_poses(child, row_origin, row_opened, depth, cs_c, cs_d, C, D, BL, BC, BK).to(tl.float32)
                if BL * BC >= 16:
                    matrix_sum = tl.dot(tl.trans(poses), flat, matrix_sum, input_precision=PRECISION)
                else:
                    matrix_sum += tl.sum(poses[:, :, None] * flat[:, None, :], axis=0)
            if dbias is not None:
                bias_sum += tl.sum(dvotes, axis=2)
            if dbetas is not None:
                use_sum += tl.sum(used, axis=0)
                ignore_sum += tl.sum(ignored, axis=0)
        if dbias is not None and OWN_BIAS:
            if depth == 0:
                at = (chunk.to(tl.int64) * seen_children + i) * (many * (C * E))
                tl.store(dbias + at + bias_offsets, bias_sum, mask=bias_mask)
            bias_sum = tl.zeros([BC, BE, BM], tl.float32)
        if dbetas is not None:
            if depth == 0:
                m = first + tl.arange(0, BM)
                at = (chunk.to(tl.int64) * 2 * seen_children + i) * many + m
                tl.store(dbetas + at, use_sum, mask=m < many)
                tl.store(dbetas + at + seen_children.to(tl.int64) * many, ignore_sum, mask=m < many)
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
