"""The map of a GPU, tried out on the CPU: its rows, their order and their checks, its records and tables."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu, gpu_report, probe, record
from bench.alternatives import OURS, build
from bench.floors import Chip, floors
from bench.process import Remote, WorkerError
from bench.workload import PRECISIONS, Case
from bench.workloads import WORKLOADS, find

MACHINE = {
    "device": "A",
    "date": "2026-02-01T00:00:00+00:00",
    "commit": "abc",
    "modified": False,
    "versions": {"torch": "2"},
    "rates": {"copy": 3e12, "fp32": 5e13, "tf32": 4e14, "bf16": 8e14},
}


def entry(how: str, seconds: float, mode: str = "forward", date: str = "2026-02-01", **changes: Any) -> dict[str, Any]:
    times = {"warm": {"median": seconds}, "memory": {"beyond": 2_000_000}, "complaint": ""}
    named = {"workload": "tsai-c10-conv1", "batch": 128, "mode": mode, "precision": "fp32", "how": how}
    return {**named, **times, **changes, "machine": {**MACHINE, "date": f"{date}T00:00:00+00:00"}}


def test_every_row_has_its_place_and_what_matters_comes_first() -> None:
    rows = gpu.order([], [], [])
    assert len({row.key for row in rows}) == len(rows) == (len(WORKLOADS) - 2) * 2 * 3 * 3 + 2 * 2 * 3
    assert [row.key for row in rows[:2]] == [
        ("tsai-c10-conv1", 128, mode, "fp32") for mode in ("training step", "forward")
    ]
    large = [row.batch == 128 or row.workload.copies > 1 for row in rows]
    assert large == sorted(large, reverse=True)  # the small batches last
    precisions = [row.precision for row in rows[: sum(large)]]
    assert precisions == sorted(precisions, key=lambda one: one != "fp32")
    assert [row.key for row in gpu.order(["million"], [64], ["bf16"])] == [
        ("million", 1, mode, "bf16") for mode in ("training step", "forward")
    ]


def test_a_map_on_the_cpu_measures_checks_and_keeps_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--device", "cpu", "--batch", "3", "--batch", "1", "--precision", "fp32", "--workload", "tsai-c100-fc2"]
    assert gpu.main(["map", *asked, "--results", str(tmp_path)]) == 0
    rows = record.load(tmp_path, kind=gpu_report.KIND)
    assert [(row["batch"], row["mode"]) for row in rows] == [
        (batch, mode) for batch in (3, 1) for mode in ("training step", "forward")
    ]
    assert all(not row["complaint"] and row["warm"]["median"] > 0 and row["errors"] for row in rows)
    assert {*rows[0]["errors"]} > {"parents", "dchildren", "dweight"} and {*rows[2]["errors"]} >= {"dchildren"}
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    others = ["alternatives", *asked, "--against", "batched-matmul", "--results", str(tmp_path / "others")]
    assert gpu.main(others) == 0
    monkeypatch.setattr(record, "RESULTS", tmp_path / "others")
    capsys.readouterr()
    assert gpu.main([*others[:-1], str(tmp_path / "again")]) == 0  # they are known
    assert not [*(tmp_path / "again").iterdir()] and "0 entries of 4 rows" in capsys.readouterr().out


def test_a_row_that_is_wrong_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the batch of the gate, and at a smaller one, of which only what has a batch is compared."""
    work = find("tsai-c100-fc2")

    def wrong(*given: Any, **options: Any) -> Any:
        right = build(OURS, work)
        return lambda **tensors: tuple(one * 1.001 for one in right(**tensors))

    monkeypatch.setattr(probe, "build", wrong)
    made = probe.Probe("cpu", 3)
    for batch in (3, 2):
        found = made.prepare(work.name, batch, True, "fp32")["complaint"]
        assert "parents errs" in found and "dchildren errs" in found and ("dweight errs" in found) == (batch == 3)


