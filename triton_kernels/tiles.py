"""Code that the kernels share: children as positions see them, the votes of one child, the tiles of a parents tensor.

A *tile* holds the poses of every (position l, parent m), shape ``[BC, BE, BL, BM]`` for rows c and columns e of a pose,
each size a power of two; values beyond the true sizes are zero and stay zero. Triton distributes the last dimensions
over lanes and then warps: a lane is a parent, a warp has positions, and a pose, and sums over it, stay within a thread.

``V_im = P_i W_gm + bias_im`` is made for one child i at a time and never leaves the program. Without weights the vote
is the child itself; unless parents have different biases, it is kept once for all of them, ``[BC, BE, BL, 1]``.

Named tuples group the arguments of the kernels. Their compile-time values are ``tl.constexpr``; Triton also compiles
again for a stride of 1 or a multiple of 16.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

COUNTS = (
    "positions", "H", "W", "N", "Ho", "Wo", "I", "M", "G", "blocks", "tiles", "first_tile", "first_child", "last_child",
    "per_split", "poses", "splits", "group_children",
)  # fmt: skip
"""Arguments for whose values no kernel is compiled. Otherwise Triton compiles again for 1 and for multiples of 16."""
STORE, ADD, ATOMIC = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Ways to :func:`put` values: overwrite; add, if no other program adds; add atomically."""


class Votes(NamedTuple):
    """The inputs of the votes: pointers, or None; strides; compile-time values, among them the window.

    ``INDEX``: the type of offsets in children, in gates, in the matrices of a group, and in the gradients of these.
    """

    children: Any
    weight: Any
    bias: Any
    gate: Any
    cs_b: int
    cs_h: int
    cs_w: int
    cs_n: int
    cs_c: int
    cs_d: int
    ws_g: int
    ws_m: int
    ws_d: int
    ws_e: int
    bs_i: int
    bs_m: int
    gs_b: int
    gs_h: int
    gs_w: int
    gs_n: int
    KW: tl.constexpr
    SH: tl.constexpr
    SW: tl.constexpr
    PH: tl.constexpr
    PW: tl.constexpr
    DH: tl.constexpr
    DW: tl.constexpr
    INDEX: tl.constexpr


class Sizes(NamedTuple):
    """The sizes of a call; ``positions`` are B * Ho * Wo."""

    positions: Any
    H: Any
    W: Any
    N: Any
    Ho: Any
    Wo: Any
    I: Any
    M: Any
    G: Any


class Tile(NamedTuple):
    """A program's tile, and the true sizes of a pose.

    ``BK`` and ``DEPTH``: columns of a child's pose that a product takes, for votes and for gradients, or 0.
    """

    BL: tl.constexpr
    BC: tl.constexpr
    BM: tl.constexpr
    BE: tl.constexpr
    BK: tl.constexpr
    DEPTH: tl.constexpr
    C: tl.constexpr
    D: tl.constexpr
    E: tl.constexpr
    PRECISION: tl.constexpr


class Windows(NamedTuple):
    """Where the windows of positions begin.

    ``row``, ``column``: in the grid; ``child``, ``gate``, ``cell``: in the memory of children, of gates, and of the
    gradients of both, which are contiguous.
    """

    exists: Any  # whether the position exists
    row: Any
    column: Any
    child: Any
    gate: Any
    cell: Any


class Block(NamedTuple):
    """The positions of a program, their windows, and the windows of every row of their poses, ``[BL * BC]``."""

    positions: Any
    windows: Any
    rows: Any


class Child(NamedTuple):
    """One child, as positions see it.

    ``at``: a pointer to it, relative to a window's beginning; ``seen``: whether it exists, not in the padding;
    ``gate``: 1 if there are no gates; ``opened``: whether its gate is also not 0, if a gate of 0 hides children;
    ``cell``: where its gradients lie, also relative to a window's beginning.
    """

    i: Any
    at: Any
    seen: Any
    gate: Any
    opened: Any
    cell: Any


class At(NamedTuple):
    """Where a tile lies in a parents tensor ``[positions, M, C, E]``, and in ``[positions, M]``; its ``positions``.

    ``base`` is the offset of a position, in 64 bits; ``pose`` that of a value from there, in 32 bits, because a tile of
    offsets fills registers. 32 bits are enough: one position's parents have fewer than 2**31 values
    (``Routing.refusal``). Offsets of parents after the last may overflow, but are masked.
    """

    positions: Any
    first: Any
    M: Any
    inside: Any
    base: Any
    pose: Any
    pose_mask: Any
    each: Any
    each_mask: Any


