"""The static reports read compilers right; and no CUDA kernel compiled for one pose keeps anything in local memory."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from bench.workloads import find  # noqa: E402
from fastcaps import libraries  # noqa: E402
from tools import static_report, triton_report  # noqa: E402
from tools.static_report import Compiled, Usage, collect, identify, spilled, unexpected  # noqa: E402

LIBRARY = libraries.library_path("cuda")
NO_TOOL = "" if static_report.tool("cuobjdump") else "no cuobjdump: neither a CUDA toolkit that has it nor Triton"
NO_LIBRARY = "" if LIBRARY.is_file() else "the CUDA kernels are not built"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")

USAGE = """\
Fatbin elf code:
================
arch = sm_80
code version = [1,8]

Resource usage:
 Common:
  GLOBAL:0
 Function _Z3onev:
  REG:128 STACK:40 SHARED:0 LOCAL:0 CONSTANT[0]:384 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin elf code:
================
arch = sm_90a

Resource usage:
 Function _Z3twov:
  REG:70 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:560 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_the_resource_usage_of_cuobjdump() -> None:
    assert static_report.parse_usage(USAGE) == [
        Usage("_Z3onev", "sm_80", 128, 40, 0),
        Usage("_Z3twov", "sm_90a", 70, 0, 1024),
    ]


# Names


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="no c++filt")
def test_names_are_made_readable() -> None:
    mangled = "_ZN8fastcaps3gpu12_GLOBAL__N_112round_kernelEPfl"
    assert static_report.demangle([mangled]) == {mangled: "fastcaps::gpu::round_kernel"}
    one = Compiled("fastcaps::gpu::round_kernel", Usage(mangled, "sm_90", 14, 0, 0))
    assert one.title == "round"


def test_names_of_kernels() -> None:
    gpu = "fastcaps::gpu::"
    found = identify(
        f"{gpu}forward_kernel<{gpu}AttentionForward, {gpu}FixedPose<4, 4, 4, 4, 4, 1, 8, 4, 20>, 1, true, 256, 1>"
    )
    assert found is not None and found.pose == (4, 4, 4) and (found.parents, found.positions) == (32, 4)
    assert (found.direction, found.plain, found.threads) == ("forward", True, 256)
    assert str(found) == "forward 4×4, 32 parents × 4 positions"
    free = identify(f"{gpu}backward_kernel<{gpu}AttentionBackward, {gpu}FreePose<1, 8>, 1, false, 128, 2>")
    assert free is not None and free.pose is None and str(free) == "backward any pose, all options"
    tensor = identify("gpu::forward_kernel<gpu::AttentionForward, gpu::TensorPose4x4<4, 1>, 1, true, 256, 1>")
    assert tensor is not None and tensor.tensor == 1
    assert (tensor.pose, tensor.parents, tensor.positions) == ((4, 4, 4), 32, 4)
    assert str(tensor) == "forward 4×4, 32 parents × 4 positions, tensor cores"
    vector = identify("gpu::backward_kernel<gpu::AttentionBackward, gpu::TensorPose1x64<3>, 2, true, 320, 1>")
    assert vector is not None and (vector.pose, vector.parents, vector.positions) == ((1, 64, 64), 1, 16)
    assert vector.tensor == 3 and str(vector).endswith("1 parents × 16 positions, tensor cores, 3 products")
    pooling = identify(f"{gpu}backward_kernel<{gpu}PoolingBackward, {gpu}FreePose<1, 8>, 1, false, 256, 1>")
    assert pooling is not None and (pooling.subject, pooling.direction) == ("pooling", "backward")
    assert str(pooling) == "pooling backward any pose, all options"
    single = identify(f"{gpu}forward_kernel<{gpu}PoolingForward, {gpu}SinglePose1x16<4>, 1, false, 256, 1>")
    assert single is not None and (single.pose, single.parents, single.positions) == ((1, 16, 16), 1, 32)
    assert identify("fastcaps::gpu::finish_kernel<4>") is None


# What is compiled


SPILLING = """\
namespace fastcaps::gpu {
template <int...> struct FixedPose {};
template <class Pose, int R, bool PLAIN> struct AttentionForward;
template <template <class, int, bool> class Policy, class Pose, int R, bool PLAIN, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) forward_kernel(float* x, const int* at) {
  float kept[ROOM];
  for (int i = 0; i < ROOM; ++i) kept[i] = x[i * 32 + threadIdx.x];
  for (int i = 0; i < 100; ++i) kept[AT] += x[i];
  for (int i = 0; i < ROOM; ++i) x[i * 32 + threadIdx.x] = kept[i];
}
using Pose = FixedPose<4, 4, 4, 4, 4, 1, 8, 4, 20>;
template __global__ void forward_kernel<AttentionForward, Pose, 1, true, 256, 1>(float*, const int*);
}
"""


