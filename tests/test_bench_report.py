"""What the benchmark says of what it measured: rows, goals, records, tables, pages, and two commits side by side."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bench import compare, goals, record, report
from bench.alternatives import BEFORE, BLOCKED, OURS, STORED
from bench.process import WorkerError
from bench.record import ROOT
from bench.runner import TRITON
from bench.session import LeftOut, Session
from bench.timing import MULTIPLY_ADDS
from bench.workload import Case
from bench.workloads import WORKLOADS, cases, find

CONV1 = find("tsai-c10-conv1")
COMPILED = f"{STORED}-compiled"
TOOK = {OURS: 0.005, STORED: 0.3, COMPILED: 0.15, BLOCKED: 0.2, "sgemm": 0.05, "peak": 0.005}
MACHINE = {
    "device": "Test Processor",
    "cores": 2,
    "capability": "avx512",
    "date": "2026-01-02T03:04:05+00:00",
    "commit": "abc",
    "modified": False,
}


class _Served:
    """Replaces a process: answers at once. What ``seconds`` do not name fails."""

    seconds: ClassVar[dict[str, float]] = {}  # of a call, by the names of contenders
    wrong: ClassVar[str] = ""  # the contender whose result is

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
            return {"complaint": complaint, "errors": {}, "allowed": {}, "seconds": 0.1}
        if method == "memory":
            total = {OURS: 2_500_000, STORED: 700_000_000}[arguments[1]]
            return {"peak": total, "results": 1_500_000, "beyond": total - 1_500_000, "total": 10 * total}
        name = method.removeprefix("time_") if method.startswith("time_") else self._name
        if name not in self.seconds:
            raise WorkerError("out of memory")
        median = self.seconds[name]
        if method != "measure":
            return [median] * arguments[-2]
        memory = {"peak": 3_000_000, "results": 1_000_000, "beyond": 2_000_000}
        entry = {"median": median, "p20": median, "p80": median, "calls": 5, "memory": memory, "latency": 5e-5}
        return entry | ({"graph": {**entry, "median": 8e-5}} if name == OURS else {})

    def close(self) -> None:
        pass


def _session(
    folder: Path, patch: pytest.MonkeyPatch, took: dict[str, float], wrong: str = "", **changes: Any
) -> Session:
    patch.setattr("bench.session.Remote", _Served)
    patch.setattr("os.getloadavg", lambda: (0.5, 0.5, 0.5))
    patch.setattr(_Served, "seconds", took)
    patch.setattr(_Served, "wrong", wrong)
    made = Session(folder, **changes)
    if changes.get("device") != "cuda":
        made.machine |= MACHINE
    return made


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Return a session on a CPU that has run a layer forward; a compiled alternative of it needed a second chance."""
    made = _session(tmp_path, monkeypatch, TOOK, COMPILED, threads=2)
    made.run(Case(CONV1, 8, False))
    return made


@pytest.fixture
def row(session: Session) -> dict[str, Any]:
    """Return that session's row."""
    return session.rows[0]


# Sessions


