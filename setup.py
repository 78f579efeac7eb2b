"""Build fastcaps: find the torch that is already installed, then let CMake do the rest.

CMakeLists.txt alone lists native sources and flags. Nothing is downloaded here, and torch is never imported: a build in
pip's isolated environment works with the torch of the environment that fastcaps is being installed into.
docs/building.md lists the environment variables.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import ExecError, SetupError

ROOT = Path(__file__).resolve().parent
OLDEST_TORCH = (2, 10)  # the stable ABI that CMakeLists.txt targets
BYTES_PER_JOB = 1.5 * 2**30  # what one compiler process may need for the kernels' templates


def unusable(root: Path) -> str | None:
    """Why the torch package at `root` cannot be built against; None where it can. Its files are read, never run."""
    try:
        text = (root / "version.py").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^__version__[^=]*=\s*['\"]((\d+)\.(\d+)[^'\"]*)['\"]", text, re.MULTILINE)
    if found is None:
        return "no torch package"
    if (int(found[2]), int(found[3])) < OLDEST_TORCH:
        return f"torch {found[1]} is older than {'.'.join(map(str, OLDEST_TORCH))}"
    if not (root / "include/torch/csrc/stable/library.h").is_file():
        return f"torch {found[1]} without its C++ headers"
    if not any((root / "lib" / name).is_file() for name in ("libtorch_cpu.so", "libtorch_cpu.dylib")):
        return f"torch {found[1]} without libtorch_cpu"
    return None


def torch_candidates(environ: Mapping[str, str], path: list[str]) -> Iterator[Path]:
    """Places where the target environment's torch may lie, best first.

    pip's isolated build replaces ``sys.path``, but runs the target's interpreter, so its prefix leads there. uv makes a
    temporary environment: what remains is the one that the user activated, ``.venv``, and the base interpreter.
    """
    spec = PathFinder.find_spec("torch", path)
    if spec is not None and spec.origin:
        yield Path(spec.origin).parent
    activated = [environ.get(name, "") for name in ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT", "CONDA_PREFIX")]
    prefixes = [sys.prefix, sys.exec_prefix, *activated]
    # A virtual environment's bin is on PATH when it is activated, whatever a build front end did to the variables.
    parents = [Path(folder).parent for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    prefixes += [str(parent) for parent in parents if (parent / "pyvenv.cfg").is_file()]
    prefixes += [environ.get("PWD", "") + "/.venv", str(ROOT / ".venv"), sys.base_prefix, sys.base_exec_prefix]
    for prefix in dict.fromkeys(filter(None, prefixes)):
        for key in ("purelib", "platlib"):
            yield Path(sysconfig.get_path(key, vars={"base": prefix, "platbase": prefix}), "torch")
        yield from (Path(folder, "torch") for folder in site.getsitepackages([prefix]))
        yield from sorted(Path(prefix).glob("lib/python3*/site-packages/torch"))  # the library uses no Python
    yield Path(site.getusersitepackages(), "torch")


def find_torch(environ: Mapping[str, str] = os.environ, path: list[str] | None = None) -> Path:
    """Find the torch package to build against, without importing it."""
    if explicit := environ.get("FASTCAPS_TORCH_DIR"):
        given = Path(explicit).expanduser().resolve()
        places = [given / "torch"] if (given / "torch").exists() else [given]
    else:
        places = list(dict.fromkeys(torch_candidates(environ, sys.path if path is None else path)))
    reasons = {root: unusable(root) for root in places}
    for root, reason in reasons.items():
        if reason is None:
            return root.resolve()
    if explicit:
        raise SetupError(f"FASTCAPS_TORCH_DIR={explicit}: {reason}")
    where = "\n".join(f"  {root}: {reason}" for root, reason in reasons.items())
    raise SetupError(
        "fastcaps found no torch to build its native library against. Run pip install torch first;\n"
        "or name one that this build does not see: FASTCAPS_TORCH_DIR=.../site-packages/torch;\n"
        f"or install without the native library: FASTCAPS_BUILD=0 pip install .\nLooked in:\n{where}"
    )


def free_memory() -> int | None:
    """Bytes that may still be used: the machine's or the control group's, whichever is less; None where unknown."""
    amounts = []
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        amounts += [int(found[1]) * 1024] if found else []
        group = Path("/sys/fs/cgroup")  # "max" where there is no limit: no number, so the machine's stands
        amounts.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return min(amounts, default=None)


def parallel_jobs(environ: Mapping[str, str] = os.environ) -> int:
    """Compiler processes to run: MAX_JOBS if set, else one a core as far as free memory carries them."""
    if asked := environ.get("MAX_JOBS", "").strip():
        if not asked.isdigit() or int(asked) < 1:
            raise SetupError(f"MAX_JOBS must be a positive whole number, got {asked!r}")
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, int((free_memory() or cores * BYTES_PER_JOB) / BYTES_PER_JOB)))


def native_build(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether to compile: FASTCAPS_BUILD is 1 unless it says 0."""
    value = environ.get("FASTCAPS_BUILD", "1").strip()
    if value not in ("", "0", "1"):
        raise SetupError(f"FASTCAPS_BUILD must be 0 or 1, got {value!r}")
    return value != "0"


