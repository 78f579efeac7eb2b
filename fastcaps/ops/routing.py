"""The border: what makes a routing an op of PyTorch, and the one place where it is decided what runs.

A :class:`Routing` is two ops, the routing and its backward, each with one schema from which those of the native
libraries follow. Above it are the public functions; below it backends that know nothing of autograd, autocast,
compilers or coefficients.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._decomp import register_decomposition
from torch.utils.flop_counter import register_flop_formula

from fastcaps import backends, explanation, libraries
from fastcaps.checks import accumulation_dtype
from fastcaps.ops.flops import backward_flops, forward_flops
from fastcaps.ops.reverse import Reverse, turn_after_turn
from fastcaps.ops.watchers import are_plain, is_sharded, is_transformed, is_watched
from fastcaps.votes import SET_WINDOW, Votes, as_grid, as_set, autocast_dtype

__all__ = [
    "LIBRARY",
    "NATIVE",
    "TAGS",
    "Gradients",
    "Routing",
    "let_inductor_call",
    "native_op",
]

LIBRARY = torch.library.Library("fastcaps", "DEF")
TAGS = (torch.Tag.pt2_compliant_tag,)
NATIVE = {name: torch.library.Library(f"fastcaps_{name}", "FRAGMENT") for name in ("cpu", "cuda")}
"""Where the ops of the native libraries are declared: backend -> library."""

_VOTES = "Tensor children, Tensor? weight, Tensor? bias, Tensor? gate, SymInt parents, SymInt[] window, "
_COUNT = 6  # arguments that are the votes'

Gradients = Sequence[Tensor | None]

_tuple_of: Any = namedtuple  # mypy wants names that it can read


class _Recorded(torch.autograd.function._SingleLevelFunction):  # not Function: no transform is active here
    """An eager call with a graph. It does what the op's registered autograd does, in a sixth of the time."""

    _compiled_autograd_key = torch.autograd.Function._compiled_autograd_key

    @staticmethod
    def forward(ctx: Any, routing: Routing, arguments: Sequence[Any], *tensors: Tensor | None) -> Any:
        results = routing.compute(arguments)
        routing.save(ctx, arguments, results)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        routing: Routing = ctx.routing
        return None, None, *routing.differentiate(ctx, ctx.needs_input_grad[2:], grads)


