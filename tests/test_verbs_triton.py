"""The Triton kernels of the verbs against stored votes, and what they compile to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from cases import apart, on_device
from features import Leaves
from stored_votes import OPS, PULLS, Tensors, op_formulas, op_results
from torch import Tensor
from triton_cases import DEVICE, TINY, WIDE, compiled_here, hold_compiled, interpret, launches

from fastcaps._testing.judge import Bar
from fastcaps.triton_kernels import schedule, verbs
from fastcaps.votes import SET_WINDOW, VoteInputs

LIMITS: dict[str, Any] = WIDE if DEVICE == "cpu" else {}
TILES = {"forward": 16, "backward": 8, "warps": (1, 4), "positions": 8}  # the least that take matrix products
PADDED = (3, 2, 2, 1, 1, 1, 1, 2)  # dilated; reaches into the padding on all sides


@dataclass(frozen=True)
class Case:
    """Sizes and forms of the votes; ``limits``: of a program; ``expanded``: the coefficients are one number."""

    grid: tuple[int, int] = (3, 4)
    window: tuple[int, ...] = PADDED
    types: int = 2
    parents: int = 3
    pose: tuple[int, int, int] = (2, 3, 2)
    batch: int = 2
    groups: int | None = None  # None: every child its own matrices; 0: none
    bias: str = ""
    dtype: torch.dtype = torch.float32
    limits: dict[str, Any] | None = None
    options: int = 0
    strided: bool = False  # no tensor is contiguous
    expanded: bool = False


SMALL: dict[str, Any] = {"grid": (1, 2), "window": (2, 2, 1, 1, 1, 0, 1, 1), "types": 1, "batch": 1}
SET: dict[str, Any] = {"grid": (1, 1), "window": SET_WINDOW}
CASES = {
    "padded": Case(bias="IM"),
    "tiny": Case(**SMALL, bias="IM", limits=TINY, parents=9, pose=(3, 2, 2)),  # parents and children are split
    "tiny-ordered": Case(**SMALL, bias="IM", limits=TINY, parents=9, pose=(3, 2, 2), options=1),
    "shared-over-space": Case(groups=2, bias="1M", window=(2, 2, 1, 1, 0, 0, 1, 1), options=1),
    "one-matrix": Case(**SET, types=7, groups=1, bias="I1", parents=5, batch=3),
    "crowded": Case(**SET, types=67, groups=1, bias="IM", batch=1),  # one program owns dW
    "no-matrices": Case(groups=0, pose=(2, 3, 3), bias="11"),
    "no-matrices-tiny": Case(**SMALL, groups=0, pose=(1, 5, 5), limits=TINY, parents=9),
    "no-matrices-ordered": Case(**SMALL, groups=0, pose=(1, 5, 5), options=1, bias="I1"),
    "one-parent-one-child": Case(**SET, types=1, parents=1, pose=(1, 1, 1), batch=1),
    "primes": Case(**SET, types=11, parents=7, pose=(5, 3, 7), batch=3),
    "strided": Case(strided=True, bias="IM"),
    "strided-set": Case(**SET, types=5, strided=True, groups=1, batch=3),
    "expanded": Case(expanded=True, bias="1M"),
    "products": Case(**SET, types=3, parents=17, pose=(2, 17, 2), bias="1M", batch=9, limits=TILES, options=3),
    "bfloat16": Case(bias="IM", dtype=torch.bfloat16),
    "float16-products": Case(**SET, types=3, parents=9, pose=(4, 9, 4), batch=5, dtype=torch.float16),
}


def strided(tensor: Tensor) -> Tensor:
    """Return equal numbers that lie apart in memory, the dimensions in reverse order."""
    order = list(range(tensor.dim()))[::-1]
    room = tensor.new_zeros([2 * size for size in tensor.permute(order).shape])
    return room[(slice(None, None, 2),) * tensor.dim()].copy_(tensor.permute(order)).permute(order)


@dataclass(frozen=True)
class Given:
    """The tensors of one case: children, weight, bias, r, Y, p."""

    case: Case
    tensors: Tensors

    @staticmethod
    def of(case: Case) -> Given:
        rows, inner, columns = case.pose
        seen = case.window[0] * case.window[1] * case.types
        groups = seen if case.groups is None else case.groups
        children = torch.randn(case.batch, *case.grid, case.types, rows, inner)
        weight = torch.randn(groups, case.parents, inner, columns) if groups else None
        bias = None
        if case.bias:
            lead = (seen if case.bias[0] == "I" else 1, case.parents if case.bias[1] == "M" else 1)
            bias = torch.randn(*lead, rows, columns)
        voting = [None if tensor is None else tensor.to(case.dtype) for tensor in (children, weight, bias)]
        votes = VoteInputs(*voting, None, case.parents, case.window)  # type: ignore[arg-type]
        coefficients = (
            torch.randn(()).expand(votes.coefficients_shape) if case.expanded else torch.randn(votes.coefficients_shape)
        )
        tensors = [*voting, coefficients, torch.randn(votes.poses), torch.rand(votes.poses) + 0.5]
        if case.strided:
            tensors = [None if tensor is None else strided(tensor) for tensor in tensors]
        return Given(case, tensors)

    def votes(self, tensors: Tensors) -> VoteInputs:
        return VoteInputs(*tensors[:3], None, self.case.parents, self.case.window)

    def kernels(self, needs: int = 7, options: int | None = None, only: Iterable[str] = OPS) -> Leaves:
        """Return what the kernels make of it, interpreted where there is no GPU."""
        case = self.case
        tensors = [x if x is None or DEVICE == "cpu" else on_device(x, DEVICE) for x in self.tensors]
        limits, options = LIMITS if case.limits is None else case.limits, case.options if options is None else options

        def call(op: str, *own: Any) -> Any:
            arguments = (self.votes(tensors), *own, options)
            if DEVICE == "cpu":
                return interpret(f"{verbs.__name__}.{op}", *arguments, limits=limits)
            return getattr(verbs, op)(*arguments, limits=schedule.Limits(**limits))

        return {name: x.cpu() for name, x in op_results(call, tensors, needs, only).items()}

    def hold(self, needs: int = 7, options: int | None = None, only: Iterable[str] = OPS) -> None:
        """Hold the kernels to stored votes."""
        tf32 = self.case.options & 2 == 2 and DEVICE == "cuda"  # the interpreter multiplies in float32
        run = partial(op_formulas, parents=self.case.parents, window=self.case.window, needs=needs, only=only)
        Bar(run, self.tensors, tf32=tf32).hold(self.kernels(needs, options, only))


@pytest.mark.parametrize("name", CASES)
def test_every_verb(name: str) -> None:
    Given.of(CASES[name]).hold()


@pytest.mark.parametrize("needs", range(7))
def test_only_the_gradients_asked_for(needs: int) -> None:
    for groups, options in ((None, 0), (0, 0), (None, 1)):
        given = Given.of(Case(groups=groups, bias="IM", pose=(1, 2, 2), batch=1))
        given.hold(needs, options, ["stretch" if needs % 2 == 0 else "pull"])


@pytest.mark.parametrize("options", [0, 1])
def test_an_empty_batch(options: int) -> None:
    Given.of(Case(batch=0, bias="IM", options=options)).hold()


def test_absent_children_have_no_part_whatever_is_beside_them() -> None:
    """At one position all children are absent: NaN in its parents, and coefficients of NaN, go nowhere."""
    given = Given.of(Case(grid=(1, 1), window=(1, 1, 1, 1, 1, 0, 1, 1), types=2, bias="IM"))
    for tensor in given.tensors[3:]:
        tensor[:, [0, 2]] = torch.nan
    for name, value in given.kernels().items():
        assert value.isfinite().all(), name
        assert name[:-2] in PULLS or not value[:, [0, 2]].any(), name


def test_nan_stays_where_it_went_in() -> None:
    given = Given.of(Case(bias="IM"))
    given.tensors[0][0, 1, 1, 0, 0, 0] = torch.nan
    given.tensors[3][1, 0, 1, 2, 1] = torch.nan
    given.hold()


FAR = 1 << 30


def near_and_far() -> list[list[Tensor]]:
    """Return sums and gradients with coefficients beside each other, and 2**30 numbers apart."""
    given = Given.of(Case(**SET, types=3, batch=1))
    votes, (near, targets, _) = given.votes(given.tensors), given.tensors[3:]
    return [
        [verbs.vote_sums(votes, one, None, 1, 0), *verbs.vote_pull(votes, one, targets, None, False, 7, 1)]
        for one in (near, apart(near, (1, 1, 1, FAR, FAR + 2)))
    ]


@pytest.mark.skipif(DEVICE == "cuda", reason="the kernels run on a GPU here")
def test_offsets_beyond_int32() -> None:
    near, far = interpret(f"{__name__}.near_and_far")
    assert all(torch.equal(one, other) and one.isfinite().all() for one, other in zip(near, far, strict=True))


def test_ordered_results_have_the_same_bits() -> None:
    given = Given.of(CASES["tiny-ordered"])
    first, again = (given.kernels(only=PULLS) for _ in range(2))
    assert all(torch.equal(value, again[name]) for name, value in first.items())


def test_squares_about_the_mean_keep_their_digits() -> None:
    """Votes lie 1e4 away from 0 and 1e-2 from each other: a difference of squares would have no digit left."""
    given = Given.of(Case(groups=0, pose=(2, 3, 3)))
    for tensor in (given.tensors[0], given.tensors[4]):
        tensor.mul_(1e-2).add_(1e4)
    given.hold(only=["distances p", "squares about", "stretch p"])


@pytest.mark.parametrize("form", ["expanded", "dense", "transposed"])
def test_coefficients_are_read_where_they_lie(form: str) -> None:
    with torch.device("meta"):
        votes = VoteInputs(torch.empty(2, 3, 3, 2, 4, 4), torch.empty(2, 5, 4, 4), None, None, 5, PADDED)
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


@compiled_here
@pytest.mark.parametrize("options", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_compiles_without_a_gpu(options: int) -> None:
    """All verbs of a layer as Tsai's, for a GPU that is not there."""
    with torch.device("meta"):
        votes = VoteInputs(
            torch.empty(128, 16, 16, 32, 4, 4), torch.empty(288, 32, 4, 4), None, None, 32, (3, 3, 2, 2, 0, 0, 1, 1)
        )
        targets, coefficients = torch.empty(votes.poses), torch.empty(votes.coefficients_shape)
    wanted = {"vote_scores_forward_kernel", "vote_sums_forward_kernel", "vote_pull_backward_kernel"}
    wanted |= {"vote_pull_matrix_backward_kernel"} if options & 1 else set()
    for squared in (False, True):
        more = targets if squared else None

        def run(squared: bool = squared, more: Tensor | None = more) -> None:
            verbs.vote_scores(votes, targets, more, squared, options)
            verbs.vote_sums(votes, coefficients, more, 1 + squared, options)
            verbs.vote_pull(votes, coefficients, targets, more, squared, 3, options)

        hold_compiled(launches(run), "sm_90", 0, wanted)
