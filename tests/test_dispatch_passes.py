"""The choice of a backend for every pass and every whole routing; how it is made at all, ``test_dispatch`` tells."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attention_cases
import gaussian_cases
import pooling_cases
import pytest
import torch
from dispatch_fakes import GPU, FakeLibrary, triton_refusal
from dispatch_fakes import gpu as gpu  # a fixture
from dispatch_fakes import serve as serve  # a fixture
from pass_cases import Judge
from test_ops_routings import Call, attention, gaussian, gradients_of, pooling

import fastcaps
from fastcaps import backends, dispatch, libraries, ops, reference
from fastcaps.explanation import explain_call
from fastcaps.votes import SET_WINDOW, geometry_of

POSE = (4, 4, 4)
PASSES = [
    (attention_cases.JUDGE, attention_cases.BY_NAME["padded"]),
    (pooling_cases.JUDGE, pooling_cases.BY_NAME["padded"]),
    (pooling_cases.JUDGE, pooling_cases.BY_NAME["identity-conv"]),
    (gaussian_cases.JUDGE, gaussian_cases.BY_NAME["padded"]),
]
ROUTINGS = [
    attention("padded", 0, 2),
    attention("primes", 1, 3),
    pooling("identity-conv", 0, 2),
    gaussian("padded", 0, 2),
]


def name_of(value: Any) -> str:
    return value.one.stem if isinstance(value, Judge) else value.name


every_pass = pytest.mark.parametrize(("judge", "case"), PASSES, ids=name_of)
every_routing = pytest.mark.parametrize("call", ROUTINGS, ids=name_of)


# ---- which ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stem", ["pooling", "gaussian"])
def test_a_backend_without_kernels_of_a_pass_is_passed_over(gpu: pytest.MonkeyPatch, stem: str) -> None:
    """The attention pass is served by what serves neither of the others."""
    triton = SimpleNamespace(refusal=triton_refusal)
    missing = f"it has no kernels of the {stem} pass"
    gpu.setattr(torch.ops, "fastcaps_cuda", SimpleNamespace(), raising=False)
    gpu.setattr(
        libraries, "triton_kernels", lambda s="attention": (triton, "") if s == "attention" else (None, missing)
    )
    call = (GPU, torch.float32, POSE, 32)
    assert backends.choose(*call) == "cuda" and backends.choose(*call, stem) == "reference"
    assert [backends.refusal(name, *call, stem) for name in ("cuda", "triton")] == [missing] * 2
    with fastcaps.backend("cuda"), pytest.raises(fastcaps.BackendError, match=missing):
        backends.choose(*call, stem)
    gpu.setattr(libraries, "triton_kernels", lambda *_: (triton, ""))
    backends._chosen.cache_clear()
    assert backends.choose(*call, stem) == "triton"
    gpu.setattr(torch.ops, "fastcaps_cuda", SimpleNamespace(**{f"{stem}_pass": None}), raising=False)
    backends._chosen.cache_clear()
    assert backends.choose(*call, stem) == "cuda"


def test_a_pass_has_limits_of_its_own(gpu: pytest.MonkeyPatch) -> None:
    class Limited(FakeLibrary):
        def ask(self, function: str, *arguments: Any) -> str | None:
            limited = function == "fastcaps_cuda_gaussian_refusal"
            return "it takes poses of up to 3 numbers" if limited else super().ask(function, *arguments)

    gpu.setattr(libraries, "library", lambda name: Limited())
    gpu.setattr(torch.ops, "fastcaps_cuda", SimpleNamespace(gaussian_pass=None, pooling_pass=None), raising=False)
    call = (GPU, torch.float32, POSE, 32)
    assert backends.choose(*call, "gaussian") == "triton" and backends.choose(*call, "pooling") == "cuda"
    assert backends.refusal("cuda", *call, "gaussian") == "it takes poses of up to 3 numbers"


@pytest.mark.parametrize("stem", ["attention", "pooling", "gaussian"])
def test_the_cpu_serves_a_pass_by_its_library_or_by_the_reference(stem: str) -> None:
    call = (torch.device("cpu"), torch.float32, POSE, 32, stem)
    native = backends.native_serves(stem)
    assert backends.choose(*call) == ("cpu" if native else "reference")
    told = explain_call(
        torch.empty(2, 1, 1, 5, 4, 4), torch.empty(5, 3, 4, 4), SET_WINDOW, torch.float32, True, False, stem
    )
    assert told.backend == ("cpu" if native else "reference")
    if not native:
        assert f"no kernels of the {stem} pass" in told.reasons["cpu"] or "not built" in told.reasons["cpu"]


def test_explain_a_pass_without_weights() -> None:
    told = explain_call(
        torch.empty(2, 4, 4, 5, 1, 8), None, (2, 2, 2, 2, 0, 0, 1, 1), torch.float32, True, False, "pooling", 3
    )
    assert "2x2 x 3 parents of 1x8" in told.call


# ---- the Python kernels, on the CPU ----------------------------------------------------------------------------------


def everything(call: Call, run: Callable[..., Any]) -> list[torch.Tensor]:
    """Return the results of a routing and all gradients."""
    found, gradients = gradients_of(call, run)
    return [*found, *gradients]


def record(seen: list[Any], name: str, run: Callable[..., Any], by_keywords: bool) -> Callable[..., Any]:
    """Return a backend's function that notes what it was given and lets the reference run."""

    def function(*arguments: Any, **keywords: Any) -> Any:
        given, options = (arguments, tuple(keywords.values())) if by_keywords else (arguments[:-1], arguments[-1])
        seen.append((name, len(given), options))
        return run(*given)

    return function


