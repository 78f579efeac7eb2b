"""The schedules that are worth timing for one call: settings of ``FASTCAPS_SCHEDULE``.

Only a CUDA library that was built with ``FASTCAPS_EXPERIMENTS=1`` follows the variable, which it reads at every call
(csrc/cuda/experiments.h). Time each setting in turn; what wins becomes a row of csrc/cuda/tuned.h.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product, zip_longest

from fastcaps import libraries

__all__ = ["VARIABLE", "schedule", "scheduled", "variants"]

VARIABLE = "FASTCAPS_SCHEDULE"
MOST = 60
"""Settings for a call in one direction."""
WARPS_POSITIONS, STAGES, CHUNKS = (16, 12, 8, 6, 4, 3, 2, 1), (8, 4), (1, 2, 4)
Ask = Callable[[str, str, tuple[int, ...], tuple[int, ...]], str | None]


def _ask(function: str, op: str, *numbers: tuple[int, ...]) -> str | None:
    """Ask the installed library, or the one that ``FASTCAPS_CUDA_LIBRARY`` names."""
    arrays = ((ctypes.c_int64 * len(each))(*each) for each in numbers)
    return libraries.library("cuda").ask(function, op, *arrays)


@contextmanager
def scheduled(setting: str) -> Iterator[None]:
    """Let calls within be cut as a setting says; the empty one leaves the schedule its own choice."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = setting
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def schedule(setting: str, op: str, sizes: Sequence[int], facts: Sequence[int], ask: Ask = _ask) -> dict[str, str]:
    """Return a call's schedule under a setting; where that is refused only ``text``, which says why.

    ``op``, ``sizes`` and ``facts`` are those of csrc/cuda/introspection.cu: a call's ``stem``, its votes' ``sizes``,
    and what else its schedule depends on. ``ask`` asks a library.
    """
    with scheduled(setting):
        answer = ask("fastcaps_cuda_schedule", op, tuple(sizes), tuple(facts)) or ""
    return dict(field.split("=", 1) for field in answer.split(";", answer.partition("text=")[0].count(";")))


def variants(forward: bool, op: str, sizes: Sequence[int], facts: Sequence[int], ask: Ask = _ask) -> list[str]:
    """Return settings for one call, all different and all taken: the default (empty) first, then the kernels in turn.

    Of each kernel come first the schedules of the least estimated time, one for each number of warps. Arguments are
    those of :func:`schedule`; ``forward`` decides for the first of the facts.

    Raises
    ------
    RuntimeError
        If the library was built without ``FASTCAPS_EXPERIMENTS=1``.
    """
    facts = (int(not forward), *facts[1:])
    listed = ask("fastcaps_cuda_instances", op, tuple(sizes), facts)
    if listed is None:
        raise RuntimeError("the CUDA library follows no settings: build it with FASTCAPS_EXPERIMENTS=1")
    direction = "forward" if forward else "backward"
    kernels = [(name, *map(int, numbers)) for name, *numbers in map(str.split, filter(None, listed.split(";")))]
    fewest = min((parents for _, parents, _, _ in kernels), default=0)
    taken: set[tuple[str, ...]] = set()

    def new(setting: str) -> float | None:
        """Return the estimated time of a setting; None where it is refused or cuts the call like an earlier one."""
        found = schedule(setting, op, sizes, facts, ask)
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
        found: list[list[tuple[float, str]]] = []  # for each number of warps: estimated times, settings
        for along, stage, chunks in product(WARPS_POSITIONS, STAGES, CHUNKS):
            if along > warps:
                continue
            if (stage, chunks) == (STAGES[0], CHUNKS[0]):
                found.append([])
            setting = f"{direction}:kernel={name},warps_positions={along},stage={stage},chunks={chunks}"
            if facts[5] & 1 and not forward:  # sums have one order, from which the ranges follow
                setting = setting.rpartition(",")[0]
            if (cost := new(setting)) is not None:
                found[-1].append((cost, setting))
        # the best of each number of warps, then the second best, ...
        ranked = [(k, *one) for each in found for k, one in enumerate(sorted(each, key=lambda one: one[0]))]
        of_kernels.append([setting for _, _, setting in sorted(ranked, key=lambda one: one[:2])])
    in_turn = [one for turn in zip_longest(*of_kernels) for one in turn if one is not None]
    return ["", *in_turn][:MOST]
