"""What the benchmark says of what it measured: tables, goals, records, pages, and rows that are refused or left out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from bench import compare, goals, record, report
from bench.alternatives import ALTERNATIVES, BLOCKED, OURS, STORED
from bench.process import WorkerError
from bench.record import ROOT
from bench.runner import TRITON
from bench.session import LeftOut, Session
from bench.timing import MULTIPLY_ADDS, Plan
from bench.workload import Case
from bench.workloads import QUICK, WORKLOADS, cases, find

MACHINE = {
    "device": "Test Processor",
    "threads": 2,
    "cores": 2,
    "backend": "cpu",
    "capability": "avx512",
    "date": "2026-01-02T03:04:05+00:00",
    "commit": "abc",
    "modified": False,
    "versions": {"fastcaps": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
    "kind": "full",
    "sgemm_size": 2048,
}


def _entry(seconds: float) -> dict[str, Any]:
    return {"median": seconds, "p20": seconds * 0.9, "p80": seconds * 1.1, "calls": 7}


def _row(**changes: Any) -> dict[str, Any]:
    row = {
        "machine": MACHINE,
        "default": True,
        "precision": "fp32",
        "complete": True,
        "workload": "tsai-c10-conv1",
        "source": "Tsai et al. 2020, Table 8",
        "batch": 8,
        "mode": "forward",
        "votes_bytes": 231_211_008,
        "operations": 693_633_024,
        "goal": {"speedup": 35},
        "fastcaps": _entry(0.005),
        "alternatives": {
            "blocked-matmul": _entry(0.2),
            "blocked-matmul-compiled": {"failed": "the process died (exit code -6)"},
            "batched-matmul-compiled": {**_entry(0.15), "note": "it died; run again"},
        },
        "fastest": "batched-matmul-compiled",
        "speedup": 30.0,
        "gflops": 138.7,
        "sgemm_gflops": 370.0,
        "sgemm_share": 0.375,
        "memory": {
            "fastcaps": {"peak": 2_500_000, "results": 1_500_000, "beyond": 1_000_000, "total": 12_000_000},
            "batched-matmul": {"peak": 700_000_000, "results": 1_500_000, "beyond": 698_500_000},
        },
    }
    return row | changes


def _file(folder: Path, name: str, *rows: dict[str, Any], **machine: Any) -> Path:
    """Write a run's file: what it was measured on once, then its rows."""
    bare = [{key: value for key, value in row.items() if key != "machine"} for row in rows]
    path = folder / name
    path.write_text(json.dumps({"machine": MACHINE | machine, "rows": bare}))
    return path


# Tables and goals


def test_a_goal_that_was_held_is_lost_and_one_that_was_not_is_not() -> None:
    held, slower = _row(speedup=40.0), _row(speedup=30.0)
    assert goals.lost(slower, held, quick=False) == ["30.0× of the fastest alternative, goal 35.0×"]
    assert goals.lost(_row(speedup=33.0), held, quick=False) == []  # within what two runs differ by
    assert goals.lost(slower, slower, quick=False) == goals.lost(slower, None, quick=False) == []
    assert goals.lost({**held, "refused": "errs"}, held, quick=False) == ["refused, errs"]
    assert [len(goals.shortfalls([_row(speedup=value)])) for value in (36.0, 34.0, None)] == [0, 1, 0]
    batch, forward, training = QUICK["tsai-c10-conv1"]
    quick = _row(batch=batch, goal=None, speedup=forward - 0.1)
    assert len(goals.lost(quick, None, quick=True)) == 1
    assert goals.lost(quick | {"speedup": forward}, None, quick=True) == []
    assert len(goals.lost(quick | {"mode": "training step", "speedup": training - 0.1}, None, quick=True)) == 1
    assert goals.lost(quick | {"batch": batch + 1}, None, quick=True) == []


# Records


