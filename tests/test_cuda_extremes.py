"""The CUDA kernels where numbers are not finite or hardly so, and where rounding would cost digits.

How they are run and judged: ``cuda_target``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import Case
from cuda_target import Target, mixed_order, on_every_target
from registry import ATTENTION, GAUSSIAN, POOLING, ROUTINGS, BackwardCall, Call, Routing
from suite import every_routing, hold_far_from_zero

from fastcaps.rules import Rule

autoused_order = pytest.fixture(autouse=True)(mixed_order)


@on_every_target
@pytest.mark.parametrize(
    ("argument", "value"),
    [("children", torch.nan), ("weight", torch.inf), ("bias", torch.nan), ("gate", torch.inf), ("state", torch.nan)],
)
@every_routing
def test_what_is_not_finite_comes_out(routing: Routing, argument: str, value: float, target: Target) -> None:
    """A NaN or an infinity in one sample: the other samples are as they were, its own results are not all finite."""
    name = routing.state[0] if argument == "state" else argument
    case = replace(routing.case("primes"), batch=3, rule=min(routing.rules - {Rule.LAYER_NORM}))
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
@pytest.mark.parametrize("rule", [Rule.EM, Rule.HEINSEN], ids=lambda rule: rule.name)
@pytest.mark.parametrize(("types", "iterations"), [(130, 1), (600, 3)])
def test_a_range_of_children_that_are_all_closed(types: int, iterations: int, rule: Rule, target: Target) -> None:
    """As the end of a sequence is: even if they are NaN, they leave no trace."""
    case = Case("closed", rule, batch=1, types=types, pose=(4, 4, 4), gate="some", betas="1M", start=False,
                iterations=iterations)  # fmt: skip
    call = GAUSSIAN.call(case)
    call.given["gate"].view(-1)[types // 2 :] = 0.0
    wanted = target.forward(call)
    call.given["children"].view(types, -1)[types // 2 :] = torch.nan
    for name, value in target.forward(call).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5, msg=name)


@on_every_target
@pytest.mark.parametrize("start", [False, True])
def test_an_infinite_bias_stays_with_its_parent(start: bool, target: Target) -> None:
    """Of all children: a lean walk, which takes it away from the base and adds it again, leaves it to another."""
    case = Case("inf", Rule.HEINSEN, types=40, parents=20, pose=(4, 4, 4), bias="1M", betas="1M", start=start)
    call = GAUSSIAN.call(case)
    call.given["bias"].view(-1)[20] = -torch.inf
    found = target.forward(call)
    for name, value in call.by_loop().items():
        whole = value.isfinite()
        torch.testing.assert_close(found[name][whole], value[whole], rtol=1e-3, atol=1e-4, msg=name)


LONELY = (  # parents that one child makes, or two: variances are nothing beside the means
    Case("one-child", Rule.EM, types=1, pose=(4, 4, 4), bias="IM", gate="some"),
    Case("one-child-any", Rule.EM, types=1, parents=5, pose=(5, 3, 7), gate="some"),
    Case("one-child-iterations", Rule.EM, types=4, parents=6, pose=(4, 4, 4), iterations=3),
    Case("one-child-grid", Rule.EM, grid=(3, 3), types=2, parents=6, pose=(4, 4, 4), window=(2, 2, 1, 1, 1, 1, 1, 1)),
    Case("one-child-sweeps", Rule.EM, batch=1, types=2, parents=1100, pose=(4, 4, 4)),
    Case("one-child-ranges", Rule.EM, batch=1, types=200, pose=(4, 4, 4), groups="one"),
)  # fmt: skip


@on_every_target
@pytest.mark.parametrize(("case", "option"), zip(LONELY, ["fast", "ordered"] * len(LONELY), strict=False), ids=str)
def test_a_parent_of_one_child(case: Case, option: str, target: Target) -> None:
    """Its gradient by the variance is large, and the mean's rounding must cancel in it (as it does in autograd)."""

    back = GAUSSIAN.backward_call(case).given
    if case.start:  # every parent's mean is one vote, and far from the others
        types = torch.arange(case.parents) % case.types
        weight = back["weight"][:1] if case.groups == "one" else back["weight"]
        votes = torch.einsum("bmcd,mde->bmce", back["children"][:, 0, 0, types],
                             weight[types if len(weight) > 1 else 0 * types, torch.arange(case.parents)])  # fmt: skip
        back["mean"] = votes[:, None, None].expand(case.iterations, *case.poses).contiguous()
        back["variance"] = 1e-3 * back["variance"]
        once, iterations = GAUSSIAN.call(replace(case, iterations=1)).given, []
        for k in range(case.iterations):
            state = {name: None if back[name] is None else back[name][k] for name in GAUSSIAN.state}
            iterations.append(GAUSSIAN.iteration(once, 0, state)[0])
        back |= {n: torch.cat([results[kept] for results in iterations]) for n, kept in GAUSSIAN.saved.items()}
    back["grad_variances"] = 1e4 * back["grad_variances"]
    call = BackwardCall(GAUSSIAN, {**back, "needs": 15})
    with target.guarded():
        again = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in call.given.items()}
        found = target.backward(BackwardCall(GAUSSIAN, again), option)
    call.bar().hold(found)


