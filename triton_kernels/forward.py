"""The forward kernels of every routing: sums over children, the first of two sweeps, and the finish.

A routing's own part is its *algebra*: ``@triton.jit`` functions that take ``routing``, the routing's own tensors and
numbers (a named tuple), and of a tile what they need.

``load(routing, at, tile)``
    The parents' tiles that stay on chip, a tuple; a number where one is absent.
``score(routing, own, votes, tile)``
    What the softmax over parents runs over, ``[BL, BM]``.
``start(routing, tile)``, ``add(routing, own, state, votes, child, known, at, tile)``, ``join(routing, state, other)``
    The sums of a range of children: a tuple of tiles; what one child's votes add; how ranges of children meet.
``finish(routing, state, results, at, tile)``
    What is stored in the end.
``idle(routing, own)``
    Whether a program has nothing to sum up; None if it always has.

:mod:`.backward` tells of the rest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .tiles import Sizes, kernel, look, make_votes, place, real_parents, see_block


class Algebra(NamedTuple):
    """The functions of a routing that the kernels are made with."""

    load: Any
    score: Any
    start: Any
    add: Any
    join: Any
    finish: Any
    idle: Any = None
    load_grads: Any = None
    dshare: Any = None
    dscore: Any = None
    dvote: Any = None
    dstart: Any = None
    dadd: Any = None
    dfinish: Any = None


@triton.jit
def range_of(first, last, split, per_split):
    """Return the children of a range: the first, and the one behind the last."""
    begin = first + split * per_split
    return begin, begin + tl.minimum(per_split, last - begin)


@triton.jit
def load_of_child(pointer, p, exists, i, children):
    """Return a number for each position of one child, from ``[positions, I]``; None if there are none."""
    if pointer is not None:
        return tl.load(pointer + p * children + i, mask=exists, other=0.0)
    else:
        return None


@triton.jit
def save(parts, part, state, at, poses, tile):
    """Leave the sums of a range of children."""
    begin = part.to(tl.int64) * poses
    for k in tl.static_range(len(parts)):
        if len(state[k].shape) == 4:
            tl.store(parts[k] + begin * (tile.C * tile.E) + at.base + at.pose, state[k], mask=at.pose_mask)
        else:
            tl.store(parts[k] + begin + at.each, state[k], mask=at.each_mask)


@triton.jit
def restore(parts, part, like, at, poses, tile):
    """Return the sums that :func:`save` left; ``like``: sums of the same form."""
    begin = tl.cast(part, tl.int64) * poses
    state = ()
    for k in tl.static_range(len(parts)):
        if len(like[k].shape) == 4:
            one = tl.load(parts[k] + begin * (tile.C * tile.E) + at.base + at.pose, mask=at.pose_mask, other=0.0)
        else:
            one = tl.load(parts[k] + begin + at.each, mask=at.each_mask, other=0.0)
        state = state + (one,)
    return state


@kernel
def _forward_kernel(
    votes, routing, results, normalizer, positions, H, W, N, Ho, Wo, I, M, G, blocks, tiles, per_split,
    tile, algebra, WHOLE: tl.constexpr, ROUTING: tl.constexpr,
):  # fmt: skip
    """Walk a range of the children of ``BL`` positions with ``BM`` parents, whose sums stay on chip.

    Blocks of positions, tiles of parents and ranges of children are told apart by the program's number. Where its
    parents are not all and compete, ``normalizer`` holds the log-sum-exp over all of them. A program that is ``WHOLE``
    (walks all children) finishes; others leave their sums in ``results`` for :func:`_finish_kernel`.
    """
    sizes = Sizes(positions, H, W, N, Ho, Wo, I, M, G)
    program = tl.program_id(0)
    split = program // blocks // tiles
    p, sight, rows = see_block(votes, sizes, tile, program % blocks)
    at = place(tile, p, sight.exists, (program // blocks) % tiles * tile.BM, M)
    own = algebra.load(routing, at, tile)
    state = algebra.start(routing, tile)
    begin, end = range_of(0, I, split, per_split)
    if algebra.idle is not None:
        end = tl.where(algebra.idle(routing, own), begin, end)
    for i in range(begin, end):
        child = look(votes, sizes, sight, i)
        made = make_votes(votes, sizes, tile, sight, rows, child, at, child.opened)
        known = load_of_child(normalizer, p, sight.exists, i, I)
        state = algebra.add(routing, own, state, made, child, known, at, tile)
    if WHOLE:
        algebra.finish(routing, state, results, at, tile)
    else:
        save(results, split, state, at, tl.cast(positions, tl.int64) * M, tile)


@kernel
def _normalizer_kernel(
    votes, routing, grads, normalizer, heard, positions, H, W, N, Ho, Wo, I, M, G, blocks, tiles, per_split,
    tile, algebra, ROUTING: tl.constexpr,
):  # fmt: skip
    """normalizer_i = log sum_m exp(a_im) of the logits a; heard_i = sum_m r_im t_im with gradients ``grads``.

    The first of two sweeps, for parents that compete and do not fit on chip: tiles of parents one after the other, with
    the running maximum of FlashAttention.
    """
    sizes = Sizes(positions, H, W, N, Ho, Wo, I, M, G)
    program = tl.program_id(0)
    p, sight, rows = see_block(votes, sizes, tile, program % blocks)
    begin, end = range_of(0, I, program // blocks, per_split)
    for i in range(begin, end):
        child = look(votes, sizes, sight, i)
        top = tl.full([tile.BL], float("-inf"), tl.float32)
        total = tl.zeros([tile.BL], tl.float32)
        gain = tl.zeros([tile.BL], tl.float32)
        for k in range(tiles):
            at = place(tile, p, sight.exists, tl.cast(k, tl.int32) * tile.BM, M)
            made = make_votes(votes, sizes, tile, sight, rows, child, at, child.seen)
            logits = algebra.score(routing, algebra.load(routing, at, tile), made, tile)
            logits = tl.where(real_parents(at, tile), logits, float("-inf"))
            higher = tl.maximum(top, tl.max(logits, axis=1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)  # a tile of -inf alone must not make NaN
            fade = tl.exp(top - shift)
            shares = tl.exp(logits - shift[:, None])
            total = total * fade + tl.sum(shares, axis=1)
            if heard is not None:
                held = algebra.load_grads(grads, at)
                gain = gain * fade + tl.sum(shares * algebra.dshare(routing, grads, held, made, i, at, tile), axis=1)
            top = higher
        there = p * I + i
        tl.store(normalizer + there, top + tl.log(total), mask=sight.exists)
        if heard is not None:
            tl.store(heard + there, gain / total, mask=sight.exists)


@kernel
def _finish_kernel(parts, routing, results, poses, splits, tile, algebra, ROUTING: tl.constexpr):
    """Join the sums of the ranges of children in their order, and finish.

    ``parts`` hold those of every range and pose; a program finishes ``BL`` poses, whichever positions and parents they
    are.
    """
    p = tl.program_id(0).to(tl.int64) * tile.BL + tl.arange(0, tile.BL)
    at = place(tile, p, p < poses, 0, 1)
    like = algebra.start(routing, tile)
    state = restore(parts, 0, like, at, poses, tile)
    for split in range(1, splits):
        state = algebra.join(routing, state, restore(parts, split, like, at, poses, tile))
    algebra.finish(routing, state, results, at, tile)
