"""The schedules that are worth timing for one call: settings of ``FASTCAPS_SCHEDULE``.

Only a CUDA library that was built with ``FASTCAPS_EXPERIMENTS=1`` follows the variable, which it reads at every call
(csrc/cuda/experiments.h). Time each setting in turn; what wins becomes a rule of
csrc/cuda/schedule.cu, or another kernel.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product, zip_longest

import torch

from bench.workload import PRECISIONS, Case
from fastcaps import backends, libraries

VARIABLE = "FASTCAPS_SCHEDULE"
MOST = 60
"""Settings for a call in one direction."""
WARPS_POSITIONS, STAGES, CHUNKS = (16, 12, 8, 6, 4, 3, 2, 1), (8, 4), (1, 2, 4)
HOPPER = (132, 227 << 10)  # multiprocessors, and a block's shared memory: to list schedules without a GPU
Ask = Callable[[str, str, tuple[int, ...], tuple[int, ...]], str | None]


def _ask(function: str, op: str, *numbers: tuple[int, ...]) -> str | None:
    """Ask the installed library, or the one that ``FASTCAPS_CUDA_LIBRARY`` names."""
    arrays = ((ctypes.c_int64 * len(each))(*each) for each in numbers)
    return libraries.library("cuda").ask(function, op, *arrays)


@contextmanager
def scheduled(setting: str) -> Iterator[None]:
    """Let calls within be cut as a setting says; the empty one leaves the schedule its own choice."""
    before = os.environ.get(VARIABLE, "")  # which is as good as none
    os.environ[VARIABLE] = setting
    try:
        yield
    finally:
        os.environ[VARIABLE] = before


def of_case(case: Case, arguments: Mapping[str, torch.Tensor], limits: Sequence[int]) -> list[str]:
    """Return the settings for a row's pass on a GPU with ``limits``: multiprocessors, shared memory of a block."""
    work, precision = case.workload, PRECISIONS[case.precision]
    grid, window = work.grid or (1, 1), work.window
    sizes = (
        *(case.batch, *grid, work.types, work.rows, work.columns_in, *(work.output_grid or (1, 1)), work.parents),
        *(work.columns_out, work.matrices, *(window.spec if window else (1, 1, 1, 1, 0, 0, 1, 1))),
    )
    element = (torch.float32, torch.float64, torch.bfloat16, torch.float16).index(precision.dtype)
    bias = 0 if "bias" not in arguments else 1 if arguments["bias"].shape[0] == 1 else 2
    options, iterations = backends.ALLOW_TF32 if precision.tf32 else 0, work.routing.iterations
    facts = (int(case.training), element, bias, int("parents" in arguments), iterations, options, *limits)
    if case.training or _ask("fastcaps_cuda_routing_refusal", work.routing.subject, sizes, facts):
        facts = (*facts[:4], 1, *facts[5:])  # a launch has one iteration
    return variants(not case.training, work.routing.subject, sizes, facts)


def variants(forward: bool, op: str, sizes: Sequence[int], facts: Sequence[int], ask: Ask = _ask) -> list[str]:
    """Return settings for one call, all different and all taken: the default (empty) first, then the kernels in turn.

    Of each kernel come first the schedules of the least estimated time, one for each number of warps. ``op``, ``sizes``
    and ``facts`` are those of csrc/cuda/introspection.cu, ``ask`` asks a library; ``forward`` decides for the first of
    the facts. RuntimeError if the library was built without ``FASTCAPS_EXPERIMENTS=1``.
    """
    asked = op, tuple(sizes), (int(not forward), *facts[1:])
    listed = ask("fastcaps_cuda_instances", *asked)
    if listed is None:
        raise RuntimeError("the CUDA library follows no settings: build it with FASTCAPS_EXPERIMENTS=1")
    kernels = [(name, *map(int, numbers)) for name, *numbers in map(str.split, filter(None, listed.split(";")))]
    fewest = min((parents for _, parents, _, _ in kernels), default=0)
    taken: set[tuple[str, ...]] = set()

    def new(setting: str) -> float | None:
        """Return the estimated time of a setting; None where it is refused or cuts the call like an earlier one."""
        with scheduled(setting):
            answer = ask("fastcaps_cuda_schedule", *asked) or ""
        found = dict(field.split("=", 1) for field in answer.split(";", answer.partition("text=")[0].count(";")))
        cut = tuple(value for key, value in found.items() if key not in ("cost", "kernel"))
        if "kernel" not in found or cut in taken:
            return None
        taken.add(cut)
        return float(found["cost"])

    new("")
    of_kernels: list[list[str]] = []
    for name, parents, _positions, warps in kernels:
        if parents > max(fewest, 2 * sizes[8]):
            continue  # most lanes would have no parent
        ranked: list[tuple[int, float, str]] = []  # place among the same number of warps, estimated time, setting
        for along in (one for one in WARPS_POSITIONS if one <= warps):
            found: list[tuple[float, str]] = []
            for stage, chunks in product(STAGES, CHUNKS):
                setting = f"{'forward' if forward else 'backward'}:kernel={name},warps_positions={along},stage={stage}"
                if forward or not facts[5] & 1:  # else sums have one order, from which the ranges follow
                    setting += f",chunks={chunks}"
                if (cost := new(setting)) is not None:
                    found.append((cost, setting))
            ranked += [(place, *one) for place, one in enumerate(sorted(found))]
        of_kernels.append([setting for _, _, setting in sorted(ranked)])
    in_turn = [one for turn in zip_longest(*of_kernels) for one in turn if one is not None]
    return ["", *in_turn][:MOST]
