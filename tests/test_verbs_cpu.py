"""The CPU kernels of the verbs, called raw, against formulas over stored votes in float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from features import Leaves
from stored_votes import Case, Tensors, op_formulas, op_results
from suite import native_only

import fastcaps.ops.verbs  # noqa: F401  (declares the ops; the package loads the library)
from bench.judge import Bar
from fastcaps import Window

pytestmark = native_only
OPS = torch.ops.fastcaps_cpu
TENSORS = ["children", "weight", "bias", "coefficients", "targets", "precisions"]
SMALL = ((3, 2, 5), 5, 3, 2, (5, 4), Window(3, (2, 1), 1))
AXES: dict[str, tuple[Any, ...]] = {
    "pose": ((4, 4, 4), (1, 8, 16), (8, 8, 8), (6, 6, 6), (1, 1, 1), (3, 2, 5), (5, 3, 1), (2, 7, 3), (1, 64, 64)),
    "parents": (1, 2, 5, 10, 16, 17, 32, 35),
    "types": (1, 2, 3, 7, 8, 12, 37),
    "batch": (1, 2, 5),
    "window": (
        ((), None),
        ((1, 3), Window(1)),
        ((5, 4), Window(3, (2, 1), 1)),
        ((4, 6), Window((2, 3), (1, 2), (2, 1), (2, 1))),
        ((1, 2), Window(1, (3, 1), 2)),
    ),
    "groups": ("own", "types", 1, 2, 0),
    "bias": ("", "IM", "1M", "I1", "11"),
    "dtype": (torch.float32, torch.float32, torch.float64, torch.bfloat16),
    "pairs": ("plain", "alike", "as_published"),
    "layout": ("plain", "as_published", "interleaved"),
}


def sample(count: int, seed: int = 0) -> list[Case]:
    """Return cases in which every value of every axis comes about equally often."""
    draws, rows = random.Random(seed), [dict[str, Any]() for _ in range(count)]
    for name, values in AXES.items():
        column = [values[k % len(values)] for k in range(count)]
        draws.shuffle(column)
        for row, value in zip(rows, column, strict=True):
            row[name] = value
    return [case_of(**row) for row in rows]


def case_of(pose: Any, window: Any, types: int, groups: Any, **row: Any) -> Case:
    grid, window = window
    seen = types if window is None else types * window.positions
    groups = {"own": seen, "types": types, 2: 2 if seen % 2 == 0 else 1}.get(groups, groups)
    pose = pose if groups else (*pose[:2], pose[1])
    return Case(pose=pose, grid=grid, window=window, types=types, groups=groups, **row)


def kernels(case: Case, tensors: Tensors, needs: int = 63) -> Leaves:
    """Return all that the ops make of tensors."""
    return op_results(lambda op, *own: getattr(OPS, op)(*case.inputs(tensors), *own, 0), tensors, needs)


def hold(case: Case, seed: int = 0) -> None:
    """Hold the ops to formulas over stored votes, which err as eager PyTorch does."""
    tensors = case.tensors(seed)
    Bar(lambda given: op_formulas(case, given, 63), tensors).hold(kernels(case, tensors))


@pytest.mark.parametrize("number", range(44))
def test_verbs_follow_their_formulas(number: int) -> None:
    """As exactly as the same formulas in eager PyTorch, all axes mixed."""
    hold(sample(44)[number], number)


@pytest.mark.parametrize("number", range(0, 44, 5))
def test_threads_do_not_change_a_bit(number: int, threads_kept: None) -> None:
    case, found = sample(44, 1)[number], []
    tensors = case.tensors(number)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(kernels(case, tensors))
    assert all(torch.equal(one[name], found[0][name]) for one in found for name in one)


@pytest.mark.parametrize("number", range(6), ids=TENSORS)
def test_nan_goes_where_eager_lets_it_go(number: int) -> None:
    """And no further: not into padding, nor to parents and children that the number has no part in."""
    case = Case(*SMALL, bias="IM")
    tensors = case.tensors()
    tensors[number].flatten()[7] = torch.nan
    found = kernels(case, tensors)
    for key, value in op_formulas(case, tensors, 63).items():
        missed = value.isnan() & ~found[key].isnan()
        assert not missed.any(), key
        if not key.startswith(("pull", "stretch")):
            assert torch.equal(found[key].isnan(), value.isnan()), key


def test_a_padded_child_has_no_part_in_anything() -> None:
    """Whatever its coefficient, bias and matrix are: children that no window holds have NaN."""
    # of three rows under the window only the middle one is there
    case = Case((4, 4, 4), 10, 3, 2, (1, 2), Window((3, 1), 1, (1, 0)), bias="IM")
    tensors = case.tensors()
    finite = kernels(case, tensors)
    for number, dim in ((1, 0), (2, 0), (3, -2)):
        for away in (slice(0, 3), slice(6, 9)):
            torch.movedim(tensors[number], dim, 0)[away] = torch.nan
    for name, value in kernels(case, tensors).items():
        assert torch.equal(value, finite[name]), name


@pytest.mark.parametrize(("types", "parents", "groups"), [(300_000, 3, 1), (3, 30_000, 3)])
def test_many_children_and_many_parents(types: int, parents: int, groups: int) -> None:
    hold(Case((1, 2, 3), parents, types, 1, groups=groups, bias="11", pairs="alike"))


@pytest.mark.parametrize("needs", [*range(8), 8, 16, 33, 62])
def test_a_pull_makes_what_is_needed(needs: int) -> None:
    case = Case(*SMALL, bias="IM")
    tensors = case.tensors()
    every = kernels(case, tensors)
    for name, value in kernels(case, tensors, needs).items():
        torch.testing.assert_close(value, every[name])
