"""The benchmark: rows that run, results that are refused, processes that die, and figures that follow from records."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from bench import gpu, probe, record, report
from bench.alternatives import OURS, STORED, build
from bench.floors import Chip, floors
from bench.process import Remote, WorkerError
from bench.record import ROOT
from bench.run import Run
from bench.timing import QUICK
from bench.workload import Case
from bench.workloads import WORKLOADS, find

CONV1, SMALL = find("tsai-c10-conv1"), find("tsai-c100-fc2")


def test_the_readme_and_the_docs_are_what_the_records_say(tmp_path: Path) -> None:
    (tmp_path / "docs" / "performance").mkdir(parents=True)
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/performance").glob("*")):
        (tmp_path / path.relative_to(ROOT)).write_text(path.read_text())
    written = report.write([record.RESULTS], tmp_path)
    assert {tmp_path / "README.md", tmp_path / "docs/relation.md"} <= {*written} and len(written) >= 7
    for path in written:
        made, kept = path.read_text(), (ROOT / path.relative_to(tmp_path)).read_text()
        if path.suffix == ".svg":  # versions of matplotlib draw a text at other places
            made, kept = (re.findall(r">([^<>]+)</text>", each) for each in (made, kept))
        assert made == kept, path.name


def test_the_figures_of_a_speed_up_are_typed_nowhere() -> None:
    """Of README and docs only generated parts, and pages of other dated measurements, say how many times faster."""
    dated = {"encapnet.md", "learned.md"}
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        if path.name not in dated:
            text = re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", "", path.read_text(), flags=re.DOTALL)
            found = re.findall(r"[^\n]*\d ?× faster[^\n]*|[^\n]*\*\*[\d.]+×\*\*[^\n]*", text)
            found += re.findall(r"[^\n]*\d times (?:faster|as fast)[^\n]*|[^\n]*% of a (?:large )?matrix[^\n]*", text)
            assert not found, (path.name, found)


def test_a_quick_row_is_checked_timed_and_recorded(tmp_path: Path) -> None:
    run = Run(tmp_path, "bench", "cpu", threads=1, seconds=120, plan=QUICK)
    case = Case(SMALL, 2, training=True)
    try:
        found = run.compare(case, [STORED])
        run.until = 0.0
        assert not run.compare(case, [STORED]) and len(run.entries) == 2  # what is not finished in time has no entries
    finally:
        run.close()
    assert all(entry["warm"]["median"] > 0 and not entry["complaint"] for entry in found.values())
    assert {*found[OURS]["errors"]} > {"parents", "dchildren", "dweight"}
    rows = record.load(tmp_path, kind="bench")
    assert not record.merge(rows)  # quick ones are on no page
    calls = record.merge([{**row, "machine": {**row["machine"], "kind": "full"}} for row in rows])
    (device, some), *_ = calls.items()
    assert some == {case.key: {row["how"]: row for row in some[case.key].values()}} and device in report.on_cpu(some)
    assert "| tsai-c100-fc2 | 2 | 0.576 | " in report.on_cpu(some) and "| stored | " in report.on_cpu(some)


def _wrong(*given: Any, **options: Any) -> Any:
    right = build(OURS, SMALL)
    return lambda **tensors: tuple(one * 1.001 for one in right(**tensors))


def test_a_wrong_result_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and gradients, at the largest batch of a run and at a smaller one; and no contender is timed then."""
    made = probe.Probe("cpu", 3)
    assert not made.prepare(Case(SMALL, 3, True))["complaint"]
    monkeypatch.setattr(probe, "build", _wrong)
    for batch in (3, 2, 1):
        found = made.prepare(Case(SMALL, batch, True))["complaint"]
        assert all(f"{name} errs" in found for name in ("parents", "dchildren", "dweight"))
    found = made.compare(Case(SMALL, 2, False), [OURS, STORED], QUICK, False)
    assert found.keys() == {OURS} and "warm" not in found[OURS]


