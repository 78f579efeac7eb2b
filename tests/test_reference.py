"""The reference: one turn of each routing. Its formulas against autograd, what it does at the edges, and its roundings.

That its turns are the papers' procedures, ``test_registry`` shows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case
from oracle_routings import procedure_1
from registry import ATTENTION, GAUSSIAN, POOLING, POSE, ROUTINGS, VOTES, Call, Given, Routing, every_case, votes_of
from torch import Tensor

import fastcaps
from fastcaps import functional, reference
from fastcaps.reference import seen
from fastcaps.rules import DETACH, Rule
from fastcaps.votes import SET_WINDOW

every_routing = pytest.mark.parametrize("routing", ROUTINGS, ids=str)
gated = pytest.mark.parametrize(
    "routing", [POOLING, GAUSSIAN], ids=str
)  # where a gate of 0 is a child that is not there
CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def exactly(routing: Routing, name: str = "primes", **changes: Any) -> Given:
    """Return the arguments of one turn of a case in float64."""
    return routing.call(replace(routing.case(name), **{"dtype": torch.float64, "turns": 1, **changes})).given


def one_turn(routing: Routing, given: Given, detach: bool = False) -> tuple[Given, tuple[Tensor, ...]]:
    """Return the results of one turn, and those that the heads of the backward are gradients of."""
    results, _ = routing.turn(given, 0, {name: given[name] for name in routing.state}, detach)
    if routing is GAUSSIAN:
        return results, tuple(results[f"all_{name}"][0] for name in ("counts", "means", "variances", "scores"))
    normalised = routing is ATTENTION and given["rule"] == Rule.LAYER_NORM
    return results, (results["parents"] if normalised else results["sums"][0],)


def heads_of(routing: Routing, given: Given) -> list[Tensor | None]:
    """Return random gradients; none of EM's scores, which the border takes care of."""
    generator = torch.Generator().manual_seed(3)
    _, outputs = one_turn(routing, given)
    heads = [torch.randn(output.shape, generator=generator, dtype=output.dtype) for output in outputs]
    return [*heads[:3], None] if given["rule"] == Rule.EM else heads


def backward(routing: Routing, given: Given, heads: list[Tensor | None], bits: int | None = None) -> dict[str, Tensor]:
    """Return the gradients that the backward makes."""
    results, _ = one_turn(routing, given)
    saved: Given = {name: results[kept][0] for name, kept in routing.saved.items()}
    full = {**given, **saved, **dict.fromkeys(routing.absent.get(given["rule"], ()))}
    names = [argument.name for argument in routing.backward_op._schema.arguments][len(heads) + len(VOTES) : -1]
    needs = (1 << len(routing.gradients)) - 1 if bits is None else bits
    found = getattr(reference, f"{routing.name}_backward")(*heads, votes_of(given), *(full[n] for n in names), needs)
    return dict(zip(routing.gradients, found, strict=True))


def by_autograd(routing: Routing, given: Given, heads: list[Tensor | None], detach: bool = False) -> dict[str, Tensor]:
    """Return autograd's gradients of one turn, zeros where nothing reaches."""
    leaves = {n: v.detach().clone().requires_grad_() for n, v in given.items() if isinstance(v, Tensor)}
    _, outputs = one_turn(routing, {**given, **leaves}, detach)
    pairs = [(o, head) for o, head in zip(outputs, heads, strict=True) if head is not None and o.requires_grad]
    found = torch.autograd.grad(
        [o for o, _ in pairs], list(leaves.values()), [head for _, head in pairs], materialize_grads=True
    )
    return {f"d{name}": gradient for name, gradient in zip(leaves, found, strict=True)}


# ---- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("routing", "case"),
    every_case(lambda case: case.dtype == torch.float64 and (not case.name[0].isdigit() or case.rule == Rule.UNIT)),
    ids=str,
)
def test_the_backward_of_one_iteration_is_autograds(routing: Routing, case: Case) -> None:
    """Pooling's goes another way, as its shares may be those among more children."""
    given = routing.call(replace(case, turns=1)).given
    heads = heads_of(routing, given)
    found, wanted = backward(routing, given, heads), by_autograd(routing, given, heads)
    for name, gradient in found.items():
        if gradient.shape == (0,):
            absent = ("dnorm_bias", "dnorm_weight", "dbeta_use", "dbeta_ignore")
            assert name not in wanted or (name in absent and ((wanted[name] == 0).all() or given["rule"] == Rule.EM))
        elif name in wanted:  # a LayerNorm without parameters has gradients that nobody asked for
            assert gradient.is_contiguous() and gradient.storage_offset() == 0, name
            scale = max(1.0, wanted[name].abs().max().item() if wanted[name].numel() else 0.0)
            torch.testing.assert_close(gradient / scale, wanted[name] / scale, **CLOSE, msg=name)


