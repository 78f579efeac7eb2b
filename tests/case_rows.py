"""The cases of every routing: rows that cover all pairs of factors (a covering array of strength two), and named rows
for the paths that those miss.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
from cases import CONV, WINDOWS, Case, case_of, common_factors

from fastcaps.rules import Rule

Row = dict[str, Any]
Item = tuple[str, Any]


def pairs_of(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool]) -> dict[frozenset[Item], None]:
    """Return all pairs of values of two factors that may stand in one row, in order."""
    return {
        frozenset(((first, one), (second, other))): None
        for first, second in combinations(factors, 2)
        for one in factors[first]
        for other in factors[second]
        if allowed({first: one, second: other})
    }


def rows_covering(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True, seed: int = 0
) -> list[Row]:
    """Return rows in which every allowed pair of values occurs, few of them, always the same.

    Greedy: a row begins with a pair that no row has yet, and takes for one factor after the other, in random order,
    the value that meets the most such pairs; of a few rows made so the best is kept. ``allowed`` says whether some
    values, by factor, may be in one row. It must be a rule of pairs: a row of which every pair is allowed is allowed.
    """
    draw = random.Random(seed)
    possible = pairs_of(factors, allowed)
    missing = dict(possible)
    rows: list[Row] = []

    def attempt(start: frozenset[Item]) -> tuple[int, Row] | None:
        row, score = dict(start), 1
        rest = [name for name in factors if name not in row]
        draw.shuffle(rest)
        for name in rest:
            best, value = -1, None
            for candidate in draw.sample(factors[name], len(factors[name])):
                met = [frozenset(((name, candidate), item)) for item in row.items()]
                if all(one in possible for one in met):
                    best, value = max(
                        (best, value), (sum(one in missing for one in met), candidate), key=lambda p: p[0]
                    )
            if best < 0:
                return None
            row[name], score = value, score + best
        return score, row

    while missing:
        start = next(iter(missing))
        made = [found for found in (attempt(start) for _ in range(6)) if found is not None]
        if not made:
            raise ValueError(f"no row can hold {start}")
        row = max(made, key=lambda found: found[0])[1]
        rows.append({name: row[name] for name in factors})
        for one in combinations(rows[-1].items(), 2):
            missing.pop(frozenset(one), None)
    return rows


def every_value(rows: Sequence[Row], cost: Callable[[Row], float]) -> list[int]:
    """Return the places of few and cheap rows in which every value of every factor occurs."""
    missing = {item for row in rows for item in row.items()}
    kept: list[int] = []
    while missing:
        kept.append(max(range(len(rows)), key=lambda k: len(missing & rows[k].items()) / cost(rows[k])))
        missing -= rows[kept[-1]].items()
    return sorted(kept)


# ---- cases -----------------------------------------------------------------------------------------------------------


def allowed(row: dict[str, Any]) -> bool:
    """Return whether values of factors make sense together; a rule of pairs."""
    pose, how, groups = row.get("pose"), row.get("how", ""), row.get("groups")
    if pose == "1x1" and how.startswith("norm"):
        return False  # one number is its own mean: the functions leave LayerNorm out
    if groups == "none" and pose in ("1x8-1x16", "1x64-1x2", "primes"):
        return False  # votes are the children themselves
    if row.get("start") is False and row.get("log_weight") is False:
        return False  # it is not there anyway
    # EM has a number for each parent
    return "betas" not in row or "how" not in row or (row["how"] == "em") == (row["betas"] == "M")


@dataclass(frozen=True, eq=False)
class Table:
    """The cases of a routing."""

    rules: dict[str, dict[str, Any]]  # fields of a case, by a name for them: which rule, and what goes with it
    factors: dict[str, list[Any]]  # the values of each factor; those of ``how`` are the names of ``rules``
    seed: int  # of the covering array
    make: Callable[..., Case]  # makes a case of the rule that most rows have, by its name and fields
    named: tuple[Case, ...]  # rows for the paths of all schedules, and for what hurt once
    lanes: tuple[Case, ...]  # rows for paths that the CPU's schedule alone has

    def __post_init__(self) -> None:
        self.factors["how"] = list(self.rules)

    def case(self, name: str, row: dict[str, Any]) -> Case:
        """Return the case that a row of factors describes."""
        row = dict(row)
        row.update(self.rules[row.pop("how")])
        return case_of(name, row)

    @cached_property
    def covering(self) -> tuple[tuple[Case, ...], tuple[Case, ...]]:
        """A few small cases in which each value of a factor occurs, and the others of those that have all pairs."""
        rows = rows_covering(self.factors, allowed, self.seed)
        parts = ("pose", "size", "window", "how")
        cases = [self.case("-".join((f"{k:03}", *(row[part] for part in parts))), row) for k, row in enumerate(rows)]
        few = every_value(rows, lambda row: 3e4 + (self.case("", row).products or 1e9))
        return tuple(cases[k] for k in few), tuple(case for k, case in enumerate(cases) if k not in few)


def _double(*cases: Case) -> tuple[Case, ...]:
    """Return cases in float32 and float64: the width of a lane is a path on the CPU."""
    return tuple(
        replace(c, name=f"{c.name}-{str(t)[6:]}", dtype=t) for c in cases for t in (torch.float32, torch.float64)
    )


PADDED, WHOLE = (3, 3, 1, 1, 1, 1, 1, 1), (5, 5, 1, 1, 0, 0, 1, 1)


def _named(rule: Rule, **options: Any) -> Callable[..., Case]:
    return lambda name, **changes: Case(name, **{"rule": rule, **options, **changes})


_norm, _squash = _named(Rule.LAYER_NORM), _named(Rule.SQUASH, scale=1.0)
_unit, _em, _heinsen = _named(Rule.UNIT, normalize=True), _named(Rule.EM), _named(Rule.HEINSEN, betas="1M")


def _lanes(make: Callable[..., Case]) -> tuple[Case, ...]:
    """Return rows for what the CPU's schedule alone decides, whatever the routing."""
    return (
        *_double(
            # more numbers of parents than a block keeps votes of; rows of a pose, so that no sum is long
            make("twice-positions", batch=9, types=2, parents=260, pose=(64, 1, 2)),
            make("twice-children", batch=1, types=20, parents=260, pose=(64, 1, 2)),
            # weights so large that several tiles of positions share a read of them
            make("rows", batch=17, types=2, parents=5, pose=(1, 64, 64), gate="some"),
            # too few positions to fill the lanes: children do, with shared weights
            make("sharing", batch=1, types=90, parents=7, pose=(1, 8, 16), groups="one", bias="1M", gate="silent"),
            # two groups of 45 positions: the last lanes of the first are nobody's, not the second's
            make("groups-of-samples", batch=10, grid=(5, 5), types=1, parents=8, pose=(4, 4, 4), start=False,
                 window=(3, 3, 1, 1, 0, 0, 1, 1)),
        ),
        # too many children to stay: every range waits for the iteration before, and reads its parents
        make("ranges-of-iterations", batch=2, types=300, parents=8, pose=(4, 4, 4), iterations=3),
        make("children-large", batch=2, types=19, parents=3, pose=(2, 32, 48), bias="IM", gate="some"),
        make("sharing-by-type", batch=2, grid=(5, 5), types=3, parents=6, pose=(4, 4, 4), groups="types", window=WHOLE,
             bias="1M", iterations=2),
        make("ranges", batch=8, types=100, parents=10, pose=(4, 4, 4)),
        # what is NaN behind a gate of 0: children in the lanes, weights that are shared
        make("broken-children", batch=1, types=37, parents=5, pose=(4, 4, 4), gate="broken", iterations=2),
        make("broken-shared", batch=20, types=9, parents=5, pose=(1, 8, 16), groups="one", gate="broken", iterations=2),
    )  # fmt: skip


