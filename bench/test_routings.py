"""The routing of every workload: forward and training step, against what a PyTorch user would run instead."""

from __future__ import annotations

from typing import Any

import pytest

from bench.session import Refused, Session
from bench.workloads import Workload


def test_routing(row: tuple[Workload, int, bool], bench_session: Session, benchmark: Any) -> None:
    """Time one row; it fails, and no figure is kept, if a result disagrees with the float64 reference."""
    workload, batch, training = row
    try:
        case = bench_session.prepare(workload, batch, training)
    except Refused as refused:
        pytest.fail(f"no speed figure: {refused}", pytrace=False)
    benchmark.group = f"{workload.name} batch {batch} {'training step' if training else 'forward'}"
    benchmark.pedantic(case.call, setup=case.schedule.before, rounds=case.schedule.total)
    if benchmark.disabled:
        pytest.skip("timing is switched off; results agree with the float64 reference")
    finished = bench_session.finish(case, benchmark.stats.stats.data)
    benchmark.extra_info.update({key: finished[key] for key in ("workload", "batch", "mode", "speedup", "sgemm_share")})
    assert finished["fastcaps"]["median"] > 0
