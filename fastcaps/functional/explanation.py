"""Which backend runs a call, by which kernel, and why not the others: what :mod:`fastcaps.backends` chooses."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.fake_tensor import unset_fake_temporarily as real_tensors
from torch.utils._python_dispatch import TorchDispatchMode

from fastcaps import backends
from fastcaps.functional.inverted_attention import inverted_attention_routing
from fastcaps.ops import ROUTINGS
from fastcaps.ops.signature import COUNT
from fastcaps.votes import VoteInputs


@dataclass(frozen=True)
class Explanation:
    """What a call of an op would run on, and why not on the backends before it.

    Attributes
    ----------
    backend
        Its name; ``"torch"`` for the library's own products; None if a forced backend cannot take the call.
    how
        One sentence about what runs.
    reasons
        Why the others do not run: the backends of the call's device, and a forced one.
    forward, backward
        The backend's kernel of each half, or what runs instead; else empty.
    call
        The call in one line: sizes, dtype, device, op.
    """

    backend: str | None
    how: str
    reasons: dict[str, str]
    forward: str = ""
    backward: str = ""
    call: str = ""

    def __str__(self) -> str:
        return _text((self,))


class Explanations(tuple[Explanation, ...]):
    """The explanations of a module's calls of routings and verbs, in the order in which it makes them."""

    def __str__(self) -> str:
        return _text(self) or "no routing call of fastcaps (fastcaps.convert(model) swaps published layers)"


def _text(calls: Sequence[Explanation]) -> str:
    """Return what runs, equal calls in one paragraph, and each reason once."""
    same: dict[str, list[int]] = {}
    for k, one in enumerate(calls):
        lines = [f"  {name}: {text}" for name in ("call", "forward", "backward") if (text := getattr(one, name))]
        same.setdefault("\n".join([f"{one.backend or 'nothing'}: {one.how}", *lines]), []).append(k)
    paragraphs = [text if len(calls) == 1 else f"{which} {text}" for text, which in same.items()]
    reasons = (f"  not {name}: {why}" for one in calls for name, why in one.reasons.items() if why != one.how)
    return "\n".join([*paragraphs, *dict.fromkeys(reasons)])


def explain(call: Callable[..., Any] | Tensor, *inputs: Any, **options: Any) -> Explanation | Explanations:
    """Return which backend and kernel would run a call of a routing, and why not the others.

    Nothing is computed: the call runs on a copy of the module, with tensors that have shapes and no values.

    Parameters
    ----------
    call : Module or function
        A layer, a network, or any function that calls routings. Tensors alone are the arguments of
        :func:`~fastcaps.functional.inverted_attention_routing`.
    *inputs, **options
        Its arguments. A routing layer needs none: it is then explained for a batch of 1 (on a grid, the smallest).

    Returns
    -------
    Explanation or Explanations
        An Explanation of a single call, else Explanations, a tuple. Both print as text.

    Raises
    ------
    TypeError, ValueError
        If ``call`` cannot be called, has no inputs, or looks at values (``if x.sum() > 0``); and what the call raises.
        If a forced backend cannot take the call, the answer says so.
    """
    if isinstance(call, Tensor):
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
        calls = _Calls()
        token = backends.observer.set(calls.add)
        try:
            with calls:
                fake(*inputs, **options)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            name = getattr(call, "__name__", type(call).__name__)
            why = f"what {name} does depends on the numbers in its tensors ({error.func})"
            raise ValueError(f"explain: {why}, and explain has shapes alone: explain its layers one by one") from None
        finally:
            backends.observer.reset(token)
    return calls.found[0] if len(calls.found) == 1 else Explanations(calls.found)


_one_stance = threading.RLock()  # torch's is one for the process: each puts back what it found