def test_a_map_on_the_cpu_keeps_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--device", "cpu", "--batch", "3", "--precision", "fp32", "--workload", SMALL.name, "--results"]
    assert gpu.main(["map", *asked, str(tmp_path)]) == 0
    rows = record.load(tmp_path, kind="gpu")
    assert [(row["mode"], row["complaint"]) for row in rows] == [("training step", ""), ("forward", "")]
    others = ["alternatives", *asked[:-1], "--against", STORED, "--results", str(tmp_path)]
    assert gpu.main(others) == 0 and "2 entries of 2 rows" in capsys.readouterr().out
    assert gpu.main(others) == 0 and "0 entries of 2 rows" in capsys.readouterr().out  # they are known
    for library in ("new=there/is/none.so", f"{OURS}={__file__}", __file__):
        with pytest.raises(SystemExit):
            gpu.main(["map", "--device", "cpu", "--library", library])
        assert "--library: got" in capsys.readouterr().err
    rows = gpu.order([], [], [])
    assert len({row.key for row in rows}) == len(rows) == (len(WORKLOADS) - 2) * 2 * 3 * 3 + 2 * 2 * 3


class _Environment:
    """What a process sees."""

    def library(self) -> str | None:
        return os.environ.get("FASTCAPS_CUDA_LIBRARY")

    def die(self) -> None:
        os._exit(1)


def test_a_process_that_dies_is_followed_by_another() -> None:
    remote = Remote(1, _Environment, environment={"FASTCAPS_CUDA_LIBRARY": "a.so"})
    for _ in range(2):
        assert remote.call(60, "library") == "a.so"
        with pytest.raises(WorkerError, match="died"):
            remote.call(60, "die")
    with pytest.raises(WorkerError, match="AttributeError"):
        remote.call(60, "unknown")
    remote.close()
    assert "FASTCAPS_CUDA_LIBRARY" not in os.environ


def test_bounds_are_those_worked_out_by_hand() -> None:
    votes, chip = 128 * 49 * 288 * 32, Chip()
    found = floors(Case(CONV1, 128, False), chip)
    assert found["multiply_adds"] == pytest.approx(2 * votes * (64 + 2 * 16) / 67e12)
    assert found["bound"] == pytest.approx(3 * 2 * votes * 64 / chip.tf32)  # by three products each


def test_a_gpus_table_shows_the_newest_entry_and_the_fastest_alternative() -> None:
    def entry(how: str, seconds: float, date: str = "2026-02-01", **changes: Any) -> dict[str, Any]:
        machine = {"device": "A", "date": date, "commit": "abc", "modified": False, "versions": {}, "kind": "full"}
        call = dict(zip(record.CALL, (CONV1.name, 128, "forward", "fp32"), strict=True))
        return {**call, "how": how, "warm": {"median": seconds}, "complaint": "", "machine": machine, **changes}

    entries = [
        entry(OURS, 9e-4, "2026-01-01"),
        entry(OURS, 5e-4, busy=4e-4, launches=2, host=1e-4, graph={"median": 4.5e-4}, memory={"beyond": 2_000_000}),
        entry(OURS, 1.0, "2026-03-01", failed="no answer"),  # an older figure counts more than none
        entry(STORED, 5e-3),
        entry(f"{STORED}-compiled", 3e-3),
        entry("base", 1.0),  # of a comparison of builds
        entry("einsum-compiled", 1e-6, complaint="wrong"),
    ]
    assert (
        "| tsai-c10-conv1 | 128 | 0.450 | 0.210, 0.170, 0.170 | 18% | 2 | 100 | 2.00 | stored, compiled 3.00 (6.67×) |"
    ) in report.on_gpus(record.merge(entries))


def test_workloads_have_the_sizes_of_the_papers() -> None:
    assert (CONV1.output_grid, CONV1.children, CONV1.votes(8)) == ((7, 7), 288, 8 * 49 * 288 * 32)
    assert SMALL.votes_bytes(128) == 128 * 20 * 100 * 36 * 4