@on_every_target
@pytest.mark.parametrize("seed", [1, 43])
@pytest.mark.parametrize("pose", [(1, 64, 64), (6, 6, 6), (4, 4, 4)], ids=["1x64", "6x6", "4x4"])
def test_one_child_in_tf32(pose: tuple[int, int, int], seed: int, target: Target) -> None:
    """LayerNorm hides how long the only vote is, so its gate has hardly a gradient: the backward must make the votes
    that the forward has made, to the last bit of tf32."""
    case = Case("one", Rule.LAYER_NORM, batch=1, types=1, parents=2, pose=pose, gate="some", affine=False)
    target.check(ATTENTION, case, "tf32", seed)


@on_every_target
@pytest.mark.parametrize("size", [1e3, -1e3, 1e30, torch.nan])
@pytest.mark.parametrize(
    ("pose", "parents"),
    [
        *(((4, 4, 4), m) for m in (5, 10, 20, 40, 300)),
        *(((1, 8, 16), m) for m in (10, 13, 130)),
        ((8, 8, 8), 9),
        ((1, 64, 64), 9),
    ],
    ids=str,
)
def test_logits_out_of_range(pose: tuple[int, int, int], parents: int, size: float, target: Target) -> None:
    """One sample has logits whose powers of two overflow or vanish; the others keep their bits, whatever kernel."""
    call = ATTENTION.call(Case("far", Rule.PLAIN, batch=5, types=5, parents=parents, pose=pose))
    usual = target.forward(call)["parents"]
    call.given["query"][0] *= size
    found = target.forward(call)["parents"]
    exact = call.having([tensor.double() for tensor in call.tensors]).by_loop()["parents"]
    assert torch.equal(found[1:], usual[1:])
    torch.testing.assert_close(found[0].double(), exact[0], rtol=1e-3, atol=1e-3, equal_nan=True)


@on_every_target
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize(
    ("pose", "parents"), [((4, 4, 4), 5), ((4, 4, 4), 40), ((6, 6, 6), 5), ((1, 8, 16), 10), ((1, 64, 64), 3)], ids=str
)
def test_padding_hides_what_is_not_finite(
    pose: tuple[int, int, int], parents: int, value: float, target: Target
) -> None:
    """A matrix of one offset of the window: positions that have padding there do not know of it."""
    window = (3, 3, 1, 1, 1, 1, 1, 1)
    call = ATTENTION.call(Case("far", Rule.PLAIN, grid=(4, 4), types=2, parents=parents, pose=pose, window=window))
    call.given["weight"][1, 0] = value  # of the first offset
    found = target.forward(call)["parents"]
    exact = call.having([tensor.double() for tensor in call.tensors]).by_loop()["parents"]
    assert exact[:, 0].isfinite().all() and exact[:, 1:, 1:].isnan().any()
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-3, equal_nan=True)


@on_every_target
@pytest.mark.parametrize("size", [2.0**95, 2.0**-95], ids=["large", "small"])
@pytest.mark.parametrize("logit", [25.0, -25.0])
def test_gradients_of_any_size(logit: float, size: float, target: Target) -> None:
    """What a child's gains add up to neither overflows nor vanishes, though its logits are all alike and far from 0."""
    given = ATTENTION.backward_call(Case("size", Rule.PLAIN, types=3, parents=5, pose=(4, 4, 4))).given
    for name, same in (("children", given["children"][:1, :, :, :1]), ("weight", given["weight"][:1, :1])):
        given[name] = same + 0.01 * given[name]
    vote = given["children"][0, 0, 0, 0] @ given["weight"][0, 0]
    given["query"] = (logit / given["scale"] * vote / vote.square().sum()).expand_as(given["query"]).contiguous()
    found = target.backward(BackwardCall(ATTENTION, dict(given)))
    scaled = target.backward(BackwardCall(ATTENTION, given | {"grad": size * given["grad"]}))
    for name, gradient in found.items():
        torch.testing.assert_close(scaled[name] / size, gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max()))


@on_every_target
@pytest.mark.parametrize("option", ["fast", "tf32"])
@pytest.mark.parametrize("pose", [(4, 4, 4), (6, 6, 6), (1, 64, 64)], ids=str)
def test_positions_that_do_not_exist_leave_no_trace(pose: tuple[int, int, int], option: str, target: Target) -> None:
    """A lane without one has a child of zeros, which an infinite matrix makes NaN; its parent has a share of 0."""
    case = Case("absent", Rule.PLAIN, batch=1, types=2, parents=2, pose=pose, detach=True)
    given = ATTENTION.backward_call(case).given
    for name in ("children", "query"):
        given[name] = given[name].abs() + 0.1
    given["weight"][0, 0, 0, 0] = -torch.inf
    assert not target.backward(BackwardCall(ATTENTION, given), option)["dweight"].isnan().any()


