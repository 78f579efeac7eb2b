"""The Triton kernels of every routing against the reference, and what they compile to.

How they are run and judged: ``triton_cases``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case
from features import Largest
from registry import ATTENTION, GAUSSIAN, POOLING, ROUTINGS, Routing, gpu_cases
from suite import every_routing, hold_each_gradient_alone, hold_far_from_zero
from triton_cases import (
    DEVICE,
    SERVED,
    TINY,
    WIDE,
    backward_of,
    check,
    compiled_here,
    decisions,
    every_decision,
    function,
    hold_compiled,
    interpret,
    kernels,
    launches,
    module_of,
    schedule,
    static,
    steps,
)

from fastcaps.rules import Rule
from fastcaps.triton_kernels import call
from fastcaps.votes import SET_WINDOW

interpreted = pytest.mark.skipif(DEVICE == "cuda", reason="the kernels run on a GPU here")
LIMITS = WIDE if DEVICE == "cpu" else {}


def _cost(case: Case) -> int:
    """Return how long the interpreter takes, about: children that programs walk."""
    positions = case.numbers[0] * case.numbers[1] * case.numbers[2]
    size = case.parents * case.pose[0] * case.pose[2]
    return case.seen * case.iterations * -(-positions * size // 4096)


def _registered() -> list[tuple[Routing, Case]]:
    """Return the registry's cases that the interpreter is soon done with; for a GPU all of them."""
    every = [(routing, case) for routing in ROUTINGS for case in gpu_cases(routing)]
    return [(one, case) for one, case in every if DEVICE == "cuda" or _cost(case) <= 20]


def _small(routing: Routing, **changes: Any) -> Case:
    """Return a case with overlapping windows, some of whose children are in the padding."""
    window = (3, 1, 1, 1, 1, 0, 1, 1)
    usual = {"batch": 1, "grid": (2, 1), "types": 1, "window": window, "bias": "IM", "gate": "silent", "betas": "IM"}
    return routing.make("small", **{**usual, **changes})


# ---- against the reference ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("routing", "case"), _registered(), ids=str)
def test_forward_and_every_gradient(routing: Routing, case: Case) -> None:
    check(routing, case, **LIMITS)


TILES = {"forward": 16, "backward": 8, "warps": (1, 4), "positions": 8}  # the least that take matrix products
DEEP = {"parents": 17, "pose": (2, 9, 2)}  # two tiles, and a depth that makes matrix products pay
SAME = {"groups": "none", "pose": (2, 3, 3), "start": False, "iterations": 2, "how": 2, "detach": True}
SAME |= {"grid": (2, 2), "window": (2, 1, 1, 1, 0, 0, 1, 1)}
SET = {"grid": (1, 1), "window": SET_WINDOW}
BARE: dict[str, Any] = {
    "how": -1, "bias": None, "gate": None, "betas": "11", "normalize": False, "detach": True, "log_weight": False,
    "grid": (2, 3), "window": (2, 2, 1, 1, 0, 0, 1, 1),  # none is in the padding
}  # fmt: skip
WINDOWED = {"grid": (3, 4), "types": 2, "window": (2, 2, 2, 1, 1, 1, 2, 3)}  # no two sizes alike
WAYS: dict[str, Any] = {  # the routings that go this way, options, limits, fields
    "tiny": ([ATTENTION, POOLING], 0, TINY, {}),  # parents and children are split over programs
    "tiny-first-iteration": (ROUTINGS, 1, TINY, {"how": 0, "start": False, "iterations": 2}),
    "tiny-ordered": ([GAUSSIAN], 1, TINY, {}),
    "tiny-bare": ([ATTENTION], 0, TINY, {"bias": None, "gate": None}),
    "tiny-same": ([POOLING], 0, TINY, SAME),  # votes without matrices
    "tiny-same-ordered": ([ATTENTION], 1, TINY, SAME),
    "set": (ROUTINGS, 0, {**LIMITS, "resident": 0}, {**SET, "iterations": 2, "how": 2, "types": 3}),  # whole programs
    "empty": (ROUTINGS, 0, {}, {"batch": 0}),
    # what fills a block's last tile is 0 to LayerNorm
    "no-eps": ([ATTENTION, GAUSSIAN], 0, LIMITS, {**WINDOWED, "eps": 0.0, "gate": None}),
    # NaN behind a gate of 0
    "broken": (ROUTINGS, 0, LIMITS, {**WINDOWED, "gate": "broken", "iterations": 2, "how": -1}),
    "tf32-ordered": ([ATTENTION], 3, TILES, {"batch": 5, **DEEP}),  # several blocks of positions
    "tf32-bare": ([POOLING], 3, TILES, {"batch": 5, **DEEP, **BARE}),
    # products of that type, too
    "bfloat16": ([GAUSSIAN], 0, TILES, {"batch": 3, **DEEP, "dtype": torch.bfloat16, "eps": 0.3}),
    "bfloat16-ordered": ([POOLING], 1, TILES, {"batch": 3, **DEEP, "dtype": torch.bfloat16}),
    "float16": ([ATTENTION], 0, LIMITS, {"dtype": torch.float16, "iterations": 2, "eps": 0.3}),
}
PLACES = [(routing, way) for way, (routings, *_) in WAYS.items() for routing in routings]


