"""How calls of any size are cut for a GPU, over the whole tables of kernels: nothing is left out, and blocks fit.

No kernel is compiled, and no GPU needed. What the kernels compute: ``test_cuda_kernels``.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from case_rows import OWN_POSES
from hypothesis import given
from hypothesis import strategies as st
from registry import ROUTINGS, gpu_cases, votes_of
from suite import drawn

from fastcaps.votes import SET_WINDOW, output_size

OPS = ("attention", "pooling", "gaussian")
LIMITS = (99 << 10, 163 << 10, 227 << 10)  # bytes of a block's shared memory: sm_86 and sm_120, sm_80, sm_90
PARTS = 64 << 20  # bytes of all parts of gradients whose sums have one order
POWERS = (1, 2, 4, 8, 16, 32)
every_table = pytest.mark.parametrize(
    ("op", "backward"), [(op, backward) for op in OPS for backward in (False, True)], ids=str
)


@dataclass(frozen=True)
class Call:
    batch: int
    grid: tuple[int, int]
    types: int
    pose: tuple[int, int, int]
    parents: int
    window: tuple[int, ...]
    groups: int  # 0: votes are the children
    storage: int  # 0 float32, 2 bfloat16, 3 float16
    bias: int  # 0: none, 1: one for all children, 2: one for each
    products: int = 0
    ordered: bool = False
    whole: bool = False
    multiprocessors: int = 132
    shared_limit: int = 227 << 10

    seen = property(lambda self: self.window[0] * self.window[1] * self.types)
    positions = property(lambda self: self.batch * math.prod(output_size(self.window, *self.grid)))

    @property
    def sizes(self) -> list[int]:
        rows, depth, columns = self.pose
        out = output_size(self.window, *self.grid)
        return [self.batch, *self.grid, self.types, rows, depth, *out, self.parents, columns, self.groups, *self.window]

    def facts(self, backward: bool) -> dict[str, int]:
        names = ("storage", "bias", "products", "ordered", "whole", "multiprocessors", "shared_limit")
        return {"backward": backward, **{name: int(getattr(self, name)) for name in names}}


@st.composite
def calls(draw: st.DrawFn) -> Call:
    window = draw(st.sampled_from([SET_WINDOW, (3, 3, 1, 1, 0, 0, 1, 1), (3, 2, 2, 1, 1, 1, 1, 2)]))
    grid = (1, 1) if window == SET_WINDOW else (draw(st.integers(5, 12)), draw(st.integers(5, 12)))
    types = draw(st.one_of(st.integers(1, 12), st.integers(1, 3000 if window == SET_WINDOW else 60)))
    free = st.tuples(st.integers(1, 8), st.integers(1, 70), st.integers(1, 16))
    pose = draw(st.one_of(st.sampled_from(OWN_POSES), free))
    groups = draw(st.sampled_from([window[0] * window[1] * types, types, 1, 0]))
    pose = (pose[0], pose[1], pose[1]) if groups == 0 else pose
    return Call(
        draw(st.one_of(st.integers(1, 3), st.integers(1, 3000))), grid, types, pose,
        draw(st.one_of(st.integers(1, 40), st.integers(1, 2000))), window, groups, draw(st.sampled_from([0, 2, 3])),
        draw(st.integers(0, 2)), draw(st.sampled_from([0, 1, 3])), draw(st.booleans()), draw(st.booleans()),
        draw(st.sampled_from([1, 4, 84, 132])), draw(st.sampled_from(LIMITS)),
    )  # fmt: skip


def schedule(native: ModuleType, op: str, call: Call, backward: bool) -> tuple[Any, Any]:
    """Return the schedule, and the kernel that it has chosen; skip calls that no kernel takes."""
    c = native.cuda_schedule(op, call.sizes, call.facts(backward))
    if not c:
        return None, None
    return c, native.cuda_kernels(op, backward)[c["kernel"]]


@every_table
@drawn(100)
@given(call=calls())
def test_a_block_has_everything_once_and_fits(native: ModuleType, op: str, backward: bool, call: Call) -> None:
    c, kernel = schedule(native, op, call, backward)
    if c is None:
        return
    positions_of_warp = kernel["positions"] * 32 * kernel["each"] // (c["columns"] * c["rows"] * c["parents"])
    # lanes, warps and threads
    assert c["columns"] in POWERS and c["rows"] in POWERS and c["parents"] // kernel["each"] in POWERS
    assert c["columns"] * c["rows"] * c["parents"] // kernel["each"] <= 32
    assert c["columns"] * kernel["patch_columns"] >= call.pose[2] and c["rows"] * kernel["patch_rows"] >= call.pose[0]
    assert c["tile_size"] == c["warps_positions"] * positions_of_warp
    assert c["threads"] == 32 * c["warps_parents"] * c["warps_positions"] <= kernel["threads"]
    assert 1 <= c["warps_positions"] <= 15, "there are 15 barriers of a part"
    # positions, parents, children: each once, and no block without any
    assert c["tiles"] * c["tile_size"] >= call.positions > (c["tiles"] - 1) * c["tile_size"]
    assert (c["warps_positions"] - 1) * positions_of_warp < call.positions
    assert 1 <= c["groups"] <= c["tiles"]
    block = c["warps_parents"] * c["parents"]
    assert c["parent_blocks"] * block >= call.parents > (c["parent_blocks"] - 1) * block
    assert c["chunks"] * c["chunk_children"] >= call.seen > (c["chunks"] - 1) * c["chunk_children"]
    assert c["stage"] in POWERS[:4] and c["stages"] in (2, 3) and c["chunk_children"] % c["stage"] == 0
    assert c["chunks"] == 1 or not call.whole or (backward and call.ordered)
    # shared memory: its parts follow each other, aligned, within what the machine has
    assert c["shared_bytes"] <= call.shared_limit and 1 <= c["carveout"] <= 100
    places = [c[f"shared_{name}"] for name in ("dchildren", "dweight", "dgate", "tile", "offset", "exchange")]
    weights = c["shared_weight"] // (2 if call.storage and kernel["stored"] else 1)  # it counts in floats
    assert 0 < weights <= c["float_stage"] or kernel["weight_stride"] == 0 or c["shared_float"]
    assert c["shared_seen"] < c["shared_stage"] and c["stages"] * c["shared_stage"] <= places[0]
    assert places == sorted(places) and places[-1] < c["shared_bytes"]
    assert all(place % 16 == 0 for place in (*places, c["shared_stage"], c["shared_seen"], c["shared_float"]))
    assert c["shared_weight"] % 32 == 0


@every_table
@drawn(100)
@given(call=calls())
def test_every_part_of_shared_memory_holds_its_values(native: ModuleType, op: str, backward: bool, call: Call) -> None:
    """As the kernels lay them out (csrc/cuda/stage.h): children, weights, gates, gradients, the exchange."""
    c, kernel = schedule(native, op, call, backward)
    if c is None:
        return
    _, depth, columns = call.pose
    width = 2 if call.storage else 4
    if kernel["C"]:
        child, weight = kernel["child_stride"], kernel["weight_stride"]
    else:
        child = c["rows"] * kernel["patch_rows"] * -(-depth // kernel["vector"]) * kernel["vector"]
        weight = kernel["weight_stride"]
    weight = weight if call.groups else 0
    block = c["warps_parents"] * c["parents"]
    groups = c["warps_parents"] * kernel["each"] * kernel["group_stride"] if call.groups else 0
    children, weights = c["stage"] * c["tile_size"] * child, c["stage"] * max(block * weight, groups)
    assert c["shared_weight"] >= children * 4 and c["shared_seen"] >= (children + weights) * width
    assert c["shared_stage"] - c["shared_seen"] >= c["stage"] * c["tile_size"] * 8
    widens = call.storage and not kernel["stored"]
    assert bool(c["shared_float"]) == bool(widens) and c["float_stage"] == (0 if widens else c["shared_stage"])
    end = c["stages"] * c["shared_stage"]
    if widens:
        assert c["shared_float"] == end
        end += (children + weights) * 4
    assert c["shared_dchildren"] >= end
    sizes = [c["shared_dweight"] - c["shared_dchildren"], c["shared_dgate"] - c["shared_dweight"],
             c["shared_tile"] - c["shared_dgate"]]  # fmt: skip
    if not backward:
        assert sizes[0] < 128 and sizes[1:] == [0, 0]
    else:
        slots = (1 + c["late_weights"]) * c["warps_positions"] * kernel["slot_stride"]
        row = 72 if kernel["products"] else columns  # of dV
        dweight = c["stage"] * block * (slots or c["tile_size"] * row) if kernel["C"] and call.groups else 0
        meets = c["warps_parents"] > 1 or not kernel["weight_stride"]
        dchildren = children * c["warps_parents"] * meets
        dgate = c["stage"] * c["tile_size"] * c["warps_parents"] * (meets and op != "attention")
        for size, wanted, line in zip(sizes, (dchildren, dweight, dgate), (128, 0, 0), strict=True):
            assert 4 * wanted <= size < 4 * wanted + 16 + line
    assert c["shared_offset"] - c["shared_tile"] >= c["tile_size"] * 48
    assert c["shared_exchange"] - c["shared_offset"] >= (3 + 1) * 8 * 32
    meets = c["warps_parents"] > 1 and op != "pooling"
    exchange = 2 * c["warps_parents"] * c["tile_size"] * (12 if backward else 8) if meets else 0
    turns = backward and kernel["products"] and kernel["slot_stride"]  # each warp's place for dV
    assert (
        c["shared_turn"] - c["shared_exchange"] >= exchange and c["shared_turn"] % 128 == c["shared_dweight"] % 128 == 0
    )
    assert c["shared_bytes"] - c["shared_turn"] >= (c["threads"] // 32 * 2048 if turns else 0)


@every_table
@drawn(100)
@given(call=calls())
def test_the_kernel_is_the_best_of_those_that_may(native: ModuleType, op: str, backward: bool, call: Call) -> None:
    c, kernel = schedule(native, op, call, backward)
    if c is None:
        return
    products = (0, call.products if call.groups else 0)
    own = [k for k in native.cuda_kernels(op, backward) if (k["C"], k["D"], k["E"]) == call.pose]
    fixed = [k for k in own if k["products"] in products]
    assert bool(kernel["C"]) == bool(fixed), "a pose's own kernels come first"
    if not fixed:
        free = [k for k in native.cuda_kernels(op, backward) if not k["C"]]
        least = min(padded(k, call.pose) for k in free)
        assert padded(kernel, call.pose) == least and not kernel["products"]
        held = c["rows"] * kernel["patch_rows"] * c["columns"] * kernel["patch_columns"]
        assert held == least, "lanes that hold nothing"
        return
    assert (kernel["C"], kernel["D"], kernel["E"]) == call.pose
    if op != "pooling" and call.pose[1] * call.pose[2] < 1024:  # a block for all parents, if a kernel has one
        whole = [k for k in fixed if not k["by_name"] and k["threads"] // 32 * k["parents"] * k["each"] >= call.parents]
        fixed = whole or fixed
    assert kernel["products"] == max(k["products"] for k in fixed), "tensor cores, where values may be rounded"
    a_warp = [k["parents"] * k["each"] for k in fixed if k["products"] == kernel["products"]]
    enough = [count for count in a_warp if count >= call.parents]
    assert kernel["parents"] * kernel["each"] == (min(enough) if enough else max(a_warp))


def padded(kernel: dict[str, int], pose: tuple[int, int, int]) -> float:
    """Values that a free kernel's lanes hold for a parent; infinity if 32 lanes cannot."""
    lanes = []
    for size, patch in ((pose[0], kernel["patch_rows"]), (pose[2], kernel["patch_columns"])):
        lanes.append(1 << (-(-size // patch) - 1).bit_length())
    return math.inf if math.prod(lanes) > 32 else math.prod(lanes) * kernel["patch_rows"] * kernel["patch_columns"]


@every_table
@drawn(100)
@given(call=calls())
def test_sums_in_one_order_have_one_writer(native: ModuleType, op: str, backward: bool, call: Call) -> None:
    """And their parts have a limit; without that promise, nothing is held back."""
    c, kernel = schedule(native, op, call, backward)
    if c is None or not backward or not call.ordered:
        return
    assert c["warps_positions"] == 1 or (kernel["C"] and not (call.bias and c["bias_numbers"]))
    matrices = max(call.groups, 1)
    assert c["parts_by_chunk"] == (matrices < call.seen or call.bias == 1)
    numbers = matrices * call.parents * call.pose[1] * call.pose[2] + c["bias_numbers"]
    parts = c["groups"] * (c["chunks"] if c["parts_by_chunk"] else 1)
    assert parts <= max(4 if 16 * numbers > PARTS else 1, PARTS // (4 * numbers))
    each = call.parents * call.pose[0] * call.pose[2]
    biases = {0: 0, 1: min(32, call.seen) * each, 2: call.seen * each}
    assert c["bias_numbers"] == biases[call.bias]


# ---- the tables, and what no kernel takes ----------------------------------------------------------------------------


@every_table
def test_every_kernel_of_a_table_can_run(native: ModuleType, op: str, backward: bool) -> None:
    table = native.cuda_kernels(op, backward)
    for k in table:
        assert k["threads"] % 32 == 0 and k["threads"] * k["blocks"] <= 2048 and k["positions"] >= 1
        lean = {"attention": k["C"] > 0, "gaussian": k["C"] == 4 if backward else k["C"] > 0}.get(op, False)
        assert k["products"] in ((0, 1, 3) if op == "attention" else (0,)) and k["lean"] == lean
        if not k["C"]:
            continue
        assert k["columns"] * k["parents"] <= 32 and k["columns"] * k["parents"] in POWERS
        assert k["columns"] * k["patch_columns"] == k["E"] and k["patch_rows"] == k["C"]
        assert k["D"] % k["vector"] == 0 and k["child_stride"] >= k["C"] * k["D"]
        assert k["weight_stride"] == 0 or k["weight_stride"] >= k["D"] * k["E"]
        assert k["slot_stride"] == 0 or k["slot_stride"] >= k["D"] * k["E"]
        assert k["group_stride"] >= k["parents"] * k["weight_stride"]
    assert {(k["patch_rows"] > 1) for k in table if not k["C"]} == {True, False}, "any matrix, any vector"
    # a lane's registers hold its sums or its query: FreePose has 16 values, or 8 of one row
    assert all(k["patch_rows"] * k["patch_columns"] * k["each"] * k["positions"] <= 128 for k in table)


@pytest.mark.parametrize("op", OPS)
@drawn(80)
@given(pose=st.tuples(st.integers(1, 40), st.integers(1, 140), st.integers(1, 300)), identity=st.booleans())
def test_a_pose_is_refused_where_no_schedule_has_it(
    native: ModuleType, op: str, pose: tuple[int, int, int], identity: bool
) -> None:
    pose = (pose[0], pose[1], pose[1]) if identity else pose
    call = Call(1, (1, 1), 1, pose, 32, SET_WINDOW, 0 if identity else 1, 0, 0, 0, False, False, 1, LIMITS[0])
    taken = [bool(native.cuda_schedule(op, call.sizes, call.facts(backward))) for backward in (False, True)]
    why_not = native.cuda_refusal(op, *pose, identity)
    assert (why_not == "") == all(taken)
    fits = min(padded(k, pose) for k in native.cuda_kernels(op, False) if not k["C"]) < math.inf
    assert taken[0] <= fits and (fits or "its 32 lanes hold" in why_not)


@pytest.mark.parametrize("op", OPS)
@drawn(80)
@given(call=calls())
def test_one_launch_for_all_iterations(native: ModuleType, op: str, call: Call) -> None:
    """A block that sees all children of its positions and, where they compete, all parents."""
    why_not = native.cuda_routing_refusal(op, call.sizes, call.facts(False))
    if why_not:
        return
    whole = native.cuda_schedule(op, call.sizes, {**call.facts(False), "whole": True})
    assert whole["chunks"] == 1 and (whole["parent_blocks"] == 1 or op == "pooling")


def test_why_iterations_are_not_one_launch(native: ModuleType) -> None:
    def reasons(call: Call) -> list[str]:
        return [native.cuda_routing_refusal(op, call.sizes, call.facts(False)) for op in OPS]

    call = Call(64, (1, 1), 70, (4, 4, 4), 10, SET_WINDOW, 70, 0, 0, multiprocessors=4)
    assert reasons(call) == ["", "", ""]
    many = reasons(Call(64, (1, 1), 7, (4, 4, 4), 1100, SET_WINDOW, 7, 0, 0, multiprocessors=4))
    assert ["1100 parents" in answer for answer in many] == [True, False, True] and many[1] == ""
    long = reasons(Call(1, (1, 1), 20_000, (4, 4, 4), 10, SET_WINDOW, 1, 0, 0, multiprocessors=4))
    assert all("20000 children" in answer for answer in long)
    small = Call(64, (1, 1), 2, (8, 64, 64), 10, SET_WINDOW, 2, 0, 0, multiprocessors=4, shared_limit=1 << 10)
    assert all("shared memory" in answer for answer in reasons(small))


def test_what_cannot_be_counted(native: ModuleType) -> None:
    """In 30 bits each: children, parents, places, and parents times a child's values."""
    least = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, *SET_WINDOW]
    assert native.cuda_countable(least)
    for places in ([3], [8], [1], [6]):  # N, M, H, Ho
        for exponent in (29, 30):
            sizes = list(least)
            sizes[places[0]] = 1 << exponent
            assert native.cuda_countable(sizes) == (exponent < 30), places
    assert not native.cuda_countable([1, 1, 1, 1, 1 << 10, 1 << 10, 1, 1, 1 << 10, 1, 1, *SET_WINDOW])


@drawn(200)
@given(st.integers(0, 2**31 - 1), st.one_of(st.integers(1, 100), st.integers(1, 2**30)))
def test_a_division_by_multiplication_is_exact(native: ModuleType, number: int, divisor: int) -> None:
    assert native.divided(number, divisor) == [*divmod(number, divisor)]
    below = number // divisor * divisor
    assert native.divided(below, divisor) == [below // divisor, 0]
    assert below == 0 or native.divided(below - 1, divisor) == [below // divisor - 1, divisor - 1]


# ---- schedules that are told what to be ------------------------------------------------------------------------------

CONV = Call(128, (16, 16), 32, (4, 4, 4), 32, (3, 3, 2, 2, 0, 0, 1, 1), 288, 0, 0)  # tsai-c10-conv1


def told(setting: str) -> Any:
    return mock.patch.dict(os.environ, FASTCAPS_SCHEDULE=setting)


@pytest.mark.parametrize(
    ("told_to", "fields"),
    [
        ("kernel=16x2x1-384x1,warps_positions=6", {"warps_positions": 6, "threads": 192, "parents": 32}),
        ("stage=2,chunks=3", {"stage": 2, "chunks": 3, "chunk_children": 96}),
        ("warps_parents=1,groups=7", {"warps_parents": 1, "groups": 7}),
        ("kernel=8x2x1-256x1,warps_parents=1,warps_positions=8", {"parent_blocks": 2, "warps_positions": 8}),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_an_experiment_is_followed(native: ModuleType, told_to: str, fields: dict[str, int], backward: bool) -> None:
    facts, other = CONV.facts(backward), CONV.facts(not backward)
    plain = [native.cuda_schedule("attention", CONV.sizes, one) for one in (facts, other)]
    with told(f"{'backward' if backward else 'forward'}:{told_to}"):
        c = native.cuda_schedule("attention", CONV.sizes, facts)
        assert {key: c[key] for key in fields} == fields
        assert native.cuda_schedule("attention", CONV.sizes, other) == plain[1], "the other direction is left alone"
    assert native.cuda_schedule("attention", CONV.sizes, facts) == plain[0], "what was kept is forgotten"


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("forwards:stage=1", "wants forward:... or backward:..., got forwards:stage=1"),
        ("forward:stages=1", "got stages=1"),
        ("forward:stage=0", "stage must be a number from 1, got 0"),
        ("forward:kernel=", "got kernel="),
        ("forward:stage=3", "a stage has 1, 2, 4 or 8 children"),
        ("forward:kernel=9x9x9-256x1", "no kernel 9x9x9-256x1 takes this call"),
        ("forward:kernel=8x2x1-256x1-tf32", "no kernel 8x2x1-256x1-tf32 takes this call"),  # nothing may be rounded
        ("forward:warps_positions=9", "at most 8 warps on positions"),
        ("forward:warps_parents=2", "at most 1 warps on parents"),
        ("forward:chunks=37", "its 288 children make no 37 ranges of whole stages"),
        ("forward:groups=9999999", "fewer than groups"),
        ("forward:warps_positions=8,stage=8", ""),
    ],
)
def test_an_experiment_that_cannot_be_says_why(native: ModuleType, setting: str, reason: str) -> None:
    with told(setting):
        found = native.cuda_experiment_refusal("attention", CONV.sizes, CONV.facts(False))
        assert reason in found and bool(found) == bool(reason)
        assert bool(native.cuda_schedule("attention", CONV.sizes, CONV.facts(False))) == (not reason)
        assert native.cuda_refusal("attention", 4, 4, 4, False) == "", "of poses nothing is told"


def test_an_experiment_keeps_to_what_a_call_needs(native: ModuleType) -> None:
    def why_not(setting: str, backward: bool, **facts: bool | int) -> str:
        with told(setting):
            asked = {**CONV.facts(backward), **facts}
            found: str = native.cuda_experiment_refusal("attention", CONV.sizes, asked)
            return found

    assert "one block sees all children" in why_not("forward:chunks=2", False, whole=True)
    assert "order of sums" in why_not("backward:chunks=2", True, ordered=True)
    assert "bytes of shared memory" in why_not("forward:warps_positions=8,stage=8", False, shared_limit=40 << 10)


@every_table
def test_names_of_kernels_are_their_own(native: ModuleType, op: str, backward: bool) -> None:
    table, names = native.cuda_kernels(op, backward), native.cuda_instances(op, backward)
    keys = [(k["C"], k["D"], k["E"], name) for k, name in zip(table, names, strict=True)]
    assert len({*keys}) == len(keys)


def test_kept_schedules_are_those_of_their_calls(native: ModuleType) -> None:
    """Of more calls than a thread keeps."""
    calls = [replace(CONV, batch=batch) for batch in range(1, 400)]
    first, again = ([native.cuda_schedule("attention", c.sizes, c.facts(False)) for c in calls] for _ in range(2))
    assert first == again
    assert all(c["tiles"] == -(-call.positions // c["tile_size"]) for c, call in zip(first, calls, strict=True))


@every_table
def test_every_kernel_has_a_case(native: ModuleType, op: str, backward: bool) -> None:
    """A kernel that no case of the registry reaches is a path without proof."""
    routing = next(one for one in ROUTINGS if one.stem == op)
    table, met = native.cuda_kernels(op, backward), set()
    for case in gpu_cases(routing):
        storage = 0 if case.dtype.itemsize == 4 else 2
        for products in {0, 1, 3} if routing.rounds else {0}:
            facts = {"backward": backward, "storage": storage, "bias": 0, "products": products, "ordered": 0,
                     "whole": 0, "multiprocessors": 4, "shared_limit": 227 << 10}  # fmt: skip
            c = native.cuda_schedule(op, list(votes_of(routing.call(case).given).sizes), facts)
            met |= {c["kernel"]} if c else set()
    assert met == {k for k, kernel in enumerate(table) if not kernel["by_name"]}
