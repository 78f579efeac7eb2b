"""The static report reads compilers right; and no kernel compiled for one pose keeps anything in local memory."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from bench.workloads import find  # noqa: E402
from fastcaps import libraries  # noqa: E402
from tools import calibration, estimates, latency, sass, static_report, triton_report  # noqa: E402
from tools.sass import H200, Instruction, Kernel, Usage, macs, wavefronts  # noqa: E402
from tools.static_report import Compiled, collect, identify, spilled  # noqa: E402

LIBRARY = libraries.library_path("cuda")
NO_TOOL = "" if sass.tool("cuobjdump") else "no cuobjdump: neither a CUDA toolkit that has it nor Triton"
NO_LIBRARY = "" if LIBRARY.is_file() else "the CUDA kernels are not built"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")

THREE = "tensor cores, 3 products, all options"
KNOWN_SPILLS = {
    "sm_90 gaussian forward 4×4, 8 parents × 4 positions, all options: 8 bytes of local memory a thread",
    f"sm_80 forward 1×64, 1 parents × 16 positions, {THREE}: 8 bytes of local memory a thread",
    f"sm_80 forward 4×4, 32 parents × 4 positions, {THREE}: 8 bytes of local memory a thread",
    f"sm_90 forward 4×4, 32 parents × 4 positions, {THREE}: 16 bytes of local memory a thread",
}
"""The first is held to 128 registers, so that two blocks fit on a multiprocessor; the others have all there are."""

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z3onev' for 'sm_80'
ptxas info    : Function properties for _Z3onev
    40 bytes stack frame, 56 bytes spill stores, 52 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 2048 bytes smem, 384 bytes cmem[0]
ptxas info    : Compile time = 29.330 ms
ptxas info    : Compiling entry function '_Z3twov' for 'sm_90'
ptxas info    : Function properties for _Z3twov
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 70 registers, used 1 barriers
"""

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

SASS = """\
\tcode for sm_90
\t.target\tsm_90

\t\tFunction : _Z6kernelv
\t.headerflags\t@"EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                       /* 0x00000a00ff017b82 */
                                                                                /* 0x000fc80000000f00 */
        /*0010*/              @!P0 BRA 0xc0 ;                                   /* 0x00000c4000008947 */
        /*0020*/                   LDS.128 R4, [R2] ;                           /* 0x000000ff01007387 */
        /*0030*/                   FFMA R8, R4.reuse, R5, R8 ;
        /*0040*/               @P1 BRA 0x80 ;
        /*0050*/                   LDG.E.64 R6, desc[UR4][R2.64] ;
        /*0060*/                   IADD3 R6, R6, 0x1, RZ ;
        /*0070*/                   STG.E desc[UR4][R2.64], R6 ;
        /*0080*/                   SHFL.BFLY PT, R9, R8, 0x10, 0x1f ;
        /*0090*/                   FFMA R8, R9, R5, R8 ;
        /*00a0*/                   MUFU.RCP R8, R8 ;
        /*00b0*/               @P2 BRA 0x20 ;
        /*00c0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00d0*/            @!UP0  BRA.U UP1, 0x10 ;
        /*00e0*/                   EXIT ;
        /*00f0*/                   BRA 0xf0;
        /*0100*/                   NOP;
"""


# Reading


def test_the_messages_of_ptxas() -> None:
    assert sass.parse_ptxas(PTXAS) == [
        Usage("_Z3onev", "sm_80", 128, 40, 2048, 108),
        Usage("_Z3twov", "sm_90", 70, 0, 0, 0),
    ]
    assert [usage.local for usage in sass.parse_ptxas(PTXAS)] == [True, False]


def test_the_resource_usage_of_cuobjdump() -> None:
    assert sass.parse_usage(USAGE) == [Usage("_Z3onev", "sm_80", 128, 40, 0), Usage("_Z3twov", "sm_90a", 70, 0, 1024)]


