"""Fixtures for all tests: memory that was allocated and not written holds NaN, and so shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

POISONED = (
    "test_attention",
    "test_pooling",
    "test_gaussian",
    "test_ops",
    "test_errors",
    "test_functional",
    "test_nn",
    "test_compat",
    "test_models",
)
"""Modules whose tests run with poisoned allocations; elsewhere (timings, memory, training) filling would disturb."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "unpoisoned: allocations are left as they come, since the test measures them")
    config.addinivalue_line("markers", "before_anything_runs: the call under test must raise before a pass starts")


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
