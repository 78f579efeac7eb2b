"""Seed after seed of :mod:`tools.fuzz` on every instruction set, and how memory grows: ``make soak``.

    python -m tools.soak --minutes 5

Each seed has its own process, whose tensors and scratch memory end at guard pages (``tests/guard_pages.c``): an access
beyond ends it, and the report names the seed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

import torch

from fastcaps import functional
from fastcaps.measure import status
from tools.native import LEVELS, ROOT, guarded


def growth(calls: int) -> int:
    """Return by how many bytes the process grew over so many calls, every other one refused; after as many to warm up.

    The system must be Linux.
    """
    generator = torch.Generator().manual_seed(0)
    children, weight = torch.randn(3, 9, 4, 4, generator=generator), torch.randn(9, 5, 4, 4, generator=generator)
    children.requires_grad_()
    wrong = (
        lambda: functional.dynamic_routing(children, weight[:, :, :3]),
        lambda: torch.ops.fastcaps_cpu.pooling_routing(children, weight),
    )
    before = 0
    for k in range(2 * calls):
        if k == calls:
            before = status("VmRSS")
        if k % 2:
            for call in wrong:
                with suppress(RuntimeError, ValueError):
                    call()
            continue
        made = functional.dynamic_routing(children, weight, compete=("parents", "children")[k // 2 % 2])
        made.sum().backward()
        children.grad = None
    return status("VmRSS") - before


def _process(level: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str] | None:
    """Run Python in the checkout at an instruction set; None where it does not come to an end."""
    variables = {**os.environ, "FASTCAPS_CPU_CAPABILITY": level, "PYTHONPATH": str(ROOT / "tests"), **environment}
    command = [sys.executable, "-W", "ignore", *arguments]
    try:
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=900, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return None


def soak(minutes: float, first: int, count: int) -> int:
    """Run seed after seed, instruction set after instruction set; print what failed and how memory grew."""
    asked = "from fastcaps import backends; print(backends.native_capability())"  # another where it cannot run
    here = {level: _process(level, "-c", asked) for level in LEVELS}
    levels = [level for level, done in here.items() if done and done.stdout.strip() == level]
    guard = guarded(ROOT / "build")
    begin, seed, cases, failures = time.monotonic(), first, 0, 0
    while time.monotonic() < begin + 60 * minutes:
        level, fuzz = levels[seed % len(levels)], ("-m", "tools.fuzz", "--seed", str(seed), "--count", str(count))
        done = _process(level, *fuzz, **guard)
        lines = done.stdout.splitlines() if done else []
        cases += sum(int(line.split()[1]) for line in lines if line.startswith("calls "))
        wrong = [line for line in lines if line.startswith("WRONG")]
        if done is None:
            wrong = ["it does not come to an end"]
        elif done.returncode < 0 or (done.returncode and not wrong):
            at = next((line for line in reversed(lines) if line.startswith("kind")), "")
            wrong.append(f"ended with {done.returncode} in {at}: {' '.join(done.stderr.split())[-800:]}")
        for line in wrong:
            print(f"FASTCAPS_CPU_CAPABILITY={level} PYTHONPATH=tests python {' '.join(fuzz)}: {line}", flush=True)
        failures += len(wrong)
        seed += 1
    grown = _process(levels[-1], "-c", "from tools.soak import growth; print(growth(10_000) >> 10, 'KiB')")
    said = grown.stdout.strip() if grown and not grown.returncode else "not measured"
    taken = f"{(time.monotonic() - begin) / 60:.0f} min, seeds {first} to {seed - 1}"
    print(f"{taken}: {cases} calls, {failures} failures; growth over 10000: {said}")
    return 1 if failures else 0


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random calls on every instruction set, for long.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--first", type=int, default=0, help="the seed to begin with")
    parser.add_argument("--count", type=int, default=15, help="calls of each kind for a seed")
    given = parser.parse_args(None if arguments is None else list(arguments))
    return soak(given.minutes, given.first, given.count)


if __name__ == "__main__":
    sys.exit(main())
