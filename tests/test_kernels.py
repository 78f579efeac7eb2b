"""Every routing as whatever serves the CPU here, against the oracle: results, every gradient, and the same bits.

A result errs at most what ``bench.judge.Bar`` allows: twice what eager torch of the same dtype errs, and
rounding.
"""

from __future__ import annotations

import ctypes
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import WINDOWS, Case, strides
from registry import GAUSSIAN, POOLING, ROUTINGS, BackwardCall, Call, Routing, votes_of
from suite import (
    by_op,
    cases_named,
    cases_where,
    every_backend,
    every_routing,
    hold_each_gradient_alone,
    hold_far_from_zero,
    hold_training_and_backward,
    native_only,
    python,
)

import fastcaps
from fastcaps import backends, libraries, ops
from fastcaps.ops.signature import gradient_strides
from fastcaps.rules import Rule
from fastcaps.votes import VoteInputs
from tools.native import LEVELS


@pytest.fixture
def chosen(name: str) -> Iterator[None]:
    """Have every op of a test served by a backend."""
    with backends.backend(name):
        yield


def held(call: Call) -> None:
    call.bar().hold(call.training(by_op))


@cases_where()
def test_results_and_gradients(routing: Routing, case: Case) -> None:
    hold_training_and_backward(routing, case)


@every_routing
@pytest.mark.parametrize("order", ["mgde", "mged", "gmed", "gdme", "gdem", "edmg"])
def test_weights_in_every_order(routing: Routing, order: str) -> None:
    """Published layers store [G, M, D, E] in orders of their own: rows that lie apart, or matrices transposed."""
    places = ["gmde".index(letter) for letter in order]
    back = [order.index(letter) for letter in "gmde"]
    for batch, types, parents, pose, options in (
        (1, 43, 4, (1, 8, 16), {}),  # children in lanes,
        (1, 37, 3, (1, 64, 32), {}),  # and with large matrices
        (17, 5, 3, (1, 8, 16), {}),
        (17, 5, 3, (1, 16, 16), {}),
        (17, 130, 2, (1, 64, 64), {}),  # too many to stay from one iteration to the next
        (17, 5, 4, (1, 2, 2), {}),  # votes of several parents are made together
        (9, 5, 3, (4, 4, 4), {}),
        (9, 4, 3, (2, 3, 5), {}),
        (9, 4, 3, (1, 7, 1), {}),
        (9, 6, 3, (1, 8, 16), {"groups": "one"}),
        (9, 4, 3, (2, 3, 5), {"dtype": torch.float64}),
        (9, 4, 3, (1, 8, 16), {"dtype": torch.bfloat16}),
    ):
        sizes: dict[str, Any] = {"batch": batch, "types": types, "parents": parents, "pose": pose, **options}
        case = Case("order", min(routing.rules), start=False, iterations=2, **sizes)
        call = routing.call(case)
        stored = call.given["weight"].permute(places).contiguous()
        relaid = replace(call, given={**call.given, "weight": stored.permute(back)})
        results = relaid.training(by_op)
        routing.bar(case).hold(results)
        weight = stored.permute(back)
        assert (
            strides(results["dweight"])
            == strides(weight)
            == strides(torch.empty_strided(weight.shape, gradient_strides(weight)))
        )


# ---- digits, NaN and infinity ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", [one for one in ROUTINGS if Rule.SQUASH in one.rules], ids=str)
@pytest.mark.parametrize(("parents", "iterations"), [(1, 1), (3, 2)])
def test_squash_in_bfloat16(routing: Routing, parents: int, iterations: int) -> None:
    """What is squashed, and the gradient of what was, is not rounded before: no other rounding hides it."""
    options: dict[str, Any] = {"pose": (2, 3, 5), "gate": "some", "start": False, "scale": 3.0, "dtype": torch.bfloat16}
    case = Case("few-votes", Rule.SQUASH, types=1, parents=parents, iterations=iterations, **options)
    for seed in range(10):
        held(routing.call(case, seed))


