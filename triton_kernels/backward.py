"""The backward kernels of every routing: from the gradients of its results to those of children and parents.

Votes are made again, and with them everything else. To the functions of :mod:`.forward` an algebra adds

``load_grads(grads, at)``
    The tiles of the given gradients ``grads``, and of what else only backward wants.
``dshare(routing, grads, held, votes, i, at, tile)``
    t_im, the gradient of a child's weight: of the share that a parent has of it, gate and all.
``dscore(routing, own, grads, held, votes, child, known, heard, at, tile)``
    The weights w_im, da_im (the scores' gradient), a gate's gradient, and two more for each parent and child (betas).
``dvote(routing, own, held, votes, weights, dscores)``
    dV_im as a tile.
``dstart``, ``dadd``, ``dfinish``
    The parents' own gradients: a tuple of tiles, what one child adds, and where they are stored.

The rest is common: ``dP_i = sum_m dV_im W_gm^T``, ``dW_gm = sum P_i^T dV_im``, ``dbias = sum dV``. One kernel adds the
gradients of matrices, biases and betas atomically; another makes each of those sums in one order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .forward import load_of_child, range_of
from .tiles import (
    ATOMIC,
    Sizes,
    kernel,
    load_matrices,
    load_poses,
    look,
    make_votes,
    matrices_of,
    matrix_rows,
    place,
    pose_rows,
    put,
    see_block,
)


@triton.jit
def differentiate(
    votes, sizes, tile, routing, grads, algebra, p, sight, rows, child, own, held, at, normalizer, heard,
    CLOSED: tl.constexpr,
):  # fmt: skip
    """Return the votes of one child, dV_im, da_im, dg_i and the betas' gradients.

    ``CLOSED``: a closed gate gets a gradient, from the votes that it hides.
    """
    looked = child.opened
    if CLOSED:
        looked = child.seen
    clean = make_votes(votes, sizes, tile, sight, rows, child, at, looked)
    known = load_of_child(normalizer, p, sight.exists, child.i, sizes.I)
    known_heard = load_of_child(heard, p, sight.exists, child.i, sizes.I)
    weights, dscores, dgate, used, ignored = algebra.dscore(
        routing, own, grads, held, clean, child, known, known_heard, at, tile
    )
    opened = child.opened[None, None, :, None]
    if votes.SILENT and CLOSED:
        clean = tl.where(opened, clean, 0.0)
    dvotes = tl.where(at.inside & opened, algebra.dvote(routing, own, held, clean, weights, dscores), 0.0)
    return clean, dvotes, dscores, dgate, used, ignored


@triton.jit
def flattened(dvotes, tile):
    """Return dV as ``[BL * BC, BM * BE]``."""
    return tl.reshape(tl.permute(dvotes, (2, 0, 3, 1)), [tile.BL * tile.BC, tile.BM * tile.BE])


@triton.jit
def add_pose_gradient(dvotes, votes, sizes, tile, dchildren, sight, rows, child, at, HOW: tl.constexpr):
    """dP_i += dV_im W_gm^T, ``[BL * BC, BM * BE]`` by ``[BM * BE, D]``."""
    matrices = matrices_of(votes, sizes, child.i)
    cell = (sight.cell + child.cell) * (tile.C * tile.D)
    if votes.weight is None:
        c, e = tl.arange(0, tile.BC)[:, None, None], tl.arange(0, tile.BE)[None, :, None]
        mask = child.seen[None, None, :] & (c < tile.C) & (e < tile.E)
        put(dchildren + cell[None, None, :] + c * tile.D + e, tl.sum(dvotes, axis=3), mask, HOW)
    elif tile.DEPTH > 0:
        c = tl.arange(0, tile.BL * tile.BC) % tile.BC
        row_cell = (rows.cell + child.cell) * (tile.C * tile.D) + c * tile.D
        mask = look(votes, sizes, rows, child.i).seen & (c < tile.C)
        flat = flattened(dvotes, tile)
        for k in range(0, tile.D, tile.DEPTH):
            columns = load_matrices(votes, tile, matrices, at, k, tile.DEPTH).to(tl.float32)
            found = tl.dot(flat, tl.trans(columns), input_precision=tile.PRECISION)
            d = k + tl.arange(0, tile.DEPTH)
            put(dchildren + row_cell[:, None] + d[None, :], found, mask[:, None] & (d < tile.D)[None, :], HOW)
    else:
        columns, there = matrix_rows(votes, tile, matrices, at)
        c = tl.arange(0, tile.BC)[:, None]
        mask = child.seen[None, :] & (c < tile.C)
        for d in range(tile.D):
            column = tl.load(columns + tl.cast(d, tl.int64) * votes.ws_d, mask=there, other=0.0).to(tl.float32)
            found = tl.sum(tl.sum(dvotes * column, axis=1), axis=2)
            put(dchildren + cell[None, :] + c * tile.D + d, found, mask, HOW)


@triton.jit
def add_matrix_gradient(dvotes, votes, sizes, tile, dweight, sight, rows, child, at):
    """dW_gm += P_i^T dV_im, ``[D, BL * BC]`` by ``[BL * BC, BM * BE]``, atomically, for what this program sees."""
    dmatrices = dweight + (child.i % sizes.G).to(tl.int64) * (sizes.M.to(tl.int64) * (tile.D * tile.E))
    if tile.DEPTH > 0:
        column = tl.arange(0, tile.BM * tile.BE)
        m, e = at.first + column // tile.BE, column % tile.BE
        flat = flattened(dvotes, tile)
        row_opened = look(votes, sizes, rows, child.i).opened
        for k in range(0, tile.D, tile.DEPTH):
            poses = load_poses(votes, tile, child.at, rows.child, row_opened, k, tile.DEPTH).to(tl.float32)
            found = tl.dot(tl.trans(poses), flat, input_precision=tile.PRECISION)
            d = k + tl.arange(0, tile.DEPTH)
            there = (d * tile.E)[:, None] + (m.to(tl.int64) * (tile.D * tile.E) + e)[None, :]
            mask = (d < tile.D)[:, None] & ((m < at.M) & (e < tile.E))[None, :]
            put(dmatrices + there, found, mask, ATOMIC)
    else:
        poses, there = pose_rows(votes, tile, child, sight, child.opened)
        e = tl.arange(0, tile.BE)[:, None]
        m = at.first + tl.arange(0, tile.BM)[None, :]
        for d in range(tile.D):
            pose = tl.load(poses + tl.cast(d, tl.int64) * votes.cs_d, mask=there, other=0.0).to(tl.float32)
            found = tl.sum(tl.sum(pose * dvotes, axis=0), axis=1)
            places = dmatrices + m.to(tl.int64) * (tile.D * tile.E) + d * tile.E + e
            put(places, found, (m < at.M) & (e < tile.E), ATOMIC)


@triton.jit
def bias_places(tile, first, M):
    """Return where the biases of a tile of parents lie in ``[M, C, E]``, and which of them are there."""
    c, e = tl.arange(0, tile.BC)[:, None, None], tl.arange(0, tile.BE)[None, :, None]
    m = first + tl.arange(0, tile.BM)[None, None, :]
    return (m * tile.C + c) * tile.E + e, (c < tile.C) & (m < M) & (e < tile.E)


@kernel
def _backward_kernel(
    votes, routing, grads, normalizer, heard, dchildren, dweight, dbias, dgate, dbetas, results,
    positions, H, W, N, Ho, Wo, I, M, G,
    blocks, tiles, first_tile, first_child, last_child, per_split, ds_i, tile, algebra,
    CHILDREN: tl.constexpr, PARENTS: tl.constexpr, EACH_TILE: tl.constexpr, ROUTING: tl.constexpr,
):  # fmt: skip
    """Walk a range of children of ``BL`` positions with ``BM`` parents, as forward, and make every gradient.

    Those of the parents gather on chip, a part for each range of children; the rest is added to float32 memory.
    ``CHILDREN`` and ``PARENTS`` tell how their gradients are put there: atomically, or not where the caller sees to it
    that no two programs of one launch add to the same ones. ``EACH_TILE``: every tile of parents has its own part in a
    gate's gradient, or else the first one adds all of it.
    """
    sizes = Sizes(positions, H, W, N, Ho, Wo, I, M, G)
    program = tl.program_id(0)
    number = first_tile + (program // blocks) % tiles
    split = program // blocks // tiles
    p, sight, rows = see_block(votes, sizes, tile, program % blocks)
    at = place(tile, p, sight.exists, number * tile.BM, M)
    own = algebra.load(routing, at, tile)
    held = algebra.load_grads(grads, at)
    state = algebra.dstart(results, tile)
    begin, end = range_of(first_child, last_child, split, per_split)
    for i in range(begin, end):
        child = look(votes, sizes, sight, i)
        clean, dvotes, dscores, gain, used, ignored = differentiate(
            votes, sizes, tile, routing, grads, algebra, p, sight, rows, child, own, held, at, normalizer, heard,
            dgate is not None,
        )  # fmt: skip
        state = algebra.dadd(routing, own, state, results, clean, dscores)
        if dgate is not None:
            if EACH_TILE or number == 0:
                put(dgate + sight.cell + child.cell, gain, child.seen, ATOMIC)
        if dchildren is not None:
            add_pose_gradient(dvotes, votes, sizes, tile, dchildren, sight, rows, child, at, CHILDREN)
        if dweight is not None:
            add_matrix_gradient(dvotes, votes, sizes, tile, dweight, sight, rows, child, at)
        if dbias is not None:
            there, mask = bias_places(tile, at.first, M)
            put(dbias + tl.cast(i, tl.int64) * ds_i + there, tl.sum(dvotes, axis=2), mask, ATOMIC)
        if dbetas is not None:
            m = at.first + tl.arange(0, tile.BM)
            there = dbetas + tl.cast(i, tl.int64) * M + m
            put(there, tl.sum(used, axis=0), m < M, ATOMIC)
            put(there + I.to(tl.int64) * M, tl.sum(ignored, axis=0), m < M, ATOMIC)
    algebra.dfinish(routing, state, results, split, at, tl.cast(positions, tl.int64) * M, tile, PARENTS)


@kernel
def _matrix_backward_kernel(
    votes, routing, grads, normalizer, heard, dweight, dbias, dbetas, positions, H, W, N, Ho, Wo, I, M, G,
    blocks, tiles, splits, per_split, group_children, tile, algebra,
    OWN_BIAS: tl.constexpr, ROUTING: tl.constexpr,
):  # fmt: skip
    """dW_gm = sum over (b, l, i of group g) of P_i^T dV_im and dbias = sum dV, each sum in one order.

    A program has one group, one tile of parents, rows d to d + ``tile.DEPTH`` of the matrices, a range of the group's
    children and a range of positions. It leaves its part of dW in ``dweight[position range, child range, G, M, D, E]``,
    and of dbias in ``dbias[position range, I, M, C, E]`` (``OWN_BIAS``: every child has its own) or
    ``dbias[position range, child range, G, M, C, E]``, of the betas in ``dbetas[position range, 2, I, M]``; the parts
    are added up in order.
    """
    sizes = Sizes(positions, H, W, N, Ho, Wo, I, M, G)
    program = tl.program_id(0)
    group = program % G
    first = (program // G) % tiles * tile.BM
    left = program // G // tiles
    slices = tl.cdiv(tile.D, tile.DEPTH)
    depth = left % slices * tile.DEPTH
    split = left // slices % splits
    chunk = (left // slices // splits).to(tl.int64)
    each_pose = tl.cast(M, tl.int64) * (tile.C * tile.E)
    matrix_sum = tl.zeros([tile.DEPTH, tile.BM * tile.BE], tl.float32)
    bias_sum = tl.zeros([tile.BC, tile.BE, tile.BM], tl.float32)
    for j in range(split * group_children, tl.minimum((split + 1) * group_children, I // G)):
        i = group + j * G
        use_sum = tl.zeros([tile.BM], tl.float32)
        ignore_sum = tl.zeros([tile.BM], tl.float32)
        for block in range(chunk * per_split, tl.minimum((chunk + 1) * per_split, blocks)):
            p, sight, rows = see_block(votes, sizes, tile, block)
            at = place(tile, p, sight.exists, first, M)
            child = look(votes, sizes, sight, i)
            own = algebra.load(routing, at, tile)
            held = algebra.load_grads(grads, at)
            _, dvotes, _, _, used, ignored = differentiate(
                votes, sizes, tile, routing, grads, algebra, p, sight, rows, child, own, held, at, normalizer, heard,
                False,
            )  # fmt: skip
            if dweight is not None:
                opened = look(votes, sizes, rows, i).opened
                poses = load_poses(votes, tile, child.at, rows.child, opened, depth, tile.DEPTH).to(tl.float32)
                flat = flattened(dvotes, tile)
                if tile.BL * tile.BC >= 16:
                    matrix_sum = tl.dot(tl.trans(poses), flat, matrix_sum, input_precision=tile.PRECISION)
                else:
                    matrix_sum += tl.sum(poses[:, :, None] * flat[:, None, :], axis=0)
            if dbias is not None:
                bias_sum += tl.sum(dvotes, axis=2)
            if dbetas is not None:
                use_sum += tl.sum(used, axis=0)
                ignore_sum += tl.sum(ignored, axis=0)
        if dbias is not None and OWN_BIAS:
            if depth == 0:
                there, mask = bias_places(tile, first, M)
                tl.store(dbias + (chunk * I + i) * each_pose + there, bias_sum, mask=mask)
            bias_sum = tl.zeros([tile.BC, tile.BE, tile.BM], tl.float32)
        if dbetas is not None:
            if depth == 0:
                m = first + tl.arange(0, tile.BM)
                there = dbetas + (chunk * 2 * I + i) * M + m
                tl.store(there, use_sum, mask=m < M)
                tl.store(there + I.to(tl.int64) * M, ignore_sum, mask=m < M)
    part = (chunk * splits + split) * G + group
    if dbias is not None and not OWN_BIAS:
        if depth == 0:
            there, mask = bias_places(tile, first, M)
            tl.store(dbias + part * each_pose + there, bias_sum, mask=mask)
    if dweight is not None:
        cell = tl.arange(0, tile.BM * tile.BE)
        m, e = first + cell // tile.BE, cell % tile.BE
        d = depth + tl.arange(0, tile.DEPTH)
        there = dweight + part * (tl.cast(M, tl.int64) * (tile.D * tile.E)) + (d * tile.E)[:, None]
        there += (m.to(tl.int64) * (tile.D * tile.E) + e)[None, :]
        tl.store(there, matrix_sum, mask=(d < tile.D)[:, None] & ((m < M) & (e < tile.E))[None, :])