def _paths(make: Callable[..., Case]) -> tuple[Case, ...]:
    """Return rows for what every schedule can decide, whatever the routing."""
    return (
        *_double(
            # too few positions to fill the lanes of a CPU: children do
            make("children", batch=2, types=37, parents=5, pose=(4, 4, 4), gate="some"),
            # few enough children to stay from iteration to iteration
            make("stay", batch=20, types=9, parents=5, pose=(4, 4, 4), start=False, iterations=3),
        ),
        # what is NaN behind a gate of 0, in half precision too
        make("broken", batch=5, types=8, parents=3, pose=(2, 3, 2), gate="broken", bias="IM", start=False,
             iterations=2),
        make("broken-half", types=7, parents=5, pose=(1, 64, 64), gate="broken", dtype=torch.bfloat16),
        # specialised kernels, on a GPU by parents a warp; lanes without a position, whose sums are 0
        *(make(f"pose-{p[0]}x{p[1]}", batch=3, types=7, parents=5, pose=p, eps=0.0, bias="1M") for p in POSES_OF_ALL),
        make("pose-4x4-10", batch=1, types=9, parents=10, pose=(4, 4, 4), bias="I1"),
        make("pose-4x4-20", types=6, parents=20, pose=(4, 4, 4), gate="some", iterations=2),
        make("conv", batch=1, grid=(5, 5), types=2, parents=32, pose=(4, 4, 4), window=CONV, gate="some", iterations=2),
        make("one-parent-shared", batch=1, types=64, parents=1, pose=(1, 16, 16), groups="one"),
        # on a GPU: parents in several blocks, children in several ranges, poses at the limits of 32 lanes
        make("sweeps", batch=1, types=2, parents=520, pose=(4, 4, 4), gate="some", iterations=2),
        make("sweeps-any", batch=1, grid=(2, 1), types=1, parents=300, window=(2, 1, 1, 1, 0, 0, 1, 1)),
        make("one-position", batch=1, types=400, parents=3, pose=(4, 4, 4), groups="one", gate="some", bias="I1"),
        make("one-position-any", batch=1, types=200, parents=3, start=False, bias="1M", gate="silent"),
        make("largest-pose", batch=1, types=3, pose=(16, 9, 32)),
        make("long-vector", batch=1, types=3, parents=2, pose=(1, 70, 130)),
        make("tall-pose", types=3, parents=5, pose=(37, 3, 2), bias="IM"),
        # votes that are the children themselves
        make("same-4x4", types=9, parents=1, pose=(4, 4, 4), groups="none", gate="some"),
        make("same-2x3", types=9, parents=40, pose=(2, 3, 3), groups="none", bias="IM", gate="some", iterations=2),
        # every kind of window, and no two sizes alike
        make("padded", grid=(3, 4), types=3, window=PADDED, bias="IM", gate="some"),
        make("primes", batch=3, types=7, parents=11, pose=(5, 3, 7), bias="IM", gate="some", betas="IM"),
    )  # fmt: skip


