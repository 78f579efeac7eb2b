"""The benchmark measures what it says: registry, alternatives, gate, timing, memory, workers and report."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.alternatives import (
    ALTERNATIVES,
    BLOCKED,
    FOLDED,
    OURS,
    STORED,
    build,
    eager,
    is_compiled,
    reference,
    runner,
    suited,
)
from bench.gate import SAME, Gate, convolution
from bench.process import Remote, WorkerError
from bench.routings import AttentionPass, DynamicRouting, EMRouting, HeinsenRouting, RoutingPool
from bench.runner import Runner, kept_by
from bench.timing import Contender, Plan, doubts, take_turns
from bench.workload import Case, Workload, is_batched
from bench.workloads import find

MEGABYTES = {
    "tsai-c10-conv1": 231,
    "tsai-dmm-vector-conv": 85,
    "barham": 1850,
    "hinton-conv": 116,
    "heinsen-sst-1": 19,
    "zhao-pool": 2,
    "vocabulary": 1966,
    "million": 4096,
}


def test_votes_and_operations_are_those_worked_out_by_hand() -> None:
    assert {name: round(find(name).votes_bytes(find(name).batch) / 1e6) for name in MEGABYTES} == MEGABYTES
    conv1 = find("tsai-c10-conv1")
    assert (conv1.output_grid, conv1.positions, conv1.children) == ((7, 7), 49, 288)
    votes = 8 * 49 * 288 * 32
    assert conv1.votes(8) == votes == 3_612_672
    # a vote: 4 x 4 x 4 multiply-adds; agreement and weighted sum: 4 x 4 each
    assert conv1.operations(8) == votes * 2 * (64 + 2 * 16)
    assert conv1.operations(8, training=True) == 3 * conv1.operations(8)
    # 64 images, 7 x 7 positions, 4 rows: each an inner product of 9 * 32 * 4 numbers for 32 * 4 outputs
    assert find("barham").operations(64) == 2 * (64 * 49 * 4) * (9 * 32 * 4) * (32 * 4)


"""Bytes of stored votes at the default batch, worked out by hand."""

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


# Registry


def test_inputs_are_the_same_for_the_same_seed_and_lie_channels_last() -> None:
    workload = find("tsai-dmm-matrix-conv")
    first, again, other = workload.inputs(2, seed=1), workload.inputs(2, seed=1), workload.inputs(2, seed=2)
    assert torch.equal(first.children, again.children)
    assert torch.equal(first.grads["parents"], again.grads["parents"])
    assert not torch.equal(first.children, other.children)
    assert first.children.shape == (2, 16, 8, 8, 8, 8)
    assert first.children.movedim(1, 3).is_contiguous() and first.arguments["parents"].movedim(1, 3).is_contiguous()


def test_a_pose_of_zeros_gets_no_gradient_through_its_length() -> None:
    """``F.normalize`` gives it 10^12 times that of its key, and a time was refused for it."""
    work = find("zhao-pool")
    inputs = work.inputs(2)
    with torch.no_grad():
        inputs.arguments["children"][0, 3] = 0.0
    wanted = runner(reference(work), inputs, training=True)()["dchildren"]
    for name in suited([one for one in ALTERNATIVES if not is_compiled(one)], work, 2):
        torch.testing.assert_close(runner(eager(name, work), inputs, training=True)()["dchildren"], wanted)


# Alternatives


@pytest.mark.parametrize("workload", TINY, ids=lambda w: w.name)
def test_alternatives_agree_with_the_reference(workload: Workload) -> None:
    wanted = runner(reference(workload), workload.inputs(workload.batch, dtype=torch.float64), True)()
    names = {f"d{name}" for name in workload.inputs(1).learned} | {*workload.routing.results}
    assert wanted.keys() == names
    ways = {name: build(name, workload) for name in (OURS, STORED, *["scaled-dot-product"] * (workload.matrices == 0))}
    if workload.routing.makes_votes:
        own = workload.routing.axes(workload)
        for axes, block, kept in (("imecp", 1, False), (own, 4 * workload.votes_bytes(workload.batch) // 5, True)):
            ways[f"{axes} {block}"] = eager(BLOCKED, workload, {"axes": axes, "block": block, "kept": kept})
        for block, kept in ((0, True), (200, False), (900, True)):  # folding is exact, shared matrices or not
            ways[f"folded {block}"] = eager(FOLDED, workload, {"block": block, "kept": kept})
    for name, way in ways.items():
        inputs = workload.inputs(workload.batch, dtype=torch.float64)
        found = runner(way, inputs, True)()
        forward = runner(way, workload.inputs(workload.batch, dtype=torch.float64), False)()
        assert found.keys() == names and forward.keys() == {*workload.routing.results}
        for key, tensor in forward.items():
            torch.testing.assert_close(tensor, wanted[key], rtol=1e-11, atol=1e-11)
        for key, tensor in wanted.items():
            torch.testing.assert_close(
                found[key], tensor, rtol=1e-11, atol=1e-11, msg=lambda m, k=key, n=name: n + k + m
            )


@pytest.mark.parametrize("workload", [TINY[0], TINY[4], TINY[8]], ids=lambda w: w.name)
def test_compiled_alternatives_have_no_graph_break_and_agree(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, compile_ = runner(reference(workload), workload.inputs(2), True)(), torch.compile
    # tracing is what may break; generating code takes a compiler and much longer
    monkeypatch.setattr(torch, "compile", lambda run, options, **given: compile_(run, backend="aot_eager", **given))
    for name in filter(is_compiled, ALTERNATIVES):
        if workload.routing.makes_votes or name.startswith(STORED):
            torch._dynamo.reset()
            found = runner(build(name, workload), workload.inputs(2), True)()
            for key, tensor in wanted.items():
                torch.testing.assert_close(found[key], tensor, rtol=1e-3, atol=1e-4)
    torch._dynamo.reset()


def test_an_alternative_takes_part_where_it_can_be_the_fastest() -> None:
    def names(name: str, batch: int | None = None) -> list[str]:
        return suited(ALTERNATIVES, find(name), batch or find(name).batch)

    both = ["folded-matmul", "folded-matmul-compiled"]
    assert names("li-capnet-dynamic") == both and names("vocabulary") == both
    stored, blocked = "batched-matmul-compiled", ["blocked-matmul", "blocked-matmul-compiled"]
    assert names("heinsen-norb-1") == [stored, *both, "einsum-compiled"]
    assert names("heinsen-sst-1") == names("hinton-fc") == [stored, *blocked, "einsum-compiled"]
    assert names("tsai-c10-fc", 1) == [
        "batched-matmul", "batched-matmul-compiled", "blocked-matmul-compiled", "einsum-compiled",
    ]  # fmt: skip
    assert names("zhao-pool") == ["batched-matmul", "batched-matmul-compiled", "scaled-dot-product"]
    assert names("barham") == ["batched-matmul", "batched-matmul-compiled"]


# Gate


def _result(workload: Workload, batch: int, training: bool = True) -> dict[str, Tensor]:
    return runner(build(OURS, workload), workload.inputs(batch), training)()


@pytest.mark.parametrize("workload", [COPIED, SAMPLED], ids=lambda w: w.name)
def test_what_is_checked_in_part_is_exact(workload: Workload) -> None:
    inputs = workload.inputs(workload.batch)
    assert (inputs.samples([0, 4]).grads["parents"] != 0).all() if workload is SAMPLED else workload.matrices == 1
    small = Gate(workload, inputs)
    precise = runner(reference(workload), workload.inputs(workload.batch).to(torch.float64), training=True)()
    found = {name: tensor.float() for name, tensor in precise.items()}
    whole = Gate(replace(workload, copies=1, checked=None), inputs)
    verdict, wanted = small.judge(found), whole.judge(found)
    assert not verdict.complaints and not wanted.complaints, (verdict, wanted)
    for name, exact in whole.exact.items():
        if workload is SAMPLED and is_batched(name):
            exact = exact[[0, 4]]
        elif workload is COPIED and name in ("dchildren", "dscores"):
            exact = exact[:, :3] * workload.copies
        torch.testing.assert_close(small.exact[name], exact, rtol=1e-9, atol=1e-9)
    for name in found:
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
        wanted, found = (
            runner(way(workload), workload.inputs(2, dtype=torch.float64), True)() for way in (reference, convolution)
        )
        torch.testing.assert_close({name: found[name] for name in wanted}, wanted, rtol=1e-12, atol=1e-12)


def test_the_gate_passes_what_is_right_and_refuses_what_is_not() -> None:
    workload = TINY[0]
    gate = Gate(workload, workload.inputs(2))
    right = _result(workload, 2)
    assert not gate.judge(right).complaints
    assert not gate.judge(_result(workload, 2, training=False)).complaints
    for key in right:
        wrong = {name: tensor.clone() for name, tensor in right.items()}
        largest = wrong[key].abs() == wrong[key].abs().max()
        wrong[key][largest] *= 1.001
        verdict = gate.judge(wrong)
        assert [complaint.split()[0] for complaint in verdict.complaints] == [key]
        assert gate.judge(wrong, SAME).complaints
        wrong[key][largest] = math.nan
        assert "not finite" in gate.judge(wrong).complaints[0]
    assert "wanted torch.float32 [2," in gate.judge({"parents": right["parents"][:1]}).complaints[0]
    missing = {name: tensor for name, tensor in right.items() if name != "dweight"}
    assert gate.judge(missing).complaints
    coarse = {"parents": right["parents"] * (1 + 5e-4)}
    rounded = Gate(workload, workload.inputs(2), tf32=True)
    assert gate.judge(coarse).complaints and not rounded.judge(coarse).complaints
    assert rounded.judge({"parents": right["parents"] * 1.01}).complaints


# Timing


def _contender(name: str, seconds: list[float], order: list[str], rival: bool = True) -> Contender:
    """One whose calls take these seconds, the last of them from then on."""

    def timer(calls: int, warm: int) -> list[float]:
        order.append(name)
        return [seconds.pop(0) if len(seconds) > 1 else seconds[0] for _ in range(calls + warm)][warm:]

    return Contender(name, timer, seconds[0], rival)


def test_contenders_take_turns_once_their_calls_agree() -> None:
    order: list[str] = []
    cold, far = _contender("cold", [9.0, 0.5, 0.5, 0.02], order), _contender("far", [0.2], order)
    take_turns([cold, far], Plan(rounds=5, block=0.04, budget=10.0, warm=60.0))
    assert order[:9] == ["cold"] * 6 + ["far"] * 3  # three calls of a kind
    assert order[9:] == ["cold", "far", "far", "cold", "cold", "far", "cold", "cold"]  # who goes first changes
    assert set(cold.samples) == {0.02} and len(cold.samples) == 10  # two calls of 0.02 s fill a block
    assert far.samples == [0.2] * 3  # ten times slower: no more than it must have
    assert cold.estimate == 0.02


def test_wide_and_impossible_figures_are_doubtful() -> None:
    entry = {"median": 1.0, "p20": 0.9, "p80": 1.1}
    row = {"fastcaps": entry, "fastest": "x", "alternatives": {"x": entry}, "peak_share": 0.9, "machine": {"cores": 2}}
    assert doubts(row) == []
    assert doubts(row | {"load": 5.3}) == ["the load average was 5.3 on 2 cores"]
    assert doubts(row | {"peak_share": 1.95}) == ["195% of the machine's peak"]
    assert doubts(row | {"alternatives": {"x": entry | {"p80": 1.3}}}) == ["the middle 60 % of x's calls lie 40% apart"]
    assert len(doubts(row | {"fastcaps": entry | {"p20": 0.1}})) == 1


# Memory

NEEDS_PROC = pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no count of peak memory here")


@NEEDS_PROC
def test_peak_of_a_pass_in_a_fresh_process() -> None:
    shelf: list[torch.Tensor] = []
    # more than glibc ever takes from what a process has freed
    assert abs(kept_by(lambda: shelf.append(torch.ones(64 * 2**18))) - 64 * 2**20) < 4 * 2**20
    assert kept_by(lambda: torch.ones(32 * 2**18).sum()) < 4 * 2**20
    workload = find("tsai-c10-conv1")
    fresh = Remote(1, Runner, "cpu")
    try:
        stored = fresh.call(120, "memory", Case(workload, 2, False), STORED)
    finally:
        fresh.close()
    assert stored["results"] == 2 * 49 * 32 * 16 * 4 == stored["peak"] - stored["beyond"]
    assert stored["peak"] > workload.votes_bytes(2)  # an alternative stores every vote


# Processes


def test_a_process_checks_times_and_survives_errors(tmp_path: Path) -> None:
    case = Case(find("tsai-c10-fc"), 1, True)
    remote = Remote(1, Runner, "cpu", 0.01, tmp_path, memory=2**30)
    try:
        verdict = remote.call(60, "check", case, "batched-matmul")
        wanted = {"parents", *(f"d{name}" for name in case.workload.inputs(1).learned)}
        assert verdict["complaint"] == "" and verdict["errors"].keys() == wanted
        assert [path.name for path in tmp_path.glob("*.pt")] == ["tsai-c10-fc-1-fp32.pt"]  # what others judge by
        seconds = remote.call(60, "time", 3, 1)
        assert len(seconds) == 3 and min(seconds) > 0 and verdict["seconds"] > 0
        assert len(remote.call(60, "time_sgemm", 64, 2, 1)) == 2
        with pytest.raises(WorkerError, match="unknown implementation 'nobody'"):
            remote.call(60, "check", case, "nobody")
        with pytest.raises(WorkerError, match="out of memory"):
            remote.call(60, "check", Case(find("barham"), 64, False), STORED)
        with pytest.raises(WorkerError, match="no answer in time"):
            remote.call(0.0, "check", case, OURS)
        assert remote.call(60, "check", case, OURS)["complaint"] == ""  # a new process serves
        for process in remote._pool._processes.values():
            process.kill()
        with pytest.raises(WorkerError, match="died"):
            remote.call(60, "time", 1, 0)
    finally:
        remote.close()