def _way(routing: Routing, way: str) -> Case:
    """Return a case whose parents take two tiles, where those are small."""
    usual = {"parents": 5, "pose": (3, 2, 2), **WAYS[way][3]}  # C + E is not C * E
    if "how" in usual:  # the first or the last of a routing's rules
        usual["rule"] = [fields["rule"] for fields in routing.table.rules.values()][usual.pop("how")]
    return _small(routing, **usual)


@pytest.mark.parametrize(("routing", "way"), PLACES, ids=str)
def test_ways_to_run(routing: Routing, way: str) -> None:
    """Two sweeps, ranges of children that the finishing kernel joins, a fixed order, matrix products."""
    _, options, limits, _ = WAYS[way]
    check(routing, _way(routing, way), options, **limits)


@interpreted
@pytest.mark.parametrize(("routing", "name"), SERVED, ids=str)
def test_ops_served_by_the_interpreter(routing: Routing, name: str) -> None:
    """All iterations by the public op and its autograd, on CPU tensors with TRITON_INTERPRET=1; as a set, too."""
    call = routing.call(routing.case(name))
    found = interpret("triton_cases.training", routing.stem, routing.case(name))
    for one, results in zip((call, call.as_set()), found, strict=True):
        one.bar().hold(results)


@interpreted
@pytest.mark.parametrize("options", [0, 1, 2])
def test_offsets_beyond_int32(options: int) -> None:
    """Rows and columns of poses and of matrices lie 2**30 numbers apart."""
    near, far = interpret("triton_cases.near_and_far", options)
    for one, other in zip(near, far, strict=True):
        assert torch.equal(one, other) and one.isfinite().all()


@pytest.mark.parametrize(
    ("sizes", "far", "padding", "bits"),
    [
        ({}, "", 0, 32),
        ({"children": (1, 3, 1, 2, 3, 3)}, "children", 0, 32),
        ({"children": (1, 3, 1, 2, 3, 3)}, "children", 1, 64),  # a window begins before the first row
        ({"children": (1, 4, 1, 2, 3, 3)}, "children", 0, 64),
        ({"children": (1, 4, 1, 2, 3, 3), "gate": (1, 4, 1, 2)}, "gate", 0, 64),
        ({"weight": (2, 4, 3, 3)}, "weight", 0, 64),
        ({"weight": (2, 1 << 28, 3, 3)}, "", 0, 64),  # dense gradients reach as far
        ({"children": (1 << 28, 1, 1, 2, 3, 3)}, "", 0, 64),
    ],
)
def test_offsets_are_as_wide_as_tensors_reach(
    sizes: dict[str, tuple[int, ...]], far: str, padding: int, bits: int
) -> None:
    """The second dimension of the ``far`` tensor has a stride of 2**29; the others' numbers are all the same one."""
    tensors = {"children": (1, 1, 1, 2, 3, 3), "weight": (2, 1, 3, 3), "gate": (1, 1, 1, 2), **sizes}
    one = torch.empty(1, device="meta")
    given = {
        name: one.as_strided(shape, [(1 << 29) * (k == 1 and name == far) for k in range(len(shape))])
        for name, shape in tensors.items()
    }
    votes = (given["children"], given["weight"], None, given["gate"], tensors["weight"][1])
    made = call.Call(module_of(ATTENTION.name).ROUTING, (*votes, (1, 1, 1, 1, padding, 0, 1, 1)))
    assert str(made.votes.INDEX.value) == f"int{bits}"


# ---- promises -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("routing", "options"), [(ATTENTION, 1), (POOLING, 0)], ids=str)
def test_only_the_gradients_asked_for(routing: Routing, options: int) -> None:
    hold_each_gradient_alone(lambda call: backward_of(routing, call, options), routing, _small(routing), most=100)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter runs one program after another")
