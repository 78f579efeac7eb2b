"""The forward skeleton that every pass runs in: sums over children, the first of two sweeps, and the finish.

A pass is a handful of ``@triton.jit`` functions that a kernel gets as constants:

``HOLD(tensors, places, BM)``
    The parents' tiles that stay on chip; placeholders for what is absent.
``START(BC, BE, BL, BM, tensors)``, ``ADD(state, tensors, own, votes, gates, opened, known, i, ...)``
    The sums of a range of children: a tuple of tiles, and what one child's votes add to it.
``SAVE(parts, part, state, ...)``, ``LOAD(parts, part, tensors, ...)``, ``MERGE(state, other, tensors)``
    The same where ranges of children meet in memory.
``FINISH(state, tensors, results, places, ...)``
    What is stored in the end.
``LOGITS(tensors, own, votes, places, scale, ...)``
    What the softmax over parents runs over, for the sweep that gathers its normaliser. :mod:`.backward` has the rest.

``tensors``, ``results`` and ``parts`` are tuples of the pass's own pointers, None where a call does not have one.
``MODE`` is the pass's own switches, bits of a number. ``SILENT``: a child whose gate is 0 is taken for absent.
"""

from __future__ import annotations

import triton.language as tl

from .tiles import is_present, kernel, place_of_child, tile_mask, tile_places, votes_of_child, windows


