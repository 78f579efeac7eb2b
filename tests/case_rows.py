"""The cases of every routing: rows that cover all pairs of factors, and named rows for the paths that those miss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from cases import CONV, WINDOWS, Case, case_of, common_factors
from covering import rows_covering

from fastcaps.rules import Rule

__all__ = ["ATTENTION_CASES", "ATTENTION_FACTORS", "GAUSSIAN_CASES", "GAUSSIAN_FACTORS", "POOLING_CASES",
           "POOLING_FACTORS", "allowed"]  # fmt: skip

ATTENTION_RULES = {
    "norm": {"rule": Rule.LAYER_NORM},
    "norm-bare": {"rule": Rule.LAYER_NORM, "affine": False},
    "plain": {"rule": Rule.PLAIN},
    "squash": {"rule": Rule.SQUASH},
}
POOLING_RULES = {
    "unit": {"rule": Rule.UNIT, "normalize": True},
    "unit-bare": {"rule": Rule.UNIT},
    "squash": {"rule": Rule.SQUASH},
    "squash-keys": {"rule": Rule.SQUASH, "normalize": True},
}
GAUSSIAN_RULES = {
    "em": {"rule": Rule.EM},
    "heinsen": {"rule": Rule.HEINSEN},
    "k-means": {"rule": Rule.KMEANS},
}


def attention_factors() -> dict[str, list[Any]]:
    return {**common_factors(), "how": list(ATTENTION_RULES), "scale": [None, 0.0, -0.7], "detach": [False, True]}


def pooling_factors() -> dict[str, list[Any]]:
    factors = common_factors()
    factors["groups"] = [*factors["groups"], "none"]
    return {**factors, "how": list(POOLING_RULES), "scale": [None, 0.0, -0.7], "detach": [False, True]}


def gaussian_factors() -> dict[str, list[Any]]:
    factors = {**common_factors(), "how": list(GAUSSIAN_RULES), "log_weight": [True, False], "eps": [1e-5, 0.3]}
    return {**factors, "betas": ["M", "IM", "I1", "1M", "11"]}


ATTENTION_FACTORS, POOLING_FACTORS, GAUSSIAN_FACTORS = attention_factors(), pooling_factors(), gaussian_factors()


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


def _covering(factors: dict[str, list[Any]], rules: dict[str, dict[str, Any]], seed: int) -> tuple[Case, ...]:
    cases = []
    for k, row in enumerate(rows_covering(factors, allowed, seed)):
        name = "-".join((f"{k:03}", row["pose"], row["size"], row["window"], row["how"]))
        row.update(rules[row.pop("how")])
        cases.append(case_of(name, row))
    return tuple(cases)


def _double(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """Return cases in float32 and float64: every lane's width is a path."""
    return tuple(
        replace(c, name=f"{c.name}-{str(t)[6:]}", dtype=t) for c in cases for t in (torch.float32, torch.float64)
    )


PADDED = (3, 3, 1, 1, 1, 1, 1, 1)


def _named(rule: Rule, **options: Any) -> Callable[..., Case]:
    return lambda name, **changes: Case(name, **{"rule": rule, **options, **changes})


_norm, _squash = _named(Rule.LAYER_NORM), _named(Rule.SQUASH, scale=1.0)
_unit, _em, _heinsen = _named(Rule.UNIT, normalize=True), _named(Rule.EM), _named(Rule.HEINSEN, betas="1M")


def _paths(make: Callable[..., Case]) -> tuple[Case, ...]:
    """Return rows for what a schedule can decide, whatever the routing, in float32 and float64."""
    return _double((
        # more numbers of parents than a block keeps votes of; rows of a pose, so that no sum is long
        make("twice-positions", batch=17, types=2, parents=260, pose=(64, 2, 2)),
        make("twice-children", batch=1, types=20, parents=260, pose=(64, 2, 2)),
        # weights so large that several tiles of positions meet them together
        make("rows", batch=35, types=3, parents=5, pose=(1, 64, 64), gate="some"),
        # too few positions to fill the lanes: children do, with weights of their own or shared ones
        make("children", batch=2, types=37, parents=5, pose=(4, 4, 4), gate="some"),
        make("children-6x6", batch=1, types=33, parents=4, pose=(6, 6, 6)),
        make("children-large", batch=2, types=19, parents=3, pose=(2, 32, 48), bias="IM", gate="some"),
        make("sharing", batch=1, types=90, parents=7, pose=(1, 8, 16), groups="one", bias="1M", gate="silent"),
        make("sharing-4x4", batch=1, types=90, parents=7, pose=(4, 4, 4), groups="one", bias="1M", turns=2),
        make("sharing-by-type", batch=2, grid=(5, 5), types=3, parents=6, pose=(4, 4, 4), groups="types",
             window=(5, 5, 1, 1, 0, 0, 1, 1), bias="1M", turns=2),
        # children in several ranges; and few enough to stay from turn to turn
        make("ranges", batch=8, types=300, parents=10, pose=(4, 4, 4)),
        make("stay", batch=20, types=9, parents=5, pose=(4, 4, 4), start=False, turns=3),
        # what is NaN behind a gate of 0: positions or children in the lanes, weights that are shared
        make("broken", batch=5, types=8, parents=3, pose=(2, 3, 2), gate="broken", bias="IM", start=False, turns=2),
        make("broken-children", batch=1, types=37, parents=5, pose=(4, 4, 4), gate="broken", turns=2),
        make("broken-shared", batch=20, types=19, parents=5, pose=(1, 8, 16), groups="one", gate="broken", turns=2),
    ))  # fmt: skip


