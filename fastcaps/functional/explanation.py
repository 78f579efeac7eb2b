"""What :func:`fastcaps.explain` answers: which backend runs a call, by which kernel, and why not the others.

It makes the call with fake tensors, which have shapes and no values; the ops' fake kernels report to its listener.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)

from fastcaps import backends, libraries
from fastcaps.functional.inverted_attention import inverted_attention_routing
from fastcaps.ops import Routing
from fastcaps.votes import VoteInputs
from fastcaps.watchers import listener


@dataclass(frozen=True)
class Explanation:
    """What a call of an op would run on, and why not on the backends before it.

    Attributes
    ----------
    backend
        The name of the backend that runs, ``"torch"`` for the library's own convolution or matmul, or None if a forced
        backend cannot take the call.
    how
        One sentence about what runs.
    reasons
        Why the others do not run: the backends of the call's device, and a forced one.
    forward, backward
        The kernel of each half and its schedule (how it splits the call), as the backend reports them; else empty.
    call
        The call in one line: sizes, dtype, device.
    """

    backend: str | None
    how: str
    reasons: dict[str, str]
    forward: str = ""
    backward: str = ""
    call: str = ""

    def __str__(self) -> str:
        return "\n".join([self._answer(), *_reasons((self,))])

    def _answer(self) -> str:
        """Return what runs, without the reasons."""
        lines = [f"  {name}: {text}" for name in ("call", "forward", "backward") if (text := getattr(self, name))]
        return "\n".join([f"{self.backend or 'nothing'}: {self.how}", *lines])


class Explanations(tuple[Explanation, ...]):
    """The explanations of a module's calls of routings and verbs, in the order in which it makes them."""

    def __str__(self) -> str:
        same: dict[str, list[int]] = {}
        for k, call in enumerate(self):
            same.setdefault(call._answer(), []).append(k)
        lines = [*(f"{which} {answer}" for answer, which in same.items()), *_reasons(self)]
        return "\n".join(lines) or "no routing call of fastcaps (fastcaps.convert(model) swaps published layers)"


def _reasons(calls: Sequence[Explanation]) -> list[str]:
    """Return lines with why other backends do not run, which name the calls if it is not all of them."""
    found: dict[str, dict[str, list[int]]] = {}  # calls by reason and backend
    for k, call in enumerate(calls):
        for name, reason in call.reasons.items():
            if reason != call.how:
                found.setdefault(reason, {}).setdefault(name, []).append(k)
    lines = []
    for reason, names in found.items():
        for which in dict.fromkeys(map(tuple, names.values())):
            of = "" if len(which) == len(calls) else f" in {[*which]}"
            lines.append(f"  not {', '.join(name for name in names if tuple(names[name]) == which)}{of}: {reason}")
    return lines


_MOST_CALLS = 1000  # a module that makes more of them iterates absurdly often by itself


def explain(call: Callable[..., Any] | Tensor, *inputs: Any, **options: Any) -> Explanation | Explanations:
    """Return which backend and kernel would run a call of a routing, and why not the others.

    Nothing is computed: the call runs on a copy of the module, with tensors that have shapes and no values.

    Parameters
    ----------
    call : Module or function
        A routing layer, a whole network, a routing function or any function that calls them. Tensors alone are the
        arguments of :func:`~fastcaps.functional.inverted_attention_routing`.
    *inputs, **options
        Its arguments. A routing layer needs none: it is then explained for a batch of 1 (on a grid, the smallest).

    Returns
    -------
    Explanation or Explanations
        An Explanation of a single call, else Explanations, a tuple. Both print as text.

    Raises
    ------
    TypeError
        If ``call`` cannot be called, or is a module that needs inputs and got none.
    ValueError
        If the way through a module depends on values (``if x.sum() > 0``), or has more than 1000 calls of routings.
    Exception
        What the call would raise for wrong arguments. If a forced backend cannot take the call, the answer says so.
    """
    if isinstance(call, Tensor):
        if isinstance(next(iter(inputs), None), torch.nn.Module):
            raise TypeError("explain: the module comes first: explain(module, inputs)")
        call, inputs = inverted_attention_routing, (call, *inputs)
    if isinstance(call, torch.nn.Module) and not inputs:
        if not hasattr(call, "smallest_inputs"):
            raise TypeError(f"explain: a {type(call).__name__} must be given with its inputs: explain(module, inputs)")
        inputs = tuple(call.smallest_inputs())  # type: ignore[operator]
    if not callable(call):
        raise TypeError(f"explain: call must be a module, a function or tensors, got {type(call).__name__}")
    with shapes_alone(call) as (fake, mode):
        for module in fake.modules() if isinstance(fake, torch.nn.Module) else ():
            for when in ("forward_pre", "forward", "backward_pre", "backward"):
                getattr(module, f"_{when}_hooks").clear()
        inputs, options = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, (inputs, options))
        found = _Listener()
        token = listener.set(found)
        try:
            fake(*inputs, **options)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            name = type(call).__name__ if isinstance(call, torch.nn.Module) else getattr(call, "__name__", "function")
            raise ValueError(
                f"explain: what {name} does depends on the numbers in its tensors ({error.func}), and it is called "
                "with shapes alone; explain its layers one by one"
            ) from None
        finally:
            listener.reset(token)
    return found[0] if len(found) == 1 else Explanations(found)


