"""The choice of a backend, on machines without a GPU: devices and backends are made up.

Which backend a call gets, and why not the others, is asked of a made-up device. That the chosen one is then called,
with the right settings, is tried on the CPU, which a made-up backend serves for the length of a test.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import Case
from features import Called
from registry import ATTENTION, GAUSSIAN, ROUTINGS, BackwardCall, Call, Routing, votes_of
from suite import every_routing
from torch._subclasses import FakeTensorMode

import fastcaps
from fastcaps import Window, backends, functional, libraries
from fastcaps.ops import folded, products
from fastcaps.rules import DETACH, Rule
from fastcaps.votes import SET_WINDOW, VoteInputs

GPU = torch.device("cuda:0")
POSE = (4, 4, 4)


class FakeLibrary:
    """The CUDA library as far as the choice asks it: it takes poses of up to 512 values."""

    problem = ""

    def ask(self, function: str, *arguments: Any) -> str | None:
        if function == "fastcaps_cuda_refusal":
            _, rows, _, columns, _ = arguments
            return "" if rows * columns <= 512 else "it takes poses of up to 512 numbers"
        answers = {"toolkit": "13.0.88", "architectures": "80-real,90"}
        return answers.get(function.removeprefix("fastcaps_cuda_"))


def triton_refusal(
    device: torch.device, dtype: torch.dtype, pose: tuple[int, int, int], parents: int, has_weight: bool
) -> str | None:
    return None if pose[0] * pose[2] <= 8192 else "it takes poses of up to 8192 numbers"


def asked(dtype: torch.dtype = torch.float32, pose: tuple[int, int, int] = POSE, stem: str = "attention") -> Any:
    """Return a call on the made-up GPU, as the choice knows it."""
    return backends.Call(stem, GPU, dtype, pose, 32, True, 0)


def choose(call: Any) -> str:
    return backends.chosen(backends.forced(), call)


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
    kernels = SimpleNamespace(refusal=triton_refusal)
    monkeypatch.setattr(libraries, "triton_kernels", lambda *_: (kernels, ""))
    clear()
    yield monkeypatch
    clear()


def serve(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """Have a made-up CUDA library serve the CPU by the reference, and return the list of its calls, as it grows."""
    seen: list[tuple[str, tuple[Any, ...]]] = []

    def forward(routing: Routing, *arguments: Any) -> Any:
        seen.append((routing.name, arguments))
        given = dict(zip([a.name for a in routing.op._schema.arguments], arguments[:-1], strict=False))
        return tuple(Call(routing, given, {}).by_loop()[result] for result in routing.outputs)

    def backward(routing: Routing, *arguments: Any) -> Any:
        seen.append((f"{routing.name}_backward", arguments))
        names = [argument.name for argument in routing.backward_op._schema.arguments]
        return BackwardCall(routing, dict(zip(names, arguments[:-1], strict=True))).by_reference()

    def reverse(routing: Routing, taken: list[str], *arguments: Any) -> Any:
        seen.append((f"{routing.name}_reverse", arguments))
        given = dict(zip(taken, arguments, strict=True))
        order = [argument.name for argument in routing.op._schema.arguments]
        own = {n: given.get(n) for n in order if n not in ("detach", "coefficients")}
        if "iterations" in order:
            own["iterations"] = len(given["sums"])
        grads = zip(routing.results, arguments, strict=False)
        call = Call(routing, own, dict(grads), given["needs"] >= DETACH)
        with torch.enable_grad():
            made = call.training(Call.by_loop)
        return [made.get(f"d{name}") for name in routing.border.tensors]

    for routing in ROUTINGS:
        taken = [argument.name for argument in routing.border.native_reverse._schema.arguments]
        monkeypatch.setattr(routing.border, "native_reverse", partial(reverse, routing, taken))
    for routing in ROUTINGS:
        monkeypatch.setitem(routing.border.native, "cuda", partial(forward, routing))
        monkeypatch.setitem(routing.border.native_backward, "cuda", partial(backward, routing))
    monkeypatch.setattr(backends, "choose", lambda *_: ("cuda", 3))
    monkeypatch.setattr(backends, "on_cpu", lambda *_: False)
    return seen


needs_fake_gpu_tensors = pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="a torch with CUDA asks for a driver even for tensors that are made up",
)


@pytest.fixture
def settings_kept() -> Iterator[None]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.backends.cudnn.allow_tf32 = True  # the default, which a benchmark's test in this process may have changed
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "none"


# ---- which, and why not the others -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stem", [routing.stem for routing in ROUTINGS])
@pytest.mark.parametrize(
    ("dtype", "pose", "wanted"),
    [
        (torch.float32, POSE, "cuda"),
        (torch.float16, (1, 64, 64), "cuda"),
        (torch.float32, (30, 2, 30), "triton"),
        (torch.float32, (100, 2, 100), "reference"),
        (torch.float64, POSE, "reference"),
    ],
)
def test_the_first_backend_that_can_take_a_call_does(
    gpu: object, dtype: torch.dtype, pose: tuple[int, int, int], wanted: str, stem: str
) -> None:
    call = asked(dtype, pose, stem)
    assert choose(call) == wanted
    for name in backends.NAMES[: backends.NAMES.index(wanted)]:
        assert backends.refusal(name, call)
    assert backends.refusal(wanted, call) is None


@pytest.mark.parametrize(
    ("stage", "cuda", "triton", "runs"),
    [
        ("old device", "it is built for compute capability 8.0, 9.0+PTX, the device has 7.5", None, "triton"),
        ("old driver", "it is built with CUDA 13.0.88, the driver supports CUDA 12 at most", None, "triton"),
        ("no library", "not built: no CUDA toolkit when it was built", None, "triton"),
        ("no gpu", "torch sees no GPU", "torch sees no GPU", "reference"),
        ("cpu torch", *2 * [f"torch {torch.__version__} is a CPU build"], "reference"),
        ("rocm", f"torch {torch.__version__} is a ROCm build", None, "triton"),
        ("does not load", "it does not load (wrong ELF class)", None, "triton"),
        ("no triton", None, "triton is not installed", "cuda"),
    ],
)
def test_what_stands_in_the_way_is_told(
    gpu: pytest.MonkeyPatch, tmp_path: Any, stage: str, cuda: str | None, triton: str | None, runs: str
) -> None:
    broken = FakeLibrary()
    broken.problem = "it does not load (wrong ELF class)"
    change = {
        "old device": (torch.cuda, "get_device_capability", lambda device: (7, 5)),
        "old driver": (torch._C, "_cuda_getDriverVersion", lambda: 12080),
        "no library": (libraries, "library_path", lambda name: tmp_path / "none"),
        "no gpu": (torch.cuda, "is_available", lambda: False),
        "cpu torch": (torch.version, "cuda", None),
        "rocm": (torch.version, "hip", "7.0"),
        "does not load": (libraries, "library", lambda name: broken),
        "no triton": (libraries, "triton_kernels", lambda *_: (None, "triton is not installed")),
    }
    gpu.setattr(*change[stage], raising=False)
    gpu.setattr(libraries, "native_build_info", lambda: {"cuda_why_not": "no CUDA toolkit when it was built"})
    why = (backends.refusal("cuda", asked()), backends.refusal("triton", asked()), choose(asked()))
    assert why == (cuda, triton, runs)
    listed = {entry.name: entry for entry in backends.listing()}
    if not stage.startswith("old"):  # which affects one call, whatever others do
        for name, reason in (("cuda", cuda), ("triton", triton)):
            assert listed[name].available == (reason is None)
            assert reason is None or listed[name].detail == reason


def test_a_gpu_without_any_kernels_is_told(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(libraries, "triton_kernels", lambda *_: (None, "triton is not installed"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(asked()) == "cuda" and choose(asked(torch.float64)) == "reference"
    backends.chosen.cache_clear()
    with pytest.warns(RuntimeWarning, match="no kernels of the verbs; triton: triton is not installed"):
        assert choose(asked()._replace(stem="verbs")) == "reference"
    gpu.setattr(libraries, "library", lambda name: SimpleNamespace(problem="it does not load"))
    backends.chosen.cache_clear()
    with pytest.warns(
        RuntimeWarning, match=r"no kernels run on cuda:0.*\(cuda: it does not load; triton: triton is not"
    ):
        assert choose(asked()) == "reference"


def test_a_forced_backend_is_obeyed_or_raises(gpu: object) -> None:
    with fastcaps.backend("triton"):
        assert choose(asked()) == "triton"
        with pytest.raises(fastcaps.BackendError, match=r"'triton' is forced and cannot .*got float64"):
            choose(asked(torch.float64))
    with fastcaps.backend("cuda"), pytest.raises(fastcaps.BackendError, match="up to 512 numbers"):
        choose(asked(pose=(30, 2, 30)))
    with fastcaps.backend("cpu"), pytest.raises(fastcaps.BackendError, match=r"'cpu' is forced"):
        choose(asked())
    with fastcaps.backend("reference"):
        assert choose(asked(torch.float64)) == choose(asked()) == "reference"
    assert choose(asked()) == "cuda"


@every_routing
def test_the_question_tells_every_fact_of_a_call(routing: Routing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked once for the forward and once for every backward, and whether that is one call."""
    heard: list[backends.Call] = []
    monkeypatch.setattr(backends, "chosen", lambda _, call: heard.append(call) or "reference")
    monkeypatch.setattr(backends, "on_cpu", lambda *_: False)
    case = replace(routing.case("padded"), iterations=1)
    routing.call(case).training(Call.by_op)
    wanted = backends.Call(routing.stem, torch.device("cpu"), torch.float32, case.pose, case.parents, True, 0)
    assert heard == [wanted] * 3


