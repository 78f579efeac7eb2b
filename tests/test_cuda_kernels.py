"""The CUDA kernels of every routing against the reference: forward, every gradient, and what must hold besides.

How they are run and judged: ``cuda_target``.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import GPU_DTYPES, LAYOUTS, Case
from cuda_on_cpu import build
from cuda_rows import POSES, cases_of, every_cuda_case, row
from cuda_target import GPU, MACHINE, ON_DEVICE, OPTIONS, Target, ask, mixed_order, on_every_target, question, taken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from registry import ATTENTION, GAUSSIAN, POOLING, ROUTINGS, BackwardCall, Call, Routing

from bench.workloads import find
from fastcaps.rules import Rule
from fastcaps.vectors import unit
from tools import estimates
from tools.judge import Bar

every_routing = pytest.mark.parametrize("routing", ROUTINGS, ids=str)
autoused_order = pytest.fixture(autouse=True)(mixed_order)


def every_case(step: int = 1) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("routing", "case"), every_cuda_case(step), ids=str)


def test_the_device_runs_these_too() -> None:
    if not ON_DEVICE:
        pytest.skip(f"the CUDA kernels run on the CPU only: {GPU.detail if not GPU.available else 'no GPU'}")


# ---- against the reference ------------------------------------------------------------------------------------------


@on_every_target
@every_case()
def test_forward_and_every_gradient(routing: Routing, case: Case, target: Target) -> None:
    target.check(routing, case)


@on_every_target
@pytest.mark.parametrize("option", ["ordered", "tf32", "tf32-ordered", "tf32x3", "tf32x3-ordered"])
@every_case(5)
def test_options(routing: Routing, case: Case, option: str, target: Target) -> None:
    target.check(routing, case, option)


@on_every_target
@pytest.mark.parametrize(("pose", "parents"), [((4, 4, 4), 5), ((4, 4, 4), 20), ((1, 64, 64), 5)], ids=str)
def test_three_products_err_as_little_as_float32(pose: tuple[int, int, int], parents: int, target: Target) -> None:
    """Forward and backward they keep the rule that the plain kernels keep, and one product does not."""
    case = Case("three", Rule.LAYER_NORM, batch=5, types=9, parents=parents, pose=pose, gate="some", bias="IM")
    target.check(ATTENTION, case, "tf32x3")
    call, back = ATTENTION.call(case), ATTENTION.backward_call(case)
    for bar, run in (
        (ATTENTION.forward_bar(case), lambda option: target.forward(call, option)),
        (ATTENTION.backward_bar(case), lambda option: target.backward(back, option)),
    ):
        exact, rounded = bar.judge(run("tf32x3")), bar.judge(run("tf32"))
        assert not exact.complaints
        for name in exact.errors.keys() - {"dnorm_weight", "dnorm_bias"}:  # made of the sums, which are given
            assert 16 * exact.errors[name] < rounded.errors[name] > rounded.allowed[name], name


@pytest.mark.parametrize("dtype", GPU_DTYPES, ids=str)
@pytest.mark.parametrize("pose", [(4, 4, 4), (1, 64, 64)], ids=str)
def test_which_kernel_makes_three_products(pose: tuple[int, int, int], dtype: torch.dtype) -> None:
    """That of float32 where it may be rounded, and so it is told to people; half precision has nothing to gain."""
    case = Case("three", Rule.PLAIN, types=9, parents=20, pose=pose, dtype=dtype)
    for backward in (False, True):
        told = {o: ask("schedule", *question(ATTENTION, case, o, backward)) for o in ("tf32", "tf32x3")}
        if dtype == torch.float32:
            assert "tensor 3xTF32" in told["tf32x3"] and "text=tensor-core (3xTF32) kernel" in told["tf32x3"]
            assert "3xTF32" not in told["tf32"] and "text=tensor-core kernel" in told["tf32"]
            _, sizes, facts = question(ATTENTION, case, "fast", backward)
            alone = (*facts[:5], OPTIONS["tf32x3"] - OPTIONS["tf32"], *facts[6:])  # a bit that says nothing by itself
            assert ask("schedule", "attention", sizes, alone) == ask("schedule", "attention", sizes, facts)
        else:
            assert told["tf32x3"] == told["tf32"]


@on_every_target
@pytest.mark.parametrize("dtype", GPU_DTYPES[1:], ids=str)
@every_case(9)
def test_half_precision(routing: Routing, case: Case, dtype: torch.dtype, target: Target) -> None:
    target.check(routing, replace(case, dtype=dtype))


def widened(given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with float32 in the place of half precision."""
    return {name: x.float() if isinstance(x, torch.Tensor) else x for name, x in given.items()}


