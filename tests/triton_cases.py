"""What the tests of the Triton kernels share: how the kernels are run and judged, and what launches compile to.

On a GPU the kernels run as they are; elsewhere Triton interprets them, so shapes are small. Triton decides when it is
first imported whether to compile kernels or to interpret them, so a test process that has compiled one cannot interpret
another. Calls therefore go to a child, as tensors with their strides.
"""

from __future__ import annotations

import importlib
import io
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import pytest
import stored_votes
import torch
from cases import Case, apart, on_device
from registry import ATTENTION, GAUSSIAN, POOLING, ROUTINGS, BackwardCall, Call, Routing, routing_of

triton = pytest.importorskip("triton", reason="triton is not installed (pip install triton)")

import fastcaps  # noqa: E402
from fastcaps import libraries, ops  # noqa: E402

if problem := libraries.triton_kernels()[1]:
    pytest.skip(problem, allow_module_level=True)
from fastcaps.rules import Rule  # noqa: E402
from fastcaps.triton_kernels import call, forward, schedule, static, verbs  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = {"forward": 1, "backward": 1, "warps": (1, 2)}  # 32 numbers a program: parents and children are split
WIDE = {"forward": 128, "backward": 128, "resident": 1}  # few programs with many positions, for the interpreter's sake


def interpret(function: str, *arguments: Any, **options: Any) -> Any:
    """Call a function by name in the child: ``"fastcaps.triton_kernels.attention.attention_routing"``.

    A process that interprets kernels itself needs none.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return _run(function, arguments, options)
    with patch.dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"):  # which the child has from its start
        answer = _child().submit(_serve, _packed((function, arguments, options)))
    return _unpacked(answer.result())


@cache
def _child() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"))


def _packed(message: Any) -> bytes:
    memory = io.BytesIO()
    torch.save(message, memory)
    return memory.getvalue()


def _unpacked(message: bytes) -> Any:
    return torch.load(io.BytesIO(message), weights_only=False)


def _run(function: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    limits = options.pop("limits", None)
    if limits is not None:
        options["limits"] = schedule.Limits(**limits)
    module, _, name = function.rpartition(".")
    return getattr(importlib.import_module(module), name)(*arguments, **options)


def _serve(message: bytes) -> bytes:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # with NaN: what no kernel writes shows
    return _packed(_run(*_unpacked(message)))


def module_of(name: str) -> Any:
    """Return the module of the kernels that serve an op or its backward."""
    return importlib.import_module(f"fastcaps.triton_kernels.{name.partition('_routing')[0]}")


def function(name: str) -> Callable[..., Any]:
    """Return the kernels' function that serves an op or its backward, as one of that op's arguments."""
    found = getattr(module_of(name), name)
    return lambda *arguments, **limits: found(*records(name, arguments), **limits)


def records(name: str, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments of an op or its backward, and options, as the kernels' function takes them."""
    border, (*given, options) = getattr(ops, name.removesuffix("_backward")), arguments
    return (*(border.given_backward(given) if name.endswith("_backward") else border.given(given)), options)


def kernels(name: str, **limits: Any) -> Callable[..., Any]:
    """Return a function of the kernels, interpreted where there is no GPU; ``limits``: of a program."""

    def run(*arguments: Any) -> Any:
        if DEVICE == "cpu":
            path = f"{module_of(name).__name__}.{name}"
            return interpret(path, *records(name, arguments), **({"limits": limits} if limits else {}))
        there = [on_device(one, DEVICE) if isinstance(one, torch.Tensor) else one for one in arguments]
        found = function(name)(*there, limits=schedule.Limits(**limits))
        return tuple(one.cpu() for one in found)

    return run


def backward_of(routing: Routing, back: BackwardCall, options: int = 0, **limits: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of a call by name."""
    return back.results(kernels(f"{routing.name}_backward", **limits), options)


def check(routing: Routing, case: Case, options: int = 0, **limits: Any) -> None:
    """Hold one iteration's results, and the gradients of all iterations, to the bar."""
    # the interpreter multiplies in float32, and three products keep its rule
    tf32 = options & 6 == 2 and DEVICE == "cuda" and case.dtype == torch.float32
    one = replace(case, iterations=1)
    found = routing.call(one).forward(kernels(routing.name, **limits), options)
    routing.bar(one, tf32=tf32, training=False).hold(found)
    routing.backward_bar(case, tf32=tf32).hold(backward_of(routing, routing.backward_call(case), options, **limits))


# ---- what the child runs by itself: whole ops, and calls whose offsets pass 2**31 ------------------------------------

FAR = 1 << 30


SERVED = ((ATTENTION, "plain-any"), (POOLING, "sharp"), (GAUSSIAN, "one-effective-child"))
"""Cases that the public op runs in the interpreter."""


def training(stem: str, case: Case) -> list[dict[str, torch.Tensor]]:
    """Return results and gradients of a case, and of it as a set, by the public op with the Triton backend."""
    call = routing_of(stem).call(case)
    with fastcaps.backend("triton"):
        return [one.training(Call.by_op) for one in (call, call.as_set())]


def near_and_far(options: int) -> list[list[torch.Tensor]]:
    """Return results and gradients near and far: rows and columns of poses and matrices lie 2**30 numbers apart."""
    case = ATTENTION.make("far", rule=Rule.PLAIN, batch=1, types=2, parents=2, pose=(3, 4, 3))
    call, back, both = ATTENTION.call(case), ATTENTION.backward_call(case), []
    for far in (False, True):
        if far:
            strides = {"children": (1, 1, 1, 1, FAR, FAR + 2), "weight": (1, 2, FAR, FAR + 4)}
            given = {name: apart(call.given[name], lie) for name, lie in strides.items()}
            call, back = (replace(one, given=one.given | given) for one in (call, back))
        results = call.forward(function(ATTENTION.name), options)
        both.append([*results.values(), *back.results(function(f"{ATTENTION.name}_backward"), options).values()])
    return both


# ---- what would be compiled ------------------------------------------------------------------------------------------

JIT = isinstance(forward._forward_kernel, triton.JITFunction)
compiled_here = pytest.mark.skipif(not JIT, reason="kernels are interpreted in this process (TRITON_INTERPRET=1)")


def launches(run: Callable[[], Any]) -> list[call.Launch]:
    """Return all that a function would start, on tensors of no memory."""
    with call.watched() as found:
        run()
    for launch in found:
        # what Triton itself insists on, and its interpreter does not
        assert set(launch.arguments) - {"num_warps", "num_stages"} == set(launch.kernel.arg_names), launch.name
    return found


def steps(
    routing: Routing, case: Case, options: Sequence[int] = (0,), device: str = "cpu", **limits: Any
) -> list[call.Launch]:
    """Return all that an iteration and the backward of all iterations would start, on tensors of no memory."""

    def asked(name: str) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            there = [
                torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=device)
                if isinstance(one, torch.Tensor)
                else one
                for one in arguments
            ]
            made = function(name)(*there, limits=schedule.Limits(**limits))
            return tuple(torch.empty(one.shape, dtype=one.dtype) for one in made)

        return run

    with torch.device("meta"):
        one, back = routing.call(replace(case, iterations=1)), routing.backward_call(case)
    forward, backward = asked(routing.name), asked(f"{routing.name}_backward")

    def run() -> None:
        for option in options:
            one.forward(forward, option)
            back.results(backward, option)

    return launches(run)


