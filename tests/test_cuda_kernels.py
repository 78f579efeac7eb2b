"""The CUDA kernels of every routing against the reference: forward, every gradient, and what must hold besides.

How they are run and judged: ``cuda_target``. NaN, infinity and what rounding costs: ``test_cuda_extremes``. How calls
are cut, over the tables of all kernels: ``native/test_cuda_schedule``.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import Any

import pytest
import torch
from case_rows import OWN_POSES
from cases import GPU_DTYPES, Case
from cuda_on_cpu import build
from cuda_target import ON_DEVICE, OPTIONS, Target, mixed_order, on_every_target, question
from hypothesis import given
from hypothesis import strategies as st
from registry import ATTENTION, GAUSSIAN, POOLING, ROUTINGS, BackwardCall, Call, Routing, gpu_cases
from suite import drawn, every_routing, hold_each_gradient_alone, random_cases

from bench import sweep
from fastcaps.rules import Rule

autoused_order = pytest.fixture(autouse=True)(mixed_order)

HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}
PATHS = {
    "attention": {
        "fast": "plain-4x4-5 plain-1x64-5 pose-1x16 primes conv sweeps-any one-position same-2x3 broken stay-float32 "
                "pose-4x4:f16 primes:bf16 broken-half bias-1x64 largest-pose long-vector tall-pose "
                "nobody-no-eps-one-5 bias-6x6:bf16 bias-6x6:f16 plain-6x6-5:f16 conv:bf16 "
                "pose-1x16:bf16 plain-1x16-5:f16",
        "ordered": "padded conv sweeps one-position-any same-2x3 plain-1x64-5",
        "tf32": "plain-4x4-5 bias-1x64 conv sweeps plain-1x64-5 bias-6x6 plain-6x6-5 pose-1x8 plain-1x8-5 plain-1x16-5",
        "tf32-ordered": "plain-4x4-33",
        "tf32x3": "plain-4x4-5 pose-4x4 plain-6x6-5",
    },
    "pooling": {
        "fast": "pose-4x4 same-4x4 one-parent pose-1x8 pose-1x16 primes one-position sharp broken stay-float32 "
                "primes:f16 one-parent-shared same-1x16-children:bf16 sweeps-any denormal denormal-1x16",
        "ordered": "padded conv one-position same-2x3",
    },
    "gaussian": {
        "fast": "pose-4x4 pose-1x16 primes padded-em sweeps-means one-position one-position-em broken stay-float32 "
                "primes:f16 pose-4x4:bf16 nobody-no-eps-em shut-no-eps-heinsen few-effective-children lean-em lean-40 "
                "lean-70 lean-padded lean-ranges lean-broken lean-em:bf16 lean-1x16 lean-1x16-first "
                "lean-1x16-first:f16 pose-1x8 gated gated-first gated-later gated-padded gated-ranges gated-shared "
                "gated-shared:bf16",
        "ordered": "padded conv sweeps one-position-any gated gated-first gated-padded",
    },
}  # fmt: skip
"""Cases of every kernel of the few poses, fused and not, lean and not; of parents in one block and in several; of
children in one range and in several; of a set, a window, votes that are the children; of every type."""
Run = tuple[Routing, Case, str]


def paths(ordered: bool) -> list[Run]:
    """Return the runs of ``PATHS``, those whose sums have one order, or the others."""
    found = []
    for routing in ROUTINGS:
        for option, names in PATHS[routing.stem].items():
            for one in names.split() if option.endswith("ordered") == ordered else ():
                name, _, dtype = one.partition(":")
                case = routing.case(name)
                found.append((routing, replace(case, dtype=HALVES[dtype]) if dtype else case, option))
    return found


def every_run() -> list[Run]:
    """Return every case of the registry, and those that tensor cores take, as they round and as they do not.

    Not the peaked ones: there the raw kernels' sum over children loses a shared bias's gradient, which the op computes
    from those of the means.
    """
    found = [(one, case, "fast") for one in ROUTINGS for case in gpu_cases(one) if not case.name.startswith("peaked")]
    rounded = ("plain-4x4-5", "plain-4x4-33", "pose-4x4", "conv", "plain-6x6-5", "bias-6x6", "plain-8x8-5", "bias-8x8",
               "pose-1x8", "plain-1x8-13", "pose-1x16", "plain-1x16-5",
               "plain-1x64-5", "bias-1x64", "sweeps")  # fmt: skip
    return found + [(ATTENTION, ATTENTION.case(name), option) for option in ("tf32", "tf32x3") for name in rounded]


# ---- against the reference ------------------------------------------------------------------------------------------


@on_every_target
@pytest.mark.parametrize(("routing", "case", "option"), paths(ordered=False), ids=str)
def test_forward_and_every_gradient(routing: Routing, case: Case, option: str, target: Target) -> None:
    target.check(routing, case, option)


@on_every_target
@pytest.mark.parametrize(("routing", "case", "option"), paths(ordered=True), ids=str)
def test_ordered_results_have_the_same_bits(routing: Routing, case: Case, option: str, target: Target) -> None:
    """Whatever the order in which blocks and threads come: on a device that is chance, here it is chosen."""
    target.set_order("forward")
    first = target.check(routing, case, option)
    target.set_order("shuffled")
    for found, wanted in zip(target.run(routing, case, option), first, strict=True):
        for name, value in found.items():
            assert torch.equal(value.nan_to_num(), wanted[name].nan_to_num()), name


REVERSED = {
    "fast": "plain-4x4-5 stay-float32 one-parent-squash whole-grid ranges-of-iterations broken-children sweeps "
            "conv one-position same-2x3 primes primes:bf16 pose-1x16:f16",
    "ordered": "conv stay-float32 sweeps whole-grid",
}  # fmt: skip
"""Cases of every rule: with iterations in one launch and in several, with a first query and without."""


@on_every_target
@pytest.mark.parametrize("detach", [False, True], ids=["all", "detached"])
@pytest.mark.parametrize(("option", "name"), [(o, n) for o, names in REVERSED.items() for n in names.split()])
def test_gradients_through_all_iterations(option: str, name: str, detach: bool, target: Target) -> None:
    name, _, dtype = name.partition(":")
    case = replace(ATTENTION.case(name), detach=detach)
    case = replace(case, dtype=HALVES[dtype]) if dtype else case
    with target.guarded():
        found = target.reverse(ATTENTION.call(case), option)
    ATTENTION.bar(case).hold(found)


GAUSSIANS_REVERSED = {
    "fast": "pose-4x4-20 conv primes primes:bf16 pose-1x16:f16 sharing-float32",
    "ordered": "conv pose-4x4-20",
}


@on_every_target
@pytest.mark.parametrize(("option", "name"), [(o, n) for o, names in GAUSSIANS_REVERSED.items() for n in names.split()])
@pytest.mark.parametrize("rule", [Rule.EM, Rule.HEINSEN, Rule.KMEANS], ids=lambda rule: rule.name)
def test_gradients_through_all_iterations_of_gaussians(option: str, name: str, rule: Rule, target: Target) -> None:
    """With a bias of every child, one that children share, and one that parents share, too."""
    name, _, dtype = name.partition(":")
    for bias, iterations in (("IM", 2), ("1M", 2), ("11", 2), (None, 3)):
        case = replace(GAUSSIAN.case(name), rule=rule, start=False, bias=bias, iterations=iterations)
        case = replace(case, dtype=HALVES[dtype]) if dtype else case
        with target.guarded():
            found = target.reverse(GAUSSIAN.call(case), option)
        GAUSSIAN.bar(case).hold(found)


POOLING_REVERSED = {
    "fast": "primes primes:bf16 pose-1x16:f16 padded children-float32 conv broken-children",
    "ordered": "conv children-float32",
}


@on_every_target
@pytest.mark.parametrize("detach", [False, True], ids=["all", "detached"])
@pytest.mark.parametrize(("option", "name"), [(o, n) for o, names in POOLING_REVERSED.items() for n in names.split()])
@pytest.mark.parametrize("rule", [Rule.UNIT, Rule.SQUASH], ids=lambda rule: rule.name)
def test_gradients_through_all_iterations_of_pooling(
    option: str, name: str, rule: Rule, detach: bool, target: Target
) -> None:
    name, _, dtype = name.partition(":")
    for start, iterations in ((False, 3), (True, 3), (True, 1)):
        case = replace(POOLING.case(name), rule=rule, start=start, iterations=iterations, detach=detach)
        case = replace(case, dtype=HALVES[dtype]) if dtype else case
        with target.guarded():
            found = target.reverse(POOLING.call(case), option)
        POOLING.bar(case).hold(found)


@on_every_target
@pytest.mark.parametrize("start", [False, True], ids=["zero", "given"])
@pytest.mark.parametrize("rule", [Rule.LAYER_NORM, Rule.PLAIN, Rule.SQUASH], ids=lambda rule: rule.name)
@pytest.mark.parametrize("types", [3, 200], ids=["fused", "split"])
def test_four_iterations(types: int, rule: Rule, start: bool, target: Target) -> None:
    """Backward each gets the gradient of the query from the one behind, or from all of them."""
    case = Case("four", rule, batch=2, types=types, parents=5, pose=(4, 4, 4), gate="some", iterations=4, start=start)
    ATTENTION.bar(case).hold(target.reverse(ATTENTION.call(case)))


on_all_poses = pytest.mark.parametrize(
    "target",
    [Target("cpu", build.ALL_POSES), *([Target("cuda")] if ON_DEVICE else [])],
    ids=lambda target: "all-poses" if target.device == "cpu" else "on-cuda",
)


@pytest.mark.slow
@on_all_poses
@pytest.mark.parametrize(("routing", "case", "option"), every_run(), ids=str)
def test_every_pose(routing: Routing, case: Case, option: str, target: Target) -> None:
    target.check(routing, case, option)


@pytest.mark.slow
@on_all_poses
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["tf32", "f16"])
@pytest.mark.parametrize("parents", [8, 17, 32])
@pytest.mark.parametrize("pose", [(4, 4, 4), (6, 6, 6), (8, 8, 8)], ids=str)
def test_gradients_on_tensor_cores(
    pose: tuple[int, int, int], parents: int, dtype: torch.dtype, target: Target
) -> None:
    """Of parents that fill one warp, or several, or not; of children that share matrices, in stages of any size."""
    case = Case("tensor", Rule.SQUASH, types=13, parents=parents, pose=pose, groups="types", dtype=dtype)
    target.check(ATTENTION, case, "tf32" if dtype == torch.float32 else "ordered")
    target.check(ATTENTION, replace(case, grid=(6, 5), window=(3, 3, 1, 1, 0, 0, 1, 1), types=2), "tf32")


@on_every_target
@pytest.mark.parametrize("pose", [(3, 5, 3), (2, 4, 70)], ids=["9-values", "140-values"])
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_poses_of_any_size_from_several_ranges(routing: Routing, pose: tuple[int, int, int], target: Target) -> None:
    """Of a number of values that is no multiple of 4, and of so many that each lane holds several vectors."""
    case = replace(routing.case("one-position"), types=40, parents=3, pose=pose)
    if target.device == "cpu":
        answer = target.ask("schedule", *question(routing, case, backward=False))
        assert int(dict(one.split("=") for one in answer.split(";"))["ranges"]) > 1
    target.check(routing, case)


@on_every_target
def test_three_products_err_as_little_as_float32(target: Target) -> None:
    """Forward and backward they keep the rule that the plain kernels keep, and one product does not."""
    case = Case("three", Rule.LAYER_NORM, batch=5, types=9, parents=5, pose=(4, 4, 4), gate="some", bias="IM")
    call, back = ATTENTION.call(case), ATTENTION.backward_call(case)
    for bar, run in (
        (ATTENTION.bar(case, training=False), lambda option: target.forward(call, option)),
        (ATTENTION.backward_bar(case), lambda option: target.backward(back, option)),
    ):
        exact, rounded = bar.judge(run("tf32x3")), bar.judge(run("tf32"))
        assert not exact.complaints
        for name in exact.errors.keys() - {"dnorm_weight", "dnorm_bias"}:  # made of the sums, which are given
            assert 16 * exact.errors[name] < rounded.errors[name] > rounded.allowed[name], name


@on_every_target
def test_a_bias_that_800_children_share(target: Target) -> None:
    """With these numbers eight partial sums of its gradient erred by 1.2 times the limit."""
    target.check(ATTENTION, ATTENTION.case("shared-bias-M"), seed=3)


@on_every_target
@pytest.mark.parametrize(("routing", "groups"), [*((one, "own") for one in ROUTINGS), (POOLING, "none")], ids=str)
def test_a_set_is_a_grid_of_one_position(routing: Routing, groups: str, target: Target) -> None:
    """In every bit, forward and backward; where votes are the children, poses are seen as vectors on the way."""
    case = routing.make(
        "set", batch=3, types=7, parents=5, pose=(4, 4, 4), groups=groups, bias="IM",
        gate="some", iterations=2, layout="transposed",
    )  # fmt: skip
    call, back = routing.call(case), routing.backward_call(case)
    pairs = [(target.forward(call, "ordered"), target.forward(call.as_set(), "ordered"))]
    pairs += [(target.backward(back, "ordered"), target.backward(back.as_set(), "ordered"))]
    for wanted, found in pairs:
        for key, value in wanted.items():
            assert torch.equal(found[key].reshape(value.shape), value), key
    assert pairs[0][1][routing.results[0]].dim() in (2, 4)


@on_every_target
@every_routing
@pytest.mark.parametrize("parents", [5, 20, 40])
def test_poses_that_are_their_own_votes(routing: Routing, parents: int, target: Target) -> None:
    """Their gradient is a sum over all parents, whose lanes have the rows of 4 x 4 poses in other orders."""
    case = routing.make(
        "same", batch=2, types=3, parents=parents, pose=(4, 4, 4), groups="none", bias="IM", gate="some"
    )
    target.check(routing, case)


@on_every_target
@every_routing
@pytest.mark.parametrize(
    "sizes", [{"iterations": 17, "types": 5}, {"types": 600}, {"parents": 1100, "types": 2}], ids=str
)
def test_iterations_that_are_several_launches(routing: Routing, sizes: dict[str, Any], target: Target) -> None:
    """More of them than one launch takes; children that are better split over blocks; parents of several blocks."""
    given = {"batch": 1, "parents": 3, "pose": (4, 4, 4), "iterations": 3, "start": False, **sizes}
    for rule in sorted(routing.rules):
        case = routing.make("launches", gate="some", rule=rule, **given)
        answer = target.ask("schedule", *question(routing, case))
        assert ("iterations=fused" in answer) == (routing is POOLING and "parents" in sizes)  # which are independent
        target.check(routing, case)
        target.check(routing, replace(case, start=True))


@on_every_target
@every_routing
@drawn(3)
@given(
    data=st.data(),
    pose=st.one_of(st.sampled_from(OWN_POSES[:2] + OWN_POSES[3:5]), st.tuples(*3 * [st.integers(1, 4)])),
    parents=st.one_of(st.integers(1, 6), st.integers(7, 40)),
    dtype=st.sampled_from(GPU_DTYPES[:2]),  # what exceeds float16 is none of its numbers
    option=st.sampled_from(list(OPTIONS)),
    order=st.sampled_from(list(build.ORDERS)),
    seed=st.integers(0, 9),
)
def test_random_calls(
    target: Target, routing: Routing, data: st.DataObject, pose: Any, option: str, order: str, seed: int, **more: Any
) -> None:
    target.set_order(order)
    case = data.draw(random_cases(routing))
    pose = (pose[0], pose[1], pose[1]) if case.groups == "none" else pose
    target.check(routing, replace(case, pose=pose, **more), option, seed)


# ---- a backward's promises ------------------------------------------------------------------------------------------


@on_every_target
@pytest.mark.parametrize(
    ("routing", "name", "option"),
    zip(ROUTINGS, ("pose-4x4", "padded", "pose-4x4"), ("fast", "ordered", "ordered"), strict=True), ids=str,
)  # fmt: skip
def test_only_the_gradients_asked_for(routing: Routing, name: str, option: str, target: Target) -> None:
    hold_each_gradient_alone(lambda call: target.backward(call, option), routing, routing.case(name), most=100)


@on_every_target
@pytest.mark.parametrize("option", ["fast", "ordered"])
def test_tight_positions_beside_others(option: str, target: Target) -> None:
    """Tiles with a parent of small variance take another walk than the others of the same launch."""
    case = Case("tight", Rule.EM, batch=40, types=10, parents=5, pose=(4, 4, 4), gate="some", iterations=2)
    if target.device == "cpu":
        answer = target.ask("schedule", *question(GAUSSIAN, case, option, backward=True))
        schedule = dict(one.split("=") for one in answer.split(";"))
        back = GAUSSIAN.backward_call(case).given
        size = torch.maximum(back["means"].square(), (back["means"] - back["mean"]).square())
        tight = (64 * back["variances"] < size).flatten(2).any(2)
        tiles = [bool(tile.any()) for tile in tight[1].split(int(schedule["positions"]))]
        assert "lean" in schedule["kernel"] and {*tiles} == {False, True}
    target.check(GAUSSIAN, case, option)


@on_every_target
@pytest.mark.parametrize("bias", ["1M", "11"])
@pytest.mark.parametrize("name", ["gated-first", "gated-later", "gated-shared"])
def test_a_bias_that_children_share_and_whose_gradient_nobody_wants(name: str, bias: str, target: Target) -> None:
    """As the op calls the kernels: it computes such a bias's gradient from those of the means."""
    back = GAUSSIAN.backward_call(replace(GAUSSIAN.case(name), bias=bias)).given
    back["needs"] &= ~GAUSSIAN.border.bit["bias"]
    BackwardCall(GAUSSIAN, back).bar().hold(target.backward(BackwardCall(GAUSSIAN, dict(back))))