@on_every_target
@pytest.mark.parametrize(
    ("dtype", "layout"), [(torch.bfloat16, "plain"), (torch.float16, "offset"), (torch.float16, "plain")], ids=str
)
@pytest.mark.parametrize("pose", POSES, ids=str)
def test_half_precision_is_widened_and_nothing_else(
    pose: tuple[int, int, int], dtype: torch.dtype, layout: str, target: Target
) -> None:
    """The same bits as the same numbers in float32, however they lie; and weights are read where they lie.

    Tensor cores that take 1x64 poses as they are add up in another order than TF32's: the same but for rounding.
    """
    case = Case(
        "half", Rule.LAYER_NORM, batch=3, grid=(3, 2), types=5, parents=7, pose=pose, window=(2, 1, 1, 1, 0, 0, 1, 1),
        gate="some", dtype=dtype, layout=layout,
    )  # fmt: skip
    call, back = ATTENTION.call(case), ATTENTION.backward_call(case)
    forward = "tf32-ordered"  # the tensor cores make the votes of half precision, but not float16's backward
    backward = forward if dtype == torch.bfloat16 else "ordered"
    with target.guarded(), torch.profiler.profile() as profile:
        found = {"sums": target.forward(call, forward)["sums"], **target.backward(back, backward)}
    wide = Call(ATTENTION, widened(call.given), {}, call.detach), BackwardCall(ATTENTION, widened(back.given))
    exact = {"sums": target.forward(wide[0], forward)["sums"], **target.backward(wide[1], backward)}
    for name, value in exact.items():
        if pose != (1, 64, 64):
            assert torch.equal(found[name], value.to(found[name].dtype)), name
        off = (found[name].float() - value).abs() - torch.finfo(found[name].dtype).eps * value.abs()
        assert off.max() <= 1e-6 * value.abs().max(), name
    moved = [x for x in profile.events() if x.name == "aten::_to_copy" and target.device == "cpu"]
    assert len(moved) <= len([x for x in found.values() if x.dtype == dtype]), "more than the gradients are converted"


@on_every_target
@pytest.mark.parametrize("groups", ["own", "none"])
@every_routing
def test_a_set_is_a_grid_of_one_position(routing: Routing, groups: str, target: Target) -> None:
    """In every bit, forward and backward; where votes are the children, poses are seen as vectors on the way."""
    case = Case(
        "set", Rule({"attention": 2, "pooling": 2, "gaussian": 4}[routing.stem]), batch=3, types=7, parents=5,
        pose=(4, 4, 4), groups=groups, bias="IM", gate="some", turns=2, layout="transposed",
    )  # fmt: skip
    one = taken(routing, case, "ordered")
    call, back = routing.call(one), routing.backward_call(case)
    pairs = [(target.forward(call, "ordered"), target.forward(call.as_set(), "ordered"))]
    pairs += [(target.backward(back, "ordered"), target.backward(back.as_set(), "ordered"))]
    for wanted, found in pairs:
        for key, value in wanted.items():
            assert torch.equal(found[key].reshape(value.shape), value), key
    assert pairs[0][1][routing.results[0]].dim() in (2, 4)