@every_pass
@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_arguments_and_settings_reach_the_backend(
    serve: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, judge: Judge, case: Any, name: str
) -> None:
    """Both functions of a backend get what the ops got, but whether coefficients are frozen, and the settings."""
    one, seen = judge.one, []
    functions = {
        one.name: record(seen, one.name, one.by_reference, name == "triton"),
        f"{one.name}_backward": record(seen, "backward", one.backward_by_reference, name == "triton"),
    }
    overloads = {function: SimpleNamespace(default=run) for function, run in functions.items()}
    monkeypatch.setattr(torch.ops, "fastcaps_cuda", SimpleNamespace(**overloads), raising=False)
    modules = {one.stem: (SimpleNamespace(**functions), "")}
    monkeypatch.setattr(libraries, "triton_kernels", modules.__getitem__)
    serve(name)
    op = getattr(ops, one.name)
    for constant in ((), (True,)) if one.freezes else ((),):
        seen.clear()
        settings = (*case.settings(), *constant)
        found = judge.results(op, case.tensors(), settings, case.grads())
        wanted = judge.results(one.by_reference, case.tensors(), settings, case.grads())
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-11)
        options = 0 if name == "cuda" else (False, False)
        before = len(getattr(ops, f"{one.name}_backward")._schema.arguments)
        assert seen == [(one.name, one.arguments - one.freezes, options), ("backward", before, options)]


@every_pass
def test_the_choice_knows_pass_pose_and_parents(
    serve: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, judge: Judge, case: Any
) -> None:
    asked: list[tuple[Any, ...]] = []
    serve("reference")
    monkeypatch.setattr(backends, "choose", lambda *arguments: asked.append(arguments) or "reference")
    judge.results(getattr(ops, judge.one.name), case.tensors(torch.float32), case.settings(), case.grads(torch.float32))
    assert asked == [(torch.device("cpu"), torch.float32, case.pose, case.parents, judge.one.stem)] * 2


def test_arguments_of_the_wrong_rank_are_named(serve: Callable[[str], None]) -> None:
    serve("reference")
    children, _, query, bias, _ = pooling_cases.BY_NAME["identity-bias"].tensors()
    settings = pooling_cases.BY_NAME["identity-bias"].settings()
    for given, says in (
        ((children[0], None, None, None, None), "children must be"),
        ((children, None, query[0], None, None), "query must be"),
        ((children, None, None, bias[0], None), "bias must be"),
    ):
        with pytest.raises(RuntimeError, match=says):
            ops.pooling_pass(*given, *settings)


