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

from fastcaps import ops, reference

triton = pytest.importorskip("triton", reason="triton is not installed (pip install 'fastcaps[triton]')")

from fastcaps.triton_kernels import call, forward, schedule, static  # noqa: E402

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


def _run(stem: str, function: str, *arguments: Any) -> Any:
    """Call a function of the Triton kernels with the options, in the interpreter where there is no GPU."""
    bits = options.get("deterministic", False) + 2 * options.get("allow_tf32", False)
    limits = {"limits": options["limits"]} if "limits" in options else {}
    device = next(one.device.type for one in arguments if isinstance(one, torch.Tensor))
    if device == "cpu":
        return interpret(f"fastcaps.triton_kernels.{stem}.{function}", *arguments, bits, **limits)
    limits = {name: schedule.Limits(**given) for name, given in limits.items()}
    return getattr(importlib.import_module(f"fastcaps.triton_kernels.{stem}"), function)(*arguments, bits, **limits)


def _reordered(needs: int, order: Sequence[int]) -> int:
    """Return the bits of gradients in another order; higher bits stay."""
    high = needs >> 16 << 16
    return high | sum(1 << k for k, place in enumerate(order) if needs >> place & 1)


def _restored(found: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    """Return gradients in the order of the pass."""
    return tuple(found[order.index(k)] for k in range(len(order)))


def _attention(children, weight, query, bias, gate, norm_weight, norm_bias, scale, eps, normalize, window):
    votes = (children, weight, bias, gate, weight.shape[1], window)
    given = (query, norm_weight, norm_bias, scale, eps, 0 if normalize else 1, 1)
    parents, sums = _run("attention", "attention_routing", *votes, *given)
    return parents, sums[0] if normalize else sums.new_empty(0)


def _attention_backward(grad, grad_sums, children, weight, query, bias, gate, norm_weight, sums, *rest):
    assert grad_sums is None
    scale, eps, normalize, window, needs = rest
    votes, order = (children, weight, bias, gate, weight.shape[1], window), (0, 1, 3, 4, 2, 5, 6)
    given = (*_stacked(query), norm_weight, sums.unsqueeze(0) if normalize else None, scale, eps)
    found = _run("attention", "attention_routing_backward", grad[None], *votes, *given, _reordered(needs, order))
    return _restored(found, order)


def _pooling(children, weight, query, bias, gate, scale, normalize, window):
    many = reference.pooling.parents_of(weight, query, bias)
    votes = (children, weight, bias, gate, many, window)
    parents, _, logsumexp = _run("pooling", "pooling_routing", *votes, query, scale, normalize, 3, 1)
    return parents, logsumexp[0]


def _pooling_backward(grad, grad_logsumexp, children, weight, query, bias, gate, parents, logsumexp, *rest):
    assert grad_logsumexp is None
    scale, normalize, window, needs = rest
    many, order = reference.pooling.parents_of(weight, query, bias), (0, 1, 3, 4, 2)
    given = (*_stacked(query, parents, logsumexp), scale, normalize, _reordered(needs, order))
    votes = (children, weight, bias, gate, many, window)
    return _restored(_run("pooling", "pooling_routing_backward", grad[None], *votes, *given), order)


def _gaussian(children, weight, mean, variance, log_weight, bias, gate, beta_use, beta_ignore, eps, window):
    votes, state = (children, weight, bias, gate, weight.shape[1], window), (mean, variance, log_weight)
    rule = 5 if mean is None or variance is not None else 6
    found = _run("gaussian", "gaussian_routing", *votes, *state, beta_use, beta_ignore, [1.0], rule, eps)
    scores, means, variances, all_counts, all_means, all_variances, all_scores = found
    for one, other in ((scores, all_scores), (means, all_means), (variances, all_variances + eps)):
        assert torch.equal(one, other[0])
    return all_counts[0], means, all_variances[0], scores if beta_use is not None else scores.new_empty(0)


def _gaussian_backward(*arguments):
    grads, inputs, saved, (eps, window, needs) = arguments[:4], arguments[4:13], arguments[13:16], arguments[16:]
    children, weight, mean, variance, log_weight, bias, gate, *betas = inputs
    votes, order = (children, weight, bias, gate, weight.shape[1], window), (0, 1, 5, 6, 2, 3, 4, 7, 8)
    given = (*_stacked(mean, variance, log_weight), *betas, *_stacked(*saved), eps, _reordered(needs, order))
    return _restored(_run("gaussian", "gaussian_routing_backward", *_stacked(*grads), *votes, *given), order)


def _stacked(*tensors: Any) -> list[Any]:
    """Return tensors with a turn in front."""
    return [None if tensor is None else tensor.unsqueeze(0) for tensor in tensors]


_KERNELS = {
    "attention": (_attention, _attention_backward),
    "pooling": (_pooling, _pooling_backward),
    "gaussian": (_gaussian, _gaussian_backward),
}


def implemented(one: ops.Pass) -> tuple[Any, Any]:
    """Return a routing's kernels, of one turn, as the ops of a pass, with a fake and an autograd formula."""
    one.define(_LIBRARY)
    taken, backward = one.arguments - one.freezes, one.name + "_backward"
    run, run_backward = _KERNELS[one.stem]
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(one.name, lambda *arguments: run(*arguments[:taken]), key)
        _LIBRARY.impl(backward, run_backward, key)
    namespace = torch.ops.fastcaps_triton_test
    return getattr(namespace, one.name).default, getattr(namespace, backward).default


facts = schedule.Facts


def grads_of(case: Any, dtype: torch.dtype = torch.float32, seed: int = 1) -> list[torch.Tensor | None]:
    """Return gradients for the results of a case; what is history has none."""
    grads = case.grads(dtype, seed)
    return grads if len(grads) > 2 else [grads[0], None]


def there(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return tensors on the device."""
    return [None if tensor is None else tensor.to(DEVICE) for tensor in tensors]


def hold_same_bits(judge: Judge, run: Any, case: Any) -> None:
    """Assert that the deterministic mode gives the same bits twice, and about what the other mode gives."""
    call_of = (there(case.tensors(torch.float32)), case.settings(), there(grads_of(case)))
    options.update(deterministic=True)
    first, again = (judge.results(run, *call_of) for _ in range(2))
    options.clear()
    fast = judge.results(run, *call_of)
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
        torch.testing.assert_close(value, fast[name], rtol=1e-4, atol=1e-5, msg=name)


def hold_only_what_is_asked(judge: Judge, run: Any, backward: Any, case: Any) -> None:
    """Assert that the backward makes the gradients of its ``needs``, alone as well as together, and no others."""
    one, tensors, grads = judge.one, there(case.tensors(torch.float32)), there(grads_of(case))
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
