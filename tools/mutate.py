"""Faults planted in the sources one at a time, and which test sees them first: ``make mutate``.

    python -m tools.mutate cpu --count 100 --seed 0  # so many of all that there are, drawn by the seed
    python -m tools.mutate triton --only triton_kernels/tiles.py:120
    python -m tools.mutate python --only fastcaps/ops --tests tests/test_ops.py tests/test_made.py

The faults (``tools/faults.py``) are planted together, each behind its number, in a copy of the checkout, which is built
once: the CPU library for the portable instruction set, the CUDA sources as they run on the CPU, or ``native``: the
formulas and schedules in the module of ``tests/native``. Triton's kernels are interpreted; "python" is the package,
which uses the library as it is. For each fault pytest runs the backend's tests without the slow ones, one of every test
function, then another of each, until one fails or the time is up. What does not compile does not count.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tools.faults import Fault, drawn, faults, planted
from tools.native import ROOT, build, environment, module_headers

FOLDER = ROOT / "build" / "mutate"
COPIED = ("csrc", "fastcaps", "triton_kernels", "tests", "tools", "bench", "examples", "CMakeLists.txt", "setup.py",
          "pyproject.toml")  # fmt: skip
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
    "cpu": ("tests/test_kernels.py", "tests/test_products.py", "tests/test_errors.py", "tests/test_ops.py",
            "tests/test_functional_extremes.py", "tests/test_explain.py", "tests/test_verbs_cpu.py",
            # sums of 512 numbers err by 4 % more than may be without FMA, beside an eager torch that has it
            "-k", "not (has_a_case or 32_bits or largest-pose or cuda or triton or reference)"),
    "cuda": ("tests/test_cuda_kernels.py", "tests/test_cuda_extremes.py", "tests/test_cuda_plain.py",
             "tests/test_cuda_folded.py", "-k", "on-cpu and not random"),
    "native": ("tests/native",),
    "triton": ("tests/test_triton.py", "tests/test_verbs_triton.py", "-k",
               "ways or served or only_the_gradients or one_iteration or variances or schedules or workspace "
               "or triton- or triton] or every_verb or absent or squares"),
    "python": ("tests",),
}  # fmt: skip
START = """import builtins, os
number = int(os.environ.get("FASTCAPS_FAULT", "0"))
builtins.FASTCAPS_FAULT = lambda one: one == number
"""
"""What Python runs first, in the processes that a test starts too."""
HEADER = """#pragma once
#include <cstdlib>
inline const int fastcaps_fault = std::getenv("FASTCAPS_FAULT") ? std::atoi(std::getenv("FASTCAPS_FAULT")) : 0;
inline bool FASTCAPS_FAULT(int k) { return fastcaps_fault == k; }
"""


def _copy(folder: Path, numbered: dict[int, Fault]) -> None:
    """Make the copy what the checkout is, with these faults; what has not changed keeps its date."""
    paths = {fault.path for fault in numbered.values()}
    texts = {"fault.h": HEADER.encode(), "sitecustomize.py": START.encode()}
    for source in (one for name in COPIED for one in (ROOT / name, *(ROOT / name).rglob("*"))):
        name = source.relative_to(ROOT).as_posix()
        if source.is_symlink():
            if not (folder / name).is_symlink():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).symlink_to(source.readlink())
        elif source.is_file() and "__pycache__" not in name:
            texts[name] = source.read_bytes()
            if name in paths:
                texts[name] = planted(name, texts[name].decode(), numbered).encode()
    for name, text in texts.items():
        if not (folder / name).is_file() or (folder / name).read_bytes() != text:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text)


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
    try:
        return bool(ast.parse(planted(fault.path, (ROOT / fault.path).read_text(), {1: fault})))
    except SyntaxError:
        return False


def prepare(backend: str, numbered: dict[int, Fault]) -> dict[str, str]:
    """Plant faults and build; leave those out that do not compile, and return the environment of the tests."""
    folder = FOLDER / backend / "source"
    if backend in ("triton", "python"):
        for number in [number for number, fault in numbered.items() if not _parses(fault)]:
            del numbered[number]
        _copy(folder, numbered)
        interpret = {"TRITON_INTERPRET": "1"} if backend == "triton" else {}
        return {**os.environ, **interpret, "PYTHONPATH": str(folder)}
    flags = f"-w -include {folder / 'fault.h'} {'-O0' if backend == 'cpu' else '-O1'}"
    target = "fastcaps_cuda_on_cpu" if backend == "cuda" else f"fastcaps_{backend}"
    definitions = (f"FASTCAPS_INCLUDES={module_headers()}", "FASTCAPS_GUARDS=ON")
    while True:
        _copy(folder, numbered)
        try:
            library = build(FOLDER / backend / "build", target, flags, folder, *definitions)
            return environment(library, PYTHONPATH=str(folder))
        except RuntimeError as error:
            for number in _uncompiled(str(error), numbered):
                print(f"no code  {numbered.pop(number)}", flush=True)


# ---- a plugin of pytest: which tests come first, and when the time is up ---------------------------------------------


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort tests: of the fault's routing first, then one of every test function, and so on."""
    stem, met = os.environ["FASTCAPS_STEM"], Counter[str]()
    random.Random(0).shuffle(items)
    ranks = {}
    for item in sorted(items, key=lambda item: stem not in item.nodeid):
        function = item.nodeid.partition("[")[0]
        ranks[item], met[function] = met[function], met[function] + 1
    items.sort(key=ranks.__getitem__)