@contextmanager
def shapes_alone(call: Callable[..., Any]) -> Iterator[tuple[Callable[..., Any], FakeTensorMode]]:
    """Yield a copy of a module that computes shapes alone, and the mode that makes tensors for it."""
    with _uncompiled(), FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        mode.cache_enabled = False  # a call that was seen before must be explained again
        yield _faked(call, mode), mode


_one_stance = threading.RLock()  # torch's is one for the process: each puts back what it found


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run what :func:`torch.compile` made as it was written: compiled code reads memory, and fake tensors have none."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and its import takes long
        yield
        return
    with _one_stance, torch.compiler.set_stance("force_eager"):
        yield


def _faked(call: Callable[..., Any], mode: FakeTensorMode) -> Callable[..., Any]:
    """Return a copy of a module whose parameters and buffers are fake; anything else as it is."""
    if not isinstance(call, torch.nn.Module):
        return call
    tensors = [*call.parameters(), *call.buffers()]
    held = torch.utils._pytree.tree_leaves([vars(module) for module in call.modules()])
    # what a graph led to, as pruned weights and results that a module keeps, cannot be copied otherwise
    tensors += [each for each in held if isinstance(each, Tensor) and not each.is_leaf]
    memo: dict[int, Any] = {id(tensor): mode.from_tensor(tensor) for tensor in tensors}
    with unset_fake_temporarily():  # other tensors stay real
        return copy.deepcopy(call, memo)


class _Listener(list[Explanation]):
    """The explanations of the calls so far, in one thread."""

    def routing(self, op: Routing, votes: VoteInputs, own: Any, runs: tuple[str, str] | None = None) -> None:
        """Explain a call of a routing's op; ``runs`` is what runs it, and why, if it is none of the op's kernels."""
        if len(self) == _MOST_CALLS:
            raise ValueError(
                f"explain: the module makes more than {_MOST_CALLS} calls of routings; explain fewer iterations"
            )
        call, count = backends.Call.under_autocast(op.stem, votes), op.iterations(own)
        described = _describe(votes, call) + (f", {count} iterations" if count > 1 else "")
        self.other(call, described, runs or op.library(votes, backward=False))
        if self[-1].backend in backends.NAMES:
            copied = sum(table.numel() for table in (votes.bias, *op.tables(own)) if table is not None)
            facts = (count, getattr(own, op.state[0]) is not None)
            forward, backward = (
                _schedule(self[-1].backend, call, votes, (*facts, half, copied)) for half in (False, True)
            )
            products = op.library(votes, backward=True)
            backward = backward if products is None else f"{products[0]}: {products[1]}"
            self[-1] = replace(self[-1], forward=forward, backward=backward)

    def other(self, call: backends.Call, described: str, runs: tuple[str, str] | None = None) -> None:
        """Explain any call; ``runs`` is what runs it, and why, if no backend is chosen."""
        refusals, forced = {name: backends.refusal(name, call) for name in backends.NAMES}, backends.forced()
        name: str | None
        if forced is not None and refusals[forced] is not None:
            name, how, others = None, f"backend {forced!r} is forced and cannot take this call", f"{forced!r} is forced"
        elif runs is not None:
            (name, how), others = runs, runs[1]
        elif forced is not None:
            name, how, others = forced, "forced", f"{forced!r} is forced"
        else:
            name = backends.chosen(None, call)
            how, others = next(one.detail for one in backends.listing() if one.name == name), f"{name} comes first"
        order = sorted(backends.NAMES, key=lambda each: each != forced)
        order = [
            each for each in order if each in (forced, "reference") or backends.device_of(each) == call.device.type
        ]
        reasons = {each: refusals[each] or others for each in order if each != name}
        self.append(Explanation(name, how, reasons, call=described))


def _schedule(name: str | None, call: backends.Call, votes: VoteInputs, facts: tuple[int, bool, bool, int]) -> str:
    """Return what a backend says of kernel and schedule, in a line. ``facts``: iterations, start, backward, copied."""
    if name in ("cpu", "cuda"):
        asked = (call.stem, votes.sizes_in_c(), backends.native_facts(call, votes, *facts))
        ask = libraries.library(name).ask
        answer = ask("fastcaps_cpu_schedule", *asked) if name == "cpu" else ask("fastcaps_cuda_schedule", *asked)
        return (answer or "").split("text=")[-1]
    if name == "triton":
        return str(backends.triton_kernels(call.stem).schedule_call(votes, call, facts[2]))
    return ""


def _describe(votes: VoteInputs, call: backends.Call) -> str:
    batch, height, width, types = votes.sizes[:4]
    (rows, depth, columns), (ho, wo), (kh, kw) = votes.pose, votes.grid, votes.window[:2]
    where = f"{types} children" if height * width * kh * kw == 1 else f"{height}x{width} x {types} children"
    seen = "" if kh * kw == 1 else f" by {kh}x{kw} windows"
    to = f"{call.parents} parents" if ho * wo == 1 else f"{ho}x{wo} x {call.parents} parents"
    matrices = f"{votes.groups} weight groups" if call.has_weight else "no weights"
    return (
        f"batch {batch}, {where} of {rows}x{depth}{seen} to {to} of {rows}x{columns}, {matrices}, "
        f"{str(call.dtype).removeprefix('torch.')} on {call.device}"
    )
