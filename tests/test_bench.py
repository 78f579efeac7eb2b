"""The benchmark measures what it says: registry, alternatives, gate, timing, memory, workers and report."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from bench import report  # noqa: E402
from bench.alternatives import ALTERNATIVES, OURS, build, eager, runner  # noqa: E402
from bench.gate import SAME, Gate, convolution  # noqa: E402
from bench.memory_probe import measure, measure_fresh, peak_of_pass, peak_supported  # noqa: E402
from bench.timing import Contender, Plan, Schedule, Sgemm, quantiles  # noqa: E402
from bench.worker import Worker, WorkerError  # noqa: E402
from bench.workloads import WORKLOADS, Workload, find  # noqa: E402

MEGABYTES = {
    "tsai-c10-conv1": 231,
    "tsai-c10-conv2": 236,
    "tsai-c10-fc": 66,
    "tsai-c100-conv1": 260,
    "tsai-c100-fc1": 147,
    "tsai-c100-fc2": 37,
    "tsai-dmm-matrix-conv": 170,
    "tsai-dmm-matrix-set": 94,
    "tsai-dmm-vector-conv": 85,
    "tsai-dmm-vector-set": 94,
    "barham": 1850,
}
"""Bytes of stored votes at the default batch, worked out by hand."""

TINY = (
    Workload("tiny-grid", "-", 2, 3, 5, 2, 3, 4, grid=(7, 6), kernel_size=3, stride=2),
    Workload("tiny-vector-grid", "-", 2, 3, 4, 1, 5, 6, grid=(4, 4), kernel_size=2),
    Workload("tiny-set", "-", 3, 7, 5, 2, 2, 2),
    Workload("tiny-vector-set", "-", 3, 7, 5, 1, 4, 6),
    Workload(
        "tiny-uniform", "-", 2, 3, 5, 2, 3, 3, grid=(5, 5), kernel_size=3, stride=2, uniform=True, normalize=False
    ),
    Workload("tiny-uniform-set", "-", 2, 6, 5, 2, 3, 3, uniform=True),
    Workload("tiny-bare", "-", 2, 6, 5, 2, 2, 3, normalize=False),
)


# Registry


@pytest.mark.parametrize("name", WORKLOADS)
def test_votes_take_the_bytes_worked_out_by_hand(name: str) -> None:
    workload = WORKLOADS[name]
    assert round(workload.votes_bytes(workload.batch) / 1e6) == MEGABYTES[name]


def test_operations_of_conv1() -> None:
    conv1 = find("tsai-c10-conv1")
    assert (conv1.output_grid, conv1.positions, conv1.children) == ((7, 7), 49, 288)
    votes = 8 * 49 * 288 * 32
    assert conv1.votes(8) == votes == 3_612_672
    # a vote: 4 x 4 x 4 multiply-adds; agreement and weighted sum: 4 x 4 each
    assert conv1.operations(8) == votes * 2 * (64 + 2 * 16)
    assert conv1.operations(8, training=True) == 3 * conv1.operations(8)


def test_a_uniform_pass_counts_the_convolution_only() -> None:
    # 64 images, 7 x 7 positions, 4 rows: each an inner product of 9 * 32 * 4 numbers for 32 * 4 outputs
    assert find("barham").operations(64) == 2 * (64 * 49 * 4) * (9 * 32 * 4) * (32 * 4)


def test_inputs_are_the_same_for_the_same_seed_and_lie_channels_last() -> None:
    workload = find("tsai-dmm-matrix-conv")
    first, again, other = workload.inputs(2, seed=1), workload.inputs(2, seed=1), workload.inputs(2, seed=2)
    assert torch.equal(first.children, again.children) and torch.equal(first.grad, again.grad)
    assert not torch.equal(first.children, other.children)
    assert first.children.shape == (2, 16, 8, 8, 8, 8)
    assert first.children.movedim(1, 3).is_contiguous()
    assert first.parents is not None and first.parents.shape == (2, 16, 6, 6, 8, 8)
    assert first.parents.movedim(1, 3).is_contiguous()
    assert workload.inputs(2, dtype=torch.float64).weight.dtype == torch.float64


def test_an_unknown_workload_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'conv9'.*tsai-c10-conv1"):
        find("conv9")


# Alternatives


@pytest.mark.parametrize("workload", TINY, ids=lambda w: w.name)
def test_alternatives_agree_with_the_reference(workload: Workload) -> None:
    wanted = runner(build("reference", workload), workload.inputs(workload.batch, dtype=torch.float64), True)()
    names = {f"d{name}" for name in workload.inputs(1).present()} | {"parents"}
    assert wanted.keys() == names
    for name in (OURS, "batched-matmul"):
        inputs = workload.inputs(workload.batch, dtype=torch.float64)
        found = runner(build(name, workload), inputs, True)()
        forward = runner(build(name, workload), workload.inputs(workload.batch, dtype=torch.float64), False)()
        assert found.keys() == names
        torch.testing.assert_close(forward["parents"], wanted["parents"], rtol=1e-12, atol=1e-12)
        for key, tensor in wanted.items():
            torch.testing.assert_close(
                found[key], tensor, rtol=1e-11, atol=1e-11, msg=lambda m, k=key, n=name: n + k + m
            )


def test_compiled_alternatives_have_no_graph_break_and_agree() -> None:
    workload = TINY[0]
    wanted = runner(build("reference", workload), workload.inputs(2), True)()
    for name in ALTERNATIVES[2:]:
        torch._dynamo.reset()
        # tracing is what may break; generating code takes a compiler and much longer
        traced = torch.compile(eager(name, workload), backend="aot_eager", fullgraph=True, dynamic=False)
        found = runner(traced, workload.inputs(2), True)()
        for key, tensor in wanted.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


def test_an_unknown_implementation_is_refused() -> None:
    for name in ("magic", "fastcaps-compiled"):
        with pytest.raises(ValueError, match="unknown implementation"):
            build(name, TINY[0])


# Gate


def _result(workload: Workload, batch: int, training: bool = True) -> dict[str, Tensor]:
    return runner(build(OURS, workload), workload.inputs(batch), training)()


@pytest.mark.parametrize("workload", TINY, ids=lambda w: w.name)
def test_the_gate_reference_is_the_same_in_parts(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Gate(workload, workload.inputs(workload.batch))
    monkeypatch.setattr("bench.gate._CHUNK_BYTES", 1)
    parts = Gate(workload, workload.inputs(workload.batch))
    assert whole.exact.keys() == parts.exact.keys()
    for key, tensor in whole.exact.items():
        torch.testing.assert_close(parts.exact[key], tensor, rtol=1e-12, atol=1e-12)


def test_the_convolution_that_uniform_passes_are_measured_by_is_right() -> None:
    workload = TINY[4]
    assert workload.uniform
    wanted = runner(build("reference", workload), workload.inputs(2, dtype=torch.float64), True)()
    found = runner(convolution(workload), workload.inputs(2, dtype=torch.float64), True)()
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-12, atol=1e-12)


def test_the_gate_passes_what_is_right_and_refuses_what_is_not() -> None:
    workload = TINY[0]
    gate = Gate(workload, workload.inputs(2))
    right = _result(workload, 2)
    assert gate.judge(right).passed
    assert gate.judge(_result(workload, 2, training=False)).passed
    for key in right:
        wrong = {name: tensor.clone() for name, tensor in right.items()}
        largest = wrong[key].abs() == wrong[key].abs().max()
        wrong[key][largest] *= 1.001
        verdict = gate.judge(wrong)
        assert not verdict.passed and verdict.complaint.startswith(key)
        assert not gate.judge(wrong, SAME).passed
        wrong[key][largest] = math.nan
        assert "not finite" in gate.judge(wrong).complaint
    assert "shape" in gate.judge({"parents": right["parents"][:1]}).complaint
    missing = {name: tensor for name, tensor in right.items() if name != "dweight"}
    assert not gate.judge(missing).passed


# Timing


def test_quantiles() -> None:
    found = quantiles([5.0, 1.0, 2.0, 4.0, 3.0])
    assert found == {"median": 3.0, "p20": pytest.approx(1.8), "p80": pytest.approx(4.2), "calls": 5}


def test_contenders_take_turns_around_the_subject() -> None:
    order: list[str] = []

    def contender(name: str) -> Contender:
        def timer(calls: int, warm: int) -> list[float]:
            order.append(name)
            return [0.02] * calls

        return Contender(name, timer)

    plan = Plan(rounds=2, block=0.04, budget=10)
    one, two = contender("one"), contender("two")
    schedule = Schedule(lambda: order.append("subject"), [one, two], plan)
    assert schedule.calls_per_round == 40 and schedule.total == 80
    for _ in range(schedule.total):
        schedule.before()
    assert len(one.samples) == len(two.samples) == 4  # two calls of 0.02 s fill a block
    assert [name for name in order if name != "subject"][:2] == ["one", "one"]  # an estimate, then the block
    assert [name for name in order if name != "subject"][-2:] == ["two", "one"]  # who goes first changes


def test_a_slow_contender_has_few_turns_and_a_broken_one_none() -> None:
    calls_made = []

    def slow(calls: int, warm: int) -> list[float]:
        calls_made.append(calls + warm)
        return [0.5] * calls

    def broken(calls: int, warm: int) -> list[float]:
        raise WorkerError("it died")

    plan = Plan(rounds=9, block=0.01, budget=1.0)
    dear, dead = Contender("slow", slow), Contender("broken", broken)
    for _ in range(plan.rounds):
        dear.turn(plan)
        dead.turn(plan)
        dear.spent = 0.5 * sum(calls_made)
    assert calls_made == [1, 1] and dear.samples == [0.5, 0.5]
    assert dead.samples == [] and dead.error == "it died"


def test_sgemm_rate() -> None:
    sgemm = Sgemm(64)
    assert len(sgemm.timer(3, 1)) == 3
    assert sgemm.rate(0.5) == 2 * 64**3 / 0.5


# Memory


def _allocate(megabytes: int) -> int:
    """Allocate, touch and free inside the measured call."""

    def call() -> None:
        torch.ones(megabytes * 2**18).sum()

    return measure(call)


@pytest.mark.skipif(bool(peak_supported()), reason=f"peak memory cannot be measured: {peak_supported()}")
def test_a_known_allocation_is_seen_though_it_was_freed() -> None:
    torch.ones(2**24)  # freed again: must not hide what follows
    assert 0 <= _allocate(0) < 4 * 2**20
    for megabytes in (32, 96, 32):
        assert abs(_allocate(megabytes) - megabytes * 2**20) < 4 * 2**20


@pytest.mark.skipif(bool(peak_supported()), reason=f"peak memory cannot be measured: {peak_supported()}")
def test_peak_of_a_pass_in_a_fresh_process() -> None:
    workload = find("tsai-c10-conv1")
    stored = measure_fresh(peak_of_pass, "reference", workload, 2, False, 1)
    results = 2 * 49 * 32 * 16 * 4
    assert stored.results == results
    assert stored.beyond == stored.growth - results
    assert stored.growth > workload.votes_bytes(2)  # the reference stores every vote


def _fail(message: str) -> None:
    raise KeyError(message)


def test_a_fresh_process_reports_its_failure() -> None:
    with pytest.raises(RuntimeError, match=r"KeyError.*lost"):
        measure_fresh(_fail, "lost")
    with pytest.raises(RuntimeError, match="exit code 3"):
        measure_fresh(sys.exit, 3)


# Workers


def test_a_worker_computes_times_and_survives_errors(tmp_path: Path) -> None:
    worker = Worker("batched-matmul", 1, tmp_path / "log")
    try:
        workload = find("tsai-c10-fc")
        worker.begin(workload.name, 1, True)
        found = worker.ready()
        here = runner(build("batched-matmul", workload), workload.inputs(1), True)()
        assert found.keys() == here.keys()
        for key, tensor in here.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-4)
        seconds = worker.time(3, 1)
        assert len(seconds) == 3 and min(seconds) > 0
        worker.begin("no such layer", 1, True)
        with pytest.raises(WorkerError, match="no such layer"):
            worker.ready()
        worker.begin(workload.name, 1, False)
        assert worker.ready().keys() == {"parents"}
        worker._process.kill()
        with pytest.raises(WorkerError, match="died"):
            worker.time(1, 0)
        assert worker.again("it died").keys() == {"parents"}  # a new process serves
        assert worker.note.startswith("it died; run again")
    finally:
        worker.close()


class _Unreliable:
    """Stands in for a worker: its first result is wrong, the one after a restart is not."""

    def __init__(self, name: str, right: dict[str, Tensor]) -> None:
        self.name, self.note, self._right = name, "", right

    def ready(self) -> dict[str, Tensor]:
        return {key: tensor * 1.01 for key, tensor in self._right.items()}

    def again(self, reason: str) -> dict[str, Tensor]:
        self.note = reason
        return self._right


def test_a_wrong_compiled_result_has_a_second_chance_and_a_wrong_eager_one_none() -> None:
    from bench.session import Session

    gate = Gate(TINY[2], TINY[2].inputs(3))
    compiled = _Unreliable("reference-compiled", _result(TINY[2], 3))
    assert Session._check(compiled, gate) == ""
    assert compiled.note.startswith("wrong result: parents errs by")
    eager_one = _Unreliable("batched-matmul", _result(TINY[2], 3))
    assert Session._check(eager_one, gate).startswith("disagrees with the reference: parents errs by")
    assert eager_one.note == ""


# Report


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
        "2.50 (1.00)",
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
    page.write_text("no markers")
    assert report.main([str(results), "--into", str(page)]) == 1
    assert page.read_text() == "no markers"
    capsys.readouterr()
    assert report.main([str(results)]) == 0
    assert "tsai-c10-conv1" in capsys.readouterr().out


def test_goals_are_those_of_the_default_batch(tmp_path: Path) -> None:
    from bench.session import Session, Settings

    session = Session(Settings(tmp_path, torch.get_num_threads(), Plan(sgemm=8), alternatives=False, memory=False))
    conv1, vector, barham = find("tsai-c10-conv1"), find("tsai-dmm-vector-set"), find("barham")
    assert session._row(conv1, 8, False)["goal"] == {"speedup": 35, "sgemm_share": 0.45}
    assert session._row(conv1, 8, True)["goal"] == {"speedup": 12}
    assert session._row(conv1, 1, True)["goal"] == {"speedup": 1.0}
    assert session._row(conv1, 3, True)["goal"] is None
    assert session._row(vector, 64, True)["goal"] == {"speedup": 2.5}
    assert session._row(barham, 64, False)["goal"] is None
    session.close()


def test_a_row_that_disagrees_is_refused_and_one_that_agrees_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench import session as module
    from bench.session import Refused, Session, Settings

    plan = Plan(rounds=2, block=0.001, budget=0.1, sgemm=32)
    session = Session(Settings(tmp_path, torch.get_num_threads(), plan, alternatives=False, memory=False))
    workload = replace(find("tsai-c10-fc"), types=8)
    case = session.prepare(workload, 1, False)
    case.schedule.before()
    row = session.finish(case, [0.25, 0.25])
    assert row["gflops"] == pytest.approx(workload.operations(1) / 0.25 / 1e9)
    assert row["speedup"] is None and row["memory"] == {"left_out": "left out"}

    right = build(OURS, workload)
    monkeypatch.setattr(module, "build", lambda name, w: lambda *arguments: right(*arguments) * 1.01)
    with pytest.raises(Refused, match="parents errs by"):
        session.prepare(workload, 1, False)
    session.close()
    written = json.loads(session.files[0].read_text())
    assert [("refused" in row, "fastcaps" in row) for row in written["rows"]] == [(False, True), (True, False)]
    assert "refused" in session.files[1].read_text()