@pytest.mark.parametrize("number", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("rule", [Rule.UNIT, Rule.SQUASH], ids=lambda rule: rule.name)
def test_the_first_iteration_of_pooling_asks_no_broken_child(rule: Rule, iterations: int, number: float) -> None:
    call = POOLING.call(Case("broken", rule, start=False, iterations=iterations, normalize=rule == Rule.UNIT))
    call.given["children"][0, 0, 0, 2, 0, 1] = number
    for found, wanted in zip(call.by_op().values(), call.by_loop().values(), strict=True):
        assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.isinf(), wanted.isinf())


@every_routing
@pytest.mark.parametrize("groups", ["own", "types", "one"])
@pytest.mark.parametrize("batch", [1, 20])
def test_a_broken_gradient_where_padding_alone_is_seen(routing: Routing, batch: int, groups: str) -> None:
    """No child is there to take it on, so none of the matrices' numbers may: 0 times NaN is not 0."""
    grid, window = WINDOWS["nobody"]
    shape = {"batch": batch, "grid": grid, "window": window, "types": 17}
    call = routing.call(replace(routing.case("primes"), groups=groups, bias=None, iterations=1, **shape))
    name, gradient = next(iter(call.grads.items()))
    broken = gradient.clone()
    broken[0, 0, 0, -1] = torch.nan
    found = replace(call, grads={**call.grads, name: broken}).training(by_op)
    assert all(found[name].isfinite().all() for name in ("dchildren", "dweight"))


@pytest.mark.parametrize("log_weight", [-78.0, -80.0])
@pytest.mark.parametrize(("batch", "types"), [(2, 300), (19, 64)])
def test_a_parent_whom_hardly_a_child_chose(batch: int, types: int, log_weight: float) -> None:
    """A sum of weights may be so small that 1 / sum is infinite; its parts' shares of it are numbers all the same."""
    call = GAUSSIAN.call(Case("hardly", Rule.HEINSEN, batch, types=types, parents=8, pose=(4, 4, 4), gate="some"))
    call.given["gate"] *= 1e-4
    call.given["log_weight"][..., 0] = log_weight
    held(call)


# ---- arguments -------------------------------------------------------------------------------------------------------


@every_routing
def test_one_argument_has_strides_of_0(routing: Routing) -> None:
    """In its first dimension, and then in all but the last: the same as with as many numbers in memory."""
    call = routing.call(routing.case("padded"))
    for k in range(len(call.tensors)):
        for kept in (1, -1):
            tensors = call.tensors
            whole = tensors[k]
            start = whole[:1] if kept == 1 else whole[(slice(0, 1),) * (whole.dim() - 1)]
            tensors[k] = start.clone().expand(whole.shape)
            found = call.having(tensors).training(by_op)
            tensors[k] = tensors[k].contiguous()
            for name, value in call.having(tensors).training(by_op).items():
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("only", GAUSSIAN.results)
@pytest.mark.parametrize("rule", [Rule.EM, Rule.HEINSEN, Rule.KMEANS], ids=lambda rule: rule.name)
def test_a_gradient_of_one_result_alone(rule: Rule, only: str) -> None:
    case = replace(GAUSSIAN.case("padded"), rule=rule)
    call = GAUSSIAN.call(case)
    grads = {name: grad if name == only else torch.zeros_like(grad) for name, grad in call.grads.items()}
    silent = replace(call, grads=grads)
    alone = replace(call, grads={only: grads[only]})
    silent.bar().hold(alone.training(by_op))


@every_backend
@cases_named(["padded", "children-float32", "sharing-float64"])
def test_only_the_gradients_asked_for(routing: Routing, case: Case, name: str, chosen: None) -> None:
    hold_each_gradient_alone(lambda call: call.results(routing.backward_op), routing, case, most=4)


@every_routing
def test_a_backward_takes_its_iterations_as_they_lie(routing: Routing) -> None:
    """Gradients that are one number, and stacks of which the iterations lie innermost."""
    call = routing.backward_call(replace(routing.case("padded"), iterations=3))
    for head in (
        lambda t: torch.full((), 0.7, dtype=t.dtype).expand(t.shape),
        lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    ):
        heads = {n: v if call.given[n] is None else head(v) for n, v in call.given.items() if n in routing.grads}
        other = BackwardCall(routing, {**call.given, **heads})
        other.bar().hold(other.results(routing.backward_op))


