"""Backward kernels of the attention pass: LayerNorm's gradients, everything by recomputation, and dW in a fixed order.

With ``h_im = <dS_m, V_im>`` and ``hbar_i = sum_m r_im h_im``: ``da_im = g_i r_im (h_im - hbar_i)``,
``dV_im = g_i r_im dS_m + scale da_im Q_m``, ``dQ_m = scale sum_i da_im V_im``, ``dg_i = hbar_i``,
``dP_i = sum_m dV_im W_gm^T``, ``dW_gm = sum P_i^T dV_im``, ``dbias = sum dV``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_forward import standardise
from .attention_tiles import (
    inner_product,
    is_present,
    kernel,
    load_matrices,
    load_poses,
    position_origin,
    routing_weights,
    spread,
    tile_mask,
    tile_offsets,
    votes_of_child,
)


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
        p = block * BL + tl.arange(0, BL)
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


@triton.jit
def add_to(pointer, values, mask, ORDERED: tl.constexpr):
    """Add to memory: atomically, or plainly where nobody else writes there during the launch."""
    if ORDERED:
        tl.store(pointer, tl.load(pointer, mask=mask, other=0.0) + values, mask=mask)
    else:
        tl.atomic_add(pointer, values, mask=mask, sem="relaxed")


@triton.jit
def vote_gradient(
    votes, asked, slope, heard, normalizer, gates, scale, first, many, valid, BL: tl.constexpr, BM: tl.constexpr
):
    """Return dV_im as a tile (zero outside ``valid``), da_im ``[BL, BM]`` and hbar_i ``[BL]`` of one child.

    ``heard`` is hbar_i where the tile does not hold all parents, else None; without a query ``asked`` is None.
    """
    real = (first + tl.arange(0, BM) < many)[None, :]
    gain = inner_product(slope, votes)
    if asked is not None:
        shares = routing_weights(inner_product(asked, votes) * scale, first, many, normalizer, BM)
    else:
        shares = tl.where(real, tl.full([BL, BM], 1.0, tl.float32) / many, 0.0)
    if heard is None:
        mean_gain = tl.sum(shares * gain, axis=1)
    else:
        mean_gain = heard
    gated = shares
    if gates is not None:
        gated = shares * gates[:, None]
    result = spread(gated) * slope
    grad_agreement = gated * (gain - mean_gain[:, None])
    if asked is not None:
        result += spread(grad_agreement * scale) * asked
    return tl.where(valid, result, 0.0), grad_agreement, mean_gain


@triton.jit
def add_pose_gradient(
    dvotes, matrix, dchild, cell, row_cell, seen, row_seen, first, many, ws_m, ws_d, ws_e,
    C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BL: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, DIRECT: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """dP_i += dV_im W_gm^T, ``[BL * BC, BM * BE]`` by ``[BM * BE, D]``; stored where no other program adds to it."""
    if BK > 0:
        c = tl.arange(0, BL * BC) % BC
        flat = tl.reshape(tl.permute(dvotes, (2, 0, 3, 1)), [BL * BC, BM * BE])
        for k in range(0, D, BK):
            matrices = load_matrices(matrix, first, many, k, ws_m, ws_d, ws_e, D, E, BM, BE, BK).to(tl.float32)
            found = tl.dot(flat, tl.trans(matrices), input_precision=PRECISION)
            d = k + tl.arange(0, BK)
            at = dchild + (row_cell * (C * D) + c * D)[:, None] + d[None, :]
            mask = (row_seen & (c < C))[:, None] & (d < D)[None, :]
            if DIRECT:
                tl.store(at, found, mask=mask)
            else:
                add_to(at, found, mask, ORDERED)
    else:
        m = first + tl.arange(0, BM)[None, None, None, :]
        e = tl.arange(0, BE)[None, :, None, None]
        rows = matrix + m.to(tl.int64) * ws_m + e * ws_e
        rows_in = (m < many) & (e < E)
        c = tl.arange(0, BC)[:, None]
        at = dchild + cell[None, :] * (C * D) + c * D
        mask = seen[None, :] & (c < C)
        for d in range(D):
            row = tl.load(rows + d * ws_d, mask=rows_in, other=0.0).to(tl.float32)
            found = tl.sum(tl.sum(dvotes * row, axis=1), axis=2)
            if DIRECT:
                tl.store(at + d, found, mask=mask)
            else:
                add_to(at + d, found, mask, ORDERED)


@triton.jit
def add_matrix_gradient(
    dvotes, child, origin, row_origin, seen, row_seen, dmatrix, first, many, cs_c, cs_d,
    C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BL: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dW_gm += P_i^T dV_im, ``[D, BL * BC]`` by ``[BL * BC, BM * BE]``, atomically, for what this program sees."""
    if BK > 0:
        column = tl.arange(0, BM * BE)
        m, e = first + column // BE, column % BE
        flat = tl.reshape(tl.permute(dvotes, (2, 0, 3, 1)), [BL * BC, BM * BE])
        for k in range(0, D, BK):
            poses = load_poses(child, row_origin, row_seen, k, cs_c, cs_d, C, D, BL, BC, BK).to(tl.float32)
            found = tl.dot(tl.trans(poses), flat, input_precision=PRECISION)
            d = k + tl.arange(0, BK)
            at = dmatrix + (d * E)[:, None] + (m.to(tl.int64) * (D * E) + e)[None, :]
            mask = (d < D)[:, None] & ((m < many) & (e < E))[None, :]
            tl.atomic_add(at, found, mask=mask, sem="relaxed")
    else:
        c = tl.arange(0, BC)[:, None, None, None]
        poses = child + origin[None, None, :, None] + c * cs_c
        poses_in = seen[None, None, :, None] & (c < C)
        m = first + tl.arange(0, BM)[None, :]
        e = tl.arange(0, BE)[:, None]
        at = dmatrix + m.to(tl.int64) * (D * E) + e
        mask = (m < many) & (e < E)
        for d in range(D):
            pose = tl.load(poses + d * cs_d, mask=poses_in, other=0.0).to(tl.float32)
            found = tl.sum(tl.sum(dvotes * pose, axis=2), axis=0)
            tl.atomic_add(at + d * E, found, mask=mask, sem="relaxed")


