"""The reference: its backward against autograd, what it does at the edges, and its roundings.

``test_registry`` shows that its iterations are the papers' procedures; ``test_kernels`` tests it as the CPU's kernels.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import Case
from registry import GAUSSIAN, POOLING, ROUTINGS, Call, Routing, every_case
from suite import every_routing
from torch import Tensor

import fastcaps
from fastcaps.rules import Rule

CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def by_reference(call: Call) -> dict[str, Tensor]:
    with fastcaps.backend("reference"):
        return call.training(Call.by_op)


@pytest.mark.parametrize(("routing", "case"), every_case(lambda case: case.dtype == torch.float64), ids=str)
def test_the_backward_is_autograds(routing: Routing, case: Case) -> None:
    """The explicit formulas of every iteration; where coefficients are constants too."""
    for detach in (False, True) if routing.by_shares and case.name == "sharing-float64" else (case.detach,):
        call = routing.call(replace(case, detach=detach, gate="silent" if case.gate == "broken" else case.gate))
        found = by_reference(call)
        for name, wanted in call.training(Call.by_loop).items():
            scale = max(1.0, wanted.abs().max().item() if wanted.numel() else 0.0)
            torch.testing.assert_close(found[name] / scale, wanted / scale, **CLOSE, equal_nan=True, msg=name)


@pytest.mark.parametrize("name", ["one-effective-child", "few-effective-children", "one-effective-child-heinsen"])
def test_a_parent_of_one_child_costs_float32_nothing(name: str) -> None:
    """The rounding of a mean must not be taken for a difference from it: variances there are nothing but eps."""
    case = GAUSSIAN.case(name)
    GAUSSIAN.bar(case).hold(by_reference(GAUSSIAN.call(case)))


@every_routing
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rounds_once(routing: Routing, dtype: torch.dtype) -> None:
    call = routing.call(replace(routing.case("primes"), dtype=dtype, iterations=1))
    wanted = call.having([tensor.float() for tensor in call.tensors]).by_loop()
    for name, result in call.by_loop().items():
        narrow = name in routing.rounded or (name in routing.results and not routing.wide)
        assert result.dtype == (dtype if narrow else torch.float32), name
        assert torch.equal(result, wanted[name].to(result.dtype)), name


# ---- what is there, and what is not ----------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", [one for one in ROUTINGS if Rule.LAYER_NORM not in one.rules], ids=str)
@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_nobody_there(routing: Routing, eps: float) -> None:
    call = routing.call(replace(routing.case("primes"), dtype=torch.float64, eps=eps))
    call.given["gate"][0] = 0
    call.given["children"][0, :, :, 0] = torch.nan
    found = by_reference(call)
    assert not any(found[name][0].any() for name in ("parents", "means") if name in routing.results)
    assert all(found[f"d{name}"].isfinite().all() for name in call.names)


def test_zero_votes_have_keys_and_gradients_of_zero() -> None:
    call = POOLING.call(replace(POOLING.case("same-any-float64"), layout="plain"))
    assert call.given["normalize"]
    call.given["children"][:, :, :, 1:3] = 0
    found = by_reference(call)
    for name, wanted in call.training(Call.by_loop).items():
        assert wanted.isfinite().all()
        torch.testing.assert_close(found[name], wanted)


def test_a_log_weight_of_minus_infinity_is_a_parent_that_is_not_there() -> None:
    call = GAUSSIAN.call(replace(GAUSSIAN.case("primes"), dtype=torch.float64))
    call.given["log_weight"][..., 3] = -torch.inf
    found = by_reference(call)
    assert not found["all_counts"][..., 3].any() and not found["means"][..., 3, :, :].any()
    assert all(found[f"d{name}"].isfinite().all() for name in call.names)
