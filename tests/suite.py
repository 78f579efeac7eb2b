"""What suites over the registry share with pytest: marks, and calls drawn at random."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from case_rows import allowed
from cases import DENSE, Case, strides
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from registry import GAUSSIAN, ROUTINGS, BackwardCall, Call, Routing, every_case
from torch import Tensor

from fastcaps import backends
from fastcaps.rules import Rule

native_only = pytest.mark.skipif(
    not backends.native_serves(), reason=f"no native CPU kernels: {backends.listing()[2].detail}"
)
every_routing = pytest.mark.parametrize("routing", ROUTINGS, ids=str)
every_backend = pytest.mark.parametrize("name", [pytest.param("cpu", marks=native_only), "reference"])


def python(*command: str, cwd: str | Path = Path(__file__).parents[1], **environ: str) -> Any:
    """Run a fresh interpreter, which finds what this one finds: code, or several arguments."""
    arguments = ["-c", *command] if len(command) == 1 else command
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environ}
    return subprocess.run([sys.executable, *arguments], env=variables, cwd=cwd, capture_output=True, text=True)


def drawn(examples: int) -> Any:
    """Return settings for calls that are drawn: the same ones in CI, others every time elsewhere."""
    fixed = bool(os.environ.get("CI"))
    return settings(
        max_examples=examples, deadline=None, derandomize=fixed, database=None, suppress_health_check=list(HealthCheck)
    )


def refusals(*rows: tuple[type[Exception], str, Callable[[], Any]]) -> Any:
    """Return a test that each of some calls raises an error, whose one line matches a pattern."""

    @pytest.mark.parametrize(("error", "says", "call"), rows)
    def test(error: type[Exception], says: str, call: Callable[[], Any]) -> None:
        with pytest.raises(error, match=says) as caught:
            call()
        assert "\n" not in str(caught.value)

    return test


def cases_where(keep: Callable[[Case], bool] = lambda case: True, pairs: bool = True) -> pytest.MarkDecorator:
    """Return the mark that gives a test the cases that one wants; slow ones: those of all ``pairs``."""
    cases = [pytest.param(*each, id="-".join(map(str, each))) for each in every_case(keep)]
    slow = every_case(keep, pairs=True) if pairs else []
    cases += [pytest.param(*each, id="-".join(map(str, each)), marks=pytest.mark.slow) for each in slow]
    return pytest.mark.parametrize(("routing", "case"), cases)


def cases_named(names: Iterable[str]) -> pytest.MarkDecorator:
    """Return the mark that gives a test the cases of these names, of whatever routings have them."""
    wanted = set(names)
    return cases_where(lambda case: case.name in wanted, pairs=False)


def by_op(call: Call) -> dict[str, Tensor]:
    results = call.by_op()
    assert all(result.is_contiguous() for result in results.values())
    return results


def hold_training_and_backward(routing: Routing, case: Case) -> None:
    """By autograd; and by the backward, with other parents in every iteration: what iterations share, in one call."""
    routing.bar(case).hold(routing.call(case).training(by_op))
    backward = routing.backward_call(case)
    found = backward.results(routing.backward_op)
    for name, gradient in found.items():
        as_given = name == "dweight" and case.layout in DENSE
        assert strides(gradient) == strides(backward.given["weight"] if as_given else torch.empty(gradient.shape))
    routing.backward_bar(case).hold(found)


def hold_far_from_zero(run: Callable[[Call], dict[str, Tensor]], types: int, start: bool) -> None:
    """Assert that a backend's variances and means of votes about 10,000 with a spread of 1 are right.

    Some children are behind a gate of 0; the votes are measured from a mean, or from none.
    """
    case = Case("far", Rule.HEINSEN, batch=1, types=types, pose=(1, 4, 4), groups="one", start=start, gate="silent",
                eps=0.0, betas="11")  # fmt: skip
    call = GAUSSIAN.call(case)
    call.given["children"] += 1e4
    call.given["weight"].copy_(torch.eye(4))
    if start:
        call.given["mean"] += 1e4
    exact, found = call.having([tensor.double() for tensor in call.tensors]).by_loop(), run(call)
    torch.testing.assert_close(found["all_variances"].double(), exact["all_variances"], rtol=1e-4, atol=0.0)
    torch.testing.assert_close(found["all_means"].double(), exact["all_means"], rtol=1e-6, atol=0.0)


def hold_each_gradient_alone(
    run: Callable[[BackwardCall], dict[str, Tensor]], routing: Routing, case: Case, most: float
) -> None:
    """Assert that a backend's backward makes what is asked for and no more, each gradient as it is beside all others.

    They may differ by ``most`` units in the last place of the largest number.
    """
    whole = routing.backward_call(replace(case, iterations=1))
    everything, names, there = run(whole), routing.gradients, whole.given["needs"]
    for needs in (*(1 << k for k in range(len(names))), 0, 3, 6, 7):
        found = run(BackwardCall(routing, {**whole.given, "needs": needs}))
        assert set(found) == {name for k, name in enumerate(names) if (needs & there) >> k & 1}
        for name, gradient in found.items():
            scale = most * torch.finfo(gradient.dtype).eps * everything[name].abs().max()
            assert (gradient - everything[name]).abs().max() <= scale, name


@st.composite
def random_cases(draw: st.DrawFn, routing: Routing) -> Case:
    """Draw small calls of every kind: any values of the factors, and any window and sizes besides."""
    row: dict[str, Any] = {}
    for name, values in routing.table.factors.items():
        fitting = [v for v in values if all(allowed({name: v, n: other}) for n, other in row.items())]
        row[name] = draw(st.sampled_from(fitting))
    case = routing.table.case("drawn", {**row, "size": "few", "window": "set"})
    ends = 4 * [(1, 3)] + 2 * [(0, 2)] + 2 * [(1, 2)]
    window = tuple(draw(st.integers(*pair)) for pair in ends)
    least = [max(1, (window[k] - 1) * window[6 + k] + 1 - 2 * window[4 + k]) for k in (0, 1)]
    grid = (least[0] + draw(st.integers(0, 3)), least[1] + draw(st.integers(0, 3)))
    batch, types, parents = draw(st.integers(0, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 12))
    groups, seen = case.groups, window[0] * window[1] * types
    if isinstance(groups, int):
        groups = draw(st.sampled_from([g for g in range(1, seen + 1) if seen % g == 0]))
    return replace(case, groups=groups, batch=batch, grid=grid, types=types, parents=parents, window=window)
