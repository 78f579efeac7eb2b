"""The CUDA half of the build: what setup.py decides, and what the library holds, on machines without a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from test_build import load_setup

import fastcaps
from fastcaps import libraries


@pytest.fixture(scope="module")
def setup_py() -> ModuleType:
    return load_setup()


# ---- finding a toolkit -----------------------------------------------------------------------------------------------


def make_nvcc(folder: Path, version: str = "12.6", architectures: tuple[int, ...] = (75, 80, 86, 89, 90)) -> Path:
    """A program that answers as nvcc does when it is asked what it is."""
    nvcc = folder / "bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    known = "".join(f"compute_{number}\\n" for number in architectures)
    nvcc.write_text(
        f"#!/bin/sh\ncase $1 in --version) echo 'Cuda compilation tools, release {version}, V{version}.77';;\n"
        f"--list-gpu-arch) printf '{known}';; esac\n"
    )
    nvcc.chmod(0o755)
    return nvcc


@pytest.fixture
def no_usual_toolkit(setup_py: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without /usr/local/cuda, whatever this one has."""
    monkeypatch.setattr(setup_py, "USUAL_CUDA", tmp_path / "none")
    monkeypatch.setattr(setup_py.sys, "platform", "linux")


linux_only = pytest.mark.skipif(sys.platform == "win32", reason="runs shell scripts")


@linux_only
@pytest.mark.parametrize("place", ["CUDACXX", "CUDA_HOME", "CUDA_PATH", "usual", "PATH"])
def test_a_toolkit_is_found(
    setup_py: ModuleType, no_usual_toolkit: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    nvcc = make_nvcc(tmp_path / "toolkit")
    environ = {"PATH": "/none"}
    if place == "usual":
        monkeypatch.setattr(setup_py, "USUAL_CUDA", tmp_path / "toolkit")
    else:
        environ[place] = str({"CUDACXX": nvcc, "PATH": nvcc.parent}.get(place, tmp_path / "toolkit"))
    cuda = setup_py.cuda_build(environ)
    assert (cuda.nvcc, cuda.version, cuda.why_not) == (nvcc, "12.6", "")
    assert cuda.architectures == ("80-real", "90")
    assert setup_py.cuda_build({**environ, "FASTCAPS_CUDA": "1"}) == cuda
    left_out = setup_py.cuda_build({**environ, "FASTCAPS_CUDA": "0"})
    assert left_out.nvcc is None and left_out.why_not == "FASTCAPS_CUDA=0 when it was built"


def test_without_a_toolkit_there_are_no_cuda_kernels_unless_they_are_asked_for(
    setup_py: ModuleType, no_usual_toolkit: None, tmp_path: Path
) -> None:
    environ = {"PATH": "/none", "CUDA_HOME": str(tmp_path / "empty")}
    cuda = setup_py.cuda_build(environ)
    assert cuda.nvcc is None and cuda.why_not == "no CUDA toolkit when it was built"
    with pytest.raises(setup_py.SetupError) as caught:
        setup_py.cuda_build({**environ, "FASTCAPS_CUDA": "1"})
    for looked in (
        "FASTCAPS_CUDA=1",
        "CUDACXX (not set)",
        "CUDA_HOME (no nvcc)",
        "CUDA_PATH (not set)",
        "PATH (no nvcc)",
    ):
        assert looked in str(caught.value)
    with pytest.raises(setup_py.SetupError, match="FASTCAPS_CUDA must be 0 or 1, got 'yes'"):
        setup_py.cuda_build({"FASTCAPS_CUDA": "yes"})


@linux_only
def test_an_old_toolkit_is_passed_over_and_named(setup_py: ModuleType, no_usual_toolkit: None, tmp_path: Path) -> None:
    old, recent = make_nvcc(tmp_path / "old", "11.8"), make_nvcc(tmp_path / "recent", "13.0")
    environ = {"CUDA_HOME": str(tmp_path / "old"), "PATH": str(recent.parent)}
    assert setup_py.cuda_build(environ).nvcc == recent
    with pytest.raises(setup_py.SetupError, match=r"CUDA_HOME \(nvcc 11\.8\)"):
        setup_py.cuda_build({**environ, "PATH": "/none", "FASTCAPS_CUDA": "1"})
    for wrong in (old, tmp_path / "none"):
        with pytest.raises(setup_py.SetupError, match=r"CUDACXX=.* must name an nvcc of CUDA 12\.4 or later"):
            setup_py.cuda_build({"CUDACXX": str(wrong)})


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ("", ["80-real", "90-real", "100-real", "120"]),
        (" ", ["80-real", "90-real", "100-real", "120"]),
        ("9.0", ["90-real"]),
        ("8.0;9.0+PTX", ["80-real", "90"]),
        ("8.0 9.0a, 12.0", ["80-real", "90a-real", "120-real"]),
        ("10.0f+PTX", ["100f"]),
        ("9.0 9.0+PTX", ["90"]),
        ("Hopper;Ampere", ["90", "80-real", "86"]),
        ("7.0;7.5+PTX;8.0", ["80-real"]),
        ("7.5", []),
    ],
)
def test_architectures_are_written_as_for_torch(setup_py: ModuleType, asked: str, chosen: list[str]) -> None:
    assert list(setup_py.cuda_architectures(asked, [75, 80, 86, 90, 100, 120])) == chosen


