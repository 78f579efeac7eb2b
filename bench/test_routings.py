"""The routing of every workload, forward and as a training step, against what a PyTorch user would run instead.

A row's contenders are benchmarks of one group. They are timed alternately, in separate processes (:mod:`bench.timing`),
when the first of them is requested; what was measured is then handed to pytest-benchmark one by one, whose clock shows
it again.
"""

from __future__ import annotations

from typing import Any

import pytest

from bench.alternatives import OURS
from bench.session import LeftOut
from bench.workload import Case

_now = [0.0]  # a clock for pytest-benchmark: it goes on by what each call took when it was measured


@pytest.mark.benchmark(timer=lambda: _now[0])
def test_routing(case: Case, contender: str, session: Any, benchmark: Any, request: pytest.FixtureRequest) -> None:
    """Time one row; it fails, and no figure is kept, if a result disagrees with the float64 reference, and where a
    goal that was held is lost."""
    try:
        row = session.run(case)
    except LeftOut as reason:
        pytest.skip(f"{case}: {reason}")
    if "refused" in row:
        pytest.fail(f"no speed figure: {row['refused']}", pytrace=False)
    entry = row["fastcaps"] if contender == OURS else row["alternatives"][contender]
    if "median" not in entry:
        pytest.skip(entry["failed"])
    benchmark.group = str(case)
    seconds = session.samples.get(contender, [entry["median"]])
    left = iter(seconds)
    benchmark.pedantic(lambda: _now.__setitem__(0, _now[0] + next(left)), rounds=len(seconds))
    if contender == OURS:
        benchmark.extra_info.update({name: row[name] for name in ("speedup", "sgemm_share", "votes_bytes")})
        held = request.config.getoption("no_goals") or not row["lost"]
        assert held, f"goals that were held are lost: {'; '.join(row['lost'])}"
