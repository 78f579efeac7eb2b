"""The backward kernels of every routing: from the gradients of its results to those of children and parents.

Votes are made again, and with them everything else. To the functions of :mod:`.forward` an algebra adds

``load_grads(grads, at)``
    ``given``: the tiles of the given gradients ``grads``, and others that only backward needs.
``gain(iteration, grads, given, vote, i, at, tile)``
    t_im, the gradient of w_im: of a parent's share of a child, times the child's gate.
``dscore(iteration, parents, grads, given, vote, child, normalizer, average, at, tile)``
    The weights w_im, da_im (the scores' gradient), a gate's gradient, and those of a child's two betas for each parent;
    without betas any tile, since Triton 3.6 takes no None in a tuple that a function returns.
    ``average``: ``sum_m r_im t_im``, None if the tile has all parents.
``dvote(iteration, parents, given, vote, weights, dscores)``
    dV_im as a tile.
``dstart``, ``dadd``, ``dfinish``
    The parents' own gradients: a tuple of tiles, what one child adds, and where they are stored.

The rest is common: ``dP_i = sum_m dV_im W_gm^T``, ``dW_gm = sum P_i^T dV_im``, ``dbias = sum dV``. One kernel adds the
gradients of matrices, biases and betas atomically; another sums them in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .forward import load_of_child, range_of
from .tiles import (
    ATOMIC,
    INTERPRETED,
    STORE,
    Sizes,
    block_of,
    child_of,
    kernel,
    load_matrices,
    load_poses,
    make_vote,
    matrices_of,
    matrix_rows,
    parent_offsets,
    place,
    pose_offsets,
    pose_rows,
    put,
)


@triton.jit
def differentiate(
    votes, sizes, tile, iteration, grads, algebra, block, child, parents, given, at, normalizers, averages,
    CLOSED: tl.constexpr,
):  # fmt: skip
    """Return the votes of one child, dV_im, da_im, dg_i and the betas' gradients.

    ``CLOSED``: whether a closed gate gets a gradient, from the votes that it hides.
    """
    seen = child.opened
    if CLOSED:
        seen = child.seen
    vote = make_vote(votes, sizes, tile, block, child, at, seen)
    normalizer = None
    average = None
    if normalizers is not None:
        normalizer = load_of_child(normalizers, block, child.i, sizes.I)
        average = load_of_child(averages, block, child.i, sizes.I)
    weights, dscores, dgate, duse, dignore = algebra.dscore(
        iteration, parents, grads, given, vote, child, normalizer, average, at, tile
    )
    opened = child.opened[None, None, :, None]
    if votes.gate is not None and CLOSED:
        vote = tl.where(opened, vote, 0.0)
    dvote = tl.where(at.inside & opened, algebra.dvote(iteration, parents, given, vote, weights, dscores), 0.0)
    return vote, dvote, dscores, dgate, duse, dignore


@triton.jit
def flattened(dvote, tile):
    """Return dV as ``[BL * BC, BM * BE]``."""
    return tl.reshape(tl.permute(dvote, (2, 0, 3, 1)), [tile.BL * tile.BC, tile.BM * tile.BE])


@triton.jit
def factors(numbers, gradients):
    """Return children or matrices, and dV, in the type that they are multiplied in.

    That is bfloat16 if the first are bfloat16, since the result is rounded to it, else float32: float16 is
    too narrow for gradients.
    """
    if numbers.dtype == tl.bfloat16:
        gradients = gradients.to(tl.bfloat16)
    if INTERPRETED or numbers.dtype != tl.bfloat16:
        numbers, gradients = numbers.to(tl.float32), gradients.to(tl.float32)
    return numbers, gradients


@triton.jit
def add_pose_gradient(dvote, votes, sizes, tile, dchildren, block, child, at, HOW: tl.constexpr):
    """dP_i += dV_im W_gm^T, ``[BL * BC, BM * BE]`` by ``[BM * BE, D]``."""
    size = tile.C * tile.D
    cell = (block.windows.cell + child.cell) * size
    if votes.weight is None:  # E is D
        offsets, mask = pose_offsets(tile)
        mask = mask & child.seen[None, None, :, None]
        put(dchildren + cell[None, None, :, None] + offsets, tl.sum(dvote, axis=3, keep_dims=True), mask, HOW)
    elif tile.DEPTH > 0:
        c = tl.arange(0, tile.BL * tile.BC) % tile.BC
        offsets = (block.rows.cell + child.cell) * size + c * tile.D
        mask = child_of(votes, sizes, block.rows, child.i).seen & (c < tile.C)
        flat = flattened(dvote, tile)
        matrices = matrices_of(votes, sizes, child.i)
        for k in range(0, tile.D, tile.DEPTH):
            columns, slopes = factors(load_matrices(votes, tile, matrices, at, k, tile.DEPTH), flat)
            found = tl.dot(slopes, tl.trans(columns), input_precision=tile.PRECISION)
            d = k + tl.arange(0, tile.DEPTH)
            put(dchildren + offsets[:, None] + d[None, :], found, mask[:, None] & (d < tile.D)[None, :], HOW)
    else:
        columns, column_mask = matrix_rows(votes, tile, matrices_of(votes, sizes, child.i), at)
        c = tl.arange(0, tile.BC)[:, None]
        mask = child.seen[None, :] & (c < tile.C)
        for d in range(tile.D):
            column = tl.load(columns + tl.cast(d, tl.int64) * votes.ws_d, mask=column_mask, other=0.0).to(tl.float32)
            found = tl.sum(tl.sum(dvote * column, axis=1), axis=2)
            put(dchildren + cell[None, :] + c * tile.D + d, found, mask, HOW)


@triton.jit
def matrix_offsets(votes, tile, first, M, k):
    """Return where rows k to k + DEPTH of the matrices of the parents from ``first`` on lie in ``[M, D, E]``.

    And which of these are there: ``[DEPTH, BM * BE]``, column m * BE + e.
    """
    column = tl.arange(0, tile.BM * tile.BE)
    m, e = first + column // tile.BE, column % tile.BE
    d = k + tl.arange(0, tile.DEPTH)
    offsets = (d * tile.E)[:, None] + (m.to(votes.INDEX) * (tile.D * tile.E) + e)[None, :]
    return offsets, (d < tile.D)[:, None] & ((m < M) & (e < tile.E))[None, :]


@triton.jit
def add_matrix_gradient(dvote, votes, sizes, tile, dweight, block, child, at):
    """dW_gm += P_i^T dV_im, ``[D, BL * BC]`` by ``[BL * BC, BM * BE]``, atomically, for this program's positions."""
    dmatrices = dweight + (child.i % sizes.G).to(tl.int64) * (sizes.M.to(tl.int64) * (tile.D * tile.E))
    if tile.DEPTH > 0:
        flat = flattened(dvote, tile)
        opened = child_of(votes, sizes, block.rows, child.i).opened
        for k in range(0, tile.D, tile.DEPTH):
            poses, slopes = factors(load_poses(votes, tile, child, block.rows, opened, k, tile.DEPTH), flat)
            found = tl.dot(tl.trans(poses), slopes, input_precision=tile.PRECISION)
            offsets, mask = matrix_offsets(votes, tile, at.first, at.M, k)
            put(dmatrices + offsets, found, mask, ATOMIC)
    else:
        poses, pose_mask = pose_rows(votes, tile, child, block.windows, child.opened)
        e = tl.arange(0, tile.BE)[:, None]
        m = at.first + tl.arange(0, tile.BM)[None, :]
        for d in range(tile.D):
            pose = tl.load(poses + tl.cast(d, tl.int64) * votes.cs_d, mask=pose_mask, other=0.0).to(tl.float32)
            found = tl.sum(tl.sum(pose * dvote, axis=0), axis=1)
            places = dmatrices + (m.to(votes.INDEX) * (tile.D * tile.E) + d * tile.E + e)
            put(places, found, (m < at.M) & (e < tile.E), ATOMIC)


