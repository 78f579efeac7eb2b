"""Seed after seed of :mod:`tools.fuzz` on every instruction set that is built, and how memory grows: ``make soak``.

    python -m tools.soak --minutes 5

Each seed has its own process, whose tensors end at guard pages (``tests/guard_pages.c``): an access beyond ends it, and
the report names the seed. One more build of the library has such pages behind its scratch memory too.
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

from bench.timing import status
from fastcaps import functional
from tools.native import LEVELS, ROOT, guarded, guarded_library


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


def _process(setting: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str] | None:
    """Run Python in the checkout with more variables; None where it does not come to an end."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), **setting}
    command = [sys.executable, "-W", "ignore", *arguments]
    try:
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=900, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return None


def soak(minutes: float, first: int, count: int) -> int:
    """Run seed after seed, instruction set after instruction set; print what failed and how memory grew."""
    asked = "from fastcaps import backends; print(backends.native_capability())"  # another where it cannot run
    settings: list[dict[str, str]] = []
    for level in LEVELS:
        done = _process({"FASTCAPS_CPU_CAPABILITY": level}, "-c", asked)
        if done and done.stdout.strip() == level:
            settings.append({"FASTCAPS_CPU_CAPABILITY": level})
    if guard := guarded(ROOT / "build"):
        settings.append({"FASTCAPS_CPU_LIBRARY": str(guarded_library(ROOT / "build" / "guards"))})
    begin, seed, cases, failures = time.monotonic(), first, 0, 0
    while time.monotonic() < begin + 60 * minutes:
        setting, fuzz = settings[seed % len(settings)], ("-m", "tools.fuzz", "--seed", str(seed), "--count", str(count))
        done = _process({**setting, **guard}, *fuzz)
        lines = done.stdout.splitlines() if done else []
        cases += sum(int(line.split()[1]) for line in lines if line.startswith("calls "))
        wrong = [line for line in lines if line.startswith("WRONG")]
        if done is None:
            wrong = ["it does not come to an end"]
        elif done.returncode < 0 or (done.returncode and not wrong):
            at = next((line for line in reversed(lines) if line.startswith("kind")), "")
            wrong.append(f"ended with {done.returncode} in {at}: {' '.join(done.stderr.split())[-800:]}")
        for line in wrong:
            variables = " ".join(f"{name}={value}" for name, value in setting.items())
            print(f"{variables} PYTHONPATH=tests python {' '.join(fuzz)}: {line}", flush=True)
        failures += len(wrong)
        seed += 1
    grown = _process({}, "-c", "from tools.soak import growth; print(growth(10_000) >> 10, 'KiB')")
    said = grown.stdout.strip() if grown and not grown.returncode else "not measured"
    taken = f"{(time.monotonic() - begin) / 60:.0f} min, seeds {first} to {seed - 1}"
    print(f"{taken}: {cases} calls, {failures} failures; growth over 10000: {said}")
    return 1 if failures else 0


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random calls on every instruction set that is built, for long.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--first", type=int, default=0, help="the seed to begin with")
    parser.add_argument("--count", type=int, default=15, help="calls of each kind for a seed")
    given = parser.parse_args(None if arguments is None else list(arguments))
    return soak(given.minutes, given.first, given.count)


if __name__ == "__main__":
    sys.exit(main())