@every_backend
@pytest.mark.parametrize("trash", [torch.inf, 3e38])
@cases_named(["primes", "padded", "sharing-float32", "children-float32"])
def test_a_gate_of_0_leaves_no_trace(routing: Routing, case: Case, trash: float, name: str, chosen: None) -> None:
    """Whatever the child's numbers are: NaN in the cases that are broken; votes of 3e38 overflow, by large matrices."""
    call = routing.call(replace(case, iterations=2))
    if trash == 3e38 and call.given["weight"] is not None:
        call = replace(call, given={**call.given, "weight": 8 * call.given["weight"]})
    silent = torch.arange(call.given["gate"].shape[-1]) % 3 == 1
    gate = call.given["gate"].masked_fill(silent, 0.0)
    clean, spoilt = (
        replace(call, given={**call.given, "gate": gate, "children": call.given["children"].masked_fill(there, number)})
        for there, number in ((silent[:, None, None], 0.0), (silent[:, None, None], trash))
    )
    found, wanted = spoilt.training(by_op), clean.training(by_op)
    assert (found["dchildren"][..., silent, :, :] == 0).all() and (found["dgate"][..., silent] == 0).all()
    for each in (found, wanted):
        each |= {"dchildren": each["dchildren"][..., ~silent, :, :], "dgate": each["dgate"][..., ~silent]}
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6 * value.abs().max().item(), msg=name)


# ---- the same bits ---------------------------------------------------------------------------------------------------


def bits(routing: Routing, case: Case) -> list[bytes]:
    call, back = routing.call(case), routing.backward_call(case)
    found = [*call.training(by_op).values(), *back.results(routing.backward_op).values()]
    return [one.contiguous().flatten().view(torch.uint8).numpy().tobytes() for one in found]


@native_only
@cases_named([
    "twice-positions-float32", "children-float64", "sharing-float32", "ranges", "conv", "stay-float32", "rows-float32",
    "sharing-by-type", "folded-sharing-4x4", "folded-types", "same-any-float32", "same-any-children", "narrow-1x96",
])  # fmt: skip
def test_same_bits_for_any_number_of_threads(routing: Routing, case: Case, threads_kept: None) -> None:
    found = []
    for count in (1, 3, 3):
        torch.set_num_threads(count)
        found.append(bits(routing, case))
    assert found[0] == found[1] == found[2]


# ---- instruction sets ------------------------------------------------------------------------------------------------


@native_only
@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_every_instruction_set(level: str) -> None:
    """Cases that depend on lanes or dtypes, and the verbs, at the levels that are built beside this process's."""
    built = (libraries.library("cpu").ask("fastcaps_capabilities_built") or "").split(",")
    if level not in built or level == backends.native_capability():
        pytest.skip(f"{level} is not built, or it is what this process runs on")
    variables = {"FASTCAPS_CPU_CAPABILITY": level}
    seen = python("-W", "ignore", "-c", "from fastcaps import backends as b; print(b.native_capability())", **variables)
    if seen.stdout.strip() != level:
        pytest.skip(f"this processor does not have {level}")
    selected = "(test_results and (float or folded or same or narrow) and not twice) or verbs_follow"
    options = ("-q", "-n0", "-x", "-p", "no:cacheprovider", "--require-native", "-k", selected)
    done = python("-m", "pytest", *options, __file__, str(Path(__file__).with_name("test_verbs_cpu.py")), **variables)
    assert done.returncode == 0, done.stdout[-3000:]


# ---- numbers that are hard -------------------------------------------------------------------------------------------


@native_only
@pytest.mark.parametrize("start", [False, True])
def test_variances_of_votes_far_from_zero(start: bool) -> None:
    hold_far_from_zero(Call.by_op, 600, start)


