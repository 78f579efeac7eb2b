"""Every path that a schedule of the CPU can take has a case: kernel, lanes, folding, votes made twice, rows, ranges.

That of the CUDA library is in ``test_cuda_kernels``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

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
            facts = backends.native_facts(Call.of(routing.stem, votes), votes, case.turns, case.start, backward)
            told = ask("fastcaps_cpu_schedule", routing.stem, votes.sizes_in_c(), facts)
            assert told is not None
            match = SENTENCE.match(told)
            assert match is not None, told
            found.append((backward, case.dtype, "own" if case.groups == "own" else "shared", match))
    return found


@native_only
@every_routing
def test_every_way_to_cut_a_call_up_has_a_case(routing: Routing) -> None:
    met: dict[tuple[str, bool], set[str]] = defaultdict(set)
    widest = 0
    for backward, dtype, weights, how in schedules(routing):
        kind = "double" if dtype == torch.float64 else "float"
        widest = max(widest, int(how["width"]) * dtype.itemsize)
        said = how["how"] or ""
        votes = "folded" if "folded" in said else "twice" if "twice" in said else "kept"
        if "stay" in said:
            met["stay", backward].add(how["lanes"])
        met["lanes", backward].add(f"{kind} {how['lanes']} {weights}")
        met["votes", backward].add(f"{kind} {how['lanes']} {votes}")
        met["rows", backward].add(f"{kind} {'one' if how['rows'] == '1' else 'several'}")
        met["ranges", backward].add("several" if how["ranges"] else "one")
    assert met["stay", False] == {"positions", "children"} and not met["stay", True]
    for backward in (False, True):
        both = [f"{kind} {lanes}" for kind in ("float", "double") for lanes in ("positions", "children")]
        assert met["lanes", backward] >= {f"{one} {weights}" for one in both for weights in ("own", "shared")}
        ways = {f"{one} {votes}" for one in both for votes in ("kept", "twice")}
        if widest < 64:  # bytes of a vector: the votes of so few children at once fit whatever the case
            ways -= {f"{kind} children twice" for kind in ("float", "double")}
            met["votes", backward] -= {f"{kind} children twice" for kind in ("float", "double")}
        if routing.stem == "attention":  # whose matrices may act on the parents instead; of doubles they do not
            ways |= {"float positions folded", "float children folded"}
        assert met["votes", backward] == ways
        assert met["rows", backward] == {
            f"{kind} {rows}" for kind in ("float", "double") for rows in ("one", "several")
        }
        assert met["ranges", backward] == {"one", "several"}


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