@on_every_target
@pytest.mark.parametrize("size", [1e30, 3e38])
@pytest.mark.parametrize("name", ["gated-first", "gated-later", "padded-em", "one-position"])
def test_closed_children_of_any_size(name: str, size: float, target: Target) -> None:
    """Votes of finite numbers may overflow: behind a gate of 0 nothing of them shows, and their gates' gradients are
    finite."""
    back = GAUSSIAN.backward_call(replace(GAUSSIAN.case(name), gate="silent")).given
    children = back["children"].masked_fill((back["gate"] == 0)[..., None, None], size)
    wanted = target.backward(BackwardCall(GAUSSIAN, dict(back)), "ordered")
    found = target.backward(BackwardCall(GAUSSIAN, back | {"children": children}), "ordered")
    assert found["dgate"].isfinite().all()
    for key in found.keys() - {"dgate"}:
        assert torch.equal(found[key], wanted[key]), key


@on_every_target
def test_padding_hides_matrices_from_gaussians(target: Target) -> None:
    """Parents know nothing of a matrix that is NaN, of an offset that is padding where they are."""
    back = GAUSSIAN.backward_call(GAUSSIAN.case("gated-padded")).given
    back["weight"][0, 0] = torch.nan
    call = BackwardCall(GAUSSIAN, back)
    found, exact = target.backward(BackwardCall(GAUSSIAN, dict(back))), call.bar().exact
    for name in ("dmean", "dvariance", "dlog_weight"):
        assert torch.equal(found[name].isfinite(), exact[name].isfinite()), name
    assert 0 < found["dmean"].isfinite().double().mean() < 1


@on_every_target
@pytest.mark.parametrize("start", [False, True], ids=["first-iteration", "later-iteration"])
def test_variances_of_votes_far_from_zero(start: bool, target: Target) -> None:
    hold_far_from_zero(target.forward, 500, start)


@on_every_target
@pytest.mark.parametrize("parents", [5, 40, 70])
@pytest.mark.parametrize("fault", ["far", "sharp", "late", "high", "low", "nan"])
def test_gaussians_that_a_lean_walk_loses(fault: str, parents: int, target: Target) -> None:
    """Of one sample the mean is far from all votes, or all votes are alike; or logits are out of range."""
    case = Case("lost", Rule.HEINSEN, batch=5, types=37, parents=parents, pose=(4, 4, 4), gate="some", betas="1M")
    call = GAUSSIAN.call(replace(case, start=fault != "late"))
    if fault in ("sharp", "late"):
        call.given["children"][0, :, :, 1:] = call.given["children"][0, :, :, :1]
        call.given["weight"][1:] = call.given["weight"][:1]
        call.given["children"][0] += 1e-4 * GAUSSIAN.call(case, 9).given["children"][0]
    if fault == "far":
        call.given["mean"][0] += 1e3
        call.given["variance"][0] = 1e6
    elif fault in ("high", "low", "nan"):
        call.given["log_weight"][0] += {"high": 1e3, "low": -84.0, "nan": torch.nan}[fault]
    exact = call.having([tensor.double() for tensor in call.tensors]).by_loop()
    found = target.forward(call)
    for name in ("all_counts", "all_means", "all_variances", "all_scores"):
        least = 1e-11 if name == "all_variances" else 1e-3
        torch.testing.assert_close(found[name].double(), exact[name], rtol=1e-2, atol=least, equal_nan=True)


@on_every_target
@pytest.mark.parametrize("start", [False, True], ids=["first-iteration", "later-iteration"])
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
    found, wanted = (target.forward(one)["logsumexp"] for one in (longer, call))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@on_every_target
@pytest.mark.parametrize("routing", [one for one in ROUTINGS if Rule.SQUASH in one.rules], ids=str)
def test_squash_of_any_length(routing: Routing, target: Target) -> None:
    """Neither the square of a long vector overflows nor that of a short one vanishes."""
    case = Case("long", Rule.SQUASH, types=1, parents=1, pose=(4, 4, 4), groups="one", start=False)
    for iterations in (1, 2):
        for size in (1e-17, 300.0, 2e19, 1e30):
            call = routing.call(replace(case, iterations=iterations))
            call.given["children"] *= size
            exact = call.having([tensor.double() for tensor in call.tensors]).by_loop()["parents"]
            torch.testing.assert_close(target.forward(call)["parents"].double(), exact, rtol=2e-6, atol=0)
