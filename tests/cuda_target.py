"""Where the CUDA kernels are tested, and how: for every routing alike.

Everywhere their very sources run on the CPU (``cuda_on_cpu``), one block at a time, every access to memory watched: a
race within a block or between two, a step outside of shared memory or of a tensor, a misaligned vector or lanes that
miss a barrier are errors. With a GPU the compiled kernels run as well. How much they may err:
``bench.judge``.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from cases import Case, on_device
from cuda_on_cpu import build
from registry import ROUTINGS, BackwardCall, Call, Routing, votes_of
from torch import Tensor

from fastcaps import backends, libraries
from fastcaps.checks import accumulation_dtype
from fastcaps.rules import DETACH

DETERMINISTIC, ALLOW_TF32, TF32X3 = 1, 2, 4
GPU = {entry.name: entry for entry in backends.listing()}["cuda"]
ON_DEVICE = torch.cuda.is_available() and GPU.available
OPTIONS = {"fast": 0, "ordered": DETERMINISTIC, "tf32": ALLOW_TF32, "tf32-ordered": ALLOW_TF32 | DETERMINISTIC}
OPTIONS |= {"tf32x3": ALLOW_TF32 | TF32X3, "tf32x3-ordered": ALLOW_TF32 | TF32X3 | DETERMINISTIC}
MACHINE = (4, 227 << 10)  # what the kernels run on here: multiprocessors, and a block's largest shared memory
_ELEMENTS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@cache
def library(target: str) -> ctypes.CDLL:
    """Build the kernels for the CPU; their ops have the schemas that the ops of the CUDA library have."""
    built = build.library(target)
    schemas = torch.library.Library(target, "FRAGMENT")
    names = [f"{routing.name}{way}" for routing in ROUTINGS for way in ("", "_backward", "_reverse")]
    for name in (*names, "folded", "plain_routing", "plain_routing_reverse"):
        schema = str(getattr(torch.ops.fastcaps_cuda, name).default._schema)
        schemas.define(schema.removeprefix("fastcaps_cuda::"))
    built.schemas = schemas  # they live as long as it does
    return built


def question(
    routing: Routing, case: Case, option: str = "fast", backward: bool = False, machine: tuple[int, int] = MACHINE
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return a call as the library is asked about it."""
    bias = 0 if case.bias is None else 1 if case.bias[0] == "1" else 2
    facts = (int(backward), _ELEMENTS.index(case.dtype), bias, int(case.start), case.iterations, OPTIONS[option])
    return routing.stem, votes_of(routing.call(case).given).sizes, (*facts, *machine)


@dataclass(frozen=True)
class Target:
    """The ops under test, and where their tensors lie."""

    device: str
    library: str = build.KERNELS

    def op(self, name: str) -> Any:
        """Return an op of the kernels by its name."""
        if self.device == "cpu":
            library(self.library)
            return getattr(getattr(torch.ops, self.library), name).default
        return getattr(torch.ops.fastcaps_cuda, name).default

    def ask(self, name: str, *arguments: Any) -> str:
        """Return the library's answer to one of the questions of csrc/cuda/introspection.cu."""
        on_gpu = self.device == "cuda"
        built = ctypes.CDLL(str(libraries.library_path("cuda"))) if on_gpu else library(self.library)
        function = getattr(built, f"fastcaps_cuda_{name}")
        function.restype = ctypes.c_char_p
        as_c = {str: lambda text: ctypes.c_char_p(text.encode()), int: ctypes.c_int64}
        as_c |= {tuple: lambda numbers: (ctypes.c_int64 * len(numbers))(*numbers)}
        answer: str = function(*(as_c[type(argument)](argument) for argument in arguments)).decode()
        return answer

    def guarded(self) -> Any:
        return nullcontext() if self.device == "cuda" else build.guarded(self.library)

    def set_order(self, order: str) -> None:
        """Choose the order of blocks and threads for all launches to come; on a GPU it is chance."""
        if self.device == "cpu":
            build.set_order(self.library, order)

    def moved(self, given: dict[str, Any]) -> dict[str, Any]:
        return {n: on_device(x, self.device) if isinstance(x, Tensor) else x for n, x in given.items()}

    def forward(self, call: Call, option: str = "fast") -> dict[str, Tensor]:
        """Return the results of a call by name."""
        call = Call(call.routing, self.moved(call.given), {}, call.detach)
        found = call.forward(self.op(call.routing.name), OPTIONS[option])
        assert all(result.is_contiguous() for result in found.values())
        return {name: result.cpu() for name, result in found.items()}

    def backward(self, call: BackwardCall, option: str = "fast") -> dict[str, Tensor]:
        """Return the gradients of a backward by name."""
        call = BackwardCall(call.routing, self.moved(call.given))
        found = call.results(self.op(f"{call.routing.name}_backward"), OPTIONS[option])
        assert all(gradient.is_contiguous() for gradient in found.values())
        return {name: gradient.cpu() for name, gradient in found.items()}

    def reverse(self, call: Call, option: str = "fast") -> dict[str, Tensor]:
        """Return the results of a call, and its gradients through all iterations by one call."""
        results, border = self.forward(call, option), call.routing.border
        moved = self.moved({**call.given, **{name: results[name] for name in border.history}})
        constant = border.constant if call.detach else ()
        wanted = [name for name in call.names if name not in constant]
        taken = [argument.name for argument in border.native_reverse._schema.arguments]
        names = taken[taken.index("children") : taken.index("needs")]
        moved |= {name: moved[f"all_{name}"] for name in names if f"all_{name}" in moved}
        bits = border.bits(wanted) | (DETACH if call.detach else 0)
        wide = accumulation_dtype(call.given["children"].dtype)
        grads = [on_device(call.grads[name], self.device).to(wide) for name in border.finals]
        op = self.op(f"{call.routing.name}_reverse")
        found = op(*grads, *(moved[name] for name in names), bits, OPTIONS[option])
        gradients = dict(zip(border.tensors, found, strict=True))
        results |= {f"d{name}": gradients[name].cpu() for name in wanted}
        return results | {f"d{name}": torch.zeros_like(call.given[name]) for name in call.names if name in constant}

    def run(self, routing: Routing, case: Case, option: str = "fast", seed: int = 0) -> list[dict[str, Tensor]]:
        """Return a case's results and its gradients, every tensor fenced in."""
        with self.guarded():
            results = self.forward(routing.call(case, seed), option)
            # votes that are rounded to tf32 differ from the reference's by more than what cancels in a gate's gradient
            rounds = routing.rounds and option.startswith("tf32")
            back = routing.backward_call(case, seed, forward=partial(self.forward, option=option) if rounds else None)
            return [results, self.backward(back, option)]

    def check(self, routing: Routing, case: Case, option: str = "fast", seed: int = 0) -> list[dict[str, Tensor]]:
        """Hold what ``run`` returns to the rule, and return it."""
        tf32 = option in ("tf32", "tf32-ordered") and case.dtype == torch.float32  # three products keep float32's rule
        found = self.run(routing, case, option, seed)
        routing.bar(case, seed, tf32, training=False).hold(found[0])
        routing.backward_bar(case, seed, tf32).hold(found[1])
        return found


on_every_target = pytest.mark.parametrize(
    "target", [Target("cpu"), *([Target("cuda")] if ON_DEVICE else [])], ids=lambda target: f"on-{target.device}"
)


def mixed_order(request: pytest.FixtureRequest) -> Any:
    """Blocks and threads alternately forward, backward and shuffled, alike in every test: a fixture's body."""
    target = request.getfixturevalue("target")
    target.set_order("mixed")
    yield
    target.set_order("mixed")