def test_the_disassembly() -> None:
    (kernel,) = sass.parse_sass(SASS)
    assert (kernel.name, kernel.arch, len(kernel.instructions)) == ("_Z6kernelv", "sm_90", 17)
    first, branch, load, multiply = kernel.instructions[:4]
    assert (first.opcode, branch.guard, branch.target) == ("LDC", "@!P0", 0xC0)
    assert load == Instruction(0x20, "", "LDS.128", "R4, [R2]") and multiply.operands == "R8, R4.reuse, R5, R8"
    assert kernel.instructions[13].target == 0x10 and kernel.instructions[3].target is None


def test_loops_and_the_usual_way_through_them() -> None:
    (kernel,) = sass.parse_sass(SASS)
    outer, inner = sass.loops(kernel)
    assert (outer.first, outer.last, outer.inner) == (0x10, 0xD0, 1)
    assert (inner.first, inner.last, inner.inner) == (0x20, 0xB0, 0)
    assert sass.hot_loop(kernel) == inner
    path = [one.address for one in sass.hot_path(inner)]
    assert path == [0x20, 0x30, 0x40, 0x80, 0x90, 0xA0, 0xB0]  # not by way of the load and the store
    assert len(sass.hot_path(outer)) == len(path) + 3


def test_a_loop_that_only_computes_on_a_detour_takes_it() -> None:
    def made(address: int, opcode: str, operands: str = "", guard: str = "") -> Instruction:
        return Instruction(address, guard, opcode, operands)

    body = [made(0, "ISETP"), made(16, "BRA", "0x60", "@P0"), *(made(32 + 16 * k, "FFMA") for k in range(4))]
    body += [made(96, "IADD3"), made(112, "BRA", "0x0", "@P1")]
    (loop,) = sass.loops(Kernel("k", "sm_90", body))
    assert len(sass.hot_path(loop)) == 8
    (loop,) = sass.loops(Kernel("k", "sm_90", [body[0], body[1], *[made(32, "IADD3")], *body[6:]]))
    assert len(sass.hot_path(loop)) == 4


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("FFMA", "FFMA"),
        ("FFMA.FTZ", "FFMA"),
        ("FADD", "FADD/FMUL"),
        ("HMMA.1688.F32.TF32", "HMMA"),
        ("HGMMA.64x64x8.F32.TF32", "HMMA"),
        ("MUFU.EX2", "MUFU"),
        ("LDS.128", "LDS"),
        ("STS", "STS"),
        ("SHFL.BFLY", "SHFL"),
        ("LDGSTS.E.BYPASS.128", "LDGSTS"),
        ("LDG.E", "LDG"),
        ("LDL.64", "LDL/STL"),
        ("RED.E.ADD.F32.FTZ.RN.STRONG.GPU", "ATOM/RED"),
        ("REDG.E.ADD.F32x4", "ATOM/RED"),
        ("BAR.SYNC.DEFER_BLOCKING", "BAR"),
        ("IMAD.MOV.U32", "IMAD"),
        ("UIADD3", "uniform"),
        ("ULDC.64", "uniform"),
        ("BSSY", "branch"),
        ("FMNMX", "ALU"),
        ("LOP3.LUT", "ALU"),
        ("NOP", "ALU"),
    ],
)
def test_classes_of_instructions(opcode: str, kind: str) -> None:
    assert sass.classify(opcode) == kind


# The chip


def test_occupancy() -> None:
    def fits(threads: int, registers: int, shared: int = 0) -> tuple[int, int, str]:
        found = H200.occupancy(threads, registers, shared)
        return found.blocks, found.warps, found.limit

    assert fits(256, 32) == (8, 64, "warps")
    assert fits(256, 128) == (2, 16, "registers")
    assert fits(256, 129) == (1, 8, "registers")
    assert fits(192, 140) == (2, 12, "registers")
    assert fits(32, 16) == (32, 32, "blocks")
    assert fits(128, 32, 100 * 1024) == (2, 8, "shared memory")


def test_cycles_of_each_unit() -> None:
    (kernel,) = sass.parse_sass(SASS)
    inner = sass.loops(kernel)[1]
    path = sass.hot_path(inner)
    found = H200.cycles(path)
    assert found["issue"] == 7 / 4 and found["multiply-add"] == 2 / 4 and found["special"] == 2
    assert found["shared memory"] == 4 + 1  # a load of 16 bytes a lane, and a shuffle
    assert "matrix" not in found
    assert H200.seconds(1755e6 * 132 * 1e-3, 1.755) == pytest.approx(1e-3)