@pytest.mark.parametrize("name", ["one-effective-child", "few-effective-children", "one-effective-child-heinsen"])
def test_a_parent_of_one_child_costs_float32_nothing(name: str) -> None:
    """The rounding of a mean must not be taken for a difference from it: variances there are nothing but eps."""
    case = GAUSSIAN.case(name)
    with fastcaps.backend("reference"):
        GAUSSIAN.bar(case).hold(GAUSSIAN.call(case).training(Call.by_op))


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("routing", [ATTENTION, POOLING], ids=str)
def test_detached_coefficients_are_constants(routing: Routing, detach: bool) -> None:
    """Which leaves the gate of attention its gradient."""
    for name in ("padded", "primes", *(["same-any-float64"] if routing is POOLING else [])):
        given = exactly(routing, name, layout="plain")
        heads = heads_of(routing, given)
        bits = (1 << len(routing.gradients)) - 1 | (DETACH if detach else 0)
        found, wanted = backward(routing, given, heads, bits), by_autograd(routing, given, heads, detach)
        for gradient in wanted:
            if gradient not in ("dnorm_bias", "dnorm_weight"):
                torch.testing.assert_close(found[gradient], wanted[gradient], **CLOSE, msg=gradient)
        assert (found["dquery"] == 0).all() == detach
        assert torch.equal(one_turn(routing, given, detach)[1][0], one_turn(routing, given)[1][0])


@every_routing
def test_only_the_gradients_asked_for(routing: Routing) -> None:
    given = exactly(routing, "padded")
    heads = heads_of(routing, given)
    everything = backward(routing, given, heads)
    count = len(everything)
    for needs in (1, 8, 0, 5, 2 + 16, 1 << count - 1):
        for k, (name, gradient) in enumerate(backward(routing, given, heads, needs).items()):
            wanted = everything[name] if needs >> k & 1 else torch.empty(0, dtype=torch.float64)
            assert torch.equal(gradient, wanted), name


@pytest.mark.parametrize("only", range(4))
def test_one_result_of_a_gaussian_has_a_gradient(only: int) -> None:
    given = exactly(GAUSSIAN, "primes")
    heads = [head if k == only else None for k, head in enumerate(heads_of(GAUSSIAN, given))]
    found, wanted = backward(GAUSSIAN, given, heads), by_autograd(GAUSSIAN, given, heads)
    for name, gradient in found.items():
        if gradient.shape == (0,):
            assert name.startswith("dbeta") and only != 3 and (wanted[name] == 0).all()
        else:
            torch.testing.assert_close(gradient, wanted[name], **CLOSE, msg=name)


TINY = {
    Rule.LAYER_NORM: {}, Rule.PLAIN: {"scale": -0.7}, Rule.SQUASH: {"scale": 1.0}, Rule.UNIT: {"normalize": True},
    Rule.EM: {}, Rule.HEINSEN: {}, Rule.KMEANS: {},
}  # fmt: skip


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_first_and_second_derivatives_of_two_turns(routing: Routing) -> None:
    """Every rule of the routing; which is what the ops' own second derivatives go through."""
    for rule in sorted({case.rule for case in routing.cases}):
        window = (1, 2, 1, 1, 0, 1, 1, 1)
        case = Case("tiny", rule, 1, (1, 2), 2, 2, (1, 2, 2), window, gate="some", bias="IM", turns=2, **TINY[rule])
        call = routing.call(replace(case, dtype=torch.float64))

        def run(*tensors: Tensor, call: Call = call) -> tuple[Tensor, ...]:
            results = call.having([*tensors, *call.grads.values()]).by_loop()
            return tuple(results[name] for name in call.grads)

        inputs = [tensor.clone().requires_grad_() for tensor in call.tensors[: len(call.names)]]
        assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
        assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


# ---- roundings and coefficients --------------------------------------------------------------------------------------


@every_routing
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rounds_once(routing: Routing, dtype: torch.dtype) -> None:
    given = exactly(routing, "primes", dtype=dtype)
    wide = {name: v.float() if isinstance(v, Tensor) else v for name, v in given.items()}
    found, wanted = one_turn(routing, given)[0], one_turn(routing, wide)[0]
    for name, result in found.items():
        narrow = name in routing.rounded or (name in routing.results and not routing.wide)
        assert result.dtype == (dtype if narrow else torch.float32), name
        assert torch.equal(result, wanted[name].to(result.dtype)), name
    for name, gradient in backward(routing, given, heads_of(routing, given)).items():
        source = given[name[1:]] if given.get(name[1:]) is not None else given["children"]
        assert gradient.dtype == source.dtype, name


