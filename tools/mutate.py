"""Faults planted in the sources one at a time, and which test sees them first: ``make mutate``.

    python -m tools.mutate cpu --count 100 --seed 0  # so many of all that there are, drawn by the seed
    python -m tools.mutate cuda --list               # how many there are, by file
    python -m tools.mutate triton --only triton_kernels/tiles.py:120
    python -m tools.mutate python --only fastcaps/ops --tests tests/test_ops.py tests/test_made.py

The faults (``tools/faults.py``) are planted together, each behind its number, in a copy of the checkout, which is built
once: the CPU library for one instruction set, the CUDA sources as they run on the CPU, or ``native``: the formulas and
schedules in the module of ``tests/native``. Triton's kernels are interpreted; "python" is the package, which uses the
library as it is. pytest collects the backend's tests once, without the slow ones, and a fork of it for each fault runs
them, one of every test function, then another of each, until one fails or the time is up. What does not compile does
not count.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import ctypes
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from fastcaps.ops import ROUTINGS
from tools.faults import Fault, drawn, faults, planted
from tools.native import LEVEL_FLAGS, ROOT, build, environment, module_headers

FOLDER = ROOT / "build" / "mutate"
COPIED = ("csrc", "fastcaps", "triton_kernels", "tests", "tools", "bench", "examples", "CMakeLists.txt", "setup.py",
          "pyproject.toml")  # fmt: skip
STEMS = {routing.stem for routing in ROUTINGS}
SOURCES = {
    "cpu": ("csrc/*.h", "csrc/*.cpp", "csrc/algebra/*.h", "csrc/cpu/*.h", "csrc/cpu/*.cpp"),
    "cuda": ("csrc/cuda/*.h", "csrc/cuda/*.cu"),
    "native": ("csrc/algebra/*.h", "csrc/cpu/schedule.*", "csrc/cuda/schedule.cu"),
    "triton": ("triton_kernels/*.py",),
    "python": ("fastcaps/**/*.py",),
}
LEFT = {"introspection.cu", "capability.cpp", "poses.h", "static.py"}
"""What no kernel is made from: what a library says of itself, which instruction set it is, what compiles for a GPU."""
TESTS = {
    "cpu": ("tests/test_kernels.py", "tests/test_errors.py", "tests/test_ops.py", "tests/test_functional_extremes.py",
            "tests/test_explain.py", "tests/test_verbs_cpu.py",
            # sums of 512 numbers err by 4 % more than may be without FMA, beside an eager torch that has it
            "-k", "not (has_a_case or 32_bits or largest-pose or cuda or triton or reference)"),
    "cuda": ("tests/test_cuda_kernels.py", "tests/test_cuda_extremes.py", "-k", "on-cpu and not random"),
    "native": ("tests/native",),
    "triton": ("tests/test_triton.py", "tests/test_verbs_triton.py", "-k",
               "ways or served or only_the_gradients or one_iteration or variances or schedules or workspace "
               "or triton- or triton] or every_verb or absent or squares"),
    "python": ("tests",),
}  # fmt: skip
INTERPRETED = ("triton", "python")
START = """import builtins, os
number = int(os.environ.get("FASTCAPS_FAULT", "0"))
builtins.FASTCAPS_FAULT = lambda one: one == number
"""
"""What Python runs first, in the processes that a test starts too."""
ENDLESS = (signal.SIGXCPU, signal.SIGKILL)
"""What ends tests that take too long; such a fault counts as found."""
HEADER = """#pragma once
#include <cstdlib>
__attribute__((visibility("default"))) inline int fastcaps_fault = 0;
__attribute__((no_sanitize("thread"))) inline bool FASTCAPS_FAULT(int k) { return fastcaps_fault == k; }
"""


# ---- planting and building -------------------------------------------------------------------------------------------


def _copy(folder: Path, numbered: dict[int, Fault]) -> None:
    """Make the copy what the checkout is, with these faults; what has not changed keeps its date."""
    paths = {fault.path for fault in numbered.values()}
    for source in (one for name in COPIED for one in ((ROOT / name).rglob("*") if "." not in name else [ROOT / name])):
        name = source.relative_to(ROOT).as_posix()
        target = folder / name
        if source.is_symlink() and not target.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source.readlink())
        if "__pycache__" in name or not source.is_file():
            continue
        wanted = source.read_bytes()
        if name in paths:
            wanted = planted(name, wanted.decode(), numbered).encode()
        if not target.is_file() or target.read_bytes() != wanted:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(wanted)
    if not (folder / "fault.h").is_file():
        (folder / "fault.h").write_text(HEADER)


def _uncompiled(said: str, numbered: dict[int, Fault]) -> set[int]:
    """Return the faults that a compiler's errors are about: each the last before it in the same file."""
    found: set[int] = set()
    for path, line in set(re.findall(r"(csrc/[\w/.]+):(\d+):\d+: error", said)):
        name = os.path.normpath(path)
        lines = {one.line: number for number, one in numbered.items() if one.path == name and one.line <= int(line)}
        found |= {lines[max(lines)]} if lines else set()
    if not found:
        raise SystemExit(f"fastcaps: it does not compile:\n{said[-4000:]}")
    return found