def test_shapes_of_matrix_instructions_and_widths_of_accesses() -> None:
    def one(opcode: str) -> Instruction:
        return Instruction(0, "", opcode, "")

    assert macs(one("HMMA.1688.F32.TF32")) == 16 * 8 * 8
    assert macs(one("HMMA.16816.F32.BF16")) == 16 * 8 * 16
    assert macs(one("HMMA.1684.F32.TF32")) == 16 * 8 * 4
    assert [wavefronts(one(name)) for name in ("LDS", "LDS.64", "LDS.128", "SHFL.IDX", "FFMA")] == [1, 2, 4, 1, 0]


# Names


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="no c++filt")
def test_names_are_made_readable() -> None:
    mangled = "_ZN8fastcaps3gpu12_GLOBAL__N_112round_kernelEPfl"
    assert sass.demangle([mangled]) == {mangled: "fastcaps::gpu::round_kernel"}
    one = Compiled("fastcaps::gpu::round_kernel", Usage(mangled, "sm_90", 14, 0, 0))
    assert one.title == "round"


def test_names_of_kernels() -> None:
    gpu = "fastcaps::gpu::"
    found = identify(
        f"{gpu}forward_kernel<{gpu}AttentionForward, {gpu}FixedPose<4, 4, 4, 4, 4, 1, 8, 4, 20>, 1, true, 256, 1>"
    )
    assert found is not None and found.pose == (4, 4, 4) and (found.parents, found.seats) == (32, 4)
    assert (found.direction, found.plain, found.threads, found.blocks) == ("forward", True, 256, 1)
    assert str(found) == "forward 4×4, 32 parents × 4 positions"
    free = identify(f"{gpu}backward_kernel<{gpu}AttentionBackward, {gpu}FreePose<1, 8>, 1, false, 128, 2>")
    assert free is not None and free.pose is None and str(free) == "backward any pose, all options"
    tensor = identify("gpu::forward_kernel<gpu::AttentionForward, gpu::TensorPose4x4<4, 1>, 1, true, 256, 1>")
    assert tensor is not None and tensor.tensor == 1
    assert (tensor.pose, tensor.parents, tensor.seats) == ((4, 4, 4), 32, 4)
    assert str(tensor) == "forward 4×4, 32 parents × 4 positions, tensor cores"
    vector = identify("gpu::backward_kernel<gpu::AttentionBackward, gpu::TensorPose1x64<3>, 2, true, 320, 1>")
    assert vector is not None and (vector.pose, vector.parents, vector.seats) == ((1, 64, 64), 1, 16)
    assert vector.tensor == 3 and str(vector).endswith("1 parents × 16 positions, tensor cores, 3 products")
    pooling = identify(f"{gpu}backward_kernel<{gpu}PoolingBackward, {gpu}FreePose<1, 8>, 1, false, 256, 1>")
    assert pooling is not None and (pooling.subject, pooling.direction) == ("pooling", "backward")
    assert str(pooling) == "pooling backward any pose, all options"
    single = identify(f"{gpu}forward_kernel<{gpu}PoolingForward, {gpu}SinglePose1x16<4>, 1, false, 256, 1>")
    assert single is not None and (single.pose, single.parents, single.seats) == ((1, 16, 16), 1, 32)
    assert identify("fastcaps::gpu::finish_kernel<4>") is None


# Estimates


def _kernel(
    direction: str, parents: int, path: list[str], pose: str = "4, 4, 4, 4, 4, 1", subject: str = "Attention"
) -> Compiled:
    """Make up a compiled kernel whose loop over children is `path`."""
    made = [Instruction(16 * k, "", opcode, "") for k, opcode in enumerate(path)]
    made.append(Instruction(16 * len(path), "@P0", "BRA", "0x0"))
    policy = f"gpu::{subject}{direction.capitalize()}"
    name = f"gpu::{direction}_kernel<{policy}, gpu::FixedPose<{pose}, {parents}, 1, 20>, 2, true, 256, 1>"
    return Compiled(name, Usage(name, "sm_90", 128, 0, 0), Kernel(name, "sm_90", made))