def test_a_setting_that_a_call_refuses_is_the_only_one_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one with other results cannot win."""
    made = probe.Probe("cpu", 2)
    made.prepare("tsai-c100-fc2", 2, False, "fp32")
    made._wanted, right = made._call(), made._call

    def call() -> dict[str, torch.Tensor]:
        setting = os.environ["FASTCAPS_SCHEDULE"]
        if setting == "refused":
            raise RuntimeError("FASTCAPS_SCHEDULE: too many warps")
        return {name: one * (1.01 if setting == "wrong" else 1.0) for name, one in right().items()}

    monkeypatch.setattr(made, "_call", call)
    found = [made.setting(setting) for setting in ("refused", "wrong", "")]
    assert found[0] == {"failed": "FASTCAPS_SCHEDULE: too many warps"}
    assert "from the default's" in found[1]["complaint"] and not found[2]["complaint"] and found[2]["warm"]


def test_builds_are_told_apart_and_must_be_there(capsys: pytest.CaptureFixture[str]) -> None:
    remote = Remote(1, _Environment, environment={"FASTCAPS_CUDA_LIBRARY": "a.so"})
    for _ in range(2):  # also in the process after one that died
        assert remote.call(60, "library") == "a.so"
        with pytest.raises(WorkerError, match="died"):
            remote.call(60, "die")
    remote.close()
    assert "FASTCAPS_CUDA_LIBRARY" not in os.environ
    for library in ("new=there/is/none.so", f"{OURS}={__file__}", __file__):
        with pytest.raises(SystemExit):
            gpu.main(["map", "--device", "cpu", "--library", library])
        assert "--library: got" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu.main(["map", "--device", "cpu", "--library", f"a={__file__}", "--library", f"a={gpu.__file__}"])
    assert "two builds have one name" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu.main(["sweep", "tsai-c10-fcc"])
    assert "did you mean" in capsys.readouterr().err


class _Environment:
    """What a process sees."""

    def library(self) -> str | None:
        return os.environ.get("FASTCAPS_CUDA_LIBRARY")

    def die(self) -> None:
        os._exit(1)


def test_bounds_are_those_worked_out_by_hand() -> None:
    conv1, chip = find("tsai-c10-conv1"), Chip()
    votes = 128 * 49 * 288 * 32
    found = floors(Case(conv1, 128, False), chip)
    assert found["multiply_adds"] == pytest.approx(2 * votes * (64 + 2 * 16) / 67e12)
    assert found["bound"] == pytest.approx(3 * 2 * votes * 64 / chip.tf32)  # by three products each
    step = floors(Case(conv1, 128, True, "tf32"), chip)
    assert step["products"] == pytest.approx(2 * votes * 4 * 64 / chip.tf32)
    assert step["bound"] == step["others"] == pytest.approx(2 * votes * 7 * 16 / 67e12)
    for work in WORKLOADS.values():
        for precision in PRECISIONS:
            small, large = (floors(Case(work, batch, False, precision), chip)["bound"] for batch in (1, 128))
            assert 0 < small <= large


def test_tables_show_the_newest_entry_and_the_fastest_alternative() -> None:
    slow = entry("batched-matmul", 5e-3)
    entries = [
        entry(OURS, 9e-4, date="2026-01-01"),
        entry(OURS, 5e-4, busy=4e-4, launches=2, host=1e-4, graph={"median": 4.5e-4}),
        entry(OURS, 2e-3, "training step", complaint="dweight errs by 2, allowed 1"),
        slow,
        entry("batched-matmul-compiled", 3e-3, memory={"beyond": 4e9}),
        {**slow, "mode": "training step", "warm": {"median": 1e-2}},
        {**entry(OURS, 1.0, date="2026-03-01"), "failed": "no answer"},  # an older figure counts more than none
        entry("base", 1.0),  # of a comparison of builds
        entry("einsum-compiled", 1e-6, complaint="wrong"),
    ]
    text = gpu_report.markdown(entries)
    line = (
        "| tsai-c10-conv1 | 128 | fp32 | 0.450 | 0.400 | 0.250 | 18% | 2 | 100 | 2.00 | stored, compiled 3.00 | 6.67× |"
    )
    assert line in text
    assert "| 2.00 † | 1.20 | 14% | 2.00 |" in text and "forward fp32: dweight" not in text
    assert "- tsai-c10-conv1 batch 128 training step fp32: dweight errs by 2, allowed 1" in text
    said = gpu_report.sentence(entries)
    assert said.startswith("*A, float32, 2026-02-01, against the fastest of up to 3 PyTorch alternatives")
    assert (
        "forward 0.450 ms (**6.67×**) and 2.00 MB of extra memory (the alternative: 4,000), training step 2.00" in said
    )
