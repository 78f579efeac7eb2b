"""The benchmark measures what it says: workloads, alternatives, gate, timing, memory, processes, a GPU's script."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fastcaps
from bench import profiled, public, record
from bench.alternatives import (
    ALTERNATIVES,
    BLOCKED,
    FOLDED,
    OURS,
    STORED,
    VERBS,
    build,
    is_compiled,
    reference,
    runner,
    suited,
)
from bench.gate import SAME, Gate, convolution
from bench.process import Remote, WorkerError
from bench.routings import AttentionPass, DynamicRouting, EMRouting, HeinsenRouting, RoutingPool
from bench.runner import Runner, kept_by
from bench.timing import Contender, Plan, doubts, measure, take_turns
from bench.votes import Layout
from bench.workload import PRECISIONS, Case, Inputs, Workload, is_batched
from bench.workloads import find

DEVICES = ("cpu", *(["cuda"] if torch.cuda.is_available() else []))
PASS = AttentionPass()
UNIFORM = AttentionPass(uniform=True, normalize=False)
TINY = (
    Workload("tiny-grid", "-", (2,), 3, 5, 2, 3, 4, PASS, grid=(7, 6), kernel_size=3, stride=2),
    Workload("tiny-set", "-", (3,), 7, 5, 2, 2, 2, PASS),
    Workload("tiny-uniform", "-", (2,), 3, 5, 2, 3, 3, UNIFORM, grid=(5, 5), kernel_size=3, stride=2),
    Workload("tiny-dynamic", "-", (3,), 7, 5, 1, 4, 6, DynamicRouting()),
    Workload("tiny-dynamic-shared", "-", (3,), 8, 5, 1, 4, 6, DynamicRouting(), groups=4),
    Workload("tiny-em-grid", "-", (2,), 3, 5, 2, 2, 2, EMRouting(), grid=(5, 5), kernel_size=3, stride=2),
    Workload("tiny-em-set", "-", (2,), 12, 5, 2, 2, 2, EMRouting(coordinates=True), groups=3),
    Workload("tiny-heinsen", "-", (2,), 6, 5, 2, 3, 2, HeinsenRouting()),
    Workload("tiny-heinsen-text", "-", (3,), 15, 4, 1, 6, 2, HeinsenRouting(layers=3), groups=1),
    Workload("tiny-pool", "-", (3,), 9, 1, 1, 5, 5, RoutingPool(), groups=0),
)
COPIED = Workload("tiny-copied", "-", (2,), 12, 5, 1, 4, 3, HeinsenRouting(), groups=1, copies=4)
SAMPLED = Workload("tiny-sampled", "-", (5,), 8, 5, 1, 4, 6, DynamicRouting(), groups=4, checked=2)


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


# Alternatives


def _doubles(workload: Workload) -> Inputs:
    """Inputs of which one child's pose is zeros: ``F.normalize`` would give it 10^12 times the gradient of its key."""
    inputs = workload.inputs(workload.batch).to(torch.float64)
    inputs.children[0, 2] = 0.0
    return inputs


@pytest.mark.parametrize("workload", TINY, ids=lambda w: w.name)
def test_alternatives_agree_with_the_reference(workload: Workload) -> None:
    wanted = runner(reference(workload), _doubles(workload), True)()
    assert wanted.keys() == {f"d{name}" for name in workload.inputs(1).learned} | {*workload.routing.results}
    assert workload.grid is None or _doubles(workload).children.movedim(1, 3).is_contiguous()
    ways = {name: build(name, workload) for name in (OURS, STORED, VERBS)}
    if workload.routing.makes_votes:
        share = 1 + int(0.8 * workload.votes_bytes(workload.batch))
        layouts = [Layout("imecp", block=1), Layout("imcep", block=share)]
        if workload is not TINY[6]:  # folding is exact, shared matrices or not, but for a bias of every child
            layouts += [Layout("pmice", block=block, folded=True) for block in (0, 200, 900)]
        ways |= {str(layout): workload.routing.routed(workload, layout) for layout in layouts}
    for name, way in ways.items():
        found, forward = (runner(way, _doubles(workload), training)() for training in (True, False))
        assert found.keys() == wanted.keys() and forward.keys() == {*workload.routing.results}
        for key, tensor in [*forward.items(), *found.items()]:
            said = f"{name}, {key}: "
            torch.testing.assert_close(tensor, wanted[key], rtol=1e-11, atol=1e-11, msg=lambda m, s=said: s + m)


