"""What ships the package, as far as it can be checked without doing it: CI's files, the conda recipe, make."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

import fastcaps

ROOT = Path(__file__).parents[1]
CI = ROOT / ".github/workflows/ci.yml"
if not CI.is_file():
    pytest.skip("the files of the forge are not here", allow_module_level=True)


def pyproject() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_ci_tests_every_python_that_the_package_names() -> None:
    named = [c.rpartition(" ")[2] for c in pyproject()["project"]["classifiers"] if re.search(r":: 3\.\d+$", c)]
    jobs = yaml.safe_load(CI.read_text(encoding="utf-8"))["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == named
    settings = pyproject()["tool"]["cibuildwheel"]
    held = {settings["build"].partition("-")[0], *re.findall(r"/(cp\d+)-", settings["environment"]["FASTCAPS_PYTHONS"])}
    assert held == {f"cp{name.replace('.', '')}" for name in named}


def test_the_conda_recipe_asks_for_what_the_package_asks_for() -> None:
    def load_file_regex(load_file: str, regex_pattern: str, from_recipe_dir: bool) -> re.Match[str] | None:
        return re.search(regex_pattern, (ROOT / "conda" / load_file).read_text(encoding="utf-8"))

    given = {"load_file_regex": load_file_regex, "compiler": lambda x: x, "stdlib": lambda x: x, "PYTHON": "python"}
    text = re.sub(r"# \[win\]", "", (ROOT / "conda/meta.yaml").read_text(encoding="utf-8"))
    made = yaml.safe_load(jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(text).render(given))
    assert made["package"]["version"] == fastcaps.__version__
    wanted = {name.replace(" ", "") for name in pyproject()["build-system"]["requires"]}
    asked = {name.replace(" ", "") for part in ("build", "host") for name in made["requirements"][part]}
    assert wanted <= asked
    torch = [name.replace("torch", "pytorch ") for name in pyproject()["project"]["dependencies"]]
    assert set(torch) <= set(made["requirements"]["run"])
    assert made["about"]["license_file"] == "LICENSE"


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_knows_how_to_ship() -> None:
    command = ["make", "--dry-run", "WHEEL_PYTHONS=", "docs", "abi-check"]  # which needs the wheel and the sdist
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps = ("mkdocs build --strict", "build --sdist", "build --wheel", "auditwheel repair", "scripts/abi_smoke.py")
    places = [done.stdout.find(step) for step in steps]
    assert -1 not in places and places == sorted(places)


def test_the_source_distribution_holds_what_a_build_needs_and_no_test(tmp_path: Path) -> None:
    """Tests need a checkout: docs, bench, tools, and files beside them that setuptools would leave out."""
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (listed,) = tmp_path.glob("*/SOURCES.txt")
    names = {name for name in listed.read_text().split("\n") if not name.startswith("/")}
    assert names >= {"CMakeLists.txt", "setup.py", "csrc/votes.h", "fastcaps/py.typed", "triton_kernels/pooling.py"}
    assert {name.partition("/")[0] for name in names if "/" in name} == {"csrc", "fastcaps", "triton_kernels"}