def test_a_row_that_agrees_is_written_and_one_that_does_not_is_refused(
    session: Session, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (row["fastest"], row["speedup"]) == (COMPILED, pytest.approx(30.0)) and row["complete"]
    assert row["gflops"] == pytest.approx(CONV1.operations(8) / 0.005 / 1e9)
    assert row["peak_gflops"] == pytest.approx(2 * MULTIPLY_ADDS / 0.005 / 1e9)
    assert row["peak_share"] == pytest.approx(row["gflops"] / row["peak_gflops"])
    assert row["alternatives"]["einsum-compiled"] == {"failed": "out of memory"}
    assert row["alternatives"][COMPILED]["note"].startswith("wrong result: parents errs by 1; run again")
    assert session.samples.keys() == {OURS, COMPILED, BLOCKED}
    assert session.run(Case(CONV1, 8, False)) is row  # measured once
    monkeypatch.setattr(_Served, "wrong", OURS)
    refused = session.run(Case(CONV1, 8, True))
    assert refused["refused"] == "parents errs by 1" and not session.samples
    monkeypatch.setattr(_Served, "wrong", STORED)
    session.machine["capability"] = None  # no native code, and votes that no matmul makes
    pool = session.run(Case(find("zhao-pool"), 1, False))
    assert "peak_share" not in pool and pool["alternatives"][STORED] == {"failed": "wrong result: parents errs by 1"}
    assert session.file is not None
    written = record.load(session.file)
    assert [("refused" in one, "fastcaps" in one) for one in written] == [(False, True), (True, False), (False, True)]
    assert written[0]["machine"] == session.machine and {"commit", "date", "device"} <= session.machine.keys()
    assert "refused: parents errs by 1" in report.markdown(session.rows)
    folder = session.file.parent
    monkeypatch.setattr(record, "describe", lambda threads: MACHINE | {"threads": threads})
    wanted = {Case(CONV1, 8, False).key, Case(find("zhao-pool"), 1, False).key}
    assert record.finished(folder, 2, quick=False, complete=True) == wanted
    assert not record.finished(folder, 1, quick=False, complete=True) and not record.finished(folder, 2, True, False)


def test_a_session_on_a_device_compares_writes_and_says_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = cases(["tsai-c10-conv1"], False, "cuda", [128, 1], ["fp32"])
    took = {OURS: 1e-4, TRITON: 2e-4, STORED: 3e-3, "einsum-compiled": 2e-3}
    session = _session(tmp_path, monkeypatch, took, STORED, device="cuda", seconds=1000.0)
    row = session.run(wanted[0])
    assert row["fastest"] == "einsum-compiled" and row["speedup"] == pytest.approx(2e-3 / 8e-5)
    assert row["alternatives"].keys() == {STORED, COMPILED, "einsum-compiled"}  # blocks would wait for launches
    assert row["alternatives"][COMPILED] == {"failed": "out of memory"}
    assert row["alternatives"][STORED] == {"failed": "wrong result: parents errs by 1"}
    assert row["sgemm_share"] == pytest.approx(row["operations"] / 8e-5 / 5e13) and row["complete"]
    session.run(wanted[2])
    session._until -= 1001
    with pytest.raises(LeftOut, match="time is used up"):
        session.run(wanted[1])
    assert session.file is not None and len(json.loads(session.file.read_text())["rows"]) == 2
    text = report.markdown(session.rows)
    assert "| tsai-c10-conv1 | 128 | 3,699 | 0.100 (0.100-0.100) | einsum, compiled | 2.00" in text
    assert "| 0.080 | 0.200 |" in text and "2.00 (0.1%)" in text and "Test Device: copies 4.00 TB/s" in text
    assert "stored, compiled: out of memory: tsai-c10-conv1 batch 128 forward" in text
    assert "50.0 us to the end, three smallest launches take 30.0 us" in text
    assert "0.080 ms, goal" not in " ".join(goals.shortfalls(session.rows))  # of 0.30 ms


def test_a_quick_run_writes_where_it_is_told_and_its_groups_hold_all_contenders(tmp_path: Path) -> None:
    few = ["--workload", "zhao-pool", "--batch", "2", "--threads", "1", "--results", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", "bench", "-q", *few, f"--benchmark-json={tmp_path / 'benchmark.json'}"]
    # a worker of pytest-xdist marks its children as workers too, and pytest-benchmark then measures nothing
    alone = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=alone)
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "benchmark.json").read_text())["benchmarks"]
    groups = {one["group"] for one in found}
    assert groups == {"zhao-pool batch 2 forward", "zhao-pool batch 2 training step"} and len(found) == 4
    (written,) = tmp_path.glob("bench-*.json")
    row = json.loads(written.read_text())["rows"][0]
    (ours,) = (one for one in found if one["group"].endswith("forward") and one["name"].endswith("fastcaps]"))
    assert ours["stats"]["rounds"] == row["fastcaps"]["calls"]
    assert ours["stats"]["median"] == pytest.approx(row["fastcaps"]["median"], rel=1e-6)


# Goals and records


def test_a_goal_that_was_held_is_lost_and_one_that_was_not_is_not(row: dict[str, Any]) -> None:
    held, slower, slightly = (row | {"speedup": value, "goal": {"speedup": 35}} for value in (40.0, 30.0, 33.0))
    assert goals.lost(slower, held, quick=False) == ["speed-up 30.0×, goal 35.0×"]
    assert goals.lost(slightly, held, quick=False) == []  # within what two runs differ by
    assert goals.lost(slower, slower, quick=False) == goals.lost(slower, None, quick=False) == []
    assert goals.lost({**held, "refused": "errs"}, held, quick=False) == ["refused, errs"]
    assert goals.lost(slower, None, quick=True)  # a quick row's goals were all held
    assert [len(goals.shortfalls([one])) for one in (held, slower, held | {"speedup": None})] == [0, 1, 0]
    assert goals.goal_of(Case(find("tsai-c10-fc"), 16, True), quick=True) == {"speedup": 2.0}
    assert goals.goal_of(Case(find("tsai-c10-fc"), 8, True), quick=True) == {}


