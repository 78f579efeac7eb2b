"""The backward of many turns, whatever serves it, against the sum over turns of the reference's backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import attention_cases
import gaussian_cases
import pooling_cases
import pytest
import torch
from attention_cases import Case
from pass_cases import DTYPES, Judge, Run, Tensors
from torch import Tensor

from fastcaps import ops
from fastcaps.reference import FROZEN

TURNS = 3
# a gradient of one turn's parents and what it kept; what it was given, which the first turn may lack
OWN = {
    "attention": ("grad_parents", "grad_sums", "sums"),
    "pooling": ("grad_parents", "grad_logsumexp", "parents", "logsumexp"),
    "gaussian": (
        *("grad_counts", "grad_means", "grad_variances", "grad_evidence"),
        *("counts", "means", "variances"),
    ),
}
STATE = {"attention": ("query",), "pooling": ("query",), "gaussian": ("mean", "variance", "log_weight")}
GIVEN = {"attention": 2, "pooling": 2, "gaussian": 4}  # gradients, which lead the arguments
ALL = {"attention": 0b1111011, "pooling": 0b11011, "gaussian": 0b111100011}


@dataclass(frozen=True)
class Call:
    """Turns of one case: the same children, weights, biases, gates and betas, but parents of their own.

    Attributes
    ----------
    uniform
        Whether the first turn is given no parents.
    absent
        The names of gradients that no turn has.
    """

    case: Case
    judge: Judge
    uniform: bool = False
    frozen: bool = False
    absent: tuple[str, ...] = ()
    needs: int | None = None

    @property
    def one(self) -> ops.Pass:
        return self.judge.one

    @property
    def name(self) -> str:
        flags = ("uniform", self.uniform), ("frozen", self.frozen), ("some", self.needs is not None)
        words = [self.one.stem, self.case.name, *(word for word, on in flags if on), *(f"no-{n}" for n in self.absent)]
        return "-".join(words)

    def settings(self) -> tuple[Any, ...]:
        """Return what follows the tensors."""
        needs = ALL[self.one.stem] if self.needs is None else self.needs
        return (*self.case.settings(), needs | (FROZEN if self.frozen else 0))

    def arguments(self, dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
        """Return the tensors of the op, gradients first."""
        names = [argument.name for argument in op_of(self.one)._schema.arguments]
        turns: list[dict[str, Tensor | None]] = []
        for turn in range(TURNS):
            tensors = self.case.tensors(dtype)
            for k, (name, other) in enumerate(zip(self.one.tensors, self.case.tensors(dtype, turn + 7), strict=True)):
                if name in STATE[self.one.stem]:
                    tensors[k] = None if turn == 0 and self.uniform else other
            results = self.one.by_reference(*tensors, *self.case.settings())
            given = (*self.case.grads(dtype, seed=turn + 1), *self.one.kept(tuple(tensors), results))
            turns.append(dict(zip(names, given, strict=False)))
        stacks: list[Tensor | None] = []
        for name in turns[0]:
            each = [turn[name] for turn in turns if turn[name] is not None]
            own = name in STATE[self.one.stem] or (name in OWN[self.one.stem] and each and each[0].dim() > 1)
            stacks.append(None if not each or name in self.absent else torch.stack(each) if own else each[0])
        return stacks


def op_of(one: ops.Pass) -> Any:
    return getattr(ops, f"{one.stem}_turns_backward")


def summed(one: ops.Pass, *arguments: Any) -> list[Tensor]:
    """Return the sum over turns of the reference's backward."""
    names = [argument.name for argument in op_of(one)._schema.arguments]
    total: list[Tensor] = []
    for turn in range(TURNS):
        each: list[Any] = []
        for name, argument in zip(names, arguments, strict=True):
            if argument is None:
                each.append(None)
            elif name in STATE[one.stem]:
                missing = TURNS - argument.shape[0]
                each.append(None if turn < missing else argument[turn - missing])
            else:
                own = name in OWN[one.stem] and argument.dim() > 1
                each.append(argument[turn] if own else argument)
        found = one.backward_by_reference(*each)
        total = [before + other for before, other in zip(total, found, strict=True)] if total else list(found)
    return total


