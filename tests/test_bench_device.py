"""The benchmark's half for a device: order, gate, timing, processes, report and script, all of it tried on the CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from registry import Call

from bench import goals, report
from bench.alternatives import ALTERNATIVES, OURS, build, runner
from bench.device import cases, goal_of
from bench.gate import Gate
from bench.record import ROOT
from bench.runner import PRECISIONS, TRITON, Case, Remote, Runner, WorkerError
from bench.session import LeftOut, Session
from bench.timing import latency, measure, timed
from bench.workload import Workload
from bench.workloads import WORKLOADS, find
from fastcaps import backends
from fastcaps.rules import Rule
from tools import profile_target, sanitize

DEVICES = ("cpu", *(["cuda"] if torch.cuda.is_available() else []))
TINY = replace(find("tsai-c10-fc"), types=8)


def _case(workload: Workload = TINY, batch: int = 2, training: bool = False, precision: str = "fp32") -> Case:
    return Case(workload, batch, training, precision)


# Precision and gate


def test_the_gate_scales_with_the_unit_of_what_is_multiplied() -> None:
    inputs = TINY.inputs(2)
    found = runner(build("batched-matmul", TINY), TINY.inputs(2), False)()
    coarse = {"parents": found["parents"] * (1 + 5e-4)}
    assert Gate(TINY, inputs).judge(coarse).complaints
    assert not Gate(TINY, inputs, tf32=True).judge(coarse).complaints
    assert Gate(TINY, inputs, tf32=True).judge({"parents": found["parents"] * 1.01}).complaints


# Order and goals


def test_what_matters_most_comes_first() -> None:
    order = cases(list(WORKLOADS.values()))
    own = [work for work in WORKLOADS.values() if work.copies > 1]
    assert len(order) == len(set(order)) == (len(WORKLOADS) - len(own)) * 2 * 3 * 3 + len(own) * 2 * 3
    assert str(order[0]) == "tsai-c10-conv1 batch 128 forward" and {case.batch for case in order[:50]} == {128, 1}
    blocks = list(dict.fromkeys((case.batch, case.precision) for case in order if case.workload not in own))
    assert blocks == [(batch, precision) for batch in (128, 1, 32) for precision in PRECISIONS]
    large = [order.index(case) for case in order if case.workload in own]
    assert max(large) < order.index(next(case for case in order if case.batch == 1 and case.workload not in own))
    assert len(cases([TINY], [4], ["bf16"])) == 2


def test_a_row_has_the_goals_of_its_kind() -> None:
    conv1, fc = find("tsai-c10-conv1"), find("tsai-c10-fc")
    for case, wanted in (
        (_case(conv1, 128), {"memory_share", "seconds", "speedup"}),
        (_case(conv1, 128, True, "tf32"), {"memory_share", "seconds"}),
        (_case(fc, 1), {"latency"}),
        (_case(fc, 1, True), set()),
        (_case(fc, 32), set()),
        (_case(find("million"), 1, True), {"memory_share"}),
        (_case(find("zhao-pool"), 128), set()),  # its votes are its inputs
    ):
        assert set(goal_of(case, 3e-5)) == wanted, str(case)


# Timing


@pytest.mark.parametrize("device", DEVICES)
def test_times_are_those_of_the_call(device: str) -> None:
    found = timed(torch.device("cpu"), lambda: time.sleep(0.002), 0.02)
    assert 0.0019 < found["median"] < 0.02 and found["calls"] >= 5
    assert latency(torch.device(device), lambda: time.sleep(0.002), 3) > 0.0019


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
    for training in (False, True):
        case = _case(training=training, precision=precision)
        for name in (OURS, "batched-matmul", "blocked-matmul"):
            assert served.check(case, name)["complaint"] == "", name
            assert served.measure(case)["median"] > 0
    served.check(_case(batch=1, precision=precision), OURS)
    assert served.measure(_case(batch=1, precision=precision))["latency"] > 0


def test_the_runner_refuses_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    right = build(OURS, TINY)
    wrong = lambda **given: tuple(result * 1.01 for result in right(**given))  # noqa: E731
    monkeypatch.setattr("bench.runner.build", lambda *given: wrong)
    assert Runner("cpu", 0.005).check(_case(), OURS)["complaint"].startswith("parents errs by")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_process_without_its_device_says_so() -> None:
    remote = Remote(1, Runner, "cuda", 0.005)
    try:
        with pytest.raises(WorkerError, match=r"CUDA|NVIDIA"):
            remote.call(60, "check", _case(), OURS)
    finally:
        remote.close()


# Session


class _Served:
    """Stands in for a process: answers at once, as it is told to."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._asked: tuple[Any, ...] = ()

    def begin(self, *asked: Any) -> None:
        self._asked = asked

    def finish(self, seconds: float) -> Any:
        return self.call(seconds, *self._asked)

    def call(self, seconds: float, method: str, *arguments: Any) -> Any:
        if method == "describe":
            rates = {"copy": 4e12, "fp32": 5e13, "tf32": 3e14, "bf16": 7e14}
            return {"device": "Test Device", "memory": 8e10, "rates": rates, "three_launches": 3e-5}
        if method == "check":
            name = self._name = arguments[1]
            if name == "batched-matmul-compiled":
                raise WorkerError("out of memory")
            complaint = "parents errs" if name == "blocked-matmul" else ""
            return {"complaint": complaint, "errors": {}, "allowed": {}, "seconds": 0.1}
        median = {
            OURS: 1e-4,
            TRITON: 2e-4,
            "blocked-matmul-compiled": 2e-3,
            "einsum-compiled": 3e-3,
        }[self._name]
        memory = {"peak": 3_000_000, "results": 1_000_000, "beyond": 2_000_000}
        entry = {"median": median, "p20": median, "p80": median, "calls": 5, "memory": memory, "latency": 5e-5}
        return entry | ({"graph": {**entry, "median": 8e-5}} if self._name == OURS else {})

    def close(self) -> None:
        pass