# ---- what the kernels do not take -----------------------------------------------------------------------------------


@on_every_target
@every_routing
def test_what_the_kernels_do_not_take_is_an_error(routing: Routing, target: Target) -> None:
    case, state = routing.case("primes"), routing.state[0]
    given_all = routing.call(case).given
    wrong: list[tuple[str, dict[str, Any]]] = [
        (r"float64|Double", routing.call(replace(case, dtype=torch.float64)).given),
        ("weight has shape", {**given_all, "weight": given_all["weight"][:, :, :-1]}),
        ("weight is not for 12 parents", {**given_all, "parents": 12}),
        (f"{state} has shape", {**given_all, state: given_all[state][:1]}),
        ("has no rule 7", {**given_all, "rule": 7}),
        ("512", routing.call(replace(case, types=1, parents=1, pose=(27, 2, 19), bias=None)).given),
    ]
    for message, each in wrong:
        with pytest.raises(RuntimeError, match=message):
            target.forward(Call(routing, each, {}))
    with pytest.raises(RuntimeError, match="of one iteration, got 2"):
        target.backward(routing.backward_call(replace(case, iterations=2), needs=16))
    refusal = target.ask("routing_refusal", *question(routing, replace(case, iterations=17)))
    assert refusal == "its 17 iterations are more than 16"