@dataclass(frozen=True)
class TurnsJudge(Judge):
    """Judges the op as kernels of passes are: by their bar, where the sum of the eager reference stands for eager."""

    def results(self, run: Run, tensors: Tensors, settings: tuple[Any, ...], grads: Tensors) -> dict[str, Tensor]:
        found = run(*grads, *tensors, *settings)
        assert all(one.is_contiguous() for one in found)
        return {n: one.double() for n, one in zip(self.outputs, found, strict=True) if one.shape != (0,)}


@cache
def judge_of(one: ops.Pass) -> TurnsJudge:
    outputs = tuple(f"d{name}" for name in one.tensors)
    oracle = SimpleNamespace(by_reference=lambda *arguments: summed(one, *arguments), wide=one.wide)
    return TurnsJudge(oracle, outputs, ())  # type: ignore[arg-type]


def calls(judge: Judge, cases: Sequence[Case]) -> list[Call]:
    return [Call(case, judge, uniform) for case in cases for uniform in (False, True)]


ATTENTION, POOLING, GAUSSIAN = attention_cases.BY_NAME, pooling_cases.BY_NAME, gaussian_cases.BY_NAME
NAMES = ("primes", "padded", "conv-shared", "groups-1")
CALLS = (
    *calls(attention_cases.JUDGE, [ATTENTION[name] for name in (*NAMES, "no-norm", "no-affine")]),
    Call(ATTENTION["no-query"], attention_cases.JUDGE),
    Call(ATTENTION["padded"], attention_cases.JUDGE, frozen=True),
    Call(ATTENTION["padded"], attention_cases.JUDGE, uniform=True, absent=("grad_sums",), needs=0b0100001),
    Call(ATTENTION["padded"], attention_cases.JUDGE, absent=("grad_parents",)),
    Call(ATTENTION["primes"], attention_cases.JUDGE, uniform=True, needs=0b0011000),
    Call(ATTENTION["primes"], attention_cases.JUDGE, uniform=True, needs=0b0000010),
    *calls(pooling_cases.JUDGE, [POOLING[name] for name in (*NAMES, "silent-grid", "identity-bias")]),
    Call(POOLING["identity-conv"], pooling_cases.JUDGE),  # without weight or bias a query must say how many parents
    Call(POOLING["padded"], pooling_cases.JUDGE, frozen=True),
    Call(POOLING["padded"], pooling_cases.JUDGE, uniform=True, absent=("grad_logsumexp",), needs=0b00001),
    Call(POOLING["primes"], pooling_cases.JUDGE, uniform=True, absent=("grad_logsumexp",), needs=0b11010),
    *calls(gaussian_cases.JUDGE, [GAUSSIAN[name] for name in (*NAMES, "silent-grid", "no-betas", "k-means")]),
    Call(GAUSSIAN["no-log-weight"], gaussian_cases.JUDGE),
    Call(GAUSSIAN["padded"], gaussian_cases.JUDGE, uniform=True, absent=("grad_evidence",), needs=0b000100001),
    Call(GAUSSIAN["padded"], gaussian_cases.JUDGE, absent=("grad_counts", "grad_variances"), needs=0b111000000),
    Call(GAUSSIAN["primes"], gaussian_cases.JUDGE, absent=("grad_counts", "grad_means"), needs=0b000000010),
)
EXAMPLES = tuple(call for call in CALLS if call.case.name == "padded" and call.needs is None)
every_call = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
every_example = pytest.mark.parametrize("call", EXAMPLES, ids=lambda call: call.name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_call
def test_the_sum_over_turns(call: Call, dtype: torch.dtype) -> None:
    arguments, lead = call.arguments(dtype), GIVEN[call.one.stem]
    judge, grads, tensors = judge_of(call.one), arguments[:lead], arguments[lead:]
    judge.bar(tensors, call.settings(), grads).hold(judge.results(op_of(call.one), tensors, call.settings(), grads))


@every_example
def test_one_turn_is_the_passes_backward(call: Call) -> None:
    """With the parents that it was given, or with none of them: neither turns of theirs nor the argument."""
    names = [argument.name for argument in op_of(call.one)._schema.arguments]
    own = (*OWN[call.one.stem], *STATE[call.one.stem])
    arguments = dict(zip(names, call.arguments(), strict=False))
    first = {n: t[:1] if n in own and t is not None else t for n, t in arguments.items()}
    single = {n: t[0] if n in own and t is not None else t for n, t in arguments.items()}
    none = dict.fromkeys(STATE[call.one.stem])
    empty = {n: None if arguments[n] is None else arguments[n][:0] for n in none}
    for given, alone in (
        (first, single),
        ({**first, **none}, {**single, **none}),
        ({**first, **empty}, {**single, **none}),
    ):
        found = op_of(call.one)(*given.values(), *call.settings())
        wanted = call.one.backward_by_reference(*alone.values(), *call.settings())
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_call
def test_fake_kernels_tell_the_truth(call: Call, dtype: torch.dtype) -> None:
    arguments = call.arguments(dtype)
    found = op_of(call.one)(*arguments, *call.settings())
    fakes = op_of(call.one)(*(None if t is None else t.to("meta") for t in arguments), *call.settings())
    for one, fake in zip(found, fakes, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (fake.shape, fake.dtype, fake.stride())


@every_example
def test_opcheck(call: Call) -> None:
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(op_of(call.one), (*call.arguments(), *call.settings()), test_utils=tests)


@every_example
def test_arguments_lie_in_memory_as_they_like(call: Call) -> None:
    """Gradients that are one number, and stacks of which the turns lie innermost."""
    plain = call.arguments()
    lead = GIVEN[call.one.stem]
    for grads in (
        [None if t is None else torch.full((), 0.7, dtype=t.dtype).expand(t.shape) for t in plain[:lead]],
        [None if t is None else t.movedim(0, -1).contiguous().movedim(-1, 0) for t in plain[:lead]],
    ):
        arguments = [*grads, *plain[lead:]]
        found, wanted = op_of(call.one)(*arguments, *call.settings()), summed(call.one, *arguments, *call.settings())
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


@every_example
def test_an_empty_batch(call: Call) -> None:
    empty = replace(call, case=replace(call.case, batch=0))
    arguments = empty.arguments()
    found = op_of(call.one)(*arguments, *empty.settings())
    for one, other in zip(found, summed(call.one, *arguments, *empty.settings()), strict=True):
        assert one.shape == other.shape and (one == 0).all()


@every_example
def test_wrong_sizes_are_named(call: Call) -> None:
    names = [argument.name for argument in op_of(call.one)._schema.arguments]
    right = call.arguments()
    given = [name for name in call.one.stacked if right[names.index(name)] is not None]
    for name in given:
        position = names.index(name)
        tensor = right[position]
        wrongs = [tensor[..., :-1]]
        if name != given[0]:  # which tells how many turns there are
            wrongs += [tensor[:1], torch.cat((tensor, tensor)), tensor.unsqueeze(0).expand(TURNS, *tensor.shape)]
        for wrong in wrongs:
            with pytest.raises(RuntimeError, match=rf"fastcaps: .*\b{name}\b"):
                op_of(call.one)(*right[:position], wrong, *right[position + 1 :], *call.settings())
    none = [t[:0] if n == given[0] else t for n, t in zip(names, right, strict=False)]
    with pytest.raises(RuntimeError, match="there must be a turn"):
        op_of(call.one)(*none, *call.settings())


@every_example
def test_nobody_is_told_the_gradients_of_what_belongs_to_one_turn(call: Call) -> None:
    state = sum(1 << k for k, name in enumerate(call.one.tensors) if name in STATE[call.one.stem])
    *settings, needs = call.settings()
    for device in ("cpu", "meta"):
        arguments = [None if tensor is None else tensor.to(device) for tensor in call.arguments()]
        asked, wanted = (op_of(call.one)(*arguments, *settings, bits) for bits in (needs | state, needs))
        for one, other in zip(asked, wanted, strict=True):
            assert one.shape == other.shape and (device == "meta" or torch.equal(one, other))
