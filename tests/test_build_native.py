"""The native library: what it was made with, what it chooses, what it needs and gives away."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fastcaps

X86 = platform.machine().lower() in ("x86_64", "amd64")
LEVELS = ["default", "avx2", "avx512"] if X86 else ["default"]


@pytest.fixture(scope="module")
def native(native_library: Path) -> ModuleType:
    """fastcaps._C."""
    return importlib.import_module("fastcaps._C")


@pytest.fixture(scope="module")
def library(native_library: Path) -> Path:
    return native_library


def tool(name: str, *arguments: str | Path) -> str:
    """Output of one of binutils' programs."""
    if sys.platform != "linux" or shutil.which(name) is None:
        pytest.skip(f"needs {name}")
    return subprocess.run([name, *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def python(code: str, **environ: str) -> subprocess.Popen[str]:
    """Start `code` in a fresh interpreter, with the fastcaps under test."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(fastcaps.__file__).parents[1]), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_build_info_says_what_was_built(native: ModuleType) -> None:
    info = native.build_info()
    assert info["version"] == fastcaps.__version__
    assert info["stable_abi_target"] == "2.10"
    assert re.match(r"(GNU|Clang|AppleClang) \d+\.\d+", info["compiler"])
    assert tuple(map(int, info["torch_version"].split(".")[:2])) >= (2, 10)
    assert "-O3" in info["flags"] and "-std=c++20" in info["flags"]
    assert list(info["level_flags"]) == sorted(LEVELS)


def test_no_flag_ties_the_library_to_a_machine_or_breaks_nan(native: ModuleType) -> None:
    info = native.build_info()
    flags = " ".join([info["flags"], *info["level_flags"].values()])
    for wrong in ("-march", "-mtune", "-mcpu", "-ffast-math", "-Ofast", "-ffinite-math-only", "-fassociative-math"):
        assert wrong not in flags
    assert info["level_flags"]["default"] == ""


def test_every_op_has_a_kernel_and_every_level_is_built(native: ModuleType) -> None:
    assert native.capabilities_built() == LEVELS
    assert native.capability() in LEVELS
    for routing in fastcaps.ops.ROUTINGS:
        for op in (routing.name, f"{routing.name}_backward"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fastcaps_cpu::{op}", "CPU")


def processor_has(level: str) -> bool:
    """What the operating system says of this processor, independently of the library."""
    if level == "default":
        return True
    flags = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE).group(1).split())  # type: ignore[union-attr]
    return {"avx2": {"avx2", "fma"}, "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"}}[level] <= flags


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")
def test_a_level_can_be_forced_by_the_environment(native: ModuleType) -> None:
    code = """if True:
        import torch, fastcaps
        from fastcaps import _C
        try:
            print(_C.capability())
        except ValueError as error:
            print("refused", error)
            raise SystemExit
        torch.manual_seed(0)
        tensors = [torch.randn(s) for s in ((3, 40, 4, 4), (40, 10, 4, 4), (3, 10, 4, 4))]
        with fastcaps.backend("cpu"):
            got = fastcaps.functional.inverted_attention_routing(*tensors)
        with fastcaps.backend("reference"):
            want = fastcaps.functional.inverted_attention_routing(*[t.double() for t in tensors])
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    """
    started = {level: python(code, FASTCAPS_CPU_CAPABILITY=level) for level in [*LEVELS, "sse9"]}
    for level, process in started.items():
        out, err = process.communicate()
        assert process.returncode == 0, err
        if level in LEVELS and processor_has(level):
            assert out.split() == [level]
        else:
            assert out.startswith("refused") and "FASTCAPS_CPU_CAPABILITY" in out and ",".join(LEVELS) in out


def test_without_force_the_highest_level_of_the_processor_is_chosen(native: ModuleType) -> None:
    if sys.platform != "linux" or os.environ.get("FASTCAPS_CPU_CAPABILITY"):
        pytest.skip("reads /proc/cpuinfo, with no level forced")
    assert native.capability() == [level for level in LEVELS if processor_has(level)][-1]


def test_only_torchs_stable_c_interface_is_imported(library: Path) -> None:
    imported = [line.split()[-1] for line in tool("nm", "-D", "--undefined-only", library).splitlines()]
    cpp = [name for name in imported if re.match(r"_ZN?K?[STVI]*N?K?(2at|3c10|5torch|6caffe2)", name)]
    assert not cpp, "C++ symbols of torch change between its versions"
    assert [name for name in imported if name.startswith(("aoti_torch_", "torch_"))], (
        "the check must see torch's symbols"
    )
    header = (Path(torch.__file__).parent / "include/torch/csrc/stable/c/shim.h").read_text()
    shims = header + "".join(
        p.read_text() for p in (Path(torch.__file__).parent / "include/torch/csrc/inductor").rglob("*.h")
    )
    unknown = [n for n in imported if n.startswith(("aoti_torch_", "torch_")) and n.split("@")[0] not in shims]
    assert not unknown


def test_the_libraries_need_torch_cpu_alone_and_no_path(native: ModuleType, library: Path) -> None:
    dynamic = tool("readelf", "-d", library)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert "libtorch_cpu.so" in needed
    assert not [
        name for name in needed if ("torch" in name and name != "libtorch_cpu.so") or "c10" in name or "python" in name
    ]
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic
    module = tool("readelf", "-d", native.__file__ or "")
    assert re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", module) == ["$ORIGIN/lib"]
    assert not [name for name in re.findall(r"\(NEEDED\).*\[(.*)\]", module) if "torch" in name]


def test_only_the_c_interface_is_exported(library: Path) -> None:
    lines = tool("nm", "-D", "--defined-only", library).splitlines()
    strong = {line.split()[-1] for line in lines if line.split()[-2] not in "VWuw"} - {
        "_end",
        "_edata",
        "__bss_start",
    }  # some linkers
    asked = {"capability", "capabilities_built", "cpu_schedule", "cpu_python", "cpu_raise", "multiply_adds"}
    assert strong == {f"fastcaps_{name}" for name in asked}


@pytest.mark.skipif(not X86, reason="one level only")
def test_wide_registers_are_used_in_the_wide_levels_only(library: Path) -> None:
    """An inline function compiled for AVX-512 and kept by the linker for all would stop older processors."""
    users: dict[str, set[str]] = {"ymm": set(), "zmm": set()}
    function = ""
    for line in tool("objdump", "-d", "--no-show-raw-insn", library).splitlines():
        if line.endswith(">:"):
            function = line
        elif "%ymm" in line or "%zmm" in line:
            users["zmm" if "%zmm" in line else "ymm"].add(function)
    assert users["zmm"] and not [name for name in users["zmm"] if "avx512" not in name]
    assert users["ymm"] and not [name for name in users["ymm"] if "avx2" not in name and "avx512" not in name]