def test_the_newest_complete_row_wins_by_the_date_inside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    partly = {"complete": False}
    newest = _file(tmp_path, "a.json", _row(speedup=50.0, **partly), _row(batch=1, **partly), date="2026-03-01")
    older = _file(tmp_path, "b.json", _row(speedup=40.0), date="2026-02-01")
    oldest = _file(tmp_path, "c.json", _row(speedup=30.0), _row(mode="training step"), date="2026-01-01")
    quick = _file(tmp_path, "d.json", _row(speedup=99.0), date="2026-04-01", kind="quick")
    for order in ([newest, older, oldest, quick], [quick, oldest, older, newest]):
        merged = {(row["batch"], row["mode"]): row for row in record.merge(record.load(*order))}
        assert merged[8, "forward"]["speedup"] == 40.0 and merged[8, "forward"]["machine"]["date"] == "2026-02-01"
        assert not merged[1, "forward"]["complete"] and (8, "training step") in merged
    _file(tmp_path, "e.json", _row(speedup=40.0), device="Another")  # machines are kept apart
    assert report.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Test Processor, 2 threads" in printed and "Another, 2 threads" in printed


def test_the_readme_and_the_docs_are_what_the_records_say(tmp_path: Path) -> None:
    rows = record.merge(record.load(record.RESULTS))
    (tmp_path / "docs" / "performance").mkdir(parents=True)
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("performance*"), *(ROOT / "docs/performance").glob("*")):
        if path.is_file():
            (tmp_path / path.relative_to(ROOT)).write_text(path.read_text())
    written = report.write(rows, tmp_path)
    assert tmp_path / "README.md" in written and len(written) >= 6
    for path in written:
        made, kept = path.read_text(), (ROOT / path.relative_to(tmp_path)).read_text()
        if path.suffix == ".svg":  # versions of matplotlib draw a text at other places
            made, kept = (re.findall(r">([^<>]+)</text>", each) for each in (made, kept))
        assert made == kept, path.name
    assert {row["workload"] for row in rows} == set(WORKLOADS)


def test_the_figures_of_a_speed_up_are_typed_nowhere() -> None:
    """Of README and docs only generated parts, and pages of other dated measurements, say how many times faster."""
    dated = {"encapnet.md", "learned.md", "compiled.md"}
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        if path.name not in dated:
            text = re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", "", path.read_text(), flags=re.DOTALL)
            found = re.findall(r"[^\n]*\d ?× faster[^\n]*|[^\n]*\*\*[\d.]+×\*\*[^\n]*", text)
            found += re.findall(r"[^\n]*\d times (?:faster|as fast)[^\n]*|[^\n]*% of a (?:large )?matrix[^\n]*", text)
            assert not found, (path.name, found)


# Session


class _Served:
    """Stands in for a process: answers at once, as it is told to."""

    seconds: ClassVar[dict[str, float]] = {}  # of a call on a GPU, by the names of implementations
    wrong = ""  # the implementation whose result is

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
            self._name = arguments[1]
            complaint = "parents errs by 1" if self._name == self.wrong and len(arguments) == 2 else ""
            settings = {"block": 7} if self._name == BLOCKED else {}
            return {"complaint": complaint, "errors": {}, "allowed": {}, "seconds": 0.1, "settings": settings}
        if method in ("time", "time_sgemm", "time_peak"):
            return [0.25] * arguments[-2]
        if method == "memory" or self._name not in self.seconds:
            raise WorkerError("out of memory")
        median = self.seconds[self._name]
        memory = {"peak": 3_000_000, "results": 1_000_000, "beyond": 2_000_000}
        entry = {"median": median, "p20": median, "p80": median, "calls": 5, "memory": memory, "latency": 5e-5}
        return entry | ({"graph": {**entry, "median": 8e-5}} if self._name == OURS else {})

    def close(self) -> None:
        pass


def _session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str = "", **changes: Any) -> Session:
    monkeypatch.setattr("bench.session.Remote", _Served)
    monkeypatch.setattr(_Served, "wrong", wrong)
    return Session(tmp_path, plan=Plan(rounds=2, block=0.001, budget=1.0, sgemm=32), **changes)


