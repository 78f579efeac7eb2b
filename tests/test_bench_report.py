"""What the benchmark says of what it measured: tables, goals, and rows that are refused or left out."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from bench import report  # noqa: E402
from bench import session as module  # noqa: E402
from bench.alternatives import ALTERNATIVES, OURS, build, bytes_needed  # noqa: E402
from bench.session import Refused, Session, Settings  # noqa: E402
from bench.timing import Plan  # noqa: E402
from bench.worker import Worker  # noqa: E402
from bench.workloads import find  # noqa: E402


def _entry(seconds: float) -> dict[str, Any]:
    return {"median": seconds, "p20": seconds * 0.9, "p80": seconds * 1.1, "calls": 7}


def _row(**changes: Any) -> dict[str, Any]:
    row = {
        "workload": "tsai-c10-conv1",
        "source": "Tsai et al. 2020, Table 8",
        "batch": 8,
        "mode": "forward",
        "votes_bytes": 231_211_008,
        "operations": 693_633_024,
        "goal": {"speedup": 35, "sgemm_share": 0.45},
        "fastcaps": _entry(0.005),
        "alternatives": {
            "reference": _entry(0.5),
            "batched-matmul": _entry(0.2),
            "reference-compiled": {"failed": "the process died (exit code -6)"},
            "batched-matmul-compiled": {**_entry(0.15), "note": "it died; run again"},
        },
        "fastest": "batched-matmul-compiled",
        "speedup": 30.0,
        "gflops": 138.7,
        "sgemm_gflops": 370.0,
        "sgemm_share": 0.375,
        "memory": {
            "fastcaps": {"peak": 2_500_000, "results": 1_500_000, "beyond": 1_000_000},
            "batched-matmul": {"peak": 700_000_000, "results": 1_500_000, "beyond": 698_500_000},
        },
    }
    return row | changes


def _document(*rows: dict[str, Any]) -> dict[str, Any]:
    about = {
        "device": "Test Processor",
        "threads": 2,
        "cores": 2,
        "backend": "cpu",
        "capability": "avx512",
        "date": "2026-01-02T03:04:05+00:00",
        "commit": "abc",
        "modified": False,
        "versions": {"fastcaps": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
    }
    return {"format": 1, "kind": "full", "machine": about, "sgemm_size": 2048, "rows": list(rows)}


def test_markdown_holds_the_figures() -> None:
    text = report.markdown(
        _document(_row(), _row(mode="training step", goal=None), _row(batch=1, goal={"speedup": 1}, sgemm_gflops=380.0))
    )
    assert "Test Processor, 2 threads on 2 cores; sgemm of 2048³: 370 GFLOP/s (370 to 380 over the rows)" in text
    assert "**Forward**" in text and "**Training step**" in text and "**Forward, batch 1**" in text
    line = next(line for line in text.splitlines() if line.startswith("| tsai-c10-conv1 | 8"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == [
        "tsai-c10-conv1",
        "8",
        "231 MB",
        "5.00 (4.50-5.50)",
        "bmm, compiled*",
        "150 (135-165)",
        "30.0×",
        "139",
        "38%",
        "2.50 (1.00; 0.4%)",
        "700 (698)",
    ]
    assert "30.0× of the fastest alternative, goal 35.0×" in text
    assert "38% of sgemm, goal 45%" in text
    assert "reference, compiled: the process died (exit code -6)" in text


def test_shortfalls_are_only_those() -> None:
    assert report.shortfalls(_document(_row(speedup=36.0, sgemm_share=0.5))) == []
    assert len(report.shortfalls(_document(_row(speedup=36.0)))) == 1
    assert len(report.shortfalls(_document(_row(speedup=None)))) == 1
    assert "refused" in report.shortfalls(_document(_row(refused="parents errs by 1")))[0]


def test_means_and_memory_have_goals_of_their_own() -> None:
    goal = {"speedup": 8, "mean": 15, "memory_share": 0.05}
    memory = {"fastcaps": {"peak": 3e7, "results": 1e7, "beyond": 2e7}}
    rows = [_row(goal=goal, speedup=9.0), _row(goal=goal, speedup=16.0, workload="other", memory=memory)]
    document = _document(*rows, _row(goal=goal, speedup=None, fastest=None), _row(goal=None, speedup=1.0))
    assert report.means(document) == [("forward", pytest.approx(12.0), 2, 15)]
    assert report.shortfalls(document) == [
        "other batch 8 forward: 8.7% of the votes' bytes beside the results, goal 5%",
        "forward, geometric mean of 2 rows: 12.0×, goal 15.0×",
    ]
    assert "- forward: 12.0×, over 2 rows of whole routings (goal 15.0×)" in report.markdown(document)


def test_a_whole_layer_has_a_table_of_its_memory() -> None:
    sizes = {"peak": 9e8, "results": 1e8, "beyond": 8e8, "inputs": 3e7, "total": 9.3e8, "resident": 1.3e9}
    row = _row(
        mode="training step",
        goal={"total": 9e8},
        memory={"fastcaps": sizes},
        alternatives={"reference": {"left_out": "would need 90 GB"}},
        fastest=None,
        speedup=None,
    )
    text = report.markdown(_document(row))
    assert "**Memory of whole layers**" in text and report.WHOLE_LEGEND in text
    assert "| tsai-c10-conv1 | 8 | 231 MB | 5.00 (4.50-5.50) | 30.0 | 100 | 800 | 930 | 1,300 |" in text
    assert "reference: would need 90 GB — on tsai-c10-conv1 batch 8 training step" in text
    assert "tsai-c10-conv1 batch 8 training step: 930 MB in all tensors, goal 900 MB" in text
    assert "Memory of whole layers" not in report.markdown(_document(_row(mode="training step")))


def test_refused_rows_have_no_figures() -> None:
    refused = {key: value for key, value in _row().items() if key in ("workload", "batch", "mode", "votes_bytes")}
    text = report.markdown(_document(refused | {"refused": "parents errs by 1"}))
    assert "refused: parents errs by 1" in text and "× " not in text


def test_later_rows_replace_earlier_ones() -> None:
    merged = report.merge([_document(_row(), _row(batch=1)), _document(_row(speedup=40.0))])
    assert [(row["batch"], row["speedup"]) for row in merged["rows"]] == [(8, 40.0), (1, 30.0)]
    other = _document(_row())
    other["machine"] = other["machine"] | {"device": "Another"}
    with pytest.raises(ValueError, match="different devices"):
        report.merge([_document(_row()), other])


def test_the_command_line_puts_the_table_into_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, page = tmp_path / "r.json", tmp_path / "page.md"
    results.write_text(json.dumps(_document(_row())))
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    assert report.main([str(results), "--into", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text and "231 MB" in text
    assert report.main([str(results), "--into", str(page)]) == 0
    assert page.read_text() == text
    results.write_text(json.dumps(_document(_row(workload="zhao-pool"))))
    page.write_text(text + "\n".join(report.ROUTINGS))
    assert report.main([str(results), "--into", str(page)]) == 0
    begin, end = report.ROUTINGS
    assert page.read_text().startswith(text + begin) and "zhao-pool" in page.read_text().partition(end)[0]
    page.write_text("no markers")
    assert report.main([str(results), "--into", str(page)]) == 1
    assert page.read_text() == "no markers"
    capsys.readouterr()
    assert report.main([str(results)]) == 0
    assert "zhao-pool" in capsys.readouterr().out


# Session


def test_goals_are_those_of_the_default_batch(tmp_path: Path) -> None:
    session = Session(Settings(tmp_path, torch.get_num_threads(), Plan(sgemm=8), alternatives=False, memory=False))
    conv1, vector, barham = find("tsai-c10-conv1"), find("tsai-dmm-vector-set"), find("barham")
    assert session._row(conv1, 8, False)["goal"] == {"speedup": 35, "sgemm_share": 0.45}
    assert session._row(conv1, 8, True)["goal"] == {"speedup": 12}
    assert session._row(conv1, 1, True)["goal"] == {"speedup": 1.0}
    assert session._row(conv1, 3, True)["goal"] is None
    assert session._row(vector, 64, True)["goal"] == {"speedup": 2.5}
    assert session._row(barham, 64, False)["goal"] is None
    capnet, sabour = find("li-capnet-em"), find("sabour-mnist")
    whole = {"speedup": 8, "mean": 15}
    assert session._row(sabour, 64, False)["goal"] == whole
    assert session._row(capnet, 2, False)["goal"] == {**whole, "memory_share": 0.05}
    assert session._row(capnet, 128, True)["goal"] == {"memory_share": 0.05, "total": 1755e6}
    assert session._row(find("million"), 1, True)["default"]
    session.close()


def test_what_does_not_fit_into_memory_is_left_out(tmp_path: Path) -> None:
    workload = find("sabour-mnist")
    needed = {name: bytes_needed(name, workload, 64, True) for name in ALTERNATIVES}
    assert needed["reference"] > needed["batched-matmul"] > needed["batched-matmul-compiled"] > workload.votes_bytes(64)
    available = 0.5 * (needed["reference"] + needed["batched-matmul"]) / 0.6
    plan = Plan(sgemm=8)
    session = Session(Settings(tmp_path, 1, plan, compiled=False, memory=False, available=available))
    found = session._left_out(workload, 64, True)
    assert [*found] == ["reference"] and "would need" in found["reference"] and "times the votes" in found["reference"]
    session.close()


def test_a_row_that_disagrees_is_refused_and_one_that_agrees_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(rounds=2, block=0.001, budget=0.1, sgemm=32)
    session = Session(Settings(tmp_path, torch.get_num_threads(), plan, alternatives=False, memory=False))
    workload = replace(find("tsai-c10-fc"), types=8)
    case = session.prepare(workload, 1, False)
    case.schedule.before()
    row = session.finish(case, [0.25, 0.25])
    assert row["gflops"] == pytest.approx(workload.operations(1) / 0.25 / 1e9)
    assert row["speedup"] is None and row["memory"] == {"left_out": "left out"}

    right = build(OURS, workload)
    monkeypatch.setattr(module, "build", lambda name, w: lambda **given: tuple(x * 1.01 for x in right(**given)))
    with pytest.raises(Refused, match="parents errs by"):
        session.prepare(workload, 1, False)
    session.close()
    written = json.loads(session.files[0].read_text())
    assert [("refused" in row, "fastcaps" in row) for row in written["rows"]] == [(False, True), (True, False)]
    assert "refused" in session.files[1].read_text()


def test_a_call_that_used_up_its_time_is_not_made_again(tmp_path: Path) -> None:
    session = Session(Settings(tmp_path, 1, Plan(budget=3.0, sgemm=8), alternatives=False, memory=False))
    worker = Worker("reference", 1, tmp_path / "log")
    worker.first = 5.0
    contender = session._contender(worker)
    contender.turn(session.settings.plan)  # the worker has no process: a call would fail
    assert contender.samples == [5.0] and not contender.error
    worker.first = 1.0
    assert session._contender(worker).samples == []
    compiled = Worker("reference-compiled", 1, tmp_path / "log")
    compiled.first = 90.0  # most of it the compiler's
    assert session._contender(compiled).samples == []
    session.close()
