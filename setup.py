"""Build fastcaps: find the torch that is already installed, then let CMake do the rest.

CMakeLists.txt alone lists native sources and flags. Nothing is downloaded here, and torch is never imported: its
directory, version and headers are all a build needs, so a build in pip's isolated environment works with the torch of
the environment that fastcaps is being installed into.

Environment
-----------
FASTCAPS_BUILD=0        install the Python files only; the reference implementation serves
FASTCAPS_TORCH_DIR      the torch package to build against (``.../site-packages/torch`` or the folder that holds it)
FASTCAPS_CUDA=0|1       never, or by all means, build the CUDA kernels (default: if a CUDA toolkit is found)
CUDACXX, CUDA_HOME      where nvcc is (CUDA_PATH, /usr/local/cuda and PATH are searched too)
TORCH_CUDA_ARCH_LIST    what the CUDA kernels are compiled for, as torch writes it (default: 8.0;9.0;10.0;12.0+PTX)
MAX_JOBS                number of compiler processes (default: from cores and free memory)
CMAKE_ARGS              further arguments for CMake's configure step
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import ExecError, SetupError

ROOT = Path(__file__).resolve().parent
OLDEST_TORCH = (2, 10)  # the stable ABI that CMakeLists.txt targets
STABLE_HEADER = Path("include/torch/csrc/stable/library.h")
GIB_PER_JOB = 1.5  # what one compiler process may need for the kernels' templates
OLDEST_NVCC = (12, 4)
USUAL_CUDA = Path("/usr/local/cuda")
LEAST_ARCHITECTURE = 80  # cp.async and bfloat16
DEFAULT_ARCHITECTURES = "8.0;9.0;10.0;12.0+PTX"  # as far as nvcc knows them
ARCHITECTURE_NAMES = {
    "ampere": "8.0;8.6+PTX",
    "ada": "8.9+PTX",
    "hopper": "9.0+PTX",
    "blackwell": "10.0;12.0+PTX",
}


class NoTorch(SetupError):
    """No usable torch was found; the message says where it was looked for and what to do."""


@dataclass(frozen=True)
class Torch:
    """An installed torch package: where it lies, and the version that it states."""

    root: Path
    version: str


def torch_version(root: Path) -> str | None:
    """Read ``torch/version.py`` without running it; None where `root` is not an installed torch."""
    try:
        text = (root / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^__version__[^=]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found.group(1) if found else None


def unusable(root: Path) -> str | None:
    """Why the package at `root` cannot be built against; None where it can."""
    version = torch_version(root)
    if version is None:
        return "no torch package"
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_TORCH:
        return f"torch {version} is older than {'.'.join(map(str, OLDEST_TORCH))}"
    if not (root / STABLE_HEADER).is_file():
        return f"torch {version} without its C++ headers ({STABLE_HEADER})"
    if not any((root / "lib" / name).is_file() for name in ("libtorch_cpu.so", "libtorch_cpu.dylib")):
        return f"torch {version} without libtorch_cpu"
    return None


def environment_sites(prefix: str | os.PathLike[str]) -> list[Path]:
    """The site-packages folders of the environment at `prefix` (any CPython 3: the native library uses no Python)."""
    base = {"base": str(prefix), "platbase": str(prefix)}
    own = [sysconfig.get_path(key, vars=base) for key in ("purelib", "platlib")]
    folders = [Path(folder) for folder in [*own, *site.getsitepackages([str(prefix)])]]
    folders += sorted(Path(prefix).glob("lib/python3*/site-packages"))
    return list(dict.fromkeys(folders))


def torch_candidates(environ: Mapping[str, str], path: list[str]) -> Iterator[Path]:
    """Places where the target environment's torch may lie, best first.

    An isolated build replaces ``sys.path`` (and pip sets PYTHONNOUSERSITE), but the interpreter is still the target's,
    so its prefix leads there. uv instead makes a temporary environment; what remains then is the environment that the
    user activated, the project's own ``.venv`` and the base interpreter.
    """
    spec = importlib.machinery.PathFinder.find_spec("torch", path)
    if spec is not None and spec.origin:
        yield Path(spec.origin).parent
    prefixes = [sys.prefix, sys.exec_prefix]
    prefixes += [
        environ[name] for name in ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT", "CONDA_PREFIX") if environ.get(name)
    ]
    # A virtual environment's bin is on PATH when it is activated, whatever a build front end did to the variables.
    for folder in environ.get("PATH", "").split(os.pathsep):
        if folder and (Path(folder).parent / "pyvenv.cfg").is_file():
            prefixes.append(str(Path(folder).parent))
    prefixes += [environ["PWD"] + "/.venv"] if environ.get("PWD") else []
    prefixes += [str(ROOT / ".venv"), sys.base_prefix, sys.base_exec_prefix]
    for prefix in dict.fromkeys(prefixes):
        for folder in environment_sites(prefix):
            yield folder / "torch"
    yield Path(site.getusersitepackages()) / "torch"


def find_torch(environ: Mapping[str, str] = os.environ, path: list[str] | None = None) -> Torch:
    """Find the torch to build against, without importing it.

    Raises
    ------
    NoTorch
        If none is there, or none is recent enough; if FASTCAPS_TORCH_DIR names something else.
    """
    explicit = environ.get("FASTCAPS_TORCH_DIR")
    if explicit:
        given = Path(explicit).expanduser().resolve()
        for root in (given, given / "torch"):
            if unusable(root) is None:
                return Torch(root, torch_version(root) or "")
        reason = unusable(given / "torch" if torch_version(given) is None else given)
        raise NoTorch(f"FASTCAPS_TORCH_DIR={explicit}: {reason}")
    seen: dict[Path, str] = {}
    for root in torch_candidates(environ, sys.path if path is None else path):
        if root in seen:
            continue
        reason = unusable(root)
        if reason is None:
            return Torch(root.resolve(), torch_version(root) or "")
        seen[root] = reason
    where = "\n".join(f"  {root}: {reason}" for root, reason in seen.items())
    raise NoTorch(
        f"fastcaps found no torch >= {'.'.join(map(str, OLDEST_TORCH))} to build its native library against.\n"
        "Install torch into this environment first (pip install torch), then install fastcaps again;\n"
        "or, if one is installed that this build does not see, name it: FASTCAPS_TORCH_DIR=.../site-packages/torch,\n"
        "or build inside the environment: pip install setuptools cmake ninja pybind11, then --no-build-isolation;\n"
        "or install without the native library: FASTCAPS_BUILD=0 pip install .\n"
        f"Looked in:\n{where}"
    )


def free_memory() -> int | None:
    """Bytes that may still be used: the machine's or the control group's, whichever is less; None where unknown."""
    amounts = []
    try:
        meminfo = Path("/proc/meminfo").read_text()
        found = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo, re.MULTILINE)
        amounts += [int(found.group(1)) * 1024] if found else []
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            amounts.append(int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return min(amounts) if amounts else None


def parallel_jobs(environ: Mapping[str, str] = os.environ) -> int:
    """Compiler processes to run: MAX_JOBS if set, else one a core as far as free memory carries them."""
    asked = environ.get("MAX_JOBS", "").strip()
    if asked:
        if not asked.isdigit() or int(asked) < 1:
            raise SetupError(f"MAX_JOBS must be a positive whole number, got {asked!r}")
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = free_memory()
    return cores if memory is None else max(1, min(cores, int(memory / (GIB_PER_JOB * 2**30))))


def native_build(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether to compile: FASTCAPS_BUILD is 1 unless it says 0."""
    value = environ.get("FASTCAPS_BUILD", "1").strip()
    if value not in ("", "0", "1"):
        raise SetupError(f"FASTCAPS_BUILD must be 0 or 1, got {value!r}")
    return value != "0"