def test_a_session_compares_writes_and_says_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.session.Remote", _Served)
    rows = cases([find("tsai-c10-conv1")], [128, 1], ["fp32"])
    session = Session(tmp_path, device="cuda", clock=False, seconds=1000.0)
    row = session.run(rows[0])[0]
    assert row["fastest"] == "blocked-matmul-compiled" and row["speedup"] == pytest.approx(2e-3 / 8e-5)
    assert row["alternatives"]["batched-matmul-compiled"] == {"failed": "out of memory"}
    assert row["alternatives"]["blocked-matmul"] == {"failed": "wrong result: parents errs"}
    assert row["sgemm_share"] == pytest.approx(row["operations"] / 8e-5 / 5e13) and row["complete"]
    session.run(rows[2])
    session._until -= 1001
    with pytest.raises(LeftOut, match="time is used up"):
        session.run(rows[1])
    session.close()
    assert session.file is not None and len(json.loads(session.file.read_text())["rows"]) == 2
    text = report.markdown(session.rows)
    assert "| tsai-c10-conv1 | 128 | 3,699 | 0.100 (0.100-0.100) | blocked, compiled | 2.00" in text
    assert "| 0.080 | 0.200 |" in text and "2.00 (0.1%)" in text and "Test Device: copies 4.00 TB/s" in text
    assert "stored, compiled: out of memory: tsai-c10-conv1 batch 128 forward" in text
    assert "50 us to the end, three smallest launches take 30 us" in text
    assert "0.080 ms, goal" not in " ".join(goals.shortfalls(session.rows))  # of 0.30 ms


def test_a_session_in_earnest(tmp_path: Path) -> None:
    session = Session(tmp_path, ALTERNATIVES[:2], slice=0.005, clock=False)
    try:
        for case in cases([find("tsai-c10-fc")], [1], ["fp32"]):
            row = session.run(case)[0]
            assert "refused" not in row and row["speedup"] > 0 and not row["complete"]
            assert set(row["alternatives"]) == set(ALTERNATIVES[:2])
    finally:
        session.close()
    assert set(session.machine["rates"]) == {"copy", *PRECISIONS} and min(session.machine["rates"].values()) > 0


# Drivers and script


@pytest.mark.parametrize("device", DEVICES)
def test_the_calls_for_the_sanitizer_agree_with_the_reference(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize.main(["--device", device]) == 0
    names = " ".join(sanitize.calls())
    assert all(name in names for name in (*Rule.__members__, *sanitize.ROWS))
    assert capsys.readouterr().out.count("ok ") == 2 * len(sanitize.calls())


def test_a_wrong_call_for_the_sanitizer_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Call.by_op
    monkeypatch.setattr(Call, "by_op", lambda call: {name: 1.01 * result for name, result in right(call).items()})
    assert sanitize.main(["--device", "cpu", "--only", "attention LAYER_NORM pose-2x3-5"]) == 1
    assert "WRONG  attention LAYER_NORM pose-2x3-5, free: parents errs" in capsys.readouterr().out


@pytest.mark.parametrize("device", DEVICES)
def test_the_profiled_program_runs(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", device, "--workload", "tsai-c10-fc", "--batch", "2", "--calls", "1"]
    assert profile_target.main(arguments) == 0
    assert profile_target.main([*arguments, "--table"]) == 0
    kernel = "backward_kernel" if device == "cuda" else "fastcaps_cpu::attention_routing_backward"
    assert (kernel if device == "cuda" or backends.native_serves() else "_RecordedBackward") in capsys.readouterr().out


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
    for line in done.stdout.splitlines():
        words = line.split()
        for word in words:  # every file of ours that it runs is there
            if word.startswith(("bench/", "tools/")) and word.endswith(".py"):
                assert (ROOT / word).is_file(), word


def test_the_script_refuses_an_unknown_stage() -> None:
    done = _script("--dry-run", "nonsense")
    assert done.returncode == 64 and "no stage nonsense" in done.stderr


def test_a_failed_stage_is_counted_and_written_down(tmp_path: Path) -> None:
    done = _script("test", "profile", OUT=str(tmp_path), PYTHON="false")
    assert done.returncode == 2
    summary = (tmp_path / "summary.md").read_text()
    assert "| test | failed |" in summary and "| profile | failed |" in summary
    assert "exit status 1" in (tmp_path / "test.log").read_text()


def test_a_stage_without_time_is_left_out(tmp_path: Path) -> None:
    done = _script("test", OUT=str(tmp_path), FASTCAPS_GPU_SECONDS="3")
    assert done.returncode == 1 and "left out: the time is used up" in done.stdout