@pytest.mark.parametrize(("routing", "case"), every_case(lambda case: not case.name[0].isdigit()), ids=str)
def test_coefficients_weigh_the_votes(routing: Routing, case: Case) -> None:
    """What the coefficients say is what a turn does: they add up to 1, and the sums are the votes' under them."""
    gate = "silent" if case.gate == "broken" else case.gate  # what is no number cannot be weighed
    case = replace(case, dtype=torch.float64, layout="plain", turns=1, gate=gate)
    if (
        case.batch * case.numbers[1] * case.numbers[2] * case.seen * case.parents * case.pose[0] * case.pose[2]
        > 500_000
    ):
        return
    given = routing.call(case).given
    votes = votes_of(given)
    state = [given[name] for name in routing.state]
    rest = [given[name] for name in routing.coefficients]
    shares = getattr(reference, f"{routing.stem}_coefficients")(votes, *state, *rest)
    view = seen.see(votes)
    present = torch.ones(shares.shape[:4]) if view.present is None else view.present.expand(shares.shape[:4])
    assert (shares[present == 0] == 0).all() and (shares >= 0).all()
    over, wanted = (4, present) if routing.competing else (3, 1.0)
    total = shares.sum(over)
    there = view.gate is None or bool((view.gate.expand(total.shape[0], -1, -1, -1) > 0).any(3).all())
    if routing.competing or there:
        torch.testing.assert_close(total, torch.ones_like(total) * wanted)
    sums = torch.einsum(
        "bhwim,bhwimce->bhwmce", view.gated(shares) if routing.competing else shares, seen.make_votes(view)
    )
    results, _ = one_turn(routing, given)
    found = (
        results["all_means"][0] * (results["all_counts"][0] + case.eps)[..., None, None]
        if routing is GAUSSIAN
        else results["sums"][0]
    )
    torch.testing.assert_close(found, sums, rtol=1e-9, atol=1e-9)


def test_coefficients_are_made_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    given = exactly(ATTENTION, "conv")
    whole = reference.attention_coefficients(votes_of(given), given["query"], 0.5)
    monkeypatch.setattr(reference.attention, "_SLICE", 1)  # one child at a time
    sliced = reference.attention_coefficients(votes_of(given), given["query"], 0.5)
    torch.testing.assert_close(sliced, whole, rtol=1e-13, atol=1e-14)


def test_procedure_1_of_the_paper() -> None:
    """Tsai et al. print no scale, ``W p`` instead of ``P W``, and parents of zeros for the first turn."""
    generator = torch.Generator().manual_seed(0)
    poses, last, matrices = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((7, 3), (4, 5), (7, 4, 5, 3))
    )
    for start in (last, torch.zeros_like(last)):
        expected = torch.tensor(procedure_1(poses.tolist(), start.tolist(), matrices.tolist()), dtype=torch.float64)
        asked = (start[None, :, None],) if start is last else ()
        weight = matrices.transpose(-1, -2)
        found = functional.inverted_attention_routing(poses[None, :, None], weight, *asked, scale=1.0)
        torch.testing.assert_close(found[0, :, 0], expected, rtol=1e-12, atol=1e-13)


# ---- what is there, what is not, and what overflows ------------------------------------------------------------------


@every_routing
def test_absent_children_contribute_nothing_even_with_infinite_weights(routing: Routing) -> None:
    case = Case("edge", routing.cases[0].rule, grid=(1, 1), types=2, window=(1, 1, 1, 1, 2, 2, 1, 1), bias="IM")
    given = routing.call(replace(case, dtype=torch.float64)).given
    given["weight"], given["bias"] = (torch.full_like(given[name], torch.inf) for name in ("weight", "bias"))
    given["bias"].fill_(torch.nan)
    outside = torch.ones(case.numbers[1:3], dtype=torch.bool)
    outside[2, 2] = False
    _, outputs = one_turn(routing, given)
    assert (
        outputs[0 if routing is not GAUSSIAN else 1][:, outside]
        == (given["norm_bias"].view(2, 2) if routing is ATTENTION and case.rule == 0 else 0)
    ).all()


