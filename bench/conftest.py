"""Options, the rows they ask for, the run that rows are collected in, and the table at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.markdown import Markdown

from bench import record, report
from bench.alternatives import ALTERNATIVES, is_compiled
from bench.run import Run
from bench.timing import FULL, QUICK
from bench.workloads import cases

_BEGAN = time.monotonic()
_RUN = pytest.StashKey[Run]()
SHORT = ("workload", "batch", "fastcaps, ms (p20-p80)", "fastest alternative", "speed-up", "by processor time")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastcaps bench")
    group.addoption("--full", action="store_true", help="every row, torch.compile too (default: a few, in a minute)")
    group.addoption("--record", action="store_true", help="write to bench/results (default: .cache/bench)")
    group.addoption("--results", default=None, help="write to this folder instead")
    group.addoption("--workload", action="append", default=[], help="only these workloads (repeat, or commas between)")
    group.addoption("--against", action="append", default=[], choices=ALTERNATIVES, help="only this (repeat)")
    group.addoption("--threads", type=int, default=min(2, os.cpu_count() or 1), help="threads (default 2)")
    text = "budget of the whole run, processes and checks included: what is not finished then is left out of the report"
    group.addoption("--seconds", type=float, default=float("inf"), help=text)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    try:
        names = [name for given in option("workload") for name in given.split(",")]
        wanted = cases(names, not option("full"))
    except ValueError as error:
        raise pytest.UsageError(f"--workload: {error}") from error
    metafunc.parametrize("case", wanted, ids=[str(one).replace(" ", "-") for one in wanted])


@pytest.fixture(scope="session")
def names(request: pytest.FixtureRequest) -> list[str]:
    """The alternatives that take part: a quick run compiles none."""
    option = request.config.getoption
    return option("against") or [name for name in ALTERNATIVES if option("full") or not is_compiled(name)]


@pytest.fixture(scope="session")
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """The one run that all rows share: processes, machine, results."""
    option = request.config.getoption
    results = record.RESULTS if option("record") else record.ROOT / ".cache" / "bench"
    left = option("seconds") - (time.monotonic() - _BEGAN)
    plan = FULL if option("full") else QUICK
    made = Run(Path(option("results") or results), "bench", "cpu", option("threads"), left, plan=plan)
    request.config.stash[_RUN] = made
    yield made
    made.close()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    run = session.config.stash.get(_RUN, None)
    if run and not run.file and not exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED  # --seconds were too few for one row


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    run = config.stash.get(_RUN, None)
    if run is None:
        return
    terminalreporter.section("fastcaps benchmark")
    if run.file is None:
        seconds = config.getoption("seconds")
        terminalreporter.write_line(f"--seconds {seconds:g}: no row was finished, so there is nothing to report")
        return
    machine = run.machine | {"kind": "full"}  # a quick run's rows count here
    found = record.merge([{**entry, "machine": machine} for entry in run.entries])[machine["device"]]
    writer = terminalreporter._tw
    text = report.on_cpu(report.ordered(found, "bench"), SHORT)
    Console(file=writer._file, width=writer.fullwidth).print(Markdown(text))
    terminalreporter.write_line(f"written: {os.path.relpath(run.file)}")
