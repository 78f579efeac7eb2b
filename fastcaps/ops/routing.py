"""The border: what makes a routing an op of PyTorch, and the one place where it is decided what runs.

A :class:`Routing` is two ops, the routing and its backward, each with one schema from which those of the native
libraries follow. Above it are the public functions; below it backends that know nothing of autograd, autocast,
compilers or coefficients.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._decomp import register_decomposition
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from fastcaps import backends, explanation
from fastcaps.checks import accumulation_dtype, check_tensor
from fastcaps.votes import Votes, autocast_dtype, output_size

__all__ = ["LIBRARY", "Gradients", "Routing"]

LIBRARY = torch.library.Library("fastcaps", "DEF")

_NATIVE = {name: torch.library.Library(f"fastcaps_{name}", "FRAGMENT") for name in ("cpu", "cuda")}
_VOTES = "Tensor children, Tensor? weight, Tensor? bias, Tensor? gate, SymInt parents, SymInt[] window, "
_COUNT = 6  # arguments that are the votes'
_TAGS = (torch.Tag.pt2_compliant_tag,)

Gradients = Sequence[Tensor | None]


_PLAIN = {type(None), Tensor, torch.nn.Parameter}  # anything else (a subclass, a fake) may want to see the op


def _is_watched(children: Tensor) -> bool:
    """Return whether somebody must see a call as an op: a compiler, a dispatch mode, a trace, autocast."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._is_tracing():
        return True
    return autocast_dtype(children.device.type) is not None


def _is_transformed() -> bool:
    """Return whether torch.func or forward-mode derivatives want plain formulas.

    The ops have no rules for those: the reference, which is ordinary code, is right under all of them.
    """
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


class _Recorded(torch.autograd.Function):
    """An eager call with a graph. It does what the op's registered autograd does, in a sixth of the time."""

    @staticmethod
    def forward(ctx: Any, routing: Routing, *arguments: Any) -> Any:
        results = routing.compute(arguments)
        routing.save(ctx, arguments, results)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        routing: Routing = ctx.routing
        return None, *routing.differentiate(ctx, *grads)


