"""The CPU kernels of the verbs, called raw, against formulas over stored votes in float64."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from features import Leaves
from stored_votes import Tensors, op_formulas, op_results
from suite import native_only
from torch import Tensor

import fastcaps.ops.verbs  # noqa: F401  (declares the ops; the package loads the library)
from fastcaps._testing.judge import Bar
from fastcaps.checks import accumulation_dtype
from fastcaps.votes import output_size

pytestmark = native_only
OPS = torch.ops.fastcaps_cpu
SET = (1, 1, 1, 1, 0, 0, 1, 1)

AXES: dict[str, tuple[Any, ...]] = {
    "pose": ((4, 4, 4), (1, 8, 16), (8, 8, 8), (6, 6, 6), (1, 1, 1), (3, 2, 5), (5, 3, 1), (2, 7, 3), (1, 64, 64)),
    "parents": (1, 2, 5, 10, 16, 17, 32, 35),
    "types": (1, 2, 3, 7, 8, 12, 37),
    "batch": (1, 2, 5),
    "window": (
        None,
        ((1, 3), SET),
        ((5, 4), (3, 3, 2, 1, 1, 1, 1, 1)),
        ((4, 6), (2, 3, 1, 2, 2, 1, 2, 1)),
        ((1, 2), (1, 1, 3, 1, 2, 2, 1, 1)),
    ),
    "groups": ("I", "N", 1, 2, None),
    "bias": (None, "im", "m", "i", ""),
    "dtype": (torch.float32, torch.float32, torch.float64, torch.bfloat16),
    "coefficients": ("dense", "shared", "transposed"),
    "children": ("dense", "transposed", "sparse"),
}


class Case(NamedTuple):
    """One call: what the votes are made of, and how it lies."""

    pose: tuple[int, int, int]
    parents: int
    types: int
    batch: int
    window: Any
    groups: Any
    bias: str | None
    dtype: torch.dtype
    coefficients: str
    children: str

    @property
    def spec(self) -> tuple[int, ...]:
        return SET if self.window is None else self.window[1]

    @property
    def seen(self) -> int:
        return self.spec[0] * self.spec[1] * self.types


def sample(count: int, seed: int = 0) -> list[Case]:
    """Return cases in which every value of every axis comes about equally often."""
    draws = random.Random(seed)
    columns = {}
    for name, values in AXES.items():
        column = [values[k % len(values)] for k in range(count)]
        draws.shuffle(column)
        columns[name] = column
    return [Case(*row) for row in zip(*columns.values(), strict=True)]


def laid_out(x: Tensor, how: str) -> Tensor:
    """Return the same numbers with other strides."""
    if how == "transposed":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if how == "sparse":
        return torch.stack((x, x), dim=-1)[..., 0]
    return x


class Call:
    """A case's tensors: children, weight, bias, coefficients, targets, precisions."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        draws = torch.Generator().manual_seed(seed)
        C, D, E = case.pose
        if case.groups is None:
            E = D
        B, N, M, I = case.batch, case.types, case.parents, case.seen
        places = () if case.window is None else output_size(case.spec, *case.window[0])
        grid = () if case.window is None else case.window[0]
        wide = accumulation_dtype(case.dtype)

        def make(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
            return torch.randn(*shape, generator=draws).to(dtype)

        groups = {"I": I, "N": N, 2: 2 if I % 2 == 0 else 1}.get(case.groups, 1)
        bias = None
        if case.bias is not None:
            bias = make(I if "i" in case.bias else 1, M if "m" in case.bias else 1, C, E)
        pairs = make(B, *places, I, M, dtype=wide)
        if case.coefficients == "shared":
            pairs = torch.tensor(0.3, dtype=wide).expand(pairs.shape)
        self.tensors = [
            laid_out(make(B, *grid, N, C, D), case.children),
            None if case.groups is None else make(groups, M, D, E) / D**0.5,
            bias,
            laid_out(pairs, case.coefficients),
            laid_out(make(B, *places, M, C, E, dtype=wide), case.children),
            make(B, *places, M, C, E, dtype=wide).abs(),
        ]

    def six(self, tensors: Tensors) -> tuple[Any, ...]:
        return (*tensors[:3], None, self.case.parents, self.case.spec)

    def kernels(self, tensors: Tensors, needs: int = 7) -> Leaves:
        """Return all that the ops make of tensors."""
        return op_results(lambda op, *own: getattr(OPS, op)(*self.six(tensors), *own, 0), tensors, needs)

    def formulas(self, tensors: Tensors) -> Leaves:
        """Return the same from stored votes."""
        return op_formulas(tensors, self.case.parents, self.case.spec)


@pytest.mark.parametrize("number", range(44))
def test_verbs_follow_their_formulas(number: int) -> None:
    """As exactly as the same formulas in eager PyTorch, all axes mixed."""
    call = Call(sample(44)[number], number)
    Bar(call.formulas, call.tensors).hold(call.kernels(call.tensors))


@pytest.mark.parametrize("number", range(0, 44, 5))
def test_threads_do_not_change_a_bit(number: int) -> None:
    call = Call(sample(44, 1)[number], number)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(call.kernels(call.tensors))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one[name], found[0][name]) for one in found for name in one)


