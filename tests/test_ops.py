"""The six ops as citizens of PyTorch: schema, fakes, autograd, autocast, and what a backward asks for.

Compilers, export, transforms and checkpoints see them through the public functions: ``test_torch_*``.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import DENSE, Case
from features import Called
from registry import ROUTINGS, VOTES, Call, Routing, votes_of
from suite import cases_named, every_backend, every_routing, native_only
from torch import Tensor

import fastcaps
from fastcaps import Window, backends, functional, ops, reference
from fastcaps.rules import DETACH, Rule
from fastcaps.votes import SET_WINDOW

FEW = ["padded", "primes", "stay-float32", "same-any-float64", "sharing-float64"]
CHECKED = ["padded", "same-any-float64"]
"""Every argument of each op, and votes that are the children."""


def leaves_of(call: Call, device: str = "cpu", grad: bool = True) -> list[Any]:
    """Return the arguments of the op, its tensors leaves."""
    return [a.detach().to(device).requires_grad_(grad) if isinstance(a, Tensor) else a for a in call.arguments(False)]


# ---- schema and fakes ------------------------------------------------------------------------------------------------


@cases_named(CHECKED)
def test_opcheck(routing: Routing, case: Case) -> None:
    torch.library.opcheck(routing.op, leaves_of(routing.call(replace(case, iterations=2))))


@cases_named(CHECKED)
def test_opcheck_backward(routing: Routing, case: Case) -> None:
    given = routing.backward_call(replace(case, iterations=2)).given
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(routing.backward_op, [*given.values()], test_utils=checks)


@cases_named([*FEW, "one-parent", "sharp", "whole-grid", "pointwise", "no-eps", "nobody-no-eps-em", "folded-types"])
def test_fake_kernels_tell_the_truth(routing: Routing, case: Case) -> None:
    """Shapes, dtypes and strides on the meta device are those of the real call, coefficients and backward included."""
    backward, relaid = (routing.backward_call(replace(case, layout=x)).given for x in ("plain", DENSE[1]))
    for op, arguments in (
        (routing.op, routing.call(case).arguments(coefficients=True)),
        (routing.backward_op, [*backward.values()]),
        (routing.backward_op, [*relaid.values()]),
        (routing.backward_op, [*{**backward, "needs": 1}.values()]),
    ):
        meta = [a.to("meta") if isinstance(a, Tensor) else a for a in arguments]
        for one, other in zip(op(*meta), op(*arguments), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert one.numel() == 0 or one.stride() == other.stride()


def test_a_fake_beyond_32_bits() -> None:
    children = torch.empty(100_000, 64, 16, 16, 4, 4, device="meta")
    routed = functional.inverted_attention_routing(
        children,
        torch.empty(576, 64, 4, 4, device="meta"),
        torch.empty(100_000, 64, 7, 7, 4, 4, device="meta"),
        window=Window(3, 2),
    )
    assert routed.numel() == 100_000 * 64 * 49 * 16 > 2**31


# ---- results ---------------------------------------------------------------------------------------------------------


@cases_named(FEW)
def test_coefficients_are_those_of_the_last_iteration(routing: Routing, case: Case) -> None:
    """Those that the call used: the reference's, from the state that its own iterations left."""
    for iterations in (1, 3):
        for start in (True, False):
            call = routing.call(replace(case, iterations=iterations, start=start, dtype=torch.float64))
            found = routing.op(*call.arguments(coefficients=True))[-1]
            state = {name: call.given[name] for name in routing.state}
            for iteration in range(iterations - 1):
                _, state = routing.iteration(call.given, iteration, state)
            shares = getattr(reference, f"{routing.stem}_coefficients")
            given = {**call.given, **state, "votes": votes_of(call.given)}
            wanted = shares(*(given[name] for name in inspect.signature(shares).parameters))
            assert not found.requires_grad
            torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)


@every_routing
def test_the_entrance_is_the_op(routing: Routing) -> None:
    """The functions' entrance skips the dispatcher if nothing watches: the same bits, with gradients."""
    call = routing.call(routing.case("stay-float32"))
    entrance = getattr(ops, routing.name)

    def entered(one: Call) -> dict[str, Tensor]:
        given = one.arguments()
        return dict(zip(routing.outputs, entrance.route(votes_of(one.given), entrance.Own(*given[6:])), strict=False))

    wanted = call.training(Call.by_op)
    for name, value in call.training(entered).items():
        assert torch.equal(value, wanted[name]), name


