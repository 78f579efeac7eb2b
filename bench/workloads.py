"""The registry of workloads: layers of published capsule networks, by name; and which rows a run has of them.

One workload is one layer's routing: an attention pass, or all iterations of another routing. ``bench/`` and the tests
name the same layer by the same name, so a figure can be followed from a table to the network that it comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.routings import AttentionPass, DynamicRouting, EMRouting, HeinsenRouting, RoutingPool
from bench.workload import PRECISIONS, Case, Workload

_TSAI = "Tsai et al. 2020, Table"
_HEINSEN = "Heinsen 2019"
_MATRIX_4, _MATRIX_6, _MATRIX_8 = (4, 4, 4), (6, 6, 6), (8, 8, 8)
_CONV1: dict[str, Any] = {"grid": (16, 16), "kernel_size": 3, "stride": 2}


def _attention() -> list[Workload]:
    """Return the attention passes."""
    conv2 = {"grid": (7, 7), "kernel_size": 3}
    dmm = {"grid": (8, 8), "kernel_size": 3}
    sized: tuple[tuple[Any, ...], ...] = (
        ("tsai-c10-conv1", "8", 8, 32, 32, _MATRIX_4, _CONV1),
        ("tsai-c10-conv2", "8", 16, 32, 32, _MATRIX_4, conv2),
        ("tsai-c10-fc", "8", 128, 800, 10, _MATRIX_4, {}),
        ("tsai-c100-conv1", "9", 4, 32, 32, _MATRIX_6, _CONV1),
        ("tsai-c100-fc1", "9", 64, 800, 20, _MATRIX_6, {}),
        ("tsai-c100-fc2", "9", 128, 20, 100, _MATRIX_6, {}),
        ("tsai-dmm-matrix-conv", "10", 8, 16, 16, _MATRIX_8, dmm),
        ("tsai-dmm-matrix-set", "10", 64, 576, 10, _MATRIX_8, {}),
        ("tsai-dmm-vector-conv", "11", 4, 16, 16, (1, 64, 64), dmm),
        ("tsai-dmm-vector-set", "11", 64, 576, 10, (1, 64, 64), {}),
    )
    made = [
        Workload(name, f"{_TSAI} {where}", (batch, 1), types, many, *pose, AttentionPass(), **places)
        for name, where, batch, types, many, pose, places in sized
    ]
    uniform = AttentionPass(uniform=True, normalize=False)
    barham = {**_CONV1, "grid": (15, 15)}
    return [*made, Workload("barham", "Barham & Isard 2019, Table 1", (64, 1), 32, 32, *_MATRIX_4, uniform, **barham)]


def _routings() -> list[Workload]:
    """Return the whole routings."""
    dynamic, heinsen, vector = DynamicRouting(), HeinsenRouting(), (1, 8, 16)
    sabour, norb, sst, capnet = "Sabour et al. 2017", f"{_HEINSEN}, Fig. 3", f"{_HEINSEN}, Fig. 5", "Li et al. 2018"
    em, coordinates = EMRouting(), EMRouting(coordinates=True)
    made = (
        Workload("sabour-mnist", sabour, (64,), 1152, 10, *vector, dynamic),
        Workload("tsai-dr-c10", f"{_TSAI} 4", (32,), 2048, 10, *vector, dynamic),
        Workload("tsai-dr-c100", f"{_TSAI} 5", (8,), 2048, 100, *vector, dynamic),
        Workload("hinton-conv", f"{_TSAI} 6", (4,), 32, 32, *_MATRIX_4, em, **_CONV1),
        Workload("hinton-fc", f"{_TSAI} 6", (64,), 800, 10, *_MATRIX_4, coordinates, groups=32),
        Workload("heinsen-norb-1", norb, (2,), 5184, 64, *_MATRIX_4, heinsen, groups=1),
        Workload("heinsen-norb-2", norb, (256,), 64, 5, *_MATRIX_4, heinsen),
        Workload("heinsen-sst-1", sst, (32,), 37 * 32, 64, 1, 64, 2, HeinsenRouting(layers=37), groups=1),
        Workload("heinsen-sst-2", sst, (1024,), 64, 5, 1, 2, 2, heinsen),
        Workload("zhao-pool", "Zhao & Huang 2019, Table 2", (128,), 256, 1, 1, 16, 16, RoutingPool(), groups=0),
    )
    sampled: dict[str, Any] = {"groups": 32, "checked": 2}
    large = (
        Workload("li-capnet-dynamic", f"{capnet}, Table 1 (a)", (2, 128), 2048, 512, *vector, dynamic, **sampled),
        Workload("li-capnet-em", f"{capnet}, Table 1 (b)", (2,), 2048, 512, *vector, em, **sampled),
    )
    copied = (
        Workload("vocabulary", f"{_HEINSEN}, §6", (1,), 1024, 30_000, 1, 16, 16, heinsen, groups=1, copies=64),
        Workload("million", f"{_HEINSEN}, §1.2", (1,), 1_000_000, 64, 1, 16, 16, heinsen, groups=1, copies=500),
    )
    return [*made, *large, *copied]


WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in (*_attention(), *_routings())}

TINY: dict[str, Workload] = {
    f"tiny-{name}": Workload(f"tiny-{name}", "the cost of a call itself", (1,), 8, 4, *_MATRIX_4, routing)
    for name, routing in (
        ("attention", AttentionPass()),
        ("uniform", AttentionPass(uniform=True)),
        ("dynamic", DynamicRouting()),
        ("em", EMRouting()),
        ("heinsen", HeinsenRouting()),
    )
}
"""Children [1, 8, 4, 4], weight [8, 4, 4, 4]: what two commits are compared by, beside the workloads."""

QUICK: dict[str, tuple[int, float, float]] = {
    "tsai-c10-conv1": (2, 2.0, 3.0),
    "tsai-c10-fc": (16, 1.5, 2.0),
    "tsai-c100-fc2": (16, 1.0, 1.0),
    "tsai-dmm-vector-set": (4, 0.0, 0.0),
    "barham": (4, 0.0, 0.0),
    "sabour-mnist": (4, 0.0, 0.0),
    "hinton-fc": (4, 1.0, 1.0),
    "heinsen-sst-1": (2, 0.0, 0.0),
    "zhao-pool": (8, 0.0, 0.0),
}
"""What a quick run measures: the batch, and the speed-up against the fastest eager alternative that forward and a
training step must not fall below; 0 where so few samples give none to rely on. A third or less of what was measured on
a busy machine: a kernel that is not there any more falls below it, noise does not."""


def find(name: str) -> Workload:
    """Return the workload ``name``; raise ValueError with the names there are if it is unknown."""
    found = WORKLOADS.get(name) or TINY.get(name)
    if found is None:
        raise ValueError(f"unknown workload {name!r}; there are: {', '.join(WORKLOADS)}")
    return found


BATCHES = (128, 1, 32)
"""The batches of a GPU, in order of importance: time may not do for all."""


def cases(
    names: Sequence[str], quick: bool, device: str = "cpu", batches: Sequence[int] = (), precisions: Sequence[str] = ()
) -> list[Case]:
    """Return the rows of some workloads, or, where none are named, of the quick ones or of all.

    On a GPU what matters most comes first. A workload whose children are copies, as it is large in itself, then runs at
    its own batch, in the large one's place. Raises ValueError for a name that no workload has.
    """
    works, modes = [find(name) for name in names or (QUICK if quick else WORKLOADS)], (False, True)
    if device == "cuda":
        return [
            Case(work, work.batch if work.copies > 1 and not batches else batch, training, precision)
            for batch in batches or BATCHES
            for precision in precisions or PRECISIONS
            for work in works
            for training in modes
            if work.copies == 1 or batches or batch == BATCHES[0]
        ]
    usual = {one.name: QUICK.get(one.name, (1,))[:1] if quick else one.batches for one in works}
    return [Case(one, batch, mode) for one in works for batch in batches or usual[one.name] for mode in modes]