@triton.jit
def put_betas(dbetas, duse, dignore, i, tile, first, I, M, HOW: tl.constexpr):
    """:func:`put` the gradients of the betas of child i into ``[2, I, M]``."""
    m = first + tl.arange(0, tile.BM)
    put(dbetas + i * M + m, duse, m < M, HOW)
    put(dbetas + (i + I) * M + m, dignore, m < M, HOW)


@kernel
def _backward_kernel(
    votes, iteration, grads, normalizers, averages, dchildren, dweight, dbias, dgate, dbetas, results,
    positions, H, W, N, Ho, Wo, I, M, G,
    blocks, tiles, first_tile, first_child, last_child, per_split, ds_i, tile, algebra,
    CHILDREN: tl.constexpr, PARENTS: tl.constexpr, EACH_TILE: tl.constexpr, ROUTING: tl.constexpr,
):  # fmt: skip
    """Walk a range of children of ``BL`` positions with ``BM`` parents, as forward, and make every gradient.

    Those of the parents are summed on chip, in a part for each range of children; the others are added to float32
    memory. ``CHILDREN`` and ``PARENTS``: how their gradients are stored; atomically, unless the caller ensures that no
    two programs of one launch add to the same ones. ``EACH_TILE``: whether every tile of parents has its own part of a
    gate's gradient; else the first one adds all of it.
    """
    sizes = Sizes(positions, H, W, N, Ho, Wo, I, M, G)
    program = tl.program_id(0)
    number = first_tile + (program // blocks) % tiles
    split = program // blocks // tiles
    block = block_of(votes, sizes, tile, program % blocks)
    at = place(tile, block.positions, block.windows.exists, number * tile.BM, M)
    parents = algebra.load(iteration, at, tile)
    given = algebra.load_grads(grads, at)
    state = algebra.dstart(results, tile)
    begin, end = range_of(first_child, last_child, split, per_split)
    for i in range(begin, end):
        child = child_of(votes, sizes, block.windows, i)
        vote, dvote, dscores, dgates, duse, dignore = differentiate(
            votes, sizes, tile, iteration, grads, algebra, block, child, parents, given, at, normalizers, averages,
            dgate is not None,
        )  # fmt: skip
        state = algebra.dadd(iteration, parents, state, results, vote, dscores)
        if dgate is not None:
            if EACH_TILE or number == 0:
                put(dgate + block.windows.cell + child.cell, dgates, child.seen, ATOMIC)
        if dchildren is not None:
            add_pose_gradient(dvote, votes, sizes, tile, dchildren, block, child, at, CHILDREN)
        if dweight is not None:
            add_matrix_gradient(dvote, votes, sizes, tile, dweight, block, child, at)
        if dbias is not None:
            biases = dbias + tl.cast(i, tl.int64) * ds_i + at.pose
            put(biases, tl.sum(dvote, axis=2, keep_dims=True), at.inside, ATOMIC)
        if dbetas is not None:
            duse, dignore = tl.sum(duse, axis=0), tl.sum(dignore, axis=0)
            put_betas(dbetas, duse, dignore, tl.cast(i, tl.int64), tile, at.first, I, M, ATOMIC)
    algebra.dfinish(iteration, state, results, split, at, tl.cast(positions, tl.int64) * M, tile, PARENTS)


@kernel
def _matrix_backward_kernel(
    votes, iteration, grads, normalizers, averages, dweight, dbias, dbetas, positions, H, W, N, Ho, Wo, I, M, G,
    blocks, tiles, splits, per_split, group_children, tile, algebra,
    OWN_BIAS: tl.constexpr, ROUTING: tl.constexpr,
):  # fmt: skip
    """dW_gm = sum over (b, l, i of group g) of P_i^T dV_im and dbias = sum dV, in a fixed order.

    A program has one group, one tile of parents, rows d to d + ``tile.DEPTH`` of the matrices, a range of the group's
    children and a range of positions. It stores its part of dW in ``dweight[position range, child range, G, M, D, E]``,
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
    part = (chunk * splits + split) * G + group
    pose_size = tl.cast(M, tl.int64) * (tile.C * tile.E)
    matrix_sum = tl.zeros([tile.DEPTH, tile.BM * tile.BE], tl.float32)
    bias_sum = tl.zeros([tile.BC, tile.BE, 1, tile.BM], tl.float32)
    bias_offsets, bias_mask = parent_offsets(tile, first, M)
    for j in range(split * group_children, tl.minimum((split + 1) * group_children, I // G)):
        i = group + j * G
        use_sum = tl.zeros([tile.BM], tl.float32)
        ignore_sum = tl.zeros([tile.BM], tl.float32)
        for number in range(chunk * per_split, tl.minimum((chunk + 1) * per_split, blocks)):
            block = block_of(votes, sizes, tile, number)
            at = place(tile, block.positions, block.windows.exists, first, M)
            child = child_of(votes, sizes, block.windows, i)
            parents = algebra.load(iteration, at, tile)
            given = algebra.load_grads(grads, at)
            _, dvote, _, _, duse, dignore = differentiate(
                votes, sizes, tile, iteration, grads, algebra, block, child, parents, given, at, normalizers,
                averages, False,
            )  # fmt: skip
            if dweight is not None:
                opened = child_of(votes, sizes, block.rows, i).opened
                poses = load_poses(votes, tile, child, block.rows, opened, depth, tile.DEPTH)
                flat = flattened(dvote, tile)
                if tile.BL * tile.BC >= 16:
                    poses, flat = factors(poses, flat)
                    matrix_sum = tl.dot(tl.trans(poses), flat, matrix_sum, input_precision=tile.PRECISION)
                else:
                    matrix_sum += tl.sum(poses.to(tl.float32)[:, :, None] * flat[:, None, :], axis=0)
            if dbias is not None:
                bias_sum += tl.sum(dvote, axis=2, keep_dims=True)
            if dbetas is not None:
                use_sum += tl.sum(duse, axis=0)
                ignore_sum += tl.sum(dignore, axis=0)
        if dbias is not None and OWN_BIAS:
            if depth == 0:
                tl.store(dbias + (chunk * I + i) * pose_size + bias_offsets, bias_sum, mask=bias_mask)
            bias_sum = tl.zeros([tile.BC, tile.BE, 1, tile.BM], tl.float32)
        if dbetas is not None:
            if depth == 0:
                put_betas(dbetas, use_sum, ignore_sum, chunk * 2 * I + i, tile, first, I, M, STORE)
    if dbias is not None and not OWN_BIAS:
        if depth == 0:
            tl.store(dbias + part * pose_size + bias_offsets, bias_sum, mask=bias_mask)
    if dweight is not None:
        offsets, mask = matrix_offsets(votes, tile, first, M, depth)
        tl.store(dweight + part * (tl.cast(M, tl.int64) * (tile.D * tile.E)) + offsets, matrix_sum, mask=mask)