@every_routing
def test_the_formula_that_an_export_to_other_runtimes_takes(routing: Routing) -> None:
    arguments = routing.call(replace(routing.case("padded"), iterations=2, dtype=torch.float64)).arguments(True)
    found = torch._decomp.decomposition_table[routing.op](*arguments)
    torch.testing.assert_close(tuple(found), tuple(routing.op(*arguments)))


# ---- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", list(Rule), ids=lambda rule: rule.name)
def test_second_and_third_derivatives(rule: Rule) -> None:
    """Of two iterations, in children, weights and what the first iteration starts from: the op's are the oracle's."""
    routing = next(one for one in ROUTINGS if rule in {case.rule for case in one.cases})
    case = Case(
        "tiny", rule, types=3, parents=2, pose=(1, 3, 2), gate="some", bias="IM", iterations=2, dtype=torch.float64
    )
    call = routing.call(case)
    asked = ["children", "weight", routing.state[0]]

    def derivatives(results: Any) -> list[Tensor]:
        given = {n: v.clone().requires_grad_() if isinstance(v, Tensor) else v for n, v in call.given.items()}
        found = results(replace(call, given=given))
        first, second, third = (given[name] for name in asked)
        kept = [
            torch.autograd.grad(
                sum((r**3).sum() for n, r in found.items() if n in call.grads), first, create_graph=True
            )[0]
        ]
        kept += torch.autograd.grad(kept[0].square().sum(), second, create_graph=True)
        kept += torch.autograd.grad(kept[1].square().sum(), third)
        return kept

    for found, wanted in zip(derivatives(Call.by_op), derivatives(Call.by_loop), strict=True):
        assert (found - wanted).abs().max() <= 1e-8 * wanted.abs().max()


