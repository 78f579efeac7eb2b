"""The benchmark's published figures: what is counted, which results are refused, ratios, records, README and docs."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bench import goals, gpu_report, record, report
from bench.alternatives import BLOCKED, OURS, STORED, build, runner
from bench.gate import SAME, Gate
from bench.process import WorkerError
from bench.record import ROOT
from bench.routings import AttentionPass
from bench.session import LeftOut, Session
from bench.timing import MULTIPLY_ADDS, doubts
from bench.workload import Case, Workload
from bench.workloads import WORKLOADS, find

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
        return [median] * arguments[-2]

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
    planted = session.file.with_suffix(".part")
    planted.symlink_to(folder / "victim")
    assert record.write(folder, session.rows) == session.file and [*folder.iterdir()] == [session.file]
    monkeypatch.setattr(record, "describe", lambda threads: MACHINE | {"threads": threads})
    wanted = {Case(CONV1, 8, False).key, Case(find("zhao-pool"), 1, False).key}
    assert record.finished(folder, 2, quick=False, complete=True) == wanted
    assert not record.finished(folder, 1, quick=False, complete=True) and not record.finished(folder, 2, True, False)


def test_the_budget_of_seconds_is_kept_and_what_was_measured_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that is not finished in time has no figures, so that no alternative counts as failed for lack of time."""
    now, answer = [0.0], _Served.call

    def slow(self: _Served, seconds: float, method: str, *arguments: Any) -> Any:
        now[0] += min(seconds, 1.0)
        if seconds < 1:
            raise WorkerError(f"no answer in {seconds:.0f} s")
        return answer(self, seconds, method, *arguments)

    monkeypatch.setattr("bench.session.time.monotonic", lambda: now[0])
    monkeypatch.setattr(_Served, "call", slow)
    session = _session(tmp_path, monkeypatch, TOOK, threads=2, quick=True)
    session.run(Case(CONV1, 8, False))
    took = now[0]
    for seconds in (1.5 * took, took + 0.5, took - 0.5, 0.5):
        now[0] = 0.0
        folder = tmp_path / f"{seconds}"
        session = _session(folder, monkeypatch, TOOK, threads=2, quick=True, seconds=seconds)
        finished = int(seconds // took)
        with pytest.raises(LeftOut, match="the time is used up"):
            for training in (False, True):
                session.run(Case(CONV1, 8, training))
        assert now[0] <= seconds and len(session.rows) == finished
        assert session.file is None if not finished else len(record.load(session.file)) == 1


def test_votes_and_operations_are_those_worked_out_by_hand_and_recorded() -> None:
    conv1 = find("tsai-c10-conv1")
    assert (conv1.output_grid, conv1.positions, conv1.children) == ((7, 7), 49, 288)
    votes = 8 * 49 * 288 * 32
    assert conv1.votes(8) == votes == 3_612_672
    # a vote: 4 x 4 x 4 multiply-adds; agreement and weighted sum: 4 x 4 each
    assert conv1.operations(8) == votes * 2 * (64 + 2 * 16)
    # 64 images, 7 x 7 positions, 4 rows: each an inner product of 9 * 32 * 4 numbers for 32 * 4 outputs
    assert find("barham").operations(64) == 2 * (64 * 49 * 4) * (9 * 32 * 4) * (32 * 4)
    for row in record.load(record.RESULTS):
        work, training = find(row["workload"]), row["mode"] != "forward"
        found = work.operations(row["batch"], training), work.votes_bytes(row["batch"])
        assert found == (row["operations"], row["votes_bytes"]), row["workload"]


def test_the_gate_passes_what_is_right_and_refuses_what_is_not() -> None:
    workload = Workload("tiny", "-", (2,), 3, 5, 2, 3, 4, AttentionPass(), grid=(7, 6), kernel_size=3, stride=2)
    gate, rounded = (Gate(workload, workload.inputs(2), tf32=tf32) for tf32 in (False, True))
    right, forward = (runner(build(OURS, workload), workload.inputs(2), training)() for training in (True, False))
    assert not gate.judge(right).complaints and not gate.judge(forward).complaints
    for key in right:
        wrong = {name: tensor.clone() for name, tensor in right.items()}
        largest = wrong[key].abs() == wrong[key].abs().max()
        wrong[key][largest] *= 1.001
        assert [complaint.split()[0] for complaint in gate.judge(wrong).complaints] == [key]
        assert gate.judge(wrong, SAME).complaints
        wrong[key][largest] = math.nan
        assert "not finite" in gate.judge(wrong).complaints[0]
    assert "wanted torch.float32 [2," in gate.judge({"parents": right["parents"][:1]}).complaints[0]
    assert gate.judge({name: tensor for name, tensor in right.items() if name != "dweight"}).complaints
    coarse = {"parents": right["parents"] * (1 + 5e-4)}
    assert gate.judge(coarse).complaints and not rounded.judge(coarse).complaints
    assert rounded.judge({"parents": right["parents"] * 1.01}).complaints


def test_wide_and_impossible_figures_are_doubtful() -> None:
    entry = {"median": 1.0, "p20": 0.9, "p80": 1.1}
    row = {"fastcaps": entry, "fastest": "x", "alternatives": {"x": entry}, "peak_share": 0.9, "machine": {"cores": 2}}
    assert doubts(row) == []
    assert doubts(row | {"load": 5.3}) == ["the load average was 5.3 on 2 cores"]
    assert doubts(row | {"peak_share": 1.95}) == ["195% of the machine's peak"]
    assert doubts(row | {"alternatives": {"x": entry | {"p80": 1.3}}}) == ["the middle 60 % of x's calls lie 40% apart"]


def test_a_goal_that_was_held_is_lost_and_one_that_was_not_is_not(row: dict[str, Any]) -> None:
    held, slower, slightly = (row | {"speedup": value, "goal": {"speedup": 35}} for value in (40.0, 30.0, 33.0))
    assert goals.lost(slower, held) == ["speed-up 30.0×, goal 35.0×"]
    assert goals.lost(slightly, held) == []  # within what two runs differ by
    assert goals.lost(slower, slower) == goals.lost(slower, None) == []
    assert goals.lost({**held, "refused": "errs"}, held) == ["refused, errs"]
    assert [len(goals.shortfalls([one])) for one in (held, slower, held | {"speedup": None})] == [0, 1, 0]


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
    written = report.write(rows, programs, record.load(record.RESULTS, kind=gpu_report.KIND), tmp_path)
    assert {tmp_path / "README.md", tmp_path / "docs/relation.md"} <= {*written} and len(written) >= 7
    for path in written:
        made, kept = path.read_text(), (ROOT / path.relative_to(tmp_path)).read_text()
        if path.suffix == ".svg":  # versions of matplotlib draw a text at other places
            made, kept = (re.findall(r">([^<>]+)</text>", each) for each in (made, kept))
        assert made == kept, path.name
    assert {row["workload"] for row in rows} == set(WORKLOADS)


def test_the_figures_of_a_speed_up_are_typed_nowhere() -> None:
    """Of README and docs only generated parts, and pages of other dated measurements, say how many times faster."""
    for path in (ROOT / "README.md", ROOT / "docs/index.md", *(ROOT / "docs").rglob("*.md")):
        if path.name != "learned.md":
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
    text = report.summary([row | {"speedup": None, "fastest": None}, row | {"speedup": 0.998}, slower, doubtful])
    assert text.startswith(
        "Rows marked ~ (1) are doubtful. An alternative is faster in 1 of 4 rows (and equally fast in 1):\n\n"
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
