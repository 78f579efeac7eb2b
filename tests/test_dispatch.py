"""The choice of a backend for a call on a GPU, on machines without one: devices and backends are made up.

Which backend a call gets, and why not the others, is asked of a made-up device. That the chosen one is then called,
with the right settings, and that the Python kernel in between stands autograd, ``torch.compile`` and ``torch.export``,
is tried on the CPU, whose compiled kernel it replaces for the length of a test.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_cases import BY_NAME, Case
from dispatch_fakes import GPU, FakeLibrary, triton_refusal
from dispatch_fakes import gpu as gpu  # a fixture
from dispatch_fakes import serve as serve  # a fixture
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fastcaps
from fastcaps import Window, backends, dispatch, functional, libraries, ops, reference

POSE = (4, 4, 4)


needs_fake_gpu_tensors = pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="a torch with CUDA asks for a driver even for tensors that are made up",
)


@pytest.fixture
def settings_kept() -> Iterator[None]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "none"


def chosen(dtype: torch.dtype = torch.float32, pose: tuple[int, int, int] = POSE, parents: int = 32) -> str:
    return backends.choose(GPU, dtype, pose, parents)


def why_not(name: str, dtype: torch.dtype = torch.float32, pose: tuple[int, int, int] = POSE) -> str | None:
    return backends.refusal(name, GPU, dtype, pose, 32)


# ---- which, and why not the others -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "pose", "wanted"),
    [
        (torch.float32, POSE, "cuda"),
        (torch.bfloat16, POSE, "cuda"),
        (torch.float16, (1, 64, 64), "cuda"),
        (torch.float32, (30, 2, 30), "triton"),
        (torch.float32, (100, 2, 100), "reference"),
        (torch.float64, POSE, "reference"),
    ],
)
def test_the_first_backend_that_can_take_a_call_does(
    gpu: object, dtype: torch.dtype, pose: tuple[int, int, int], wanted: str
) -> None:
    assert chosen(dtype, pose) == wanted
    for name in backends.NAMES[: backends.NAMES.index(wanted)]:
        assert why_not(name, dtype, pose)
    assert why_not(wanted, dtype, pose) is None


def test_reasons_are_told(gpu: pytest.MonkeyPatch) -> None:
    assert why_not("cuda", torch.float64) == "it takes float32, bfloat16 and float16, got float64"
    assert why_not("triton", torch.float64) == "it takes float32, bfloat16 and float16, got float64"
    assert why_not("cuda", pose=(30, 2, 30)) == "it takes poses of up to 512 numbers"
    assert why_not("cpu") == "it runs on the CPU only, the tensors are on cuda:0"
    assert "runs on a GPU only" in str(backends.refusal("cuda", torch.device("cpu"), torch.float32))
    assert why_not("reference", torch.int32) == "it takes floating-point tensors, got torch.int32"
    listed = {entry.name: entry for entry in backends.listing()}
    assert all(entry.available for name, entry in listed.items() if name != "cpu")
    assert listed["cuda"].detail == "compiled kernels, CUDA 13.0.88, for compute capability 8.0, 9.0+PTX"


def test_a_device_older_than_the_code_is_refused(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert why_not("cuda") == "it is built for compute capability 8.0, 9.0+PTX, the device has 7.5"
    assert chosen() == "triton"


def test_a_driver_older_than_the_toolkit_is_refused(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12080, raising=False)
    assert why_not("cuda") == "it is built with CUDA 13.0.88, the driver serves CUDA 12 at most"
    assert chosen() == "triton"


@pytest.mark.parametrize("stage", ["no library", "no gpu", "cpu torch", "rocm", "does not load", "no triton"])
def test_what_stands_in_the_way_is_told(gpu: pytest.MonkeyPatch, tmp_path: Any, stage: str) -> None:
    cuda, triton, runs = None, None, "cuda"
    if stage == "no library":
        gpu.setattr(libraries, "library_path", lambda name: tmp_path / "none")
        gpu.setattr(libraries, "native_build_info", lambda: {"cuda_why_not": "no CUDA toolkit when it was built"})
        cuda, runs = "not built: no CUDA toolkit when it was built", "triton"
    elif stage == "no gpu":
        gpu.setattr(torch.cuda, "is_available", lambda: False)
        cuda, triton, runs = "torch sees no GPU", "torch sees no GPU", "reference"
    elif stage == "cpu torch":
        gpu.setattr(torch.version, "cuda", None)
        cuda = triton = f"torch {torch.__version__} is a CPU build"
        runs = "reference"
    elif stage == "rocm":
        gpu.setattr(torch.version, "hip", "7.0")
        cuda, runs = f"torch {torch.__version__} is a ROCm build", "triton"
    elif stage == "does not load":
        broken = FakeLibrary()
        broken.problem = "it does not load (wrong ELF class)"
        gpu.setattr(libraries, "library", lambda name: broken)
        cuda, runs = broken.problem, "triton"
    else:
        gpu.setattr(libraries, "triton_kernels", lambda *_: (None, "triton is not installed"))
        triton = "triton is not installed"
    assert (why_not("cuda"), why_not("triton"), chosen()) == (cuda, triton, runs)
    listed = {entry.name: entry for entry in backends.listing()}
    for name, reason in (("cuda", cuda), ("triton", triton)):
        assert listed[name].available == (reason is None)
        assert reason is None or listed[name].detail == reason


def test_a_forced_backend_is_obeyed_or_raises(gpu: object) -> None:
    with fastcaps.backend("triton"):
        assert chosen() == "triton"
        with pytest.raises(fastcaps.BackendError, match=r"'triton' is forced and cannot .*got float64"):
            chosen(torch.float64)
    with fastcaps.backend("cuda"), pytest.raises(fastcaps.BackendError, match="up to 512 numbers"):
        chosen(pose=(30, 2, 30))
    with fastcaps.backend("cpu"), pytest.raises(fastcaps.BackendError, match="runs on the CPU only"):
        chosen()
    with fastcaps.backend("reference"):
        assert chosen(torch.float64) == chosen() == "reference"
    assert chosen() == "cuda"


@needs_fake_gpu_tensors
def test_explain_on_a_gpu(gpu: pytest.MonkeyPatch) -> None:
    """Kernel and tile come from the backend that runs."""
    plans: list[str] = []

    class Planning(FakeLibrary):
        def ask(self, function: str, *arguments: Any) -> str | None:
            if function == "fastcaps_cuda_plan":
                numbers, backward, options, half, processors, shared = arguments
                return f"plan {list(numbers)} {backward} {options} {half} {processors} {shared}"
            return super().ask(function, *arguments)

    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232448)
    gpu.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    gpu.setattr(libraries, "library", lambda name: Planning())
    planned = SimpleNamespace(
        refusal=triton_refusal, plan_call=lambda *_, **k: plans.append(str(k)) or "plan of Triton"
    )
    gpu.setattr(libraries, "triton_kernels", lambda *_: (planned, ""))
    with FakeTensorMode():
        children, weight = torch.empty(8, 32, 16, 16, 4, 4, device=GPU), torch.empty(288, 10, 4, 4, device=GPU)
        parents = torch.empty(8, 10, 7, 7, 4, 4, device=GPU)
        told = fastcaps.explain(children, weight, parents, window=Window(3, 2))
        with fastcaps.backend("triton"):
            other = fastcaps.explain(children, weight, parents, window=Window(3, 2))
    assert isinstance(told, functional.Explanation) and told.backend == "cuda"
    geometry = [8, 16, 16, 32, 4, 4, 7, 7, 10, 4, 288, 3, 3, 2, 2, 0, 0, 1, 1]
    assert told.forward == f"plan {geometry} 0 0 0 132 232448" and told.backward.startswith(f"plan {geometry} 1 ")
    assert told.reasons["triton"] == "cuda comes first" and "on the CPU only" in told.reasons["cpu"]
    assert isinstance(other, functional.Explanation) and other.forward == other.backward == "plan of Triton"
    assert ["'backward': False" in one for one in plans] == [True, False]


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@needs_fake_gpu_tensors
@pytest.mark.parametrize("allowed", [False, True])
def test_a_convolution_that_would_round_to_tf32_against_the_users_word_is_left_to_our_kernel(
    gpu: object, settings_kept: None, allowed: bool
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allowed
    assert backends.convolution_rounds() is not allowed
    fake = FakeTensorMode()
    with fake:
        children, weight = torch.empty(8, 4, 9, 9, 4, 4, device=GPU), torch.empty(36, 5, 4, 4, device=GPU)
        with Recorder() as recorder:
            recorder.names.clear()
            functional.inverted_attention_routing(children, weight, window=Window(3, 2))
    ours, theirs = ("fastcaps.attention_pass.default" in recorder.names, "aten.convolution.default" in recorder.names)
    assert (ours, theirs) == (not allowed, allowed)


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
def test_options_follow_the_settings_of_torch_without_a_warning(settings_kept: None, deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    bits = dispatch.DETERMINISTIC if deterministic else 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.options() == bits
        for precision, tf32 in (("high", True), ("medium", True), ("highest", False)):
            torch.set_float32_matmul_precision(precision)
            assert dispatch.options() == bits | tf32 * dispatch.ALLOW_TF32
        for allowed in (True, False):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            assert dispatch.options() == bits | allowed * dispatch.ALLOW_TF32
        for precision, tf32 in (("tf32", True), ("ieee", False)):
            torch.backends.cuda.matmul.fp32_precision = precision
            assert dispatch.options() == bits | tf32 * dispatch.ALLOW_TF32


# ---- the Python kernel itself, on the CPU ----------------------------------------------------------------------------


CASE = BY_NAME["padded"]


def gradients(case: Case, dtype: torch.dtype, run: Callable[..., Any]) -> list[torch.Tensor]:
    tensors = [None if t is None else t.requires_grad_() for t in case.tensors(dtype)]
    outputs = run(*tensors, *case.settings())
    return [*outputs, *torch.autograd.grad(outputs, [t for t in tensors if t is not None], case.grads(dtype))]


def test_autograd_and_opcheck_through_the_python_kernel(serve: Callable[[str], None]) -> None:
    serve("reference")
    wanted = gradients(CASE, torch.float64, reference.attention_pass)
    for one, other in zip(gradients(CASE, torch.float64, ops.attention_pass), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    tensors = [None if t is None else t.requires_grad_() for t in CASE.tensors(torch.float64)]
    torch.library.opcheck(ops.attention_pass, (*tensors, *CASE.settings()))


@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_arguments_and_settings_reach_the_backend(
    serve: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Both ops of a fake backend get what the public ops got, and the settings of the moment."""
    seen: list[tuple[str, Any, Any]] = []

    def record(function: str) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            options = (arguments[-1],) if name == "cuda" else tuple(keywords.values())
            seen.append((function, len(arguments), options))
            return getattr(reference, function)(*(arguments[:-1] if name == "cuda" else arguments))

        return run

    functions = {function: record(function) for function in ("attention_pass", "attention_pass_backward")}
    overloads = {function: SimpleNamespace(default=run) for function, run in functions.items()}
    monkeypatch.setattr(torch.ops, "fastcaps_cuda", SimpleNamespace(**overloads), raising=False)
    monkeypatch.setattr(libraries, "triton_kernels", lambda *_: (SimpleNamespace(**functions), ""))
    serve(name)
    wanted = gradients(CASE, torch.float64, reference.attention_pass)
    before = torch.are_deterministic_algorithms_enabled()
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            found = gradients(CASE, torch.float64, ops.attention_pass)
        finally:
            torch.use_deterministic_algorithms(before)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    extra = 1 if name == "cuda" else 0
    told = [(int(d),) if name == "cuda" else (d, False) for d in (False, True) for _ in range(2)]
    lengths = [11 + extra, 14 + extra] * 2
    assert [(length, options) for _, length, options in seen] == list(zip(lengths, told, strict=True))