def test_a_row_that_disagrees_is_refused_and_one_that_agrees_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = replace(find("tsai-c10-fc"), types=80_000)  # votes that are worth blocks
    session = _session(tmp_path, monkeypatch, names=ALTERNATIVES[1:3], threads=2)
    session.machine["capability"] = "avx512"
    row, samples = session.run(Case(workload, 1, False))
    assert row["peak_gflops"] == pytest.approx(2 * MULTIPLY_ADDS / 0.25 / 1e9)
    assert row["peak_share"] == pytest.approx(row["gflops"] / row["peak_gflops"])
    assert row["alternatives"][BLOCKED] == {"settings": {"block": 7}} | row["alternatives"][f"{STORED}-compiled"]
    assert row["gflops"] == pytest.approx(workload.operations(1) / 0.25 / 1e9) and not row["complete"]
    assert row["speedup"] == 1.0 and set(samples) == {OURS, *ALTERNATIVES[1:3]}
    assert session.run(Case(workload, 1, False))[0] is row  # measured once
    monkeypatch.setattr(_Served, "wrong", OURS)
    row, samples = session.run(Case(workload, 1, True))
    assert row["refused"] == "parents errs by 1" and not samples
    assert session.file is not None
    written = record.load(session.file)
    assert [("refused" in row, "fastcaps" in row) for row in written] == [(False, True), (True, False)]
    assert written[0]["machine"] == session.machine and {"commit", "date", "device"} <= session.machine.keys()
    assert "refused" in report.markdown(session.rows)
    monkeypatch.setattr(_Served, "wrong", "")
    session.machine["capability"] = None  # no native code, and votes that no matmul makes
    row, samples = session.run(Case(find("zhao-pool"), 1, False))
    assert BLOCKED not in row["alternatives"] and BLOCKED not in samples
    assert record.has(tmp_path, Case(workload, 1, False)) and not record.has(tmp_path, Case(workload, 1, True))
    assert "peak_share" not in row
    session.close()


def test_a_wrong_compiled_result_has_a_second_chance_and_a_wrong_eager_one_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(find("tsai-c10-fc"), 1, False)
    session = _session(tmp_path, monkeypatch, wrong="batched-matmul-compiled")
    entry = session.run(case)[0]["alternatives"]["batched-matmul-compiled"]
    assert entry["median"] == 0.25 and entry["note"].startswith("wrong result: parents errs by 1; run again")
    session = _session(tmp_path, monkeypatch, wrong="batched-matmul")
    row = session.run(case)[0]
    assert row["alternatives"]["batched-matmul"] == {"failed": "wrong result: parents errs by 1"}
    assert len({entry["calls"] for entry in row["alternatives"].values() if "calls" in entry}) == 1


def test_a_session_compares_writes_and_says_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = cases(["tsai-c10-conv1"], False, "cuda", [128, 1], ["fp32"])
    took = {OURS: 1e-4, TRITON: 2e-4, "blocked-matmul-compiled": 2e-3, "einsum-compiled": 3e-3}
    monkeypatch.setattr(_Served, "seconds", took)
    session = _session(tmp_path, monkeypatch, BLOCKED, device="cuda", clock=False, seconds=1000.0)
    row = session.run(rows[0])[0]
    assert row["fastest"] == "blocked-matmul-compiled" and row["speedup"] == pytest.approx(2e-3 / 8e-5)
    assert row["alternatives"]["batched-matmul-compiled"] == {"failed": "out of memory"}
    assert row["alternatives"]["blocked-matmul"] == {"failed": "wrong result: parents errs by 1"}
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
    assert "50.0 us to the end, three smallest launches take 30.0 us" in text
    assert "0.080 ms, goal" not in " ".join(goals.shortfalls(session.rows))  # of 0.30 ms


# The command


def test_a_quick_run_writes_where_it_is_told_and_its_groups_hold_all_contenders(tmp_path: Path) -> None:
    few = ["--workload", "zhao-pool", "--batch", "2", "--threads", "1", "--results", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", "bench", "-q", *few, f"--benchmark-json={tmp_path / 'benchmark.json'}"]
    # a worker of pytest-xdist marks its children as workers too, and pytest-benchmark then measures nothing
    alone = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=alone)
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "benchmark.json").read_text())["benchmarks"]
    groups = {one["group"] for one in found}
    assert groups == {"zhao-pool batch 2 forward", "zhao-pool batch 2 training step"} and len(found) == 6
    (written,) = tmp_path.glob("bench-*.json")
    row = json.loads(written.read_text())["rows"][0]
    (ours,) = (one for one in found if one["group"].endswith("forward") and one["name"].endswith("fastcaps]"))
    assert ours["stats"]["rounds"] == row["fastcaps"]["calls"]
    assert ours["stats"]["median"] == pytest.approx(row["fastcaps"]["median"], rel=1e-6)


# Two commits