POSES_OF_ALL = ((4, 4, 4), (1, 8, 16), (1, 16, 16), (2, 3, 5))
OWN_POSES = ((4, 4, 4), (6, 6, 6), (8, 8, 8), (1, 8, 16), (1, 16, 16), (1, 16, 64), (1, 64, 64), (2, 3, 5))


def _named_pose(pose: tuple[int, int, int]) -> str:
    rows, depth, columns = pose
    return f"{rows}x{depth}" if columns in (depth, 16) or depth == 3 else f"{rows}x{depth}-{columns}"


_ATTENTION = (
    *_paths(_norm),
    # specialised kernels: on a GPU with a bias, and plain ones at more positions than a warp has
    *(_norm(f"bias-{_named_pose(p)}", types=6, parents=5, pose=p, bias="1M", gate="some")
      for p in OWN_POSES if p not in POSES_OF_ALL),
    *(_norm(f"plain-{_named_pose(p)}-{m}", batch=5, types=6, parents=m, pose=p)
      for p in OWN_POSES for m in {(4, 4, 4): (5, 10, 15, 16, 33), (1, 8, 16): (5, 13)}.get(p, (5,))),
    # logits beyond the range that needs no maximum, with many parents and few
    *(_norm(f"far-{_named_pose(p)}-{m}", types=6, parents=m, pose=p, scale=300.0)
      for p, m in (((4, 4, 4), 20), ((4, 4, 4), 5), ((1, 8, 16), 13))),
    _norm("bias-4x4-16", types=6, parents=16, pose=(4, 4, 4), bias="I1"),
    _norm("plain-any", scale=30.0),
    _squash("one-parent-squash", batch=1, types=64, parents=1, pose=(1, 8, 16), groups="one", iterations=3),
    _norm("pointwise", grid=(3, 5), types=4, window=(1, 1, 2, 3, 0, 0, 1, 1), bias="I1"),
    _norm("whole-grid", grid=(4, 3), types=2, window=(4, 3, 1, 1, 0, 0, 1, 1), iterations=3),
)  # fmt: skip
_ATTENTION_LANES = (
    *_lanes(_norm),
    *(_norm(f"one-parent-{_named_pose(p)}", batch=1, types=64, parents=1, pose=p, groups="one") for p in OWN_POSES),
    _norm("children-6x6", batch=1, types=37, parents=3, pose=(6, 6, 6)),
    # a gradient that hundreds of children share: added child by child it would err by several times the limit
    _norm("shared-bias", batch=1, types=800, pose=(4, 4, 4), bias="11", start=False),
    _norm("shared-bias-M", batch=1, types=800, bias="1M", start=False),
    # weights that act on the parents instead of on the children
    _squash("folded-4x4", batch=20, types=9, parents=7, pose=(4, 4, 4), groups="one", iterations=3),
    _squash("folded-1x8", batch=20, types=9, parents=10, pose=(1, 8, 16), groups="one", iterations=2, gate="some"),
    _squash("folded-any", batch=20, types=9, parents=5, pose=(2, 3, 5), groups="one", iterations=2),
    _norm("folded-sharing-4x4", batch=1, types=90, parents=7, pose=(4, 4, 4), groups="one", iterations=2),
    _squash("folded-sharing-1x8", batch=3, types=512, parents=7, pose=(1, 8, 16), groups=8, iterations=3, gate="some"),
    _norm("folded-sharing-any", batch=1, types=90, parents=7, pose=(3, 5, 2), groups="one"),
    _norm("folded-sharing-wide", batch=1, types=90, parents=2, pose=(2, 3, 40), groups="one"),  # two vectors and more
    _norm("folded-by-type", batch=2, grid=(5, 5), types=2, parents=6, pose=(4, 4, 4), window=WHOLE, groups="types",
          iterations=2),
    _norm("folded-types", batch=3, grid=(5, 5), types=3, parents=6, pose=(4, 4, 4), window=(3, 3, 1, 1, 0, 0, 1, 1),
          groups="types"),
    # votes that are the children, and windows that see padding alone: a LayerNorm of equal values
    *(_norm(f"same-{types}-{bias}-{rule.name}", rule=rule, dtype=dtype, batch=batch, types=types, pose=(2, 3, 3),
            groups="none", bias=bias, iterations=2, gate="some")
      for batch, types in ((20, 9), (1, 70)) for bias in (None, "IM")
      for rule, dtype in zip(Rule, (torch.float32, torch.float64, torch.bfloat16), strict=False)),
    *(_norm(f"nobody-no-eps-{batch}-{bias}", batch=batch, window=WINDOWS["nobody"][1], bias=bias, eps=0.0, iterations=2)
      for batch in (1, 20) for bias in (None, "IM", "11")),
    *(_norm(f"nobody-no-eps-one-{types}", types=types, groups="one", window=WINDOWS["nobody"][1], eps=0.0, iterations=2)
      for types in (5, 40)),
    # large matrices in bfloat16, which the CPU reads in place: shared by several tiles, or transposed
    _norm("narrow-rows", batch=20, types=2, parents=3, pose=(1, 64, 64), dtype=torch.bfloat16),
    _norm("narrow-1x32", batch=17, types=3, parents=1, pose=(1, 32, 32), dtype=torch.bfloat16, bias="IM", gate="some"),
    _norm("narrow-1x96", batch=9, grid=(5, 4), types=2, parents=3, pose=(1, 96, 64), dtype=torch.bfloat16, iterations=2,
          window=(3, 2, 2, 1, 1, 0, 1, 1)),
    _norm("narrow-one", batch=1, types=3, parents=3, pose=(1, 64, 32), dtype=torch.bfloat16),
    _norm("narrow-children", batch=1, types=18, parents=2, pose=(2, 32, 32), dtype=torch.bfloat16, gate="some"),
)  # fmt: skip
_POOLING = (
    *_paths(_unit),
    _unit("same-1x16-children", batch=1, types=70, parents=2, pose=(1, 16, 16), groups="none", gate="silent"),
    _unit("one-parent", types=67, parents=1, pose=(1, 8, 8), groups="one", gate="some", iterations=3),
    _unit("sharp", scale=30.0),
    # poses whose length has no inverse in float32: their gradients are ordinary numbers
    _unit("denormal", types=9, pose=(2, 3, 3), groups="none", size=2e-39, gate="some", iterations=2),
    _unit("denormal-1x16", batch=20, types=9, parents=2, pose=(1, 16, 16), groups="none", size=2e-39, iterations=2),
)
_POOLING_LANES = (
    *_lanes(_unit),
    *_double(_unit("same-any", batch=20, types=9, parents=3, pose=(2, 3, 3), groups="none", iterations=3, gate="some")),
    _unit("same-1x16", batch=20, types=9, parents=1, pose=(1, 16, 16), groups="none", iterations=3),
    _unit("same-any-children", batch=1, types=70, parents=3, pose=(2, 3, 3), groups="none"),
)
_GAUSSIAN = (
    *_paths(_heinsen),
    # peaked coefficients, and values that children share: large terms cancel in their gradients
    *(make(f"peaked-{name}", batch=1, types=64, parents=10, pose=(1, 8, 16), bias="1M", start=False, iterations=2,
           size=30.0, eps=1e-2, betas="1M") for name, make in (("em", _em), ("heinsen", _heinsen))),
    _em("peaked-one", batch=9, types=20, parents=8, pose=(1, 2, 2), groups="one", bias="11", start=False, gate="some",
        size=30.0, eps=1e-2),
    _heinsen("peaked-means", types=30, pose=(1, 2, 2), rule=Rule.KMEANS, bias="1M", iterations=2, size=30.0, eps=1e-2),
    _heinsen("sweeps-means", batch=1, types=2, parents=300, log_weight=False),
    # a parent that about one child makes
    _em("one-effective-child", types=1, pose=(4, 4, 4), start=False, iterations=3, gate="some"),
    _em("few-effective-children", types=8, parents=10, pose=(4, 4, 4), start=False, iterations=3, gate="some"),
    _heinsen("one-effective-child-heinsen", types=1, pose=(4, 4, 4), start=False, iterations=3, gate="some"),
    # what lean walks take: gates, some closed with NaN behind; padding; betas that all children share; one matrix
    _em("gated", batch=70, types=37, parents=7, pose=(4, 4, 4), gate="some"),
    _heinsen("gated-first", batch=3, types=40, parents=13, pose=(4, 4, 4), gate="broken", start=False),
    _heinsen("gated-later", batch=3, types=40, parents=13, pose=(4, 4, 4), gate="broken"),
    _em("gated-padded", grid=(5, 5), types=9, parents=7, pose=(4, 4, 4), window=PADDED, gate="silent"),
    _heinsen("gated-ranges", batch=1, types=400, parents=5, pose=(4, 4, 4), groups="one", gate="some", betas="11"),
    _em("gated-shared", batch=70, types=41, parents=13, pose=(4, 4, 4), groups="one", gate="broken"),
    # children in several ranges on a GPU: their sums are joined, and each parent's own activation is used
    _em("one-position-em", batch=1, types=130, parents=3, pose=(4, 4, 4), groups="one", gate="some"),
    _em("padded-em", grid=(3, 4), types=3, window=PADDED, bias="IM", gate="some", iterations=2),
    # lean walks: parents of one lane and of two, of two warps; a bias that all children share; padding; ranges without
    # parents to begin from; what is not finite behind a gate of 0
    _em("lean-em", batch=3, types=11, parents=5, pose=(4, 4, 4), bias="1M", gate="some", iterations=3, start=False),
    _heinsen("lean-40", batch=5, types=9, parents=40, pose=(4, 4, 4), bias="11", gate="silent", iterations=3),
    _heinsen("lean-70", batch=3, types=7, parents=70, pose=(4, 4, 4), gate="some", iterations=2, start=False),
    _em("lean-padded", grid=(3, 4), types=3, pose=(4, 4, 4), window=PADDED, bias="1M", gate="some", iterations=3),
    _heinsen("lean-ranges", batch=1, types=130, parents=3, pose=(4, 4, 4), groups="one", bias="11", start=False),
    _heinsen("lean-1x16", batch=1, types=150, parents=20, pose=(1, 16, 16), groups="one", bias="1M", gate="some"),
    _heinsen("lean-1x16-first", batch=3, types=9, parents=5, pose=(1, 16, 16), groups="one", iterations=2, start=False),
    _heinsen("lean-broken", batch=3, types=5, parents=5, pose=(4, 4, 4), gate="broken", iterations=2, start=False),
    # no child exists, or all gates are 0
    *(make(f"nobody-no-eps-{name}", batch=3, window=WINDOWS["nobody"][1], bias="1M", eps=0.0, types=9, start=False,
           iterations=2) for name, make in (("em", _em), ("heinsen", _heinsen))),
    *(make(f"shut-no-eps-{name}", batch=3, bias="1M", eps=0.0, types=9, start=False, iterations=2, gate="shut")
      for name, make in (("em", _em), ("heinsen", _heinsen))),
)  # fmt: skip
_GAUSSIAN_LANES = (
    *_lanes(_heinsen),
    _heinsen("1x64-1x2", batch=2, types=35, parents=17, pose=(1, 64, 2), groups="one", iterations=2),
    _heinsen("1x2", batch=20, types=9, parents=5, pose=(1, 2, 2), iterations=2),
    _heinsen("shared-betas", batch=7, types=500, parents=5, pose=(1, 2, 2), groups="one"),
)