ATTENTION_CASES = (
    *_covering(ATTENTION_FACTORS, ATTENTION_RULES, 1),
    *_paths(_norm),
    *_double((  # weights that act on the parents instead of on the children
        _squash("folded-4x4", batch=20, types=19, parents=7, pose=(4, 4, 4), groups="one", turns=3),
        _squash("folded-1x8", batch=20, types=19, parents=10, pose=(1, 8, 16), groups="one", turns=2, gate="some"),
        _squash("folded-any", batch=20, types=19, parents=5, pose=(2, 3, 5), groups="one", turns=2),
        _norm("folded-sharing-4x4", batch=1, types=90, parents=7, pose=(4, 4, 4), groups="one", turns=2),
        _norm("folded-sharing-1x8", batch=1, types=90, parents=7, pose=(1, 8, 16), groups="one"),
        _norm("folded-sharing-any", batch=1, types=90, parents=7, pose=(3, 5, 2), groups="one"),
    )),
    _norm("folded-by-type", batch=2, grid=(5, 5), types=2, parents=6, pose=(4, 4, 4), window=(5, 5, 1, 1, 0, 0, 1, 1),
          groups="types", turns=2),
    _norm("folded-types", batch=9, grid=(5, 5), types=3, parents=6, pose=(4, 4, 4), window=(3, 3, 1, 1, 0, 0, 1, 1),
          groups="types"),
    # large matrices in bfloat16, which the CPU reads as they lie: met by several tiles, or turned to lanes
    _norm("narrow-rows", batch=20, types=2, parents=3, pose=(1, 64, 64), dtype=torch.bfloat16, turns=2),
    _norm("narrow-children", batch=1, types=18, parents=2, pose=(2, 32, 32), dtype=torch.bfloat16, gate="some"),
    # one parent, whose row and block are alike, with shared weights
    _norm("one-parent-shared", batch=1, types=64, parents=1, pose=(4, 4, 4), groups="one"),
    _squash("one-parent-shared-1x8", batch=1, types=64, parents=1, pose=(1, 8, 16), groups="one", turns=3),
    # lanes that are not filled
    *(_norm(f"parents-{m}", types=6, parents=m, pose=(4, 4, 4), gate="some") for m in (15, 16, 33)),
    _norm("no-eps", batch=3, types=9, pose=(4, 4, 4), eps=0.0),
    _norm("sharp", scale=30.0),
    _norm("pointwise", grid=(3, 5), types=4, window=(1, 1, 2, 3, 0, 0, 1, 1), bias="I1"),
    _norm("whole-grid", grid=(4, 3), types=2, window=(4, 3, 1, 1, 0, 0, 1, 1), turns=3),
    _norm("conv-32", batch=1, grid=(5, 7), types=4, parents=32, pose=(4, 4, 4), window=CONV, gate="some", turns=2),
    _norm("padded", grid=(3, 4), types=3, window=PADDED, bias="IM", gate="some"),
    _norm("primes", batch=3, types=7, parents=11, pose=(5, 3, 7), bias="IM", gate="some"),
)  # fmt: skip
POOLING_CASES = (
    *_covering(POOLING_FACTORS, POOLING_RULES, 2),
    *_paths(_unit),
    *_double((  # votes that are the children themselves
        _unit("same-1x16", batch=20, types=33, parents=1, pose=(1, 16, 16), groups="none", turns=3),
        _unit("same-1x16-children", batch=1, types=70, parents=2, pose=(1, 16, 16), groups="none", gate="silent"),
        _unit("same-any", batch=20, types=9, parents=3, pose=(2, 3, 3), groups="none", turns=3, gate="some"),
        _unit("same-any-children", batch=1, types=70, parents=3, pose=(2, 3, 3), groups="none"),
    )),
    _unit("one-parent", types=67, parents=1, pose=(1, 8, 8), groups="one", gate="some", turns=3),
    _unit("padded", grid=(3, 4), types=3, window=PADDED, bias="IM", gate="some", turns=2),
    _unit("primes", batch=3, types=7, parents=11, pose=(5, 3, 7), bias="IM", gate="some"),
    _unit("sharp", scale=30.0),
)  # fmt: skip
GAUSSIAN_CASES = (
    *_covering(GAUSSIAN_FACTORS, GAUSSIAN_RULES, 3),
    *_paths(_heinsen),
    *_double((
        _heinsen("1x64-1x2", batch=20, types=9, parents=64, pose=(1, 64, 2), groups="one", turns=2),
        _heinsen("1x2", batch=20, types=9, parents=5, pose=(1, 2, 2), turns=2),
    )),
    # a parent that about one child makes
    _em("one-effective-child", types=1, pose=(4, 4, 4), start=False, turns=3, gate="some"),
    _em("few-effective-children", types=8, parents=10, pose=(4, 4, 4), start=False, turns=3, gate="some"),
    _heinsen("one-effective-child-heinsen", types=1, pose=(4, 4, 4), start=False, turns=3, gate="some"),
    _heinsen("no-eps", types=9, parents=5, gate="some", eps=0.0),
    # nobody is there, or all gates are shut
    *(make(f"nobody-no-eps-{name}", batch=3, window=WINDOWS["nobody"][1], bias="1M", eps=0.0, types=9, start=False,
           turns=2) for name, make in (("em", _em), ("heinsen", _heinsen))),
    *(make(f"shut-no-eps-{name}", batch=3, bias="1M", eps=0.0, types=9, start=False, turns=2, gate="shut")
      for name, make in (("em", _em), ("heinsen", _heinsen))),
    _em("padded", grid=(3, 4), types=3, window=PADDED, bias="IM", gate="some", turns=2),
    _heinsen("primes", batch=3, types=7, parents=11, pose=(5, 3, 7), bias="IM", gate="some", betas="IM"),
)  # fmt: skip