def test_default_architectures_go_as_far_as_the_toolkit(setup_py: ModuleType) -> None:
    assert setup_py.cuda_architectures("", [80, 90]) == ("80-real", "90")
    for wrong, says in (
        ("sm_90", "'sm_90' is not an architecture"),
        ("8.0;10.0", "does not know 10.0; it knows 8.0, 9.0"),
    ):
        with pytest.raises(setup_py.SetupError, match=says):
            setup_py.cuda_architectures(wrong, [75, 80, 90])


@linux_only
def test_a_list_without_a_usable_architecture_leaves_cuda_out(
    setup_py: ModuleType, no_usual_toolkit: None, tmp_path: Path
) -> None:
    environ = {"CUDACXX": str(make_nvcc(tmp_path / "toolkit")), "TORCH_CUDA_ARCH_LIST": "7.0;7.5"}
    assert "'7.0;7.5' held no architecture of 8.0 or later" in setup_py.cuda_build(environ).why_not
    with pytest.raises(setup_py.SetupError, match="held no architecture"):
        setup_py.cuda_build({**environ, "FASTCAPS_CUDA": "1"})


# ---- the library -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def info(setup_py: ModuleType) -> dict:
    """What the build says of its CUDA kernels. Where a toolkit is there and they are not, that is an error in CI."""
    if importlib.util.find_spec("fastcaps._C") is None:
        pytest.skip("fastcaps is installed without its native libraries")
    told = importlib.import_module("fastcaps._C").build_info()
    if told["cuda"] is None:
        left_out = os.environ.get("CI") and setup_py.cuda_build().nvcc
        (pytest.fail if left_out else pytest.skip)(f"no CUDA library: {told['cuda_why_not']}")
    return told["cuda"]


@pytest.fixture(scope="module")
def library(info: dict) -> Path:
    return libraries.library_path("cuda")


def tool(name: str, *arguments: str | Path) -> str:
    """Output of a program of binutils or of the toolkit."""
    program = shutil.which(name) or shutil.which(f"/usr/local/cuda/bin/{name}")
    if sys.platform != "linux" or program is None:
        pytest.skip(f"needs {name}")
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def test_the_build_says_whether_it_has_cuda_and_why_not() -> None:
    if importlib.util.find_spec("fastcaps._C") is None:
        pytest.skip("fastcaps is installed without its native libraries")
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
        for name in library.ask("fastcaps_cuda_ops").split(","):
            own = getattr(torch.ops.fastcaps_cuda, name).default
            assert torch._C._dispatch_has_kernel_for_dispatch_key("fastcaps_cuda::" + name, "CUDA")
            # the schema of the public op, and the options after it
            public = getattr(ops, name)._schema
            told, wanted = ([(a.name, str(a.type)) for a in s.arguments] for s in (own._schema, public))
            if name.endswith("_pass"):  # frozen coefficients are the backward's affair
                wanted = [argument for argument in wanted if argument[0] != "frozen"]
            assert told == [*wanted, ("options", "int")]
            assert [str(r.type) for r in own._schema.returns] == [str(r.type) for r in public.returns]
        try:
            x = torch.zeros(1, 1, 1, 1, 1, 1)
            torch.ops.fastcaps_cuda.attention_pass(x, x[0, 0], *[None] * 5, 1.0, 0.0, False, [1] * 8, 0)
        except RuntimeError as error:
            assert "fastcaps_cuda::attention_pass" in str(error)
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
    handle.fastcaps_cuda_refusal.restype = handle.fastcaps_cuda_plan.restype = ctypes.c_char_p
    refusal = handle.fastcaps_cuda_refusal
    numbers = [ctypes.c_int64(n) for n in (4, 4, 4)]
    assert refusal(*numbers) == b""
    assert b"512" in refusal(*(ctypes.c_int64(n) for n in (30, 30, 30)))
    # tsai-c10-conv1 at batch 128 on a device of 132 multiprocessors and 227 KB of shared memory
    geometry = (ctypes.c_int64 * 19)(128, 16, 16, 32, 4, 4, 7, 7, 32, 4, 288, 3, 3, 2, 2, 0, 0, 1, 1)
    for backward, options, half in ((0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 2, 0), (0, 0, 1)):
        numbers = (ctypes.c_int64(n) for n in (backward, options, half, 132, 227 << 10))
        told = handle.fastcaps_cuda_plan(geometry, *numbers).decode()
        assert "4x4" in told and "threads" in told and "blocks" in told


def test_the_library_needs_torch_cpu_alone_and_no_path(library: Path, setup_py: ModuleType) -> None:
    dynamic = tool("readelf", "-d", library)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert "libtorch_cpu.so" in needed and "RPATH" not in dynamic and "RUNPATH" not in dynamic
    assert not [name for name in needed if re.match(r"lib(cuda|torch_cuda|c10|torch_python|nv)", name)]
    contents = library.read_bytes()
    nvcc = setup_py.cuda_build({**os.environ, "FASTCAPS_CUDA": ""}).nvcc
    paths = {str(Path(torch.__file__).parent), str(Path(fastcaps.__file__).parents[1])}
    paths |= {str(nvcc.resolve().parents[1])} if nvcc else set()
    assert not [path for path in paths if path.encode() in contents]


def test_the_library_gives_away_its_c_interface_alone(library: Path) -> None:
    lines = tool("nm", "-D", "--defined-only", library).splitlines()
    strong = {line.split()[-1] for line in lines if line.split()[-2] not in "VWuw"} - {"_end", "_edata", "__bss_start"}
    asked = {"toolkit", "architectures", "ops", "refusal", "plan", "routing_refusal"}
    asked |= {f"{stem}_{what}" for stem in ("pooling", "gaussian") for what in ("refusal", "plan")}
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