class Routing(ABC):
    """A routing as PyTorch and the backends have to know it.

    Attributes
    ----------
    stem
        The name of the routing's files, everywhere; ``stem + "_routing"`` is the op.
    own
        The schema of what the op takes after the votes.
    state
        The names of the tensors among it that belong to parents: what the first turn starts from.
    flags
        The names of boolean arguments at the end, which no kernel's forward takes: ``detach`` reaches the reference,
        and a backward as a bit of ``needs``; coefficients are made above the backends.
    results, final_count
        The schema of the results (without coefficients), and how many of them have gradients: the others are history,
        with a leading dimension of turns.
    grads, own_backward
        The backward's schema: what it takes before the votes, and after them. It returns the gradients of the op's
        tensors, in their order.
    moments
        How many sums over the votes a turn leaves.
    wide
        The names of tensors that are in the accumulation dtype of the children.
    stacked
        The names of what the backward takes after the votes that has a leading dimension of turns.
    """

    stem: str
    own: str
    state: tuple[str, ...]
    flags: tuple[str, ...]
    results: str
    final_count: int
    grads: str
    own_backward: str
    moments = 1
    wide: frozenset[str] = frozenset()
    stacked: frozenset[str]

    # ---- what a routing says of itself -------------------------------------------------------------------------------

    @abstractmethod
    def turns(self, given: Any) -> int:
        """Return how many turns a call makes."""

    @abstractmethod
    def start(self, given: Any, turn: int, state: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments after the votes of a routing of one turn, which starts from the parents' ``state``."""

    @abstractmethod
    def first(self, given: Any) -> tuple[Any, ...]:
        """Return the parents' state that a call starts from."""

    @abstractmethod
    def advance(self, given: Any, state: tuple[Any, ...], results: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return the state that the next turn starts from, from that of a turn and its results."""

    @abstractmethod
    def fakes(self, votes: Votes, given: Any) -> tuple[Tensor, ...]:
        """Return empty tensors as the op would, without the coefficients."""

    @abstractmethod
    def reference(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return the reference's routing of one turn, and its backward."""

    @abstractmethod
    def coefficients(self, votes: Votes, given: Any, results: Sequence[Tensor]) -> Tensor:
        """Return the coefficients that the last turn used, from the results of all turns."""

    @abstractmethod
    def backward(self, reverse: Reverse, grads: Gradients, votes: Votes, given: Any, history: Any) -> None:
        """Have ``reverse`` make the gradients of a call, from those of its final results."""

    def tables(self, given: Any) -> tuple[Tensor | None, ...]:
        """Return the tables, one number for each child and parent, of which a backward makes gradients."""
        return ()

    @abstractmethod
    def check(self, votes: Votes, given: Any) -> None:
        """Raise unless what the op takes besides its votes fits them: kernels in Python would broadcast in silence."""

    # ---- the ops -----------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The op's name; its backward's is ``name + "_backward"``."""
        return f"{self.stem}_routing"

    def define(self) -> None:
        """Define both ops: schemas, fake kernels, autograd, autocast, and the kernel that asks which backend runs."""
        flags = "".join(f", bool {flag}" for flag in self.flags)
        forward, results = f"({_VOTES}{self.own}", f"({self.results}"
        LIBRARY.define(f"{self.name}{forward}{flags}) -> {results}, Tensor coefficients)", tags=TAGS)
        self.op = getattr(torch.ops.fastcaps, self.name).default
        taken = self.op._schema.arguments
        self.names = [argument.name for argument in taken]
        self.tensors = [k for k, argument in enumerate(taken) if "Tensor" in str(argument.type)]  # their positions
        self.tensor_names = [self.names[k] for k in self.tensors]
        gradients = ", ".join(f"Tensor d{name}" for name in self.tensor_names)
        backward, gradients = f"({self.grads}, {_VOTES}{self.own_backward}, int needs", f"-> ({gradients})"
        LIBRARY.define(f"{self.name}_backward{backward}) {gradients}", tags=TAGS)
        for library in NATIVE.values():
            library.define(f"{self.name}{forward}, int options) -> {results})".replace("SymInt", "int"))
            library.define(f"{self.name}_backward{backward}, int options) {gradients}".replace("SymInt", "int"))
        self.native = {name: native_op(name, self.name) for name in NATIVE}
        self.native_backward = {name: native_op(name, f"{self.name}_backward") for name in NATIVE}
        self.backward_op = getattr(torch.ops.fastcaps, f"{self.name}_backward").default
        self.backward_names = [argument.name for argument in self.backward_op._schema.arguments]
        self.head_count = self.backward_names.index("children")
        self.own_is_stacked = [name in self.stacked for name in self.backward_names[self.head_count + _COUNT : -1]]
        self._given = _tuple_of("arguments", self.names)
        self._given_back = _tuple_of("arguments", self.backward_names)
        self._tensors_of = itemgetter(*self.tensors)
        self._lay_out()
        for name, run, fake in (
            (self.name, self.run, self.fake),
            (f"{self.name}_backward", self.run_backward, self.fake_backward),
        ):
            LIBRARY.impl(name, run, "CompositeExplicitAutograd")
            torch.library.register_fake(f"fastcaps::{name}", fake, lib=LIBRARY)
        torch.library.register_autograd(
            f"fastcaps::{self.name}", self._differentiate_op, setup_context=self.save, lib=LIBRARY
        )
        register_decomposition(self.op)(self.by_reference)  # which an ONNX export takes
        register_decomposition(self.op, type="meta")(self.fake)  # else fakes of free sizes would run the formulas
        register_flop_formula(self.op.overloadpacket)(partial(forward_flops, self))
        register_flop_formula(self.backward_op.overloadpacket)(partial(backward_flops, self))
        for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
            LIBRARY.impl(self.name, self._autocast_kernel(device_type, key), key)

    def __call__(self, votes: Votes, *own: Any) -> Any:
        """Run the op on votes and its own arguments: the only entrance that functions use."""
        arguments = (*votes, *own)
        if torch.compiler.is_compiling():
            return self.op(*arguments)
        if is_transformed():
            backends.refuse_unless_reference(self.stem)
            return self.by_reference(*arguments)
        tensors = self._tensors_of(arguments)
        plain = are_plain(tensors)
        if not plain and is_sharded(tensors):
            return import_module("..distributed", __package__).route(self, arguments)
        if is_watched() or not plain:
            return self.op(*arguments)
        if torch.is_grad_enabled():
            for tensor in tensors:
                if tensor is not None and tensor.requires_grad:
                    return _Recorded.apply(self, arguments, *tensors)  # type: ignore[attr-defined]
        return self.compute(arguments)

    def given(self, arguments: Sequence[Any]) -> Any:
        """Return the arguments of the op by name."""
        return self._given._make(arguments)

    # ---- below the border --------------------------------------------------------------------------------------------

    def run(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Run a call: the op's kernel. Coefficients that nobody wants are an empty tensor."""
        return _complete(self.compute(arguments), arguments[0])

    def compute(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Run a call by the backend that is forced, or comes first among those that can."""
        taken = arguments[: -len(self.flags)]
        if backends.on_cpu(arguments[0]):
            try:
                results = self.native["cpu"](*taken, 0)
            except RuntimeError:
                libraries.library("cpu").raise_signal()
                raise
            return (*results, self._coefficients(arguments, results))
        call = backends.Call.of(self.stem, arguments)
        chosen = backends.choose(call)
        if chosen == "cuda" and backends.takes_turns(call, self, arguments):
            results = self.native[chosen](*taken, call.options)
        elif chosen in NATIVE:
            results = self.chain(self._kernel(chosen, call, arguments), arguments)
        else:
            placed = self._on_grid(arguments)
            found = self.chain(self._kernel(chosen, call, placed), placed)
            results = [x.contiguous().detach() for x in self._from_grid(found, arguments)]  # no views: users may write
        return (*results, self._coefficients(arguments, results))

    def run_backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Run a backward by the backend that is forced, or comes first among those that can.

        All backends keep the same, so one may differentiate what another computed.
        """
        if backends.on_cpu(arguments[self.head_count]):
            try:
                return tuple(self.native_backward["cpu"](*arguments, 0))
            except RuntimeError:
                libraries.library("cpu").raise_signal()
                raise
        call = backends.Call.of(self.stem, arguments[self.head_count :])
        chosen = backends.choose(call)
        if chosen in NATIVE:
            return tuple(self.native_backward[chosen](*arguments, call.options))
        is_set = arguments[self.head_count].dim() == 4
        placed = _views(as_grid, arguments, self._backward_dims) if is_set else arguments
        if chosen == "triton":
            kernels = backends.triton_kernels(self.stem)
            found = getattr(kernels, f"{self.name}_backward")(*placed, call.options)
        else:
            found = turn_after_turn(self, placed)
        return tuple(_views(as_set, found, self._gradient_dims) if is_set else found)

    def _lay_out(self) -> None:
        """Note which tensors have positions, and at which dimension these begin: 0 says none."""
        positioned = {"children", "gate", *self.state}
        self._dims = [int(name in positioned) for name in self.names]
        self._result_dims = [1 if k < self.final_count else 2 for k in range(len(self.op._schema.returns) - 1)]
        self._backward_dims = [
            2 if k < self.head_count or name in self.stacked else int(name in positioned)
            for k, name in enumerate(self.backward_names)
        ]
        self._gradient_dims = [self._dims[k] for k in self.tensors]

    def _on_grid(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments of a call on a set as on a grid of one position: kernels in Python know no other."""
        if arguments[0].dim() != 4:
            return arguments
        if tuple(arguments[5]) != SET_WINDOW:
            raise ValueError(f"window must be {list(SET_WINDOW)} for a set, got {list(arguments[5])}")
        return _views(as_grid, arguments, self._dims)

    def _from_grid(self, results: Sequence[Any], arguments: Sequence[Any]) -> Sequence[Any]:
        """Return the results of such a call as those of a call with ``arguments``."""
        return _views(as_set, results, self._result_dims) if arguments[0].dim() == 4 else results

    def _kernel(self, chosen: str, call: backends.Call, arguments: Sequence[Any]) -> Callable[..., Any]:
        """Return what runs one turn: called with votes and the op's own arguments, without flags."""
        if chosen in NATIVE:
            native = self.native[chosen]
            return lambda votes, *own: native(*votes, *own, call.options)
        votes = Votes(*arguments[:_COUNT])
        votes.check()
        self.check(votes, self.given(arguments))
        if chosen == "triton":
            kernel = getattr(backends.triton_kernels(self.stem), self.name)
            return lambda votes, *own: kernel(*votes, *own, call.options)
        return self._reference_of(arguments)

    def _reference_of(self, arguments: Sequence[Any]) -> Callable[..., Any]:
        turn, _ = self.reference()
        named = self.given(arguments)
        return lambda votes, *own: turn(votes, *own, **({"detach": named.detach} if "detach" in self.flags else {}))

    def by_reference(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Run a call as a loop of the reference's turns: differentiable code."""
        placed = self._on_grid(arguments)
        self.check(Votes(*placed[:_COUNT]), self.given(placed))
        results = self._from_grid(self.chain(self._reference_of(placed), placed), arguments)
        return _complete((*results, self._coefficients(arguments, results)), arguments[0])

    def chain(self, run: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Tensor, ...]:
        """Run all turns one after another, each a routing of one turn by ``run``; return the op's results."""
        votes, given = Votes(*arguments[:_COUNT]), self.given(arguments)
        state = self.first(given)
        every, turns = [], self.turns(given)
        if turns < 1:
            raise ValueError(f"there must be a turn at least, got {turns}")
        for turn in range(turns):
            results = run(votes, *self.start(given, turn, state))
            every.append(results)
            state = self.advance(given, state, results)
        if len(every) == 1:
            return tuple(every[0])
        history = (torch.cat(kind) for kind in zip(*(results[self.final_count :] for results in every), strict=True))
        return (*every[-1][: self.final_count], *(kind.detach() for kind in history))

    def _coefficients(self, arguments: Sequence[Any], results: Sequence[Tensor]) -> Tensor | None:
        if not arguments[-1]:
            return None
        placed = self._on_grid(arguments)
        if placed is not arguments:
            results = _views(as_grid, results, self._result_dims)
        with torch.no_grad():
            found = self.coefficients(Votes(*placed[:_COUNT]), self.given(placed), results)
        return found if placed is arguments else as_set(found)

    # ---- fake kernels, autograd, autocast ----------------------------------------------------------------------------

    def fake(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Return empty tensors as the op would, and tell :func:`fastcaps.explain`, if it listens, of the call."""
        votes, given = Votes(*arguments[:_COUNT]), self.given(arguments)
        for k in self.tensors:  # one tensor without memory among others brings a call here
            if arguments[k] is not None and arguments[k].device != votes.children.device:
                raise ValueError(f"{self.names[k]} must be on {votes.children.device}, got {arguments[k].device}")
        explanation.tell(self, votes, given)
        let_inductor_call(f"fastcaps::{self.name}")
        wide = accumulation_dtype(votes.children.dtype)
        shape = votes.shares if given.coefficients else (0,)
        return (*self.fakes(votes, given), votes.children.new_empty(shape, dtype=wide))

    def fake_backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Return empty tensors as the backward would."""
        given = self._given_back._make(arguments)
        results = []
        for k, result in enumerate(self.backward_op._schema.returns):
            shape: Any = self.shape_of(result.name[1:], given) if given.needs >> k & 1 else None
            dtype = accumulation_dtype(given.children.dtype) if result.name[1:] in self.wide else given.children.dtype
            results.append(given.children.new_empty((0,) if shape is None else shape, dtype=dtype))
        return tuple(results)

    def shape_of(self, name: str, given: Any) -> Sequence[int] | None:
        """Return the shape of a gradient that the backward returns; None where there is no such input."""
        tensor = getattr(given, name, None)
        if tensor is None:
            return None
        return tensor.shape[1:] if name in self.stacked else tensor.shape

    def save(self, ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        """Keep in an autograd context what the backward will ask for."""
        arguments, results = inputs, output  # torch calls them by name
        ctx.routing, ctx.blocks = self, backends.settings()
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in results[self.final_count :] if x is not None))
        ctx.save_for_backward(*self._tensors_of(arguments), *results[self.final_count : -1])
        ctx.others = others = list(arguments)
        for k in self.tensors:
            others[k] = None

    def _differentiate_op(self, ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of all arguments of the op."""
        gradients: list[Any] = [None] * len(self.names)
        found = self.differentiate(ctx, self._tensors_of(ctx.needs_input_grad), grads)
        for k, gradient in zip(self.tensors, found, strict=True):
            gradients[k] = gradient
        return tuple(gradients)

    def differentiate(self, ctx: Any, needed: Sequence[bool], grads: Gradients) -> Gradients:
        """Return the gradients of the op's tensors, of which ``needed`` are wanted, from those of its results."""
        saved = ctx.saved_tensors  # once: a checkpoint hands them out once
        arguments, history = ctx.others.copy(), saved[len(self.tensors) :]
        for k, tensor in zip(self.tensors, saved, strict=False):
            arguments[k] = tensor
        finals = grads[: self.final_count]
        if not any(grad is not None for grad in finals):
            return [None] * len(self.tensors)
        if torch.is_grad_enabled():  # a graph of the backward itself: through the reference, which is ordinary code
            return self._through_reference(arguments, finals, needed)
        given = self.given(arguments)
        watched = is_watched() or not are_plain(arguments[:1])
        run = self.backward_op if watched else self.run_backward
        turns, needs = self.turns(given), 0
        for k, want in enumerate(needed):
            needs |= want << k
        with backends.under(ctx.blocks):
            reverse = Reverse(self, run, turns > 1 and backends.on_cpu(arguments[0]), turns, needs)
            self.backward(reverse, finals, Votes(*arguments[:_COUNT]), given, history)
        return reverse.gradients

    def _through_reference(self, arguments: list[Any], finals: Gradients, needed: Sequence[bool]) -> Gradients:
        wanted = [k for k, want in zip(self.tensors, needed, strict=True) if want]
        gradients: dict[int, Tensor | None] = {}
        with torch.enable_grad(), torch.autocast(arguments[0].device.type, enabled=False):
            # fresh nodes, so that the derivative stops at the arguments themselves (one may depend on another)
            inputs = [x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x for x in arguments]
            inputs[-1] = False  # no coefficients
            results = self.by_reference(*inputs)[: self.final_count]
            pairs = [(r, g) for r, g in zip(results, finals, strict=True) if g is not None and r.requires_grad]
            if pairs:
                found = torch.autograd.grad(
                    [r for r, _ in pairs],
                    [inputs[k] for k in wanted],
                    [g for _, g in pairs],
                    create_graph=True,
                    allow_unused=True,
                )
                gradients = dict(zip(wanted, found, strict=True))
        return [gradients.get(k) for k in self.tensors]

    def _autocast_kernel(self, device_type: str, key: str) -> Callable[..., Any]:
        """Return the op's kernel under autocast: tensors to :func:`autocast_dtype`, float64 left alone."""
        excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

        def cast(*arguments: Any) -> Any:
            dtype = autocast_dtype(device_type)
            with torch._C._ExcludeDispatchKeyGuard(excluded):
                if dtype is None:
                    return self.op(*arguments)
                given = list(arguments)
                for k in self.tensors:
                    if given[k] is not None and given[k].dtype != torch.float64:
                        given[k] = given[k].to(accumulation_dtype(dtype) if self.names[k] in self.wide else dtype)
                return self.op(*given)

        return cast


def native_op(library: str, name: str) -> Any:
    """Return a native library's op."""
    return getattr(getattr(torch.ops, f"fastcaps_{library}"), name).default


def let_inductor_call(name: str) -> None:
    """Have Inductor, if it is what compiles, call an op as it is.

    Where the variable CI is set it refuses an op that has a decomposition, as ours have for ONNX: a check that torch
    means for its own ops.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    allowed: set[str] = getattr(lowering, "FALLBACK_ALLOW_LIST", set())
    allowed.add(name)


def _views(view: Callable[[Tensor, int], Tensor], tensors: Sequence[Any], dims: Sequence[int]) -> list[Any]:
    """Return a view of each tensor that has positions, which begin at the dimension told by ``dims``; 0 says none."""
    return [
        view(x, dim) if dim and x is not None and x.dim() > dim else x for x, dim in zip(tensors, dims, strict=True)
    ]


def _complete(found: tuple[Any, ...], children: Tensor) -> tuple[Tensor, ...]:
    """Return what an op has to return: an empty tensor in place of coefficients that nobody wants."""
    *results, shares = found
    return (*results, children.new_empty(0, dtype=accumulation_dtype(children.dtype)) if shares is None else shares)
