"""The build: what setup.py decides, what the metadata say, what a wheel holds."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fastcaps

ROOT = Path(__file__).resolve().parents[1]
TREE = ["setup.py", "pyproject.toml", "CMakeLists.txt", "MANIFEST.in", "LICENSE", "csrc", "fastcaps", "triton_kernels"]


def load_setup() -> ModuleType:
    """setup.py as a module: under any name but __main__ it defines and builds nothing."""
    spec = importlib.util.spec_from_file_location("fastcaps_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def setup_py() -> ModuleType:
    return load_setup()


@pytest.fixture(scope="module")
def pyproject() -> dict:
    toml = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def python(code: str, **environ: str) -> subprocess.Popen[str]:
    """Start `code` in a fresh interpreter outside the checkout."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **environ},
        cwd=ROOT.anchor,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# ---- finding torch ---------------------------------------------------------------------------------------------------


def make_torch(
    site: Path, version: str = "2.12.1+cpu", header: bool = True, library: bool = True, cuda: str = ""
) -> Path:
    """Lay out what setup.py looks at in an installed torch; importing it is an error."""
    root = site / "torch"
    (root / "lib").mkdir(parents=True)
    (root / "__init__.py").write_text("raise ImportError('the build must not import torch')")
    (root / "version.py").write_text(
        f"from typing import Optional\n__version__ = '{version}'\ncuda: Optional[str] = {cuda or None!r}\n"
    )
    if header:
        stable = root / "include/torch/csrc/stable"
        stable.mkdir(parents=True)
        (stable / "library.h").touch()
    if library:
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


def test_finds_the_torch_in_use(setup_py: ModuleType) -> None:
    assert setup_py.find_torch({}, sys.path) == Path(torch.__file__).resolve().parent


def test_finds_the_target_environments_torch_in_an_isolated_build(setup_py: ModuleType, nowhere: Path) -> None:
    root = make_torch(site_of(nowhere))
    assert setup_py.find_torch({"PYTHONNOUSERSITE": "1"}, ["/an/isolated/build's/own/path"]) == root


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
    out, err = python(code).communicate()
    assert out.strip() == str(Path(torch.__file__).resolve().parent), err


@pytest.mark.parametrize(
    "place", ["VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT", "CONDA_PREFIX", "PATH", "PWD", "user", "other"]
)
def test_finds_torch_beside_a_temporary_build_environment(
    setup_py: ModuleType, nowhere: Path, tmp_path: Path, place: str
) -> None:
    env = tmp_path / "project/.venv"
    environ: dict[str, str] = {}
    if place == "user":
        root = make_torch(tmp_path / "user")
    else:
        # "other": an environment of another Python; the native library uses none
        root = make_torch(env / "lib/python3.99/site-packages" if place == "other" else site_of(env))
        (env / "pyvenv.cfg").touch()
        values = {"PATH": f"/nothing:{env / 'bin'}", "PWD": str(env.parent), "other": str(env)}
        environ["VIRTUAL_ENV" if place == "other" else place] = values.get(place, str(env))
    assert setup_py.find_torch(environ, []) == root


def test_the_interpreters_own_torch_wins_over_an_activated_environment(
    setup_py: ModuleType, nowhere: Path, tmp_path: Path
) -> None:
    own = make_torch(site_of(nowhere))
    make_torch(site_of(tmp_path / "active"))
    assert setup_py.find_torch({"VIRTUAL_ENV": str(tmp_path / "active")}, []) == own


def test_an_old_torch_is_passed_over_for_a_recent_one(setup_py: ModuleType, nowhere: Path, tmp_path: Path) -> None:
    make_torch(site_of(nowhere), version="2.9.1")
    recent = make_torch(site_of(tmp_path / "active"), version="2.10.0")
    assert setup_py.find_torch({"VIRTUAL_ENV": str(tmp_path / "active")}, []) == recent