ATTENTION = Table(
    rules={
        "norm": {"rule": Rule.LAYER_NORM},
        "norm-bare": {"rule": Rule.LAYER_NORM, "affine": False},
        "plain": {"rule": Rule.PLAIN},
        "squash": {"rule": Rule.SQUASH},
    },
    factors=common_factors() | {"scale": [None, 0.0, -0.7], "detach": [False, True]},
    seed=1, make=_norm, named=_ATTENTION, lanes=_ATTENTION_LANES,
)  # fmt: skip
POOLING = Table(
    rules={
        "unit": {"rule": Rule.UNIT, "normalize": True},
        "unit-bare": {"rule": Rule.UNIT},
        "squash": {"rule": Rule.SQUASH},
        "squash-keys": {"rule": Rule.SQUASH, "normalize": True},
    },
    factors=common_factors("none") | {"scale": [None, 0.0, -0.7], "detach": [False, True]},
    seed=2, make=_unit, named=_POOLING, lanes=_POOLING_LANES,
)  # fmt: skip
GAUSSIAN = Table(
    rules={"em": {"rule": Rule.EM}, "heinsen": {"rule": Rule.HEINSEN}, "k-means": {"rule": Rule.KMEANS}},
    factors=common_factors()
    | {"log_weight": [True, False], "eps": [1e-5, 0.3], "betas": ["M", "IM", "I1", "1M", "11"]},
    seed=3, make=_heinsen, named=_GAUSSIAN, lanes=_GAUSSIAN_LANES,
)  # fmt: skip