@every_routing
def test_ordered_results_have_the_same_bits(routing: Routing) -> None:
    back = routing.backward_call(_small(routing))
    first, again = (backward_of(routing, back, 1) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, again[name]), name


@pytest.mark.parametrize("start", [False, True])
def test_variances_of_votes_far_from_zero(start: bool) -> None:
    """Over ranges of children."""
    hold_far_from_zero(lambda call: call.forward(kernels(GAUSSIAN.name, resident=64)), 41, start)


# ---- schedules, refusals, what would be compiled ---------------------------------------------------------------------


def test_refusals_say_why() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert call.served_devices() == ("cuda", "xpu")
    assert interpret("fastcaps.triton_kernels.call.served_devices") == ("cpu", "cuda")
    assert interpret("fastcaps.triton_kernels.attention.refusal", cpu, torch.float32, (4, 4, 4), 32) is None
    for routing in ROUTINGS:
        refusal = module_of(routing.name).refusal
        assert refusal(gpu, torch.float32, (4, 4, 4), 512, True) is None
        assert "on cpu" in refusal(cpu, torch.float32, (4, 4, 4), 32, True)
        assert "float64" in refusal(gpu, torch.float64, (4, 4, 4), 32, True)
        assert re.search("(8192|4096) numbers", refusal(gpu, torch.float32, (128, 4, 128), 32, True))


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_one_iteration_at_a_time(routing: Routing) -> None:
    call = routing.call(_small(routing, iterations=2))
    with pytest.raises((ValueError, RuntimeError), match="one iteration at a time, got 2"):
        call.forward(kernels(routing.name))


@pytest.mark.parametrize("products", [None, False, True])
@pytest.mark.parametrize("pose", [(1, 1, 1), (4, 4, 4), (6, 6, 6), (5, 3, 7), (1, 64, 64), (64, 64, 64), (1, 3, 8192)])
def test_schedules_cover_everything_and_fit(pose: tuple[int, int, int], products: bool | None) -> None:
    for positions, children, parents in ((1, 1, 1), (6272, 288, 32), (128, 800, 10), (3, 7, 30_000), (2, 10**6, 64)):
        facts = schedule.Facts(positions, children, parents, pose, products=products)
        for backward in (False, True):
            made = schedule.schedule(facts, backward=backward)
            assert made.positions * made.blocks >= positions and made.parents * made.tiles >= parents
            assert children <= made.per_split * made.splits < children + made.per_split
            assert made.rows >= pose[0] and made.columns >= pose[2]
            assert made.numbers <= 32 * made.warps * (16 if backward else 32) and made.warps <= 16
            if made.depth or made.votes:
                assert made.positions * made.rows >= 16 and made.parents * made.columns >= 16
        same = replace(facts, traits=schedule.Traits(same_votes=True))
        assert schedule.schedule(same).votes == schedule.schedule(same, backward=True).votes
        made = schedule.matrix_schedule(facts)
        assert made.position_splits * made.per_split >= made.tile.blocks
        assert made.splits * made.group_children >= children
    votes = (torch.empty(128, 16, 16, 32, 8, 8, device="meta"), torch.empty(288, 32, 8, 8, device="meta"), None, None)
    for bits in (0, 2):  # TF32 is what matrix products need
        asked = call.Call(module_of(ATTENTION.name).ROUTING, (*votes, 32, (3, 3, 2, 2, 0, 0, 1, 1)), bits)
        assert bool(asked.schedule(backward=False).votes) == (bits == 2)


def _step(routing: Routing, case: Case, options: int = 0, **chosen: Any) -> Callable[[], None]:
    """Return a training step of an iteration, on tensors of no memory."""
    with torch.device("meta"):
        call, back = routing.call(case), routing.backward_call(case)

    def step() -> None:
        function(routing.name)(*call.given.values(), options, **chosen)
        function(f"{routing.name}_backward")(*back.given.values(), options, **chosen)

    return step


