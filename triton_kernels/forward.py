"""The forward kernels of every routing: sums over children, the first of two sweeps, and the finish.

What differs between routings is their *algebra*: ``@triton.jit`` functions of ``iteration``, a named tuple of an
iteration's tensors and numbers, and of a tile:

``load(iteration, at, tile)``
    ``parents``: the tiles of the parents that an iteration starts from, a tuple; a number if one is absent.
``score(iteration, parents, vote, tile)``
    The logits of the softmax over parents, ``[BL, BM]``.
``start(iteration, tile)``, ``add(iteration, parents, state, vote, child, normalizer, at, tile)``,
``join(iteration, state, other)``
    The sums of no children, a tuple of tiles; the sums with one more child; the sums of two ranges of children.
``finish(iteration, state, results, at, tile)``
    Stores the results.
``idle(iteration, parents)``
    Whether a program has nothing to sum up; None if it always has something.

:mod:`.backward` describes the other functions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .tiles import (
    STORE,
    Sizes,
    block_of,
    child_of,
    kernel,
    load_each,
    load_pose,
    make_vote,
    place,
    put_each,
    put_pose,
    real_parents,
)


class Algebra(NamedTuple):
    """The functions of a routing that the kernels call."""

    load: Any
    score: Any
    start: Any
    add: Any
    join: Any
    finish: Any
    idle: Any = None
    load_grads: Any = None
    gain: Any = None
    dscore: Any = None
    dvote: Any = None
    dstart: Any = None
    dadd: Any = None
    dfinish: Any = None


@triton.jit
def range_of(first, last, split, per_split):
    """Return the children of a range: the first, and the one after the last."""
    begin = first + split * per_split
    return begin, begin + tl.minimum(per_split, last - begin)


@triton.jit
def load_of_child(pointer, block, i, children):
    """Return a value for each position of one child, from ``[positions, I]``."""
    return tl.load(pointer + block.positions * children + i, mask=block.windows.exists, other=0.0)


@triton.jit
def save(parts, part, state, at, poses, tile):
    """Store the sums of a range of children in ``parts``."""
    begin = part.to(tl.int64) * poses
    for k in tl.static_range(len(parts)):
        if len(state[k].shape) == 4:
            put_pose(parts[k] + begin * (tile.C * tile.E), state[k], at, STORE)
        else:
            put_each(parts[k] + begin, state[k], at, STORE)


@triton.jit
def restore(parts, part, like, at, poses, tile):
    """Return the sums that :func:`save` stored; ``like``: sums of the same form."""
    begin = tl.cast(part, tl.int64) * poses
    state = ()
    for k in tl.static_range(len(parts)):
        if len(like[k].shape) == 4:
            state = state + (load_pose(parts[k] + begin * (tile.C * tile.E), at),)
        else:
            state = state + (load_each(parts[k] + begin, at),)
    return state


@kernel
def _forward_kernel(
    votes, iteration, results, normalizers, positions, H, W, N, Ho, Wo, I, M, G, blocks, tiles, per_split,
    tile, algebra, WHOLE: tl.constexpr, ROUTING: tl.constexpr,
):  # fmt: skip
    """Walk a range of the children of ``BL`` positions with ``BM`` parents, whose sums stay on chip.

    The program's number selects a block of positions, a tile of parents and a range of children. If parents compete and
    the tile does not have all of them, ``normalizers`` hold the log-sum-exps over all. A ``WHOLE`` program walks all
    children and finishes; others store their sums in ``results`` for :func:`_finish_kernel`.
    """
    sizes = Sizes(positions, H, W, N, Ho, Wo, I, M, G)
    program = tl.program_id(0)
    split = program // blocks // tiles
    block = block_of(votes, sizes, tile, program % blocks)
    at = place(tile, block.positions, block.windows.exists, (program // blocks) % tiles * tile.BM, M)
    parents = algebra.load(iteration, at, tile)
    state = algebra.start(iteration, tile)
    begin, end = range_of(0, I, split, per_split)
    if algebra.idle is not None:
        end = tl.where(algebra.idle(iteration, parents), begin, end)
    for i in range(begin, end):
        child = child_of(votes, sizes, block.windows, i)
        vote = make_vote(votes, sizes, tile, block, child, at, child.opened)
        normalizer = None
        if normalizers is not None:
            normalizer = load_of_child(normalizers, block, i, I)
        state = algebra.add(iteration, parents, state, vote, child, normalizer, at, tile)
    if WHOLE:
        algebra.finish(iteration, state, results, at, tile)
    else:
        save(results, split, state, at, tl.cast(positions, tl.int64) * M, tile)


@kernel
def _normalizer_kernel(
    votes, iteration, grads, normalizers, totals, averages, positions, H, W, N, Ho, Wo, I, M, G, blocks, tiles,
    per_split, tile, algebra, ROUTING: tl.constexpr,
):  # fmt: skip
    """normalizers_i = log sum_m exp(a_im) of the logits a; averages_i = sum_m r_im t_im with gradients ``grads``.

    The first of two sweeps, for parents that compete and do not fit on chip: one tile of parents after another, each
    with all children of the program's range, so that parents, and matrices that children share, are read once a tile.
    Between tiles ``normalizers`` hold a child's running maximum (as in FlashAttention), ``totals`` and ``averages`` the
    sums relative to it.
    """
    sizes = Sizes(positions, H, W, N, Ho, Wo, I, M, G)
    program = tl.program_id(0)
    block = block_of(votes, sizes, tile, program % blocks)
    begin, end = range_of(0, I, program // blocks, per_split)
    exists = block.windows.exists
    for k in range(tiles):
        at = place(tile, block.positions, exists, tl.cast(k, tl.int32) * tile.BM, M)
        parents = algebra.load(iteration, at, tile)
        given = None
        if averages is not None:
            given = algebra.load_grads(grads, at)
        known = exists & (k > 0)
        last = k == tiles - 1
        tl.debug_barrier()  # other threads may have stored the previous tile's values
        for i in range(begin, end):
            child = child_of(votes, sizes, block.windows, i)
            vote = make_vote(votes, sizes, tile, block, child, at, child.seen)
            logits = algebra.score(iteration, parents, vote, tile)
            logits = tl.where(real_parents(at, tile), logits, float("-inf"))
            offsets = block.positions * I + i
            top = tl.load(normalizers + offsets, mask=known, other=float("-inf"))
            higher = tl.maximum(top, tl.max(logits, axis=1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)  # a tile of -inf alone must not make NaN
            fade = tl.exp(top - shift)
            exponentials = tl.exp(logits - shift[:, None])
            total = tl.load(totals + offsets, mask=known, other=0.0) * fade + tl.sum(exponentials, axis=1)
            if averages is not None:
                gains = algebra.gain(iteration, grads, given, vote, i, at, tile)
                sums = tl.load(averages + offsets, mask=known, other=0.0) * fade + tl.sum(exponentials * gains, axis=1)
                tl.store(averages + offsets, tl.where(last, sums / total, sums), mask=exists)
            tl.store(normalizers + offsets, tl.where(last, higher + tl.log(total), higher), mask=exists)
            tl.store(totals + offsets, total, mask=exists)


@kernel
def _finish_kernel(parts, iteration, results, poses, splits, tile, algebra, ROUTING: tl.constexpr):
    """Join the sums of the ranges of children in their order, and finish.

    ``parts`` hold those of every range and pose; a program finishes ``BL`` poses, of any positions and parents.
    """
    p = tl.program_id(0).to(tl.int64) * tile.BL + tl.arange(0, tile.BL)
    at = place(tile, p, p < poses, 0, 1)
    like = algebra.start(iteration, tile)
    state = restore(parts, 0, like, at, poses, tile)
    for split in range(1, splits):
        state = algebra.join(iteration, state, restore(parts, split, like, at, poses, tile))
    algebra.finish(iteration, state, results, at, tile)
