"""Small calls through the kernels, held to the rule of ``bench.judge``: for compute-sanitizer to watch.

PYTHONPATH=tests compute-sanitizer --tool memcheck python -m tools.sanitize --device cuda --backend cuda

The calls are cases of the tests: the first of every rule on a set and on a grid, and rows for the ways in which the
CUDA kernels cut a call up.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from cases import Case, on_device
from registry import ROUTINGS, Call, Routing, gpu_cases
from torch import Tensor

from bench.judge import Bar
from fastcaps import backends

ROWS = (
    "pose-4x4-20", "bias-6x6", "bias-8x8", "pose-1x8", "pose-1x16", "bias-1x64", "pose-2x3", "children-float32", "conv",
    "sweeps", "sweeps-any", "one-position", "largest-pose", "same-4x4",
)  # fmt: skip
Checked = tuple[Callable[[str], dict[str, Tensor]], Bar]
"""What runs on a device, and what its results are held to."""


def _of_routing(routing: Routing, case: Case, dtype: torch.dtype) -> Checked:
    call = routing.call(replace(case, dtype=dtype))
    own = lambda device: call.having([on_device(one, device) for one in call.tensors]).training(Call.by_op)  # noqa: E731
    return own, call.bar()


def calls(rows: Collection[str] = ROWS) -> dict[str, Callable[[torch.dtype], Checked]]:
    """Return all calls by name: what makes one in a dtype. ``rows`` are the cases beside the first of every rule."""
    made: dict[str, Callable[[torch.dtype], Checked]] = {}
    for routing in ROUTINGS:
        some: dict[Any, Case] = {}
        for case in (one for one in gpu_cases(routing) if one.batch > 0 and one.dtype == torch.float32):
            some.setdefault(case.name if case.name in rows else (case.rule, case.grid == (1, 1)), case)
        for case in some.values():
            made[f"{routing.stem} {case.rule.name} {case.name}"] = partial(_of_routing, routing, case)
    return made


def run(
    device: str, backend: str | None, dtype: torch.dtype, only: str = "", rows: Collection[str] = ROWS
) -> list[str]:
    """Run calls with ``only`` in their names, free and deterministic; print how each went, return those that err."""
    wrong = []
    for name, make in ((name, make) for name, make in calls(rows).items() if only in name):
        run, bar = make(dtype)
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            try:
                with nullcontext() if backend is None else backends.backend(backend):
                    found = run(device)
            finally:
                torch.use_deterministic_algorithms(False)
            said = bar.judge({result: one.cpu() for result, one in found.items()}).complaints
            what = f"{name}, {'deterministic' if deterministic else 'free'}"
            wrong += [what] * bool(said)
            print(f"{'WRONG' if said else 'ok':<6} {what}{': ' if said else ''}{'; '.join(said)}", flush=True)
    return wrong


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Small calls for compute-sanitizer, checked.")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backend", default=None, help="force one (default: the one that comes first)")
    parser.add_argument("--only", default="", help="calls with this in their name")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    given = parser.parse_args(None if arguments is None else list(arguments))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's matmuls ask for it in deterministic mode
    wrong = run(given.device, given.backend, getattr(torch, given.dtype), given.only)
    print(f"{len(wrong)} wrong" if wrong else "all agree with the reference")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
