"""The routing of every workload, forward and as a training step, against what a PyTorch user would run instead."""

from __future__ import annotations

import pytest

from bench.alternatives import OURS
from bench.run import Run
from bench.workload import Case


def test_routing(case: Case, run: Run, names: list[str]) -> None:
    """Time one row in turns with its alternatives; it fails, and has no times, if our result errs against float64."""
    found = run.compare(case, names)
    if not found:
        pytest.skip(f"{case}: the time is used up")
    ours = found[OURS]
    assert "warm" in ours, f"no time: {ours.get('failed') or ours['complaint']}"