def _parses(fault: Fault) -> bool:
    with suppress(SyntaxError):
        return bool(ast.parse(planted(fault.path, (ROOT / fault.path).read_text(), {1: fault})))
    return False


def prepare(backend: str, numbered: dict[int, Fault], level: str) -> dict[str, str]:
    """Plant faults and build; leave those out that do not compile, and return the environment of the tests."""
    folder = FOLDER / backend / "source"
    while True:
        _copy(folder, numbered)
        if backend in INTERPRETED:
            (folder / "sitecustomize.py").write_text(START)
            interpret = {"TRITON_INTERPRET": "1"} if backend == "triton" else {}
            return {**os.environ, **interpret, "PYTHONPATH": str(folder)}
        flags = f"-w -include {folder / 'fault.h'} " + (f"-O0 {LEVEL_FLAGS[level]}" if backend == "cpu" else "-O1")
        target = {"cuda": "fastcaps_cuda_on_cpu"}.get(backend, f"fastcaps_{backend}")
        headers = f"FASTCAPS_INCLUDES={module_headers()}"
        try:
            library = build(FOLDER / backend / "build", target, flags.strip(), folder, headers, "FASTCAPS_GUARDS=ON")
            return environment(library, PYTHONPATH=str(folder))
        except RuntimeError as error:
            for number in _uncompiled(str(error), numbered):
                print(f"no code  {numbered.pop(number)}", flush=True)


# ---- running the tests -----------------------------------------------------------------------------------------------