@needs_fake_gpu_tensors
@pytest.mark.parametrize(
    ("sizes", "options"),
    [(((8, 4, 9, 9, 4, 4), (36, 5, 4, 4)), {"window": Window(3, 2)}), (((8, 9, 4, 4), (9, 5, 4, 4)), {})],
    ids=["convolution", "matmul"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_that_would_round_against_the_users_word_is_left_to_our_kernel(
    gpu: object, settings_kept: None, dtype: torch.dtype, sizes: Any, options: dict[str, Any]
) -> None:
    """A convolution to TF32 where matrix products may not; either to TF32 where three products of one are asked for."""
    for precision, three in (("highest", False), ("high", False), ("high", True)):
        torch.set_float32_matmul_precision(precision)
        with FakeTensorMode(), backends.tf32x3(three), Called() as seen:
            children, weight = (torch.empty(*size, device=GPU, dtype=dtype) for size in sizes)
            functional.inverted_attention_routing(children, weight, **options)
        ours = three or (precision == "highest" and "window" in options)
        assert ("fastcaps::attention_routing" in dict(seen.calls)) == (ours and dtype == torch.float32)


FOLDS: dict[str, tuple[bool, dict[str, Any]]] = {
    "li-capnet-dynamic": (True, {}),
    "grid": (True, {"grid": (8, 8), "types": 32, "window": (8, 8, 1, 1, 0, 0, 1, 1)}),
    "half": (True, {"dtype": torch.bfloat16}),
    "long poses": (True, {"parents": 32, "pose": (8, 8, 8)}),
    "many parents": (True, {"parents": 513}),
    "few parents": (True, {"parents": 32}),
    "short votes": (False, {"parents": 32, "pose": (1, 8, 2)}),
    "few votes": (False, {"batch": 1, "parents": 64}),
    "few children a matrix": (False, {"groups": 512}),
    "bias": (False, {"bias": "1M"}),
    "windows": (False, {"grid": (8, 8), "types": 32, "window": (4, 4, 2, 2, 0, 0, 1, 1)}),
}


@needs_fake_gpu_tensors
@pytest.mark.parametrize("name", FOLDS)
def test_products_run_attention_of_shared_matrices_where_they_are_faster(
    gpu: pytest.MonkeyPatch, settings_kept: None, name: str
) -> None:
    """Unless somebody asks for what they do not have: a backend, three products of one, the same bits every time."""
    folds, options = FOLDS[name]
    sizes = {"batch": 128, "types": 2048, "parents": 512, "pose": (1, 8, 16), "groups": 32, **options}
    with torch.device("meta"):
        given = ATTENTION.call(ATTENTION.make(name, **sizes)).given
    with FakeTensorMode():
        tensors = {n: torch.empty(x.shape, dtype=x.dtype, device=GPU) for n, x in given.items() if torch.is_tensor(x)}
    votes = votes_of(given | tensors)

    def runs() -> list[bool]:
        return [ATTENTION.border.library(votes, backward) is not None for backward in (False, True)]

    assert runs() == [folds, folds]
    fused = "cuda" if votes.pose[0] * votes.pose[1] <= 16 and votes.parents <= 512 else "torch"
    assert not folds or ATTENTION.border.library(votes, False)[0] == fused
    with fastcaps.backend("cuda"):
        assert runs() == [False, False]
    torch.set_float32_matmul_precision("high")
    with backends.tf32x3():
        assert runs() == [False, False]
    assert runs() == [folds, folds]
    torch.use_deterministic_algorithms(True)
    gpu.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert runs() == [False, False]
    gpu.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert runs() == [folds, folds]


@needs_fake_gpu_tensors
@pytest.mark.parametrize(
    ("sizes", "taken"),
    [
        ((2, 50, 1, 64, 32), True),
        ((2, 50, 1, 128, 24), True),
        ((2, 50, 4, 64, 15), True),
        ((2, 50, 1, 65, 25), False),
        ((2, 50, 1, 129, 16), False),
        ((2, 50, 1, 64, 33), False),
        ((2, 50, 1, 257, 4), False),
        ((2, 1, 1, 50, 1, 64, 4), False),
    ],
    ids=str,
)
def test_dynamic_routing_of_poses_is_one_launch_where_a_kernel_takes_it(
    gpu: object, sizes: tuple[int, ...], taken: bool
) -> None:
    *children, parents = sizes
    with FakeTensorMode():
        votes = VoteInputs(torch.empty(children, device=GPU), None, None, None, parents, SET_WINDOW)
    assert products._takes_on_gpu(votes) == taken
    with fastcaps.backend("triton"):
        assert not products._takes_on_gpu(votes)


@needs_fake_gpu_tensors
@pytest.mark.parametrize(("start", "ways"), [("uniform", ["reverse"]), ("ones", ["reverse", "backward"])])
def test_an_explanation_names_the_backward_that_runs(gpu: object, start: str, ways: list[str]) -> None:
    """Of Gaussians with a first state, as all iterations behind one of ones have, each iteration is a call."""
    sizes = {"children": (2, 9, 4, 4), "activations": (2, 9), "weight": (9, 3, 4, 4)}
    with FakeTensorMode():
        given = {name: torch.empty(size, device=GPU) for name, size in sizes.items()}
        betas = {name: torch.empty(3, device=GPU) for name in ("beta_u", "beta_a")}
        found: Any = fastcaps.explain(functional.em_routing, **given, **betas, first_coefficients=start)
    found = [found] if start == "uniform" else found
    assert [one.backward for one in found] == [f"fastcaps_cuda::gaussian_routing_{way}" for way in ways]


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
def test_options_follow_the_settings_of_torch_without_a_warning(settings_kept: None, deterministic: bool) -> None:
    """Three products of one are asked for inside a block, where one may be rounded."""
    torch.use_deterministic_algorithms(deterministic)
    matmul, bits = torch.backends.cuda.matmul, backends.DETERMINISTIC if deterministic else 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for change, tf32 in (
            (lambda: torch.set_float32_matmul_precision("high"), True),
            (lambda: torch.set_float32_matmul_precision("highest"), False),
            (lambda: setattr(matmul, "allow_tf32", True), True),
            (lambda: setattr(matmul, "fp32_precision", "ieee"), False),
        ):
            change()
            one = bits | tf32 * backends.ALLOW_TF32
            assert backends._options(GPU) == one and backends._options(torch.device("cpu")) == 0
            with backends.tf32x3():
                assert backends._options(GPU) == one | tf32 * backends.TF32X3
                with pytest.raises(ZeroDivisionError), backends.tf32x3(False):
                    assert backends._options(GPU) == one
                    _ = 1 / 0
                assert backends._options(GPU) == one | tf32 * backends.TF32X3
    with pytest.raises(TypeError, match=r"wanted must be a bool, got .*@tf32x3\(\)"):
        backends.tf32x3(print)  # type: ignore[arg-type]


# ---- what the chosen backend is given --------------------------------------------------------------------------------


@every_routing
@pytest.mark.parametrize("start", [False, True])
def test_iterations_are_one_call_of_the_library(routing: Routing, start: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is the backward, but for Gaussians with a first state: it asks every one for the gradient of its state.

    Kernels get what the ops got but the flags, and the settings of the moment at the end.
    """
    monkeypatch.setattr(backends, "_options", lambda _: 3)
    seen = serve(monkeypatch)
    call = routing.call(replace(routing.case("padded"), iterations=3, dtype=torch.float64, start=start))
    found, wanted = call.training(Call.by_op), call.training(Call.by_loop)
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-8, atol=1e-9)
    whole = routing is not GAUSSIAN or not start
    assert [one for one, _ in seen] == [
        routing.name, *([f"{routing.name}_reverse"] if whole else [f"{routing.name}_backward"] * 3)
    ]  # fmt: skip
    assert all(given[-1] == 3 for _, given in seen)
    assert len(seen[0][1]) == len(call.given) + 1
    if not whole:
        assert {len(given) for _, given in seen[1:]} == {len(routing.backward_op._schema.arguments) + 1}


def test_products_run_the_backward_of_a_call_that_they_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, too, where otherwise one call of the library runs it."""
    seen = serve(monkeypatch)
    case = Case("shared", Rule.SQUASH, types=16, groups=2, iterations=3, dtype=torch.float64, start=False)
    monkeypatch.setattr(folded, "serves", folded.takes)
    call = ATTENTION.call(case)
    found, wanted = call.training(Call.by_op), call.training(Call.by_loop)
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-8, atol=1e-9)
    assert not seen
