"""The native libraries: what they were made with, what they choose, what they need and give away."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from suite import python

import fastcaps
from fastcaps import libraries
from tools import static_report

ROOT = Path(__file__).resolve().parents[1]
KNOWN_LEVELS = ["default", "avx2", "avx512"]
EXPORTED = {
    "native": {"build_info", "capability", "capabilities_built"},
    "cuda": {f"cuda_{name}" for name in ("toolkit", "architectures", "refusal", "routing_refusal")},
}
either = pytest.mark.parametrize("name", ["native", "cuda"])


@pytest.fixture
def info(native_library: Path) -> dict[str, Any]:
    return libraries.native_build_info()


@pytest.fixture
def levels(native_library: Path) -> list[str]:
    """The instruction sets that the library has kernels for: the machine's, or all of a wheel's."""
    return (libraries.library("cpu").ask("fastcaps_capabilities_built") or "").split(",")


def tool(name: str, *arguments: str | Path) -> str:
    """Output of a program of binutils or of the toolkit."""
    program = static_report.tool(name)
    if sys.platform != "linux" or program is None:
        pytest.skip(f"needs {name}")
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def test_the_build_says_what_it_was_made_with(info: dict[str, Any], levels: list[str]) -> None:
    assert info["version"] == fastcaps.__version__ and info["stable_abi_target"] == "2.10"
    assert levels == [level for level in KNOWN_LEVELS if level in info["level_flags"]]
    assert info["level_flags"].get("default", "") == "" and re.search("-O[23] ", info["flags"])
    flags = " ".join([info["flags"], *info["level_flags"].values(), (info["cuda"] or {}).get("flags", "")])
    # what ties a library to a machine, or breaks NaN
    assert not re.search("-march|-mtune|-mcpu|fast.math|-Ofast|-ffinite-math|-fassociative-math", flags)
    assert (info["cuda"] is None) == bool(info["cuda_why_not"])
    assert libraries.library_path("cuda").is_file() == (info["cuda"] is not None)


@either
def test_a_library_needs_torchs_stable_c_interface_alone_and_no_path(name: str, request: pytest.FixtureRequest) -> None:
    library = request.getfixturevalue(f"{name}_library")
    imported = [line.split()[-1] for line in tool("nm", "-D", "--undefined-only", library).splitlines()]
    cpp = [one for one in imported if re.match(r"_ZN?K?[STVI]*N?K?(2at|3c10|5torch|6caffe2)", one)]
    assert not cpp, "C++ symbols of torch change between its versions"
    asked = [one.split("@")[0] for one in imported if one.startswith(("aoti_torch_", "torch_"))]
    include = Path(torch.__file__).parent / "include/torch/csrc"
    headers = [include / "stable/c/shim.h", *(include / "inductor").rglob("*.h")]
    shims = "".join(path.read_text() for path in headers)
    assert asked and not [one for one in asked if one not in shims]
    assert not [one for one in imported if one.startswith("cu")], "the runtime is linked in, the driver looked up"
    dynamic = tool("readelf", "-d", library)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert "libtorch_cpu.so" in needed and "RPATH" not in dynamic and "RUNPATH" not in dynamic
    assert not [one for one in needed if re.search(r"^lib(cuda|nv)|c10|python|torch(?!_cpu\.so)", one)]
    held, paths = library.read_bytes(), (Path(torch.__file__).parent, Path(fastcaps.__file__).parents[1])
    assert not [path for path in paths if str(path).encode() in held]  # of the machine that built it


@either
def test_a_library_gives_away_its_c_interface_alone(name: str, request: pytest.FixtureRequest) -> None:
    lines = tool("nm", "-D", "--defined-only", request.getfixturevalue(f"{name}_library")).splitlines()
    strong = {line.split()[-1] for line in lines if line.split()[-2] not in "VWuw"}
    strong -= {"_end", "_edata", "__bss_start"}
    assert strong == {f"fastcaps_{one}" for one in EXPORTED[name]}  # and no mangled name of C++


def test_wide_registers_are_used_in_the_wide_levels_only(native_library: Path, levels: list[str]) -> None:
    """An inline function compiled for AVX-512 and kept by the linker for all would stop older processors."""
    users: dict[str, set[str]] = {"ymm": set(), "zmm": set()}
    function = ""
    disassembled = tool("objdump", "-d", "--no-show-raw-insn", native_library)
    for found in re.finditer(r"^.*>:$|%([yz]mm)", disassembled, re.MULTILINE):
        if width := found[1]:
            users[width].add(function)
        else:
            function = found[0]
    assert bool(users["zmm"]) == ("avx512" in levels) and not [one for one in users["zmm"] if "avx512" not in one]
    wide = [one for one in users["ymm"] if "avx2" not in one and "avx512" not in one]
    assert bool(users["ymm"]) == (levels != ["default"]) and not wide


def test_the_cuda_library_loads_beside_this_torch_and_registers_its_ops(cuda_library: Path) -> None:
    """In a separate process: on a CPU torch the package itself does not load it."""
    code = """if True:
        import torch, fastcaps
        from fastcaps import libraries, ops
        library, info = libraries.library("cuda"), libraries.native_build_info()["cuda"]
        assert not library.problem, library.problem
        assert library.ask("fastcaps_cuda_toolkit") == info["toolkit"]
        assert library.ask("fastcaps_cuda_architectures").split(",") == info["architectures"]
        for routing in ops.ROUTINGS:
            for name in (routing.name, routing.name + "_backward"):
                assert torch._C._dispatch_has_kernel_for_dispatch_key("fastcaps_cuda::" + name, "CUDA"), name
        try:
            x = torch.zeros(1, 1, 1, 1, 1, 1)
            votes = (x, x[0, 0], None, None, 1, [1] * 8)
            torch.ops.fastcaps_cuda.attention_routing(*votes, None, None, None, 1.0, 0.0, 1, 1, 0)
        except (RuntimeError, NotImplementedError) as error:
            assert "fastcaps_cuda::attention_routing" in str(error)
        else:
            raise SystemExit("tensors on the CPU were taken")
    """
    assert (done := python(code)).returncode == 0, done.stderr


def test_the_cuda_library_says_what_it_cannot_take(cuda_library: Path) -> None:
    """Through ctypes, without torch's loader: neither asks for a device."""
    handle = ctypes.CDLL(str(cuda_library))
    handle.fastcaps_cuda_refusal.restype = handle.fastcaps_cuda_routing_refusal.restype = ctypes.c_char_p
    assert handle.fastcaps_cuda_refusal(b"attention", *(ctypes.c_int64(n) for n in (4, 4, 4, 1))) == b""
    assert b"512" in handle.fastcaps_cuda_refusal(b"attention", *(ctypes.c_int64(n) for n in (30, 30, 30, 1)))
    # tsai-c10-conv1 at batch 128 on a device of 132 multiprocessors and 227 KB of shared memory
    sizes = (ctypes.c_int64 * 19)(128, 16, 16, 32, 4, 4, 7, 7, 32, 4, 288, 3, 3, 2, 2, 0, 0, 1, 1)
    for iterations, element, options in ((1, 0, 0), (3, 0, 2), (3, 2, 0), (16, 0, 0)):
        facts = (ctypes.c_int64 * 8)(0, element, 0, 1, iterations, options, 132, 227 << 10)
        assert handle.fastcaps_cuda_routing_refusal(b"attention", sizes, facts) == b""
    facts = (ctypes.c_int64 * 8)(0, 0, 0, 1, 17, 0, 132, 227 << 10)
    assert b"its 17 iterations" in handle.fastcaps_cuda_routing_refusal(b"attention", sizes, facts)


