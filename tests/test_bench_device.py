"""The benchmark's half for a device: order, gate, timing, processes, report and script, all of it tried on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from bench import profiled
from bench.alternatives import ALTERNATIVES, BLOCKED, OURS, build
from bench.record import ROOT
from bench.runner import Runner
from bench.session import Session
from bench.timing import measure
from bench.workload import PRECISIONS, Case, Workload
from bench.workloads import cases, find

DEVICES = ("cpu", *(["cuda"] if torch.cuda.is_available() else []))
TINY = replace(find("tsai-c10-fc"), types=8)


def _case(workload: Workload = TINY, batch: int = 2, training: bool = False, precision: str = "fp32") -> Case:
    return Case(workload, batch, training, precision)


# Order and goals


def test_a_failed_stage_is_counted_and_one_without_time_left_out(tmp_path: Path) -> None:
    done = _script("test", "profile", OUT=str(tmp_path), PYTHON="false")
    assert done.returncode == 2
    summary = (tmp_path / "summary.md").read_text()
    assert "| test | failed |" in summary and "| profile | failed |" in summary
    assert "exit status 1" in (tmp_path / "test.log").read_text()
    done = _script("test", OUT=str(tmp_path), FASTCAPS_GPU_SECONDS="3")
    assert done.returncode == 1 and "left out: the time is used up" in done.stdout


# Timing


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: graphs and memory are not measured")
def test_graphs_and_memory_of_a_device() -> None:
    device = torch.device("cuda")
    x = torch.ones(2**20, device="cuda")

    def call() -> dict[str, torch.Tensor]:
        scratch = torch.cat([x, x, x])
        return {"sum": scratch.sum()}

    found = measure(device, call, 0.02, alone=True)
    assert 0 < found["graph"]["median"] < found["median"] < 1e-2 and found["latency"] > 0
    assert 3 * 2**22 <= found["memory"]["beyond"] <= 3 * 2**22 + 2**21


# Runner and its process


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_runner_checks_and_measures(device: str, precision: str) -> None:
    served = Runner(device, 0.005)
    for case, name in ((_case(training=True, precision=precision), OURS), (_case(precision=precision), BLOCKED)):
        assert served.check(case, name)["complaint"] == "", name
        assert served.measure(case)["median"] > 0
    served.check(_case(batch=1, precision=precision), OURS)
    assert served.measure(_case(batch=1, precision=precision))["latency"] > 0


def test_the_runner_refuses_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    right = build(OURS, TINY)
    wrong = lambda **given: tuple(result * 1.01 for result in right(**given))  # noqa: E731
    monkeypatch.setattr("bench.runner.build", lambda *given: wrong)
    assert Runner("cpu", 0.005).check(_case(), OURS)["complaint"].startswith("parents errs by")


# Session


@pytest.mark.slow  # it starts a process for each contender
def test_a_session_in_earnest(tmp_path: Path) -> None:
    session = Session(tmp_path, ALTERNATIVES[:2], slice=0.005, clock=False)
    try:
        for case in cases(["tsai-c10-fc"], False, "cuda", [1], ["fp32"]):
            row = session.run(case)[0]
            assert "refused" not in row and row["speedup"] > 0 and not row["complete"]
            assert set(row["alternatives"]) == set(ALTERNATIVES[:2])
    finally:
        session.close()
    assert set(session.machine["rates"]) == {"copy", *PRECISIONS} and min(session.machine["rates"].values()) > 0


# The script and what it profiles


@pytest.mark.parametrize("device", DEVICES)
def test_the_profiled_program_runs(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    profiled.main(["tsai-c10-fc", "--device", device, "--batch", "2", "--table"])
    assert "attention_routing" in capsys.readouterr().out


def _script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "bench/gpu.sh"), *arguments]
    kept = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=kept)


def test_all_stages_say_what_they_would_run() -> None:
    done = _script("--dry-run")
    assert done.returncode == 0
    begun = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("== ") and ":" not in line]
    assert begun == ["build", "test", "sanitize", "bench", "profile"]
    sources = "".join(path.read_text() for path in (ROOT / "csrc/cuda").glob("*.h"))
    profiled = re.findall(r"regex:(\w+)", done.stdout)
    assert len(profiled) == 3 and all(f"\n{kernel}(const" in sources for kernel in profiled), profiled
    names = re.findall(r" -m ((?:tools|bench)[.\w]*)", done.stdout)
    assert names and all(find_spec(name) for name in names), names  # every program of ours that it runs is there