@pytest.mark.parametrize("workload", [TINY[0], TINY[4], TINY[8]], ids=lambda w: w.name)
def test_compiled_alternatives_have_no_graph_break_and_agree(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, compile_ = runner(reference(workload), workload.inputs(2), True)(), torch.compile
    # tracing is what may break; generating code takes a compiler and much longer
    monkeypatch.setattr(torch, "compile", lambda run, options, **given: compile_(run, backend="aot_eager", **given))
    for name in filter(is_compiled, ALTERNATIVES):
        torch._dynamo.reset()
        found = runner(build(name, workload), workload.inputs(2), True)()
        for key, tensor in wanted.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-3, atol=1e-4)
    torch._dynamo.reset()


def test_an_alternative_takes_part_where_it_can_be_the_fastest() -> None:
    stored, both = [STORED, f"{STORED}-compiled"], [FOLDED, f"{FOLDED}-compiled"]
    for name, batch, wanted in (
        ("li-capnet-dynamic", 2, both),
        ("heinsen-norb-1", 2, [stored[1], *both, "einsum-compiled"]),
        ("hinton-fc", 64, [stored[1], BLOCKED, f"{BLOCKED}-compiled", "einsum-compiled"]),
        ("tsai-c10-fc", 1, [*stored, f"{BLOCKED}-compiled", "einsum-compiled"]),
        ("zhao-pool", 128, stored),
        ("barham", 64, stored),
    ):
        assert suited(ALTERNATIVES, find(name), batch) == wanted, name


# Gate


def _result(workload: Workload, batch: int, training: bool = True) -> dict[str, Tensor]:
    return runner(build(OURS, workload), workload.inputs(batch), training)()


@pytest.mark.parametrize("workload", [COPIED, SAMPLED], ids=lambda w: w.name)
def test_what_is_checked_in_part_is_exact(workload: Workload) -> None:
    inputs = workload.inputs(workload.batch)
    small, whole = Gate(workload, inputs), Gate(replace(workload, copies=1, checked=None), inputs)
    precise = runner(reference(workload), inputs.to(torch.float64), training=True)()
    found = {name: tensor.float() for name, tensor in precise.items()}
    assert not small.judge(found).complaints and not whole.judge(found).complaints
    for name, exact in whole.exact.items():
        if workload is SAMPLED and is_batched(name):
            exact = exact[[0, 4]]
        elif workload is COPIED and name in ("dchildren", "dscores"):
            exact = exact[:, :3] * workload.copies
        torch.testing.assert_close(small.exact[name], exact, rtol=1e-9, atol=1e-9)
        wrong = {key: tensor.clone() for key, tensor in found.items()}
        wrong[name][-1] *= 1.01
        assert small.judge(wrong).complaints, name


