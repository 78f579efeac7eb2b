"""The Triton kernels of the verbs against stored votes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from cases import apart, on_device
from features import Leaves
from stored_votes import OPS, PADDED, PULLS, Case, Tensors, op_formulas, op_results
from torch import Tensor
from triton_cases import DEVICE, FAR, TINY, WIDE, interpret, launches

from bench.judge import Bar
from fastcaps import Window
from fastcaps.triton_kernels import schedule, verbs
from fastcaps.votes import VoteInputs

LIMITS: dict[str, Any] = WIDE if DEVICE == "cpu" else {}
TILES = {"forward": 16, "backward": 8, "warps": (1, 4), "positions": 8}  # the least that take matrix products
ON_SET: dict[str, Any] = {"grid": (1, 1), "window": Window(1)}
ON_GRID: dict[str, Any] = {"grid": (3, 4), "window": PADDED, "types": 2}
SMALL: dict[str, Any] = {"grid": (1, 2), "window": Window(2, 1, (1, 0)), "types": 1, "batch": 1}
SPLIT: dict[str, Any] = {"limits": TINY, "parents": 5, "pose": (3, 2, 2)}  # parents and children, over programs
CASES = {
    "padded": Case(**ON_GRID, bias="IM"),
    "tiny": Case(**SMALL, **SPLIT, bias="IM"),
    "tiny-ordered": Case(**SMALL, **SPLIT, bias="IM", options=1),
    "shared-over-space": Case(**ON_GRID | {"window": Window(2)}, groups=2, bias="1M", options=1),
    "no-matrices": Case(**ON_GRID | {"window": Window(2)}, groups=0, pose=(2, 3, 3), bias="I1"),
    "one-parent-one-child": Case(**ON_SET, types=1, parents=1, pose=(1, 1, 1), batch=1),
    "strided": Case(**ON_GRID | {"window": Window(2)}, layout="interleaved", pairs="interleaved", bias="11"),
    "expanded": Case(**ON_SET, types=3, pairs="alike", groups=1),
    "products": Case(**ON_SET, types=1, parents=17, pose=(2, 17, 2), bias="1M", batch=9, limits=TILES, options=3),
    "empty": Case(**ON_GRID, batch=0, bias="IM"),
    "float16-products": Case(**ON_SET, types=3, parents=9, pose=(4, 9, 4), batch=5, dtype=torch.float16),
}


def kernels(
    case: Case, tensors: Tensors, needs: int = 7, options: int | None = None, only: Iterable[str] = OPS
) -> Leaves:
    """Return what the kernels make of tensors, interpreted where there is no GPU."""
    tensors = [x if x is None or DEVICE == "cpu" else on_device(x, DEVICE) for x in tensors]
    limits, options = LIMITS if case.limits is None else case.limits, case.options if options is None else options

    def call(op: str, *own: Any) -> Any:
        arguments = (case.inputs(tensors), *own, options)
        if DEVICE == "cpu":
            return interpret(f"{verbs.__name__}.{op}", *arguments, limits=limits)
        return getattr(verbs, op)(*arguments, limits=schedule.Limits(**limits))

    return {name: x.cpu() for name, x in op_results(call, tensors, needs, only).items()}


def hold(
    case: Case, tensors: Tensors = None, needs: int = 7, options: int | None = None, only: Iterable[str] = OPS
) -> None:
    """Hold the kernels to stored votes."""
    tensors = case.tensors() if tensors is None else tensors
    tf32 = case.options & 2 == 2 and DEVICE == "cuda"  # the interpreter multiplies in float32
    run = partial(op_formulas, case, needs=needs, only=only)
    Bar(run, tensors, tf32=tf32).hold(kernels(case, tensors, needs, options, only))


@pytest.mark.parametrize("name", CASES)
def test_every_verb(name: str) -> None:
    hold(CASES[name], only=PULLS if CASES[name].options == 1 else OPS)  # sums have the same order anyway


@pytest.mark.parametrize("needs", [0, 1, 6])  # all three: in the cases above
def test_only_the_gradients_asked_for(needs: int) -> None:
    for groups, options in ((None, 0), (0, 0), (None, 1)):
        case = Case(**ON_GRID, groups=groups, bias="IM", pose=(1, 2, 2), batch=1)
        hold(case, needs=needs, options=options, only=["stretch" if needs % 2 == 0 else "pull"])


def test_absent_children_have_no_part_whatever_is_beside_them() -> None:
    """At one position all children are absent: NaN in its parents, and coefficients of NaN, go nowhere."""
    case = Case(grid=(1, 1), window=Window(1, 1, (1, 0)), types=2, bias="IM")
    tensors = case.tensors()
    for tensor in tensors[3:]:
        tensor[:, [0, 2]] = torch.nan
    for name, value in kernels(case, tensors).items():
        assert value.isfinite().all(), name
        assert name[:-2] in PULLS or not value[:, [0, 2]].any(), name


def test_nan_stays_where_it_went_in() -> None:
    case = Case(**ON_GRID, bias="IM")
    tensors = case.tensors()
    tensors[0][0, 1, 1, 0, 0, 0] = torch.nan
    tensors[3][1, 0, 1, 2, 1] = torch.nan
    hold(case, tensors, only=["distances p", "squares about", "stretch p"])


def near_and_far() -> list[list[Tensor]]:
    """Return sums and gradients with coefficients beside each other, and 2**30 numbers apart."""
    case = Case(**ON_SET, types=3, batch=1)
    tensors = case.tensors()
    votes, (near, targets, _) = case.inputs(tensors), tensors[3:]
    return [
        [verbs.vote_sums(votes, one, None, 1, 0), *verbs.vote_pull(votes, one, targets, None, False, 7, 1)]
        for one in (near, apart(near, (1, 1, 1, FAR, FAR + 2)))
    ]


@pytest.mark.skipif(DEVICE == "cuda", reason="the kernels run on a GPU here")
def test_offsets_beyond_int32() -> None:
    near, far = interpret(f"{__name__}.near_and_far")
    assert all(torch.equal(one, other) and one.isfinite().all() for one, other in zip(near, far, strict=True))


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter runs one program after another")
def test_ordered_results_have_the_same_bits() -> None:
    case = CASES["tiny-ordered"]
    first, again = (kernels(case, case.tensors(), only=PULLS) for _ in range(2))
    assert all(torch.equal(value, again[name]) for name, value in first.items())


def test_squares_about_the_mean_keep_their_digits() -> None:
    """Votes lie 1e4 away from 0 and 1e-2 from each other: a difference of squares would have no digit left."""
    case = Case(**ON_GRID, groups=0, pose=(2, 3, 3))
    tensors = case.tensors()
    for tensor in (tensors[0], tensors[4]):
        tensor.mul_(1e-2).add_(1e4)
    hold(case, tensors, only=["distances p", "squares about", "stretch p"])


@pytest.mark.parametrize("form", ["expanded", "dense", "transposed"])
def test_coefficients_are_read_where_they_lie(form: str) -> None:
    with torch.device("meta"):
        votes = VoteInputs(torch.empty(2, 3, 3, 2, 4, 4), torch.empty(2, 5, 4, 4), None, None, 5, PADDED.spec)
        targets, coefficients = torch.empty(votes.poses), torch.empty(votes.coefficients_shape)
    if form == "expanded":
        coefficients = coefficients.new_empty(()).expand(votes.coefficients_shape)
    if form == "transposed":
        coefficients = coefficients.mT.contiguous().mT

    def run() -> None:
        verbs.vote_sums(votes, coefficients, targets, 2, 0)
        verbs.vote_pull(votes, coefficients, targets, targets, True, 7, 0)

    read = [launch.arguments["iteration"].pairs for launch in launches(run) if "votes" in launch.arguments]
    assert len(read) == 2 and all(torch._C._is_alias_of(one, coefficients) for one in read)