def kernel(function: Callable[..., None]) -> triton.JITFunction:
    """Return the kernel, which Triton does not compile again for new values of :data:`COUNTS`.

    Compiled code has the name of the routing that the kernel is compiled for: ``attention_forward_kernel``.
    """

    def title(specialization: Any) -> str:
        return f"{specialization.constants['ROUTING']}{function.__name__}"

    counts = [name for name in inspect.signature(function).parameters if name in COUNTS]
    return triton.jit(function, do_not_specialize=counts, repr=title)


@triton.jit
def windows_of(votes, sizes, p):
    """Return where the windows of flat positions ``p`` begin; row and column may be below 0.

    Positions after the last get the last one's windows, so that their addresses are valid; masks exclude them.
    """
    inside = tl.minimum(p, sizes.positions - 1).to(sizes.positions.dtype)
    area = sizes.Ho.to(sizes.positions.dtype) * sizes.Wo
    sample = inside // area
    within = inside - sample * area
    down = within // sizes.Wo
    row = (down * votes.SH - votes.PH).to(votes.INDEX)
    column = ((within - down * sizes.Wo) * votes.SW - votes.PW).to(votes.INDEX)
    sample = sample.to(votes.INDEX)
    child = sample * votes.cs_b + row * votes.cs_h + column * votes.cs_w
    gate = sample * votes.gs_b + row * votes.gs_h + column * votes.gs_w
    cell = ((sample * sizes.H + row) * sizes.W + column) * sizes.N
    return Windows(p < sizes.positions, row.to(tl.int32), column.to(tl.int32), child, gate, cell)


@triton.jit
def block_of(votes, sizes, tile, number):
    """Return a block of positions."""
    first = tl.cast(number, tl.int64) * tile.BL
    p = first + tl.arange(0, tile.BL)
    row_p = first + tl.arange(0, tile.BL * tile.BC) // tile.BC
    return Block(p, windows_of(votes, sizes, p), windows_of(votes, sizes, row_p))


@triton.jit
def child_of(votes, sizes, windows, i):
    """Return child ``i`` of every window."""
    slot = i // sizes.N
    n = (i - slot * sizes.N).to(tl.int64)
    dy, dx = slot // votes.KW * votes.DH, slot % votes.KW * votes.DW
    seen = windows.exists
    if votes.PH > 0 or votes.PW > 0:
        down, right = windows.row + dy, windows.column + dx
        seen = seen & (down >= 0) & (down < sizes.H) & (right >= 0) & (right < sizes.W)
    dy, dx = dy.to(tl.int64), dx.to(tl.int64)
    at = votes.children + (dy * votes.cs_h + dx * votes.cs_w + n * votes.cs_n)
    gate = tl.where(seen, 1.0, 0.0)
    opened = seen
    if votes.gate is not None:
        gates = votes.gate + (dy * votes.gs_h + dx * votes.gs_w + n * votes.gs_n) + windows.gate
        gate = tl.load(gates, mask=seen, other=0.0).to(tl.float32)
        opened = seen & (gate != 0.0)
    return Child(i, at, seen, gate, opened, ((dy * sizes.W + dx) * sizes.N + n).to(votes.INDEX))


@triton.jit
def matrices_of(votes, sizes, i):
    """Return a pointer to the matrices of child ``i``'s group."""
    return votes.weight + (i % sizes.G).to(tl.int64) * votes.ws_g


@triton.jit
def pose_offsets(tile):
    """Return where the values of one parent's pose lie, as ``[BC, BE, 1, 1]``, and which of them exist."""
    c, e = tl.arange(0, tile.BC)[:, None, None, None], tl.arange(0, tile.BE)[None, :, None, None]
    return c * tile.E + e, (c < tile.C) & (e < tile.E)


@triton.jit
def parent_offsets(tile, first, M):
    """Return where the parents from ``first`` on lie in ``[M, C, E]``, and which of their values exist."""
    offsets, mask = pose_offsets(tile)
    m = first + tl.arange(0, tile.BM)[None, None, None, :]
    return m * (tile.C * tile.E) + offsets, mask & (m < M)


@triton.jit
def place(tile, p, exists, first, M):
    """Return where the tile of positions ``p`` and of the parents from ``first`` on lies."""
    base = p[None, None, :, None] * (tl.cast(M, tl.int64) * (tile.C * tile.E))
    pose, inside = parent_offsets(tile, first, M)
    pose_mask = inside & exists[None, None, :, None]
    m = first + tl.arange(0, tile.BM)
    each_mask = exists[:, None] & (m < M)[None, :]
    return At(p, first, M, inside, base, pose, pose_mask, p[:, None] * M + m[None, :], each_mask)


