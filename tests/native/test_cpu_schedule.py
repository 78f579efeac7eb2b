"""How the CPU library cuts calls of any size into items: nothing is left out, nothing takes more memory than it may.

The cut depends on the call alone, never on threads. Edges of ranges are those of csrc/cpu/block.h and forward.h.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from suite import drawn

from fastcaps.votes import SET_WINDOW, output_size

KB, MB = 1 << 10, 1 << 20
WINDOWS = [(*SET_WINDOW,), (3, 3, 1, 1, 0, 0, 1, 1), (3, 3, 2, 2, 1, 1, 1, 1), (2, 3, 2, 1, 1, 2, 3, 2)]
BOTH = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])


@dataclass(frozen=True)
class Call:
    """One call, as a schedule sees it."""

    batch: int
    grid: tuple[int, int]
    types: int
    pose: tuple[int, int, int]
    parents: int
    window: tuple[int, ...]
    groups: int  # 0: votes are the children
    lanes: int
    storage: int = 0
    bias: int = 0
    folds: bool = False
    iterations: int = 1
    results: int = 1
    copied: int = 0

    seen = property(lambda self: self.window[0] * self.window[1] * self.types)
    positions = property(lambda self: self.batch * math.prod(output_size(self.window, *self.grid)))
    number = property(lambda self: 8 if self.storage == 1 else 4)
    pose_numbers = property(lambda self: self.parents * self.pose[0] * self.pose[2])
    matrices = property(lambda self: max(self.groups, 1))
    row = property(lambda self: self.results * (self.pose_numbers + self.parents))
    matrix_numbers = property(lambda self: self.parents * self.pose[1] * self.pose[2])

    @property
    def operations(self) -> int:
        rows, depth, columns = self.pose
        return self.positions * self.seen * self.parents * rows * columns * (depth + 2)

    def cut(self, native: ModuleType, backward: bool) -> Any:
        rows, depth, columns = self.pose
        out = output_size(self.window, *self.grid)
        sizes = [self.batch, *self.grid, self.types, rows, depth, *out, self.parents, columns, self.groups]
        facts = {"storage": self.storage, "bias": self.bias, "folds": self.folds, "lanes": self.lanes,
                 "iterations": self.iterations, "state": self.pose_numbers, "results": self.row,
                 "copied": self.copied}  # fmt: skip
        return native.cpu_schedule(backward, [*sizes, *self.window], facts)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    window = draw(st.sampled_from(WINDOWS))
    grid = (1, 1) if window == SET_WINDOW else (draw(st.integers(5, 12)), draw(st.integers(5, 12)))
    few_or_many = st.one_of(st.integers(1, 12), st.integers(1, 1200))
    types = draw(few_or_many if window == SET_WINDOW else st.integers(1, 64))
    pose = draw(st.sampled_from([(4, 4, 4), (1, 8, 16), (1, 64, 64), (2, 3, 5), (1, 1, 1), (64, 1, 2), (4, 32, 32)]))
    seen = window[0] * window[1] * types
    groups = draw(st.sampled_from([seen, types, 1, 0, *(g for g in (2, 8, 32) if types % g == 0)]))
    pose = (pose[0], pose[1], pose[1]) if groups == 0 else pose
    storage = draw(st.sampled_from([0, 0, 1, 2]))
    lanes = draw(st.sampled_from([4, 8, 16])) // (2 if storage == 1 else 1)
    return Call(
        draw(st.one_of(st.integers(1, 3), st.integers(1, 600))), grid, types, pose,
        draw(st.one_of(st.integers(1, 16), st.integers(1, 600))), window, groups, lanes, storage,
        draw(st.sampled_from([0, 0, 1, 2])), draw(st.booleans()), draw(st.integers(1, 4)), draw(st.integers(0, 3)),
        draw(st.sampled_from([0, 100, 100_000])),
    )  # fmt: skip


def is_cut_once(sizes: list[int], whole: int, what: str) -> None:
    """Assert that ranges follow each other, that none is empty, and that they have everything."""
    assert all(size > 0 for size in sizes) and sum(sizes) == whole, (what, sizes, whole)


def ranges_of_children(call: Call, cut: Any, backward: bool) -> None:
    ranges, unit = cut["ranges"], call.lanes if cut["child_lanes"] else 1
    whole = call.types if backward else call.seen
    by_group = (cut["folded"] or cut["shared_weights"]) and (call.matrices > 1 or not backward)
    if by_group and ranges <= call.matrices:
        edges = [at * call.matrices // ranges for at in range(ranges + 1)]
        is_cut_once([b - a for a, b in pairwise(edges)], call.matrices, "groups")
        return
    units = -(-whole // unit)
    edges = [min(at * units // ranges * unit, whole) for at in range(ranges + 1)]
    is_cut_once([b - a for a, b in pairwise(edges)], whole, "children")


@BOTH
@drawn(150)
@given(call=calls())
def test_every_row_and_child_has_one_item(native: ModuleType, backward: bool, call: Call) -> None:
    cut = call.cut(native, backward)
    assert cut == call.cut(native, backward)
    assert cut["items"] == cut["row_groups"] * cut["ranges"]
    ranges_of_children(call, cut, backward)
    per_group, groups = cut["rows_per_group"], cut["row_groups"]
    if cut["child_lanes"]:
        assert groups * per_group >= call.positions > (groups - 1) * per_group
    elif backward:  # groups of samples, each of whole tiles but for its last
        samples = cut["samples"]
        assert groups * samples >= call.batch > (groups - 1) * samples
        assert per_group == -(-samples * call.positions // call.batch // call.lanes)
    else:
        tiles = -(-call.positions // call.lanes)
        assert groups * per_group >= tiles > (groups - 1) * per_group
    assert 1 <= cut["block_rows"] <= max(per_group, 4) and cut["block_children"] >= 1
    if not backward:
        assert per_group == cut["block_rows"]
    elif not cut["child_lanes"] and not cut["folded"]:
        assert cut["block_children"] <= max(-(-call.types // cut["ranges"]) * call.window[0] * call.window[1], 1)


@BOTH
@drawn(150)
@given(call=calls())
def test_children_lie_in_lanes_only_where_they_may(native: ModuleType, backward: bool, call: Call) -> None:
    cut = call.cut(native, backward)
    shares = cut["shared_weights"]
    alike = call.types % call.matrices == 0 and call.bias != 2
    assert cut["may_fold"] == (
        call.folds and call.storage != 1
        and (call.groups == 0 or (alike and not call.bias and call.seen >= 8 * call.matrices))
    )  # fmt: skip
    assert cut["may_share"] == (alike and (cut["may_fold"] or not call.folds))
    assert cut["folded"] == cut["may_fold"] and cut["child_lanes"] >= shares
    if cut["folded"]:
        assert not cut["keep_votes"] and cut["child_lanes"] == shares
    if call.groups == 0:
        assert not cut["keep_votes"]
    if shares:
        assert cut["may_share"] and call.storage != 1 and call.seen >= call.lanes * call.matrices
        assert 2 * call.positions <= call.lanes or (not backward and call.iterations > 1 and call.matrices == 1)
    elif cut["child_lanes"]:
        assert 4 * call.positions <= call.lanes <= call.seen and call.storage != 1
    else:
        assert call.storage == 1 or cut["folded"] or 4 * call.positions > call.lanes or call.seen < call.lanes
    if cut["stay"]:
        assert not backward and call.iterations > 1 and cut["ranges"] == cut["block_rows"] == 1
        assert cut["block_children"] == (-(-call.seen // call.lanes) if cut["child_lanes"] else call.seen)
        assert cut["keep_votes"] == (call.groups != 0 and not cut["folded"])
        assert call.matrices == 1 or not (shares or cut["folded"])


@BOTH
@drawn(150)
@given(call=calls())
def test_memory_has_limits(native: ModuleType, backward: bool, call: Call) -> None:
    """Votes of a block, parents of a block, parts of parents and of gradients: those of csrc/cpu/schedule.cpp."""
    cut = call.cut(native, backward)
    vector = call.lanes * call.number
    votes = call.pose_numbers * vector * cut["block_rows"]  # of one child, or one vector of them
    if cut["stay"]:
        kept = call.pose[0] * call.pose[1] + (call.pose_numbers if cut["keep_votes"] else 0) + call.parents + 2
        assert cut["block_children"] * kept * vector <= 1.5 * MB
    elif cut["keep_votes"]:
        assert votes <= (2 if cut["child_lanes"] and not cut["shared_weights"] else 1) * MB
        least = 4 if cut["shared_weights"] and call.row else 2
        assert cut["block_children"] * votes <= max(MB if cut["shared_weights"] else 384 * KB, least * votes)
        assert cut["block_children"] <= 16
    rows = call.pose_numbers * call.number * (1 if cut["child_lanes"] else call.lanes)
    assert cut["block_rows"] == 1 or cut["child_lanes"] or cut["block_rows"] * rows <= 2 * MB
    parts = cut["ranges"] * cut["rows"] * call.row * call.number * (1 if cut["child_lanes"] else call.lanes)
    all_votes = call.positions * call.seen * call.pose_numbers * call.number
    limit = min(max(all_votes / 64, MB), 32 * MB)
    if cut["ranges"] > 1:
        assert parts <= (min(2 * limit, 32 * MB) if backward else limit)
    if backward:
        if cut["ranges"] > 1:
            assert cut["items"] * max(call.copied * call.number, 1) <= 2 * limit
        assert cut["row_groups"] <= 64 and cut["items"] <= 64 * 64
        own = call.matrices % call.types == 0 or cut["weight_parts"] != cut["items"]
        assert cut["weight_parts"] == (cut["row_groups"] if own else cut["items"])
        if not own and cut["ranges"] > 2:
            matrices = call.matrices * call.matrix_numbers * call.number
            assert cut["ranges"] * matrices <= min(64 * MB, all_votes / 32)


@BOTH
def test_parts_of_weights_follow_from_who_owns_them(native: ModuleType, backward: bool) -> None:
    """Ranges of types share the matrices of one group, and own those of every child."""
    for groups, own in ((64, True), (9 * 64, True), (1, False), (32, False)):
        call = Call(64, (9, 9), 64, (4, 4, 4), 16, WINDOWS[1], groups, 8)
        cut = call.cut(native, True)
        assert (cut["weight_parts"] == cut["row_groups"]) >= own and cut["items"] > 1
        assert own or cut["weight_parts"] == cut["items"]


@BOTH
@drawn(100)
@given(call=calls())
def test_large_calls_keep_many_threads_busy(native: ModuleType, backward: bool, call: Call) -> None:
    """Where positions or children can be cut, and a thread's share is worth it."""
    cut = call.cut(native, backward)
    assume(call.operations >= 64 * 8 << 17 and call.batch >= 8 and not (cut["child_lanes"] or call.copied))
    assume(call.matrix_numbers * call.number * call.matrices <= 64 * KB or not backward)
    assert cut["items"] >= 4, cut


