"""The arguments and results of a routing's op and its backward, by name, from typed records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fastcaps.checks import accumulation_dtype
from fastcaps.ops.define import tensor_names, written
from fastcaps.votes import VoteInputs, autocast_dtype, output_size

Gradients = Sequence[Tensor | None]
Results = Sequence[Tensor]
State = dict[str, Tensor | None]

COUNT = len(VoteInputs._fields)


class Signature:
    """The arguments and results of a routing's two ops.

    The last fields of ``Own`` are flags that native kernels do not take: ``detach`` goes to the reference, and to a
    backward as a bit of ``needs``; ``coefficients`` are computed above the backends. A backward takes ``heads``,
    the votes, ``Rest`` and ``needs``, the bits of the gradients to compute; it returns the gradients of the op's
    tensors, in their order.
    """

    stem: str  # of the routing's files; stem + "_routing" is the op
    Own: Any  # the op's arguments after the votes, a typed named tuple from which the schema is written
    Rest: Any  # the same for the backward
    state: tuple[str, ...]  # the tensors of Own that belong to parents: the first iteration's state
    finals: tuple[str, ...]  # the results that have gradients
    history: tuple[str, ...]  # the others except the coefficients: their first dimension is the iteration
    heads: Mapping[str, str]  # the first arguments of the backward, with their types
    moments = 1  # of an iteration: how many sums over the votes
    wide = False  # whether the tensors of Own have the children's accumulation dtype
    constant: frozenset[str] = frozenset()  # the tensors that have no gradient with detached coefficients
    competing = True  # parents for a child, or else children for a parent
    reversed: tuple[str, str]  # what the CUDA library's backward through all iterations takes around the votes

    def __init__(self) -> None:
        self.name = f"{self.stem}_routing"
        taken = {**VoteInputs.__annotations__, **self.Own.__annotations__}
        self.names = list(taken)
        self.tensors = tensor_names(taken)
        self.places = [self.names.index(name) for name in self.tensors]
        self.tensors_of = itemgetter(*self.places)
        self.bit = {name: 1 << k for k, name in enumerate(self.tensors)}
        flags = [name for name in self.Own._fields if name in ("detach", "coefficients")]
        self.native_count = len(self.Own._fields) - len(flags)
        given = {**self.heads, **VoteInputs.__annotations__, **self.Rest.__annotations__}
        self.backward_names = [*given, "needs"]
        self.stacked = {*tensor_names(self.Rest.__annotations__)} - ({*self.tensors} - {*self.state})

        plain = written({name: kind for name, kind in taken.items() if name not in flags})
        made = ", ".join(f"Tensor {name}" for name in (*self.finals, *self.history))
        gradients = ", ".join(f"Tensor d{name}" for name in self.tensors)
        self.schema = written(taken), f"({made}, Tensor coefficients)"
        self.native_schema = f"{plain}, int options", f"({made})"
        self.backward_schema = f"{written(given)}, int needs", f"({gradients})"
        self.native_backward_schema = f"{written(given)}, int needs, int options", f"({gradients})"
        before, behind = self.reversed
        votes = written(VoteInputs.__annotations__)
        self.native_reverse_schema = f"{before}, {votes}, {behind}, int needs, int options", f"({gradients})"

    def iterations(self, own: Any) -> int:
        """Return the number of iterations of a call."""
        count: int = own.iterations
        return count

    def given(self, arguments: Sequence[Any]) -> tuple[VoteInputs, Any]:
        """Return the op's arguments as records."""
        return VoteInputs(*arguments[:COUNT]), self.Own(*arguments[COUNT:])

    def given_backward(self, arguments: Sequence[Any]) -> tuple[Gradients, VoteInputs, Any, int]:
        """Return the backward's arguments as records: heads, votes, the rest, and the bits of needed gradients."""
        *taken, needs = arguments
        first, count = len(self.heads), len(self.heads) + COUNT
        return taken[:first], VoteInputs(*taken[first:count]), self.Rest(*taken[count:]), needs

    def cast(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the op's arguments in autocast's dtypes, if it is on; float64 does not change."""
        given, dtype = list(arguments), autocast_dtype(arguments[0].device.type)
        if dtype is None:
            return given
        for k in self.places:
            if given[k] is not None and given[k].dtype != torch.float64:
                given[k] = given[k].to(accumulation_dtype(dtype) if self.wide and k >= COUNT else dtype)
        return given

    def bits(self, names: Iterable[str]) -> int:
        """Return the bits of some tensors' gradients for the backward op."""
        return sum(map(self.bit.__getitem__, names))

    def parts(self, rest: Sequence[Any], count: int) -> list[Sequence[Any]]:
        """Return each iteration's part of the backward's arguments after the votes.

        It has None for a first iteration without a query.
        """
        columns: list[Sequence[Any]] = []
        for name, x in zip(self.Rest._fields, rest, strict=True):
            split = x.split(1) if name in self.stacked and x is not None else (x,) * count
            columns.append((None,) * (count - len(split)) + split)
        return [*zip(*columns, strict=True)]

    def gradient_shape(self, name: str, given: Mapping[str, Any]) -> Sequence[int] | None:
        """Return the shape of a gradient that the backward returns; None without that input."""
        tensor = given.get(name)
        if tensor is None:
            return None
        shape: Sequence[int] = tensor.shape[1:] if name in self.stacked else tensor.shape
        return shape

    # ---- operations, from the shapes of tensors, for torch's FLOP counter --------------------------------------------

    def flops(self, *shapes: Any, **_: Any) -> int:
        """Return the multiplications and additions of a call.

        An iteration computes the votes, one sum over them for the agreement, and ``moments`` sums for the results. A
        first iteration without a state is a single product if there is one moment, as it is linear in the children.
        """
        own = self.given(shapes)[1]
        votes, one = votes_and_sum(shapes)
        first = votes + (0 if self.moments == 1 else self.moments * one)
        each = votes + (1 + self.moments) * one
        count = self.iterations(own)
        return count * each if getattr(own, self.state[0]) is not None else first + (count - 1) * each

    def backward_flops(self, *shapes: Any, **_: Any) -> int:
        """Return those of a backward: votes, agreement, gain, and the two terms of dV, but not dQ."""
        votes, one = votes_and_sum(shapes[len(self.heads) :])
        count, needs = next(head for head in shapes[: len(self.heads)] if head is not None)[0], shapes[-1]
        return count * (votes * (1 + (needs & 1) + (needs >> 1 & 1)) + 4 * one)


def gradient_strides(weight: Tensor) -> tuple[int, ...]:
    """Return the strides of a weight's gradient.

    They are the weight's own if it is dense in some order of its dimensions, else those of a contiguous tensor. So a
    parameter that is stored in another order, of which the weight is a view, adopts its gradient without a copy.
    """
    plain = [*range(weight.dim())]
    order = plain if weight.is_contiguous() else sorted(plain, key=weight.stride, reverse=True)
    strides = dense_strides(weight.shape, order)
    fits = all(size == 1 or a == b for size, a, b in zip(weight.shape, strides, weight.stride(), strict=True))
    return strides if fits else dense_strides(weight.shape, plain)


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose dimensions have an order in memory, the outermost first."""
    strides, size = [0] * len(shape), 1
    for k in reversed(order):
        strides[k] = size
        size *= shape[k]
    return tuple(strides)


def votes_and_sum(shapes: Sequence[Any]) -> tuple[int, int]:
    """Return the operations of computing all votes, and of one sum over them."""
    (batch, *grid, types, rows, depth), weight, _, _, parents, window = shapes[:6]
    ho, wo = output_size(window, *(grid or (1, 1)))
    pairs = batch * ho * wo * window[0] * window[1] * types * parents
    columns = depth if weight is None else weight[3]
    return 0 if weight is None else 2 * pairs * rows * depth * columns, 2 * pairs * rows * columns