@pytest.mark.parametrize(
    ("routing", "ordered", "sizes"),
    [(ATTENTION, 0, (4, 256, 1024)), (POOLING, 1, (4, 256, 1024)), (GAUSSIAN, 1, (1, 16_384, 64))],
    ids=str,
)
def test_workspace_never_grows_with_children_times_parents(
    routing: Routing, ordered: int, sizes: tuple[int, int, int]
) -> None:
    """Every allocation of a call is seen, on the meta device."""
    batch, children, parents = sizes
    large = {"batch": batch, "types": children, "parents": parents, "pose": (1, 16, 16), "groups": "one"}
    step = _step(routing, routing.make("large", **large), ordered, limits=schedule.Limits(resident=1))
    with Largest() as made:
        found = launches(step)
    # of many children that share matrices programs do not add to the same ones
    assert f"{routing}_matrix_backward_kernel" in {launch.name for launch in found}
    tiles = 132 * 32 * 32  # numbers that a device's resident warps hold
    assert made.numbers <= max(batch * children * 16, batch * parents * 16, parents * 512, tiles)
    assert made.numbers < batch * children * parents


def _large(
    routing: Routing, parents: int, pose: tuple[int, int, int], spills: int = 0, **changes: Any
) -> tuple[Routing, Case, int]:
    sizes = {"batch": 128, "types": 200, "parents": parents, "pose": pose, **changes}
    return routing, routing.make("large", **sizes), spills


SHAPES = {  # and how many registers may spill
    "tsai": _large(ATTENTION, 32, (4, 4, 4), 6),
    "tsai-6x6": _large(ATTENTION, 20, (6, 6, 6), 24),
    "tsai-8x8": _large(ATTENTION, 16, (8, 8, 8), 4),
    "tsai-1x64": _large(ATTENTION, 10, (1, 64, 64), 24),
    "sabour": _large(ATTENTION, 10, (1, 8, 16), 4),
    "zhao": _large(POOLING, 1, (1, 16, 16), types=256, groups="none"),
    "zhao-512": _large(POOLING, 512, (1, 16, 16), types=256, groups="none"),
    "pool-4x4": _large(POOLING, 32, (4, 4, 4)),
    "hinton": _large(GAUSSIAN, 32, (4, 4, 4), rule=Rule.EM, gate="some"),
    "heinsen-norb": _large(GAUSSIAN, 64, (4, 4, 4), batch=20, types=640, groups="one", gate="some"),
    "heinsen-norb-2": _large(GAUSSIAN, 5, (4, 4, 4), 2, batch=256, types=64, gate="some", betas="IM"),
    "heinsen-sst": _large(GAUSSIAN, 64, (1, 64, 2), 6, batch=20, types=640, groups="one", gate="some"),
    "li-capnet": _large(GAUSSIAN, 512, (1, 8, 16), 6, gate="some", rule=Rule.EM),
}
COMPILED = [(shape, "sm_90", 0) for shape in SHAPES] + [("tsai", "sm_90", 6), ("hinton", "sm_90", 1)]
COMPILED += [("tsai-1x64", "sm_80", 2), ("pool-4x4", "sm_100", 0), ("tsai-1x64", "gfx942", 0), ("hinton", "gfx942", 0)]
SOON = [("tsai", "sm_90", 2)]


@compiled_here
@pytest.mark.parametrize(
    ("shape", "target", "options"), [*SOON, *(pytest.param(*each, marks=pytest.mark.slow) for each in COMPILED)]
)
def test_compiles_without_a_gpu(shape: str, target: str, options: int) -> None:
    """Every kernel of a training step, for GPUs that are not there."""
    routing, case, spills = SHAPES[shape]
    wanted = {f"{routing}_forward_kernel", f"{routing}_backward_kernel"}
    wanted |= {f"{routing}_matrix_backward_kernel"} if options & 1 and case.groups != "none" else set()
    hold_compiled(launches(_step(routing, case, options)), target, spills, wanted)


@compiled_here
def test_every_decision_has_a_way_and_is_translated() -> None:
    """What any case would have compiled for a GPU, Triton accepts, and the calls above interpret.

    Versions of Triton differ in the Python that they take.
    """
    met: set[str] = set()
    for routing, way in PLACES:
        _, options, limits, _ = WAYS[way]
        met = met.union(*map(decisions, steps(routing, _way(routing, way), (options,), **limits)))
    asked = every_decision(few=True)
    mine = [launch for launch in asked if not launch.name.startswith(("vote", "_squash"))]
    missing = sorted(set().union(*map(decisions, mine)) - met)
    assert not missing or DEVICE == "cuda", "\n".join(missing)
    for launch in asked:
        static.translate("sm_90", launch)


@compiled_here
@pytest.mark.slow
def test_every_decision_compiles() -> None:
    for launch in every_decision():
        assert 0 < static.compiled_for("sm_90", launch).n_regs <= 512, launch.name