GOLDEN = {
    # the call; row_groups, ranges, rows_per_group, block_children, block_rows, keep_votes, stay, forward and backward
    "dense of 10": (
        Call(128, (1, 1), 1152, (1, 8, 16), 10, WINDOWS[0], 1152, 16, iterations=3),
        "8 8 1 16 1 1 0", "1 32 8 16 1 1 0",
    ),
    "em conv": (
        Call(16, (14, 14), 32, (4, 4, 4), 32, WINDOWS[1], 288, 16, iterations=3),
        "144 1 1 12 1 1 0", "16 2 9 11 1 1 0",
    ),
    "shared": (
        Call(4, (6, 6), 32, (4, 4, 4), 10, (6, 6, 1, 1, 0, 0, 1, 1), 32, 8, iterations=2),
        "4 8 1 16 1 1 0", "1 32 4 16 1 1 0",
    ),
    "folded": (
        Call(100, (1, 1), 512, (1, 8, 16), 10, WINDOWS[0], 32, 8, folds=True, iterations=3),
        "13 4 1 16 1 0 0", "1 16 13 8 1 0 0",
    ),
    "one sample": (
        Call(1, (1, 1), 1152, (1, 8, 16), 10, WINDOWS[0], 1152, 16, iterations=3),
        "1 14 1 72 1 1 0", "1 14 1 8 1 1 0",
    ),
    "large matrices": (
        Call(256, (1, 1), 5, (1, 64, 64), 10, WINDOWS[0], 5, 16),
        "4 1 4 2 4 1 0", "2 3 8 1 4 1 0",
    ),
    "double": (
        Call(64, (1, 1), 72, (4, 4, 4), 16, WINDOWS[0], 72, 8, storage=1),
        "8 1 1 16 1 1 0", "2 4 4 16 1 1 0",
    ),
    "copies of a bias": (
        Call(64, (1, 1), 1152, (1, 8, 16), 10, WINDOWS[0], 1152, 16, copied=60_000),
        "4 16 1 16 1 1 0", "1 8 4 16 1 1 0",
    ),
}  # fmt: skip
"""How published sizes were cut when docs/performance.md was measured: measure again where one changes."""


@pytest.mark.parametrize("name", GOLDEN)
def test_the_cuts_that_were_measured(native: ModuleType, name: str) -> None:
    call, *wanted = GOLDEN[name]
    names = ("row_groups", "ranges", "rows_per_group", "block_children", "block_rows", "keep_votes", "stay")
    found = [" ".join(str(int(call.cut(native, backward)[n])) for n in names) for backward in (False, True)]
    assert found == wanted
