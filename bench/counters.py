"""Nsight Compute's counters that ``bench/gpu.sh profile`` collects, and a table of them (docs/performance/gpu.md).

ncu --query-metrics | python -m bench.counters      # those that this ncu knows, for its --metrics
python -m bench.counters FOLDER                     # a table, a row for every counter, of the CSV files in a folder
"""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

from bench.markdown import as_markdown

_PEAK, _STALL = "avg.pct_of_peak_sustained_active", "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
COUNTERS = (
    "gpu__time_duration.sum", "sm__cycles_elapsed.max", "sm__cycles_active.avg",
    # issue slots and pipes
    f"smsp__issue_active.{_PEAK}", "smsp__inst_executed.sum",
    *(f"sm__inst_executed_pipe_{pipe}.sum" for pipe in ("fma", "alu", "xu", "lsu", "tensor")),
    *(f"sm__pipe_{pipe}_cycles_active.{_PEAK}" for pipe in ("fma", "alu", "tensor")),
    # warps that wait, per instruction issued
    *map(_STALL.format, ("long_scoreboard", "short_scoreboard", "barrier", "math_pipe_throttle", "mio_throttle",
                         "lg_throttle", "wait", "not_selected", "no_instruction", "dispatch_stall")),
    # shared memory, first and second level, DRAM, atomics, spills
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", "l1tex__t_sectors_pipe_lsu_mem_global_op_red.sum",
    "l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum", "l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum",
    f"l1tex__throughput.{_PEAK}", *(f"lts__t_sectors_op_{op}.sum" for op in ("read", "write", "red")),
    "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__bytes_read.sum", "dram__bytes_write.sum", "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    # occupancy
    f"sm__warps_active.{_PEAK}", "launch__registers_per_thread", "launch__shared_mem_per_block",
    "launch__occupancy_limit_registers", "launch__occupancy_limit_shared_mem", "launch__waves_per_multiprocessor",
)  # fmt: skip


def known(listing: str) -> list[str]:
    """Return the counters that a listing of ``ncu --query-metrics`` has; all where it has none (it failed)."""
    names = set(re.findall(r"^\s*(\w+__\w+)", listing, re.MULTILINE))
    return [one for one in COUNTERS if one.startswith("launch__") or one.partition(".")[0] in names or not names]


def table(folder: Path) -> str:
    """Return a Markdown table: a column for each profiled launch (of equal ones the last), a row for each counter.

    A CSV file holds lines of the program and of ncu, then ncu's raw page: names, units, a row for each launch.
    """
    found: dict[str, dict[str, str]] = {}
    for path in sorted(folder.rglob("*.csv")):
        lines = path.read_text(errors="replace").splitlines()
        begin = next((k for k, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
        for row in csv.DictReader(lines[begin:]):
            if (row["ID"] or "").isdigit():  # not the units
                kernel = re.sub(r"\((?:int|bool)\)|\w+::|^void ", "", row["Kernel Name"]).partition("(")[0]
                found[f"{path.stem} {kernel}"] = row
    if not found:
        raise SystemExit(f"counters: no profiled launch in {folder}")
    names = [one for one in COUNTERS if any(row.get(one) for row in found.values())]
    return as_markdown(
        [["counter", *found], *[[one, *(row.get(one) or "" for row in found.values())] for one in names]]
    )


if __name__ == "__main__":
    print(table(Path(sys.argv[1])) if sys.argv[1:] else ",".join(known(sys.stdin.read())))