def decisions(launch: call.Launch) -> set[str]:
    """Return what is decided before a kernel runs, a line each.

    Which tensors there are, what else it is compiled for, how votes are made, and of what there are several.
    """

    def lines_of(name: str, value: Any) -> list[str]:
        if isinstance(value, triton.language.constexpr):
            value = value.value
        if isinstance(value, tuple):
            fields = getattr(value, "_fields", range(len(value)))
            return [line for field, one in zip(fields, value, strict=True) for line in lines_of(f"{name}.{field}", one)]
        if value is None or isinstance(value, torch.Tensor):
            return [f"{name}: {'there' if value is not None else 'not there'}"]
        if name in ("blocks", "tiles", "splits"):
            return [f"{name}: {'several' if value > 1 else 'one'}"]
        told_all = ("CHILDREN", "PARENTS", "iteration.RULE")
        return [f"{name}: {value}"] if isinstance(value, bool) or name in told_all else []

    lines = [line for one in launch.arguments.items() if one[0] not in ("tile", "algebra") for line in lines_of(*one)]
    tile, votes = launch.arguments.get("tile"), launch.arguments.get("votes")
    if votes is not None:
        votes_by = "columns" if tile.BK.value == 0 else "products"
        lines.append(f"votes: {'poses' if votes.weight is None else votes_by}")
        lines.append(f"padding: {votes.PH.value > 0 or votes.PW.value > 0}")
    if "dweight" in launch.arguments:
        lines.append(f"gradients: {'products' if tile.DEPTH.value and tile.BL.value * tile.BC.value >= 16 else 'sums'}")
    # the kernels are the same for all routings, of which each has an iteration of its own
    return {f"{launch.name if line.startswith('iteration') else launch.kernel.__name__}, {line}" for line in lines}


def covering(found: Sequence[call.Launch]) -> list[call.Launch]:
    """Return few of the launches, in which every decision occurs that any of them makes."""
    made = [decisions(launch) for launch in found]
    missing, few = set[str]().union(*made), []
    while missing:
        best = max(range(len(found)), key=lambda k: len(made[k] & missing))
        few.append(found[best])
        missing -= made[best]
    return few


def once_each(found: Sequence[call.Launch]) -> list[call.Launch]:
    """Return one launch of every kernel."""
    return list({launch.name: launch for launch in found}.values())


def every_decision(few: bool = False) -> list[call.Launch]:
    """Return launches of everything that the cases of the tests would have compiled for a GPU, some of each kernel.

    Of ``few`` cases: those in which each value of a factor occurs, and one in whose kernels parents take several tiles.
    """
    found = []
    for routing in ROUTINGS:
        cases = (*routing.table.covering[0], routing.case("sweeps-any")) if few else routing.cases
        for case in (case for case in cases if case.dtype != torch.float64):
            found += steps(routing, case, (0, 3), "meta")
    by_name: dict[str, list[call.Launch]] = {}
    for launch in (*found, *launches(_verbs)):
        by_name.setdefault(launch.name, []).append(launch)
    return [launch for some in by_name.values() for launch in covering(some)]


def _verbs() -> None:
    """Call every verb on votes of every kind."""
    for name, options in itertools.product(("grid", "grid-no-matrix", "grid-bare", "one-group", "primes"), (0, 3)):
        case = stored_votes.CASES[name]
        tensors = [x if x is None else x.to("meta") for x in case.tensors()]
        votes = case.inputs(tensors)
        stored_votes.op_results(lambda op, *own, v=votes, o=options: getattr(verbs, op)(v, *own, o), tensors)


def hold_compiled(found: Sequence[call.Launch], target: str, spills: int, wanted: set[str]) -> None:
    """Compile one launch of every kernel for a target; the ``wanted`` are among them and few registers may spill."""
    assert wanted <= {launch.name for launch in found}
    for launch in once_each(found):
        made = static.compiled_for(target, launch)
        assert made.num_warps in (1, 2, 4, 8, 16) and 0 < made.n_regs <= 512
        assert made.shared <= 64 << 10, made
        assert made.n_spills <= spills, made
