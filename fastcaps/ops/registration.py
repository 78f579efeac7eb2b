"""What makes a function an op of PyTorch: schema, fake kernel, autograd, autocast, kernels; the same for every pass.

A :class:`Pass` says what is a pass's own. Its backward is an op as well, whose derivative is taken through the
reference's formulas: they are ordinary differentiable code, so that derivatives of any order follow. A third op is that
backward for many turns of a routing at once, summed: a kernel of it makes votes and their gradients once for all turns,
and where there is none a loop over the turns serves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fastcaps import reference
from fastcaps.ops.checks import check

__all__ = [
    "LIBRARY",
    "TAGS",
    "Grads",
    "Pass",
    "autocast_dtype",
    "by_name",
    "differentiate",
    "has_kernel",
    "register_autocast",
    "without_autocast",
]

LIBRARY = torch.library.Library("fastcaps", "DEF")

TAGS = (torch.Tag.pt2_compliant_tag,)
Grads = Sequence[Tensor | None]


@cache
def _defaults(schema: str) -> dict[str, Any]:
    """Return the names of a schema's arguments, with their defaults where they have one."""
    return {argument.name: argument.default_value for argument in torch._C.parse_schema("op" + schema).arguments}


def by_name(schema: str, *arguments: Any, **named: Any) -> Any:
    """Return the arguments of a call as attributes, by their names in a schema."""
    defaults = _defaults(schema)
    return SimpleNamespace(**{**defaults, **dict(zip(defaults, arguments, strict=False)), **named})