@triton.jit
def add_bias_gradient(
    dvotes, dbias, first, many, C: tl.constexpr, E: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr
):
    """dbias_im += sum over positions of dV_im, atomically; ``dbias`` holds every parent, ``[M, C, E]``."""
    c = tl.arange(0, BC)[:, None, None]
    e = tl.arange(0, BE)[None, :, None]
    m = first + tl.arange(0, BM)[None, None, :]
    mask = (c < C) & (m < many) & (e < E)
    tl.atomic_add(dbias + (m * C + c) * E + e, tl.sum(dvotes, axis=2), mask=mask, sem="relaxed")


@kernel
def _attention_backward_kernel(
    children, weight, query, bias, gate, slope, normalizer, heard, dchildren, dweight, dquery, dbias, dgate,
    count, length, columns, height, width, types, groups, many, seen_children,
    blocks, tiles, first_tile, first_child, last_child, per_split,
    cs_b, cs_h, cs_w, cs_n, cs_c, cs_d, ws_g, ws_m, ws_d, ws_e, bs_i, bs_m, gs_b, gs_h, gs_w, gs_n, ds_i,
    scale,
    KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BL: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, DIRECT: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """dP_i = sum_m dV_im W_gm^T, dW_gm = sum P_i^T dV_im, dQ_m = scale sum_i da_im V_im, dg_i = hbar_i, dbias = sum dV.

    Votes, agreements and weights are made again. A program walks a range of children of ``BL`` positions with ``BM``
    parents, as forward; dQ gathers on chip, a part for each range of children, and the rest is added to float32 memory
    atomically. ``DIRECT``: nobody else adds to these dP, which are stored at once. ``ORDERED``: the caller sees to it
    that no two programs of one launch add to the same dP, dg or dQ (children of one place in the window, one tile of
    parents), and that dW and dbias are made elsewhere.
    """
    program = tl.program_id(0)
    block = program % blocks
    tile = first_tile + (program // blocks) % tiles
    split = program // blocks // tiles
    first = tile * BM
    p = block * BL + tl.arange(0, BL)
    exists = p < count
    sample, row, column = position_origin(p, count, length, columns, SH, SW, PH, PW)
    origin = sample.to(tl.int64) * cs_b + row.to(tl.int64) * cs_h + column.to(tl.int64) * cs_w
    gate_origin = sample.to(tl.int64) * gs_b + row.to(tl.int64) * gs_h + column.to(tl.int64) * gs_w
    cells = ((sample.to(tl.int64) * height + row) * width + column) * types
    row_p = block * BL + tl.arange(0, BL * BC) // BC
    row_exists = row_p < count
    row_sample, row_row, row_column = position_origin(row_p, count, length, columns, SH, SW, PH, PW)
    row_origin = row_sample.to(tl.int64) * cs_b + row_row.to(tl.int64) * cs_h + row_column.to(tl.int64) * cs_w
    row_cells = ((row_sample.to(tl.int64) * height + row_row) * width + row_column) * types
    inside = tile_mask(first, many, C, E, BC, BM, BE)
    offsets = tile_offsets(p, first, many, C, E, BC, BM, BE)
    mask = inside & exists[None, None, :, None]
    gradient = tl.load(slope + offsets, mask=mask, other=0.0)
    asked = query
    if query is not None:
        asked = tl.load(query + offsets, mask=mask, other=0.0).to(tl.float32)
    if dquery is not None:
        query_sum = tl.zeros([BC, BE, BL, BM], tl.float32)
    start = first_child + split * per_split
    for i in range(start, tl.minimum(start + per_split, last_child)):
        slot = i // types
        n = (i - slot * types).to(tl.int64)
        dy = slot // KW * DH
        dx = slot % KW * DW
        seen = is_present(exists, row, column, dy, dx, height, width, PADDED)
        row_seen = is_present(row_exists, row_row, row_column, dy, dx, height, width, PADDED)
        child = children + (dy.to(tl.int64) * cs_h + dx.to(tl.int64) * cs_w + n * cs_n)
        cell = (dy * width + dx).to(tl.int64) * types + n
        group = (i % groups).to(tl.int64)
        matrix = weight + group * ws_g
        child_bias = bias
        if bias is not None:
            child_bias = bias + tl.cast(i, tl.int64) * bs_i
        votes = votes_of_child(
            child, origin, row_origin, seen, row_seen, matrix, child_bias, first, many,
            cs_c, cs_d, ws_m, ws_d, ws_e, bs_m, inside, C, D, E, BL, BC, BM, BE, BK, PRECISION,
        )  # fmt: skip
        gates = gate
        if gate is not None:
            at = gate_origin + dy.to(tl.int64) * gs_h + dx.to(tl.int64) * gs_w + n * gs_n
            gates = tl.load(gate + at, mask=seen, other=0.0).to(tl.float32)
        known = normalizer
        known_heard = heard
        if normalizer is not None:
            known = tl.load(normalizer + p.to(tl.int64) * seen_children + i, mask=exists, other=0.0)
            known_heard = tl.load(heard + p.to(tl.int64) * seen_children + i, mask=exists, other=0.0)
        valid = inside & seen[None, None, :, None]
        dvotes, dagreement, mean_gain = vote_gradient(
            votes, asked, gradient, known_heard, known, gates, scale, first, many, valid, BL, BM
        )
        if dquery is not None:
            query_sum += spread(dagreement * scale) * votes
        if dgate is not None:
            if tile == 0:
                add_to(dgate + cells + cell, mean_gain, seen, ORDERED)
        if dchildren is not None:
            add_pose_gradient(
                dvotes, matrix, dchildren, cells + cell, row_cells + cell, seen, row_seen, first, many,
                ws_m, ws_d, ws_e, C, D, E, BL, BC, BM, BE, BK, PRECISION, DIRECT, ORDERED,
            )  # fmt: skip
        if dweight is not None:
            dmatrix = dweight + group * (many.to(tl.int64) * (D * E))
            add_matrix_gradient(
                dvotes, child, origin, row_origin, seen, row_seen, dmatrix, first, many, cs_c, cs_d,
                C, D, E, BL, BC, BM, BE, BK, PRECISION,
            )  # fmt: skip
        if dbias is not None:
            add_bias_gradient(dvotes, dbias + tl.cast(i, tl.int64) * ds_i, first, many, C, E, BC, BM, BE)
    if dquery is not None:
        part = dquery + split.to(tl.int64) * count * (many * (C * E)) + offsets
        if ORDERED:
            query_sum += tl.load(part, mask=mask, other=0.0)
        tl.store(part, query_sum, mask=mask)