def pytest_runtest_logfinish() -> None:
    """End well if all tests passed until the time is up."""
    if time.process_time() > float(os.environ["FASTCAPS_LIMIT"]):
        pytest.exit("the time is up", returncode=0)


def _look(folder: Path, tests: list[str], variables: dict[str, str], limit: float) -> tuple[bool, str]:
    """Run the tests until one fails; return whether none did, and what they said in the end."""
    options = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "-p", "tools.mutate", "--tb=short", "-rfE"]
    command = shlex.join([sys.executable, "-m", "pytest", *options, *tests])
    bounded = f"ulimit -t {4 * int(limit) + 60}; exec timeout {int(60 * limit) + 600} {command}"  # some never end
    done = subprocess.run(["bash", "-c", bounded], cwd=folder, env=variables, text=True, errors="replace",
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    return done.returncode == 0, done.stdout


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command line; return its exit status: 1 where fewer than 95 % are found."""
    parser = argparse.ArgumentParser(description="Faults planted in the kernels, and whether the tests see them.")
    parser.add_argument("backend", choices=list(SOURCES))
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[""], help="files, or file:line")
    parser.add_argument("--limit", type=float, default=30, help="seconds of the processor for each fault")
    parser.add_argument("--tests", nargs="+", help="others than the backend's, as pytest selects them")
    given = parser.parse_args(None if arguments is None else list(arguments))
    names = [path.relative_to(ROOT).as_posix() for pattern in SOURCES[given.backend]
             for path in sorted(ROOT.glob(pattern)) if path.name not in LEFT]  # fmt: skip
    everything = [one for one in faults(ROOT, names) if f"{one.path}:{one.line}:".startswith(tuple(given.only))]
    numbered = dict(enumerate(drawn(everything, given.count, given.seed), 1))
    variables = {"CI": "1", "OMP_NUM_THREADS": "1", "FASTCAPS_LIMIT": f"{given.limit}"}
    variables = {**prepare(given.backend, numbered), **variables}

    def look(number: int) -> tuple[bool, str]:
        stem = re.sub("_(forward|backward|kernels)$", "", Path(numbered[number].path).stem) if number else ""
        more = {"FASTCAPS_FAULT": str(number), "FASTCAPS_STEM": stem}
        tests = given.tests or [*TESTS[given.backend]]
        survives, said = _look(FOLDER / given.backend / "source", tests, variables | more, given.limit)
        if number:
            place = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
            end = "SURVIVES" if survives else f"found by {place[-1] if place else 'a crash or the time limit'}"
            print(f"{numbered[number]}\n    {end}", flush=True)
        return survives, said

    well, said = look(0)
    if not well:
        raise SystemExit(f"fastcaps: the tests fail without a fault:\n{said[-3000:]}")
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = [not survives for survives, _ in pool.map(look, numbered)]
    print(f"{given.backend}, seed {given.seed}: {sum(found)} of {len(found)} found of {len(everything)} faults")
    return 0 if sum(found) >= 0.95 * len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