def test_the_choice_is_made_when_the_backward_runs(
    serve: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    serve("reference")
    monkeypatch.setattr(backends, "choose", lambda *a: asked.append(a) or "reference")
    gradients(CASE, torch.float32, ops.attention_pass)
    pose, parents = CASE.pose, CASE.parents
    assert asked == [(torch.device("cpu"), torch.float32, pose, parents, "attention")] * 2


def test_compile_and_export_through_the_python_kernel(serve: Callable[[str], None]) -> None:
    serve("reference")
    torch._dynamo.reset()

    def layer(children: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        first = functional.inverted_attention_routing(children, weight)
        return functional.inverted_attention_routing(children, weight, first)

    children, weight = torch.randn(3, 5, 2, 2, requires_grad=True), torch.randn(5, 3, 2, 2, requires_grad=True)
    wanted = layer(children, weight)
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(children, weight)
    torch.testing.assert_close(found, wanted)
    loss = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad(found, (children, weight), loss),
        torch.autograd.grad(wanted, (children, weight), loss),
        strict=True,
    ):
        torch.testing.assert_close(one, other)

    class Layer(torch.nn.Module):
        def forward(self, children: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return layer(children, weight)

    program = torch.export.export(Layer(), (children.detach(), weight.detach()))
    torch.testing.assert_close(program.module()(children, weight), wanted)


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_compile_fullgraph_with_a_forced_backend(name: str) -> None:
    """The question whether the forced backend can take the call is answered while tracing, dynamic shapes or not."""
    if not backends.native_serves() and name == "cpu":
        pytest.skip("no native library here")
    torch._dynamo.reset()
    children, weight, parents = torch.randn(2, 5, 2, 2), torch.randn(5, 3, 2, 2), torch.randn(2, 3, 2, 2)
    for dynamic in (False, True):
        run = torch.compile(functional.inverted_attention_routing, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        with fastcaps.backend(name):
            wanted = functional.inverted_attention_routing(children, weight, parents)
            torch.testing.assert_close(run(children, weight, parents), wanted)


# ---- wrong calls of the op -------------------------------------------------------------------------------------------


def wrong_calls() -> list[tuple[str, Callable[[list[Any]], None], str]]:
    def change(position: int, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[list[Any]], None]:
        def apply(tensors: list[Any]) -> None:
            tensors[position] = how(tensors[position])

        return apply

    return [
        ("children", change(0, lambda t: t[0]), r"children must be \[B, H, W, N, C, D\]"),
        ("weight", change(1, lambda t: t[0]), r"weight must be \[G, M, D, E\]"),
        ("columns", change(1, lambda t: t[..., :-1, :]), "weight has shape"),
        ("groups", change(1, lambda t: t[:4]), "weight has 4 groups, which do not divide 27 children"),
        ("query", change(2, lambda t: t[:1]), "query has shape"),  # torch would broadcast these in silence
        ("query-parents", change(2, lambda t: t[:, :, :, :1]), "query has shape"),
        ("bias", change(3, lambda t: t[..., :1]), "bias has shape"),
        ("bias-rank", change(3, lambda t: t[0]), r"bias must be \[I or 1, M or 1, C, E\]"),
        ("gate", change(4, lambda t: t[:1]), "gate has shape"),
        ("norm", change(5, lambda t: t[:1]), r"norm_weight has shape \[1\], expected \[4\]"),
        ("dtype", change(1, lambda t: t.double()), "weight has another dtype than the call"),
        ("device", change(2, lambda t: t.to("meta")), "query is not on the device of children"),
    ]


@pytest.mark.parametrize(
    ("what", "spoil", "says"), wrong_calls(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_kernels_in_python_check_what_they_get(
    what: str, spoil: Callable[[list[Any]], None], says: str, serve: Callable[[str], None]
) -> None:
    serve("reference")
    tensors = CASE.tensors(torch.float32)
    spoil(tensors)
    with pytest.raises(RuntimeError, match=f"fastcaps: {says}"):
        dispatch.attention_pass(*tensors, *CASE.settings())
    grads, sums = CASE.grads(torch.float32), torch.zeros(2, 3, 4, 3, 2, 2)
    with pytest.raises(RuntimeError, match=f"fastcaps: {says}"):
        dispatch.attention_pass_backward(*grads, *tensors[:6], sums, *CASE.settings(), 127)


def test_wrong_windows_and_gradients(serve: Callable[[str], None]) -> None:
    serve("reference")
    tensors, settings = CASE.tensors(torch.float32), list(CASE.settings())
    for window, says in (
        ([1] * 7, "window must be"),
        ([0] * 8, "window is not valid"),
        ([9, 9, 1, 1, 0, 0, 1, 1], "larger"),
    ):
        with pytest.raises(RuntimeError, match=says):
            ops.attention_pass(*tensors, *settings[:3], window)
    parents, sums = ops.attention_pass(*tensors, *settings)
    good = [torch.zeros_like(parents), torch.zeros_like(sums)]
    for k, name in ((0, "grad_parents"), (1, "grad_sums")):
        grads = list(good)
        grads[k] = grads[k][:1]
        with pytest.raises(RuntimeError, match=f"{name} has shape"):
            ops.attention_pass_backward(*grads, *tensors[:6], sums, *settings, 127)
    with pytest.raises(RuntimeError, match="sums has shape"):
        ops.attention_pass_backward(*good, *tensors[:6], sums[:1], *settings, 127)
    ops.attention_pass_backward(*good, *tensors[:6], sums, *settings, 127)