@native_only
@pytest.mark.parametrize("start", [False, True])
def test_variances_of_tight_clusters(start: bool) -> None:
    """One cluster of votes 1e-3 wide a spread of 1 away from the others: float32 agrees to 1e-3."""
    case = Case(
        "tight", Rule.HEINSEN, batch=3, types=600, parents=2, pose=(1, 4, 4), groups="one", start=start, eps=0.0
    )
    call = GAUSSIAN.call(replace(case, betas="11"))
    tight = call.given["children"][..., 300:, :, :]
    tight.mul_(1e-3).add_(0.7)
    call.given["weight"].copy_(torch.eye(4))
    if start:
        call.given["mean"].copy_(torch.tensor([0.0, 0.7])[:, None, None])
        call.given["variance"].copy_(torch.tensor([1.0, 1e-6])[:, None, None])
        call.given["log_weight"].copy_(-0.5 * call.given["variance"].log().sum((-2, -1)))
    exact = call.having([tensor.double() for tensor in call.tensors]).by_loop()["all_variances"]
    torch.testing.assert_close(call.by_op()["all_variances"].double(), exact, rtol=1e-3, atol=0)


LONELY = {  # batch, children, parents, (C, D, E), groups: with lanes that are filled and not, positions and children
    "one-child": (2, 1, 3, (4, 4, 4), "one"),
    "one-child-16": (16, 1, 3, (4, 4, 4), "one"),
    "one-child-vector": (2, 1, 5, (1, 8, 16), "one"),
    "one-child-large-pose": (8, 1, 2, (16, 8, 6), "one"),
    "more-parents": (19, 8, 10, (4, 4, 4), "own"),
    "more-parents-shared": (1, 24, 40, (1, 8, 16), "one"),
    "children-in-lanes": (1, 20, 30, (2, 3, 2), "own"),
}


@native_only
@pytest.mark.parametrize("shape", LONELY)
@pytest.mark.parametrize("rule", [Rule.EM, Rule.HEINSEN], ids=lambda rule: rule.name)
def test_parents_of_about_one_child(rule: Rule, shape: str) -> None:
    """Variances are rounding beside their means, and gradients differences of numbers a hundred thousand times theirs.

    Eager autograd loses nothing there: its backward has the same rounded values. Of six draws of the values at most one
    may err more: eager is lucky now and then.
    """
    batch, types, parents, pose, groups = LONELY[shape]
    case = Case(shape, rule, batch, types=types, parents=parents, pose=pose, groups=groups, gate="some", start=False,
                iterations=3, betas="1M")  # fmt: skip
    calls = [GAUSSIAN.call(case, seed) for seed in range(6)]
    wrong = [found for call in calls if (found := call.bar().judge(call.training(by_op)).complaints)]
    assert len(wrong) <= 1, wrong


@native_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("batch", [2, 5, 19])
def test_a_sample_has_the_same_bits_beside_any_other(batch: int, dtype: torch.dtype) -> None:
    """What is done for a parent with little variance is not done for those who share a vector with it."""
    case = Case(
        "beside", Rule.EM, batch, types=7, parents=5, pose=(4, 4, 4), bias="IM", iterations=2, betas="M", dtype=dtype
    )
    call = GAUSSIAN.call(case)
    clean = call.training(Call.by_op)
    for name, number in (("log_weight", torch.nan), ("children", 1e4), ("children", torch.inf), ("mean", torch.nan)):
        other = call.given[name].clone()
        other[0] = number
        found = replace(call, given={**call.given, name: other}).training(Call.by_op)
        for result in (*GAUSSIAN.results, "dchildren", "dmean", "dvariance", "dlog_weight"):
            assert torch.equal(found[result][1:], clean[result][1:]), (name, result)


def test_detached_pooling_of_a_broken_query() -> None:
    """dV is the shares times dS alone: a child behind a gate of 0 gets 0, though its parents' query is NaN."""
    children, gate = torch.randn(2, 20, 3, 1, requires_grad=True), torch.ones(2, 20)
    gate[:, ::3] = 0
    with torch.no_grad():
        children[0, 1, 0, 0] = torch.nan
    weight = torch.randn(20, 4, 1, 5)
    votes = VoteInputs.of(children, weight, None, gate, None)
    parents = ops.pooling_routing(votes, ops.Pooling(rule=int(Rule.UNIT), iterations=2, detach=True))[0]
    (found,) = torch.autograd.grad(parents, children, torch.ones_like(parents))
    assert (found[0, ::3] == 0).all() and found[0, 1:3].isnan().all() and found[1].isfinite().all()