def find_program(name: str, folder: str) -> str:
    """CMake or Ninja: from the package of that name where it is installed, else from this environment's bin or PATH."""
    own = getattr(importlib.import_module(name), folder, "") if importlib.util.find_spec(name) else ""
    folders = [own, sysconfig.get_path("scripts"), os.environ.get("PATH", "")]
    program = shutil.which(name, path=os.pathsep.join(filter(None, folders)))
    if program is None:
        raise ExecError(f"fastcaps needs {name} to build its native library: pip install {name}")
    return program


def put_into(package: Path, install: Callable[[Path], None]) -> list[Path]:
    """Let ``install`` fill a folder beside the package's files, then rename each into its place; return the places.

    A process that has an old library loaded keeps it: writing into a file that is mapped would crash it.
    """
    (package / "lib").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".staged-", dir=package) as staged:
        install(Path(staged))
        made = {path: package / path.relative_to(staged) for path in sorted(Path(staged).rglob("*.*"))}
        for path, place in made.items():
            path.replace(place)
    for stale in {*(package / "lib").iterdir()} - {*made.values()}:  # an earlier build may have had CUDA
        stale.unlink()
    return list(made.values())


class BuildNative(build_ext):
    """Configure, build and install with CMake."""

    # Not build_temp: an editable install would make that a new temporary folder and so compile everything again.
    folder = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}-{sysconfig.get_platform()}"

    def get_outputs(self) -> list[str]:
        return (self.folder / "install_manifest.txt").read_text().splitlines()

    def get_output_mapping(self) -> dict[str, str]:
        return {}  # nothing is built elsewhere and copied over

    def run(self) -> None:
        torch, jobs, folder = find_torch(), parallel_jobs(), str(self.folder)
        cmake, ninja = find_program("cmake", "CMAKE_BIN_DIR"), find_program("ninja", "BIN_DIR")
        levels = os.environ.get("FASTCAPS_LEVELS") or ("native" if self.inplace else "all")
        package = ROOT / "fastcaps" if self.inplace else Path(self.build_lib, "fastcaps").resolve()
        # What an earlier configuration found (another CXX, tools of a build environment that is gone) must not stay;
        # objects whose command is unchanged do.
        (self.folder / "CMakeCache.txt").unlink(missing_ok=True)
        for found in (self.folder / "CMakeFiles").glob("[0-9]*"):
            shutil.rmtree(found, ignore_errors=True)
        print(f"fastcaps: torch at {torch}; {jobs} jobs; build folder {folder}", flush=True)
        configure = [cmake, "-S", str(ROOT), "-B", folder, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        configure += [f"-DFASTCAPS_TORCH_DIR={torch}", f"-DFASTCAPS_LEVELS={levels}"]
        configure += [f"-DFASTCAPS_EXPERIMENTS={os.environ.get('FASTCAPS_EXPERIMENTS') or '0'}"]
        self.call(configure + shlex.split(os.environ.get("CMAKE_ARGS", "")))
        self.call([cmake, "--build", folder, "--parallel", str(jobs)])
        outputs = put_into(package, lambda staged: self.call([cmake, "--install", folder, "--prefix", str(staged)]))
        (self.folder / "install_manifest.txt").write_text("".join(f"{path}\n" for path in outputs))
        shutil.copyfile(self.folder / "compile_commands.json", ROOT / "build/compile_commands.json")  # for editors

    def call(self, command: list[str]) -> None:
        """Run one step of CMake; its own words explain a failure better than a traceback of ours."""
        print("fastcaps:", shlex.join(command), flush=True)
        if code := subprocess.call(command):
            raise ExecError(
                f"fastcaps: this step of the native build failed (exit {code}): {shlex.join(command)}\n"
                "A C++20 compiler is needed (g++ 12 or clang 14, or later; CXX names one). Its messages are above.\n"
                "FASTCAPS_CUDA=0 leaves out the CUDA kernels (CUDAHOSTCXX names another compiler for nvcc);\n"
                "FASTCAPS_BUILD=0 installs without the native library."
            )


def described(readme: str) -> str:
    """Return the README for an index, where no path leads to a file: links become their text; pictures are left out."""
    readme = re.sub(r"<!--.*?-->\n?|!\[[^]]*\]\((?!https?:)[^)]*\)\n?", "", readme, flags=re.DOTALL)
    return re.sub(r"\[([^]]+)\]\((?!https?:)[^)]*\)", r"\1", readme)


class CleanBuild(build):
    """Start from an empty build_lib, so that a file deleted from the tree cannot linger into the next wheel."""

    def run(self) -> None:
        if not getattr(self, "editable_mode", False):
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class TagWheel(bdist_wheel):
    """Let a wheel serve every Python 3: its libraries are loaded by ctypes, and know none."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    setup(
        long_description=described((ROOT / "README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
        ext_modules=[Extension("fastcaps.lib", sources=[])] if native_build() else [],
        cmdclass={"build": CleanBuild, "build_ext": BuildNative, "bdist_wheel": TagWheel},
    )
