"""The CUDA kernels of every routing against the reference: forward, every gradient, and what must hold besides.

How they are run and judged: ``cuda_target``. NaN, infinity and what rounding costs: ``test_cuda_extremes``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from case_rows import OWN_POSES
from cases import GPU_DTYPES, Case
from cuda_on_cpu import build
from cuda_target import OPTIONS, Target, ask, mixed_order, on_every_target, question, taken
from hypothesis import given
from hypothesis import strategies as st
from registry import ATTENTION, ROUTINGS, Call, Routing, gpu_cases
from suite import drawn, every_routing, hold_each_gradient_alone, random_cases

from fastcaps.rules import Rule

autoused_order = pytest.fixture(autouse=True)(mixed_order)


ORDERED = ("padded", "primes", "broken", "pose-1x16", "one-position", "sweeps", "same-2x3", "conv")
ROUNDED = ("plain-4x4-5", "plain-4x4-33", "pose-4x4", "conv", "plain-1x64-5", "bias-1x64", "sweeps")
"""Cases that differ where sums have one order, and those of the kernels that may round to TF32."""
Run = tuple[Routing, Case, str]


def every_run(pairs: bool = False) -> list[Run]:
    """Return every kernel in the ways that it can run, once; with all ``pairs`` everything in all ways."""
    found = [(one, case, "fast") for one in ROUTINGS for case in gpu_cases(one, pairs)]
    for option in list(OPTIONS)[1:]:
        for routing in (one for one in ROUTINGS if option == "ordered" or pairs or one.rounds):
            names = ORDERED if option == "ordered" else ROUNDED if option in ("tf32", "tf32x3") else ROUNDED[2:5:2]
            found += [(routing, case, option) for case in gpu_cases(routing) if pairs != (case.name in names)]
    return found


def every_way() -> pytest.MarkDecorator:
    slow = [pytest.param(*run, marks=pytest.mark.slow) for run in every_run(pairs=True)]
    return pytest.mark.parametrize(("routing", "case", "option"), [*every_run(), *slow], ids=str)


# ---- against the reference ------------------------------------------------------------------------------------------


@on_every_target
@every_way()
def test_forward_and_every_gradient(routing: Routing, case: Case, option: str, target: Target) -> None:
    target.check(routing, case, option)


@on_every_target
@pytest.mark.parametrize(("pose", "parents"), [((4, 4, 4), 5), ((4, 4, 4), 20), ((1, 64, 64), 5)], ids=str)
def test_three_products_err_as_little_as_float32(pose: tuple[int, int, int], parents: int, target: Target) -> None:
    """Forward and backward they keep the rule that the plain kernels keep, and one product does not."""
    case = Case("three", Rule.LAYER_NORM, batch=5, types=9, parents=parents, pose=pose, gate="some", bias="IM")
    target.check(ATTENTION, case, "tf32x3")
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
@pytest.mark.parametrize("dtype", GPU_DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", ["pose-4x4", "primes", "sweeps"])
@every_routing
def test_half_precision(routing: Routing, name: str, dtype: torch.dtype, target: Target) -> None:
    target.check(routing, replace(routing.case(name), dtype=dtype))


@on_every_target
@pytest.mark.parametrize("groups", ["own", "none"])
@every_routing
def test_a_set_is_a_grid_of_one_position(routing: Routing, groups: str, target: Target) -> None:
    """In every bit, forward and backward; where votes are the children, poses are seen as vectors on the way."""
    case = routing.make(
        "set", batch=3, types=7, parents=5, pose=(4, 4, 4), groups=groups, bias="IM",
        gate="some", iterations=2, layout="transposed",
    )  # fmt: skip
    one = taken(routing, case, "ordered")
    call, back = routing.call(one), routing.backward_call(case)
    pairs = [(target.forward(call, "ordered"), target.forward(call.as_set(), "ordered"))]
    pairs += [(target.backward(back, "ordered"), target.backward(back.as_set(), "ordered"))]
    for wanted, found in pairs:
        for key, value in wanted.items():
            assert torch.equal(found[key].reshape(value.shape), value), key
    assert pairs[0][1][routing.results[0]].dim() in (2, 4)


@on_every_target
@every_routing
@drawn(8)
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
@pytest.mark.parametrize(("name", "option"), [("padded", "ordered"), ("pose-4x4", "fast")])
@every_routing
def test_only_the_gradients_asked_for(routing: Routing, name: str, option: str, target: Target) -> None:
    hold_each_gradient_alone(lambda call: target.backward(call, option), routing, routing.case(name), most=100)


@on_every_target
@pytest.mark.parametrize(
    ("routing", "case", "option"), [run for run in every_run() if run[2].endswith("ordered")], ids=str
)
def test_ordered_results_have_the_same_bits(routing: Routing, case: Case, option: str, target: Target) -> None:
    """Whatever the order in which blocks and threads come: on a device that is chance, here it is chosen."""
    first: dict[str, Any] = {}
    for order in ("forward", "backward", "shuffled"):
        target.set_order(order)
        found = target.forward(routing.call(taken(routing, case, option)), option)
        found |= target.backward(routing.backward_call(case), option)
        first = first or found
        for name, value in found.items():
            assert torch.equal(value.nan_to_num(), first[name].nan_to_num()), name


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
        ("iterations, got 17", routing.call(replace(case, iterations=17)).given),
        ("512", routing.call(replace(case, types=1, parents=1, pose=(27, 2, 19), bias=None)).given),
    ]
    if routing.competing:
        many = replace(case, types=2, parents=1100, pose=(4, 4, 4), bias=None, betas="11", iterations=2)
        wrong.append(("1100 parents take several blocks", routing.call(many).given))
    for message, each in wrong:
        with pytest.raises(RuntimeError, match=message):
            target.forward(Call(routing, each, {}))
    with pytest.raises(RuntimeError, match="of one iteration, got 2"):
        target.backward(routing.backward_call(replace(case, iterations=2), needs=16))


def test_which_routings_take_one_launch() -> None:
    def refusals(case: Case, **options: Any) -> list[str]:
        return [ask("routing_refusal", *question(routing, case, **options)) for routing in ROUTINGS]

    one = Case("one", Rule.PLAIN, batch=64, types=70, parents=10, pose=(4, 4, 4), iterations=3)
    assert refusals(one) == ["", "", ""]
    many = replace(one, types=7, parents=1100)
    assert ["1100 parents" in answer for answer in refusals(many)] == [True, False, True] and refusals(many)[1] == ""
    assert all("20000 children" in answer for answer in refusals(replace(one, batch=1, types=20_000, groups="one")))
    assert all("17 iterations" in answer for answer in refusals(replace(one, iterations=17)))
    small = refusals(replace(one, types=2, pose=(8, 64, 64)), machine=(4, 1 << 10))
    assert all("shared memory" in answer for answer in small)


@on_every_target
@pytest.mark.parametrize("option", ["fast", "tf32", "tf32x3-ordered"])
@pytest.mark.parametrize("dtype", GPU_DTYPES[:2], ids=str)
@pytest.mark.parametrize(("pose", "parents"), [*(((1, 64, 64), m) for m in (10, 11, 16, 17)), ((4, 4, 4), 64)], ids=str)
def test_what_is_promised_runs(
    pose: tuple[int, int, int], parents: int, dtype: torch.dtype, option: str, target: Target
) -> None:
    """The kernel that rounds to tf32 takes fewer parents of 1x64 poses a block: with it the answer is another."""
    case = Case("promised", Rule.LAYER_NORM, types=3, parents=parents, pose=pose, iterations=2, dtype=dtype)
    call = ATTENTION.call(case)
    if "parents take" in ask("routing_refusal", *question(ATTENTION, case, option)):
        with pytest.raises(RuntimeError, match="parents take several blocks"):
            target.forward(call, option)
    else:
        target.forward(call, option)


# ---- what the library says ------------------------------------------------------------------------------------------


@every_routing
def test_every_kernel_has_a_case(routing: Routing) -> None:
    """A compiled path without a case is a path without proof."""
    met: dict[str, set[str]] = {}
    for _, case, option in (run for run in every_run() if run[0] is routing):
        for backward in (False, True):
            one = case if backward else taken(routing, case, option)
            answer = ask("schedule", *question(routing, one, option, backward))
            for field in answer.split(";text=")[0].split(";"):
                key, value = field.split("=")
                single = key in ("kernel", "iterations")
                met.setdefault(key, set()).add(value if single else "one" if value == "1" else "several")
    assert met["kernel"] == set(ask("kernels", routing.stem).split(";"))
    assert met["iterations"] == {"one", "fused"}
    for key in ("parent_warps", "position_warps", "ranges", "sweeps", "stage", "blocks"):
        few = key == "stage" and not any("1x16" in kernel for kernel in met["kernel"])  # so tools/mutate.py builds them
        assert met[key] >= {"several", *([] if few else ["one"])}, key
