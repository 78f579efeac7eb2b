"""Backends that are made up, for tests of the choice among them on machines without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from registry import ROUTINGS, BackwardCall, Call, Routing

from fastcaps import backends, libraries, ops

GPU = torch.device("cuda:0")
POSE = (4, 4, 4)


class FakeLibrary:
    """The CUDA library as far as the choice asks it: it takes poses of up to 512 numbers, and all turns at once."""

    problem = ""

    def ask(self, function: str, *arguments: Any) -> str | None:
        if function == "fastcaps_cuda_refusal":
            _, rows, _, columns, _ = arguments
            return "" if rows * columns <= 512 else "it takes poses of up to 512 numbers"
        answers = {"toolkit": "13.0.88", "architectures": "80-real,90", "routing_refusal": ""}
        return answers.get(function.removeprefix("fastcaps_cuda_"))


def triton_refusal(
    device: torch.device, dtype: torch.dtype, pose: tuple[int, int, int], parents: int, has_weight: bool
) -> str | None:
    return None if pose[0] * pose[2] <= 8192 else "it takes poses of up to 8192 numbers"


def asked(dtype: torch.dtype = torch.float32, pose: tuple[int, int, int] = POSE, stem: str = "attention") -> Any:
    """Return a call on the made-up GPU, as the choice knows it."""
    return backends.Call(stem, GPU, dtype, pose, 32, True, 0)


def clear() -> None:
    for cached in (backends.chosen, backends._device_problem):
        cached.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[pytest.MonkeyPatch]:
    """A machine with an H200, a torch that reaches it, the CUDA library and Triton."""
    built = tmp_path / "libfastcaps_cuda.so"
    built.touch()
    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232448)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    cpu, there = libraries.library("cpu"), libraries.library_path
    monkeypatch.setattr(libraries, "library_path", lambda name: built if name == "cuda" else there(name))
    monkeypatch.setattr(libraries, "library", lambda name: FakeLibrary() if name == "cuda" else cpu)
    kernels = SimpleNamespace(refusal=triton_refusal, schedule_call=lambda *_: "schedule of Triton")
    monkeypatch.setattr(libraries, "triton_kernels", lambda *_: (kernels, ""))
    clear()
    yield monkeypatch
    clear()


def serve(
    monkeypatch: pytest.MonkeyPatch, name: str, refusal: Callable[[], str] = lambda: ""
) -> list[tuple[str, tuple[Any, ...]]]:
    """Have a made-up backend serve the CPU by the reference, and return the list of its calls, as it grows.

    ``refusal`` answers whether the CUDA library takes all turns at once.
    """
    seen: list[tuple[str, tuple[Any, ...]]] = []

    def forward(routing: Routing) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            seen.append((routing.name, arguments))
            given = dict(zip([a.name for a in routing.op._schema.arguments], arguments[:-1], strict=False))
            return tuple(Call(routing, given, {}).by_loop()[result] for result in routing.outputs)

        return run

    def backward(routing: Routing) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            seen.append((f"{routing.name}_backward", arguments))
            names = [argument.name for argument in routing.backward_op._schema.arguments]
            return BackwardCall(routing, dict(zip(names, arguments[:-1], strict=True))).by_reference()

        return run

    functions = {routing.name: forward(routing) for routing in ROUTINGS}
    functions |= {f"{routing.name}_backward": backward(routing) for routing in ROUTINGS}
    if name == "cuda":
        for routing in ROUTINGS:
            border = getattr(ops, routing.name)
            monkeypatch.setitem(border.native, "cuda", functions[routing.name])
            monkeypatch.setitem(border.native_backward, "cuda", functions[f"{routing.name}_backward"])
        library = SimpleNamespace(ask=lambda function, *_: refusal() if function.endswith("routing_refusal") else None)
        monkeypatch.setattr(libraries, "library", lambda _: library)
        monkeypatch.setattr(backends, "native_facts", lambda *_: None)
    monkeypatch.setattr(backends, "triton_kernels", lambda _: SimpleNamespace(**functions))
    monkeypatch.setattr(backends, "choose", lambda _: name)
    monkeypatch.setattr(backends, "on_cpu", lambda _: False)
    return seen
