"""Rows that meet every pair of values of several factors at least once: a covering array of strength two."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

__all__ = ["every_value", "pairs_of", "rows_covering"]

Row = dict[str, Any]
Item = tuple[str, Any]


def pairs_of(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool]) -> dict[tuple[Item, Item], None]:
    """Return all pairs of values of two factors that may stand in one row, in order."""
    return {
        ((first, one), (second, other)): None
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
    the value that meets the most such pairs; of a few rows made so the best is kept.

    Parameters
    ----------
    factors : mapping
        The values of every factor.
    allowed : callable
        Whether some values, by factor, may stand in one row. It must be a rule of pairs: a row of which every pair is
        allowed is allowed.
    """
    draw = random.Random(seed)
    possible = pairs_of(factors, allowed)
    missing = dict(possible)
    order = {name: k for k, name in enumerate(factors)}
    rows: list[Row] = []

    def pair(one: Item, other: Item) -> tuple[Item, Item]:
        return (one, other) if order[one[0]] < order[other[0]] else (other, one)

    def attempt(start: tuple[Item, Item]) -> tuple[int, Row] | None:
        row, score = dict(start), 1
        rest = [name for name in factors if name not in row]
        draw.shuffle(rest)
        for name in rest:
            best, value = -1, None
            for candidate in draw.sample(factors[name], len(factors[name])):
                met = [pair((name, candidate), item) for item in row.items()]
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
            missing.pop(one, None)
    return rows


def every_value(rows: Sequence[Row], cost: Callable[[Row], float]) -> list[int]:
    """Return the places of few and cheap rows in which every value of every factor occurs."""
    missing = {item for row in rows for item in row.items()}
    kept: list[int] = []
    while missing:
        kept.append(max(range(len(rows)), key=lambda k: len(missing & rows[k].items()) / cost(rows[k])))
        missing -= rows[kept[-1]].items()
    return sorted(kept)