@contextmanager
def shapes_alone(call: Callable[..., Any]) -> Iterator[tuple[Callable[..., Any], FakeTensorMode]]:
    """Yield a copy of a module that computes shapes alone, uncompiled, and the mode that makes tensors for it."""
    compiles = "torch._dynamo" in sys.modules  # else nothing is compiled, and its import takes long
    eager = torch.compiler.set_stance("force_eager") if compiles else nullcontext()
    with _one_stance, eager, FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        if isinstance(call, torch.nn.Module):
            held = torch.utils._pytree.tree_leaves([vars(module) for module in call.modules()])
            # what a graph led to, as pruned weights and results that a module keeps, cannot be copied otherwise
            tensors = [each for each in held if isinstance(each, Tensor) and not each.is_leaf]
            tensors += [*call.parameters(), *call.buffers()]
            memo: dict[int, Any] = {id(tensor): mode.from_tensor(tensor) for tensor in tensors}
            with real_tensors():  # other tensors stay real
                call = copy.deepcopy(call, memo)
        yield call, mode


class _Calls(TorchDispatchMode):
    """The explanations of the ops that a call reaches, and of the formulas that run instead of one."""

    supports_higher_order_operators = True
    is_infra_mode = classmethod(lambda cls: True)  # else operators that compile themselves refuse

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Explanation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fastcaps":
            self.add(func.name().removeprefix("fastcaps::"), VoteInputs(*args[:COUNT]), own=args[COUNT:])
        return func(*args, **(kwargs or {}))

    def add(self, op: str, votes: VoteInputs, runs: tuple[str, str] | None = None, own: Sequence[Any] = ()) -> None:
        """Explain a call; ``runs`` is what runs it, and why, if it is a formula, ``own`` what an op takes besides."""
        routing = next((one for one in ROUTINGS if one.name == op), None)
        stem, reverse = "verbs", None
        if routing is not None:
            stem, reverse = routing.stem, routing.library(votes, backward=True)
            runs = runs or routing.library(votes, backward=False)
        call, forced = backends.Call.of(stem, votes), backends.forced()
        refusals = {name: backends.refusal(name, call) for name in backends.NAMES}
        name, how, others = forced, "forced", f"{forced!r} is forced"
        if forced and refusals[forced]:
            name, how = None, f"backend {forced!r} is forced and cannot take this call"
        elif runs is not None:
            (name, how), others = runs, runs[1]
        elif forced is None:
            name = backends.chosen(None, call)
            how, others = next(one.detail for one in backends.listing() if one.name == name), f"{name} comes first"
        reasons = {
            one: why or others
            for one, why in refusals.items()
            if one != name and (one in (forced, "reference") or backends.device_of(one) == call.device.type)
        }
        forward = backward = ""
        if runs is None and name is not None:
            room = {"triton": f"fastcaps.triton_kernels.{stem}.", "reference": f"fastcaps.reference.{stem}."}
            forward = room.get(name, f"fastcaps_{name}::") + op
            if routing is not None:
                whole = name == "cuda" and routing.reverse_arguments(routing.Own(*own), ()) is not None
                backward = f"{forward}_{'reverse' if whole else 'backward'}" if reverse is None else ": ".join(reverse)
        self.found.append(Explanation(name, how, reasons, forward, backward, f"{_describe(votes, call)}, {op}"))


def _describe(votes: VoteInputs, call: backends.Call) -> str:
    (batch, height, width, types), (rows, depth, columns) = votes.sizes[:4], votes.pose
    (ho, wo), (kh, kw) = votes.grid, votes.window[:2]
    where = f"{types} children" if height * width * kh * kw == 1 else f"{height}x{width} x {types} children"
    seen = "" if kh * kw == 1 else f" by {kh}x{kw} windows"
    to = f"{call.parents} parents" if ho * wo == 1 else f"{ho}x{wo} x {call.parents} parents"
    matrices = f"{votes.groups} weight groups" if call.has_weight else "no weights"
    return (
        f"batch {batch}, {where} of {rows}x{depth}{seen} to {to} of {rows}x{columns}, {matrices}, "
        f"{str(call.dtype).removeprefix('torch.')} on {call.device}"
    )
