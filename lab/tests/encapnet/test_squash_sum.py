"""squash_sum: every kernel against the reference (the formula is in test_nn_cap_conv), torch's tools, errors."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import cuda_target
import pytest
import torch
from cuda_on_cpu import build
from features import squash_sum_step as run
from suite import python
from torch import Tensor

from fastcaps import backend, backends, libraries
from fastcaps._testing.judge import Bar
from fastcaps.backends import refusal
from fastcaps_lab.encapnet import op, reference, squash_sum
from fastcaps_lab.encapnet.op import call_of

ROWS = [  # batch, types, numbers of a capsule, height, width; summands; ReLU
    ((2, 3, 4, 5, 7), "xayb", True),
    ((3, 2, 5, 4, 4), "xyb", False),
    ((2, 1, 17, 3, 11), "xay", False),
    ((1, 5, 2, 1, 33), "x", True),
    ((1, 1, 1, 1, 1), "xy", False),
    ((0, 2, 3, 4, 4), "xa", True),
]
KERNELS = ["cpu", "cuda", *(["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else [])]
"""Of CUDA the sources, run on the CPU: every access to memory is watched, and behind a tensor there is none."""
every_row = pytest.mark.parametrize("shape, summands, relu", ROWS, ids=str)
every_kernel = pytest.mark.parametrize("name", KERNELS)


def draw(
    shape: tuple[int, ...], summands: str, dtype: torch.dtype = torch.float64, scale: float = 1.0
) -> dict[str, Any]:
    """Return arguments with zero capsules among them, and values of 0, at the edge of a ReLU."""
    batch, types, dim, height, width = shape
    given: dict[str, Any] = {"a": None, "y": None, "b": None}
    for name in summands:
        channels = types * dim if name in "xy" else types
        value = torch.randn(batch, channels, height, width, dtype=torch.float64)
        if name in "xy":
            value *= scale * torch.rand(batch, 1, height, width, dtype=torch.float64).mul(4).round() / 2
        given[name] = value.to(dtype)
    return {**given, "types": types}


def test_derivatives_and_transforms() -> None:
    given = draw((1, 2, 2, 2, 2), "xayb")
    leaves = [(given[key] + 0.01).requires_grad_() for key in "xayb"]  # off the ReLU's edge
    for relu in (False, True):
        assert torch.autograd.gradcheck(lambda *tensors, relu=relu: reference.squash_sum(*tensors, 2, relu), leaves)
    assert torch.autograd.gradgradcheck(lambda *tensors: squash_sum(*tensors, types=2), leaves)
    plain, x = partial(squash_sum, types=2), leaves[0].detach()
    rows = torch.stack([x, 2 * x])
    torch.testing.assert_close(torch.func.vmap(plain)(rows), torch.stack([plain(row) for row in rows]))
    _, tangent = torch.func.jvp(plain, (x,), (torch.ones_like(x),))
    ahead, behind = (plain(x + step) for step in (1e-6, -1e-6))
    torch.testing.assert_close(tangent, (ahead - behind) / 2e-6, rtol=1e-6, atol=1e-8)


@contextmanager
def on(name: str) -> Iterator[None]:
    """Have a backend run all calls; skip the test where it is not there."""
    if name != "cuda":
        if problem := refusal(name, call_of(torch.empty(1))):
            pytest.skip(problem)
        with backend(name):
            yield
        return
    cuda_target.library(build.KERNELS)
    with pytest.MonkeyPatch.context() as patch, build.guarded(build.KERNELS):
        patch.setattr(op, "_kernel", lambda each, x: getattr(torch.ops.fastcaps_cuda_on_cpu, each).default)
        yield


def takes(name: str, dtype: torch.dtype) -> bool:
    """Whether a kernel takes numbers of this type."""
    if name == "cuda":
        return dtype in backends._GPU_DTYPES
    return refusal(name, call_of(torch.empty(1, dtype=dtype))) is None


def widest(name: str) -> torch.dtype:
    return torch.float64 if name in ("cpu", "reference") else torch.float32


def held(given: dict[str, Any], relu: bool, context: Any, but: Sequence[str] = ()) -> dict[str, Tensor]:
    """Hold what a backend makes of a call, but for some results, to the rule of all kernels; return all."""
    names = "".join(name for name in "xayb" if given[name] is not None)
    tensors = [*(given[name] for name in names), torch.randn(given["x"].shape).to(given["x"])]
    options = {"types": given["types"], "relu": relu}
    with context:
        found = run(squash_sum, names, options, tensors)
    kept = [each for each in found if each not in but]
    exact = lambda tensors: {n: t for n, t in run(reference.squash_sum, names, options, tensors).items() if n in kept}  # noqa: E731
    Bar(exact, tensors).hold({name: found[name] for name in kept})
    return found


@every_row
@every_kernel
def test_every_kernel_is_the_reference(name: str, shape: tuple[int, ...], summands: str, relu: bool) -> None:
    for dtype in filter(partial(takes, name), (torch.float64, torch.float32, torch.bfloat16, torch.float16)):
        held(draw(shape, summands, dtype), relu, on(name))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@every_row
@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_every_kernel_on_a_gpu(name: str, shape: tuple[int, ...], summands: str, relu: bool) -> None:
    for dtype in backends._GPU_DTYPES:
        with torch.device("cuda"):
            given = draw(shape, summands, dtype)
        if problem := refusal(name, call_of(given["x"])):
            pytest.skip(problem)
        held(given, relu, backend(name))


@every_kernel
def test_capsules_of_every_length(name: str) -> None:
    """Gradients of the shortest may vanish; a capsule whose length overflows keeps its direction."""
    for scale in (1e-30, 1e-12, 1e30):
        small = scale < 1e-25
        found = held(draw((2, 3, 4, 5, 7), "xa", torch.float32, scale), False, on(name), ("dx", "da") if small else ())
        assert not small or found["result"].abs().max() < 1e-29
    for dtype in filter(partial(takes, name), (torch.float64, torch.float32, torch.bfloat16)):
        given = draw((2, 3, 17, 5, 7), "xay", dtype)
        given["x"] = given["x"].clamp(-1, 1) * torch.finfo(dtype).max
        found = held(given, True, on(name), but=("dx",))
        assert found["dx"].abs().max() < 1e-30  # of the smallest numbers that there are, or 0
        assert (found["result"] - reference.squash_sum(given["y"], None, None, None, 3, True)).abs().max() > 0.1


@pytest.mark.parametrize("name", ["reference", *KERNELS])
def test_only_the_gradients_that_are_wanted_of_any_strides(name: str) -> None:
    given = draw((2, 3, 4, 5, 7), "xayb", widest(name))
    plain = [given[key] for key in "xayb"]
    spread = [tensor.contiguous(memory_format=torch.channels_last) for tensor in plain]
    spread[1] = plain[1].expand(3, *plain[1].shape)[1]
    spread[2] = plain[2].flip(-1).contiguous().flip(-1)
    grad = torch.ones((), dtype=widest(name)).expand(plain[0].shape)
    with on(name):
        every = run(squash_sum, "xayb", {"types": 3}, [*plain, grad])
        for wanted in ("xayb", "x", "b", "ay"):
            leaves = {key: x.detach().requires_grad_(key in wanted) for key, x in zip("xayb", spread, strict=True)}
            result = squash_sum(**leaves, types=3)
            result.backward(grad)
            assert result.is_contiguous()
            found = {f"d{key}": leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}
            assert [*found] == [f"d{key}" for key in wanted]
            torch.testing.assert_close({"result": result.detach(), **found}, {n: every[n] for n in ("result", *found)})


@pytest.mark.parametrize("name", ["reference", *KERNELS])
def test_nan_and_infinity_stay_where_they_are(name: str) -> None:
    for dtype, broken in itertools.product((torch.float32, torch.bfloat16), (math.nan, math.inf)):
        given = draw((2, 3, 4, 5, 7), "xayb", dtype)
        given["x"][1, 5, 2, 3] = broken  # of type 1
        with on(name):
            found = squash_sum(**{**given, "x": given["x"].requires_grad_()}, relu=broken is math.nan)
            (dx,) = torch.autograd.grad(found.sum(), given["x"])
        for tensor in (found.detach().clone(), dx):
            assert tensor[1, 4:8, 2, 3].isnan().any()
            tensor[1, 4:8, 2, 3] = 0
            assert tensor.isfinite().all()


def test_the_same_bits_for_any_number_of_threads(threads_kept: None) -> None:
    given = draw((3, 7, 4, 9, 11), "xayb", torch.float32)
    tensors = [*(given[key] for key in "xayb"), torch.randn_like(given["x"])]
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        with on("cpu"):
            found.append(run(squash_sum, "xayb", {"types": 7, "relu": True}, tensors))
    for other in found[1:]:
        assert all(torch.equal(found[0][key], other[key]) for key in other)


@pytest.mark.skipif("triton" in KERNELS, reason="this is that process")
def test_the_triton_kernels_in_its_interpreter() -> None:
    if problem := libraries.triton_kernels("squash_sum")[1]:
        pytest.skip(problem)
    command = ("-m", "pytest", __file__, "-q", "-k", "triton", "-p", "no:cacheprovider")
    done = python(*command, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0 and f"{len(ROWS) + 5} passed" in done.stdout, done.stdout[-3000:]


# ---- what PyTorch asks for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("summands", ["xa", "xayb"])
def test_opcheck(summands: str) -> None:
    given = draw((2, 3, 4, 5, 2), summands)
    plain = [given[key] for key in "xayb"]
    leaves = [value if value is None else value.clone().requires_grad_() for value in plain]
    torch.library.opcheck(torch.ops.fastcaps.squash_sum.default, (*leaves, 3, True))
    needs = sum(1 << k for k, value in enumerate(plain) if value is not None)
    backward = torch.ops.fastcaps.squash_sum_backward.default
    torch.library.opcheck(backward, (torch.ones_like(given["x"]), *plain, 3, True, needs))


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, named, change",
    [
        (TypeError, "x must be a tensor, got NoneType", {"x": None}),
        (ValueError, r"x must be \[B, types \* dim, H, W\], got \[2, 6\]", {"x": torch.ones(2, 6)}),
        (ValueError, r"x must have a multiple of 4 channels.*got \[2, 6, 3, 3\]", {"types": 4}),
        (ValueError, r"a must have \[B, types, H, W\], \[2, 3, 3, 3\], got \[2, 3, 3, 1\]",
         {"a": torch.ones(2, 3, 3, 1)}),
        (ValueError, r"y must have the shape of x, \[2, 6, 3, 3\], got \[1, 6, 3, 3\]", {"y": torch.ones(1, 6, 3, 3)}),
        (ValueError, "b, the coefficient of y, must be None without y", {"y": None}),
        (ValueError, "y must be on the device of x, cpu, got meta", {"y": torch.ones(2, 6, 3, 3, device="meta")}),
    ],
)  # fmt: skip
def test_errors_name_the_argument(error: type[Exception], named: str, change: dict[str, Any]) -> None:
    x, numbers = torch.ones(2, 6, 3, 3), torch.ones(2, 3, 3, 3)
    given = {"x": x, "a": numbers, "y": x, "b": numbers, "types": 3, **change}
    with pytest.raises(error, match=named):
        squash_sum(**given)
    if error is ValueError:  # the op checks for itself
        with pytest.raises((ValueError, RuntimeError)):
            torch.ops.fastcaps.squash_sum(*given.values(), False)


# ---- Triton ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif("triton" not in KERNELS, reason="kernels are interpreted in another process")
@pytest.mark.parametrize("shape", [(1, 1, 1, 5, 7), (2, 2, 3, 1, 3)], ids=str)
def test_triton_writes_nothing_beyond_the_end(shape: tuple[int, ...]) -> None:
    from fastcaps.triton_kernels import squash_sum as kernels

    given = draw(shape, "xa", torch.float32)
    programs, sizes = kernels._tiles(given["x"], given["types"])
    arguments = {**{name: given[name] for name in "xayb"}, **sizes, "RELU": False}
    room = {name: torch.full((given[name[-1]].numel() + 64,), 7.0) for name in ("x", "dx", "da")}
    kernels.launch(kernels._squash_sum_kernel, programs, **arguments, out=room["x"])
    written = {"grad": torch.ones_like(given["x"]), "dx": room["dx"], "da": room["da"], "dy": None, "db": None}
    kernels.launch(kernels._squash_sum_backward_kernel, programs, **arguments, **written)
    for name, found in room.items():
        assert (found[-64:] == 7).all() and (found[:-64] != 7).all(), name
