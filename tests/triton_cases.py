"""What the tests of the Triton kernels share: a pass's kernels as ops of the tests' own, and what launches compile to.

On a GPU the kernels run as they are; elsewhere Triton interprets them (``triton_worker.py``), so shapes are small.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pass_cases import Judge
from torch.utils._python_dispatch import TorchDispatchMode
from triton_worker import Interpreter

from fastcaps import ops

triton = pytest.importorskip("triton", reason="triton is not installed (pip install 'fastcaps[triton]')")

from fastcaps.triton_kernels import call, forward, plan, static  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TINY = {"forward": 1, "backward": 1, "warps": (1, 2)}  # 32 numbers a program: parents and children are split
WIDE = {"forward": 128, "backward": 128, "resident": 1}  # few programs with many positions, for the interpreter's sake

interpret = Interpreter()
options: dict[str, Any] = {}
"""Of the calls that the test ops make: deterministic, allow_tf32, limits."""
_LIBRARY = torch.library.Library("fastcaps_triton_test", "DEF")


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    """Forget options before and after every test."""
    options.clear()
    yield
    options.clear()


def _kernel(stem: str, function: str) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        device = next(one.device.type for one in arguments if isinstance(one, torch.Tensor))
        if device == "cpu":
            return interpret(f"fastcaps.triton_kernels.{stem}.{function}", *arguments, **options)
        chosen = {**options}
        if "limits" in chosen:
            chosen["limits"] = plan.Limits(**chosen["limits"])
        return getattr(importlib.import_module(f"fastcaps.triton_kernels.{stem}"), function)(*arguments, **chosen)

    return run


def implemented(one: ops.Pass) -> tuple[Any, Any]:
    """Return a pass's kernels as ops, with a fake and an autograd formula as the library registers them."""
    one.define(_LIBRARY)
    taken, backward = one.arguments - one.freezes, one.name + "_backward"
    run = _kernel(one.stem, one.name)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(one.name, lambda *arguments: run(*arguments[:taken]), key)
        _LIBRARY.impl(backward, _kernel(one.stem, backward), key)
    namespace = torch.ops.fastcaps_triton_test
    return getattr(namespace, one.name).default, getattr(namespace, backward).default


def there(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return tensors on the device."""
    return [None if tensor is None else tensor.to(DEVICE) for tensor in tensors]


def hold_same_bits(judge: Judge, run: Any, case: Any) -> None:
    """Assert that the deterministic mode gives the same bits twice, and about what the other mode gives."""
    call_of = (there(case.tensors(torch.float32)), case.settings(), there(case.grads(torch.float32)))
    options.update(deterministic=True)
    first, again = (judge.results(run, *call_of) for _ in range(2))
    options.clear()
    fast = judge.results(run, *call_of)
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
        torch.testing.assert_close(value, fast[name], rtol=1e-4, atol=1e-5, msg=name)


def hold_only_what_is_asked(judge: Judge, run: Any, backward: Any, case: Any) -> None:
    """Assert that the backward makes the gradients of its ``needs``, alone as well as together, and no others."""
    one, tensors, grads = judge.one, there(case.tensors(torch.float32)), there(case.grads(torch.float32))
    outputs = run(*tensors, *case.settings())
    saved = (*grads, *one.kept((*tensors, *case.settings()), outputs), *case.settings())
    count = len(one.tensors)
    everything = backward(*saved, (1 << count) - 1)
    for needs in [1 << k for k in range(count)] + [0]:
        for k, gradient in enumerate(backward(*saved, needs)):
            if needs >> k & 1:
                torch.testing.assert_close(gradient, everything[k], rtol=1e-5, atol=1e-6, msg=judge.gradients[k])
            else:
                assert gradient.shape == (0,)


# ---- what would be compiled ------------------------------------------------------------------------------------------

compiled_here = pytest.mark.skipif(
    not isinstance(forward._forward_kernel, triton.JITFunction),
    reason="kernels are interpreted in this process (TRITON_INTERPRET=1)",
)


def launches(run: Callable[[], Any]) -> list[SimpleNamespace]:
    """Return all that a function would start, on tensors of no memory."""
    found: list[SimpleNamespace] = []

    def watch(kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
        name = call.kernel_name(kernel, arguments)
        found.append(SimpleNamespace(kernel=kernel, programs=programs, arguments=arguments, name=name))

    with call.watched(watch):
        run()
    for launch in found:
        # what Triton itself insists on, and its interpreter does not
        assert set(launch.arguments) - {"num_warps", "num_stages"} == set(launch.kernel.arg_names), launch.name
    return found


def once_each(found: Sequence[SimpleNamespace]) -> list[SimpleNamespace]:
    """Return one launch of every kernel."""
    return list({launch.name: launch for launch in found}.values())


def hold_compiled(found: Sequence[SimpleNamespace], target: str, spills: int, wanted: set[str]) -> None:
    """Compile one launch of every kernel for a target; the ``wanted`` are among them and few registers may spill."""
    assert wanted <= {launch.name for launch in found}
    for launch in once_each(found):
        made = static.compiled_for(target, launch)
        assert made.num_warps in (1, 2, 4, 8, 16) and 0 < made.n_regs <= 512
        assert made.shared <= 64 << 10, made
        assert made.n_spills <= spills, made


class _NoDevice:
    """What Triton asks a driver for before it launches; the device has no memory and no name that a real one has."""

    def get_current_device(self) -> str:
        return "none"

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        return static.target_of("sm_90")


def hold_bound(found: Sequence[SimpleNamespace]) -> None:
    """Assert that Triton's own launcher takes the arguments of launches, up to where it needs a device.

    It must find the types and constants that :mod:`fastcaps.triton_kernels.static` tells the compiler.
    """
    driver = triton.runtime.driver
    before, driver._active = driver._active, _NoDevice()  # reset_active() would look for a device
    try:
        for launch in once_each(found):
            made = launch.kernel.warmup(grid=(launch.programs,), **launch.arguments)
            told = static.source_of(launch)
            assert made.src.signature == told.signature, launch.name
            assert made.src.constants == told.constants, launch.name
            assert {k: hint for k, hint in made.src.attrs.items() if hint} == told.attrs, launch.name
    finally:
        driver._active = before


def sizes_allocated(run: Callable[[], Any]) -> list[int]:
    """Return how many numbers every tensor has that a function makes, on the meta device."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                sizes.append(result.numel())
            return result

    sizes: list[int] = []
    with Watch():
        launches(run)
    return sizes