@pytest.mark.parametrize("workload", [TINY[0], TINY[2], TINY[5], TINY[8]], ids=lambda w: w.name)
def test_the_gate_reference_is_the_same_in_parts(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Gate(workload, workload.inputs(workload.batch))
    monkeypatch.setattr("bench.gate._CHUNK_BYTES", 1)
    parts = Gate(workload, workload.inputs(workload.batch))
    torch.testing.assert_close(parts.exact, whole.exact, rtol=1e-12, atol=1e-12)
    if workload is TINY[2]:  # a convolution measures uniform passes
        found = runner(convolution(workload), workload.inputs(2).to(torch.float64), True)()
        torch.testing.assert_close(found, whole.exact, rtol=1e-12, atol=1e-12)


def test_the_gate_passes_what_is_right_and_refuses_what_is_not() -> None:
    workload = TINY[0]
    gate, rounded = (Gate(workload, workload.inputs(2), tf32=tf32) for tf32 in (False, True))
    right = _result(workload, 2)
    assert not gate.judge(right).complaints and not gate.judge(_result(workload, 2, training=False)).complaints
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


# Timing and memory


def _contender(name: str, seconds: list[float], order: list[str]) -> Contender:
    """One whose calls take these seconds, the last of them from then on."""

    def timer(calls: int, warm: int) -> list[float]:
        order.append(name)
        return [seconds.pop(0) if len(seconds) > 1 else seconds[0] for _ in range(calls + warm)][warm:]

    return Contender(name, timer, seconds[0])


def test_contenders_take_turns_once_their_calls_agree() -> None:
    order: list[str] = []
    cold, far = _contender("cold", [9.0, 0.5, 0.5, 0.02], order), _contender("far", [0.2], order)
    take_turns([cold, far], Plan(rounds=5, block=0.04, budget=10.0, warm=60.0))
    assert order[:9] == ["cold"] * 6 + ["far"] * 3  # three calls of a kind
    assert order[9:] == ["cold", "far", "far", "cold", "cold", "far", "cold", "cold"]  # who goes first changes
    assert set(cold.samples) == {0.02} and len(cold.samples) == 10  # two calls of 0.02 s fill a block
    assert far.samples == [0.2] * 3  # ten times slower: no more than it must have


def test_wide_and_impossible_figures_are_doubtful() -> None:
    entry = {"median": 1.0, "p20": 0.9, "p80": 1.1}
    row = {"fastcaps": entry, "fastest": "x", "alternatives": {"x": entry}, "peak_share": 0.9, "machine": {"cores": 2}}
    assert doubts(row) == []
    assert doubts(row | {"load": 5.3}) == ["the load average was 5.3 on 2 cores"]
    assert doubts(row | {"peak_share": 1.95}) == ["195% of the machine's peak"]
    assert doubts(row | {"alternatives": {"x": entry | {"p80": 1.3}}}) == ["the middle 60 % of x's calls lie 40% apart"]


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no count of peak memory here")
def test_peak_of_a_pass_in_a_fresh_process() -> None:
    shelf: list[torch.Tensor] = []
    # more than glibc ever takes from what a process has freed
    assert abs(kept_by(lambda: shelf.append(torch.ones(64 * 2**18))) - 64 * 2**20) < 4 * 2**20
    assert kept_by(lambda: torch.ones(32 * 2**18).sum()) < 4 * 2**20
    workload, fresh = find("tsai-c10-conv1"), Remote(1, Runner, "cpu")
    try:
        stored = fresh.call(120, "memory", Case(workload, 2, False), STORED)
    finally:
        fresh.close()
    assert stored["results"] == 2 * 49 * 32 * 16 * 4 == stored["peak"] - stored["beyond"]
    assert stored["peak"] > workload.votes_bytes(2)  # an alternative stores every vote


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: graphs and memory are not measured")
def test_graphs_and_memory_of_a_device() -> None:
    x = torch.ones(2**20, device="cuda")
    found = measure(x.device, lambda: {"sum": torch.cat([x, x, x]).sum()}, alone=True)
    assert 0 < found["graph"]["median"] < 1e-2 and 0 < found["median"] < 1e-2 and found["latency"] > 0
    assert 3 * 2**22 <= found["memory"]["beyond"] <= 3 * 2**22 + 2**21


# Public programs


def test_a_public_program_is_timed_only_where_results_and_gradients_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "heinsen_routing.py").write_text("from nn_plain import GenerativeMatrixRouting")
    monkeypatch.syspath_prepend(tmp_path)
    for place, name in ((torch.Tensor, "cuda"), (torch.cuda, "FloatTensor")):
        monkeypatch.setattr(place, name, getattr(place, name))  # what a program changes is put back
    monkeypatch.setitem(sys.modules, "torchvision", None)
    program = public.Program(str(tmp_path), [case[0] for case in public.CASES].index("glassroom/heinsen_routing"))
    program.batch = 3
    found = program.check()
    assert found["float64"] < 1e-11 and 1e-8 < found["ours"] <= 3 * found["theirs"] + 1e-5
    took = program.time(compiled=False)
    assert {*took} == {"theirs", "ours"} and min(one["calls"] for one in took.values()) >= 5
    convert = fastcaps.convert

    def skewed(model: torch.nn.Module) -> object:
        report = convert(model)
        model.W.data *= 1 + 1e-5  # type: ignore[union-attr, operator]
        return report

    monkeypatch.setattr(fastcaps, "convert", skewed)
    try:
        with pytest.raises(ValueError, match="results or gradients differ"):
            program.check()
        monkeypatch.setattr(fastcaps, "convert", lambda model: fastcaps.compat.ConversionReport(model))
        with pytest.raises(ValueError, match="not converted"):
            program.check()
    finally:
        torch.set_default_dtype(torch.float32)