@st.composite
def random_cases(draw: st.DrawFn) -> tuple[Routing, Case]:
    """Draw small calls of every kind."""
    routing = draw(st.sampled_from(ROUTINGS))
    limits = ((1, 3), (1, 3), (1, 3), (1, 3), (0, 2), (0, 2), (1, 2), (1, 2))
    window = tuple(draw(st.integers(*limit)) for limit in limits)
    least = [max(1, (window[k] - 1) * window[6 + k] + 1 - 2 * window[4 + k]) for k in (0, 1)]
    types, small = draw(st.integers(1, 5)), st.integers(1, 4)
    seen = window[0] * window[1] * types
    groups = draw(st.sampled_from(["none", *(g for g in range(1, seen + 1) if seen % g == 0)]))
    pose = draw(st.one_of(st.sampled_from(POSES[:2] + POSES[3:5]), st.tuples(small, small, small)))
    rule = draw(st.sampled_from({"attention": (0, 1, 2), "pooling": (2, 3), "gaussian": (4, 5, 6)}[routing.stem]))
    return routing, Case(
        "random",
        Rule(rule),
        batch=draw(st.integers(0, 3)),
        grid=(least[0] + draw(st.integers(0, 3)), least[1] + draw(st.integers(0, 3))),
        types=types,
        parents=draw(st.one_of(st.integers(1, 6), st.integers(7, 40))),
        pose=(pose[0], pose[1], pose[1]) if groups == "none" else pose,
        groups=groups,
        window=window,
        bias=draw(st.sampled_from([None, "IM", "I1", "1M", "11"])),
        gate=draw(st.sampled_from([None, "some", "silent"])),
        start=draw(st.booleans()),
        turns=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from(GPU_DTYPES[:2])),  # what exceeds float16 is none of its numbers
        layout=draw(st.sampled_from(list(LAYOUTS))),
        affine=draw(st.booleans()),
        normalize=draw(st.booleans()),
        log_weight=draw(st.booleans()),
        betas=draw(st.sampled_from(["IM", "I1", "1M", "11"])),
        detach=draw(st.booleans()),
    )


@on_every_target
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    drawn=random_cases(),
    option=st.sampled_from(list(OPTIONS)),
    order=st.sampled_from(list(build.ORDERS)),
    seed=st.integers(0, 9),
)
def test_random_shapes(target: Target, drawn: tuple[Routing, Case], option: str, order: str, seed: int) -> None:
    build.set_order(build.KERNELS, order)
    target.check(*drawn, option, seed)


# ---- a backward's promises ------------------------------------------------------------------------------------------


@on_every_target
@pytest.mark.parametrize("option", ["fast", "ordered"])
@pytest.mark.parametrize("name", ["padded", "primes", "pose-4x4-5"])
@every_routing
def test_only_the_gradients_asked_for(routing: Routing, name: str, option: str, target: Target) -> None:
    whole = routing.backward_call(replace(row(routing, name), turns=1))
    everything = target.backward(whole, option)
    all_needs, names = whole.given["needs"], routing.gradients
    for needs in [1 << k for k in range(len(names))] + [0, 3, 6, 7]:
        found = target.backward(BackwardCall(routing, {**whole.given, "needs": needs}), option)
        wanted = {name for k, name in enumerate(names) if (needs & all_needs) >> k & 1}
        assert {name for name in found if name in wanted} == set(found) and wanted <= set(found)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, everything[name], rtol=1e-5, atol=1e-5, msg=name)


@on_every_target
@pytest.mark.parametrize(
    ("routing", "case", "option"),
    [
        (routing, case, option)
        for option, step in (("ordered", 7), ("tf32-ordered", 13))
        for routing, case in every_cuda_case(step)
        if case.products < 8e6  # the largest take a minute each, and meet no order that smaller ones do not
    ],
    ids=str,
)
def test_ordered_results_have_the_same_bits(routing: Routing, case: Case, option: str, target: Target) -> None:
    """Whatever the order in which blocks and threads come: on a device that is chance, here it is chosen."""
    first: dict[str, Any] = {}
    for order in ("forward", "backward", "shuffled"):
        build.set_order(build.KERNELS, order)
        found = target.forward(routing.call(taken(routing, case, option)), option)
        found |= target.backward(routing.backward_call(case), option)
        first = first or found
        for name, value in found.items():
            assert torch.equal(value.nan_to_num(), first[name].nan_to_num()), name


