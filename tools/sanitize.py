"""The kernels under sanitizers: the compiler's (``make sanitize``), and calls for compute-sanitizer to watch.

    PYTHONPATH=tests python -m tools.sanitize address thread cuda [--short]
    PYTHONPATH=tests compute-sanitizer --tool memcheck python -m tools.sanitize --backend cuda

``address``: AddressSanitizer and UndefinedBehaviorSanitizer over the tests of the CPU kernels, with guard pages behind
scratch memory. ``thread``: ThreadSanitizer over every routing's cases, from two threads at once, each cut into four.
``cuda``: AddressSanitizer over the CUDA sources as they run on the CPU. Each builds a library for one instruction set,
for the short form the portable one. torch is as it is installed: AddressSanitizer knows its allocations and copies,
ThreadSanitizer nothing of it (``tests/parallel_threads.cpp`` replaces its threads).

The calls are held to the rule of ``bench.judge``. They are cases of the tests: the first of every rule on a
set and on a grid, and rows for the ways in which the CUDA kernels cut a call up.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Collection, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cases import Case, on_device
from registry import ROUTINGS, Call, Routing, gpu_cases

from fastcaps import backends
from tools.native import LEVEL_FLAGS, ROOT, build, call, environment

ROWS = (
    "pose-4x4-20", "bias-6x6", "bias-8x8", "pose-1x8", "pose-1x16", "bias-1x64", "pose-2x3", "children-float32", "conv",
    "sweeps", "sweeps-any", "one-position", "largest-pose", "same-4x4",
)  # fmt: skip

# ---- the compiler's --------------------------------------------------------------------------------------------------

COMMON = "-O0 -g1 -fno-omit-frame-pointer"  # optimised, the kernels take the compiler many minutes with these
PYTEST = [sys.executable, "-m", "pytest", "-q", "-n0", "-x", "-p", "no:cacheprovider"]
WORKER = [sys.executable, "tests/guard_worker.py"]
OTHER_PROCESSES = "instruction_set or cuda or has_a_case"  # tests of another library, or of schedules alone
ADDRESS = {
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:allow_user_segv_handler=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "CI": "1",
}


def _preload(*names: str) -> str:
    """Return the compiler's libraries as LD_PRELOAD wants them."""
    found = [call(["c++", f"-print-file-name={name}"]).stdout.strip() for name in names]
    if missing := [name for name, path in zip(names, found, strict=True) if not Path(path).is_file()]:
        raise SystemExit(f"fastcaps: the sanitizers need g++ and its {missing[0]}")
    return " ".join(found)


def _run(what: str, command: list[str], variables: dict[str, str]) -> bool:
    """Run a program under a sanitizer and print the report or how it ended; return whether all is well."""
    done = call(command, env=variables)
    words = ("ERROR: AddressSanitizer", "WARNING: ThreadSanitizer", "runtime error:")
    lines = done.stdout.splitlines()
    reports = [k for k, line in enumerate(lines) if any(word in line for word in words)]
    wrong = bool(reports or done.returncode)
    said = lines[max(reports[0] - 1, 0) : reports[0] + 40] if reports else lines[-20 if wrong else -1 :]
    print(f"{'WRONG' if wrong else 'ok':<6} {what}, exit status {done.returncode}", *said, sep="\n  ", flush=True)
    return not wrong


def _built(kind: str, short: bool, flags: str) -> Path:
    level = "default" if short else "avx2"
    folder = ROOT / "build" / f"sanitize-{kind}-{level}"
    return build(folder, "fastcaps_cpu", f"{COMMON} {LEVEL_FLAGS[level]} {flags}".strip(), ROOT, "FASTCAPS_GUARDS=ON")


def address(short: bool) -> bool:
    """Run the tests of the CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer."""
    library = _built("address", short, "-fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all")
    preload = _preload("libasan.so", "libstdc++.so")  # the latter at once: its exceptions must be found
    variables = environment(library, LD_PRELOAD=preload, **ADDRESS)
    commands = {f"cases {part} of 3": [*WORKER, part, "3", "1"] for part in ("0", "1", "2")[: 1 if short else 3]}
    if not short:
        commands["tests"] = [*PYTEST, "--require-native", "-k", f"not ({OTHER_PROCESSES})", "tests/test_kernels.py"]
    well = [_run(f"address, {what}", command, variables) for what, command in commands.items()]
    return all(well)