@pytest.mark.parametrize("up", [False, True], ids=["package", "its folder"])
def test_fastcaps_torch_dir_is_taken_before_all_others(
    setup_py: ModuleType, nowhere: Path, tmp_path: Path, up: bool
) -> None:
    make_torch(site_of(nowhere))
    chosen = make_torch(tmp_path / "chosen")
    environ = {"FASTCAPS_TORCH_DIR": str(chosen.parent if up else chosen)}
    assert setup_py.find_torch(environ, sys.path) == chosen


def test_a_wrong_fastcaps_torch_dir_is_an_error_even_if_another_torch_is_there(
    setup_py: ModuleType, nowhere: Path, tmp_path: Path
) -> None:
    make_torch(site_of(nowhere))
    with pytest.raises(setup_py.SetupError, match=r"FASTCAPS_TORCH_DIR=.*empty: no torch package"):
        setup_py.find_torch({"FASTCAPS_TORCH_DIR": str(tmp_path / "empty")}, sys.path)


def test_no_torch_says_what_to_do_and_where_it_looked(setup_py: ModuleType, nowhere: Path) -> None:
    with pytest.raises(setup_py.SetupError) as caught:
        setup_py.find_torch({}, [])
    message = str(caught.value)
    for hint in ("pip install torch", "FASTCAPS_TORCH_DIR=", "FASTCAPS_BUILD=0", str(site_of(nowhere) / "torch")):
        assert hint in message


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ({"version": "2.9.1"}, "torch 2.9.1 is older than 2.10"),
        ({"version": "1.13.0"}, "torch 1.13.0 is older than 2.10"),
        ({"header": False}, r"torch 2.12.1\+cpu without its C\+\+ headers"),
        ({"library": False}, r"torch 2.12.1\+cpu without libtorch_cpu"),
    ],
)
def test_an_unusable_torch_is_named_with_the_reason(
    setup_py: ModuleType, nowhere: Path, made: dict, reason: str
) -> None:
    make_torch(site_of(nowhere), **made)
    with pytest.raises(setup_py.SetupError, match=reason):
        setup_py.find_torch({}, [])


# ---- setup.py's other decisions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "builds"), [(None, True), ("", True), ("1", True), ("0", False)])
def test_fastcaps_build_chooses(setup_py: ModuleType, value: str | None, builds: bool) -> None:
    assert setup_py.native_build({} if value is None else {"FASTCAPS_BUILD": value}) is builds


def test_another_value_of_fastcaps_build_is_an_error(setup_py: ModuleType) -> None:
    with pytest.raises(setup_py.SetupError, match="FASTCAPS_BUILD must be 0 or 1, got 'no'"):
        setup_py.native_build({"FASTCAPS_BUILD": "no"})


