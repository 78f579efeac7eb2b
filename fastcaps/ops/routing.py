"""The border: the base of the routings' ops, which decides what runs.

A :class:`Routing` is two ops, the routing and its backward, each with a schema from which those of the native libraries
follow. Above it are the public functions; below it are backends, which need not handle autograd, autocast, compilers
and coefficients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastcaps import backends, reference
from fastcaps.checks import accumulation_dtype, check_tensor
from fastcaps.made import MADE, MadeVotes
from fastcaps.ops.define import LIBRARY, NATIVE, declare, define, let_inductor_call, make_differentiable
from fastcaps.ops.reverse import Reverse
from fastcaps.ops.signature import Gradients, Results, Signature, State, gradient_strides
from fastcaps.rules import DETACH
from fastcaps.votes import SET_WINDOW, VoteInputs, without_autocast
from fastcaps.watchers import are_batched, are_plain, is_sharded, is_transformed, is_watched


class _Recorded(torch.autograd.function._SingleLevelFunction):  # not Function: no transform is active here
    """An eager call with a graph, equal to the op's registered autograd but in a sixth of the time."""

    _compiled_autograd_key = torch.autograd.Function._compiled_autograd_key

    @staticmethod
    def forward(ctx: Any, routing: Routing, votes: VoteInputs, own: Any, *tensors: Tensor | None) -> Any:
        results = routing.compute(votes, own)
        routing.save(ctx, (*votes, *own), results)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        routing: Routing = ctx.routing
        return None, None, None, *routing.differentiate(ctx, ctx.needs_input_grad[3:], grads)