def test_a_row_that_is_fast_and_wrong_has_no_ratio() -> None:
    wrong: list[str] = []

    class Pretender:
        """A side that answers at once."""

        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def call(self, _: float, method: str, *given: Any) -> Any:
            if method == "check":
                return "".join(wrong)
            return {} if method == "prepare" else [self.seconds] * given[0]

    case, *_ = compare.rows_of(["tiny-attention"])
    pair: Any = [Pretender(4.0), Pretender(1.0)]
    assert compare.measure(pair, case, Plan(rounds=2))["ratio"] == 0.25
    wrong.append("parents err by 1")
    row = compare.measure(pair, case, Plan(rounds=2))
    assert "ratio" not in row and "refused: parents err by 1" in compare.line(row)


def test_a_comparison_is_judged_by_its_medians() -> None:
    row = {"workload": "barham", "batch": 1, "mode": "forward", "old": 1.0, "new": 1.0, "least": 1.0, "most": 1.0}
    tiny = row | {"workload": "tiny-em", "ratio": 0.5}
    lines, passed = compare.summary([row | {"ratio": 1.02}, row | {"ratio": 1.2, "least": 1.1}, tiny], 0.03)
    assert not passed and "workloads: median ratio 1.110 over 2 rows" in lines
    assert any(line.startswith("slower: barham batch 1 forward") for line in lines)
    assert compare.summary([row | {"ratio": 1.02}, tiny], 0.03)[1]
    differs = {"workload": "barham", "batch": 1, "mode": "forward", "refused": "parents differs by 1"}
    assert not compare.summary([row | {"ratio": 1.0}, differs], 0.03)[1]
    same = {"parents": np.array([1.0, 2.0])}
    assert compare.disagreement(same, same) == ""
    assert "differs by nan" in compare.disagreement(same, {"parents": np.array([1.0, np.nan])})


def test_tables_hold_the_figures_and_what_is_wrong_with_them(tmp_path: Path) -> None:
    single = _row(batch=1, default=False, goal={"speedup": 1}, sgemm_gflops=380.0, peak_gflops=250.0, peak_share=0.555)
    text = report.markdown([_row(), _row(mode="training step", goal=None), single])
    assert "Test Processor, 2 threads on 2 cores; sgemm of 2048³: 370 GFLOP/s (370 to 380 over the rows)" in text
    cells = "5.00 (4.50-5.50) | stored, compiled* | 150 (135-165) | 30.0× | 139 | 38% | 1.00 (0.4%) | 698 | 12.0 |"
    assert f"| tsai-c10-conv1 | 8 | 231 | {cells}" in text
    assert "30.0× of the fastest alternative, goal 35.0×" in text
    assert "blocked, compiled: the process died (exit code -6)" in text
    slower, doubtful = _row(mode="training step", speedup=0.52), _row(speedup=6735.0, doubts=["195% of the peak"])
    text = report.summary([slower, doubtful])
    assert text.startswith("An alternative is faster in 1 of 2 rows:\n\n- `tsai-c10-conv1` batch 8, training step: 0.5")
    assert "| `tsai-c10-conv1` (8) | 5.00 | ~6,735× | 5.00 | 0.520× | 1.00 | 698 |" in text
    assert "- tsai-c10-conv1 batch 8 forward: 195% of the peak" in report.markdown([doubtful])
    figures = ("fastcaps", "fastest", "speedup", "gflops", "sgemm_gflops", "sgemm_share", "memory")
    refused = {name: value for name, value in _row().items() if name not in figures}
    text = report.markdown([refused | {"refused": "parents errs by 1", "alternatives": {}}])
    assert "refused: parents errs by 1" in text and "× " not in text
    rows = [_row(), _row(mode="training step"), _row(batch=1, default=False, speedup=None, fastest=None)]
    text = report.html(rows)
    assert text.count("<svg") == 1 and 'name="viewport"' in text and "<td>30.0×</td>" in text
    for said in ("30.0×", "38%", "1.00", "698", "tsai-c10-conv1", "stored votes"):
        assert f">{said}</text>" in text, said
    assert not re.search(r"(src|href)=\"[^#]|url\([^#]|@import url", text)  # nothing from the network
    quick = [_row(batch=2, default=False, memory=None), _row(batch=2, default=False, mode="training step", memory=None)]
    text = report.html(quick)  # which measures no memory, and draws the batches that it has
    assert ">30.0×</text>" in text and "stored votes</text>" not in text
