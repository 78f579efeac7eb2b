"""Which backend runs: listing, forcing, explaining, the environment, and life without the native library."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from test_errors import call, set_arguments

import fastcaps
from fastcaps import backends, functional


def test_listing_and_names() -> None:
    entries = backends.listing()
    assert tuple(entry.name for entry in entries) == backends.NAMES == ("cuda", "triton", "cpu", "reference")
    assert entries[3].available
    for entry in entries[:2]:
        assert entry.available == (entry.detail.startswith(("compiled kernels", "kernels that Triton")))
    if not torch.cuda.is_available():
        assert not entries[0].available and not entries[1].available
        assert "torch" in entries[1].detail and ("torch" in entries[0].detail or "not built: " in entries[0].detail)
    assert [str(entry).split()[0] for entry in entries] == list(backends.NAMES)


@pytest.mark.parametrize("name", ["cuda", "triton"])
@pytest.mark.parametrize("with_parents", [True, False])
def test_a_forced_backend_never_falls_back(name: str, with_parents: bool) -> None:
    arguments = set_arguments()
    if not with_parents:
        arguments.pop("parents")
    # on a machine with a GPU the reason is that the tensors are not there
    with fastcaps.backend(name), pytest.raises(fastcaps.BackendError, match=f"{name!r} is forced and cannot take this"):
        call(arguments)
    assert backends.forced() is None


def test_a_forced_backend_refuses_what_it_cannot_take() -> None:
    half = {name: tensor.half() for name, tensor in set_arguments().items()}
    with fastcaps.backend("cpu"), pytest.raises(fastcaps.BackendError, match="'cpu' is forced"):
        call(half)
    with fastcaps.backend("reference"):
        assert call(half).dtype == torch.float16
    meta = {name: tensor.to("meta") for name, tensor in set_arguments().items()}
    with fastcaps.backend("cpu"), pytest.raises(fastcaps.BackendError, match="'cpu' is forced"):
        call(meta)


def test_unknown_backend() -> None:
    with (
        pytest.raises(ValueError, match="must be one of cuda, triton, cpu, reference, got 'gpu'"),
        fastcaps.backend("gpu"),
    ):
        pass


def test_forcing_nests_and_is_undone_by_an_error() -> None:
    with fastcaps.backend("cpu"):
        with pytest.raises(ZeroDivisionError), fastcaps.backend("reference"):
            assert backends.forced() == "reference"
            _ = 1 / 0
        assert backends.forced() == "cpu"
    assert backends.forced() is None


def test_explain() -> None:
    arguments = set_arguments()
    told = fastcaps.explain(**arguments)
    native = backends.listing()[2].available
    assert told.backend == ("cpu" if native else "reference")
    assert set(told.reasons) == set(backends.NAMES) - {told.backend} and all(told.reasons.values())
    assert str(told).startswith(f"{told.backend}: ")
    assert "3 children of 2x3 to 7 parents of 2x4" in told.call and "float32 on cpu" in told.call
    for line in (told.call, told.forward, told.backward, *told.reasons.values()):
        assert line in str(told)
    if native:
        assert "kernel for any pose" in told.forward and "items" in told.backward
    with fastcaps.backend("reference"):
        assert fastcaps.explain(**arguments).backend == "reference"
    with fastcaps.backend("triton"):
        told = fastcaps.explain(**arguments)
        assert told.backend is None and told.reasons["triton"] and told.forward == ""
    arguments.pop("parents")
    told = fastcaps.explain(**arguments)
    assert told.backend == "torch" and "convolution or matmul" in told.how
    arguments["weight"] = arguments["weight"][:2]
    with pytest.raises(ValueError, match="weight"):
        fastcaps.explain(**arguments)


def test_explain_tells_the_cpu_kernel_of_a_call() -> None:
    if not backends.native_serves():
        pytest.skip("no native library here")
    children, weight, parents = torch.randn(64, 16, 4, 4), torch.randn(16, 10, 4, 4), torch.randn(64, 10, 4, 4)
    told = fastcaps.explain(children, weight, parents)
    assert isinstance(told, fastcaps.functional.Explanation)
    assert "kernel 4x4->4x4" in told.forward and "positions a vector" in told.forward
    few = fastcaps.explain(children[:1], weight, parents[:1])
    many = fastcaps.explain(children.double(), weight.double(), parents.double())
    assert "children a vector" in str(few) and "kernel for any pose" in str(many)


def test_explain_a_layer() -> None:
    layer = fastcaps.InvertedAttentionRouting(8, 4, 16, 16, kernel_size=3, stride=2, padding=1)
    runs = "cpu" if backends.native_serves() else "reference"
    told = fastcaps.explain(layer)
    assert isinstance(told, fastcaps.functional.Explanation) and told.backend == runs
    assert told.call.startswith("batch 1, 1x1 x 8 children of 4x4 by 3x3 windows to 4 parents of 4x4, 72 weight groups")
    children, parents = torch.randn(2, 8, 16, 16, 16), torch.randn(2, 4, 8, 8, 16)
    told = fastcaps.explain(layer, children, parents)
    assert isinstance(told, fastcaps.functional.Explanation)
    assert told.call.startswith("batch 2, 16x16 x 8 children of 4x4 by 3x3 windows to 8x8 x 4 parents of 4x4")
    assert fastcaps.explain(layer, children).backend == "torch", "the first iteration is torch's convolution"
    assert fastcaps.explain(fastcaps.InvertedAttentionRouting(5, 3, 8, 16, pose="vector")).backend == runs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "bfloat16" in fastcaps.explain(layer, children, parents).call
    with pytest.raises(ValueError, match="children"):
        fastcaps.explain(layer, children[..., :9])
    assert functional.explaining._watching is None, "an error leaves no trace"
    with pytest.raises(TypeError, match="Linear must be given with its inputs"):
        fastcaps.explain(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"weight must be a torch\.Tensor"):
        fastcaps.explain(children)


def test_explain_a_network_runs_no_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(*_: object) -> None:
        raise AssertionError("a pass ran")

    for module, name in ((functional.uniform, "uniform_pass"), (functional.inverted_attention.ops, "attention_pass")):
        monkeypatch.setattr(module, name, ran)
    layers = [fastcaps.InvertedAttentionRouting(6, 4, 16, 16), fastcaps.InvertedAttentionRouting(4, 3, 16, 16)]
    stack = fastcaps.RoutingStack(layers, iterations=2)
    told = fastcaps.explain(stack, torch.randn(2, 6, 16))
    assert isinstance(told, fastcaps.functional.Explanations)
    # concurrent: what the first layer would do in the last iteration, nobody reads
    assert [one.backend == "torch" for one in told] == [True, True, False]
    assert str(told).startswith("[0] torch: ") and "\n[2] " in str(told)


def _python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment},
        cwd=Path(fastcaps.__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_environment_forces_a_backend() -> None:
    script = "import fastcaps; print(fastcaps.backends.forced())"
    assert _python(script, FASTCAPS_BACKEND="reference").stdout.strip() == "reference"
    done = _python(script, FASTCAPS_BACKEND="gpu")
    assert done.returncode != 0 and "FASTCAPS_BACKEND must be one of" in done.stderr


def test_a_level_that_cannot_be_had_refuses_calls_on_the_cpu_alone(native_library: Path) -> None:
    script = """if True:
        import torch, fastcaps
        tensors = [torch.randn(s) for s in ((3, 40, 4, 4), (40, 10, 4, 4), (3, 10, 4, 4))]
        routing = fastcaps.functional.inverted_attention_routing
        try:
            routing(*tensors)
        except fastcaps.BackendError as error:
            assert "FASTCAPS_CPU_CAPABILITY='sse9'" in str(error) and "forced" not in str(error), error
        else:
            raise SystemExit("a call on the CPU fell back")
        with fastcaps.backend("reference"):
            routing(*tensors)
        assert fastcaps.backends.forced() is None
        routing(*(tensor.to("meta") for tensor in tensors))  # as on a GPU: no business of the CPU's
    """
    done = _python(script, FASTCAPS_CPU_CAPABILITY="sse9")
    assert done.returncode == 0, done.stderr


def test_without_the_library_the_reference_serves_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the Python files alone, as FASTCAPS_BUILD=0 installs it."""
    package = Path(fastcaps.__file__).parent
    for file in package.rglob("*.py"):
        target = tmp_path / "fastcaps" / file.relative_to(package)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(file.read_text())
    script = f"""
import sys, warnings
sys.path.insert(0, {str(tmp_path)!r})
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, fastcaps
    for _ in range(2):
        children = torch.randn(1, 3, 2, 2, requires_grad=True)
        weight, parents = torch.randn(3, 2, 2, 2), torch.randn(1, 2, 2, 2)
        # one number of each pose: the sum over a normalised pose is always 0, and so would be its gradient
        fastcaps.functional.inverted_attention_routing(children, weight, parents)[..., 0, 0].sum().backward()
        assert children.grad.abs().sum() > 0
ours = [w for w in caught if "fastcaps" in str(w.message)]
assert len(ours) == 1 and "reference serves" in str(ours[0].message), ours
told = fastcaps.explain(children, weight, parents)
assert told.backend == "reference" and "not built" in told.reasons["cpu"] and not told.forward, told
try:
    with fastcaps.backend("cpu"):
        fastcaps.functional.inverted_attention_routing(children, weight, parents)
except fastcaps.BackendError as error:
    assert "not built" in str(error)
else:
    raise SystemExit("the forced backend fell back")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_says_nothing_where_the_library_is() -> None:
    if not backends.listing()[2].available:
        pytest.skip("no native library here")
    done = _python("import fastcaps")
    assert done.returncode == 0 and not done.stderr
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(set_arguments())
