"""The build: what setup.py decides, what the metadata say, what a wheel holds, for what CUDA kernels are built."""

from __future__ import annotations

import ast
import glob
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fastcaps

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def setup_py() -> ModuleType:
    """setup.py as a module: under any name but __main__ it defines and builds nothing."""
    spec = importlib.util.spec_from_file_location("fastcaps_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def python(code: str, cwd: str | Path = ROOT.anchor, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter, outside the checkout if not said otherwise."""
    command, variables = [sys.executable, "-c", code], {**os.environ, **environ}
    return subprocess.run(command, env=variables, cwd=cwd, capture_output=True, text=True)


# ---- finding torch ---------------------------------------------------------------------------------------------------


def make_torch(site: Path, cuda: str = "") -> Path:
    """Lay out what setup.py looks at in an installed torch; importing it is an error."""
    root = site / "torch"
    (root / "lib").mkdir(parents=True)
    (root / "__init__.py").write_text("raise ImportError('the build must not import torch')")
    (root / "version.py").write_text(
        f"from typing import Optional\n__version__ = '2.12.1+cpu'\ncuda: Optional[str] = {cuda or None!r}\n"
    )
    stable = root / "include/torch/csrc/stable"
    stable.mkdir(parents=True)
    (stable / "library.h").touch()
    (root / "lib/libtorch_cpu.so").touch()
    return root


def site_of(prefix: Path) -> Path:
    return prefix / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


@pytest.fixture
def nowhere(setup_py: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter whose every own place is empty; returns its prefix."""
    prefix = tmp_path / "prefix"
    for name in ("prefix", "exec_prefix", "base_prefix", "base_exec_prefix"):
        monkeypatch.setattr(sys, name, str(prefix))
    monkeypatch.setattr(setup_py.site, "getusersitepackages", lambda: str(tmp_path / "user"))
    monkeypatch.setattr(setup_py, "ROOT", tmp_path / "checkout")
    return prefix


def test_an_isolated_build_of_this_environment_finds_its_torch() -> None:
    """As pip does it: no site-packages on sys.path, the interpreter unchanged."""
    if not Path(torch.__file__).is_relative_to(sys.prefix):
        pytest.skip("torch lies outside this environment")
    code = f"""if True:
        import sys, importlib.util
        tools = [p for p in sys.path if p.endswith("-packages")]
        import setuptools
        sys.path[:] = [p for p in sys.path if not p.endswith("-packages")]
        assert importlib.util.find_spec("torch") is None, "still visible"
        spec = importlib.util.spec_from_file_location("fastcaps_setup", {str(ROOT / "setup.py")!r})
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        sys.path += tools
        spec.loader.exec_module(module)
        sys.path[:] = [p for p in sys.path if p not in tools]
        print(module.find_torch({{}}))
        assert "torch" not in sys.modules
    """
    done = python(code)
    assert done.stdout.strip() == str(Path(torch.__file__).resolve().parent), done.stderr


def test_finds_torch_beside_a_temporary_build_environment(
    setup_py: ModuleType, nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another Python too: the native library uses none. FASTCAPS_TORCH_DIR comes before all others."""
    env = tmp_path / "project/.venv"
    root = make_torch(env / "lib/python3.99/site-packages")
    (env / "pyvenv.cfg").touch()
    for place in ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT", "CONDA_PREFIX", "PATH", "PWD"):
        given = {"PATH": f"/nothing:{env / 'bin'}", "PWD": str(env.parent)}.get(place, str(env))
        assert setup_py.find_torch({place: given}, []) == root
    chosen = make_torch(tmp_path / "chosen")
    for folder in (chosen, chosen.parent):
        assert setup_py.find_torch({"FASTCAPS_TORCH_DIR": str(folder), "VIRTUAL_ENV": str(env)}, []) == chosen
    with pytest.raises(setup_py.SetupError, match=r"FASTCAPS_TORCH_DIR=.*empty: no torch package"):
        setup_py.find_torch({"FASTCAPS_TORCH_DIR": str(tmp_path / "empty")}, sys.path)


# ---- wheels ----------------------------------------------------------------------------------------------------------

# what builds and programs write into a checkout, the README's commands among them
WRITTEN = ("build", "dist", "lib", "*.egg-info", "__pycache__", "results", "htmlcov")
WRITTEN += ("runs", "fastcaps-demo", "lightning_logs", "*.html")


def build(what: str, tree: Path, **environ: str) -> Path:
    """Do what a build front end does without isolation; return what lands in ``tree/out``."""
    done = python(f"import setuptools.build_meta as m; print(m.build_{what}('out'))", tree, **environ)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    return tree / "out" / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution of this tree, in which an earlier build has left a library."""
    tree, folder = (tmp_path_factory.mktemp(name) for name in ("tree", "unpacked"))
    left_out = shutil.ignore_patterns(".*", *WRITTEN)
    shutil.copytree(ROOT, tree, ignore=left_out, symlinks=True, dirs_exist_ok=True)
    wanted = {path.relative_to(tree) for path in tree.rglob("*") if path.is_file()}
    leave_library(tree)
    archive = build("sdist", tree)
    assert archive.name == f"fastcaps-{fastcaps.__version__}.tar.gz"
    shutil.unpack_archive(archive, folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (root,) = folder.iterdir()
    held = {path.relative_to(root) for path in root.rglob("*") if path.is_file()}
    assert len(wanted) > 300 and wanted <= held, sorted(wanted - held)[:5]
    assert Path("fastcaps/triton_kernels/__init__.py") in held  # a link in the tree
    assert not [path for path in held if path.suffix == ".so"]
    return root


def leave_library(tree: Path) -> None:
    for name in ("fastcaps/lib/libfastcaps_cpu.so", "build/lib/fastcaps/deleted.py"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("stale")


@pytest.fixture(scope="module")
def pure_wheel(unpacked: Path) -> zipfile.ZipFile:
    """A wheel without the native library, made of the source distribution alone, without a network or a compiler."""
    leave_library(unpacked)
    none = dict.fromkeys(("FASTCAPS_TORCH_DIR", "CXX"), "/none")
    return zipfile.ZipFile(build("wheel", unpacked, FASTCAPS_BUILD="0", no_proxy="*", PIP_NO_INDEX="1", **none))


def test_a_wheel_without_the_native_library_is_pure(pure_wheel: zipfile.ZipFile) -> None:
    assert Path(pure_wheel.filename or "").name == f"fastcaps-{fastcaps.__version__}-py3-none-any.whl"
    names = set(pure_wheel.namelist())
    assert "fastcaps/py.typed" in names and "fastcaps/deleted.py" not in names
    assert not [name for name in names if name.endswith((".so", ".dylib", ".cpp", ".h"))]
    assert {name.split("/")[0] for name in names} == {"fastcaps", f"fastcaps-{fastcaps.__version__}.dist-info"}
    folders = (ROOT / "fastcaps", ROOT / "fastcaps/triton_kernels")  # rglob does not follow links
    sources = {path.relative_to(ROOT).as_posix() for folder in folders for path in folder.rglob("*.py")}
    assert sources <= names


def test_no_torch_says_what_to_do_and_where_it_looked(setup_py: ModuleType, nowhere: Path, tmp_path: Path) -> None:
    with pytest.raises(setup_py.SetupError, match=f"pip install torch(.|\n)*{site_of(nowhere) / 'torch'}"):
        setup_py.find_torch({}, [])
    root = make_torch(tmp_path / "site")
    version = root / "version.py"
    for given, wanted in (
        ("2.10.0", None),
        ("3.0.1", None),
        ("2.9.1", "torch 2.9.1 is older than 2.10"),
        ("1.13.0", "torch 1.13.0 is older than 2.10"),
    ):
        version.write_text(f"__version__ = '{given}'\n")
        assert setup_py.unusable(root) == wanted
    version.write_text("__version__ = '2.12.1'\n")
    for name, what in (("include/torch/csrc/stable/library.h", "its C++ headers"), ("lib/libtorch_cpu.so", "")):
        (root / name).unlink()
        assert str(setup_py.unusable(root)).startswith("torch 2.12.1 without " + (what or "libtorch_cpu"))
        (root / name).touch()


def test_a_setting_of_the_build_that_is_wrong_is_told(setup_py: ModuleType) -> None:
    assert setup_py.native_build({}) and not setup_py.native_build({"FASTCAPS_BUILD": "0"})
    assert setup_py.parallel_jobs({"MAX_JOBS": "3"}) == 3 and setup_py.parallel_jobs({}) >= 1
    for call, given, message in (
        (setup_py.native_build, {"FASTCAPS_BUILD": "yes"}, "FASTCAPS_BUILD must be 0 or 1, got 'yes'"),
        (setup_py.parallel_jobs, {"MAX_JOBS": "0"}, "MAX_JOBS must be a positive whole number, got '0'"),
    ):
        with pytest.raises(setup_py.SetupError, match=message):
            call(given)


def test_an_index_shows_the_readme_without_paths(setup_py: ModuleType, pure_wheel: zipfile.ZipFile) -> None:
    """Links into the checkout lead nowhere there; what they say stays, as do links to the papers."""
    given = (ROOT / "README.md").read_text()
    shown = setup_py.described(given)
    assert not re.search(r"\]\((?!https?:)|<!--", shown) and "](https://" in shown
    texts = re.findall(r"(?<!!)\[([^]]+)\]\(", given)
    assert len(texts) > 10 and all(text in shown for text in texts)
    (metadata,) = (name for name in pure_wheel.namelist() if name.endswith("/METADATA"))
    assert b"Description-Content-Type: text/markdown" in pure_wheel.read(metadata)


def test_the_citation_is_of_this_version() -> None:
    assert f"\nversion: {fastcaps.__version__}\n" in (ROOT / "CITATION.cff").read_text()


# ---- CUDA kernels: csrc/cuda/toolkit.cmake, run as a script ----------------------------------------------------------

Decide = Callable[..., str]
DEFAULT = "80-real;90-real;100-real;120"


@pytest.fixture
def decide(tmp_path: Path) -> Decide:
    """What toolkit.cmake says for a torch and an environment, in one line; `usual` replaces /usr/local/cuda."""
    torches = {cuda: make_torch(tmp_path / (cuda or "none"), cuda=cuda) for cuda in ("", "13.0")}
    cmake = shutil.which("cmake") or pytest.skip("needs cmake")
    if sys.platform != "linux":
        pytest.skip("the CUDA kernels are built on Linux only")

    def run(cuda: str = "13.0", usual: Path = tmp_path / "nowhere", **environ: str) -> str:
        command = [cmake, f"-DFASTCAPS_TORCH_DIR={torches[cuda]}", f"-Dusual_cuda={usual}"]
        script = str(ROOT / "csrc/cuda/toolkit.cmake")
        done = subprocess.run(
            [*command, "-P", script], env={"PATH": "/none", **environ}, capture_output=True, text=True, cwd=tmp_path
        )
        text = " ".join((done.stdout + done.stderr).split())
        assert ("CMake Error" in text) == (done.returncode != 0), text
        return text

    return run


def make_nvcc(folder: Path, version: str = "13.0", architectures: tuple[int, ...] = (75, 80, 86, 90, 100, 120)) -> Path:
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


def test_a_toolkit_is_found_or_every_place_is_named(decide: Decide, tmp_path: Path) -> None:
    home, nvcc = tmp_path / "toolkit", make_nvcc(tmp_path / "toolkit")
    for place, given in {"CUDACXX": nvcc, "CUDA_HOME": home, "CUDA_PATH": home, "PATH": nvcc.parent}.items():
        assert f"CUDA kernels: [{nvcc}] for [{DEFAULT}]" in decide(**{place: str(given)})
    assert f"[{nvcc}] for [{DEFAULT}]" in decide("", CUDA_HOME=str(home), FASTCAPS_CUDA="1")
    assert "[] for []torch has no CUDA (FASTCAPS_CUDA=1 builds them all the same)" in decide("", CUDA_HOME=str(home))
    assert "[] for []FASTCAPS_CUDA=0, when it was built" in decide(CUDA_HOME=str(home), FASTCAPS_CUDA="0")
    assert "FASTCAPS_CUDA must be 0 or 1, got 'yes'" in decide(FASTCAPS_CUDA="yes")
    looked = f"CUDACXX (not set), CUDA_HOME (no nvcc), CUDA_PATH (not set), {tmp_path / 'nowhere'} (no nvcc), PATH (no"
    said = decide(CUDA_HOME=str(tmp_path / "empty"), FASTCAPS_CUDA="1")
    assert f"FASTCAPS_CUDA=1: no nvcc of CUDA 12.4 or later in {looked}" in said and "Install a CUDA toolkit" in said


def test_architectures_are_written_as_for_torch(decide: Decide, tmp_path: Path) -> None:
    nvcc = make_nvcc(tmp_path / "toolkit")
    for asked, chosen in (
        ("8.0;9.0+PTX", "80-real;90"),
        ("8.0 9.0a, 12.0", "80-real;90a-real;120-real"),
        ("10.0f+PTX", "100f"),
        ("9.0 9.0+PTX", "90"),
        ("Hopper;Ampere", "90;80-real;86"),
        ("7.0;7.5+PTX;8.0", "80-real"),
    ):
        assert f"for [{chosen}]" in decide(CUDACXX=str(nvcc), TORCH_CUDA_ARCH_LIST=asked)


# ---- imports ---------------------------------------------------------------------------------------------------------

ROOMS = [
    "checks", "results", "rules", "settings", "vectors", "votes", "watchers", "made", "libraries", "backends",
    "reference", "ops", "functional", "triton_kernels", "losses", "nn", "compat", "__main__",
]  # fmt: skip
"""What the package consists of: each imports only those before it."""


def imported(path: Path, name: str) -> set[str]:
    """Return what a module imports, in its functions too, but not what only a type checker reads."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    checks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    unread = {id(node) for check in checks for part in check.body for node in ast.walk(part)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) not in unread and isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif id(node) not in unread and isinstance(node, ast.ImportFrom):
            package = ".".join(name.split(".")[: -node.level]) + "." if node.level else ""
            found |= {f"{package}{node.module}.{alias.name}" for alias in node.names}
    return found


def test_imports_run_one_way() -> None:
    files = {path: Path(path).with_suffix("").as_posix().replace("/", ".") for path in
             glob.glob("fastcaps/**/*.py", root_dir=ROOT, recursive=True)}  # fmt: skip  # links are followed
    modules = {name.removesuffix(".__init__") for name in files.values()}
    graph: dict[str, set[str]] = {}
    for path, name in files.items():
        for target in imported(ROOT / path, name):
            assert target.partition(".")[0] not in ("bench", "tests", "tools", "fastcaps_lab"), (
                f"{name} imports {target}"
            )
            if name == "fastcaps.__init__" or not target.startswith("fastcaps."):
                continue
            room, other = (each.split(".")[1] for each in (name, target))
            if other in ROOMS:  # else a name of the package itself, for rooms that no other imports
                assert ROOMS.index(other) <= ROOMS.index(room), f"{name} imports {target}"
            else:
                assert ROOMS.index(room) >= ROOMS.index("__main__"), f"{name} imports {target}"
            found = target if target in modules else target.rpartition(".")[0]
            graph.setdefault(name.removesuffix(".__init__"), set()).add(found)
    tuple(TopologicalSorter(graph).static_order())  # CycleError names a circle