@pytest.mark.skipif(bool(NO_TOOL) or NVCC is None, reason=NO_TOOL or "no nvcc")
@pytest.mark.parametrize(("index", "spills"), [("at[i]", True), ("i % 4", False)])
def test_local_memory_is_seen_in_what_nvcc_makes(index: str, spills: bool, tmp_path: Path) -> None:
    source, made = tmp_path / "k.cu", tmp_path / "k.o"
    source.write_text("#define ROOM 8\n#define AT " + index + "\n" + SPILLING)
    command = [str(NVCC), "-std=c++17", "-O3", "-arch=sm_90", "-c", str(source), "-o", str(made), "-Xptxas", "-v"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = collect([made])
    assert [one.usage.arch for one in found] == ["sm_90"] and found[0].specialised
    assert bool(spilled(found)) == spills
    told = re.search(r"(\d+) bytes stack frame.*Used (\d+) registers", done.stderr, re.DOTALL)  # by ptxas
    assert told is not None and (found[0].usage.local, found[0].usage.registers) == tuple(map(int, told.groups()))
    assert static_report.main([str(made)]) == (1 if spills else 0)


@pytest.mark.skipif(bool(NO_TOOL or NO_LIBRARY), reason=NO_TOOL or NO_LIBRARY)
def test_no_specialised_kernel_of_the_library_spills() -> None:
    found = collect([LIBRARY])
    poses = {one.identity.pose for one in found if one.identity is not None}
    assert {(4, 4, 4), (6, 6, 6), (8, 8, 8), (1, 8, 16), (1, 16, 16), (1, 64, 64), None} <= poses
    assert not unexpected(found)


def test_what_a_native_library_is_asked_it_answers() -> None:
    """A name that it does not have would be answered by None, and nobody would notice."""
    sources = "".join(path.read_text() for kind in ("*.cu", "*.cpp") for path in (ROOT / "csrc").rglob(kind))
    paths = [path for room in ("fastcaps", "tools", "bench") for path in (ROOT / room).rglob("*.py")]
    asked = {name for path in paths for name in re.findall(r'\bask\(\s*f?"([^"]*)"', path.read_text())}
    assert "fastcaps_cuda_schedule" in asked and not [name for name in asked if f" {name}(" not in sources]


def test_without_a_library_the_report_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert static_report.main([str(tmp_path / "absent.so")]) == 2
    assert "are not built" in capsys.readouterr().err


def test_a_known_spill_is_told_and_only_another_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Else the first stage of ``bench/gpu.sh`` fails wherever the library is as it ought to be."""
    name = "gpu::forward_kernel<gpu::GaussianForward, gpu::FixedPose<4, 4, 4, 4, 4, 1, 8, 1, 20>, 1, false, 256, 2>"
    (tmp_path / "library.so").touch()
    for local, status in ((8, 0), (16, 1)):
        one = Compiled(name, Usage("k", "sm_90", 127, local, 0))
        monkeypatch.setattr(static_report, "collect", lambda paths, one=one: [one])
        assert static_report.main([str(tmp_path / "library.so")]) == status
        said = capsys.readouterr()
        assert f"| 127 + {local} B local |" in said.out and f"{local} bytes of local memory" in said.err


# Triton

NO_TRITON = libraries.triton_kernels()[1] or NO_TOOL


@pytest.mark.skipif(bool(NO_TRITON), reason=NO_TRITON)
def test_the_compiler_of_triton_says_what_a_launch_takes() -> None:
    head, *lines = triton_report.table([find("tsai-c10-fc")], ["tf32"], "sm_90")
    assert [line[2] for line in lines] == ["attention_forward_kernel", "attention_backward_kernel"]
    for line in lines:
        said = dict(zip(head, line, strict=True))
        assert 0 < int(said["registers"]) <= 255 and float(said["shared, KB"]) > 0 and not said["words spilled"]


@pytest.mark.skipif(bool(NO_TRITON), reason=NO_TRITON)
@pytest.mark.parametrize("backward", [False, True])
def test_triton_says_what_it_would_launch_for_every_workload(backward: bool) -> None:
    for workload in triton_report.with_parents():
        found = [one for one in triton_report.launches(workload, 2, "tf32", backward) if one.walks_children]
        assert found and all(one.programs > 0 for one in found), workload.name


def test_without_triton_its_report_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(libraries, "triton_kernels", lambda *subject: (None, "triton is not installed"))
    assert triton_report.main([]) == 2
    assert "triton is not installed" in capsys.readouterr().err