def has_kernel(name: str, key: str) -> bool:
    """Return whether ``fastcaps::name`` has a kernel of its own under a dispatch key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{LIBRARY.ns}::{name}", key)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype in which the ops run under the autocast that is on for a device type; None where it is off.

    That is autocast's own dtype, except that float16 on the CPU becomes float32: the CPU kernels take no float16, and
    float32 loses nothing of what was asked for.
    """
    # Not torch.amp.is_autocast_available: torch 2.10's compiler cannot trace it. Other devices have no rule below.
    if device_type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device_type):
        return None
    dtype = torch.get_autocast_dtype(device_type)
    return torch.float32 if device_type == "cpu" and dtype == torch.float16 else dtype


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a context in which autocast is off for a device type."""
    off = autocast_dtype(device_type) is None
    return nullcontext() if off else torch.autocast(device_type, enabled=False)


def register_autocast(name: str, tensors: Sequence[str], wide: Collection[str]) -> None:
    """Give an op autocast kernels: tensors to the dtype of :func:`autocast_dtype`, float64 left alone.

    Backward ops have none: autograd calls them with what the forward saved, which is right as it is.

    Parameters
    ----------
    name : str
        Of the op in this package's library.
    tensors
        The names of its leading arguments.
    wide
        Those among them that are in the accumulation dtype.
    """
    op = getattr(torch.ops.fastcaps, name).default

    def kernel_for(device_type: str, excluded: torch._C.DispatchKeySet) -> Callable[..., Any]:
        def kernel(*args: Any) -> Any:
            dtype = autocast_dtype(device_type)
            with torch._C._ExcludeDispatchKeyGuard(excluded):
                if dtype is not None:
                    accumulated = reference.accumulation_dtype(dtype)
                    given = [
                        tensor
                        if tensor is None or tensor.dtype == torch.float64
                        else tensor.to(accumulated if argument in wide else dtype)
                        for argument, tensor in zip(tensors, args, strict=False)
                    ]
                    args = (*given, *args[len(tensors) :])
                return op(*args)

        return kernel

    for device_type, key in (("cpu", torch._C.DispatchKey.AutocastCPU), ("cuda", torch._C.DispatchKey.AutocastCUDA)):
        LIBRARY.impl(name, kernel_for(device_type, torch._C.DispatchKeySet(key)), key.name)


def differentiate(
    run: Callable[..., Sequence[Tensor]], tensors: Grads, grads: Grads, wanted: Collection[int]
) -> list[Tensor | None]:
    """Return the gradients of ``run(*tensors)`` for the ``wanted`` tensors by running it again.

    Parameters
    ----------
    run
        Differentiable code.
    tensors
        Its arguments.
    grads
        Of its results; None for those that have none.
    wanted
        Positions in ``tensors``.
    """
    gradients: list[Tensor | None] = [None] * len(tensors)
    device_type = next(tensor.device.type for tensor in tensors if tensor is not None)
    with torch.enable_grad(), without_autocast(device_type):
        # fresh nodes, so that the derivative stops at the arguments themselves (one may depend on another)
        inputs = [
            None if tensor is None else (tensor.view_as(tensor) if tensor.requires_grad else tensor)
            for tensor in tensors
        ]
        results = run(*inputs)
        pairs = [
            (result, grad)
            for result, grad in zip(results, grads, strict=True)
            if grad is not None and result.requires_grad
        ]
    if pairs and wanted:
        found = torch.autograd.grad(
            [result for result, _ in pairs],
            [inputs[k] for k in wanted],  # type: ignore[arg-type]
            [grad for _, grad in pairs],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
        for k, gradient in zip(wanted, found, strict=True):
            gradients[k] = gradient
    return gradients


def _everything(grads: Grads, settings: tuple[Any, ...]) -> tuple[Grads, Collection[int]]:
    return grads, ()


@dataclass(frozen=True, eq=False)
class Pass:
    """A pass as PyTorch has to know it.

    Attributes
    ----------
    name
        Of the op; its backward is ``name + "_backward"``, that of many turns :attr:`turns`.
    schema, backward_schema
        Arguments and results; many turns have those of the backward.
    tensors
        The names of the forward's leading arguments, all tensors, in the order of the backward's results.
    wide
        Those of them that are in the accumulation dtype of the children.
    stacked
        The backward's arguments that belong to parents: of many turns they have a leading dimension of turns. The first
        of them that is given tells how many; an argument of the forward may lack the first turn.
    by_reference, backward_by_reference
        The reference's functions of the same arguments.
    checks, checks_backward
        Called with the arguments by name (:func:`by_name`), raise RuntimeError unless they fit together: for kernels
        in Python, which would broadcast in silence.
    fakes, fakes_backward
        Called with the arguments by name, return empty tensors as the op would.
    kept
        From the forward's arguments and its results, the tensors that the backward takes after the gradients.
    reached
        From the gradients of the results and the backward's settings (without ``needs``): the gradients that count,
        and the positions of arguments that none of them reaches.
    freezes
        Whether the forward's last argument is ``bool frozen=False``.
    frozen
        The positions of arguments that no gradient reaches if it is true: constant coefficients cut them off.
    looped
        The dispatch keys under which a loop over turns serves the backward of many.
    """

    name: str
    schema: str
    backward_schema: str
    tensors: tuple[str, ...]
    stacked: tuple[str, ...]
    by_reference: Callable[..., Any]
    backward_by_reference: Callable[..., Any]
    checks: Callable[[Any], Any]
    checks_backward: Callable[[Any], None]
    fakes: Callable[[Any], tuple[Tensor, ...]]
    fakes_backward: Callable[[Any], tuple[Tensor, ...]]
    kept: Callable[[tuple[Any, ...], tuple[Tensor, ...]], Sequence[Tensor | None]]
    reached: Callable[[Grads, tuple[Any, ...]], tuple[Grads, Collection[int]]] = _everything
    wide: frozenset[str] = frozenset()
    freezes: bool = False
    frozen: tuple[int, ...] = ()
    looped: set[str] = field(default_factory=set)

    @property
    def stem(self) -> str:
        """The name of the pass's files, here and everywhere."""
        return self.name.removesuffix("_pass")

    @property
    def turns(self) -> str:
        """The name of the backward of many turns."""
        return f"{self.stem}_turns_backward"

    @property
    def arguments(self) -> int:
        """The number of arguments of the forward."""
        return len(_defaults(self.schema))

    def check(self, *arguments: Any) -> None:
        """Raise RuntimeError unless the arguments of the op fit together."""
        self.checks(by_name(self.schema, *arguments))

    def check_backward(self, *arguments: Any) -> None:
        """Raise RuntimeError unless the arguments of the backward fit together."""
        self.checks_backward(by_name(self.backward_schema, *arguments))

    def fake(self, *arguments: Any, **named: Any) -> tuple[Tensor, ...]:
        """Return empty tensors as the op would."""
        return self.fakes(by_name(self.schema, *arguments, **named))

    def fake_backward(self, *arguments: Any, **named: Any) -> tuple[Tensor, ...]:
        """Return empty tensors as the backward would."""
        return self.fakes_backward(by_name(self.backward_schema, *arguments, **named))

    @property
    def _summed(self) -> int:
        """Return the bits of ``needs`` that count for many turns: what belongs to one turn has no sum over them."""
        return ~sum(1 << k for k, name in enumerate(self.tensors) if name in self.stacked)

    def fake_turns(self, *arguments: Any, **named: Any) -> tuple[Tensor, ...]:
        """Return empty tensors as the backward of many turns would."""
        given = by_name(self.backward_schema, *arguments, **named)
        given.needs &= self._summed
        return self.fakes_backward(given)  # which asks of what has turns only whether it is there

    def by_turns(self, run: Callable[..., Any], *arguments: Any) -> tuple[Tensor, ...]:
        """Return the backward of many turns as the sum of ``run``, which is the backward, over the turns."""
        given = by_name(self.backward_schema, *arguments)
        # without LayerNorm the sums are one empty dimension: the same in every turn
        stacks = {
            name: stack for name in self.stacked if (stack := getattr(given, name)) is not None and stack.dim() > 1
        }
        leading = next(iter(stacks), self.stacked[0])
        turns = len(stacks.get(leading, ()))
        check(turns >= 1, f"there must be a turn at least: {leading} has a leading dimension of turns")
        for name, stack in stacks.items():
            least = turns - (name in self.tensors)
            check(least <= len(stack) <= turns, f"{name} is of {len(stack)} turns, expected {turns}")
        given.needs &= self._summed

        def of_turn(turn: int) -> list[Any]:
            last = turns - turn  # counted from the last turn, which every stack has
            own = {name: stack[-last] if last <= len(stack) else None for name, stack in stacks.items()}
            return list({**vars(given), **own}.values())

        total = run(*of_turn(0))
        for turn in range(1, turns):
            total = [one.add_(other) for one, other in zip(total, run(*of_turn(turn)), strict=True)]
        return tuple(total)

    def define(self, library: torch.library.Library) -> None:
        """Define the ops in a library: schema, fake kernels, autograd. Kernels are the caller's to register.

        The backward of many turns has no autograd: whoever wants its derivatives differentiates the routing.
        """
        library.define(self.name + self.schema, tags=TAGS)
        library.define(self.turns + self.backward_schema, tags=TAGS)
        torch.library.register_fake(f"{library.ns}::{self.turns}", self.fake_turns, lib=library)
        library.define(self.name + "_backward" + self.backward_schema, tags=TAGS)
        forward, backward = f"{library.ns}::{self.name}", f"{library.ns}::{self.name}_backward"
        torch.library.register_fake(forward, self.fake, lib=library)
        torch.library.register_fake(backward, self.fake_backward, lib=library)
        op = getattr(getattr(torch.ops, library.ns), self.name + "_backward").default

        torch.library.register_autograd(forward, partial(self.formula, op), setup_context=self.save, lib=library)
        count = sum("Tensor" in str(argument.type) for argument in op._schema.arguments)

        def save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*inputs[:count])
            ctx.settings = inputs[count:]

        torch.library.register_autograd(backward, self._formula_of_backward, setup_context=save_backward, lib=library)

    def implement(self, key: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """Register Python functions as pass and backward under a dispatch key, ``"CPU"`` or ``"CUDA"``."""
        LIBRARY.impl(self.name, forward, key)
        LIBRARY.impl(self.name + "_backward", backward, key)

    def loop_over_turns(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Run the backward of many turns by the op of one: the kernel where there is no other."""
        return self.by_turns(getattr(torch.ops.fastcaps, self.name + "_backward").default, *arguments)

    def serve_by_loop(self, key: str) -> None:
        """Register the loop over turns as the kernel of their backward under a dispatch key, unless there is one."""
        if not has_kernel(self.turns, key):
            self.looped.add(key)
            LIBRARY.impl(self.turns, self.loop_over_turns, key)

    def serve_by_reference(self, key: str) -> None:
        """Register the reference as pass and backward under a dispatch key."""

        def forward(*arguments: Any) -> Any:
            self.check(*arguments)
            return self.by_reference(*arguments)

        def backward(*arguments: Any) -> Any:
            self.check_backward(*arguments)
            return self.backward_by_reference(*arguments)

        self.implement(key, forward, backward)

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep in an autograd context what the backward will ask for."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*self.kept(inputs, output))
        ctx.settings = tuple(inputs[len(self.tensors) :])

    def formula(self, op: Callable[..., Any], ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of all arguments by the backward op ``op``, which is asked for what is needed alone."""
        settings, count = ctx.settings, len(self.tensors)
        flags = 0
        needed = list(ctx.needs_input_grad[:count])
        if self.freezes:
            *settings, frozen = settings
            if frozen:
                flags = reference.FROZEN
                for k in self.frozen:
                    needed[k] = False
        counting, unreached = self.reached(grads, tuple(settings))
        for k in unreached:
            needed[k] = False
        needs = sum(1 << k for k, need in enumerate(needed) if need)
        gradients: list[Tensor | None] = [None] * count
        if needs and any(grad is not None for grad in counting):
            results = op(*counting, *ctx.saved_tensors, *settings, needs | flags)
            gradients = [result if need else None for result, need in zip(results, needed, strict=True)]
        return (*gradients, *([None] * len(ctx.settings)))

    def _formula_of_backward(self, ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Differentiate the backward op through the reference's formulas; a third derivative goes through autograd."""
        tensors = ctx.saved_tensors
        wanted = [k for k in range(len(tensors)) if ctx.needs_input_grad[k]]
        gradients = differentiate(
            lambda *inputs: self.backward_by_reference(*inputs, *ctx.settings), tensors, grads, wanted
        )
        return (*gradients, *([None] * len(ctx.settings)))
