"""Fixtures for all tests: what a test needs of the machine, and memory that holds NaN until it is written."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

import fastcaps
from tools import static_report

# Random cases are drawn anew by every run, and a failing one is printed and kept; only in CI they are always the same.
settings.register_profile("drawn", deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
settings.register_profile("fixed", settings.get_profile("drawn"), derandomize=True)
settings.load_profile("fixed" if os.environ.get("CI") else "drawn")

POISONED = (
    "test_kernels", "test_products", "test_registry", "test_reference", "test_ops", "test_errors", "test_functional",
    "test_nn", "test_compat", "test_verbs", "test_made",
)  # fmt: skip
"""Modules whose tests run with poisoned allocations; elsewhere (timings, memory, training) filling would disturb."""


LIBRARIES = Path(fastcaps.__file__).with_name("lib")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-native", action="store_true", help="fail, not skip, where no CPU library is built")


def pytest_configure(config: pytest.Config) -> None:
    (cpu,) = (entry for entry in fastcaps.backends.listing() if entry.name == "cpu")
    if config.getoption("--require-native") and not cpu.available:
        raise pytest.UsageError(f"--require-native: the CPU library is not in use: {cpu.detail}")
    if worker := getattr(config, "workerinput", None):  # one of several processes: they share the cores
        threads = max(1, (os.cpu_count() or 1) // worker["workercount"])
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)
    config.addinivalue_line("markers", "unpoisoned: allocations are left as they come, since the test measures them")
    config.addinivalue_line("markers", "before_anything_runs: the call under test must raise before a pass starts")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """End a worker whose device a kernel has broken, since all later tests would fail there; xdist starts another."""
    if hasattr(item.config, "workerinput") and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"the worker ends before {item.nodeid}: {error}", file=sys.__stderr__, flush=True)
            os._exit(1)


def built(name: str) -> Path:
    """Where a native library lies; skip the test where it is not built."""
    found = sorted(LIBRARIES.glob(f"libfastcaps_{name}.*"))
    return found[0] if found else pytest.skip(f"needs the {name} library, which is not built")


@pytest.fixture(scope="session")
def native_library() -> Path:
    """The CPU library; without one, kernels cannot be tested and the reference runs instead."""
    return built("cpu")


@pytest.fixture(scope="session")
def cuda_library() -> Path:
    """The CUDA library, which needs no GPU to be looked at. It is built where torch has CUDA, or by FASTCAPS_CUDA=1."""
    return built("cuda")


@pytest.fixture(scope="session")
def nvcc() -> Path:
    """The CUDA compiler."""
    found = static_report.tool("nvcc")
    return Path(found) if found else pytest.skip("needs nvcc, which is not in CUDA_HOME, /usr/local/cuda or PATH")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Give every test the same numbers whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fill whatever torch.empty and its like return, in Python and in native code, with NaN."""
    if not request.module.__name__.startswith(POISONED) or request.node.get_closest_marker("unpoisoned"):
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
        torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Networks this small gain nothing from threads, and lose much where other work keeps the cores busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def threads_kept() -> Iterator[None]:
    """Let a test change torch's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
