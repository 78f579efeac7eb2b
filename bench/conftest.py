"""Options, the session that rows are collected in, and the table at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_ROOT = Path(__file__).resolve().parents[1]
if str(_ROOT) not in sys.path:
    sys.path.append(str(_ROOT))  # last, so that an installed fastcaps comes before the checkout's

from bench import device_report, report  # noqa: E402
from bench.device_session import DeviceSession, DeviceSettings, cases  # noqa: E402
from bench.device_worker import DeviceCase  # noqa: E402
from bench.precision import PRECISIONS  # noqa: E402
from bench.session import Session, Settings  # noqa: E402
from bench.timing import FULL, QUICK  # noqa: E402
from bench.workloads import WORKLOADS, Workload, find  # noqa: E402

_SESSION = pytest.StashKey[Session]()
_DEVICE_SESSION = pytest.StashKey[DeviceSession]()

QUICK_BATCHES = {
    "tsai-c10-conv1": 2,
    "tsai-c10-fc": 16,
    "tsai-c100-fc2": 16,
    "tsai-dmm-vector-set": 4,
    "barham": 4,
    "sabour-mnist": 4,
    "hinton-fc": 4,
    "heinsen-sst-1": 2,
    "zhao-pool": 8,
}
"""What ``--quick`` runs, and at which batch."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastcaps bench")
    group.addoption("--quick", action="store_true", help="a few workloads at small batches in under two minutes")
    group.addoption("--workload", action="append", default=[], help="only these workloads (repeat, or commas between)")
    group.addoption("--batch", type=int, action="append", default=[], help="these batches instead of a workload's own")
    group.addoption("--results", default=None, help="folder for JSON and tables (default bench/results)")
    group.addoption("--threads", type=int, default=min(2, os.cpu_count() or 1), help="threads (default 2)")
    group.addoption("--no-compile", action="store_true", help="leave the torch.compile alternatives out")
    group.addoption("--no-alternatives", action="store_true", help="time fastcaps and sgemm only")
    group.addoption("--no-memory", action="store_true", help="leave the measurements of peak memory out")
    group.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="what to measure on (default cpu)")
    group.addoption("--precision", action="append", default=[], choices=tuple(PRECISIONS), help="cuda: only these")
    group.addoption("--seconds", type=float, default=270.0, help="cuda: time for everything (default 270)")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("benchmark_verbose", False):
        config.option.benchmark_quiet = True  # one table at the end, ours, is enough


def _settings(config: pytest.Config) -> Settings:
    quick = config.getoption("quick")
    results = config.getoption("results")
    folder = Path(results) if results else _ROOT / "bench" / "results" / ("quick" if quick else "")
    return Settings(
        results=folder,
        threads=config.getoption("threads"),
        plan=QUICK if quick else FULL,
        quick=quick,
        compiled=not (quick or config.getoption("no_compile")),
        alternatives=not config.getoption("no_alternatives"),
        memory=not config.getoption("no_memory"),
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    unused = "test_device.py" if config.getoption("device") == "cpu" else "test_routings.py"
    return True if collection_path.name == unused else None


def _workloads(config: pytest.Config) -> list[Workload]:
    names = [name for given in config.getoption("workload") for name in given.split(",")]
    every = QUICK_BATCHES if config.getoption("quick") else WORKLOADS
    try:
        return [find(name) for name in names or every]
    except ValueError as error:
        raise pytest.UsageError(f"--workload: {error}") from error


def _device_cases(config: pytest.Config) -> list[DeviceCase]:
    return cases(_workloads(config), config.getoption("batch"), config.getoption("precision"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device_case" in metafunc.fixturenames:
        wanted = _device_cases(metafunc.config)
        metafunc.parametrize("device_case", wanted, ids=[str(case).replace(" ", "-") for case in wanted])
    if "row" not in metafunc.fixturenames:
        return
    option = metafunc.config.getoption
    chosen, quick = _workloads(metafunc.config), option("quick")
    rows, labels = [], []
    for workload in chosen:
        default = QUICK_BATCHES.get(workload.name, 1) if quick else workload.batch
        batches = option("batch") or ([default] if quick else workload.batches)
        for batch in batches:
            for training in (False, True):
                rows.append((workload, batch, training))
                labels.append(f"{workload.name}-batch{batch}-{'training' if training else 'forward'}")
    metafunc.parametrize("row", rows, ids=labels)


@pytest.fixture(scope="session")
def bench_session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """The one session that all rows share: workers, machine, results."""
    session = Session(_settings(request.config))
    request.config.stash[_SESSION] = session
    yield session
    session.close()


@pytest.fixture(scope="session")
def device_session(request: pytest.FixtureRequest) -> Iterator[DeviceSession]:
    """The one session that all rows of a device share."""
    config = request.config
    option = config.getoption
    if option("device") == "cuda" and not torch.cuda.is_available():
        pytest.fail("--device cuda: torch sees no CUDA device here", pytrace=False)
    settings = DeviceSettings(
        results=_settings(config).results,
        device=option("device"),
        seconds=option("seconds"),
        alternatives=not option("no_alternatives"),
        compiled=not (option("quick") or option("no_compile") or option("no_alternatives")),
    )
    session = DeviceSession(settings, _device_cases(config))
    config.stash[_DEVICE_SESSION] = session
    yield session
    session.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    measured = config.stash.get(_DEVICE_SESSION, None)
    if measured is not None and measured.document["rows"]:
        terminalreporter.section("fastcaps benchmark")
        terminalreporter.write_line(device_report.markdown(measured.document))
        for path in measured.files:
            terminalreporter.write_line(f"written: {os.path.relpath(path)}")
    session = config.stash.get(_SESSION, None)
    if session is None or not session.document["rows"]:
        return
    terminalreporter.section("fastcaps benchmark")
    report.print_document(session.document)
    for path in session.files:
        terminalreporter.write_line(f"written: {os.path.relpath(path)}")