class Forks:
    """A plugin of pytest: the tests that were collected, anew for each fault, in a fork that ends with a failure.

    ``faults`` are numbers and the stems of their files; number 0 is none, which comes first and must not fail.
    """

    def __init__(self, faults: list[tuple[int, str]], limit: float, log: Path) -> None:
        self.faults, self.limit, self.log = faults, limit, log

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed or not session.items:
            raise session.Failed("the tests do not load")
        looks = [(number, stem, self.limit) for number, stem in [(0, ""), *self.faults]]
        for number, stem, limit in looks:
            begin = time.monotonic()
            pid = os.fork()
            if pid == 0:
                self._run(session, number, stem, limit)
            status = self._wait(pid, limit)
            if number and not status and limit == self.limit:
                looks.append((number, stem, 5 * limit))  # in the end, what survived is looked at for longer
            place = re.findall("^AT (.*)", self.log.read_text(errors="replace"), re.MULTILINE)[-1:]
            print("FAULT", number, status, f"{time.monotonic() - begin:.0f}", *place, flush=True)
            if number == 0 and status:
                raise session.Failed(f"without a fault:\n{self.log.read_text()[-3000:]}")
        return True

    def _run(self, session: pytest.Session, number: int, stem: str, limit: float) -> None:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (int(4 * limit) + 60,) * 2)  # whatever else the machine does meanwhile
        for stream in (1, 2):
            os.dup2(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        os.environ["FASTCAPS_FAULT"] = str(number)
        builtins.FASTCAPS_FAULT = lambda one: one == number
        for name in ("FASTCAPS_CPU_LIBRARY", "FASTCAPS_CUDA_ON_CPU", "FASTCAPS_NATIVE"):
            if path := os.environ.get(name):
                ctypes.c_int.in_dll(ctypes.CDLL(path), "fastcaps_fault").value = number
        others = STEMS - {stem} if stem in STEMS else set()
        items = [item for item in session.items if not others & set(re.split(r"\W|test_", item.nodeid))]
        random.Random(0).shuffle(items)
        met: Counter[str] = Counter()
        ranks = [met.update([name]) or met[name] for name in (item.nodeid.partition("[")[0] for item in items)]
        items = [item for _, item in sorted(zip(ranks, items, strict=True), key=lambda each: each[0])]
        for item in items:
            print(f"\nAT {item.nodeid}", flush=True)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if session.testsfailed or time.process_time() > limit:
                break
        os._exit(1 if session.testsfailed else 0)

    def _wait(self, pid: int, limit: float) -> int:
        """Return how a fork ended: 0 well, 1 with a failed test, below 0 by a signal, or because it hangs."""
        end = time.monotonic() + 60 * limit + 600
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > end:
                os.killpg(pid, signal.SIGKILL)
            time.sleep(0.02)


def _tests(tests: Sequence[str], given: list[str]) -> int:
    """Run the tests in the copy: what the command line's hidden option ``--run`` does."""
    limit, *pairs = given
    found = [(int(number), stem) for number, stem in (pair.split(":") for pair in pairs)]
    plugin = Forks(found, float(limit), Path.cwd().with_name("log"))
    quiet = ["-q", "-n0", "-s", "-p", "no:cacheprovider", "--no-header", "--tb=short"]
    return int(pytest.main([*quiet, *tests], plugins=[plugin]))


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command line; return its exit status: 1 where fewer than 95 % are found."""
    parser = argparse.ArgumentParser(description="Faults planted in the kernels, and whether the tests see them.")
    parser.add_argument("backend", choices=list(SOURCES))
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[""], help="files, or file:line")
    parser.add_argument("--level", default="default", choices=list(LEVEL_FLAGS), help="of the CPU's kernels")
    parser.add_argument("--limit", type=float, default=30, help="seconds of the processor for each fault")
    parser.add_argument("--tests", nargs="+", help="others than the backend's, as pytest selects them")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args(None if arguments is None else list(arguments))
    if given.run:
        return _tests(given.tests or TESTS[given.backend], given.run)
    names = [path.relative_to(ROOT).as_posix() for pattern in SOURCES[given.backend]
             for path in sorted(ROOT.glob(pattern)) if path.name not in LEFT]  # fmt: skip
    everything = [one for one in faults(ROOT, names) if f"{one.path}:{one.line}:".startswith(tuple(given.only))]
    if given.list:
        for path, count in Counter(one.path for one in everything).items():
            print(f"{count:5} {path}")
        print(f"{len(everything):5} in all")
        return 0
    some = drawn(everything, given.count, given.seed)
    some = [one for one in some if given.backend not in INTERPRETED or _parses(one)]
    numbered = dict(enumerate(some, 1))
    FOLDER.mkdir(parents=True, exist_ok=True)
    variables = prepare(given.backend, numbered, given.level) | {"CI": "1", "OMP_NUM_THREADS": "1"}
    end = "_(forward|backward|kernels)$"
    pairs = [f"{number}:{re.sub(end, '', Path(one.path).stem)}" for number, one in numbered.items()]
    copy = FOLDER / given.backend / "source"
    command = [sys.executable, "-m", "tools.mutate", given.backend, "--run", str(given.limit), *pairs]
    command += ["--tests", *given.tests] if given.tests else []
    ends: dict[int, int] = {}
    others: list[str] = []
    finders: Counter[str] = Counter()
    with subprocess.Popen(command, cwd=copy, env=variables, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("FAULT "):
                others.append(line)
                continue
            number, status, seconds = map(int, line.split()[1:4])
            if number:
                ends[number] = status
                word = "SURVIVES" if not status else "endless" if -status in ENDLESS else "found"
                place = f" by {line.split(maxsplit=4)[4].strip()}" if status else ""
                print(f"{word:8} {numbered[number]}   ({seconds} s{place})", flush=True)
                if status:
                    finders.update([place.partition("::")[0]])
    if len(ends) < len(numbered):
        raise SystemExit("fastcaps: the tests ended early\n" + "".join(others[-60:]))
    survivors = [number for number, status in ends.items() if not status]
    found = len(ends) - len(survivors)
    print(f"{given.backend}, seed {given.seed}: {found} of {len(ends)} found, {100 * found / max(len(ends), 1):.1f} %")
    print(*(f"{count:4}{name}" for name, count in finders.most_common()), sep="\n")
    print(*(numbered[number] for number in survivors), sep="\n")
    return 0 if found >= 0.95 * len(ends) else 1


if __name__ == "__main__":
    sys.exit(main())
