"""Seed after seed of ``tools/fuzz.py`` on every instruction set, and how memory grows: ``make soak``.

    python tools/soak.py --minutes 5

Each seed has a process of its own, whose tensors and scratch memory end at guard pages (``tests/guard_pages.c``): a
step outside ends it, and the seed stands in the report.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from fastcaps import functional

__all__ = ["main", "soak"]

ROOT = Path(__file__).resolve().parents[1]
FUZZ = str(ROOT / "tools" / "fuzz.py")
LEVELS = ("default", "avx2", "avx512")


def _memory() -> int:
    """Return what the process holds, in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _growth(calls: int) -> int:
    """Return by how many KiB the process grew over so many calls, every other one refused; after as many to warm up."""
    generator = torch.Generator().manual_seed(0)
    children, weight = torch.randn(3, 9, 4, 4, generator=generator), torch.randn(9, 5, 4, 4, generator=generator)
    children.requires_grad_()
    before = 0
    for k in range(2 * calls):
        if k == calls:
            before = _memory()
        if k % 2:
            for wrong in (
                lambda: functional.dynamic_routing(children, weight[:, :, :3]),
                lambda: torch.ops.fastcaps_cpu.pooling_routing(children, weight),
            ):
                with suppress(RuntimeError, ValueError):
                    wrong()
            continue
        made = functional.dynamic_routing(children, weight, compete=("parents", "children")[k // 2 % 2])
        made.sum().backward()
        children.grad = None
    return _memory() - before


def _guard() -> str | None:
    """Build the library that puts guard pages behind tensors; None where there is none."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        return None
    library = ROOT / "build" / "guard.so"
    library.parent.mkdir(exist_ok=True)
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(ROOT / "tests" / "guard_pages.c")]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True)
    return str(library)


def _levels() -> list[str]:
    """Return the instruction sets that the library holds and this processor has."""
    script = "from fastcaps import backends as b; print(b.native_capability())"

    def has(level: str) -> bool:
        variables = {**os.environ, "FASTCAPS_CPU_CAPABILITY": level, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-W", "ignore", "-c", script]
        return subprocess.run(command, env=variables, capture_output=True, text=True).stdout.strip() == level

    return [level for level in LEVELS if has(level)]


def _process(
    level: str, guard: str | None, *arguments: str, timeout: float = 900
) -> subprocess.CompletedProcess[str] | None:
    variables = {**os.environ, "FASTCAPS_CPU_CAPABILITY": level}
    if guard:
        variables.update(LD_PRELOAD=guard, FASTCAPS_GUARD_SCRATCH="1")
    try:
        return subprocess.run(
            [sys.executable, *arguments],
            env=variables,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return None


def soak(minutes: float, first: int, count: int) -> int:
    """Run seed after seed, instruction set after instruction set; print what failed and how memory grew."""
    guard, levels = _guard(), _levels()
    begin, seed, cases, failures = time.monotonic(), first, 0, 0
    while time.monotonic() < begin + 60 * minutes:
        level = levels[seed % len(levels)]
        done = _process(level, guard, FUZZ, "--seed", str(seed), "--count", str(count))
        lines = done.stdout.splitlines() if done else []
        cases += sum(int(line.split()[1]) for line in lines if line.startswith("calls "))
        wrong = [line for line in lines if line.startswith("WRONG")]
        if done is None:
            wrong = ["it does not come to an end"]
        elif done.returncode < 0 or (done.returncode and not wrong):
            at = next((line for line in reversed(lines) if line.startswith("kind")), "")
            wrong.append(f"ended with {done.returncode} in {at}: {' '.join(done.stderr.split())[-800:]}")
        for line in wrong:
            failures += 1
            print(
                f"FASTCAPS_CPU_CAPABILITY={level} python tools/fuzz.py --seed {seed} --count {count}: {line}",
                flush=True,
            )
        seed += 1
    grown = _process(levels[-1], None, str(Path(__file__).resolve()), "--growth", "10000")
    said = grown.stdout.strip() if grown and not grown.returncode else "not measured"
    taken = (time.monotonic() - begin) / 60
    print(
        f"{taken:.0f} min, seeds {first} to {seed - 1}: {cases} calls, {failures} failures; growth over 10000: {said}"
    )
    return 1 if failures else 0


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description="Random calls on every instruction set, for long.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--first", type=int, default=0, help="the seed to begin with")
    parser.add_argument("--count", type=int, default=15, help="calls of each kind for a seed")
    parser.add_argument("--growth", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(None if arguments is None else list(arguments))
    if given.growth:
        print(f"{_growth(given.growth)} KiB")
        return 0
    return soak(given.minutes, given.first, given.count)


if __name__ == "__main__":
    sys.exit(main())
