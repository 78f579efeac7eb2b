"""The native sources' formulas and schedules as a Python module, built once; what has not changed is not compiled."""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest
from cuda_on_cpu import build

import tools.native

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "native"


@pytest.fixture(scope="session")
def native() -> ModuleType:
    """The module of ``module.cpp``, or another build of it for planted faults; skip the test where there is none."""
    pytest.importorskip("pybind11", reason="needs pybind11, which is not installed")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        pytest.skip("needs Python.h, which is not installed")
    other, headers = os.environ.get("FASTCAPS_NATIVE"), tools.native.module_headers()
    path = other or build.make(HERE, BUILD, "fastcaps_native", FASTCAPS_INCLUDES=headers)
    spec = importlib.util.spec_from_file_location("fastcaps_native", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