class Routing(Signature, ABC):
    """A routing for PyTorch and the backends: its two ops, and the step between two iterations."""

    # ---- defined by each routing -------------------------------------------------------------------------------------

    def single(self, own: Any, k: int) -> Any:
        """Return the arguments of an op of iteration k alone, except the state."""
        return own._replace(iterations=1)

    @abstractmethod
    def advance(self, own: Any, results: Results) -> State:
        """Return the next iteration's state, from an iteration's arguments and results."""

    @abstractmethod
    def fakes(self, votes: VoteInputs, own: Any) -> Results:
        """Return empty tensors of the op's results, without the coefficients."""

    @abstractmethod
    def coefficients(self, votes: VoteInputs, own: Any, results: Results) -> Tensor:
        """Return the coefficients of the last iteration, from the results of all iterations."""

    @abstractmethod
    def backward(self, reverse: Reverse, grads: Gradients, votes: VoteInputs, own: Any, history: Results) -> None:
        """Compute the gradients of a call by ``reverse``, from those of its final results."""

    @abstractmethod
    def reverse_arguments(self, own: Any, history: Results) -> tuple[Any, ...] | None:
        """Return what the CUDA library's backward through all iterations takes after the votes, before the flags; None
        if it does not run this call."""

    def tables(self, own: Any) -> tuple[Tensor | None, ...]:
        """Return the tables, of a value for each child and parent, of which a backward returns gradients."""
        return ()

    def library(self, votes: VoteInputs, backward: bool) -> tuple[str, str] | None:
        """Return what runs a call, or its backward, instead of a backend, and why: then :meth:`by_library` does."""
        return None

    def by_library(self, votes: VoteInputs, own: Any) -> tuple[Any, ...]:
        """Run a call by products of PyTorch."""
        raise NotImplementedError

    def backward_by_library(self, heads: Gradients, votes: VoteInputs, rest: Any, needs: int) -> Sequence[Tensor]:
        """Run a backward by products of PyTorch."""
        raise NotImplementedError

    @abstractmethod
    def check(self, votes: VoteInputs, own: Any) -> None:
        """Raise if the op's other arguments do not fit the votes, as kernels in Python would broadcast."""

    # ---- the ops -----------------------------------------------------------------------------------------------------

    def __init__(self) -> None:
        """Define both ops, and the CUDA library's backward through all iterations."""
        super().__init__()
        self.op, self.native = define(self.name, *self.schema, self.run, self.fake, self.flops, self.native_schema)
        name, schema, native = f"{self.name}_backward", self.backward_schema, self.native_backward_schema
        self.backward_op, self.native_backward = define(
            name, *schema, self.run_backward, self.fake_backward, self.backward_flops, native
        )
        self.native_reverse = declare("cuda", f"{self.name}_reverse", self.native_reverse_schema)
        make_differentiable(self.op, self._differentiate_op, self.save, self.by_reference, self.fake)
        for key in ("AutocastCPU", "AutocastCUDA"):
            LIBRARY.impl(self.name, self._autocast_kernel(key), key)

    def route(self, votes: VoteInputs, own: Any) -> Any:
        """Run the op by a backend, in the way that its watchers need (:mod:`fastcaps.watchers`)."""
        if isinstance(votes, MadeVotes):
            backends.refuse_unless_reference(self.stem)
            backends.choose_formula(self.name, self.stem, votes, MADE)
            return self._each(votes, own)
        if torch.compiler.is_compiling():
            return self.op(*votes, *own)
        if is_transformed():
            backends.refuse_unless_reference(self.stem)
            return self.by_reference(*votes, *own)
        tensors = self.tensors_of((*votes, *own))
        plain = are_plain(tensors)
        if not plain and is_sharded(tensors):
            from fastcaps.ops import sharding  # whose import of DTensors takes long

            return sharding.route(self, self, votes, own)
        if is_watched() or not plain:
            return self.op(*votes, *own)
        if torch.is_grad_enabled():
            for tensor in tensors:
                if tensor is not None and tensor.requires_grad:
                    return _Recorded.apply(self, votes, own, *tensors)  # type: ignore[attr-defined]
        return self.compute(votes, own)

    __call__ = route

    # ---- below the border --------------------------------------------------------------------------------------------

    def joined_by(self, kernel: Callable[[VoteInputs, Any], Results], votes: VoteInputs, own: Any) -> tuple[Any, ...]:
        """Run a call by a kernel in Python of one iteration."""
        votes.check()
        self._check(votes, own)
        results = self._joined(self.iterate(kernel, votes, own))
        results = [x.contiguous().detach() for x in results]  # no views: users may write into them
        return (*results, self._coefficients(votes, own, results))

    def run(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Run the op's kernel; without a request the coefficients are an empty tensor."""
        return _complete(self.compute(*self.given(arguments)), arguments[0])

    def compute(self, votes: VoteInputs, own: Any) -> tuple[Any, ...]:
        """Run a call by the chosen backend."""
        if self.library(votes, backward=False) is not None:
            return self.by_library(votes, own)
        chosen, options = backends.choose(self.stem, votes)
        if chosen in NATIVE:
            results: Results = self.native[chosen](*votes, *own[: self.native_count], options)
            return (*results, self._coefficients(votes, own, results))
        if chosen == "triton":
            kernel = partial(getattr(backends.triton_kernels(self.stem), self.name), options=options)
            return self.joined_by(kernel, votes, own)
        return self.joined_by(self._reference, votes, own)

    def run_backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Run a backward by the chosen backend. All backends store the same, so it may differ from the forward's."""
        heads, votes, rest, needs = self.given_backward(arguments)
        if self.library(votes, backward=True) is not None:
            return tuple(self.backward_by_library(heads, votes, rest, needs))
        chosen, options = backends.choose(self.stem, votes)
        if chosen in NATIVE:
            found = self.native_backward[chosen](*arguments, options)
        elif chosen == "reference":
            found = self._reference_backward(heads, votes, rest, needs)
        else:
            kernel = getattr(backends.triton_kernels(self.stem), f"{self.name}_backward")
            found = kernel(heads, votes, rest, needs, options)
        return tuple(found if chosen == "cpu" else self.with_weight_strides(found, votes, needs))

    def with_weight_strides(self, found: Sequence[Tensor], votes: VoteInputs, needs: int) -> Sequence[Tensor]:
        """Return gradients, that of the weight with the strides that its op promises; the CPU's kernels write it so."""
        weight, place = votes.weight, self.tensors.index("weight")
        if weight is None or not needs & self.bit["weight"]:
            return found
        made = found[place]
        if not (weight.is_contiguous() and made.is_contiguous()) and made.stride() != gradient_strides(weight):
            found = [*found]
            found[place] = weight.new_empty_strided(weight.shape, gradient_strides(weight)).copy_(found[place])
        return found

    def _reference(self, votes: VoteInputs, own: Any) -> Results:
        formula: Callable[..., Results] = getattr(reference, self.name)
        return formula(votes, *own[:-1])  # without `coefficients`

    def _reference_backward(self, heads: Gradients, votes: VoteInputs, rest: Sequence[Any], needs: int) -> list[Tensor]:
        """Return the sum over iterations of the reference's backwards of one."""
        self.check_backward(heads, votes, rest)
        total: list[Tensor] = []
        parts = self.parts(rest, len(next(head for head in heads if head is not None)))
        for k in range(-len(parts), 0):
            given = (*(head if head is None else head[k] for head in heads), votes)
            part = zip(self.Rest._fields, parts[k], strict=True)
            alone = (x[0] if name in self.stacked and x is not None else x for name, x in part)
            found = getattr(reference, f"{self.name}_backward")(*given, *alone, needs)
            total = [a.add_(b) for a, b in zip(total, found, strict=True)] if total else list(found)
        return total

    def check_backward(self, heads: Gradients, votes: VoteInputs, rest: Sequence[Any]) -> None:
        """Raise if a raw backward's arguments do not fit the votes, as kernels in Python would broadcast."""
        votes.check()
        wide = (accumulation_dtype(votes.children.dtype),)
        for name, value in zip(self.backward_names, (*heads, *votes, *rest), strict=False):
            if isinstance(value, Tensor):
                check_tensor(name, value, votes.children, False, wide)

    def _check(self, votes: VoteInputs, own: Any) -> None:
        """Raise if the op's arguments do not fit, besides those that :meth:`VoteInputs.check` checks."""
        if votes.is_set and tuple(votes.window) != SET_WINDOW:
            raise ValueError(f"window must be {list(SET_WINDOW)} for a set, got {list(votes.window)}")
        self.check(votes, own)

    def by_reference(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Run a call by the reference, one iteration after another, in differentiable code."""
        votes, own = self.given(arguments)
        self._check(votes, own)
        return self._each(votes, own)

    def _each(self, votes: VoteInputs, own: Any) -> tuple[Tensor, ...]:
        results = self._joined(self.iterate(self._reference, votes, own))
        return _complete((*results, self._coefficients(votes, own, results)), votes.children)

    def iterate(
        self,
        run: Callable[[VoteInputs, Any], Results],
        votes: VoteInputs,
        own: Any,
        advance: Callable[[Any, Results], State] | None = None,
    ) -> list[Results]:
        """Return the results of every iteration, each by a separate ``run(votes, arguments of that iteration)``.

        ``advance`` returns the next state, by default :meth:`advance`. With constant coefficients, iterations before
        the last have no gradient.
        """
        every: list[Results] = []
        state: State = {}
        count, detach = self.iterations(own), "detach" in own._fields and own.detach
        if count < 1:
            raise ValueError(f"iterations must be >= 1, got {count}")
        steps = [*range(count)]  # ints, even if a compiler's count is symbolic
        for k in steps:
            last = k == steps[-1]
            with torch.set_grad_enabled(torch.is_grad_enabled() and (last or not detach)):
                one = self.single(own, k)._replace(**state, coefficients=own.coefficients and last)
                every.append(run(votes, one))
                if not last:
                    # no `or`: torch 2.10's compiler cannot evaluate the truth of a function
                    state = (self.advance if advance is None else advance)(one, every[-1])
        return every

    def _joined(self, every: list[Results]) -> Results:
        """Return the results of a call from those of its iterations: the last's, and the history of all."""
        if len(every) == 1:
            return every[0]
        final = len(self.finals)
        # of two dimensions: those of more than four torch copies to a GPU's memory one after the other
        history = (
            torch.cat([x.flatten(1) for x in kind]).unflatten(1, kind[0].shape[1:]).detach()
            for kind in zip(*(results[final:] for results in every), strict=True)
        )
        return (*every[-1][:final], *history)

    def _coefficients(self, votes: VoteInputs, own: Any, results: Results) -> Tensor | None:
        if not own.coefficients:
            return None
        with torch.no_grad():
            return self.coefficients(votes, own, results)

    # ---- fake kernels, autograd, autocast ----------------------------------------------------------------------------

    def fake(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Return empty tensors of the op's results."""
        votes, own = self.given(arguments)
        for name, tensor in zip(self.tensors, self.tensors_of(arguments), strict=True):
            if tensor is not None and tensor.device != votes.children.device:  # such as a meta tensor among others
                raise ValueError(f"{name} must be on {votes.children.device}, got {tensor.device}")
        let_inductor_call(self.op)
        wide = accumulation_dtype(votes.children.dtype)
        shares = votes.children.new_empty(votes.coefficients_shape if own.coefficients else (0,), dtype=wide)
        return (*self.fakes(votes, own), shares)

    def fake_backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Return empty tensors of the backward's results."""
        given = dict(zip(self.backward_names, arguments, strict=True))
        children, results = given["children"], []
        for k, name in enumerate(self.tensors):
            shape = self.gradient_shape(name, given) if given["needs"] >> k & 1 else None
            wide = self.wide and name in self.Own._fields
            dtype = accumulation_dtype(children.dtype) if wide else children.dtype
            result = children.new_empty((0,) if shape is None else shape, dtype=dtype)
            if name == "weight" and shape is not None:
                result = children.new_empty_strided(shape, gradient_strides(given["weight"]))
            results.append(result)
        return tuple(results)

    def save(self, ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        """Store the backward's inputs in an autograd context."""
        arguments, results, count = inputs, output, len(self.finals)  # torch passes them by name
        ctx.routing, ctx.blocks = self, backends.settings()
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*results[count : -1 if results[-1] is None else None])
        ctx.save_for_backward(*self.tensors_of(arguments), *results[count:-1])
        ctx.others = others = list(arguments)
        for k in self.places:
            others[k] = None

    def _differentiate_op(self, ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of all arguments of the op."""
        found = self.differentiate(ctx, self.tensors_of(ctx.needs_input_grad), grads)
        gradients = dict(zip(self.places, found, strict=True))
        return tuple(gradients.get(k) for k in range(len(self.names)))

    def differentiate(self, ctx: Any, needed: Sequence[bool], grads: Gradients) -> Gradients:
        """Return the ``needed`` gradients of the op's tensors, from those of its results."""
        saved = ctx.saved_tensors  # read once: a checkpoint allows no second read
        arguments = ctx.others.copy()
        for k, tensor in zip(self.places, saved, strict=False):
            arguments[k] = tensor
        finals = grads[: len(self.finals)]
        if not any(grad is not None for grad in finals):
            return [None] * len(self.tensors)
        if torch.is_grad_enabled():  # a second derivative: through the reference, which is ordinary code
            return self._through_reference(arguments, finals, needed)
        votes, own = self.given(arguments)
        needs = {name for name, want in zip(self.tensors, needed, strict=True) if want}
        with backends.under(ctx.blocks):
            eager = not is_watched() and are_plain(arguments[:1]) and not are_batched(finals)
            reverse = self.reverse(votes, self.iterations(own), needs, eager)
            history = saved[len(self.tensors) :]
            if not self._by_one_call(reverse, finals, votes, own, history):
                self.backward(reverse, finals, votes, own, history)
        return [reverse.gradients.get(name) if want else None for name, want in zip(self.tensors, needed, strict=True)]

    def _by_one_call(self, reverse: Reverse, grads: Gradients, votes: VoteInputs, own: Any, history: Results) -> bool:
        """Compute the gradients of a call by one call of the CUDA library, if that is what runs its backward."""
        if type(reverse) is not Reverse or reverse.run != self.run_backward:
            return False
        chosen, options = backends.choose(self.stem, votes)
        given = self.reverse_arguments(own, history) if chosen == "cuda" else None
        if given is None:
            return False
        detach = "detach" in own._fields and own.detach
        needs = reverse.needs - (self.constant if detach else set())
        bits, wide = self.bits(needs) | (DETACH if detach else 0), accumulation_dtype(votes.children.dtype)
        heads = [grad if grad is None else grad.to(wide) for grad in grads]
        found = self.with_weight_strides(self.native_reverse(*heads, *votes, *given, bits, options), votes, bits)
        reverse.gradients = {name: one for name, one in zip(self.tensors, found, strict=True) if name in needs}
        return True

    def reverse(self, votes: VoteInputs, count: int, needs: set[str], eager: bool) -> Reverse:
        """Return what computes the backward of ``count`` iterations; unless ``eager``, by the op."""
        on_cpu = backends.on_cpu(self.stem, votes.children)
        run: Any = self.run_backward if eager else self.backward_op
        if eager and on_cpu:  # without the choice, which each iteration would make
            native = self.native_backward["cpu"]
            run = lambda *arguments: native(*arguments, 0)  # noqa: E731
        return Reverse(self, run, votes, count, needs, on_cpu)

    def _through_reference(self, arguments: list[Any], finals: Gradients, needed: Sequence[bool]) -> Gradients:
        wanted = [k for k, want in zip(self.places, needed, strict=True) if want]
        gradients: dict[int, Tensor] = {}
        with torch.enable_grad(), without_autocast(arguments[0].device.type):
            # new nodes, so that the derivative stops at the arguments (one may depend on another)
            inputs = [x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x for x in arguments]
            inputs[-1] = False  # no coefficients
            results = self.by_reference(*inputs)[: len(self.finals)]
            pairs = [(r, g) for r, g in zip(results, finals, strict=True) if g is not None and r.requires_grad]
            if pairs:
                made, heads = zip(*pairs, strict=True)
                leaves = [inputs[k] for k in wanted]
                found = torch.autograd.grad(made, leaves, heads, create_graph=True, allow_unused=True)
                gradients = dict(zip(wanted, found, strict=True))
        return [gradients.get(k) for k in self.places]

    def _autocast_kernel(self, key: str) -> Callable[..., Any]:
        """Return the op's kernel under autocast."""
        excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

        def run(*arguments: Any) -> Any:
            given = self.cast(arguments)
            with torch._C._ExcludeDispatchKeyGuard(excluded):
                return self.op(*given)

        return run


def _complete(found: tuple[Any, ...], children: Tensor) -> tuple[Tensor, ...]:
    """Return an op's results with an empty tensor instead of None for the coefficients."""
    *results, shares = found
    return (*results, children.new_empty(0, dtype=accumulation_dtype(children.dtype)) if shares is None else shares)