@triton.jit
def load_pose(pointer, at, other=0.0):
    """Return a tile of a parents tensor, in float32; ``other`` where it is padding."""
    return tl.load(pointer + at.base + at.pose, mask=at.pose_mask, other=other).to(tl.float32)


@triton.jit
def load_each(pointer, at):
    """Return a value for each parent of a tile; 0 where it is padding."""
    return tl.load(pointer + at.each, mask=at.each_mask, other=0.0)


@triton.jit
def put_pose(pointer, tile, at, HOW: tl.constexpr):
    """:func:`put` a tile into a parents tensor."""
    put(pointer + at.base + at.pose, tile, at.pose_mask, HOW)


@triton.jit
def put_each(pointer, values, at, HOW: tl.constexpr):
    """:func:`put` a value for each parent of a tile."""
    put(pointer + at.each, values, at.each_mask, HOW)


INTERPRETED = tl.constexpr(not isinstance(place, triton.JITFunction))
"""Whether Triton interprets kernels (TRITON_INTERPRET=1): products of bfloat16 are wrong there."""


@triton.jit
def load_poses(votes, tile, child, rows, seen, k, BK: tl.constexpr):
    """Return columns k to k + BK of the poses of one child, ``[BL * BC, BK]``: row l * BC + c."""
    c = (tl.arange(0, tile.BL * tile.BC) % tile.BC).to(votes.INDEX)
    d = (k + tl.arange(0, BK)).to(votes.INDEX)
    poses = child.at + ((rows.child + c * votes.cs_c)[:, None] + (d * votes.cs_d)[None, :])
    return tl.load(poses, mask=(seen & (c < tile.C))[:, None] & (d < tile.D)[None, :], other=0.0)