@pytest.mark.parametrize("name", ["children", "weight", "bias", "coefficients", "targets", "precisions"])
def test_nan_goes_where_eager_lets_it_go(name: str) -> None:
    """And no further: not into padding, nor to parents and children that the number has no part in."""
    case = Case((3, 2, 5), 5, 3, 2, AXES["window"][2], "I", "im", torch.float32, "dense", "dense")
    call = Call(case)
    number = ["children", "weight", "bias", "coefficients", "targets", "precisions"].index(name)
    call.tensors[number].flatten()[7] = torch.nan
    found, wanted = call.kernels(call.tensors), call.formulas(call.tensors)
    for key, value in wanted.items():
        missed = value.isnan() & ~found[key].isnan()
        assert not missed.any(), key
        if not key.startswith(("pull", "stretch")):
            assert torch.equal(found[key].isnan(), value.isnan()), key


def test_a_padded_child_has_no_part_in_anything() -> None:
    """Whatever its coefficient, bias and matrix are: children that no window holds have NaN."""
    window = ((1, 2), (3, 1, 1, 1, 1, 0, 1, 1))  # of three rows under the window only the middle one is there
    call = Call(Case((4, 4, 4), 10, 3, 2, window, "I", "im", torch.float32, "dense", "dense"))
    finite = call.kernels(call.tensors)
    for number, dim in ((1, 0), (2, 0), (3, -2)):
        for away in (slice(0, 3), slice(6, 9)):
            torch.movedim(call.tensors[number], dim, 0)[away] = torch.nan
    for name, value in call.kernels(call.tensors).items():
        assert torch.equal(value, finite[name]), name


@pytest.mark.parametrize("window", [None, AXES["window"][2]])
def test_an_empty_batch(window: Any) -> None:
    call = Call(Case((4, 4, 4), 10, 3, 0, window, "I", "im", torch.float32, "dense", "dense"))
    for name, value in call.kernels(call.tensors).items():
        assert not value.any(), name


@pytest.mark.parametrize(("seen", "parents", "groups", "bias"), [(300_000, 3, 1, ""), (3, 30_000, "I", "")])
def test_many_children_and_many_parents(seen: int, parents: int, groups: Any, bias: str | None) -> None:
    call = Call(Case((1, 2, 3), parents, seen, 1, None, groups, bias, torch.float32, "shared", "dense"))
    Bar(call.formulas, call.tensors).hold(call.kernels(call.tensors))


@pytest.mark.parametrize("needs", range(8))
def test_a_pull_makes_what_is_needed(needs: int) -> None:
    case = Case((4, 4, 4), 10, 7, 3, AXES["window"][2], "I", "im", torch.float32, "dense", "dense")
    call = Call(case)
    every, some = call.kernels(call.tensors), call.kernels(call.tensors, needs)
    for name, value in some.items():
        torch.testing.assert_close(value, every[name])