@dataclass(frozen=True)
class Cuda:
    """The CUDA half of a build: nvcc and what it compiles for, or why there is none."""

    nvcc: Path | None = None
    version: str = ""
    architectures: tuple[str, ...] = ()  # as CMake writes them: 90-real is code for 9.0, 90 code and PTX
    why_not: str = ""


def answer(program: Path, argument: str) -> str:
    """What a program prints when asked; an empty string if it cannot be run."""
    try:
        return subprocess.run([str(program), argument], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def nvcc_version(nvcc: Path) -> tuple[int, int] | None:
    """The toolkit's version; None where there is no nvcc that runs."""
    found = re.search(r"release (\d+)\.(\d+)", answer(nvcc, "--version")) if nvcc.is_file() else None
    return (int(found.group(1)), int(found.group(2))) if found else None


def find_nvcc(environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """Find a CUDA compiler that is recent enough; if there is none, say what was looked at."""
    oldest = ".".join(map(str, OLDEST_NVCC))
    explicit = environ.get("CUDACXX", "").strip()
    if explicit:
        nvcc = Path(shutil.which(explicit, path=environ.get("PATH")) or explicit)
        version = nvcc_version(nvcc)
        if version is None or version < OLDEST_NVCC:
            raise SetupError(f"CUDACXX={explicit} must name an nvcc of CUDA {oldest} or later (or set FASTCAPS_CUDA=0)")
        return nvcc, ""
    places: dict[str, Path | None] = {}
    for name in ("CUDA_HOME", "CUDA_PATH"):
        places[name] = Path(environ[name]) / "bin/nvcc" if environ.get(name) else None
    places[str(USUAL_CUDA)] = USUAL_CUDA / "bin/nvcc"
    on_path = shutil.which("nvcc", path=environ.get("PATH", ""))
    places["PATH"] = Path(on_path) if on_path else None
    looked = ["CUDACXX (not set)"]
    for name, nvcc in places.items():
        version = nvcc_version(nvcc) if nvcc else None
        if nvcc and version and version >= OLDEST_NVCC:
            return nvcc, ""
        old = f"nvcc {version[0]}.{version[1]}" if version else "no nvcc"
        looked.append(f"{name} ({'not set' if nvcc is None and name in ('CUDA_HOME', 'CUDA_PATH') else old})")
    return None, f"no nvcc of CUDA {oldest} or later in {', '.join(looked)}"


def cuda_architectures(asked: str, supported: list[int]) -> tuple[str, ...]:
    """Translate a TORCH_CUDA_ARCH_LIST for CMake; an empty one is the default, as far as nvcc goes.

    ``8.0`` makes code for that architecture, ``9.0+PTX`` also what later ones translate for themselves. Architectures
    before 8.0, which lists made for other packages hold, are passed over; none may be left.

    Raises
    ------
    SetupError
        For what is not an architecture, and for one that this nvcc does not know.
    """
    entries: list[str] = []
    for entry in re.split(r"[;,\s]+", asked.strip()):
        entries += ARCHITECTURE_NAMES.get(entry.lower(), entry).split(";") if entry else []
    if not entries:
        known = [e for e in DEFAULT_ARCHITECTURES.split(";") if int(re.sub(r"\D", "", e)) in supported]
        entries = known and [*known[:-1], known[-1].removesuffix("+PTX") + "+PTX"]
    chosen: dict[str, bool] = {}
    for entry in entries:
        found = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", entry)
        if found is None:
            raise SetupError(f"TORCH_CUDA_ARCH_LIST={asked!r}: {entry!r} is not an architecture such as 9.0 or 9.0+PTX")
        number = int(found.group(1) + found.group(2))
        if number < LEAST_ARCHITECTURE:
            continue
        if number not in supported:
            names = ", ".join(f"{n // 10}.{n % 10}" for n in supported if n >= LEAST_ARCHITECTURE)
            raise SetupError(f"TORCH_CUDA_ARCH_LIST={asked!r}: this nvcc does not know {entry}; it knows {names}")
        name = f"{number}{found.group(3)}"
        chosen[name] = chosen.get(name, False) or bool(found.group(4))
    return tuple(name if with_ptx else f"{name}-real" for name, with_ptx in chosen.items())


def cuda_build(environ: Mapping[str, str] = os.environ) -> Cuda:
    """Whether and for what to build the CUDA kernels. A toolkit decides, never a visible GPU.

    Raises
    ------
    SetupError
        If FASTCAPS_CUDA=1 asks for them and no toolkit is there, or the list of architectures cannot be met.
    """
    value = environ.get("FASTCAPS_CUDA", "").strip()
    if value not in ("", "0", "1"):
        raise SetupError(f"FASTCAPS_CUDA must be 0 or 1, got {value!r}")
    if value == "0":
        return Cuda(why_not="FASTCAPS_CUDA=0 when it was built")
    if not sys.platform.startswith("linux"):
        if value == "1":
            raise SetupError("FASTCAPS_CUDA=1: the CUDA kernels are built on Linux only")
        return Cuda(why_not="the CUDA kernels are built on Linux only")
    nvcc, looked = find_nvcc(environ)
    if nvcc is None:
        if value == "1":
            raise SetupError(f"FASTCAPS_CUDA=1: {looked}.\nInstall a CUDA toolkit, or name its folder in CUDA_HOME.")
        return Cuda(why_not="no CUDA toolkit when it was built")
    supported = sorted({int(number) for number in re.findall(r"compute_(\d+)", answer(nvcc, "--list-gpu-arch"))})
    asked = environ.get("TORCH_CUDA_ARCH_LIST", "")
    architectures = cuda_architectures(asked, supported)
    if not architectures:
        why_not = f"TORCH_CUDA_ARCH_LIST={asked!r} held no architecture of 8.0 or later when it was built"
        if value == "1":
            raise SetupError(f"FASTCAPS_CUDA=1: {why_not.removesuffix(' when it was built')}")
        return Cuda(why_not=why_not)
    version = nvcc_version(nvcc) or OLDEST_NVCC
    return Cuda(nvcc, f"{version[0]}.{version[1]}", architectures)


def find_program(name: str) -> str:
    """CMake or Ninja: from the package of that name where it is installed, else from this environment's bin or PATH."""
    try:
        folder = getattr(__import__(name), "CMAKE_BIN_DIR" if name == "cmake" else "BIN_DIR", None)
    except ImportError:
        folder = None
    folders = [folder, sysconfig.get_path("scripts"), *os.environ.get("PATH", "").split(os.pathsep)]
    program = shutil.which(name, path=os.pathsep.join(str(folder) for folder in folders if folder))
    if program is None:
        raise ExecError(f"fastcaps needs {name} to build its native library: pip install {name}")
    return program


def pybind11_cmake_dir() -> str:
    """Where pybind11 keeps its CMake files."""
    try:
        import pybind11
    except ImportError:
        raise ExecError("fastcaps needs pybind11 to build its native library: pip install pybind11") from None
    return str(pybind11.get_cmake_dir())


class BuildNative(build_ext):
    """Configure, build and install with CMake; its install step puts the files into the package's folder."""

    def package_folder(self) -> Path:
        """The package being built: the source tree's own for an editable install, else the one under build_lib."""
        if self.inplace:
            return Path(self.get_finalized_command("build_py").get_package_dir("fastcaps")).resolve()
        return Path(self.build_lib).resolve() / "fastcaps"

    @functools.cached_property
    def cuda(self) -> Cuda:
        """Whether this build has CUDA kernels; asked once, since asking runs nvcc."""
        return cuda_build()

    def library(self, name: str) -> Path:
        """Where one of the libraries is installed."""
        suffix = ".dylib" if sys.platform == "darwin" else ".so"
        return self.package_folder() / f"lib/libfastcaps_{name}{suffix}"

    def get_outputs(self) -> list[str]:
        module = self.package_folder() / Path(self.get_ext_filename("_C")).name
        libraries = [self.library(name) for name in (["cpu", "cuda"] if self.cuda.nvcc else ["cpu"])]
        return [str(path) for path in [module, *libraries]]

    def get_output_mapping(self) -> dict[str, str]:
        return {}  # nothing is built elsewhere and copied over

    def get_source_files(self) -> list[str]:
        return []  # MANIFEST.in lists them

    def run(self) -> None:
        torch = find_torch()
        # Not build_temp: an editable install would make that a new temporary folder and so compile everything again.
        folder = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
        cmake, ninja, jobs = find_program("cmake"), find_program("ninja"), parallel_jobs()
        # What an earlier configuration found (another CXX, tools of a build environment that is gone) must not stay;
        # objects whose command is unchanged do.
        (folder / "CMakeCache.txt").unlink(missing_ok=True)
        for found in (folder / "CMakeFiles").glob("[0-9]*"):
            shutil.rmtree(found, ignore_errors=True)
        print(f"fastcaps: torch {torch.version} at {torch.root}; {jobs} jobs; build folder {folder}", flush=True)
        cuda = self.cuda
        found = f"{cuda.version} by {cuda.nvcc} for {', '.join(cuda.architectures)}" if cuda.nvcc else cuda.why_not
        print(f"fastcaps: CUDA kernels: {found}", flush=True)
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_MAKE_PROGRAM": ninja,
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11_cmake_dir(),
            "FASTCAPS_TORCH_DIR": str(torch.root),
            "FASTCAPS_TORCH_VERSION": torch.version,
            "FASTCAPS_CUDA_COMPILER": str(cuda.nvcc or ""),
            "FASTCAPS_CUDA_ARCHITECTURES": ";".join(cuda.architectures),
            "FASTCAPS_CUDA_WHY_NOT": cuda.why_not,
        }
        configure = [cmake, "-S", str(ROOT), "-B", str(folder), "-G", "Ninja"]
        configure += [f"-D{name}={value}" for name, value in options.items()]
        self.call(configure + shlex.split(os.environ.get("CMAKE_ARGS", "")))
        self.call([cmake, "--build", str(folder), "--parallel", str(jobs)])
        # An editable install's folder may hold the library of a build that had CUDA.
        self.library("cuda").unlink(missing_ok=True)
        self.call([cmake, "--install", str(folder), "--prefix", str(self.package_folder())])
        # Editors look for this one folder up.
        shutil.copyfile(folder / "compile_commands.json", folder.parent / "compile_commands.json")

    def call(self, command: list[str]) -> None:
        """Run one step of CMake; its own words explain a failure better than a traceback of ours."""
        print("fastcaps:", shlex.join(command), flush=True)
        code = subprocess.call(command)
        if code != 0:
            raise ExecError(
                f"fastcaps: this step of the native build failed (exit {code}): {shlex.join(command)}\n"
                "A C++20 compiler is needed (g++ 12 or clang 14, or later; CXX names one). Its messages are above.\n"
                "To leave out the CUDA kernels: FASTCAPS_CUDA=0 pip install ."
                " (or CUDAHOSTCXX, if nvcc refuses the compiler: it names another).\n"
                "To install without the native library: FASTCAPS_BUILD=0 pip install ."
            )


class CleanBuild(build):
    """Start from an empty build_lib, so that a file deleted from the tree cannot linger into the next wheel."""

    def run(self) -> None:
        if not getattr(self, "editable_mode", False):
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


def packages() -> list[str]:
    """fastcaps and its subpackages; triton_kernels, at the top of the tree, becomes one of them."""
    triton = ["fastcaps.triton_kernels." + name for name in find_packages("triton_kernels")]
    return [*find_packages(str(ROOT), include=["fastcaps", "fastcaps.*"]), "fastcaps.triton_kernels", *triton]


if __name__ == "__main__":
    setup(
        packages=packages(),
        package_dir={"fastcaps.triton_kernels": "triton_kernels"},
        ext_modules=[Extension("fastcaps._C", sources=[])] if native_build() else [],
        cmdclass={"build": CleanBuild, "build_ext": BuildNative},
    )