def thread(short: bool) -> bool:
    """Run every routing from several threads under ThreadSanitizer."""
    library = _built("thread", short, "-fsanitize=thread")
    pool = library.with_name("parallel_threads.so")
    command = ["c++", "-std=c++20", "-O1", "-g1", "-fsanitize=thread", "-shared", "-fPIC", "-o", str(pool)]
    subprocess.run([*command, "tests/parallel_threads.cpp"], cwd=ROOT, check=True)
    preload, options = f"{_preload('libtsan.so')} {pool}", "halt_on_error=1:exitcode=66"
    variables = environment(library, LD_PRELOAD=preload, TSAN_OPTIONS=options)
    return _run("thread", [*WORKER, "0", "9" if short else "1", "2"], variables)


def cuda(short: bool) -> bool:
    """Run the CUDA sources on the CPU under AddressSanitizer, which there watches tensors and the host's memory."""
    # The frames of threads that are given up in the middle would be poisoned for those that come after.
    flags = f"{COMMON} -fsanitize=address --param asan-stack=0"
    library = build(ROOT / "build" / "sanitize-cuda", "fastcaps_cuda_on_cpu", flags, ROOT, "FASTCAPS_WATCH=-Wno-all")
    variables = environment(library, LD_PRELOAD=_preload("libasan.so", "libstdc++.so"), **ADDRESS)
    some = " and (test_only_the_gradients_asked_for or test_a_set_is_a_grid)" if short else ""
    tests = [f"tests/test_{name}.py" for name in ("cuda_kernels", "cuda_extremes")]
    return _run("cuda", [*PYTEST, "-k", f"on-cpu{some}", *tests], variables)


COMPILERS = {"address": address, "thread": thread, "cuda": cuda}

# ---- calls for compute-sanitizer -------------------------------------------------------------------------------------


def calls(rows: Collection[str] = ROWS) -> dict[str, tuple[Routing, Case]]:
    """Return cases by name: the first of every rule on a set and on a grid, and those called ``rows``."""
    found: dict[str, tuple[Routing, Case]] = {}
    for routing in ROUTINGS:
        some: dict[Any, Case] = {}
        for case in (one for one in gpu_cases(routing) if one.batch > 0 and one.dtype == torch.float32):
            some.setdefault(case.name if case.name in rows else (case.rule, case.grid == (1, 1)), case)
        found |= {f"{routing.stem} {case.rule.name} {case.name}": (routing, case) for case in some.values()}
    return found


def run(
    device: str, backend: str | None, dtype: torch.dtype, only: str = "", rows: Collection[str] = ROWS
) -> list[str]:
    """Run calls with ``only`` in their names, free and deterministic; print how each went, return those that err."""
    wrong = []
    for name, (routing, case) in ((name, each) for name, each in calls(rows).items() if only in name):
        call = routing.call(replace(case, dtype=dtype))
        bar, there = call.bar(), call.having([on_device(one, device) for one in call.tensors])
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            try:
                with nullcontext() if backend is None else backends.backend(backend):
                    found = there.training(Call.by_op)
            finally:
                torch.use_deterministic_algorithms(False)
            said = bar.judge({result: one.cpu() for result, one in found.items()}).complaints
            what = f"{name}, {'deterministic' if deterministic else 'free'}"
            wrong += [what] * bool(said)
            print(f"{'WRONG' if said else 'ok':<6} {what}{': ' if said else ''}{'; '.join(said)}", flush=True)
    return wrong


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The kernels under sanitizers.")
    parser.add_argument("compilers", nargs="*", help=f"some of {', '.join(COMPILERS)}; none: calls, checked")
    parser.add_argument("--short", action="store_true", help="a part of the cases, of a compiler's sanitizers")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="of the calls")
    parser.add_argument("--backend", help="of the calls (default: the one that comes first)")
    parser.add_argument("--only", default="", help="calls with this in their name")
    given = parser.parse_args(None if arguments is None else list(arguments))
    if wrong := set(given.compilers) - set(COMPILERS):
        parser.error(f"got {', '.join(sorted(wrong))}, want some of {', '.join(COMPILERS)}")
    if given.compilers:
        well = [COMPILERS[name](given.short) for name in given.compilers]
        return 0 if all(well) else 1
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's matmuls ask for it in deterministic mode
    missed = run(given.device, given.backend, torch.float32, given.only)
    print(f"{len(missed)} wrong" if missed else "all agree with the reference")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