@every_routing
def test_a_whole_routing_is_one_call_where_the_library_fuses_it(
    serve: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    routing, seen, answers = call.routing, [], []

    class Fusing(FakeLibrary):
        def ask(self, function: str, *arguments: Any) -> str | None:
            if function != "fastcaps_cuda_routing_refusal":
                return super().ask(function, *arguments)
            numbers, order, identity, asked, options, half, *machine = arguments
            assert isinstance(numbers, ctypes.Array) and half == 1  # float64, as far as the question goes
            assert (identity, asked, options) == (call.tensors[1] is None, turns, 0) and machine == [132, 227 << 10]
            parents = call.settings[2] if routing is ops.POOLING_ROUTING else 1
            assert list(numbers) == list(geometry_of(call.tensors[0], call.tensors[1], call.settings[-1], parents))
            assert ops.PASSES[order] is routing.one
            return answers[-1]

    run = record(seen, routing.name, routing.by_reference, False)
    passes = {
        name: record(seen, name, function, False)
        for one in ops.PASSES
        for name, function in ((one.name, one.by_reference), (f"{one.name}_backward", one.backward_by_reference))
    }
    kernels = {name: SimpleNamespace(default=function) for name, function in {routing.name: run, **passes}.items()}
    monkeypatch.setattr(torch.ops, "fastcaps_cuda", SimpleNamespace(**kernels), raising=False)
    monkeypatch.setattr(libraries, "library", lambda name: Fusing())
    monkeypatch.setattr(dispatch, "_machine", lambda device: (132, 227 << 10))
    serve("cuda")
    wanted = everything(call, routing.by_reference)
    turns = len(call.settings[0]) if routing is ops.GAUSSIAN_ROUTING else call.settings[4]
    for answer, forward in (("", [routing.name]), ("too many parents", [routing.one.name] * turns), (None, None)):
        answers.append(answer)
        seen.clear()
        for one, other in zip(everything(call, call.run), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)
        names = [name for name, _, _ in seen]
        # every turn that has a query is asked for its gradient, and then every turn for all others
        asked = turns - (routing is not ops.ATTENTION_ROUTING or call.tensors[2] is None)
        assert names == (forward or [routing.one.name] * turns) + [f"{routing.one.name}_backward"] * (asked + turns)


@pytest.mark.parametrize("turns", [16, 17])
def test_a_launch_has_so_many_turns(serve: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, turns: int) -> None:
    """More are a loop of passes; and a pooled history comes in the dtype that the op says, whatever the kernel kept."""
    call, seen = pooling("identity-conv", 0, turns), []

    def fused(*arguments: Any) -> Any:
        result, sums, logsumexp = call.routing.by_reference(*arguments)
        return result, sums.float(), logsumexp

    kernels = {"pooling_routing": fused, "pooling_pass": ops.POOLING.by_reference}
    overloads = {name: SimpleNamespace(default=record(seen, name, run, False)) for name, run in kernels.items()}
    monkeypatch.setattr(torch.ops, "fastcaps_cuda", SimpleNamespace(**overloads), raising=False)
    answer = "" if turns == 16 else "its 17 turns are more than 16"
    monkeypatch.setattr(libraries, "library", lambda name: SimpleNamespace(ask=lambda *_: answer))
    monkeypatch.setattr(dispatch, "_machine", lambda device: (132, 227 << 10))
    serve("cuda")
    _, sums, _ = call.run(*call.arguments(torch.bfloat16))
    assert sums.dtype == torch.bfloat16
    assert [name for name, _, _ in seen] == (["pooling_routing"] if turns == 16 else ["pooling_pass"] * 17)


@every_routing
def test_a_whole_routing_is_a_loop_of_passes_elsewhere(
    serve: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    serve("reference")
    found, wanted = (everything(call, run) for run in (call.run, call.routing.by_reference))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)
    with pytest.raises(RuntimeError, match="fastcaps: "):
        arguments = list(call.arguments())
        arguments[1 if arguments[1] is not None else 0] = torch.zeros(1)
        call.run(*arguments)


@pytest.mark.parametrize("stem", ["attention", "pooling", "gaussian"])
def test_the_triton_kernels_serve_a_call_through_the_choice(stem: str) -> None:
    """The whole way from the public op to Triton's interpreter, which must be switched on before Triton is imported."""
    pytest.importorskip("triton")
    script = f"""if True:
        import warnings
        import torch
        from {stem}_cases import BY_NAME, JUDGE
        from fastcaps import backends, dispatch, libraries, ops

        library = torch.library.Library("fastcaps", "IMPL")
        warnings.simplefilter("ignore")
        for name in ("{stem}_pass", "{stem}_pass_backward"):
            library.impl(name, getattr(dispatch, name), "CPU", allow_override=True)
        backends.choose = lambda *_: "triton"
        case = BY_NAME["padded"]
        called = []
        module = libraries.triton_kernels("{stem}")[0]
        run = module.{stem}_pass
        module.{stem}_pass = lambda *a, **k: called.append("forward") or run(*a, **k)
        given = case.tensors(torch.float32), case.settings(), case.grads(torch.float32)
        JUDGE.check(*given, ops.{stem}_pass)
        assert called
        print("served")
    """
    path = os.pathsep.join([str(Path(fastcaps.__file__).parents[1]), str(Path(__file__).parent)])
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True)
    assert done.returncode == 0 and "served" in done.stdout, done.stderr


def test_every_op_has_a_kernel_for_the_gpu() -> None:
    for one in ops.PASSES:
        names = (one.name, f"{one.name}_backward", one.turns)
        assert all(ops.has_kernel(name, "CUDA") and callable(getattr(dispatch, name)) for name in names)
    assert all(ops.has_kernel(routing.name, "CUDA") for routing in ops.ROUTINGS)
    assert reference.FROZEN == 1 << 30 and reference.FROZEN >> len(gaussian_cases.JUDGE.gradients)