def test_the_cuda_library_holds_code_for_the_architectures_it_names(
    info: dict[str, Any], cuda_library: Path, nvcc: Path
) -> None:
    named = info["cuda"]["architectures"]
    found = set(re.findall(r"\.sm_(\d+[af]?)\.cubin", tool("cuobjdump", "--list-elf", cuda_library)))
    assert found == {one.removesuffix("-real") for one in named} and all(
        re.fullmatch(r"\d+[af]?(-real)?", n) for n in named
    )
    assert str(nvcc.resolve().parents[1]).encode() not in cuda_library.read_bytes()


@pytest.mark.parametrize(
    ("built", "device", "serves"),
    [
        ("80-real", (8, 6), True),
        ("86-real", (8, 0), False),
        ("90-real", (10, 0), False),
        ("90-virtual", (12, 0), True),
        ("90a", (10, 0), False),
        ("100f-real", (10, 3), True),
        ("80-real,90-real,100-real,120", (12, 1), True),
    ],
)
def test_which_devices_code_serves(built: str, device: tuple[int, int], serves: bool) -> None:
    problem = libraries.architecture_problem(built, device)
    assert (problem == "") == serves
    assert serves or f"the device has {device[0]}.{device[1]}" in problem


# ---- registers and memory, by tools/static_report.py -----------------------------------------------------------------

LIBRARY = libraries.library_path("cuda")
NO_TOOL = "" if static_report.tool("cuobjdump") else "no cuobjdump: neither a CUDA toolkit that has it nor Triton"
NO_LIBRARY = "" if LIBRARY.is_file() else "the CUDA kernels are not built"


@pytest.mark.skipif(bool(NO_TOOL or NO_LIBRARY), reason=NO_TOOL or NO_LIBRARY)
def test_no_specialised_kernel_of_the_library_spills() -> None:
    found = static_report.collect([LIBRARY])
    assert {"FixedPose<4, 4, 4", "FixedPose<8, 8, 8", "TensorPose1x64", "FreePose"} <= {
        pose for one in found for pose in re.findall(r"FixedPose<\d+, \d+, \d+|TensorPose1x64|FreePose", one.name)
    }
    assert not static_report.spilled(found)
    loops = static_report.lean_loops(LIBRARY)
    attention = [kernel for kernel, *_ in loops if "Attention" in kernel]
    assert len(attention) >= 2 * len({*attention}), "of one warp, and of several that share parents"
    assert any("Gaussian" in kernel for kernel, *_ in loops)
    of_32_parents = "forward<AttentionForward, FixedPose<4, 4, 4, 4, 4, 1, 16, 2, 20, false>, 2, true,"
    wrong = [one for one in loops if one[2] > (3 if one[0].startswith(of_32_parents) and one[1] > 600 else 0)]
    assert not wrong, wrong


def test_what_a_native_library_is_asked_it_answers() -> None:
    """A name that it does not have would be answered by None, and nobody would notice."""
    sources = "".join(path.read_text() for kind in ("*.cu", "*.cpp", "*.in") for path in (ROOT / "csrc").rglob(kind))
    paths = [path for room in ("fastcaps", "tools", "bench") for path in (ROOT / room).rglob("*.py")]
    asked = {name for path in paths for name in re.findall(r'\bask\(\s*f?"([^"]*)"', path.read_text())}
    assert "fastcaps_cuda_schedule" in asked and not [name for name in asked if f" {name}(" not in sources]
