"""The cases of the CUDA kernels: the registry's, in the dtypes that a GPU has, and rows for their schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from cases import CONV, Case
from registry import ATTENTION, GAUSSIAN, POOLING, Routing

from fastcaps.rules import Rule

POSES = ((4, 4, 4), (6, 6, 6), (8, 8, 8), (1, 8, 16), (1, 16, 16), (1, 64, 64), (2, 3, 5))
DENSE = (3, 3, 1, 1, 0, 0, 1, 1)


def _rows(rule: Rule, **options: Any) -> tuple[Case, ...]:
    """Return rows for the kernels, and for the ways in which calls are cut up, of every routing."""

    def make(name: str, **changes: Any) -> Case:
        return Case(name, **{"rule": rule, **options, **changes})

    return (
        *(make(f"pose-{p[0]}x{p[1]}-{m}", types=6, parents=m, pose=p, gate="some") for p in POSES for m in (5, 20, 37)),
        make("parents-16", types=6, parents=16, pose=(4, 4, 4), bias="I1"),
        make("papers-c10-conv", batch=1, grid=(5, 5), types=6, parents=32, pose=(4, 4, 4), window=CONV),
        make("papers-c10-fc", types=70, parents=10, pose=(4, 4, 4), bias="I1", turns=2),
        make("papers-c100-fc", batch=1, types=9, parents=100, pose=(6, 6, 6)),
        make("papers-dmm-conv", batch=1, grid=(3, 4), types=3, parents=16, pose=(8, 8, 8), window=DENSE, turns=2),
        make("papers-dmm-vector", batch=1, types=8, parents=16, pose=(1, 64, 64)),
        make("papers-dr", types=9, parents=100, pose=(1, 8, 16), turns=3),
        # parents in several blocks
        make("sweeps", batch=1, types=2, parents=1100, pose=(4, 4, 4), gate="some", turns=2),
        make("sweeps-vector", batch=1, types=2, parents=2100, pose=(1, 16, 16), groups="one", bias="1M"),
        make("sweeps-any", batch=1, grid=(2, 1), types=1, parents=700, window=(2, 1, 1, 1, 0, 0, 1, 1)),
        # children in several ranges
        make("one-position", batch=1, types=400, parents=3, pose=(4, 4, 4), groups="one", gate="some", bias="I1"),
        make("one-position-no-start", batch=1, types=400, parents=3, pose=(1, 16, 16), start=False, gate="silent"),
        make("one-position-any", batch=1, types=400, parents=3, start=False, bias="1M"),
        # poses at the limits of 32 lanes
        make("largest-pose", batch=1, types=3, pose=(16, 9, 32)),
        make("long-vector", batch=1, types=3, parents=2, pose=(1, 260, 130)),
        make("tall-pose", types=3, parents=5, pose=(37, 3, 2), bias="IM"),
        # lanes that stand for no position, whose sums are 0; one parent with shared matrices
        *(make(f"no-eps-{p[0]}x{p[1]}", batch=3, types=7, parents=5, pose=p, eps=0.0, bias="1M") for p in POSES),
        *(make(f"one-parent-{p[0]}x{p[1]}", batch=1, types=64, parents=1, pose=p, groups="one") for p in POSES),
        # children that are read as they are stored, NaN behind gates of 0
        make("broken-half", types=7, parents=5, pose=(1, 64, 64), gate="broken", dtype=torch.bfloat16),
        # votes that are the children themselves
        *(
            make(f"same-{p[0]}x{p[1]}", types=9, parents=m, pose=p, groups="none", bias=b, gate="some", turns=t)
            for p in ((4, 4, 4), (1, 16, 16), (1, 64, 64), (2, 3, 3))
            for m, b, t in ((1, None, 1), (40, "IM", 2))
        ),
        make("same-ranges", batch=1, types=300, parents=1, pose=(4, 4, 4), groups="none", gate="some"),
    )


def _on_gpu(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """Return cases in dtypes of a GPU: a case that is there in float64 beside float32 is left out."""
    kept = [case for case in cases if not case.name.endswith("-float64")]
    return tuple(replace(c, dtype=torch.float32) if c.dtype == torch.float64 else c for c in kept)


ROWS: dict[str, tuple[Case, ...]] = {
    "attention": _rows(Rule.LAYER_NORM),
    "pooling": _rows(Rule.UNIT, normalize=True),
    "gaussian": (
        *_rows(Rule.HEINSEN),
        Case("sweeps-means", Rule.HEINSEN, batch=1, types=2, parents=700, log_weight=False),
    ),
}


def cases_of(routing: Routing, keep: Callable[[Case], bool] = lambda case: True) -> tuple[Case, ...]:
    """Return the cases of a routing."""
    return tuple(case for case in (*_on_gpu(routing.cases), *ROWS[routing.stem]) if keep(case))


def every_cuda_case(step: int = 1) -> list[tuple[Routing, Case]]:
    """Return the cases of all routings, or every so many of them."""
    return [(routing, case) for routing in (ATTENTION, POOLING, GAUSSIAN) for case in cases_of(routing)[::step]]


def row(routing: Routing, name: str) -> Case:
    """Return a case by its name."""
    return next(case for case in cases_of(routing) if case.name == name)