@kernel
def _forward_kernel(
    children, weight, bias, gate, normalizer, tensors, results,
    count, length, columns, height, width, types, groups, many, seen_children, blocks, tiles, per_split,
    cs_b, cs_h, cs_w, cs_n, cs_c, cs_d, ws_g, ws_m, ws_d, ws_e, bs_i, bs_m, gs_b, gs_h, gs_w, gs_n,
    scale, eps,
    KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BL: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, WHOLE: tl.constexpr, SILENT: tl.constexpr, MODE: tl.constexpr, PASS: tl.constexpr,
    HOLD: tl.constexpr, START: tl.constexpr, ADD: tl.constexpr, SAVE: tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    """Walk a range of the children of ``BL`` positions with ``BM`` parents, whose sums stay on chip.

    Blocks of positions, tiles of parents and ranges of children are told apart by the program's number. Where its
    parents are not all and compete, ``normalizer`` holds the log-sum-exp over all of them. A program that is ``WHOLE``
    (walks all children) finishes; others leave their sums in ``results`` for :func:`_finish_kernel`.
    """
    program = tl.program_id(0)
    block = program % blocks
    tile = (program // blocks) % tiles
    split = program // blocks // tiles
    first = tile * BM
    p = block.to(tl.int64) * BL + tl.arange(0, BL)
    exists, sample, row, column, origin = windows(p, count, length, columns, cs_b, cs_h, cs_w, SH, SW, PH, PW)
    gate_origin = sample.to(tl.int64) * gs_b + row.to(tl.int64) * gs_h + column.to(tl.int64) * gs_w
    row_p = block.to(tl.int64) * BL + tl.arange(0, BL * BC) // BC
    row_exists, _, row_row, row_column, row_origin = windows(
        row_p, count, length, columns, cs_b, cs_h, cs_w, SH, SW, PH, PW
    )
    inside = tile_mask(first, many, C, E, BC, BM, BE)
    places = tile_places(p, exists, first, many, C, E, BC, BM, BE)
    own = HOLD(tensors, places, MODE)
    state = START(tensors, BL, BC, BM, BE)
    start = split * per_split
    for i in range(start, tl.minimum(start + per_split, seen_children)):
        dy, dx, n = place_of_child(i, types, KW, DH, DW)
        seen = is_present(exists, row, column, dy, dx, height, width, PADDED)
        row_seen = is_present(row_exists, row_row, row_column, dy, dx, height, width, PADDED)
        gates = gate
        if gate is not None:
            at = gate_origin + dy.to(tl.int64) * gs_h + dx.to(tl.int64) * gs_w + n * gs_n
            gates = tl.load(gate + at, mask=seen, other=0.0).to(tl.float32)
            if SILENT:
                seen = seen & (gates != 0.0)
        child = children + (dy.to(tl.int64) * cs_h + dx.to(tl.int64) * cs_w + n * cs_n)
        matrix = weight
        if weight is not None:
            matrix = weight + (i % groups).to(tl.int64) * ws_g
        child_bias = bias
        if bias is not None:
            child_bias = bias + tl.cast(i, tl.int64) * bs_i
        votes = votes_of_child(
            child, origin, row_origin, seen, row_seen, matrix, child_bias, first, many,
            cs_c, cs_d, ws_m, ws_d, ws_e, bs_m, inside, C, D, E, BL, BC, BM, BE, BK, PRECISION,
        )  # fmt: skip
        known = normalizer
        if normalizer is not None:
            known = tl.load(normalizer + p.to(tl.int64) * seen_children + i, mask=exists, other=0.0)
        state = ADD(state, tensors, own, votes, gates, seen, known, i, first, many, scale, MODE, BL, BM)
    if WHOLE:
        FINISH(state, tensors, results, places, inside, many, eps, MODE, C, E, BL, BC, BM, BE)
    else:
        SAVE(results, split, state, places, tl.cast(count, tl.int64) * many, C * E)


@kernel
def _normalizer_kernel(
    children, weight, bias, tensors, given, normalizer, heard,
    count, length, columns, height, width, types, groups, many, seen_children, blocks, tiles, per_split,
    cs_b, cs_h, cs_w, cs_n, cs_c, cs_d, ws_g, ws_m, ws_d, ws_e, bs_i, bs_m,
    scale,
    KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr,
    DW: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BL: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, MODE: tl.constexpr, PASS: tl.constexpr,
    HOLD: tl.constexpr, LOGITS: tl.constexpr, HOLD_GIVEN: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """normalizer_i = log sum_m exp(a_im) of the logits a; heard_i = sum_m r_im t_im with gradients ``given``.

    The first of two sweeps, for parents that compete and do not fit on chip: tiles of parents one after the other, with
    the running maximum of FlashAttention.
    """
    program = tl.program_id(0)
    block = program % blocks
    split = program // blocks
    p = block.to(tl.int64) * BL + tl.arange(0, BL)
    exists, _, row, column, origin = windows(p, count, length, columns, cs_b, cs_h, cs_w, SH, SW, PH, PW)
    row_p = block.to(tl.int64) * BL + tl.arange(0, BL * BC) // BC
    row_exists, _, row_row, row_column, row_origin = windows(
        row_p, count, length, columns, cs_b, cs_h, cs_w, SH, SW, PH, PW
    )
    start = split * per_split
    for i in range(start, tl.minimum(start + per_split, seen_children)):
        dy, dx, n = place_of_child(i, types, KW, DH, DW)
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
            places = tile_places(p, exists, first, many, C, E, BC, BM, BE)
            votes = votes_of_child(
                child, origin, row_origin, seen, row_seen, matrix, child_bias, first, many,
                cs_c, cs_d, ws_m, ws_d, ws_e, bs_m, inside, C, D, E, BL, BC, BM, BE, BK, PRECISION,
            )  # fmt: skip
            own = HOLD(tensors, places, MODE)
            logits = LOGITS(tensors, own, votes, scale, BL, BM)
            logits = tl.where((first + tl.arange(0, BM) < many)[None, :], logits, float("-inf"))
            higher = tl.maximum(top, tl.max(logits, axis=1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)  # a tile of -inf alone must not make NaN
            fade = tl.exp(top - shift)
            shares = tl.exp(logits - shift[:, None])
            total = total * fade + tl.sum(shares, axis=1)
            if heard is not None:
                held = HOLD_GIVEN(given, places)
                heard_here = GAIN(tensors, given, held, votes, i, first, many, MODE, BM)
                gain = gain * fade + tl.sum(shares * heard_here, axis=1)
            top = higher
        at = p.to(tl.int64) * seen_children + i
        tl.store(normalizer + at, top + tl.log(total), mask=exists)
        if heard is not None:
            tl.store(heard + at, gain / total, mask=exists)


@kernel
def _finish_kernel(
    parts, tensors, results, poses, splits, many, eps,
    C: tl.constexpr, E: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr, MODE: tl.constexpr,
    PASS: tl.constexpr, LOAD: tl.constexpr, MERGE: tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    """Join the sums of the ranges of children in their order, and finish.

    ``parts`` hold those of every range and pose; a program finishes ``BL`` poses, whichever positions and parents they
    are.
    """
    p = tl.program_id(0).to(tl.int64) * BL + tl.arange(0, BL)
    inside = tile_mask(0, 1, C, E, BC, 1, BE)
    places = tile_places(p, p < poses, 0, 1, C, E, BC, 1, BE)
    state = LOAD(parts, 0, tensors, places, poses, C * E)
    for split in range(1, splits):
        state = MERGE(state, LOAD(parts, split, tensors, places, poses, C * E), tensors)
    FINISH(state, tensors, results, places, inside, many, eps, MODE, C, E, BL, BC, 1, BE)
