"""The CUDA library: what it holds, needs and gives away, on machines without a GPU."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastcaps
from fastcaps import libraries

# ---- the library -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(cuda_library: Path) -> Path:
    return cuda_library


@pytest.fixture(scope="module")
def info(library: Path) -> dict:
    """What the build says of its CUDA kernels."""
    return importlib.import_module("fastcaps._C").build_info()["cuda"]


def tool(name: str, *arguments: str | Path) -> str:
    """Output of a program of binutils or of the toolkit."""
    program = shutil.which(name) or shutil.which(f"/usr/local/cuda/bin/{name}")
    if sys.platform != "linux" or program is None:
        pytest.skip(f"needs {name}")
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def test_the_build_says_whether_it_has_cuda_and_why_not(native_library: Path) -> None:
    told = importlib.import_module("fastcaps._C").build_info()
    assert (told["cuda"] is None) == bool(told["cuda_why_not"])
    assert libraries.library_path("cuda").is_file() == (told["cuda"] is not None)


def test_build_info_of_cuda(info: dict) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", info["toolkit"]) and int(info["toolkit"].split(".")[0]) >= 12
    assert info["architectures"] and all(re.fullmatch(r"\d+[af]?(-real)?", name) for name in info["architectures"])
    assert "-std=c++20" in info["flags"] and "fast_math" not in info["flags"]


def test_the_library_loads_beside_this_torch_and_registers_its_ops(info: dict, library: Path) -> None:
    """In a process of its own: on a CPU torch the package itself does not load it."""
    code = f"""if True:
        import torch, fastcaps
        from fastcaps import libraries, ops
        library = libraries.library("cuda")
        assert not library.problem, library.problem
        assert library.ask("fastcaps_cuda_toolkit") == {info["toolkit"]!r}
        assert library.ask("fastcaps_cuda_architectures").split(",") == {info["architectures"]!r}
        for op in (*(routing.name for routing in ops.ROUTINGS), "squash_sum"):
            for name in (op, op + "_backward"):
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
    path = str(Path(fastcaps.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_library_says_what_it_cannot_take_and_how_it_would_cut_a_call(library: Path) -> None:
    """Through ctypes, without torch's loader: neither asks for a device."""
    handle = ctypes.CDLL(str(library))
    handle.fastcaps_cuda_refusal.restype = handle.fastcaps_cuda_schedule.restype = ctypes.c_char_p
    assert handle.fastcaps_cuda_refusal(b"attention", *(ctypes.c_int64(n) for n in (4, 4, 4, 1))) == b""
    assert handle.fastcaps_cuda_refusal(b"squash_sum", *(ctypes.c_int64(1) for _ in range(4))) == b""
    assert b"512" in handle.fastcaps_cuda_refusal(b"attention", *(ctypes.c_int64(n) for n in (30, 30, 30, 1)))
    # tsai-c10-conv1 at batch 128 on a device of 132 multiprocessors and 227 KB of shared memory
    sizes = (ctypes.c_int64 * 19)(128, 16, 16, 32, 4, 4, 7, 7, 32, 4, 288, 3, 3, 2, 2, 0, 0, 1, 1)
    for backward, element, options in ((0, 0, 0), (1, 0, 0), (1, 0, 1), (0, 0, 2), (0, 2, 0)):
        facts = (ctypes.c_int64 * 8)(backward, element, 0, 1, 1, options, 132, 227 << 10)
        told = handle.fastcaps_cuda_schedule(b"attention", sizes, facts).decode()
        assert "4x4" in told and "threads=" in told and "blocks=" in told


def test_the_library_needs_torch_cpu_alone_and_no_path(library: Path, nvcc: Path) -> None:
    dynamic = tool("readelf", "-d", library)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert "libtorch_cpu.so" in needed and "RPATH" not in dynamic and "RUNPATH" not in dynamic
    assert not [name for name in needed if re.match(r"lib(cuda|torch_cuda|c10|torch_python|nv)", name)]
    contents = library.read_bytes()
    paths = {str(Path(torch.__file__).parent), str(Path(fastcaps.__file__).parents[1]), str(nvcc.resolve().parents[1])}
    assert not [path for path in paths if path.encode() in contents]


def test_the_library_gives_away_its_c_interface_alone(library: Path) -> None:
    lines = tool("nm", "-D", "--defined-only", library).splitlines()
    strong = {line.split()[-1] for line in lines if line.split()[-2] not in "VWuw"} - {"_end", "_edata", "__bss_start"}
    asked = {"toolkit", "architectures", "refusal", "routing_refusal", "schedule", "kernels"}
    assert strong == {f"fastcaps_cuda_{name}" for name in asked}, "the CUDA runtime's own symbols must stay inside"


def test_the_library_imports_torchs_stable_c_interface_alone(library: Path) -> None:
    imported = [line.split()[-1] for line in tool("nm", "-D", "--undefined-only", library).splitlines()]
    assert not [name for name in imported if re.match(r"_ZN?K?[STVI]*N?K?(2at|3c10|5torch|6caffe2)", name)]
    assert not [name for name in imported if name.startswith("cu")], "the runtime is linked in, the driver looked up"


def test_the_library_holds_code_for_the_architectures_it_names(info: dict, library: Path) -> None:
    listed = tool("cuobjdump", "--list-elf", library)
    found = set(re.findall(r"\.sm_(\d+[af]?)\.cubin", listed))
    assert found == {name.removesuffix("-real") for name in info["architectures"]}


# ---- which devices an architecture serves ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("built", "device", "serves"),
    [
        ("90-real", (9, 0), True),
        ("80-real", (8, 6), True),
        ("86-real", (8, 0), False),
        ("90-real", (10, 0), False),
        ("90", (10, 0), True),
        ("90-virtual", (12, 0), True),
        ("90a-real", (9, 0), True),
        ("90a", (10, 0), False),
        ("100f-real", (10, 3), True),
        ("80-real,90-real,100-real,120", (7, 5), False),
        ("80-real,90-real,100-real,120", (12, 1), True),
    ],
)
def test_which_devices_code_serves(built: str, device: tuple[int, int], serves: bool) -> None:
    problem = libraries.architecture_problem(built, device)
    assert (problem == "") == serves
    assert serves or f"the device has {device[0]}.{device[1]}" in problem