def test_the_newest_complete_row_wins_by_the_date_inside(row: dict[str, Any]) -> None:
    def made(date: str, kind: str = "full", device: str = "One", **changes: Any) -> dict[str, Any]:
        return row | changes | {"machine": row["machine"] | {"date": date, "kind": kind, "device": device}}

    rows = [
        made("2026-03-01", complete=False),
        made("2026-02-01", speedup=40.0),
        made("2026-01-01", speedup=20.0),
        made("2026-04-01", "quick", speedup=99.0),
        made("2026-01-01", complete=False, mode="training step"),
        made("2026-01-01", device="Another"),  # machines are kept apart
    ]
    for order in (rows, rows[::-1]):
        merged = [(each["machine"]["device"], each["mode"], each["speedup"]) for each in record.merge(order)]
        assert merged == [("Another", "forward", 30.0), ("One", "forward", 40.0), ("One", "training step", 30.0)]


def test_the_readme_and_the_docs_are_what_the_records_say(tmp_path: Path) -> None:
    rows, programs = record.merge(record.load(record.RESULTS)), record.load(record.RESULTS, kind="public")
    (tmp_path / "docs" / "performance").mkdir(parents=True)
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/performance").glob("*")):
        (tmp_path / path.relative_to(ROOT)).write_text(path.read_text())
    written = report.write(rows, programs, tmp_path)
    assert {tmp_path / "README.md", tmp_path / "docs/relation.md"} <= {*written} and len(written) >= 7
    for path in written:
        made, kept = path.read_text(), (ROOT / path.relative_to(tmp_path)).read_text()
        if path.suffix == ".svg":  # versions of matplotlib draw a text at other places
            made, kept = (re.findall(r">([^<>]+)</text>", each) for each in (made, kept))
        assert made == kept, path.name
    assert {row["workload"] for row in rows} == set(WORKLOADS)


def test_the_readme_speaks_of_the_gpu_that_was_measured_last(row: dict[str, Any]) -> None:
    last, before = (row | {"machine": row["machine"] | {"device": name, "date": date}}
                    for name, date in (("A", "2026-02-01"), ("B", "2026-01-01")))  # fmt: skip
    text = report.on_gpu([last, before])
    assert text.startswith("*A, float32, 2026-02-01") and text.count("forward 5.00 ms (**30.0×**) and 1.00 MB") == 1


def test_the_figures_of_a_speed_up_are_typed_nowhere() -> None:
    """Of README and docs only generated parts, and pages of other dated measurements, say how many times faster."""
    dated = {"encapnet.md", "learned.md"}
    for path in (ROOT / "README.md", ROOT / "docs/index.md", *(ROOT / "docs").rglob("*.md")):
        if path.name not in dated:
            text = re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", "", path.read_text(), flags=re.DOTALL)
            found = re.findall(r"[^\n]*\d ?× faster[^\n]*|[^\n]*\*\*[\d.]+×\*\*[^\n]*", text)
            found += re.findall(r"[^\n]*\d times (?:faster|as fast)[^\n]*|[^\n]*% of a (?:large )?matrix[^\n]*", text)
            assert not found, (path.name, found)


def test_tables_and_pages_hold_the_figures_and_what_is_wrong_with_them(row: dict[str, Any]) -> None:
    single = row | {"batch": 1, "default": False, "goal": {"speedup": 35}, "sgemm_gflops": 380.0}
    text = report.markdown([row, row | {"mode": "training step"}, single])
    assert "Test Processor, 2 threads on 2 cores; sgemm of 2048³: 344 GFLOP/s (344 to 380 over the rows)" in text
    assert "| tsai-c10-conv1 | 8 | 231 | 5.00 (5.00-5.00) | stored, compiled* | 150 (150-150) | 30.0× | 139 |" in text
    assert "| 139 | 40% | 65% | 1.00 (0.4%) | 698 | 25.0 |" in text
    head = next(line for line in report.markdown([row], short=True).splitlines() if line.startswith("| workload"))
    assert [name.strip() for name in head.strip("|").split("|")] == [*report.SHORT]
    assert "batch 1 forward: speed-up 30.0×, goal 35.0×" in text
    assert "einsum, compiled: out of memory" in text
    slower = row | {"mode": "training step", "speedup": 0.52}
    doubtful = row | {"speedup": 6735.0, "doubts": ["195% of the peak"]}
    text = report.summary([row | {"speedup": 0.998}, slower, doubtful])
    assert text.startswith(
        "Rows marked ~ (1) are doubtful. An alternative is faster in 1 of 3 rows (and equally fast in 1):\n\n"
        "- `tsai-c10-conv1` batch 8, t"
    )
    assert "training step: 0.520× of stored, compiled\n\n" in text
    assert "| `tsai-c10-conv1` (8) | 5.00 | ~6,735× | 5.00 | 0.520× | 1.00 | 698 |" in text
    assert "- tsai-c10-conv1 batch 8 forward: 195% of the peak" in report.markdown([doubtful])
    text = report.html(
        [row, row | {"mode": "training step", "speedup": 0.796}, single | {"speedup": None, "fastest": None}]
    )
    assert text.count("<svg") == 1 and 'name="viewport"' in text and "<td>30.0×</td>" in text
    for said in ("30.0×", "0.796×", "40%", "1.00", "698", "tsai-c10-conv1", "PyTorch, votes stored"):
        assert f">{said}</text>" in text, said
    assert not re.search(r"(src|href)=\"[^#]|url\([^#]|@import url", text)  # nothing from the network
    text = report.html([row | {"batch": 2, "default": False, "memory": {}}])  # as of a quick run
    assert ">30.0×</text>" in text and "votes stored</text>" not in text


