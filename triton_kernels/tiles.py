"""What the kernels share: where children lie, the votes of one child, the tiles of a parents tensor, who is heard.

A *tile* holds the poses of every (position l, parent m), shape ``[BC, BE, BL, BM]`` for rows c and columns e of a pose,
each size a power of two; numbers beyond the true sizes are zero and stay zero. Triton deals the last dimensions out to
lanes and then to warps: a lane is a parent, a warp has positions, a pose stays within a thread, and so do sums over it.

``V_im = P_i W_gm + bias_im`` is made for one child i at a time and never leaves the program. Without weights the vote
is the child itself; unless a bias tells the parents apart, it is kept once for all of them, ``[BC, BE, BL, 1]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

COUNTS = (
    "count", "length", "columns", "height", "width", "types", "groups", "many", "seen_children", "blocks", "tiles",
    "first_tile", "first_child", "last_child", "per_split", "poses", "splits", "group_children", "position_splits",
)  # fmt: skip
"""Arguments of kernels that never get a kernel compiled for their value, as Triton does for 1 and multiples of 16."""


def kernel(function: Callable[..., None]) -> triton.JITFunction:
    """Compile a kernel; what varies from call to call (see :data:`COUNTS`) does not compile it anew.

    Compiled code has the name of the pass that a skeleton's kernel is made for: ``attention_forward``.
    """
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    own = function.__name__.strip("_")

    def name(specialization: Any) -> str:
        return f"{specialization.constants['PASS']}_{own}" if "PASS" in names else own

    return triton.jit(function, do_not_specialize=[name for name in names if name in COUNTS], repr=name)


@triton.jit
def position_origin(p, count, length, columns, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr):
    """Return (sample, first row, first column) of the windows of flat positions ``p``; row and column may be < 0.

    Positions beyond ``count`` get those of the last one: their addresses stay small, and masks do the rest.
    """
    inside = tl.minimum(p, count - 1).to(count.dtype)
    sample = inside // length
    rest = inside - sample * length
    row = rest // columns
    return sample, row * SH - PH, (rest - row * columns) * SW - PW


@triton.jit
def windows(
    p, count, length, columns, cs_b, cs_h, cs_w,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
):  # fmt: skip
    """Return (whether it exists, sample, row, column, address of its first place) of the windows of positions ``p``."""
    sample, row, column = position_origin(p, count, length, columns, SH, SW, PH, PW)
    origin = sample.to(tl.int64) * cs_b + row.to(tl.int64) * cs_h + column.to(tl.int64) * cs_w
    return p < count, sample, row, column, origin


@triton.jit
def place_of_child(i, types, KW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr):
    """Return (rows below a window's first place, columns beyond it, type n) of child i."""
    slot = i // types
    return slot // KW * DH, slot % KW * DW, (i - slot * types).to(tl.int64)


@triton.jit
def is_present(exists, row, column, dy, dx, height, width, PADDED: tl.constexpr):
    """Return which positions see a child at (row + dy, column + dx) of the grid; in the padding there is none."""
    if PADDED:
        down, right = row + dy, column + dx
        exists = exists & (down >= 0) & (down < height) & (right >= 0) & (right < width)
    return exists


@triton.jit
def tile_mask(first, parents, C: tl.constexpr, E: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr):
    """Return which (c, m, e) of a tile that begins at parent ``first`` are numbers of a pose, ``[BC, BE, 1, BM]``."""
    c = tl.arange(0, BC)[:, None, None, None]
    m = first + tl.arange(0, BM)[None, None, None, :]
    e = tl.arange(0, BE)[None, :, None, None]
    return (c < C) & (m < parents) & (e < E)


@triton.jit
def tile_offsets(
    p, first, parents, C: tl.constexpr, E: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr
):
    """Return where the numbers of a tile lie in a contiguous parents tensor ``[positions, M, C, E]``."""
    c = tl.arange(0, BC)[:, None, None, None]
    m = first + tl.arange(0, BM)[None, None, None, :]
    e = tl.arange(0, BE)[None, :, None, None]
    return p.to(tl.int64)[None, None, :, None] * (parents * (C * E)) + (m * C + c) * E + e


@triton.jit
def tile_places(
    p, exists, first, parents, C: tl.constexpr, E: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr
):
    """Return where a tile lies: offsets and mask in a parents tensor, then in ``[positions, M]``."""
    mask = tile_mask(first, parents, C, E, BC, BM, BE) & exists[None, None, :, None]
    m = first + tl.arange(0, BM)
    each = p.to(tl.int64)[:, None] * parents + m[None, :]
    return tile_offsets(p, first, parents, C, E, BC, BM, BE), mask, each, exists[:, None] & (m < parents)[None, :]


INTERPRETED = tl.constexpr(not isinstance(tile_offsets, triton.JITFunction))
"""Whether Triton interprets kernels (TRITON_INTERPRET=1): products of bfloat16 numbers are wrong there."""


@triton.jit
def votes_by_columns(
    child, origin, seen, matrix, first, parents, cs_c, cs_d, ws_m, ws_d, ws_e,
    C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BL: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Return ``P_i W_gm`` as a tile, one column of the pose times one row of the matrix after the other."""
    c = tl.arange(0, BC)[:, None, None, None]
    m = first + tl.arange(0, BM)[None, None, None, :]
    e = tl.arange(0, BE)[None, :, None, None]
    poses = child + origin[None, None, :, None] + c * tl.cast(cs_c, tl.int64)
    poses_in = seen[None, None, :, None] & (c < C)
    rows = matrix + m.to(tl.int64) * ws_m + e * tl.cast(ws_e, tl.int64)
    rows_in = (m < parents) & (e < E)
    votes = tl.zeros([BC, BE, BL, BM], tl.float32)
    for d in range(D):
        pose = tl.load(poses + d * tl.cast(cs_d, tl.int64), mask=poses_in, other=0.0).to(tl.float32)
        votes += pose * tl.load(rows + d * tl.cast(ws_d, tl.int64), mask=rows_in, other=0.0).to(tl.float32)
    return votes


@triton.jit
def load_poses(
    child, row_origin, row_seen, k, cs_c, cs_d,
    C: tl.constexpr, D: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return columns k to k + BK of the poses of one child, ``[BL * BC, BK]``: row l * BC + c."""
    c = tl.arange(0, BL * BC) % BC
    d = k + tl.arange(0, BK)
    at = child + row_origin[:, None] + (c * tl.cast(cs_c, tl.int64))[:, None] + (d * tl.cast(cs_d, tl.int64))[None, :]
    return tl.load(at, mask=(row_seen & (c < C))[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def load_matrices(
    matrix, first, parents, k, ws_m, ws_d, ws_e,
    D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return rows k to k + BK of the matrices of one group, ``[BK, BM * BE]``: column m * BE + e."""
    column = tl.arange(0, BM * BE)
    m, e = first + column // BE, column % BE
    d = k + tl.arange(0, BK)
    at = (
        matrix + (d * tl.cast(ws_d, tl.int64))[:, None] + (m.to(tl.int64) * ws_m + e * tl.cast(ws_e, tl.int64))[None, :]
    )
    return tl.load(at, mask=(d < D)[:, None] & ((m < parents) & (e < E))[None, :], other=0.0)


@triton.jit
def votes_by_dot(
    child, row_origin, row_seen, matrix, first, parents, cs_c, cs_d, ws_m, ws_d, ws_e,
    C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BL: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return ``P_i W_gm`` as a tile by matrix products: positions times rows against parents times columns."""
    votes = tl.zeros([BL * BC, BM * BE], tl.float32)
    for k in range(0, D, BK):
        poses = load_poses(child, row_origin, row_seen, k, cs_c, cs_d, C, D, BL, BC, BK)
        matrices = load_matrices(matrix, first, parents, k, ws_m, ws_d, ws_e, D, E, BM, BE, BK)
        if INTERPRETED:
            poses, matrices = poses.to(tl.float32), matrices.to(tl.float32)
        votes = tl.dot(poses, matrices, votes, input_precision=PRECISION)
    return tl.permute(tl.reshape(votes, [BL, BC, BM, BE]), (1, 3, 0, 2))


@triton.jit
def votes_by_identity(
    child, origin, seen, cs_c, cs_d, C: tl.constexpr, E: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr
):
    """Return the poses of one child themselves, ``[BC, BE, BL, 1]``."""
    c = tl.arange(0, BC)[:, None, None, None]
    e = tl.arange(0, BE)[None, :, None, None]
    poses = child + origin[None, None, :, None] + c * tl.cast(cs_c, tl.int64) + e * tl.cast(cs_d, tl.int64)
    return tl.load(poses, mask=seen[None, None, :, None] & (c < C) & (e < E), other=0.0).to(tl.float32)


@triton.jit
def votes_of_child(
    child, origin, row_origin, seen, row_seen, matrix, bias, first, parents,
    cs_c, cs_d, ws_m, ws_d, ws_e, bs_m, inside,
    C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BL: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the votes of one child as a tile, zero where the child is absent or the tile is padding.

    Not a product with the mask: a bias or a weight of infinity must not turn an absent child into NaN. ``BK`` is 0
    where products column by column are wanted, else the depth of one matrix product.
    """
    if matrix is None:
        votes = votes_by_identity(child, origin, seen, cs_c, cs_d, C, E, BC, BE)
    elif BK > 0:
        votes = votes_by_dot(
            child, row_origin, row_seen, matrix, first, parents, cs_c, cs_d, ws_m, ws_d, ws_e,
            C, D, E, BL, BC, BM, BE, BK, PRECISION,
        )  # fmt: skip
    else:
        votes = votes_by_columns(
            child, origin, seen, matrix, first, parents, cs_c, cs_d, ws_m, ws_d, ws_e, C, D, E, BL, BC, BM, BE
        )
    if bias is not None:
        c = tl.arange(0, BC)[:, None, None, None]
        m = first + tl.arange(0, BM)[None, None, None, :]
        e = tl.arange(0, BE)[None, :, None, None]
        votes += tl.load(bias + m.to(tl.int64) * bs_m + c * E + e, mask=inside, other=0.0).to(tl.float32)
    if matrix is not None or bias is not None:
        votes = tl.where(inside & seen[None, None, :, None], votes, 0.0)
    return votes


@triton.jit
def inner_product(left, right):
    """Return ``<X_m, Y_m>`` over the numbers of a pose: two tiles to ``[BL, BM]``."""
    return tl.sum(tl.sum(left * right, axis=0), axis=0)


@triton.jit
def spread(values):
    """Return ``[BL, BM]`` as something to multiply a tile with."""
    return values[None, None, :, :]


@triton.jit
def routing_weights(agreement, first, parents, normalizer, BM: tl.constexpr):
    """Return ``r = softmax over m`` of agreements ``[BL, BM]``.

    With a ``normalizer`` (log-sum-exp over all parents, ``[BL]``) the tile need not hold all of them.
    """
    real = (first + tl.arange(0, BM) < parents)[None, :]
    agreement = tl.where(real, agreement, float("-inf"))
    if normalizer is not None:
        return tl.exp(agreement - normalizer[:, None])
    shares = tl.exp(agreement - tl.max(agreement, axis=1)[:, None])
    return shares / tl.sum(shares, axis=1)[:, None]


@triton.jit
def unbroken(gain, known, opened):
    """Return the gain of a gate, 0 where a child behind a gate of 0 is broken: ``known``, of all parents, is no number.

    Such a child gets no gradient; any other behind a closed gate may learn to open it.
    """
    return tl.where(opened | (tl.abs(known) < float("inf")), gain, 0.0)