@every_routing
def test_a_second_derivative_under_autocast_is_as_exact_as_the_first(routing: Routing) -> None:
    """Autocast does not reach into the formulas that differentiate a backward."""
    arguments = leaves_of(routing.call(replace(routing.case("padded"), dtype=torch.float64)))
    children, weight = arguments[:2]
    (first,) = torch.autograd.grad(routing.op(*arguments)[0].square().sum(), children, create_graph=True)
    (wanted,) = torch.autograd.grad(first.square().sum(), weight, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (found,) = torch.autograd.grad(first.square().sum(), weight)
    assert torch.equal(found, wanted)


def needs_of(mode: Any) -> list[int]:
    """Return the ``needs`` of every backward that was called."""
    return [args[-1] for name, args in mode.calls if name.startswith("fastcaps::") and name.endswith("_backward")]


@every_backend
@every_routing
def test_a_watched_backward_is_the_same(routing: Routing, name: str) -> None:
    """A mode brings the backward through the dispatcher, below which autograd is left out."""
    call = routing.call(replace(routing.case("padded"), iterations=2))
    found = []
    for mode in (nullcontext(), Called()):
        with fastcaps.backend(name), mode:
            found.append(call.training(Call.by_op))
    for key, gradient in found[0].items():
        assert torch.equal(gradient, found[1][key]) and (not key.startswith("d") or gradient.abs().sum() > 0), key
    assert needs_of(mode)


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("iterations", [1, 3])
@every_routing
def test_a_backward_asks_for_no_more_than_is_needed(routing: Routing, iterations: int, detach: bool) -> None:
    """An iteration before the last for what it was given, and all of them for what is wanted, alone."""
    call = routing.call(replace(routing.case("padded"), iterations=iterations, detach=detach))
    bits = {name[1:]: 1 << k for k, name in enumerate(routing.gradients)}
    between = sum(bits[name] for name in routing.state) if iterations > 1 and not call.detach else 0
    for name in call.names:
        arguments = leaves_of(call, grad=False)
        position = [*call.given].index(name)
        arguments[position].requires_grad_()
        with Called() as called:
            found = routing.op(*arguments)[: len(routing.results)]
            sum(result.sum() for result in found if result.requires_grad).backward()
        gradient = arguments[position].grad
        assert gradient is None or gradient.shape == arguments[position].shape
        own = bits.get(name, 0)
        together = 0
        for needs in needs_of(called):
            assert needs & ~DETACH & ~(own | between) == 0, (name, needs)
            assert bool(needs & DETACH) == (call.detach and bool(needs))
            together |= needs
        silent = (call.detach and name in routing.by_shares) or name == "norm_bias"
        absent = name in routing.absent.get(call.given["rule"], ())
        assert silent or absent or together & own, (name, needs_of(called))
        assert len(needs_of(called)) <= (iterations + 1 if between else 1)


@pytest.mark.parametrize("iterations", [1, 3])
@every_backend
@every_routing
def test_a_set_is_a_grid_of_one_position(routing: Routing, name: str, iterations: int) -> None:
    """In every bit, whatever its strides, with coefficients and every gradient."""
    case = replace(
        routing.case("children-float32"), iterations=iterations, bias="IM", layout="transposed", parents=1 + iterations
    )
    call = routing.call(case)
    with fastcaps.backend(name):
        wanted, found = (one.training(Call.by_op) for one in (call, call.as_set()))
        arguments, shares = (one.arguments(coefficients=True) for one in (call, call.as_set()))
        wanted["r"], found["r"] = routing.op(*arguments)[-1], routing.op(*shares)[-1]
    assert found["r"].shape == (case.batch, case.seen, case.parents)
    for key, value in wanted.items():
        leading = value.dim() - found[key].dim()
        assert leading in (0, 2), key
        assert torch.equal(found[key].reshape(value.shape), value), key
    with pytest.raises((ValueError, RuntimeError), match="window"), fastcaps.backend(name):
        routing.op(*(list(SET_WINDOW[:4]) + [1, 1, 1, 1] if k == 5 else x for k, x in enumerate(shares)))


# ---- autocast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("autocast", "runs"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)], ids=str
)
@cases_named(FEW)
def test_autocast_runs_in_its_dtype(routing: Routing, case: Case, autocast: torch.dtype, runs: torch.dtype) -> None:
    """float16 becomes float32 on the CPU, whose kernels have none; what a Gaussian is stays in float32."""
    call = routing.call(replace(case, dtype=torch.float32))
    wide = {"mean", "variance", "log_weight", "beta_use", "beta_ignore"}
    cast = {n: v.to(runs) if isinstance(v, Tensor) and n not in wide else v for n, v in call.given.items()}
    arguments = leaves_of(call)
    with torch.autocast("cpu", dtype=autocast):
        found = routing.op(*arguments)
    for one, other in zip(found, routing.op(*replace(call, given=cast).arguments()), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    sum(result.float().sum() for result in found[: len(routing.results)]).backward()
    assert all(a.grad is None or a.grad.dtype == torch.float32 for a in arguments if isinstance(a, Tensor))


# ---- wrong calls -----------------------------------------------------------------------------------------------------


@every_routing
@every_backend
def test_wrong_arguments_are_named(routing: Routing, name: str) -> None:
    """Kernels in Python would broadcast in silence, those in C++ read beyond the end."""
    call = routing.call(routing.case("padded"))
    with backends.backend(name):
        for argument in call.names:
            if argument == "children":
                continue
            right = call.given[argument]
            for wrong in (right[..., :-1], right[0], right.to("meta"), right.to(torch.float16)):
                # a weight of other sizes is right for other parents
                says = argument if argument != "weight" else "weight|query|mean|bias"
                with pytest.raises((RuntimeError, ValueError, TypeError), match=says):
                    routing.op(*replace(call, given={**call.given, argument: wrong}).arguments())
        for argument, wrong in (("rule", 7), ("rule", -1), ("parents", 5)):
            with pytest.raises((RuntimeError, ValueError), match=argument):
                routing.op(*replace(call, given={**call.given, argument: wrong}).arguments())


@native_only
@every_routing
def test_wrong_arguments_of_a_backward_are_named(routing: Routing) -> None:
    """The state may have one iteration less, nothing else may."""
    call = routing.backward_call(replace(routing.case("padded"), iterations=3, start=True))
    arguments = {one.name: str(one.type) for one in routing.backward_op._schema.arguments}
    tells = next(
        name for name in (*routing.grads, *routing.saved) if arguments[name] == "Tensor"
    )  # how many iterations
    for argument in (*routing.grads, *routing.state, *routing.saved):
        right = call.given[argument]
        if right is None:
            continue
        wrongs = [right[..., :-1]]
        if argument != tells:
            wrongs += [right[:1], torch.cat((right, right))] + ([] if argument in routing.state else [right[:-1]])
        for wrong in wrongs:
            with pytest.raises(RuntimeError, match=rf"\b{argument}\b"):
                routing.backward_op(*{**call.given, argument: wrong}.values())


@every_routing
def test_a_backward_by_the_reference_names_what_has_another_dtype(routing: Routing) -> None:
    call = routing.backward_call(replace(routing.case("padded"), iterations=2, start=True))
    with backends.backend("reference"):
        for argument in (*VOTES, *routing.grads, *routing.state, *routing.saved):
            if isinstance(right := call.given[argument], Tensor):
                says = argument if argument != "children" else "|".join(call.given)
                with pytest.raises((TypeError, ValueError), match=rf"\b({says})\b"):
                    routing.backward_op(*{**call.given, argument: right.double()}.values())