def test_the_table_of_public_programs() -> None:
    about = MACHINE | {"threads": 2, "versions": {"torch": "2"}}
    row = {"repository": "a/b", "commit": "0123456789", "what": "`Layer`", "batch": 8, "network": False, "load": 0.5}
    row |= {"theirs": {"median": 0.2}, "ours": {"median": 0.05}, "memory": {"theirs": 9e8, "ours": 3e7}}
    row |= {"equal": {"float64": 2e-15}, "compiled": {"failed": "out of memory"}, "machine": about}
    network = row | {"what": "`Net`", "network": True, "refused": "results or gradients differ"}
    short, full = report.public([row, network], full=False), report.public([row, network])
    link = "| [a/b](https://github.com/a/b/tree/0123456789)"
    said = "`Layer` (8) | 200 → 50.0 (**4.00×**) | 900 → 30.0 (**30.0×**) | 2e-15 |"
    assert f"{link} | {said} out of memory |" in short and "`Net`" not in short
    assert "load average before a row 0.5" in full
    assert f"{link} 0123456 | {said} out of memory |" in full
    assert "`Net` (8) | refused: results or gradients differ |  |  |  |" in full


# Two commits


def test_the_older_side_has_its_own_package_and_this_checkouts_benchmark(tmp_path: Path) -> None:
    (tmp_path / "old" / "fastcaps").mkdir(parents=True)
    (tmp_path / "old" / "fastcaps" / "__init__.py").write_text("print('the older one')")
    folder = compare.linked(tmp_path / "old", tmp_path / "linked")
    script = "import fastcaps._testing.judge as one, bench.process as other; print(one.__file__, other.__file__)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, tmp_path / "old", ROOT)))}
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=folder, capture_output=True, text=True)
    files = [str(Path(one).resolve().relative_to(ROOT)) for one in done.stdout.split()[3:]]
    assert done.stdout.startswith("the older one") and files == ["fastcaps/_testing/judge.py", "bench/process.py"]
    with pytest.raises(ValueError, match="is neither a tree with fastcaps/ in it nor a commit"):
        compare.tree_of("no-such-commit")


def test_two_commits_are_judged_by_their_medians(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, *_ = cases(["tiny-attention"], quick=False)
    took = TOOK | {BEFORE: 0.004}
    found = []
    for wrong in ("", OURS, BEFORE):
        session = _session(tmp_path, monkeypatch, took, wrong, names=[BEFORE], quick=True)
        found.append(compare.compared(session.run(case)))
    assert found[0]["ratio"] == pytest.approx(1.25) and "ratio" not in found[1] | found[2]
    assert compare.line(found[1]).endswith("refused: parents errs by 1")
    assert compare.line(found[2]).endswith("refused: the older side: wrong result: parents errs by 1")
    assert not compare.summary(found[1:2], 0.03)[1] and not compare.summary(found[2:], 0.03)[1]
    lines, passed = compare.summary([found[0], found[0] | {"workload": "barham", "ratio": 1.02, "least": 1.0}], 0.03)
    assert not passed and "workloads: median ratio 1.020 over 1 rows" in lines  # tiny calls are counted apart
    assert any(line.startswith("slower: tiny-attention batch 1 forward") for line in lines)
    assert compare.summary([found[0] | {"ratio": 1.02, "least": 1.0}], 0.03)[1]