# Processes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_runner_checks_and_measures(device: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served, work = Runner(device), replace(find("tsai-c10-fc"), types=8)
    for batch, training, name in ((2, True, OURS), (2, False, BLOCKED), (1, False, OURS)):
        case = Case(work, batch, training, precision)
        assert served.check(case, name)["complaint"] == "", name
        found = served.measure(case)
        assert found["median"] > 0 and ("latency" in found) == (batch == 1)
    right = build(OURS, work)
    monkeypatch.setattr("bench.runner.build", lambda *_: lambda **given: tuple(1.1 * one for one in right(**given)))
    assert served.check(case, OURS)["complaint"].startswith("parents errs by")
    assert {"copy", *PRECISIONS} == {*served.describe()["rates"]}


def test_a_process_checks_times_and_survives_errors(tmp_path: Path) -> None:
    case = Case(find("tsai-c10-fc"), 1, True)
    remote = Remote(1, Runner, "cpu", tmp_path, memory=2**30)
    try:
        verdict = remote.call(240, "check", case, STORED)
        wanted = {"parents", *(f"d{name}" for name in case.workload.inputs(1).learned)}
        assert verdict["complaint"] == "" and verdict["errors"].keys() == wanted
        assert [path.name for path in tmp_path.glob("*.pt")] == ["tsai-c10-fc-1-fp32.pt"]  # what others judge by
        seconds = remote.call(240, "time", 3, 1)
        assert len(seconds) == 3 and min(seconds) > 0 and verdict["seconds"] > 0
        assert len(remote.call(240, "time_sgemm", 64, 2, 1)) == 2
        with pytest.raises(WorkerError, match="unknown implementation 'nobody'"):
            remote.call(240, "check", case, "nobody")
        with pytest.raises(WorkerError, match="out of memory"):
            remote.call(240, "check", Case(find("tsai-c10-conv1"), 64, True), STORED)
        with pytest.raises(WorkerError, match=r"no answer in \d+ s"):
            remote.call(0.0, "check", case, OURS)
        assert remote.call(240, "check", case, OURS)["complaint"] == ""  # a new process serves
        for process in remote._pool._processes.values():
            process.kill()
        with pytest.raises(WorkerError, match="died"):
            remote.call(240, "time", 1, 0)
    finally:
        remote.close()


# The script for a GPU, and what it profiles


@pytest.mark.parametrize("device", DEVICES)
def test_the_profiled_program_runs(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    profiled.main(["tsai-c10-fc", "--device", device, "--batch", "2", "--table"])
    assert "attention_routing" in capsys.readouterr().out


def _script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(record.ROOT / "bench/gpu.sh"), *arguments]
    kept = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=kept)


def test_all_stages_say_what_they_would_run() -> None:
    done = _script("--dry-run")
    assert done.returncode == 0
    begun = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("== ") and ":" not in line]
    assert begun == ["build", "test", "bench", "sanitize", "profile"]
    sources = "".join(path.read_text() for path in (record.ROOT / "csrc/cuda").glob("*.h"))
    kernels = re.findall(r"regex:(\w+)", done.stdout)
    assert len(kernels) == 3 and all(f"\n{kernel}(const" in sources for kernel in kernels), kernels
    names = re.findall(r" -m ((?:tools|bench)[.\w]*)", done.stdout)
    assert names and all(find_spec(name) for name in names), names  # every program of ours that it runs is there


def test_a_failed_stage_is_counted_and_one_without_time_left_out(tmp_path: Path) -> None:
    done = _script("test", "profile", OUT=str(tmp_path), PYTHON="false")
    assert done.returncode == 2
    summary = (tmp_path / "summary.md").read_text()
    assert "| test | failed |" in summary and "| profile | failed |" in summary
    assert "exit status 1" in (tmp_path / "test.log").read_text()
    done = _script("test", OUT=str(tmp_path), FASTCAPS_GPU_SECONDS="3")
    assert done.returncode == 1 and "left out: the time is used up" in done.stdout
