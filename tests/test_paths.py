"""Every path that a schedule of the CPU can take has a case: kernel, lanes, folding, votes made twice, rows, ranges.

That of the CUDA library is in ``test_cuda_kernels``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from registry import ROUTINGS, Routing, votes_of
from suite import every_routing, native_only

import fastcaps
from fastcaps import backends, libraries
from fastcaps.backends import Call

KERNELS = Path(fastcaps.__file__).parents[1] / "csrc" / "cpu" / "kernels.h"
SENTENCE = re.compile(
    r"kernel (for any pose|\S+), (?P<width>\d+) (?P<lanes>\w+) a vector, (?P<rows>\d+) \w+ x \d+ .*?, \d+ items"
    r"(?: \((?P<ranges>\d+) ranges of children\))?(?:, (?P<how>.*))?$"
)


def schedules(routing: Routing) -> list[tuple[bool, torch.dtype, str, re.Match[str]]]:
    """Return what the library says of every case, forward and backward."""
    ask, found = libraries.library("cpu").ask, []
    for case in routing.cases:
        votes = votes_of(routing.call(case).given)
        for backward in (False, True):
            facts = backends.native_facts(Call.of(routing.stem, votes), votes, case.iterations, case.start, backward)
            told = ask("fastcaps_cpu_schedule", routing.stem, votes.sizes_in_c(), facts)
            assert told is not None
            match = SENTENCE.match(told)
            assert match is not None, told
            found.append((backward, case.dtype, "own" if case.groups == "own" else "shared", match))
    return found


@native_only
@every_routing
def test_every_way_to_cut_a_call_up_has_a_case(routing: Routing) -> None:
    met: dict[str, set[Any]] = defaultdict(set)
    widest = 0
    for backward, dtype, weights, how in schedules(routing):
        widest = max(widest, int(how["width"]) * dtype.itemsize)
        said = how["how"] or ""
        one = backward, dtype == torch.float64, how["lanes"]
        met["stay"] |= {one[::2]} if "stay" in said else set()
        met["weights"].add((*one, weights))
        met["votes"].add((*one, "folded" if "folded" in said else "twice" if "twice" in said else "kept"))
        met["rows"].add((*one[:2], how["rows"] == "1"))
        met["ranges"].add((backward, how["ranges"] is None))
    both, lanes = (False, True), ("positions", "children")
    assert met["stay"] == {*product([False], lanes)}
    assert met["weights"] == {*product(both, both, lanes, ("own", "shared"))}
    assert met["rows"] == {*product(both, both, both)} and met["ranges"] == {*product(both, both)}
    wanted = {*product(both, both, lanes, ("kept", "twice"))}
    if routing.folds:  # matrices of doubles never act on the parents
        wanted |= {*product(both, [False], lanes, ["folded"])}
    spared = {*product(both, both, ["children"], ["twice"])} if widest < 64 else set()
    # bytes of a vector: the votes of so few children at once fit whatever the case
    assert met["votes"] - spared == wanted - spared


@native_only
@pytest.mark.skipif(not KERNELS.is_file(), reason="the sources are not here")
def test_every_pose_with_a_kernel_of_its_own_has_a_case() -> None:
    """Whichever routing has one, in both directions, as the source of the kernels lists them."""
    source = KERNELS.read_text()
    compiled = {f"{c}x{d}->{c}x{e}" for c, d, e in re.findall(r"\bStaticPose<(\d+), (\d+), (\d+)>", source)}
    compiled |= {f"{c}x{d}->" for c, d in re.findall(r"\bSameStaticPose<(\d+), (\d+)>", source)}
    assert len(compiled) > 5
    for backward in (False, True):
        met = {how[1] for routing in ROUTINGS for back, _, _, how in schedules(routing) if back == backward}
        assert not [pose for pose in compiled if not any(one.startswith(pose) for one in met)]
