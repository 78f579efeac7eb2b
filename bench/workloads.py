"""The registry of workloads: layers of published capsule networks, by name; and which rows a run has of them.

One workload is one layer's routing: an attention pass, or all iterations of another routing. ``bench/`` and the tests
name the same layer by the same name, so a figure can be followed from a table to the network that it comes from.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from bench.routings import AttentionPass, DynamicRouting, EMRouting, HeinsenRouting, InterestRouting, RoutingPool
from bench.workload import Case, Workload

_TSAI, _HEINSEN, _CAPNET = "Tsai et al. 2020, Table", "Heinsen 2019", "Li et al. 2018, Table 1"
_MATRIX_4, _MATRIX_6, _MATRIX_8, _VECTOR, _WIDE = (4, 4, 4), (6, 6, 6), (8, 8, 8), (1, 8, 16), (1, 64, 64)
_CONV1, _CONV2, _DMM = ({"grid": (size, size), "kernel_size": 3, "stride": stride}
                        for size, stride in ((16, 2), (7, 1), (8, 1)))  # fmt: skip
_COPIED = {"groups": 1, "copies": 64}
_DYNAMIC, _EM, _HEINSENS = DynamicRouting(), EMRouting(), HeinsenRouting()
_PUBLISHED = DynamicRouting(as_published=True)
_ROWS: tuple[tuple[Any, ...], ...] = (
    ("tsai-c10-conv1", f"{_TSAI} 8", (8, 1), 32, 32, _MATRIX_4, AttentionPass(), _CONV1),
    ("tsai-c10-conv2", f"{_TSAI} 8", (16, 1), 32, 32, _MATRIX_4, AttentionPass(), _CONV2),
    ("tsai-c10-fc", f"{_TSAI} 8", (128, 1), 800, 10, _MATRIX_4, AttentionPass(), {}),
    ("tsai-c100-conv1", f"{_TSAI} 9", (4, 1), 32, 32, _MATRIX_6, AttentionPass(), _CONV1),
    ("tsai-c100-fc1", f"{_TSAI} 9", (64, 1), 800, 20, _MATRIX_6, AttentionPass(), {}),
    ("tsai-c100-fc2", f"{_TSAI} 9", (128, 1), 20, 100, _MATRIX_6, AttentionPass(), {}),
    ("tsai-dmm-matrix-conv", f"{_TSAI} 10", (8, 1), 16, 16, _MATRIX_8, AttentionPass(), _DMM),
    ("tsai-dmm-matrix-set", f"{_TSAI} 10", (64, 1), 576, 10, _MATRIX_8, AttentionPass(), {}),
    ("tsai-dmm-vector-conv", f"{_TSAI} 11", (4, 1), 16, 16, _WIDE, AttentionPass(), _DMM),
    ("tsai-dmm-vector-set", f"{_TSAI} 11", (64, 1), 576, 10, _WIDE, AttentionPass(), {}),
    ("barham", "Barham & Isard 2019, Table 1", (64, 1), 32, 32, _MATRIX_4,
     AttentionPass(uniform=True, normalize=False), {**_CONV1, "grid": (15, 15)}),
    ("sabour-mnist", "Sabour et al. 2017", (64,), 1152, 10, _VECTOR, _DYNAMIC, {}),
    ("guo-mnist", "CapsNet-Pytorch, `DenseCapsule`", (64,), 1152, 10, _VECTOR, _PUBLISHED, {}),
    ("zhao-points", "Zhao et al. 2019, 3D point capsules", (2,), 1024, 64, (1, 16, 64), _PUBLISHED, {}),
    ("tsai-dr-c10", f"{_TSAI} 4", (32,), 2048, 10, _VECTOR, _DYNAMIC, {}),
    ("tsai-dr-c100", f"{_TSAI} 5", (8,), 2048, 100, _VECTOR, _DYNAMIC, {}),
    ("hinton-conv", f"{_TSAI} 6", (4,), 32, 32, _MATRIX_4, _EM, _CONV1),
    ("hinton-fc", f"{_TSAI} 6", (64,), 800, 10, _MATRIX_4, EMRouting(coordinates=True), {"groups": 32}),
    ("heinsen-norb-1", f"{_HEINSEN}, Fig. 3", (2,), 5184, 64, _MATRIX_4, _HEINSENS, {"groups": 1}),
    ("heinsen-norb-2", f"{_HEINSEN}, Fig. 3", (256,), 64, 5, _MATRIX_4, _HEINSENS, {}),
    ("heinsen-sst-1", f"{_HEINSEN}, Fig. 5", (32,), 37 * 32, 64, (1, 64, 2), HeinsenRouting(layers=37), {"groups": 1}),
    ("heinsen-sst-2", f"{_HEINSEN}, Fig. 5", (1024,), 64, 5, (1, 2, 2), _HEINSENS, {}),
    ("zhao-pool", "Zhao & Huang 2019, Table 2", (128,), 256, 1, (1, 16, 16), RoutingPool(), {"groups": 0}),
    ("interests", "Li et al. 2019 (MIND)", (256,), 50, 4, _WIDE, InterestRouting(), {"groups": 0}),
    ("li-capnet-dynamic", f"{_CAPNET} (a)", (2, 128), 2048, 512, _VECTOR, _DYNAMIC, {"groups": 32}),
    ("li-capnet-em", f"{_CAPNET} (b)", (2,), 2048, 512, _VECTOR, _EM, {"groups": 32}),
    ("vocabulary", f"{_HEINSEN}, §6", (1,), 1024, 30_000, (1, 16, 16), _HEINSENS, _COPIED),
    ("million", f"{_HEINSEN}, §1.2", (1,), 1_000_000, 64, (1, 16, 16), _HEINSENS, _COPIED | {"copies": 500}),
)  # fmt: skip
WORKLOADS: dict[str, Workload] = {
    row[0]: Workload(*row, *pose, routing, **options) for *row, pose, routing, options in _ROWS
}

QUICK = {"tsai-c10-conv1": 1, "sabour-mnist": 2, "hinton-fc": 2, "zhao-pool": 8}
"""What a quick run measures, and its batch: each op, a grid and sets. It shows that results are right and that the
benchmark runs; its calls are too few to judge times by."""


def find(name: str) -> Workload:
    """Return the workload ``name``; raise ValueError with the names there are if it is unknown."""
    if name not in WORKLOADS:
        close = difflib.get_close_matches(name, WORKLOADS, 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"unknown workload {name!r}{hint}; there are: {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def cases(names: Sequence[str], quick: bool) -> list[Case]:
    """Return the rows of some workloads, or, where none are named, of the quick ones or of all."""
    works = [find(name) for name in names or (QUICK if quick else WORKLOADS)]
    usual = {one.name: (QUICK.get(one.name, 1),) if quick else one.batches for one in works}
    return [Case(one, batch, mode) for one in works for batch in usual[one.name] for mode in (False, True)]