def test_a_broken_gradient_of_gaussians_without_a_start_stays_with_its_number() -> None:
    """No vote is in their logits: an infinite gradient of one number reaches that number of votes alone."""
    call = GAUSSIAN.call(Case("broken", Rule.HEINSEN, start=False, gate="some"))
    broken = call.grads["variances"].clone()
    broken[0].view(-1)[0] = torch.inf
    call = replace(call, grads={**call.grads, "variances": broken})
    found = call.training(by_op)["dchildren"].isfinite()
    with backends.backend("reference"):
        assert torch.equal(found, call.training(by_op)["dchildren"].isfinite()) and not found.all()


# ---- every path that a schedule can take has a case: kernel, lanes, folding, votes made twice, rows, ranges ----------

KERNELS = Path(fastcaps.__file__).parents[1] / "csrc" / "cpu" / "kernels.h"


def schedules(routing: Routing) -> list[tuple[bool, torch.dtype, str, dict[str, str]]]:
    """Return what the library says of every case, forward and backward; only test builds answer."""
    ask, found = libraries.library("cpu").ask, []
    elements = (torch.float32, torch.float64, torch.bfloat16)
    for case in routing.cases:
        given = votes_of(routing.call(case).given).sizes
        sizes = (ctypes.c_int64 * len(given))(*given)
        bias = 0 if case.bias is None else 1 if case.bias[0] == "1" else 2
        for backward in (False, True):
            facts = (backward, elements.index(case.dtype), bias, case.start, case.iterations)
            shown = ask("fastcaps_cpu_schedule", routing.stem, sizes, (ctypes.c_int64 * 5)(*facts))
            if shown is None:
                pytest.skip(
                    "only a library built with FASTCAPS_GUARDS says how it cuts calls up: tests/test_hardening.py"
                )
            how = dict(field.split("=") for field in shown.split(";"))
            found.append((backward, case.dtype, "own" if case.groups == "own" else "shared", how))
    return found


@native_only
@every_routing
def test_every_way_to_cut_a_call_up_has_a_case(routing: Routing) -> None:
    met: dict[str, set[Any]] = defaultdict(set)
    widest = 0
    for backward, dtype, weights, how in schedules(routing):
        widest = max(widest, int(how["width"]) * dtype.itemsize)
        one = backward, dtype == torch.float64, how["lanes"]
        met["stay"] |= {one[::2]} if how["stay"] == "1" else set()
        met["weights"].add((*one, weights))
        met["votes"].add((*one, how["votes"]))
        met["rows"].add((*one[:2], how["rows"] == "1"))
        met["ranges"].add((backward, how["ranges"] == "1"))
    both, lanes = (False, True), ("positions", "children")
    assert met["stay"] == {*product([False], lanes)}
    here = {*product(both, both, ["positions"]), *product(both, [False], ["children"])}  # doubles: positions alone
    assert met["weights"] == {(*one, weights) for one in here for weights in ("own", "shared")}
    assert met["rows"] == {*product(both, both, both)} and met["ranges"] == {*product(both, both)}
    wanted = {(*one, votes) for one in here for votes in ("kept", "twice")}
    if routing.folds:  # matrices of doubles never act on the parents
        wanted |= {*product(both, [False], lanes, ["folded"])}
    spared = {*product(both, both, ["children"], ["twice"])} if widest < 64 else set()
    # bytes of a vector: the votes of so few children at once fit whatever the case
    assert met["votes"] - spared == wanted - spared


@native_only
@pytest.mark.skipif(not KERNELS.is_file(), reason="the sources are not here")
def test_every_pose_with_a_kernel_of_its_own_has_a_case() -> None:
    """Whichever routing has one, in both directions, as the source of the kernels lists them."""
    source = KERNELS.read_text()
    compiled = {f"{c}x{d}->{c}x{e}" for c, d, e in re.findall(r"\bStaticPose<(\d+), (\d+), (\d+)>", source)}
    compiled |= {f"{c}x{d}->" for c, d in re.findall(r"\bSameStaticPose<(\d+), (\d+)>", source)}
    assert len(compiled) > 5
    for backward in (False, True):
        met = {how["kernel"] for routing in ROUTINGS for back, _, _, how in schedules(routing) if back == backward}
        assert not [pose for pose in compiled if not any(one.startswith(pose) for one in met)]
