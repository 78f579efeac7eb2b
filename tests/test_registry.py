"""The registry is what is registered, its rows cover all pairs of factors, and its oracle is the papers' procedures."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import case_rows
import oracle_routings
import pytest
import torch
from case_rows import every_value, pairs_of, rows_covering
from cases import LAYOUTS, Case
from registry import ROUTINGS, Routing, every_case
from torch import Tensor

from bench.judge import Bar, allowed_error
from fastcaps import ops
from fastcaps.ops import verbs
from fastcaps.rules import Rule

every_routing = pytest.mark.parametrize("routing", ROUTINGS, ids=str)


def test_rows_are_the_ops_that_are_registered() -> None:
    """By torch's own list: an op that is added needs a row."""
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fastcaps::")}
    registered -= {op.name() for op in verbs.ops.values()}  # which tests/test_verbs*.py hold
    names = {f"fastcaps::{routing.name}{end}" for routing in ROUTINGS for end in ("", "_backward")}
    assert registered == names
    assert [routing.stem for routing in ROUTINGS] == [routing.stem for routing in ops.ROUTINGS]


@every_routing
def test_arguments_stand_in_the_order_of_the_schema(routing: Routing) -> None:
    call = routing.call(routing.case("padded"))
    names = [argument.name for argument in routing.op._schema.arguments]
    assert [*call.given] == names[: len(call.given)] and len(call.arguments()) == len(names)


@every_routing
def test_every_name_and_rule_has_its_cases(routing: Routing) -> None:
    assert len({case.name for case in routing.cases}) == len(routing.cases)
    assert {case.rule for case in routing.cases} == routing.rules
    assert set().union(*(one.rules for one in ROUTINGS)) == set(Rule)
    assert {case.layout for case in routing.cases} == set(LAYOUTS)


@every_routing
def test_rows_cover_all_pairs(routing: Routing) -> None:
    factors = routing.table.factors
    rows = rows_covering(factors, case_rows.allowed, seed=5)
    met = {frozenset(pair) for row in rows for pair in combinations(row.items(), 2)}
    assert met == set(pairs_of(factors, case_rows.allowed))
    few = [rows[k] for k in every_value(rows, lambda row: 1.0)]
    assert {item for row in few for item in row.items()} == {(name, v) for name in factors for v in factors[name]}
    sizes = sorted(len(values) for values in factors.values())
    assert sizes[-1] * sizes[-2] <= len(rows) <= 1.5 * sizes[-1] * sizes[-2]


def is_small(case: Case) -> bool:
    """Whether the oracle gets through it quickly."""
    votes = case.batch * case.numbers[1] * case.numbers[2] * case.seen * case.parents * case.iterations
    return 0 < votes * case.pose[0] * case.pose[2] * max(case.pose[1], 4) < 30_000


@pytest.mark.parametrize(("routing", "case"), every_case(is_small), ids=str)
def test_the_oracle_is_the_procedure_over_stored_votes(routing: Routing, case: Case) -> None:
    """All iterations, all results; absent children have no votes."""
    call = routing.call(replace(case, dtype=torch.float64))
    given, found, places = call.given, call.by_loop(), 0
    votes = [given[name] for name in ("children", "weight", "bias", "gate", "window", "parents")]
    for place, seen in oracle_routings.positions(*votes):
        for name, wanted in routing.loop(given, seen, place).items():
            here = found[name][place] if name in routing.results else found[name][(slice(None), *place)]
            torch.testing.assert_close(here.view_as(wanted), wanted, rtol=1e-9, atol=1e-10, msg=f"{name} {place}")
        places += 1
    assert places == case.batch * case.numbers[1] * case.numbers[2]


def test_the_loops_are_asked_of_every_rule_window_and_option() -> None:
    small = [case for _, case in every_case(is_small)]
    assert {int(case.rule) for case in small} == {int(rule) for rule in Rule}
    for choice in ("window", "gate", "bias", "start", "iterations", "normalize", "affine", "log_weight"):
        everywhere = {getattr(case, choice) for _, case in every_case(pairs=True)}
        assert {getattr(case, choice) for case in small} >= everywhere, choice


# ---- the judge -------------------------------------------------------------------------------------------------------


def test_the_rule() -> None:
    exact = torch.tensor([0.0, -4.0, torch.inf])
    assert allowed_error(exact, torch.float32, 0.25, 0.125) == 0.5 + 0.125 + 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bar_sees_what_is_wrong(dtype: torch.dtype) -> None:
    """A number that is off, lost, infinite, of another dtype or shape; and what it ought to let pass."""

    def run(tensors: Any) -> dict[str, Tensor]:
        (given,) = tensors
        return {"sum": given.cumsum(0), "log": given.log()}

    numbers = torch.linspace(0.0, 1.0, 33).to(dtype)
    right = run([numbers])
    bar = Bar(run, [numbers])
    bar.hold(right)
    epsilon = torch.finfo(dtype).eps
    for spoil, says in (
        (lambda t: t + (torch.arange(33) == 7) * 60 * epsilon * 16, "errs by"),
        (lambda t: torch.where(torch.arange(33) == 7, torch.nan, t), "not finite"),
        (lambda t: t.masked_fill(t == -torch.inf, 0.0) if t.isinf().any() else t[:-1], "wanted"),
        (lambda t: t.double(), "wanted"),
    ):
        wrong = {**right, "sum": spoil(right["sum"])}
        wrong["sum"] = wrong["sum"].to(dtype) if says != "wanted" else wrong["sum"]
        assert any(says in complaint for complaint in bar.judge(wrong).complaints), says
    assert bar.judge({**right, "log": right["log"].masked_fill(right["log"] == -torch.inf, 0.0)}).complaints
    assert bar.judge({"sum": right["sum"]}).complaints


def test_what_a_dtype_cannot_hold_is_infinity() -> None:
    """There, and nowhere else: the largest number of the dtype will not do, and what fits is judged as before."""
    bar = Bar(lambda tensors: {"square": tensors[0].square()}, [torch.tensor([3.0, 300.0], dtype=torch.float16)])
    bar.hold({"square": torch.tensor([9.0, torch.inf], dtype=torch.float16)})
    for wrong in ([9.0, 65504.0], [torch.inf, torch.inf], [9.0, -torch.inf], [9.5, torch.inf]):
        assert bar.judge({"square": torch.tensor(wrong, dtype=torch.float16)}).complaints, wrong