@triton.jit
def load_matrices(votes, tile, matrices, at, k, BK: tl.constexpr):
    """Return rows k to k + BK of the matrices of one group, ``[BK, BM * BE]``: column m * BE + e."""
    column = tl.arange(0, tile.BM * tile.BE)
    m, e = (at.first + column // tile.BE).to(votes.INDEX), (column % tile.BE).to(votes.INDEX)
    d = (k + tl.arange(0, BK)).to(votes.INDEX)
    places = matrices + ((d * votes.ws_d)[:, None] + (m * votes.ws_m + e * votes.ws_e)[None, :])
    return tl.load(places, mask=(d < tile.D)[:, None] & ((m < at.M) & (e < tile.E))[None, :], other=0.0)


@triton.jit
def matrix_rows(votes, tile, matrices, at):
    """Return pointers to row 0 of the matrices of one group as a tile, and which of them exist."""
    m = (at.first + tl.arange(0, tile.BM))[None, None, None, :].to(votes.INDEX)
    e = tl.arange(0, tile.BE)[None, :, None, None].to(votes.INDEX)
    return matrices + (m * votes.ws_m + e * votes.ws_e), (m < at.M) & (e < tile.E)


@triton.jit
def pose_rows(votes, tile, child, windows, seen):
    """Return pointers to column 0 of the poses of one child, ``[BC, 1, BL, 1]``, and which of them exist."""
    c = tl.arange(0, tile.BC)[:, None, None, None].to(votes.INDEX)
    return child.at + (windows.child[None, None, :, None] + c * votes.cs_c), seen[None, None, :, None] & (c < tile.C)


@triton.jit
def make_vote(votes, sizes, tile, block, child, at, seen):
    """Return the votes of one child as a tile, zero where it is not ``seen`` or the tile is padding.

    Made by matrix products (positions x rows by parents x columns), or column by column of the pose. Absent children
    are masked in the end, not multiplied by 0: an infinite bias or weight must not make NaN.
    """
    if votes.weight is None:
        poses, pose_mask = pose_rows(votes, tile, child, block.windows, seen)
        e = tl.arange(0, tile.BE)[None, :, None, None].to(votes.INDEX)
        vote = tl.load(poses + e * votes.cs_d, mask=pose_mask & (e < tile.E), other=0.0).to(tl.float32)
    elif tile.BK > 0:
        matrices = matrices_of(votes, sizes, child.i)
        flat = tl.zeros([tile.BL * tile.BC, tile.BM * tile.BE], tl.float32)
        row_seen = child_of(votes, sizes, block.rows, child.i).seen
        for k in range(0, tile.D, tile.BK):
            poses = load_poses(votes, tile, child, block.rows, row_seen, k, tile.BK)
            columns = load_matrices(votes, tile, matrices, at, k, tile.BK)
            if INTERPRETED:
                poses, columns = poses.to(tl.float32), columns.to(tl.float32)
            flat = tl.dot(poses, columns, flat, input_precision=tile.PRECISION)
        vote = tl.permute(tl.reshape(flat, [tile.BL, tile.BC, tile.BM, tile.BE]), (1, 3, 0, 2))
    else:
        poses, pose_mask = pose_rows(votes, tile, child, block.windows, seen)
        columns, column_mask = matrix_rows(votes, tile, matrices_of(votes, sizes, child.i), at)
        vote = tl.zeros([tile.BC, tile.BE, tile.BL, tile.BM], tl.float32)
        for d in range(tile.D):
            column = tl.cast(d, tl.int64)
            pose = tl.load(poses + column * votes.cs_d, mask=pose_mask, other=0.0).to(tl.float32)
            vote += pose * tl.load(columns + column * votes.ws_d, mask=column_mask, other=0.0).to(tl.float32)
    if votes.bias is not None:
        offsets, _ = pose_offsets(tile)
        m = (at.first + tl.arange(0, tile.BM))[None, None, None, :]
        bias = votes.bias + tl.cast(child.i, tl.int64) * votes.bs_i + (m * votes.bs_m + offsets)
        vote += tl.load(bias, mask=at.inside, other=0.0).to(tl.float32)
    if votes.weight is not None or votes.bias is not None:
        vote = tl.where(at.inside & seen[None, None, :, None], vote, 0.0)
    return vote


@triton.jit
def inner_product(left, right):
    """Return ``<X_m, Y_m>`` over the values of a pose: two tiles to ``[BL, BM]``."""
    return tl.sum(tl.sum(left * right, axis=0), axis=0)


@triton.jit
def spread(values):
    """Return ``[BL, BM]`` in a shape that multiplies a tile."""
    return values[None, None, :, :]


@triton.jit
def directions(vectors):
    """Return u = s v, 1 / |u| and s, for a vector v and a scale s by which no square overflows or vanishes.

    1 / |u| is 0 for a vector of zero. ``s / |u|``, which is 1 / |v|, may overflow.
    """
    largest = tl.max(tl.max(tl.abs(vectors), axis=0), axis=0)
    size = 1.0 / tl.minimum(tl.maximum(largest, 2.0**-125), 2.0**126)
    scaled = vectors * spread(size)
    length = tl.sqrt(inner_product(scaled, scaled))
    inverse = tl.where(length == 0.0, 0.0, 1.0 / length)
    return scaled, inverse, size


@triton.jit
def squash(sums):
    """Return ``|S|^2 / (1 + |S|^2) S / |S|``: of length 1 where S is long, 0 where it is 0."""
    scaled, inverse, scale = directions(sums)
    inverse_length = inverse * scale
    size = tl.where(inverse == 0.0, 0.0, 1.0 / (1.0 + inverse_length * inverse_length))
    return scaled * spread(inverse * size)


@triton.jit
def real_parents(at, tile):
    """Return which columns of ``[1, BM]`` are parents."""
    return (at.first + tl.arange(0, tile.BM) < at.M)[None, :]


@triton.jit
def coefficients_of(logits, normalizer, at, tile):
    """Return ``r = softmax over m`` of logits ``[BL, BM]``.

    With ``normalizer`` (log-sum-exp over all parents, ``[BL]``) the tile may have only some of them.
    """
    logits = tl.where(real_parents(at, tile), logits, float("-inf"))
    if normalizer is not None:
        return tl.exp(logits - normalizer[:, None])
    coefficients = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    return coefficients / tl.sum(coefficients, axis=1)[:, None]


@triton.jit
def equal_coefficients(at, tile):
    """Return r = 1 / M."""
    return tl.where(real_parents(at, tile), tl.full([tile.BL, tile.BM], 1.0, tl.float32) / at.M, 0.0)


@triton.jit
def unbroken(dgate, witness, opened):
    """Return the gradient of a gate, but 0 if a gate of 0 hides a child that is NaN or infinite.

    ``witness``: a sum over the child's votes, which shows that. Gates of other hidden children may learn to open.
    """
    return tl.where(opened | (tl.abs(witness) < float("inf")), dgate, 0.0)


@triton.jit
def put(pointer, values, mask, HOW: tl.constexpr):
    """Store values, or add them to those in memory."""
    if HOW == ATOMIC:
        tl.atomic_add(pointer, values, mask=mask, sem="relaxed")
    elif HOW == ADD:
        tl.store(pointer, values + tl.load(pointer, mask=mask, other=0.0), mask=mask)
    else:
        tl.store(pointer, values, mask=mask)