@on_every_target
@pytest.mark.parametrize("name", ["padded", "one-position"])
@every_routing
def test_turns_add_up(routing: Routing, name: str, target: Target) -> None:
    """A backward of several turns is the sum of theirs."""
    case = replace(row(routing, name), turns=3)
    whole = routing.backward_call(case)
    found = target.backward(whole)
    total: dict[str, Any] = {}
    for turn in range(3):
        part = dict(whole.given)
        for name in (*routing.grads, *routing.state, *routing.saved):
            stack = part[name]
            part[name] = None if stack is None else stack[turn : turn + 1]
        for name, gradient in target.backward(BackwardCall(routing, part)).items():
            total[name] = gradient + total.get(name, 0.0)
    assert total.keys() == found.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, total[name], rtol=1e-4, atol=1e-4, msg=name)


# ---- NaN, infinity and numbers near them ----------------------------------------------------------------------------


@on_every_target
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("argument", ["children", "weight", "bias", "gate", "state"])
@every_routing
def test_what_is_not_finite_comes_out(routing: Routing, argument: str, value: float, target: Target) -> None:
    """A NaN or an infinity in one sample: the other samples are as they were, its own results are not all finite."""
    if argument == "gate" and routing is not ATTENTION and value == -torch.inf:
        pytest.skip("gates are not negative")
    name = routing.state[0] if argument == "state" else argument
    case = replace(row(routing, "primes"), batch=3, rule=Rule.PLAIN if routing is ATTENTION else routing.cases[0].rule)
    call = routing.call(case)
    clean = target.forward(call)
    shared = name in ("weight", "bias")  # which concern all samples
    broken = call.given[name].clone()
    broken.view(-1)[broken.numel() // (2 if shared else 6)] = value
    call = Call(routing, {**call.given, name: broken}, {})
    expected, found = call.by_loop(), target.forward(call)
    for result, other in expected.items():
        samples = (lambda x: x) if result in routing.results else (lambda x: x.transpose(0, 1))
        one, two = samples(found[result]), samples(other)
        assert torch.equal(one.isfinite().flatten(1).all(1), two.isfinite().flatten(1).all(1)), result
        if not shared:
            assert torch.equal(one[1:], samples(clean[result])[1:]), result


@on_every_target
@pytest.mark.parametrize("dtype", GPU_DTYPES[:2], ids=str)
@pytest.mark.parametrize("trash", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("grid", [(1, 1), (5, 4)], ids=str)
@pytest.mark.parametrize("routing", [POOLING, GAUSSIAN], ids=str)
def test_a_gate_of_0_leaves_no_trace(
    routing: Routing, grid: tuple[int, int], trash: float, dtype: torch.dtype, target: Target
) -> None:
    """Neither in the results nor in a gradient, whatever the child behind it is."""
    case = replace(row(routing, "padded"), grid=grid, gate="silent", types=7, dtype=dtype, turns=1)
    # Blocks that add as they come differ in the last place of float32, which may round to another bfloat16.
    option = "fast" if dtype == torch.float32 else "ordered"
    found = []
    for number in (trash, 0.0):
        call, back = routing.call(case), routing.backward_call(case)
        silent = (call.given["gate"] == 0)[..., None, None]
        for arguments in (call.given, back.given):
            arguments["children"] = arguments["children"].masked_fill(silent, number)
        found.append((target.forward(call), target.backward(back, option)))
    for name, one in found[0][0].items():
        assert torch.equal(one, found[1][0][name]), name
    for name, one in found[0][1].items():
        assert one.isfinite().all(), name
        if name != "dgate" and option == "ordered":
            assert torch.equal(one, found[1][1][name]), name
        elif name != "dgate":
            torch.testing.assert_close(one, found[1][1][name], rtol=1e-5, atol=1e-6, msg=name)
        elif not trash < torch.inf:  # of a child that is a number the gate's gradient is one too
            assert (one[silent[..., 0, 0]] == 0).all()


LONELY = (  # parents that one child makes, or two: variances are nothing beside the means
    Case("one-child", Rule.EM, types=1, pose=(4, 4, 4), bias="IM", gate="some"),
    Case("one-child-vector", Rule.EM, batch=5, types=1, pose=(1, 16, 16), start=False),
    Case("one-child-any", Rule.EM, types=1, parents=5, pose=(5, 3, 7), gate="some"),
    Case("one-child-each", Rule.EM, types=8, parents=10, pose=(4, 4, 4)),
    Case("one-child-turns", Rule.EM, types=4, parents=6, pose=(4, 4, 4), turns=3),
    Case("one-child-grid", Rule.EM, grid=(3, 3), types=2, parents=6, pose=(4, 4, 4), window=(2, 2, 1, 1, 1, 1, 1, 1)),
    Case("one-child-sweeps", Rule.EM, batch=1, types=2, parents=1100, pose=(4, 4, 4)),
    Case("one-child-ranges", Rule.EM, batch=1, types=200, pose=(4, 4, 4), groups="one"),
)  # fmt: skip


@on_every_target
@pytest.mark.parametrize("option", ["fast", "ordered"])
@pytest.mark.parametrize("case", LONELY, ids=str)
def test_a_parent_of_one_child(case: Case, option: str, target: Target) -> None:
    """Its gradient by the variance is large, and the mean's rounding must cancel in it (as it does in autograd)."""

    def run(tensors: Any) -> dict[str, torch.Tensor]:
        """The oracle, differentiated by autograd, of each turn by itself."""
        given_now = dict(zip(names, tensors, strict=True))
        leaves = {
            n: given_now[n].detach().requires_grad_() for n in ("children", "weight", "bias", "gate") if n in names
        }
        total: Any = {}
        for turn in range(case.turns):
            call = routing.call(replace(case, turns=1)).given
            state = {n: given_now[n][turn] if n in names else None for n in routing.state}
            results, _ = routing.turn({**call, **leaves, "eps": case.eps}, 0, state, False)
            kept = {"grad_counts": "all_counts", "grad_means": "all_means", "grad_variances": "all_variances"}
            pairs = [(results[r][0], given_now[g][turn]) for g, r in kept.items() if results[r].requires_grad]
            found = torch.autograd.grad([r for r, _ in pairs], list(leaves.values()), [g for _, g in pairs])
            total = {f"d{n}": g + total.get(f"d{n}", 0.0) for n, g in zip(leaves, found, strict=True)}
        return total

    routing = GAUSSIAN
    back = routing.backward_call(case)
    given_all = back.given
    if case.start:  # every parent stands where a vote is, and knows no other
        types = torch.arange(case.parents) % case.types
        weight = given_all["weight"][:1] if case.groups == "one" else given_all["weight"]
        votes = torch.einsum("bmcd,mde->bmce", given_all["children"][:, 0, 0, types],
                             weight[types if len(weight) > 1 else 0 * types, torch.arange(case.parents)])  # fmt: skip
        mean = votes[:, None, None].expand(case.poses)
        given_all["mean"] = mean.expand(case.turns, *case.poses).contiguous()
        given_all["variance"] = 1e-3 * given_all["variance"]
        turns = [
            routing.turn(
                routing.call(replace(case, turns=1)).given, 0, {n: given_all[n][k] for n in routing.state}, False
            )
            for k in range(case.turns)
        ]
        given_all |= {n: torch.cat([results[kept] for results, _ in turns]) for n, kept in routing.saved.items()}
    given_all["grad_variances"] = 1e4 * given_all["grad_variances"]
    given_all["needs"] = 15
    names = [n for n, x in given_all.items() if isinstance(x, torch.Tensor)]
    names.sort(key=lambda n: n != "children")
    with target.guarded():
        found = target.backward(
            BackwardCall(routing, {n: x.clone() if n in names else x for n, x in given_all.items()})
        )
    Bar(run, [given_all[n] for n in names]).hold(found)


@on_every_target
@pytest.mark.parametrize("start", [False, True], ids=["first-turn", "later-turn"])
@pytest.mark.parametrize("types", [40, 500])
def test_a_common_offset_costs_float32_nothing(types: int, start: bool, target: Target) -> None:
    """Votes about 10,000 with a spread of 1: variances are right to a thousandth."""
    case = Case("offset", Rule.HEINSEN, batch=1, types=types, pose=(1, 4, 4), start=start, gate="some")
    call = GAUSSIAN.call(case)
    call.given["children"] += 1e4
    call.given["weight"] = torch.eye(4).repeat(types, 3, 1, 1)
    if start:
        call.given["mean"] += 1e4
    exact = call.having([tensor.double() for tensor in call.tensors]).by_loop()["all_variances"]
    torch.testing.assert_close(target.forward(call)["all_variances"].double(), exact, rtol=1e-3, atol=0)


@on_every_target
@pytest.mark.parametrize("start", [False, True], ids=["first-turn", "later-turn"])
def test_many_children(start: bool, target: Target) -> None:
    """Counts stay exact where one after another is added to a sum 16,384 times its size."""
    case = Case("many", Rule.HEINSEN, batch=1, types=1 << 14, parents=2, pose=(1, 1, 1), groups="one", start=start,
                eps=0.0, betas="11")  # fmt: skip
    call = GAUSSIAN.call(case)
    exact, found = call.having([tensor.double() for tensor in call.tensors]).by_loop(), target.forward(call)
    for name in ("all_counts", "all_means", "all_variances"):
        torch.testing.assert_close(found[name].double(), exact[name], rtol=3e-6, atol=1e-6)


@on_every_target
@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_keys_are_directions_however_long(size: float, target: Target) -> None:
    call = POOLING.call(Case("keys", Rule.UNIT, types=9, pose=(4, 4, 4), groups="none", normalize=True))
    longer = Call(POOLING, {**call.given, "children": size * call.given["children"]}, {})
    torch.testing.assert_close(
        target.forward(longer)["logsumexp"], target.forward(call)["logsumexp"], rtol=1e-5, atol=1e-5
    )


@on_every_target
@pytest.mark.parametrize("size", [1e-17, 300.0, 2e19, 1e30])
@pytest.mark.parametrize(("routing", "turns"), [(ATTENTION, 1), (ATTENTION, 2), (POOLING, 1), (POOLING, 2)], ids=str)
def test_squash_of_any_length(routing: Routing, turns: int, size: float, target: Target) -> None:
    """Neither the square of a long vector overflows nor that of a short one vanishes."""
    call = routing.call(
        Case("long", Rule.SQUASH, types=1, parents=1, pose=(4, 4, 4), groups="one", start=False, turns=turns)
    )
    call.given["children"] *= size
    exact = call.having([tensor.double() for tensor in call.tensors]).by_loop()["parents"]
    torch.testing.assert_close(target.forward(call)["parents"].double(), exact, rtol=2e-6, atol=0)


@on_every_target
@pytest.mark.parametrize("dtype", GPU_DTYPES[1:], ids=str)
def test_the_next_query_is_made_of_what_was_stored(dtype: torch.dtype, target: Target) -> None:
    """Two turns in one launch are two calls, the second with the direction of the sums as the first stored them."""
    case = Case("stored", Rule.UNIT, batch=8, types=9, parents=5, pose=(4, 4, 4), start=False, turns=2, scale=8.0)
    call = POOLING.call(replace(case, dtype=dtype))
    both = target.forward(call)
    query = unit(both["sums"][0].float(), (-2, -1)).to(dtype)
    second = target.forward(Call(POOLING, {**call.given, "query": query, "iterations": 1}, {}))
    assert (second["parents"] == both["parents"]).float().mean() > 0.99


# ---- what the kernels do not take -----------------------------------------------------------------------------------


@on_every_target
@every_routing
def test_what_the_kernels_do_not_take_is_an_error(routing: Routing, target: Target) -> None:
    case = row(routing, "primes")

    def run(given_all: dict[str, Any]) -> None:
        target.forward(Call(routing, given_all, {}))

    with pytest.raises(RuntimeError, match=r"float64|Double"):
        run(routing.call(replace(case, dtype=torch.float64)).given)
    given_all = routing.call(case).given
    with pytest.raises(RuntimeError, match="weight has shape"):
        run({**given_all, "weight": given_all["weight"][:, :, :-1]})
    with pytest.raises(RuntimeError, match="weight is not for 12 parents"):
        run({**given_all, "parents": 12})
    state = routing.state[0]
    with pytest.raises(RuntimeError, match=f"{state} has shape"):
        run({**given_all, state: given_all[state][:1]})
    with pytest.raises(RuntimeError, match="has no rule 7"):
        run({**given_all, "rule": 7})
    with pytest.raises(RuntimeError, match="turns, got 17"):
        run(routing.call(replace(case, turns=17)).given)
    with pytest.raises(RuntimeError, match="512"):
        run(routing.call(replace(case, types=1, parents=1, pose=(27, 2, 19), bias=None)).given)
    with pytest.raises(RuntimeError, match="of one turn, got 2"):
        back = routing.backward_call(replace(case, turns=2), needs=16)
        target.backward(back)
    if routing is not POOLING:
        with pytest.raises(RuntimeError, match="1100 parents take several blocks"):
            run(
                routing.call(replace(case, types=2, parents=1100, pose=(4, 4, 4), bias=None, betas="11", turns=2)).given
            )


def test_which_routings_take_one_launch() -> None:
    def refusals(case: Case, **options: Any) -> list[str]:
        return [ask("routing_refusal", *question(routing, case, **options)) for routing in ROUTINGS]

    one = Case("one", Rule.PLAIN, batch=64, types=70, parents=10, pose=(4, 4, 4), turns=3)
    assert refusals(one) == ["", "", ""]
    many = replace(one, types=7, parents=1100)
    assert ["1100 parents" in answer for answer in refusals(many)] == [True, False, True] and refusals(many)[1] == ""
    assert all("20000 children" in answer for answer in refusals(replace(one, batch=1, types=20_000, groups="one")))
    assert all("17 turns" in answer for answer in refusals(replace(one, turns=17)))
    small = refusals(replace(one, types=2, pose=(8, 64, 64)), machine=(4, 1 << 10))
    assert all("shared memory" in answer for answer in small)


@on_every_target
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", GPU_DTYPES, ids=str)
@pytest.mark.parametrize("parents", [10, 11, 16, 17, 64])
@pytest.mark.parametrize("pose", [(1, 64, 64), (4, 4, 4)], ids=str)
def test_what_is_promised_runs(
    pose: tuple[int, int, int], parents: int, dtype: torch.dtype, option: str, target: Target
) -> None:
    """The kernel that rounds to tf32 takes fewer parents of 1x64 poses a block: with it the answer is another."""
    case = Case("promised", Rule.LAYER_NORM, types=3, parents=parents, pose=pose, turns=2, dtype=dtype)
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
    for case in cases_of(routing):
        for option in OPTIONS:
            for backward in (False, True):
                one = case if backward else taken(routing, case, option)
                answer = ask("schedule", *question(routing, one, option, backward))
                for field in answer.split(";text=")[0].split(";"):
                    key, value = field.split("=")
                    single = key in ("kernel", "turns")
                    met.setdefault(key, set()).add(value if single else "one" if value == "1" else "several")
    assert met["kernel"] == set(ask("kernels", routing.stem).split(";"))
    assert met["turns"] == {"one", "fused"}
    for key in ("parent_warps", "position_warps", "ranges", "sweeps", "stage", "blocks"):
        assert met[key] == {"one", "several"}, key


def test_the_library_says_what_it_cannot_take() -> None:
    assert ask("refusal", "attention", 4, 4, 4, 1) == "" == ask("refusal", "gaussian", 1, 64, 64, 0)
    assert "512" in ask("refusal", "pooling", 30, 30, 30, 1)
    _, sizes, facts = question(ATTENTION, row(ATTENTION, "papers-c10-conv"))
    told = ask("schedule", "attention", sizes, facts)
    assert told.startswith("kernel=forward 4x4->4x4 32 parents a warp plain;turns=one;")
    assert "4x4" in told.split(";text=")[1] and MACHINE[0] == facts[6]


def test_estimates_ask_the_library_how_it_cuts_a_call_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def answered(function: str, op: str, *numbers: Any) -> str:
        return ask(function.removeprefix("fastcaps_cuda_"), op, *(tuple(one) for one in numbers))

    monkeypatch.setattr(estimates.libraries, "library", lambda name: SimpleNamespace(ask=answered))
    conv1 = find("tsai-c10-conv1")
    for backward in (False, True):
        positions, threads, blocks = estimates._schedule(conv1, 128, backward, False) or (0, 0, 0)
        assert threads % 32 == 0 and positions * blocks >= 128 * conv1.positions
    assert estimates._schedule(replace(conv1, rows=30, columns_in=30, columns_out=30), 1, False, False) is None