class Routing(ABC):
    """A routing as PyTorch and the backends have to know it.

    Attributes
    ----------
    stem
        The name of the routing's files, everywhere; ``stem + "_routing"`` is the op.
    own
        The schema of what the op takes after the votes.
    flags
        The names of boolean arguments at the end, which backends never see: ``detach``, ``coefficients``.
    results, finals
        The schema of the results (without coefficients), and how many of them have gradients: the others are history,
        with a leading dimension of turns.
    grads, own_backward, gradients
        The backward's schema: what it takes before the votes, after them, and what it returns.
    moments
        How many sums over the votes a turn leaves.
    wide
        The names of tensors that are in the accumulation dtype of the children.
    stacked
        The names of what the backward takes after the votes that has a leading dimension of turns.
    """

    stem: str
    own: str
    flags: tuple[str, ...]
    results: str
    finals: int
    grads: str
    own_backward: str
    gradients: str
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
    def backward(
        self, run: Callable[..., Any], together: bool, grads: Gradients, votes: Votes, given: Any, history: Any
    ) -> dict[str, Tensor | None]:
        """Return the gradients of a call by name, from those of its final results.

        ``run`` is the backward op, ``together`` says whether it makes the sum over turns cheaper than one turn after
        the other, ``given.needed`` names the gradients that are wanted.
        """

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
        backward, gradients = f"({self.grads}, {_VOTES}{self.own_backward}, int needs", f"-> ({self.gradients})"
        LIBRARY.define(f"{self.name}{forward}{flags}) -> {results}, Tensor coefficients)", tags=_TAGS)
        LIBRARY.define(f"{self.name}_backward{backward}) {gradients}", tags=_TAGS)
        for library in _NATIVE.values():
            library.define(f"{self.name}{forward}, int options) -> {results})".replace("SymInt", "int"))
            library.define(f"{self.name}_backward{backward}, int options) {gradients}".replace("SymInt", "int"))
        self.native = {name: _native(name, self.name) for name in _NATIVE}
        self.native_backward = {name: _native(name, f"{self.name}_backward") for name in _NATIVE}
        self.op = getattr(torch.ops.fastcaps, self.name).default
        self.backward_op = getattr(torch.ops.fastcaps, f"{self.name}_backward").default
        self.names = [argument.name for argument in self.op._schema.arguments]
        self.backward_names = [argument.name for argument in self.backward_op._schema.arguments]
        self.heads = self.backward_names.index("children")
        self.gradient_names = [result.name[1:] for result in self.backward_op._schema.returns]
        self.own_is_stacked = [name in self.stacked for name in self.backward_names[self.heads + _COUNT : -1]]
        self.tensors = [
            k for k, argument in enumerate(self.op._schema.arguments) if "Tensor" in str(argument.type)
        ]  # their positions
        for name, run, fake in (
            (self.name, self.run, self.fake),
            (f"{self.name}_backward", self.run_backward, self.fake_backward),
        ):
            LIBRARY.impl(name, run, "CompositeExplicitAutograd")
            torch.library.register_fake(f"fastcaps::{name}", fake, lib=LIBRARY)
        torch.library.register_autograd(
            f"fastcaps::{self.name}", self.differentiate, setup_context=self.save, lib=LIBRARY
        )
        register_decomposition(self.op)(self.by_reference)  # which an ONNX export takes
        register_decomposition(self.op, type="meta")(self.fake)  # else fakes of free sizes would run the formulas
        register_flop_formula(self.op.overloadpacket)(self._forward_flops)
        register_flop_formula(self.backward_op.overloadpacket)(self._backward_flops)
        for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
            LIBRARY.impl(self.name, self._autocast_kernel(device_type, key), key)

    def __call__(self, votes: Votes, *own: Any) -> Any:
        """Run the op on votes and its own arguments: the only entrance that functions use."""
        arguments = (*votes, *own)
        if _is_transformed():
            backends.refuse_unless_reference(self.stem)
            return self.by_reference(*arguments)
        tensors = [arguments[k] for k in self.tensors]
        if _is_watched(votes[0]) or not _PLAIN.issuperset(map(type, tensors)):
            return self.op(*arguments)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            return _Recorded.apply(self, *arguments)
        return self.compute(arguments)

    def given(self, arguments: Sequence[Any]) -> SimpleNamespace:
        """Return the arguments of the op by name."""
        return SimpleNamespace(**dict(zip(self.names, arguments, strict=True)))

    # ---- below the border --------------------------------------------------------------------------------------------

    def run(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Run a call: the op's kernel. Coefficients that nobody wants are an empty tensor."""
        return _complete(self.compute(arguments), arguments[0])

    def compute(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Run a call by the backend that is forced, or comes first among those that can."""
        call = backends.Call.of(self.stem, arguments)
        chosen = backends.choose(call)
        taken = arguments[: -len(self.flags)]
        if chosen in _NATIVE and backends.takes_turns(chosen, call, self, taken):
            results = self.native[chosen](*taken, call.options)
        else:
            results = self.chain(self._kernel(chosen, call, arguments), arguments)
        return (*results, self._coefficients(arguments, results))

    def run_backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Run a backward by the backend that is forced, or comes first among those that can.

        A backward is chosen anew: all backends keep the same, so one may differentiate what another computed.
        """
        call = backends.Call.of(self.stem, arguments[self.heads :])
        chosen = backends.choose(call)
        if chosen in _NATIVE:
            return tuple(self.native_backward[chosen](*arguments, call.options))
        if chosen == "triton":
            kernels = backends.triton_kernels(self.stem)
            return tuple(getattr(kernels, f"{self.name}_backward")(*arguments, call.options))
        return self._turn_after_turn(arguments)

    def _kernel(self, chosen: str, call: backends.Call, arguments: Sequence[Any]) -> Callable[..., Any]:
        """Return what runs one turn: called with votes and the op's own arguments, without flags."""
        if chosen in _NATIVE:
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
        self.check(Votes(*arguments[:_COUNT]), self.given(arguments))
        results = self.chain(self._reference_of(arguments), arguments)
        return _complete((*results, self._coefficients(arguments, results)), arguments[0])

    def chain(self, run: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Tensor, ...]:
        """Run all turns one after another, each a routing of one turn by ``run``; return the op's results."""
        votes, given = Votes(*arguments[:_COUNT]), self.given(arguments)
        state = self.first(given)
        every = []
        for turn in range(self.turns(given)):
            results = run(votes, *self.start(given, turn, state))
            every.append(results)
            state = self.advance(given, state, results)
        if len(every) == 1:
            return tuple(every[0])
        history = (torch.cat(kind) for kind in zip(*(results[self.finals :] for results in every), strict=True))
        return (*every[-1][: self.finals], *(kind.detach() for kind in history))

    def _coefficients(self, arguments: Sequence[Any], results: Sequence[Tensor]) -> Tensor | None:
        if not arguments[-1]:
            return None
        with torch.no_grad():
            return self.coefficients(Votes(*arguments[:_COUNT]), self.given(arguments), results)

    def _turn_after_turn(self, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
        """Run a backward of several turns as the sum of the reference's backwards of one."""
        _, backward = self.reference()
        heads = arguments[: self.heads]
        votes, own = Votes(*arguments[self.heads : self.heads + _COUNT]), arguments[self.heads + _COUNT :]
        votes.check()
        for name, value in zip(self.backward_names, arguments, strict=True):
            if isinstance(value, Tensor):
                check_tensor(name, value, votes.children, False, (accumulation_dtype(votes.children.dtype),))
        turns = len(next(head for head in heads if head is not None))
        *own, needs = own
        total: Any = None
        for turn in range(-turns, 0):  # counted from the last, which every stack has
            part = [of_turn(x, turn) if stacked else x for x, stacked in zip(own, self.own_is_stacked, strict=True)]
            found = backward(*(of_turn(head, turn) for head in heads), votes, *part, needs)
            total = found if total is None else tuple(a.add_(b) for a, b in zip(total, found, strict=True))
        return tuple(total)

    def _forward_flops(self, *shapes: Any, out_shape: Any = None, **_: Any) -> int:
        """Return the multiplications and additions of a call: tensors come as their shapes.

        A turn makes the votes, one sum over all of them for the agreement and ``moments`` more for what it leaves; a
        first turn without a state is linear in the children where there is one moment: it is one product.
        """
        given = self.given(shapes)
        votes, one = _flops(shapes)
        first = votes + (0 if self.moments == 1 else self.moments * one)
        turn = votes + (1 + self.moments) * one
        turns = self.turns(given)
        return turns * turn if self.first(given)[0] is not None else first + (turns - 1) * turn

    def _backward_flops(self, *shapes: Any, out_shape: Any = None, **_: Any) -> int:
        """Return the same of a backward: votes made again, agreement, gain, and the two terms of dV; not that of dQ."""
        votes, one = _flops(shapes[self.heads :])
        turns, needs = next(head for head in shapes[: self.heads] if head is not None)[0], shapes[-1]
        return turns * (votes * (1 + (needs & 1) + (needs >> 1 & 1)) + 4 * one)

    # ---- fake kernels, autograd, autocast ----------------------------------------------------------------------------

    def fake(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Return empty tensors as the op would, and tell :func:`fastcaps.explain`, if it listens, of the call."""
        votes, given = Votes(*arguments[:_COUNT]), self.given(arguments)
        for k in self.tensors:  # one tensor without memory among others brings a call here
            if arguments[k] is not None and arguments[k].device != votes.children.device:
                raise ValueError(f"{self.names[k]} must be on {votes.children.device}, got {arguments[k].device}")
        explanation.tell(self, votes, given)
        _let_inductor_call(f"fastcaps::{self.name}")
        wide = accumulation_dtype(votes.children.dtype)
        shape = (votes.children.shape[0], *votes.grid, votes.seen, votes.parents) if given.coefficients else (0,)
        return (*self.fakes(votes, given), votes.children.new_empty(shape, dtype=wide))

    def fake_backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Return empty tensors as the backward would."""
        given = SimpleNamespace(**dict(zip(self.backward_names, arguments, strict=True)))
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
        ctx.routing = self
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in results[self.finals :] if x is not None))
        ctx.save_for_backward(*(arguments[k] for k in self.tensors), *results[self.finals : -1])
        ctx.others = [None if k in self.tensors else argument for k, argument in enumerate(arguments)]

    def differentiate(self, ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of all arguments of the op."""
        saved = ctx.saved_tensors  # once: a checkpoint hands them out once
        arguments, history = list(ctx.others), saved[len(self.tensors) :]
        for k, tensor in zip(self.tensors, saved, strict=False):
            arguments[k] = tensor
        needs_grad = ctx.needs_input_grad[-len(arguments) :]
        needed = [k for k in self.tensors if needs_grad[k]]
        finals = grads[: self.finals]
        gradients: list[Any] = [None] * len(arguments)
        if not needed or all(grad is None for grad in finals):
            return tuple(gradients)
        if torch.is_grad_enabled():  # a graph of the backward itself: through the reference, which is ordinary code
            return tuple(self._through_reference(arguments, finals, needed))
        votes, given = Votes(*arguments[:_COUNT]), self.given(arguments)
        given.needed = {self.names[k] for k in needed}
        run = self.backward_op if _is_watched(arguments[0]) else self.run_backward
        together = backends.sums_turns(arguments[0]) and self.turns(given) > 1
        found = self.backward(run, together, finals, votes, given, history)
        for k in needed:
            gradients[k] = found.get(self.names[k])
        return tuple(gradients)

    def _through_reference(self, arguments: list[Any], finals: Gradients, needed: list[int]) -> list[Any]:
        gradients: list[Any] = [None] * len(arguments)
        with torch.enable_grad(), torch.autocast(arguments[0].device.type, enabled=False):
            # fresh nodes, so that the derivative stops at the arguments themselves (one may depend on another)
            inputs = [x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x for x in arguments]
            inputs[-1] = False  # no coefficients
            results = self.by_reference(*inputs)[: self.finals]
            pairs = [(r, g) for r, g in zip(results, finals, strict=True) if g is not None and r.requires_grad]
            if pairs:
                found = torch.autograd.grad(
                    [r for r, _ in pairs],
                    [inputs[k] for k in needed],
                    [g for _, g in pairs],
                    create_graph=True,
                    allow_unused=True,
                )
                for k, gradient in zip(needed, found, strict=True):
                    gradients[k] = gradient
        return gradients

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


def _native(library: str, name: str) -> Any:
    """Return a native library's op."""
    return getattr(getattr(torch.ops, f"fastcaps_{library}"), name).default


def _let_inductor_call(name: str) -> None:
    """Have Inductor, if it is what compiles, call an op as it is.

    Where the variable CI is set it refuses an op that has a decomposition, as ours have for ONNX: a check that torch
    means for its own ops.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    allowed: set[str] = getattr(lowering, "FALLBACK_ALLOW_LIST", set())
    allowed.add(name)


def _complete(found: tuple[Any, ...], children: Tensor) -> tuple[Tensor, ...]:
    """Return what an op has to return: an empty tensor in place of coefficients that nobody wants."""
    *results, shares = found
    return (*results, children.new_empty(0, dtype=accumulation_dtype(children.dtype)) if shares is None else shares)


def _flops(shapes: Sequence[Any]) -> tuple[int, int]:
    """Return the operations of making all votes once, and of one sum over all of them, from the shapes of a call."""
    (batch, height, width, types, rows, depth), weight, _, _, parents, window = shapes[:_COUNT]
    ho, wo = output_size(window, height, width)
    pairs = batch * ho * wo * window[0] * window[1] * types * parents
    columns = depth if weight is None else weight[3]
    return 0 if weight is None else 2 * pairs * rows * depth * columns, 2 * pairs * rows * columns


def of_turn(stack: Tensor | None, turn: int) -> Tensor | None:
    """Return what belongs to a turn, counted from the last, of a stack of turns; None where that has none."""
    return None if stack is None or len(stack) < -turn else stack[turn]
