"""squash_sum: the formula as loops, the reference against it, every kernel against the reference, torch's tools."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cuda_target
import pytest
import torch
from cuda_on_cpu import build
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fastcaps import backend, backends, ops, reference
from fastcaps.backends import BackendError
from fastcaps.ops.squash_sum import call_of, refusal

module = sys.modules["fastcaps.ops.squash_sum"]  # the package has the function by that name

SHAPES = [(2, 3, 4, 5, 7), (1, 1, 1, 1, 1), (3, 2, 5, 4, 4), (0, 2, 3, 4, 4), (2, 1, 17, 3, 11), (1, 5, 2, 1, 33)]
SUMMANDS = ["x", "x a", "x y", "x a y", "x y b", "x a y b"]
KERNELS = ["cpu", "cuda", *(["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else [])]
"""Of CUDA the sources, run on the CPU: every access to memory is watched, and behind a tensor there is none."""


def draw(
    shape: tuple[int, ...], summands: str, dtype: torch.dtype = torch.float64, scale: float = 1.0
) -> dict[str, Any]:
    """Return arguments with zero capsules among them, and numbers of 0, which a ReLU meets at its edge."""
    batch, types, dim, height, width = shape
    given: dict[str, Any] = {"a": None, "y": None, "b": None}
    for name in summands.split():
        channels = types * dim if name in "xy" else types
        value = torch.randn(batch, channels, height, width, dtype=torch.float64)
        if name in "xy":
            value *= scale * torch.rand(batch, 1, height, width, dtype=torch.float64).mul(4).round() / 2
        given[name] = value.to(dtype)
    return {**given, "types": types}


def needing(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach().clone().requires_grad_() if isinstance(value, Tensor) else value
            for name, value in given.items()}  # fmt: skip


def by_loops(x: Tensor, a: Any, y: Any, b: Any, types: int, relu: bool) -> Tensor:
    """Capsule by capsule, number by number."""
    out = torch.zeros_like(x)
    dim = x.shape[1] // types
    for capsules, coefficient in ((x, a), (y, b)):
        if capsules is None:
            continue
        for n, t, row, column in itertools.product(range(len(x)), range(types), *map(range, x.shape[2:])):
            pose = capsules[n, t * dim : t * dim + dim, row, column].tolist()
            pose = [max(0.0, number) if relu else number for number in pose]
            size = math.sqrt(sum(number**2 for number in pose))
            times = 1.0 if coefficient is None else coefficient[n, t, row, column].item()
            for k, number in enumerate(pose):
                out[n, t * dim + k, row, column] += times * number * size / (1 + size**2)
    return out


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("summands", SUMMANDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_is_the_formula(shape: tuple[int, ...], summands: str, relu: bool) -> None:
    given = draw(shape, summands)
    torch.testing.assert_close(reference.squash_sum(**given, relu=relu), by_loops(**given, relu=relu))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("summands", ["x", "x a y b"])
def test_gradients_of_the_reference(summands: str, relu: bool) -> None:
    given = draw((1, 2, 3, 2, 2), summands)
    names = summands.split()
    leaves = [(given[name] + 0.01).requires_grad_() for name in names]  # off the ReLU's edge

    def run(*tensors: Tensor) -> Tensor:
        return reference.squash_sum(**{**given, **dict(zip(names, tensors, strict=True))}, relu=relu)

    assert torch.autograd.gradcheck(run, leaves)


@contextmanager
def on(name: str) -> Iterator[None]:
    """Have a backend run all calls."""
    if name != "cuda":
        with backend(name):
            yield
        return
    cuda_target.library()
    with pytest.MonkeyPatch.context() as patch, build.guarded(build.KERNELS):
        for op in ("squash_sum", "squash_sum_backward"):
            patch.setitem(module.native, (op, "cuda"), getattr(torch.ops.fastcaps_cuda_on_cpu, op).default)
        patch.setattr(module, "choose", lambda x: "cuda")
        yield


def run_both(given: dict[str, Any], relu: bool, run: Any, grad: Tensor | None = None) -> list[list[Tensor]]:
    """Return the result and all gradients where ``run`` has a backend run it, and by the reference in float64."""
    found = []
    for kernel in (run, backend("reference")):
        leaves = needing(given)
        if kernel is not run:
            leaves = {key: value.detach().double().requires_grad_() if isinstance(value, Tensor) else value
                      for key, value in given.items()}  # fmt: skip
        with kernel:
            out = ops.squash_sum(**leaves, relu=relu)
            cotangent = torch.ones_like(out) if grad is None else grad.to(out.dtype)
            out.backward(cotangent)
        tensors = [leaves[key] for key in ("x", "a", "y", "b") if leaves[key] is not None]
        found.append([out.detach(), *(tensor.grad for tensor in tensors)])
    return found


def takes(name: str, dtype: torch.dtype) -> bool:
    """Whether a kernel takes numbers of this type."""
    if name == "cuda":
        return dtype in backends._GPU_DTYPES
    return refusal(name, call_of(torch.empty(1, dtype=dtype))) is None


def widest(name: str) -> torch.dtype:
    """The widest dtype that a kernel takes."""
    return torch.float64 if name in ("cpu", "reference") else torch.float32


def needs_kernel(name: str) -> None:
    problem = refusal(name, call_of(torch.empty(1))) if name != "cuda" else None
    if problem:
        pytest.skip(problem)


def expect_close(found: list[Tensor], wanted: list[Tensor], dtype: torch.dtype, dim: int) -> None:
    """As near as sums of ``dim`` numbers in that dtype (in float32 for half types) are to the truth."""
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape and got.dtype == dtype
        if want.numel():
            size = want.abs().amax(tuple(range(1, want.dim())), keepdim=True)
            allowed = (8 + dim) * torch.finfo(dtype).eps * size + torch.finfo(dtype).tiny
            assert ((got.double() - want).abs() <= allowed).all()


ROWS = list(itertools.product(SHAPES, SUMMANDS, [False, True]))


@pytest.mark.parametrize(
    "name, shape, summands, relu",
    [(name, *row) for name in KERNELS for row in (ROWS[::5] if name == "cuda" else ROWS)],
    ids=str,
)
def test_every_kernel_is_the_reference(name: str, shape: tuple[int, ...], summands: str, relu: bool) -> None:
    needs_kernel(name)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        if takes(name, dtype):
            given = draw(shape, summands, dtype)
            found, wanted = run_both(given, relu, on(name), torch.randn(given["x"].shape, dtype=dtype))
            expect_close(found, wanted, dtype, shape[2])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_every_kernel_on_a_gpu(name: str, shape: tuple[int, ...]) -> None:
    for dtype in backends._GPU_DTYPES:
        given = {key: value.cuda() if isinstance(value, Tensor) else value
                 for key, value in draw(shape, "x a y b", dtype).items()}  # fmt: skip
        problem = refusal(name, call_of(given["x"]))
        if problem:
            pytest.skip(problem)
        found, wanted = run_both(given, True, backend(name), torch.randn(given["x"].shape, dtype=dtype).cuda())
        expect_close(found, wanted, dtype, shape[2])


@pytest.mark.parametrize("scale", [1e-30, 1e-21, 1e-12, 1e12, 1e30])
@pytest.mark.parametrize("name", KERNELS)
def test_capsules_of_every_length(name: str, scale: float) -> None:
    needs_kernel(name)
    given = draw((2, 3, 4, 5, 7), "x a", torch.float32, scale)
    found, wanted = run_both(given, False, on(name))
    if scale < 1e-25:  # gradients that small may vanish
        found, wanted = [found[0]], [wanted[0]]
        assert found[0].abs().max() < 1e-29
    expect_close(found, wanted, torch.float32, 4)


@pytest.mark.parametrize("dim", [2, 5, 17])
@pytest.mark.parametrize("name", KERNELS)
def test_a_capsule_whose_length_overflows_keeps_its_direction(name: str, dim: int) -> None:
    needs_kernel(name)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        if takes(name, dtype):
            given = draw((2, 3, dim, 5, 7), "x a y", dtype)
            given["x"] = given["x"].clamp(-1, 1) * torch.finfo(dtype).max
            found, wanted = run_both(given, True, on(name))
            assert (wanted[0] - reference.squash_sum(given["y"].double(), None, None, None, 3, True)).abs().max() > 0.1
            expect_close(found, wanted, dtype, dim)


@pytest.mark.parametrize("name", ["reference", *KERNELS])
def test_nan_and_infinity_stay_where_they_are(name: str) -> None:
    needs_kernel(name)
    for dtype in (torch.float32, torch.bfloat16):
        for broken in (math.nan, math.inf):
            given = needing(draw((2, 3, 4, 5, 7), "x a y b", dtype))
            with torch.no_grad():
                given["x"][1, 5, 2, 3] = broken  # of type 1
            with on(name):
                for relu in (False, True):
                    found = ops.squash_sum(**given, relu=relu)
                    assert found[1, 4:8, 2, 3].isnan().any()
                    (dx,) = torch.autograd.grad(found.sum(), given["x"])
                    assert dx[1, 4:8, 2, 3].isnan().any()
                    for tensor in (found.detach().clone(), dx):
                        tensor[1, 4:8, 2, 3] = 0
                        assert tensor.isfinite().all()


@pytest.mark.parametrize("name", KERNELS)
def test_any_strides_and_a_gradient_of_stride_0(name: str) -> None:
    needs_kernel(name)
    given = draw((2, 3, 4, 5, 7), "x a y b", widest(name))
    wanted, _ = run_both(given, True, on(name))
    spread = {key: value.contiguous(memory_format=torch.channels_last) if isinstance(value, Tensor) else value
              for key, value in given.items()}  # fmt: skip
    spread["y"] = given["y"].flip(-1).contiguous().flip(-1)
    leaves = needing(spread)
    leaves["a"] = given["a"].expand(3, *given["a"].shape)[1].requires_grad_()
    with on(name):
        out = ops.squash_sum(**leaves, relu=True)
        assert out.is_contiguous()
        out.sum().backward()
    torch.testing.assert_close([out.detach(), *(leaves[key].grad for key in "xayb")], wanted)


@pytest.mark.parametrize("name", ["reference", *KERNELS])
def test_only_the_gradients_that_are_wanted(name: str) -> None:
    needs_kernel(name)
    given = draw((1, 2, 3, 4, 5), "x a y b", widest(name))
    with on(name):
        every = needing(given)
        ops.squash_sum(**every).sum().backward()
        for wanted in itertools.chain.from_iterable(itertools.combinations("xayb", k) for k in (1, 2, 3)):
            some = {key: value.clone().requires_grad_(key in wanted) if isinstance(value, Tensor) else value
                    for key, value in given.items()}  # fmt: skip
            ops.squash_sum(**some).sum().backward()
            for key in "xayb":
                assert (some[key].grad is None) == (key not in wanted)
                if key in wanted:
                    torch.testing.assert_close(some[key].grad, every[key].grad)


@pytest.mark.parametrize("name", ["reference", *KERNELS])
def test_one_tensor_in_two_places(name: str) -> None:
    needs_kernel(name)
    given = draw((2, 3, 2, 4, 5), "x a", widest(name))
    leaves = needing(given)
    with on(name):
        ops.squash_sum(leaves["x"], leaves["a"], leaves["x"], leaves["a"], types=3).sum().backward()
    twice = needing(given)
    (2 * reference.squash_sum(twice["x"], twice["a"], None, None, 3, False)).sum().backward()
    torch.testing.assert_close(leaves["x"].grad, twice["x"].grad)
    torch.testing.assert_close(leaves["a"].grad, twice["a"].grad)


def test_the_same_bits_for_any_number_of_threads() -> None:
    needs_kernel("cpu")
    given = draw((3, 7, 4, 9, 11), "x a y b", torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(run_both(given, True, on("cpu"))[0])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


@pytest.mark.parametrize("level", ["default", "avx2", "avx512"])
def test_every_instruction_set(level: str) -> None:
    needs_kernel("cpu")
    code = """if True:
        import torch
        from fastcaps import backend, backends, ops, reference
        print(backends.native_capability())
        torch.manual_seed(0)
        x, y = torch.randn(2, 15, 5, 7, requires_grad=True), torch.randn(2, 15, 5, 7)
        a, b = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5, 7)
        with backend("cpu"):
            found = ops.squash_sum(x, a, y, b, types=3, relu=True)
            (dx,) = torch.autograd.grad(found.square().sum(), x)
        wanted = reference.squash_sum(x, a, y, b, 3, True)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(dx, torch.autograd.grad(wanted.square().sum(), x)[0])
    """
    variables = {**os.environ, "FASTCAPS_CPU_CAPABILITY": level, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    if "is not a level that this processor has" in done.stderr:
        pytest.skip("this processor has no " + level)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == level


@pytest.mark.parametrize("summands", ["x", "x a", "x a y b"])
def test_opcheck(summands: str) -> None:
    given = needing(draw((2, 3, 4, 5, 2), summands))
    arguments = [given[key] for key in ("x", "a", "y", "b")]
    torch.library.opcheck(torch.ops.fastcaps.squash_sum.default, (*arguments, 3, True))
    plain = [value if value is None else value.detach() for value in arguments]
    needs = sum(1 << k for k, value in enumerate(plain) if value is not None)
    torch.library.opcheck(
        torch.ops.fastcaps.squash_sum_backward.default, (torch.ones_like(plain[0]), *plain, 3, True, needs)
    )


def test_compile_with_free_sizes() -> None:
    compiled = torch.compile(lambda x, a: ops.squash_sum(x, a, types=3, relu=True) * 2, fullgraph=True,
                             backend="aot_eager", dynamic=True)  # fmt: skip
    for shape in ((2, 3, 4, 5, 7), (3, 3, 2, 4, 6)):
        one, other = (needing(draw(shape, "x a")) for _ in range(2))
        other = {**other, "x": one["x"].detach().clone().requires_grad_(), "a": one["a"].detach().clone()}
        compiled(one["x"], one["a"]).sum().backward()
        (2 * ops.squash_sum(other["x"], other["a"], types=3, relu=True)).sum().backward()
        torch.testing.assert_close(one["x"].grad, other["x"].grad)


def test_second_derivatives_and_transforms() -> None:
    given = draw((1, 2, 2, 2, 2), "x a y b")
    leaves = [(given[key] + 0.01).requires_grad_() for key in "xayb"]

    def run(*tensors: Tensor) -> Tensor:
        return ops.squash_sum(*tensors, types=2)

    assert torch.autograd.gradgradcheck(run, leaves)
    x = leaves[0].detach()
    wanted = torch.stack([ops.squash_sum(row, types=2) for row in x.expand(3, *x.shape)])
    found = torch.func.vmap(lambda row: ops.squash_sum(row, types=2))(x.expand(3, *x.shape))
    torch.testing.assert_close(found, wanted)
    _, tangent = torch.func.jvp(lambda row: ops.squash_sum(row, types=2), (x,), (torch.ones_like(x),))
    step = 1e-6
    ahead, behind = (ops.squash_sum(x + sign * step, types=2) for sign in (1, -1))
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-8)


def test_dtypes_that_differ_and_float16() -> None:
    given = draw((2, 3, 4, 5, 2), "x a", torch.bfloat16)
    wide = {**given, "a": given["a"].float()}
    assert ops.squash_sum(**wide).dtype == torch.float32
    half = draw((2, 3, 4, 5, 2), "x a", torch.float16)
    wanted = ops.squash_sum(half["x"].double(), half["a"].double(), types=3)
    torch.testing.assert_close(ops.squash_sum(**half).double(), wanted, rtol=1e-3, atol=1e-3)


def test_a_forced_backend_never_falls_back() -> None:
    x = torch.randn(1, 4, 2, 2)
    with backend("cuda"), pytest.raises(BackendError, match=r"'cuda' is forced.*(not built|CPU)"):
        ops.squash_sum(x, types=2)
    if not refusal("cpu", call_of(x)):
        with backend("cpu"), pytest.raises(BackendError, match="float16"):
            ops.squash_sum(x.half(), types=2)
    assert backends.forced() is None


def test_flops() -> None:
    given = needing(draw((2, 3, 4, 5, 7), "x a y b"))
    with FlopCounterMode(display=False) as counter:
        ops.squash_sum(**given).sum().backward()
    numbers = given["x"].numel()
    assert counter.get_total_flops() == numbers * 9 + numbers * 18


@pytest.mark.parametrize(
    "error, named, change",
    [
        (TypeError, "x must be a tensor, got NoneType", {"x": None}),
        (TypeError, "x must have a floating-point dtype", {"x": torch.ones(2, 6, 3, 3).long()}),
        (ValueError, r"x must be \[B, types \* dim, H, W\], got \[2, 6\]", {"x": torch.ones(2, 6)}),
        (ValueError, "types must be an int >= 1, got 0", {"types": 0}),
        (TypeError, "types must be an int >= 1, got 2.0", {"types": 2.0}),
        (ValueError, r"x must have a multiple of 4 channels.*got \[2, 6, 3, 3\]", {"types": 4}),
        (ValueError, "x must have a multiple of 7 channels", {"types": 7}),
        (ValueError, r"a must have \[B, types, H, W\], \[2, 3, 3, 3\], got \[2, 3, 3, 1\]",
         {"a": torch.ones(2, 3, 3, 1)}),
        (TypeError, "a must be a tensor or None, got float", {"a": 1.0}),
        (ValueError, r"y must have the shape of x, \[2, 6, 3, 3\], got \[1, 6, 3, 3\]", {"y": torch.ones(1, 6, 3, 3)}),
        (ValueError, "b must be None without y", {"y": None}),
        (ValueError, "b must have.*got", {"b": torch.ones(2, 6, 3, 3)}),
        (TypeError, "b must have a floating-point dtype, got torch.bool", {"b": torch.ones(2, 3, 3, 3).bool()}),
        (ValueError, "y must be on the device of x, cpu, got meta", {"y": torch.ones(2, 6, 3, 3, device="meta")}),
    ],
)  # fmt: skip
def test_errors_name_the_argument(error: type[Exception], named: str, change: dict[str, Any]) -> None:
    numbers = torch.ones(2, 3, 3, 3)
    given = {"x": torch.ones(2, 6, 3, 3), "a": numbers, "y": torch.ones(2, 6, 3, 3), "b": numbers, "types": 3}
    with pytest.raises(error, match=named):
        ops.squash_sum(**{**given, **change})
    if isinstance({**given, **change}["x"], Tensor) and error is ValueError:  # the kernel checks for itself
        raw = {**given, **change}
        with pytest.raises((ValueError, RuntimeError)):
            torch.ops.fastcaps.squash_sum(*(raw[key] for key in ("x", "a", "y", "b", "types")), False)


@pytest.mark.parametrize("name", [name for name in ("cpu", "cuda") if name in KERNELS])
def test_native_ops_check_for_themselves(name: str) -> None:
    """What they would read beyond the end of, or as other numbers: Python has checked none of it here."""
    needs_kernel(name)
    if name == "cuda":
        cuda_target.library()
    ops_of = getattr(torch.ops, {"cpu": "fastcaps_cpu", "cuda": "fastcaps_cuda_on_cpu"}[name])
    x, numbers = torch.ones(2, 6, 3, 3), torch.ones(2, 3, 3, 3)
    right = {"x": x, "a": numbers, "y": x, "b": numbers, "types": 3, "relu": False}
    for argument in ("a", "y", "b", "grad"):
        whole = numbers if argument in "ab" else x
        for wrong in (whole[:1], whole[..., :-1], whole.bfloat16()):
            with pytest.raises(RuntimeError, match=rf"\b{argument} has "):
                if argument == "grad":
                    ops_of.squash_sum_backward(wrong, *right.values(), 15)
                else:
                    ops_of.squash_sum(*{**right, argument: wrong}.values())


@pytest.mark.skipif("triton" not in KERNELS, reason="kernels are interpreted in another process")
@pytest.mark.parametrize("shape", [(1, 1, 1, 5, 7), (2, 2, 3, 1, 3)], ids=str)
def test_triton_writes_nothing_beyond_the_end(shape: tuple[int, ...]) -> None:
    from fastcaps.triton_kernels import squash_sum as kernels

    given = draw(shape, "x a", torch.float32)
    programs, sizes = kernels._tiles(given["x"], given["types"])
    arguments = {**{name: given[name] for name in "xayb"}, **sizes, "RELU": False}
    room = {name: torch.full((given[name[-1]].numel() + 64,), 7.0) for name in ("x", "dx", "da")}
    kernels.launch(kernels._squash_sum_kernel, programs, **arguments, out=room["x"])
    kernels.launch(
        kernels._squash_sum_backward_kernel,
        programs,
        **arguments,
        grad=torch.ones_like(given["x"]),
        dx=room["dx"],
        da=room["da"],
        dy=None,
        db=None,
    )
    for name, written in room.items():
        assert (written[-64:] == 7).all() and (written[:-64] != 7).all(), name


def test_the_triton_kernels_in_its_interpreter() -> None:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("this is that process")
    variables = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-k", "triton", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(done.stdout.rsplit(" passed", 1)[0].split()[-1]) >= 40