@gated
@pytest.mark.parametrize("name", ["primes", "padded"])
@pytest.mark.parametrize("trash", [torch.nan, torch.inf, -torch.inf, 1e300])
def test_a_gate_of_0_leaves_no_trace(routing: Routing, name: str, trash: float) -> None:
    given = exactly(routing, name)
    given["gate"][..., 1] = 0
    clean = {n: v.clone() if isinstance(v, Tensor) else v for n, v in given.items()}
    clean["children"][..., 1, :, :] = 0  # finite: any number will do
    given["children"][..., 1, :, :] = trash
    if name == "primes":  # a set, where a bias belongs to one child
        given["bias"][1] = trash
    for found, wanted in zip(one_turn(routing, given)[1], one_turn(routing, clean)[1], strict=True):
        assert torch.equal(found, wanted)
    heads = heads_of(routing, clean)
    wanted = backward(routing, clean, heads)
    found = backward(routing, given, heads)
    for key in set(found) & set(wanted) - {"dgate"}:
        if wanted[key].shape != (0,):
            torch.testing.assert_close(found[key], wanted[key], rtol=1e-11, atol=1e-12, msg=key)
    assert found["dgate"].isfinite().all() and (found["dchildren"][..., 1, :, :] == 0).all()
    torch.testing.assert_close(found["dgate"][..., 0], wanted["dgate"][..., 0], rtol=1e-11, atol=1e-12)
    if trash != 1e300 or routing is GAUSSIAN:  # whose distances overflow
        assert (found["dgate"][..., 1] == 0).all()


@gated
def test_a_gate_of_0_may_open_again(routing: Routing) -> None:
    given = exactly(routing, "primes")
    given["gate"][..., 1] = 0
    assert (backward(routing, given, heads_of(routing, given))["dgate"][..., 1] != 0).all()


@gated
@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_nobody_there(routing: Routing, eps: float) -> None:
    given = exactly(routing, "primes", eps=eps)
    given["gate"][0] = 0
    given["children"][0, :, :, 0] = torch.nan
    results, outputs = one_turn(routing, given)
    for output in outputs:
        assert (output[0] == 0).all() and output[1:].isfinite().all()
    if routing is POOLING:
        assert (results["logsumexp"][0, 0] == -torch.inf).all() and results["logsumexp"][0, 1:].isfinite().all()
    found = backward(routing, given, heads_of(routing, given))
    assert all(gradient.isfinite().all() for gradient in found.values())
    if routing is POOLING:  # nothing to learn from an empty place
        assert all((found[name][0] == 0).all() for name in ("dchildren", "dquery", "dgate"))


@every_routing
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_nan_and_infinity_come_out_where_they_went_in(routing: Routing, number: float) -> None:
    given = exactly(routing, "primes")
    given["children"][1, 0, 0, 2] = number
    for output in one_turn(routing, given)[1]:
        assert output[1].isnan().all() and output[[0, 2]].isfinite().all()


@gated
def test_nothing_overflows_in_place_of_a_child_that_is_not_there(routing: Routing) -> None:
    """Among scores of -2000 a score of 0 would win by more than a float holds; far from the means, and by variances of
    1e-12, a vote of 0 would be infinitely unlikely."""
    far = -1000.0 if routing is POOLING else 1e150
    children = torch.full((1, 1, 1, 3, 1, 2), far, dtype=torch.float64)
    children[0, 0, 0, 1] = torch.nan
    gate = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64).view(1, 1, 1, 3)
    weight = torch.eye(2, dtype=torch.float64).expand(1, 2, 2, 2)
    mean = torch.full((1, 1, 1, 2, 1, 2), far, dtype=torch.float64)
    given: Given = {"children": children, "weight": weight, "bias": None, "gate": gate, "parents": 2}
    given["window"] = list(SET_WINDOW)
    if routing is POOLING:
        given.update(query=torch.ones_like(mean), scale=1.0, normalize=False, rule=int(Rule.UNIT))
    else:
        zeros = torch.zeros(1, 1, dtype=torch.float64)
        given.update(mean=mean, variance=torch.full_like(mean, 1e-12), log_weight=None, beta_use=zeros)
        given.update(beta_ignore=zeros, temperatures=[1.0], rule=int(Rule.HEINSEN), eps=0.0)
    _, outputs = one_turn(routing, given)
    torch.testing.assert_close(outputs[0 if routing is POOLING else 1], mean)
    heads = [None if head is None else torch.ones_like(head) for head in heads_of(routing, given)]
    assert all(gradient.isfinite().all() for gradient in backward(routing, given, heads).values())


def test_zero_votes_have_keys_and_gradients_of_zero() -> None:
    given = exactly(POOLING, "same-any-float64", layout="plain")
    assert given["normalize"]
    given["children"][:, :, :, 1:3] = 0
    heads = heads_of(POOLING, given)
    found, wanted = backward(POOLING, given, heads), by_autograd(POOLING, given, heads)
    for name, gradient in wanted.items():
        assert gradient.isfinite().all()
        torch.testing.assert_close(found[name], gradient)