def test_the_estimate_of_a_loop_counted_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "_schedule", lambda *arguments: None)
    path = ["LDS.128"] * 12 + ["FFMA"] * 192 + ["SHFL.BFLY"] * 20 + ["MUFU.EX2", "MUFU.RCP"] + ["FADD"] * 23
    found = [_kernel("forward", 32, path), _kernel("forward", 16, ["FFMA", "MUFU.EX2", "MUFU.RCP"])]
    one = estimates.estimate(found, find("tsai-c10-conv1"), 128, "forward")
    assert one is not None and one.kernel is found[0] and one.slots == 250
    trips = 128 * 49 / 2 * 288
    assert one.units["issue"] == pytest.approx(trips * 250 / 4 / 132 / 1.755e9)
    assert one.units["multiply-add"] == pytest.approx(trips * 215 / 4 / 132 / 1.755e9)
    # weights: 32 parents x 16 numbers, 128 bytes a cycle; eight loads of children, two each; 20 shuffles
    assert one.units["shared memory"] == pytest.approx(trips * (16 + 16 + 20) / 132 / 1.755e9)
    assert one.bound[0] == "issue" and one.tail == 1.0
    assert one.seconds == pytest.approx(one.units["issue"] / 0.69 + 4e-6)
    assert estimates.estimate(found, find("tsai-c10-conv1"), 128, "backward") is None
    fc = estimates.estimate(found, find("tsai-c10-fc"), 128, "forward")
    assert fc is not None and fc.kernel is found[1]  # 16 parents suffice for 10
    assert fc.seconds == estimates.HOST["forward"]  # so small that the host takes longer


def test_a_warp_waits_for_its_own_results() -> None:
    """A load, two multiply-adds that want it, one that wants the second, and a store of that."""

    def made(opcode: str, operands: str, guard: str = "") -> Instruction:
        return Instruction(0, guard, opcode, operands)

    chain = [made("LDS.128", "R4, [R2]"), made("FFMA", "R8, R7.reuse, R1, RZ"), made("FFMA", "R9, R5, R1, RZ")]
    chain += [made("FFMA", "R10, R9, R1, R10"), made("STS.64", "[R2+0x10], R10")]
    wide = latency.CYCLES["LDS"] + 3
    assert latency.registers(chain[0]) == ({"R4", "R5", "R6", "R7"}, {"R2"})
    assert latency.registers(chain[4]) == (set(), {"R2", "R10", "R11"})
    assert latency.registers(made("ISETP.NE.AND", "P5, PT, R74, RZ, PT", "@!P1")) == ({"P5"}, {"R74", "P1"})
    assert latency.registers(made("SHFL.BFLY", "PT, R9, R8, 0x10, 0x1f")) == ({"R9"}, {"R8"})
    assert latency.registers(made("HMMA.1688.F32.TF32", "R4, R40, R118, R4"))[0] == {"R4", "R5", "R6", "R7"}
    # the second multiply-add issues a cycle behind the first, the last four behind that, the store four more
    assert latency.alone(chain) == wide + 1 + 4 + 4 + 1
    assert latency.alone([made("LDS.128", "R4, [R2]"), made("FADD", "R2, R4, R2")]) == wide + 4
    assert latency.alone([made("FFMA", f"R{k}, R1, R1, RZ") for k in range(2, 12)]) == 10


def test_the_model_is_held_against_published_times_at_their_devices_clock_and_memory() -> None:
    kernels = {one.name: one for one in calibration.KERNELS}
    tensor = kernels["CuTe SMEM k=8"]  # 2048 blocks of 4 warps, two on a multiprocessor: 31 rounds of 16 blocks
    assert calibration.units(tensor)["shared memory"] == pytest.approx(2**24 * 67 / 132 / 1.24e9)
    assert calibration.seconds(tensor) == pytest.approx(2**24 * 67 / 132 / 1.24e9 / (2048 / 132 / 16) + 4e-6)
    copied = calibration.units(kernels["Tiled"])["device memory"]
    assert copied == pytest.approx(2 * 4 * 32768**2 / (3.3523e12 * 4.3 / 4.8))
    assert calibration.error(kernels["Tiled"]) == pytest.approx(calibration.seconds(kernels["Tiled"]) / 8.6235e-3 - 1)


