"""The backward skeleton that every pass runs in: from the gradients of its results to those of children and parents.

Votes are made again, and with them everything else. To the functions of :mod:`.forward` a pass adds

``HOLD_GIVEN(given, places)``
    The tiles of the given gradients, and of what else only backward wants.
``GAIN(tensors, given, held, votes, i, ...)``
    t_im, the gradient of a child's weight: of the share that a parent has of it, gate and all.
``DIFFERENTIATE(tensors, own, given, held, votes, clean, gates, opened, known, known_heard, i, ...)``
    dV_im as a tile, da_im (the logits' gradient), a gate's gradient, and two more for each parent and child (betas).
``START_GRADIENTS``, ``GATHER``, ``LEAVE``
    The parents' own gradients: a tuple of tiles, what one child adds, and where they are stored.

The rest is common: ``dP_i = sum_m dV_im W_gm^T``, ``dW_gm = sum P_i^T dV_im``, ``dbias = sum dV``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import (
    is_present,
    kernel,
    load_matrices,
    load_poses,
    place_of_child,
    tile_mask,
    tile_places,
    votes_of_child,
    windows,
)


@triton.jit
def add_pose_gradient(
    dvotes, matrix, dchild, cell, row_cell, seen, row_seen, first, many, ws_m, ws_d, ws_e,
    C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BL: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """dP_i += dV_im W_gm^T, ``[BL * BC, BM * BE]`` by ``[BM * BE, D]``; stored where no other program adds to it."""
    if matrix is None:
        c = tl.arange(0, BC)[:, None, None]
        e = tl.arange(0, BE)[None, :, None]
        at = dchild + cell[None, None, :] * (C * D) + c * D + e
        mask = seen[None, None, :] & (c < C) & (e < E)
        found = tl.sum(dvotes, axis=3)
        if DIRECT:
            tl.store(at, found, mask=mask)
        else:
            tl.atomic_add(at, found, mask=mask, sem="relaxed")
    elif BK > 0:
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
                tl.atomic_add(at, found, mask=mask, sem="relaxed")
    else:
        m = first + tl.arange(0, BM)[None, None, None, :]
        e = tl.arange(0, BE)[None, :, None, None]
        rows = matrix + m.to(tl.int64) * ws_m + e * tl.cast(ws_e, tl.int64)
        rows_in = (m < many) & (e < E)
        c = tl.arange(0, BC)[:, None]
        at = dchild + cell[None, :] * (C * D) + c * D
        mask = seen[None, :] & (c < C)
        for d in range(D):
            row = tl.load(rows + d * tl.cast(ws_d, tl.int64), mask=rows_in, other=0.0).to(tl.float32)
            found = tl.sum(tl.sum(dvotes * row, axis=1), axis=2)
            if DIRECT:
                tl.store(at + d, found, mask=mask)
            else:
                tl.atomic_add(at + d, found, mask=mask, sem="relaxed")


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
        poses = child + origin[None, None, :, None] + c * tl.cast(cs_c, tl.int64)
        poses_in = seen[None, None, :, None] & (c < C)
        m = first + tl.arange(0, BM)[None, :]
        e = tl.arange(0, BE)[:, None]
        at = dmatrix + m.to(tl.int64) * (D * E) + e
        mask = (m < many) & (e < E)
        for d in range(D):
            pose = tl.load(poses + d * tl.cast(cs_d, tl.int64), mask=poses_in, other=0.0).to(tl.float32)
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


@triton.jit
def add_beta_gradients(used, ignored, dbetas, step, first, many, BM: tl.constexpr):
    """dbeta_use_im += sum over positions of ``used``, dbeta_ignore_im likewise ``step`` numbers on, atomically."""
    m = first + tl.arange(0, BM)
    tl.atomic_add(dbetas + m, tl.sum(used, axis=0), mask=m < many, sem="relaxed")
    tl.atomic_add(dbetas + step + m, tl.sum(ignored, axis=0), mask=m < many, sem="relaxed")


@kernel
def _backward_kernel(
    children, weight, bias, gate, normalizer, heard, tensors, given, dchildren, dweight, dbias, dgate, dbetas, results,
    count, length, columns, height, width, types, groups, many, seen_children,
    blocks, tiles, first_tile, first_child, last_child, per_split,
    cs_b, cs_h, cs_w, cs_n, cs_c, cs_d, ws_g, ws_m, ws_d, ws_e, bs_i, bs_m, gs_b, gs_h, gs_w, gs_n, ds_i,
    scale,
    KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BL: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, DIRECT: tl.constexpr, ORDERED: tl.constexpr, EACH_TILE: tl.constexpr,
    SILENT: tl.constexpr, MODE: tl.constexpr, PASS: tl.constexpr,
    HOLD: tl.constexpr, HOLD_GIVEN: tl.constexpr, DIFFERENTIATE: tl.constexpr, START_GRADIENTS: tl.constexpr,
    GATHER: tl.constexpr, LEAVE: tl.constexpr,
):  # fmt: skip
    """Walk a range of children of ``BL`` positions with ``BM`` parents, as forward, and make every gradient.

    Those of the parents gather on chip, a part for each range of children; the rest is added to float32 memory
    atomically. ``DIRECT``: nobody else adds to these dP, which are stored at once. ``ORDERED``: the caller sees to it
    that no two programs of one launch add to the same dP, dg or parents' gradients (children of one place in the
    window, one tile of parents), so that the order is that of the launches, and that dW, dbias and dbetas are made
    elsewhere. ``EACH_TILE``: every tile of parents has its own part in a gate's gradient, or else the first one adds
    all of it.
    """
    program = tl.program_id(0)
    block = program % blocks
    tile = first_tile + (program // blocks) % tiles
    split = program // blocks // tiles
    first = tile * BM
    p = block.to(tl.int64) * BL + tl.arange(0, BL)
    exists, sample, row, column, origin = windows(p, count, length, columns, cs_b, cs_h, cs_w, SH, SW, PH, PW)
    gate_origin = sample.to(tl.int64) * gs_b + row.to(tl.int64) * gs_h + column.to(tl.int64) * gs_w
    cells = ((sample.to(tl.int64) * height + row) * width + column) * types
    row_p = block.to(tl.int64) * BL + tl.arange(0, BL * BC) // BC
    row_exists, row_sample, row_row, row_column, row_origin = windows(
        row_p, count, length, columns, cs_b, cs_h, cs_w, SH, SW, PH, PW
    )
    row_cells = ((row_sample.to(tl.int64) * height + row_row) * width + row_column) * types
    inside = tile_mask(first, many, C, E, BC, BM, BE)
    places = tile_places(p, exists, first, many, C, E, BC, BM, BE)
    held = HOLD_GIVEN(given, places)
    own = HOLD(tensors, places, MODE)
    sums = START_GRADIENTS(results, BL, BC, BM, BE)
    start = first_child + split * per_split
    for i in range(start, tl.minimum(start + per_split, last_child)):
        dy, dx, n = place_of_child(i, types, KW, DH, DW)
        seen = is_present(exists, row, column, dy, dx, height, width, PADDED)
        row_seen = is_present(row_exists, row_row, row_column, dy, dx, height, width, PADDED)
        child = children + (dy.to(tl.int64) * cs_h + dx.to(tl.int64) * cs_w + n * cs_n)
        cell = (dy * width + dx).to(tl.int64) * types + n
        group = (i % groups).to(tl.int64)
        matrix = weight
        if weight is not None:
            matrix = weight + group * ws_g
        child_bias = bias
        if bias is not None:
            child_bias = bias + tl.cast(i, tl.int64) * bs_i
        gates = gate
        opened = seen
        row_opened = row_seen
        if gate is not None:
            at = dy.to(tl.int64) * gs_h + dx.to(tl.int64) * gs_w + n * gs_n
            gates = tl.load(gate + (gate_origin + at), mask=seen, other=0.0).to(tl.float32)
            if SILENT:
                opened = seen & (gates != 0.0)
                if dweight is not None:
                    row_gate = row_sample.to(tl.int64) * gs_b + row_row.to(tl.int64) * gs_h + at
                    row_gate += row_column.to(tl.int64) * gs_w
                    row_opened = row_seen & (tl.load(gate + row_gate, mask=row_seen, other=0.0) != 0.0)
        looked = opened
        if dgate is not None:
            looked = seen  # a closed gate gets a gradient, from the votes that it hides
        votes = votes_of_child(
            child, origin, row_origin, looked, row_seen, matrix, child_bias, first, many,
            cs_c, cs_d, ws_m, ws_d, ws_e, bs_m, inside, C, D, E, BL, BC, BM, BE, BK, PRECISION,
        )  # fmt: skip
        clean = votes
        if SILENT and dgate is not None:
            clean = tl.where(opened[None, None, :, None], votes, 0.0)
        known = normalizer
        known_heard = heard
        if normalizer is not None:
            known = tl.load(normalizer + p.to(tl.int64) * seen_children + i, mask=exists, other=0.0)
            known_heard = tl.load(heard + p.to(tl.int64) * seen_children + i, mask=exists, other=0.0)
        valid = inside & opened[None, None, :, None]
        dvotes, dlogits, gate_gain, used, ignored = DIFFERENTIATE(
            tensors, own, given, held, votes, clean, gates, opened, known, known_heard, i, first, many, scale, valid,
            MODE, BL, BM,
        )  # fmt: skip
        sums = GATHER(sums, tensors, own, results, clean, dlogits, scale, MODE)
        if dgate is not None:
            if EACH_TILE or tile == 0:
                tl.atomic_add(dgate + cells + cell, gate_gain, mask=seen, sem="relaxed")
        if dchildren is not None:
            add_pose_gradient(
                dvotes, matrix, dchildren, cells + cell, row_cells + cell, seen, row_seen, first, many,
                ws_m, ws_d, ws_e, C, D, E, BL, BC, BM, BE, BK, PRECISION, DIRECT,
            )  # fmt: skip
        if dweight is not None:
            dmatrix = dweight + group * (many.to(tl.int64) * (D * E))
            add_matrix_gradient(
                dvotes, child, origin, row_origin, opened, row_opened, dmatrix, first, many, cs_c, cs_d,
                C, D, E, BL, BC, BM, BE, BK, PRECISION,
            )  # fmt: skip
        if dbias is not None:
            add_bias_gradient(dvotes, dbias + tl.cast(i, tl.int64) * ds_i, first, many, C, E, BC, BM, BE)
        if dbetas is not None:
            step = seen_children.to(tl.int64) * many
            add_beta_gradients(used, ignored, dbetas + tl.cast(i, tl.int64) * many, step, first, many, BM)
    LEAVE(sums, tensors, results, places, split, tl.cast(count, tl.int64) * many, C * E, ORDERED)