# ---- what the library says ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [Target("cpu")], ids=lambda target: "on-cpu")
@every_routing
def test_every_kernel_has_a_case(routing: Routing, target: Target) -> None:
    """A compiled path without a case is a path without proof."""
    met: dict[str, set[str]] = {}
    for _, case, option in (run for run in (*paths(True), *paths(False)) if run[0] is routing):
        for backward in (False, True):
            answer = target.ask("schedule", *question(routing, case, option, backward))
            for field in answer.split(";"):
                key, value = field.split("=")
                single = key in ("kernel", "iterations")
                met.setdefault(key, set()).add(value if single else "one" if value == "1" else "several")
    assert met["kernel"] == set(target.ask("kernels", routing.stem).split(";"))
    assert met["iterations"] == {"one", "fused"}
    for key in ("parent_warps", "position_warps", "ranges", "sweeps", "stage", "blocks"):
        few = key == "stage" and not any("1x16" in kernel for kernel in met["kernel"])
        assert met[key] >= {"several", *([] if few else ["one"])}, key


@pytest.mark.parametrize("target", [Target("cpu")], ids=["on-cpu"])
@pytest.mark.parametrize("parents", [18, 33])
def test_every_variant_of_a_sweep_is_taken_and_right(target: Target, parents: int) -> None:
    """Over the few kernels that are built for the CPU, with their switch for experiments; the default comes first."""
    case = Case("sweep", Rule.LAYER_NORM, batch=11, types=31, parents=parents, pose=(4, 4, 4))

    def ask(name: str, *arguments: Any) -> str:
        return target.ask(name.removeprefix("fastcaps_cuda_"), *arguments)

    both = [sweep.variants(forward, *question(ATTENTION, case), ask) for forward in (True, False)]
    for settings in both:
        assert settings[0] == "" and len({*settings}) == len(settings) <= sweep.MOST
        kernels = {setting.partition("kernel=")[2].partition(",")[0] for setting in settings[1:]}
        assert {"16x1x1-256x2", "32x1x2-384x1", "4x2x1-256x1"} <= kernels
        assert all({f"chunks={chunks}" in setting for setting in settings} == {True, False} for chunks in (1, 2, 4))
    for settings in zip_longest(*(each[::3] for each in both), fillvalue=""):
        with sweep.scheduled(" ".join(settings)):
            target.check(ATTENTION, case)
    with sweep.scheduled("forward:warps_positions=99"), pytest.raises(RuntimeError, match="FASTCAPS_SCHEDULE: it has"):
        target.check(ATTENTION, case)


@pytest.mark.parametrize("target", [Target("cpu")], ids=["on-cpu"])
@pytest.mark.parametrize("name", ["gated", "gated-first", "gated-shared"])
def test_warps_that_add_to_the_same_matrices(name: str, target: Target) -> None:
    """Each has all parents of its own positions, so only the sums of dW bring the warps of a block together."""
    case = replace(GAUSSIAN.case(name), parents=7, batch=33, types=41)
    with sweep.scheduled("backward:warps_positions=4"):
        target.check(GAUSSIAN, case)
