"""The native sources' formulas and schedules as a Python module, built once; what has not changed is not compiled."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest
from cuda_on_cpu import build

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def native() -> ModuleType:
    """The module of ``module.cpp``; skip the test where it cannot be built."""
    pybind11 = pytest.importorskip("pybind11", reason="needs pybind11, which is not installed")
    python = sysconfig.get_path("include")
    if not Path(python, "Python.h").is_file():
        pytest.skip("needs Python.h, which is not installed")
    includes = f"{pybind11.get_include()};{python}"
    path = build.make(HERE, HERE.parents[1] / "build" / "native", "fastcaps_native", FASTCAPS_INCLUDES=includes)
    spec = importlib.util.spec_from_file_location("fastcaps_native", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