def test_jobs_are_limited_by_cores_memory_and_max_jobs(setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_py.os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    for memory, jobs in ((None, 16), (64 * 2**30, 16), (6 * 2**30, 4), (2**20, 1)):
        monkeypatch.setattr(setup_py, "free_memory", lambda memory=memory: memory)
        assert setup_py.parallel_jobs({}) == jobs
    assert setup_py.parallel_jobs({"MAX_JOBS": "3"}) == 3
    for wrong in ("0", "-1", "many"):
        with pytest.raises(setup_py.SetupError, match="MAX_JOBS"):
            setup_py.parallel_jobs({"MAX_JOBS": wrong})


def test_free_memory_is_known_on_linux(setup_py: ModuleType) -> None:
    memory = setup_py.free_memory()
    assert memory is not None and memory > 0 if sys.platform == "linux" else memory is None or memory > 0


def test_a_loaded_library_stays_whole_when_a_new_one_is_installed(setup_py: ModuleType, tmp_path: Path) -> None:
    def install(folder: Path) -> None:
        (folder / "lib").mkdir()
        for name in ("_C.so", "lib/libfastcaps_cpu.so"):
            (folder / name).write_text("new")

    (tmp_path / "lib").mkdir()
    for name in ("_C.so", "lib/libfastcaps_cpu.so", "lib/libfastcaps_cuda.so", "backends.py"):
        (tmp_path / name).write_text("old")
    with open(tmp_path / "_C.so") as loaded, open(tmp_path / "lib/libfastcaps_cpu.so") as other:
        places = setup_py.put_into(tmp_path, install)
        assert loaded.read() == other.read() == "old"
    assert places == [tmp_path / "_C.so", tmp_path / "lib/libfastcaps_cpu.so"]
    assert [path.read_text() for path in places] == ["new", "new"]
    assert {path.name for path in tmp_path.rglob("*.*")} == {"_C.so", "libfastcaps_cpu.so", "backends.py"}


def test_a_wheel_names_the_pythons_that_it_is_built_for(setup_py: ModuleType, tmp_path: Path) -> None:
    own = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    other = tmp_path / "other python"
    other.write_text("#!/bin/sh\necho cp399 /usr/bin/other\n")
    other.chmod(0o755)
    assert setup_py.pythons({}) == {own: sys.executable}
    asked = {"FASTCAPS_PYTHONS": f"{sys.executable} '{other}'"}
    assert setup_py.pythons(asked) == {own: sys.executable, "cp399": "/usr/bin/other"}
    with pytest.raises(setup_py.SetupError, match="FASTCAPS_PYTHONS: 'no-such-python' is no Python that runs"):
        setup_py.pythons({"FASTCAPS_PYTHONS": "no-such-python"})


def test_every_native_source_is_compiled() -> None:
    text = (ROOT / "CMakeLists.txt").read_text()
    sources = [path for kind in ("*.cpp", "*.cu") for path in (ROOT / "csrc").rglob(kind)]
    assert sources and not [path for path in sources if path.relative_to(ROOT).as_posix() not in text]


def test_every_folder_of_python_files_is_a_package_of_the_wheel(setup_py: ModuleType) -> None:
    folders = {path.parent for path in (ROOT / "fastcaps").rglob("*.py")}
    wanted = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert wanted <= set(setup_py.packages()) and "fastcaps.triton_kernels" in setup_py.packages()


# ---- metadata --------------------------------------------------------------------------------------------------------


def test_every_requirement_is_pinned_in_the_constraints(pyproject: dict) -> None:
    def name(text: str) -> str:
        return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", text).group()).lower()  # type: ignore[union-attr]

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {name(line) for line in lines if "==" in line and not line.startswith("#")}
    groups = pyproject["project"]["optional-dependencies"].values()
    wanted = {name(text) for group in groups for text in group} | {"torch"}
    wanted |= {name(text) for text in pyproject["build-system"]["requires"]}
    assert wanted - {"fastcaps"} <= pinned


def test_the_installed_version_is_the_packages_own() -> None:
    try:
        metadata = importlib.metadata.distribution("fastcaps")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fastcaps is on the path but not installed")
    assert metadata.version == fastcaps.__version__
    assert metadata.metadata["License-Expression"] == "Apache-2.0"
    scripts = {entry.name: entry.value for entry in metadata.entry_points if entry.group == "console_scripts"}
    assert scripts == {"fastcaps": "fastcaps.cli:main"}


# ---- wheels ----------------------------------------------------------------------------------------------------------


def copy_tree(folder: Path) -> Path:
    """The files a wheel is built from, with what an earlier build may have left among them."""
    folder.mkdir(exist_ok=True)
    for name in TREE:
        source = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.dylib", "lib")
        shutil.copytree(source, folder / name, ignore=ignore) if source.is_dir() else shutil.copy(source, folder)
    (folder / "README.md").touch()
    (folder / "fastcaps/lib").mkdir()
    (folder / "fastcaps/lib/libfastcaps_cpu.so").write_text("stale")
    (folder / "fastcaps/_C.so").write_text("stale")
    return folder


def build_wheel(tree: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """What a build front end does without isolation; the wheel lands in ``tree/out``."""
    code = "import setuptools.build_meta as m; m.build_wheel('out')"
    variables = {**os.environ, **environ}
    return subprocess.run([sys.executable, "-c", code], cwd=tree, env=variables, capture_output=True, text=True)


@pytest.fixture(scope="module")
def pure_wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    tree = copy_tree(tmp_path_factory.mktemp("pure"))
    run = build_wheel(tree, FASTCAPS_BUILD="0", FASTCAPS_TORCH_DIR="/none", CXX="/none")
    assert run.returncode == 0, run.stderr
    (wheel,) = (tree / "out").glob("*.whl")
    return zipfile.ZipFile(wheel)


def test_a_wheel_without_the_native_library_is_pure(pure_wheel: zipfile.ZipFile) -> None:
    assert Path(pure_wheel.filename or "").name == f"fastcaps-{fastcaps.__version__}-py3-none-any.whl"
    names = set(pure_wheel.namelist())
    assert {
        "fastcaps/__init__.py",
        "fastcaps/py.typed",
        "fastcaps/_C.pyi",
        "fastcaps/triton_kernels/__init__.py",
    } <= names
    assert not [name for name in names if name.endswith((".so", ".dylib", ".cpp", ".h"))]
    assert {name.split("/")[0] for name in names} == {"fastcaps", f"fastcaps-{fastcaps.__version__}.dist-info"}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fastcaps").rglob("*.py")}
    assert sources <= names


def test_without_the_native_library_the_reference_serves_and_says_so_once(
    pure_wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    pure_wheel.extractall(tmp_path)
    code = """if True:
        import sys, warnings
        # an editable install would lend this one its native library
        sys.meta_path = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "") + repr(f)]
        import torch
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            import fastcaps
            torch.manual_seed(0)
            children, weight, parents = torch.randn(2, 6, 4, 4), torch.randn(6, 3, 4, 4), torch.randn(2, 3, 4, 4)
            for _ in range(2):
                given = children.clone().requires_grad_()
                got = fastcaps.functional.inverted_attention_routing(given, weight, parents)
                got.sum().backward()
        assert fastcaps.__file__.startswith(sys.argv[1] if len(sys.argv) > 1 else ""), fastcaps.__file__
        with fastcaps.backend("reference"):
            want = fastcaps.functional.inverted_attention_routing(children, weight, parents)
        assert torch.equal(got, want)
        assert given.grad.shape == children.shape
        listed = {entry.name: entry.available for entry in fastcaps.backends.listing()}
        assert not listed["cpu"] and listed["reference"], listed
        said = [str(w.message) for w in said if "fastcaps" in str(w.message)]
        assert len(said) == 1 and "reference" in said[0], said
        print(fastcaps.__file__)
    """
    process = python(code, PYTHONPATH=str(tmp_path))
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert Path(out.strip()).is_relative_to(tmp_path)


def test_the_folder_for_the_hub_loads_under_a_name_of_its_own(pure_wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """As the hub's reader does it: from a path, under another name, with no fastcaps to be imported."""
    script = [sys.executable, str(ROOT / "scripts/hub_folder.py"), pure_wheel.filename or "", str(tmp_path)]
    assert subprocess.run(script, capture_output=True, text=True).returncode == 0
    folder = tmp_path / "build/torch-universal"
    told = json.loads((folder / "metadata.json").read_text())
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {*told["digest"]["files"], "metadata.json"} and told["id"] == "fastcaps"
    code = f"""if True:
        import importlib.util, sys, warnings
        from pathlib import Path
        warnings.simplefilter("ignore")
        sys.modules["fastcaps"] = None  # an import of it fails
        folder = Path({str(folder)!r})
        spec = importlib.util.spec_from_file_location("hub_1f", folder / "__init__.py",
                                                      submodule_search_locations=[str(folder)])
        package = sys.modules["hub_1f"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
        import torch
        assert package.DynamicRouting(6, 3, 4, 4)(torch.randn(2, 6, 4)).shape == (2, 3, 4)
        assert package.models.create("mnist")(torch.randn(1, 1, 28, 28)).shape == (1, 10)
        compatible = importlib.import_module("hub_1f.fastcaps")
        assert compatible.DynamicRouting is package.DynamicRouting
        for name in package.__all__:
            assert getattr(compatible, name) is not None
    """
    process = python(code)
    _, err = process.communicate()
    assert process.returncode == 0, err


def test_the_source_distribution_holds_all_that_a_build_needs(tmp_path: Path) -> None:
    """Without a network: what is unpacked from it has every file that the tree's build and tests read."""
    tree = copy_tree(tmp_path / "tree")
    for name in ("Makefile", "constraints.txt", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tree)
    code = "import setuptools.build_meta as m; m.build_sdist('out')"
    run = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (archive,) = (tree / "out").glob("*.tar.gz")
    assert archive.name == f"fastcaps-{fastcaps.__version__}.tar.gz"
    shutil.unpack_archive(archive, tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    sources = {path.relative_to(ROOT) for folder in ("csrc", "triton_kernels") for path in (ROOT / folder).rglob("*")}
    sources = {path for path in sources if (ROOT / path).is_file() and "__pycache__" not in path.parts}
    assert not [path for path in sources if not (unpacked / path).is_file()]
    assert not list(unpacked.rglob("*.so"))
    run = build_wheel(unpacked, FASTCAPS_BUILD="0", no_proxy="*", PIP_NO_INDEX="1")
    assert run.returncode == 0, run.stderr


def test_a_native_build_without_torch_fails_with_advice(tmp_path: Path) -> None:
    run = build_wheel(copy_tree(tmp_path), FASTCAPS_BUILD="1", FASTCAPS_TORCH_DIR=str(tmp_path / "none"))
    assert run.returncode != 0
    assert "none: no torch package" in run.stderr and "Traceback" not in run.stderr.split("SetupError")[-1]


def test_tests_that_require_the_native_library_do_not_start_without_it(
    pure_wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    """Where no library is built, kernels would be compared with the reference that stands in for them."""
    pure_wheel.extractall(tmp_path)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-o", "pythonpath=", "-qq"]
    command += ["--require-native", "--collect-only", str(ROOT / "tests/test_build.py")]
    run = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == pytest.ExitCode.USAGE_ERROR, run.stdout + run.stderr
    assert "--require-native: the CPU library is not in use" in run.stderr


@pytest.mark.slow
def test_a_native_wheel_holds_its_libraries_and_no_path_of_this_machine(tmp_path: Path) -> None:
    tree = copy_tree(tmp_path / "tree")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    run = build_wheel(tree, FASTCAPS_BUILD="1", TORCH_CUDA_ARCH_LIST="9.0", FASTCAPS_CUDA="1" if nvcc else "0")
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr  # the compiler speaks on stdout
    (wheel,) = (tree / "out").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    libraries = sorted(name for name in names if name.endswith((".so", ".dylib")))
    assert libraries[0].startswith("fastcaps/_C.")
    built = ["cpu", "cuda"] if nvcc else ["cpu"]
    assert [Path(name).stem for name in libraries[1:]] == [f"libfastcaps_{name}" for name in built]
    paths = {str(tmp_path), str(Path(torch.__file__).parent), sys.prefix}
    paths |= {str(Path(nvcc).resolve().parents[1])} if nvcc and Path(nvcc).is_relative_to("/usr/local/cuda") else set()
    contents = {name: zipfile.ZipFile(wheel).read(name) for name in libraries}
    assert not [(name, path) for name in libraries for path in paths if path.encode() in contents[name]]
    commands = json.loads((tree / "build/compile_commands.json").read_text())
    assert not [c["command"] for c in commands if "-march=" in c["command"] or "-mtune=" in c["command"]]