def test_a_log_weight_of_minus_infinity_is_a_parent_that_is_not_there() -> None:
    given = exactly(GAUSSIAN, "primes")
    given["log_weight"][..., 3] = -torch.inf
    _, (counts, means, *_) = one_turn(GAUSSIAN, given)
    assert (counts[..., 3] == 0).all() and (means[..., 3, :, :] == 0).all()
    heads = heads_of(GAUSSIAN, given)
    assert all(gradient.isfinite().all() for gradient in backward(GAUSSIAN, given, heads).values())


def test_large_logits_stay_finite_and_pick_a_child() -> None:
    children, query = torch.randn(1, 1, 1, 7, 1, 4), torch.randn(1, 1, 1, 3, 1, 4)
    given = {"children": children, "weight": None, "bias": None, "gate": None, "parents": 3, "window": SET_WINDOW}
    for scale in (0.0, 1e6):
        call = {**given, "query": query, "scale": scale, "normalize": False, "rule": int(Rule.UNIT)}
        results, (sums,) = one_turn(POOLING, call)
        assert results["logsumexp"].isfinite().all()
        nearest = torch.einsum("mce,ice->mi", query[0, 0, 0], children[0, 0, 0]).argmax(1)
        wanted = children[0, 0, 0][nearest] if scale else children[0, 0, 0].mean(0).expand(3, -1, -1)
        torch.testing.assert_close(sums[0, 0, 0], wanted)


def test_a_variance_of_one_half_is_k_means() -> None:
    given = exactly(GAUSSIAN, "primes", rule=Rule.KMEANS)
    assert given["variance"] is None and given["mean"] is not None
    k_means = one_turn(GAUSSIAN, given)[1]
    given["variance"] = torch.full_like(given["mean"], 0.5)
    for found, wanted in zip(one_turn(GAUSSIAN, given)[1], k_means, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_moments_may_be_summed_about_any_shift(eps: float) -> None:
    """The formulas by which one sweep finds both moments (docs/algebra.md)."""
    given = exactly(GAUSSIAN, "primes", eps=eps)
    _, (counts, means, variances, _) = one_turn(GAUSSIAN, given)
    view = seen.see(votes_of(given))
    state = (given[name] for name in GAUSSIAN.state)
    shares = view.gated(reference.gaussian_coefficients(votes_of(given), *state))
    shift = given["mean"] + 3
    offsets = seen.make_votes(view) - shift.unsqueeze(3)
    first = torch.einsum("bhwim,bhwimce->bhwmce", shares, offsets)
    second = torch.einsum("bhwim,bhwimce->bhwmce", shares, offsets.square())
    count = counts[..., None, None]
    delta = (first - eps * shift) / (count + eps)
    torch.testing.assert_close(shift + delta, means)
    torch.testing.assert_close((second - 2 * delta * first + delta.square() * count) / (count + eps), variances)


@pytest.mark.parametrize("first_turn", [True, False])
def test_a_common_offset_of_10000_costs_float32_nothing(first_turn: bool) -> None:
    case = Case(
        "far", Rule.HEINSEN, 2, types=200, pose=(4, 4, 4), groups="one", gate="some", eps=0.0, start=not first_turn
    )
    given = GAUSSIAN.call(case).given
    given["children"] = given["children"] + 1e4
    given["weight"] = torch.eye(4).expand(1, 3, 4, 4)
    if not first_turn:
        given["mean"], given["variance"] = given["mean"] + 1e4, torch.ones_like(given["mean"])
    double = {name: v.double() if isinstance(v, Tensor) else v for name, v in given.items()}
    (_, means, variances, _), (_, exact_means, exact, _) = one_turn(GAUSSIAN, given)[1], one_turn(GAUSSIAN, double)[1]
    assert (exact.mean() - 1).abs() < 0.5
    torch.testing.assert_close(variances.double(), exact, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(means.double(), exact_means, rtol=1e-6, atol=0)


def test_a_zero_vector_has_no_direction() -> None:
    """Parents of zero children are zero, with finite gradients, whoever competes."""
    for routing in (ATTENTION, POOLING):
        case = Case("zero", Rule.SQUASH, types=6, pose=(2, 2, 2), groups="one", turns=3, start=False, scale=1.0)
        call = routing.call(replace(case, dtype=torch.float64))
        call.given["children"].zero_()
        found = call.training(Call.by_loop)
        assert (found["parents"] == 0).all() and found["dchildren"].isfinite().all()
        assert POSE == (-2, -1)