def test_the_page_has_the_model_against_published_times_as_it_is() -> None:
    page = (ROOT / "docs" / "performance" / "compiled.md").read_text()
    assert calibration.into(page, calibration.markdown(), "calibration") == page


def test_a_whole_routing_is_so_many_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "_schedule", lambda *arguments: None)
    path = ["FFMA"] * 200 + ["MUFU.EX2", "MUFU.RCP"]
    pose = "1, 8, 16, 4, 4, 1"
    found = [_kernel("forward", 16, path, pose, subject) for subject in ("Attention", "Gaussian")]
    three = estimates.estimate(found, find("sabour-mnist"), 128, "forward")
    assert three is not None and three.kernel is found[0] and three.passes == 3
    one = max(three.units["issue"] / 0.69, three.bound[1])
    assert three.seconds == pytest.approx(3 * (one + 4e-6))
    em = estimates.estimate(found, find("li-capnet-em"), 128, "forward")
    assert em is not None and em.kernel is found[1]  # of its own pass
    assert estimates.estimate(found, find("zhao-pool"), 128, "forward") is None
    assert "| li-capnet-em | forward |" in estimates.markdown(found)
    assert "for want of a kernel for their poses" in estimates.markdown(found)
    assert "Whole routings" not in estimates.markdown([])


def test_loops_over_the_depth_count_as_often_as_they_run() -> None:
    path = ["FFMA"] * 8 + ["IADD3"] + ["FFMA"] * 32 + ["BRA"] + ["FFMA"] * 8 + ["MUFU.EX2", "MUFU.RCP"]
    kernel = _kernel("forward", 2, path, "1, 64, 64, 4, 4, 16")
    made = kernel.kernel
    assert made is not None
    made.instructions[41] = Instruction(41 * 16, "@P1", "BRA", f"0x{9 * 16:x}")  # back to the first of the 32
    assert [len(inner) for inner in kernel.inner_trips] == [33]
    # 2 positions x 2 parents x 64 x 64 multiply-adds, 32 x 32 a trip
    body = estimates.whole_child(kernel)
    assert len(body) == len(kernel.trip) + 15 * 33 and sass.mix(body)["FFMA"] == 16 + 16 * 32
    assert kernel.product == []


def test_targets_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "_schedule", lambda *arguments: None)
    found = [_kernel(way, 32, ["FFMA"] * 200 + ["MUFU.RCP"]) for way in ("forward", "backward")]
    lines = estimates.supported(found)[1:]
    assert [line[-1] for line in lines] == ["yes", "yes", "no", "yes", "yes"]
    assert [line[2] for line in lines[:3]] == ["0.289", "0.579", "0.289"]  # no tensor cores: tf32 takes as long
    assert [line[-1] for line in estimates.supported([])[1:]].count("no: no kernel") == 5


def test_the_report_has_every_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "_schedule", lambda *arguments: None)
    found = [_kernel("forward", 32, ["FFMA"] * 200 + ["MUFU.RCP"])]
    text = static_report.markdown(found)
    assert "| forward 4×4, 32 parents × 2 positions | 256 | 128 | 16 |" in text
    assert "| forward 4×4, 32 parents × 2 positions | 202 | 200 |" in text
    assert "| tsai-c10-conv1 | forward | 4×4, 32 parents × 2 positions | 202 |" in text


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
    assert [one.arch for one in found] == ["sm_90"] and found[0].specialised
    assert bool(spilled(found)) == spills
    (told,) = sass.parse_ptxas(done.stderr)
    assert (told.registers, told.stack) == (found[0].usage.registers, found[0].usage.stack)
    assert found[0].kernel is not None and found[0].kernel.instructions
    assert static_report.main([str(made)]) == (1 if spills else 0)


