"""Backends that are made up, for tests of the choice among them on machines without a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastcaps import backends, dispatch, libraries, ops

GPU = torch.device("cuda:0")


class FakeLibrary:
    """The CUDA library as far as the choice asks it: it takes poses of up to 512 numbers."""

    problem = ""

    def ask(self, function: str, *arguments: Any) -> str | None:
        if function == "fastcaps_cuda_refusal":
            rows, _, columns = arguments
            return "" if rows * columns <= 512 else "it takes poses of up to 512 numbers"
        return {"fastcaps_cuda_toolkit": "13.0.88", "fastcaps_cuda_architectures": "80-real,90"}.get(function)


def triton_refusal(device: torch.device, dtype: torch.dtype, pose: tuple[int, int, int], parents: int) -> str | None:
    return None if pose[0] * pose[2] <= 8192 else "it takes poses of up to 8192 numbers"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[pytest.MonkeyPatch]:
    """A machine with an H200, a torch that reaches it, the CUDA library and Triton."""
    built = tmp_path / "libfastcaps_cuda.so"
    built.touch()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(libraries, "library_path", lambda name: built)
    monkeypatch.setattr(libraries, "library", lambda name: FakeLibrary())
    monkeypatch.setattr(libraries, "triton_kernels", lambda *_: (SimpleNamespace(refusal=triton_refusal), ""))
    for cached in (backends._chosen, backends._device_problem):
        cached.cache_clear()
    yield monkeypatch
    for cached in (backends._chosen, backends._device_problem):
        cached.cache_clear()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Put the Python kernels in the place of the CPU's; the function given makes them choose one backend."""
    library = torch.library.Library("fastcaps", "IMPL")
    names = [name for one in ops.PASSES for name in (one.name, f"{one.name}_backward", one.turns)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced
        for name in [*names, *(routing.name for routing in ops.ROUTINGS)]:
            library.impl(name, getattr(dispatch, name), "CPU", allow_override=True)

    def choose(name: str) -> None:
        monkeypatch.setattr(backends, "choose", lambda *_: name)

    yield choose
    library._destroy()
