"""Options, the rows they ask for, the session that rows are collected in, and the table at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.markdown import Markdown

from bench import record, report
from bench.alternatives import ALTERNATIVES, OURS, VERBS, is_compiled, suited
from bench.session import Session
from bench.workload import Case
from bench.workloads import cases

_BEGAN = time.monotonic()
_SESSION, _CASES = pytest.StashKey[Session](), pytest.StashKey[list[Case]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastcaps bench")
    group.addoption("--full", action="store_true", help="every row, torch.compile too (default: a few, in a minute)")
    group.addoption("--record", action="store_true", help="write to bench/results (default: .cache/bench)")
    group.addoption("--results", default=None, help="write to this folder instead")
    group.addoption("--html", type=Path, default=None, help="write the rows as a page with charts, too")
    group.addoption("--resume", action="store_true", help="leave out rows that this commit's records have")
    group.addoption("--no-goals", action="store_true", help="do not fail where a goal that was held is lost")
    group.addoption("--no-compile", action="store_true", help="leave the torch.compile alternatives out")
    group.addoption("--against", action="append", default=[], help="only this alternative (repeat)")
    group.addoption("--workload", action="append", default=[], help="only these workloads (repeat, or commas between)")
    group.addoption("--batch", type=int, action="append", default=[], help="these batches instead of a workload's own")
    group.addoption("--threads", type=int, default=min(2, os.cpu_count() or 1), help="threads (default 2)")
    text = "budget of the whole run, processes and checks included: what is not finished then is left out of the report"
    group.addoption("--seconds", type=float, default=float("inf"), help=text)


def _quick(config: pytest.Config) -> bool:
    return not config.getoption("full")


def _results(config: pytest.Config) -> Path:
    folder = record.RESULTS if config.getoption("record") else record.ROOT / ".cache" / "bench"
    return Path(config.getoption("results") or folder)


def _names(config: pytest.Config) -> list[str]:
    compiled = not (_quick(config) or config.getoption("no_compile"))
    return config.getoption("against") or [name for name in ALTERNATIVES if compiled or not is_compiled(name)]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    option = config.getoption
    if not any(option(f"benchmark_{name}", None) for name in ("verbose", "compare", "histogram", "autosave")):
        config.option.benchmark_quiet = True  # one table at the end, ours, is enough
    if unknown := {*option("against")} - (known := {*ALTERNATIVES, VERBS}):
        raise pytest.UsageError(f"--against: got {', '.join(sorted(unknown))}, want some of {', '.join(sorted(known))}")
    if (page := option("html")) and not page.parent.is_dir():
        raise pytest.UsageError(f"--html: there is no folder {page.parent}")
    names = [name for given in option("workload") for name in given.split(",")]
    try:
        wanted = cases(names, _quick(config), option("batch"))
    except ValueError as error:
        raise pytest.UsageError(f"--workload: {error}") from error
    if option("resume"):
        complete = _names(config) == [*ALTERNATIVES]
        done = record.finished(_results(config), option("threads"), _quick(config), complete)
        wanted = [one for one in wanted if one.key not in done]
    config.stash[_CASES] = wanted


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    config = metafunc.config
    names = _names(config)
    wanted = [(case, name) for case in config.stash[_CASES]
              for name in (OURS, *suited(names, case.workload, case.batch))]  # fmt: skip
    ids = [f"{case}-{name}".replace(" ", "-") for case, name in wanted]
    metafunc.parametrize(("case", "contender"), wanted, ids=ids)


@pytest.fixture(scope="session")
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """The one session that all rows share: processes, machine, results."""
    config, option = request.config, request.config.getoption
    how = option("threads"), option("seconds") - (time.monotonic() - _BEGAN)
    made = config.stash[_SESSION] = Session(_results(config), _names(config), _quick(config), *how)
    yield made
    made.close()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    measured = session.config.stash.get(_SESSION, None)
    if measured and not measured.file and not exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED  # --seconds were too few for one row


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    measured = config.stash.get(_SESSION, None)
    if measured is None:
        return
    terminalreporter.section("fastcaps benchmark")
    if measured.file is None:
        terminalreporter.write_line(
            f"--seconds {config.getoption('seconds'):g}: no row was finished, so there is nothing to report"
        )
        return
    writer = terminalreporter._tw
    Console(file=writer._file, width=writer.fullwidth).print(Markdown(report.markdown(measured.rows, short=True)))
    if page := config.getoption("html"):
        page.write_text(report.html(measured.rows), encoding="utf-8")
        terminalreporter.write_line(f"written: {page}")
    asked = len({case.key for case in config.stash[_CASES]})
    if len(measured.rows) < asked:
        terminalreporter.write_line(f"{len(measured.rows)} of {asked} rows were measured")
    terminalreporter.write_line(f"written: {os.path.relpath(measured.file)}")