@pytest.mark.skipif(bool(NO_TOOL or NO_LIBRARY), reason=NO_TOOL or NO_LIBRARY)
def test_no_specialised_kernel_of_the_library_spills() -> None:
    found = collect([LIBRARY], None)
    poses = {one.identity.pose for one in found if one.identity is not None}
    assert {(4, 4, 4), (6, 6, 6), (8, 8, 8), (1, 8, 16), (1, 16, 16), (1, 64, 64), None} <= poses
    assert set(spilled(found)) <= KNOWN_SPILLS


@pytest.mark.skipif(bool(NO_TOOL or NO_LIBRARY), reason=NO_TOOL or NO_LIBRARY)
def test_the_loops_of_the_library_are_found() -> None:
    architectures = {one.arch for one in collect([LIBRARY], None)}
    if static_report.DETAILED not in architectures:
        pytest.skip(f"the library holds no code for {static_report.DETAILED}, only {', '.join(sorted(architectures))}")
    plain: list[Any] = [one for one in collect([LIBRARY]) if one.specialised and one.kernel and one.identity.plain]
    assert plain
    for one in plain:
        whole = estimates.whole_child(one)
        counted = sass.mix(whole)
        useful = counted["FFMA"] + 32 * counted["HMMA"]
        assert useful > 0.4 * len(whole), f"{one.title}: {useful} multiply-adds in {len(whole)} slots"
        assert not counted["LDL/STL"]


def test_what_a_native_library_is_asked_it_answers() -> None:
    """A name that it does not have would be answered by None, and nobody would notice."""
    sources = "".join(path.read_text() for kind in ("*.cu", "*.cpp") for path in (ROOT / "csrc").rglob(kind))
    paths = [path for room in ("fastcaps", "tools", "bench", "scripts") for path in (ROOT / room).rglob("*.py")]
    asked = {name for path in paths for name in re.findall(r'\bask\(\s*f?"([^"]*)"', path.read_text())}
    assert "fastcaps_cuda_schedule" in asked and not [name for name in asked if f" {name}(" not in sources]


def test_without_a_library_the_report_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert static_report.main([str(tmp_path / "absent.so")]) == 2
    assert "are not built" in capsys.readouterr().err


# Triton


@pytest.mark.skipif(bool(triton_report.unavailable()), reason=triton_report.unavailable())
def test_triton_says_what_it_would_launch_and_the_compiler_what_that_takes(tmp_path: Path) -> None:
    layer = find("tsai-c10-fc")
    found = [one for one in triton_report.launches(layer, 128, "fp32", False) if one.walks_children]
    (launch,) = found
    assert launch.name == "attention forward" and launch.programs * launch.tile.BL >= 128
    made = triton_report.make(launch, tmp_path)
    assert 0 < made.usage.registers <= 255 and made.shared >= 0
    useful = sass.mix(made.slots)["FFMA"] + sass.mix(made.slots)["FADD/FMUL"]
    tile = launch.tile.BL * launch.tile.BM * 16  # numbers of votes: 4 products, a dot, a sum each
    assert useful >= 5 * tile / (32 * made.warps)
    trips = launch.programs * launch.arguments["per_split"] * made.warps
    assert made.seconds == pytest.approx(trips * len(made.slots) / 4 / 132 / 1.755e9)
    backward = triton_report.launches(layer, 128, "bf16", True)
    assert [one.name for one in backward if one.walks_children] == ["attention backward"]


@pytest.mark.skipif(bool(triton_report.unavailable()), reason=triton_report.unavailable())
@pytest.mark.parametrize("backward", [False, True])
def test_triton_says_what_it_would_launch_for_every_workload(backward: bool) -> None:
    for workload in triton_report.with_parents():
        names = {one.name for one in triton_report.launches(workload, 2, "tf32", backward) if one.walks_children}
        assert f"{workload.routing.subject} {'backward' if backward else 'forward'}" in names, workload.name


def test_without_triton_its_report_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(triton_report, "unavailable", lambda: "triton is not installed")
    assert triton_report.main([]) == 2
    assert "triton is not installed" in capsys.readouterr().err
