"""The pictures of docs/routings: one small scene, routed turn by turn by every algorithm.

Twelve children vote for two parents, in poses of two numbers. Six agree on parent A, six on parent B; what a child says
to the other parent is scattered. The coefficients and poses are what the reference computes, in float64.

    python -m tools.routing_pictures        # writes docs/routings/*.svg
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastcaps
from fastcaps import functional

__all__ = ["SCENES", "main", "picture"]

DOCS = Path(__file__).resolve().parents[1] / "docs" / "routings"
CHILDREN, PARENTS, TURNS, SIDE = 12, 2, 3, 128
COLOURS = ("#1d5fd1", "#c2670a")
Turn = tuple[Tensor, Tensor, Tensor | None]
"""Coefficients [I, M], poses [M, 2], and variances [M, 2] where the parents have some."""


def votes() -> Tensor:
    """Return the votes of the scene, ``[I, M, 2]``: those of the first half agree on parent 0, of the second on 1."""
    chance, centres = random.Random(26), ((0.7, 0.45), (-0.55, 0.6))
    made = []
    for child in range(CHILDREN):
        own = child * PARENTS // CHILDREN
        for parent in range(PARENTS):
            middle, spread = (centres[parent], 0.16) if parent == own else ((0.0, 0.0), 1.0)
            made.append([middle[k] + chance.uniform(-spread, spread) for k in range(2)])
    return torch.tensor(made, dtype=torch.float64).view(CHILDREN, PARENTS, 2)


def _routed(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Tensor, Tensor, Any]:
    """Coefficients, poses and all else that a function makes of children of zeros: the votes are the biases."""
    children = torch.zeros(1, CHILDREN, 1, 2, dtype=torch.float64)
    found = function(children, *arguments, **options, return_coefficients=True)
    return found.coefficients[0], found.poses[0, :, 0], found


def _agreement(bias: Tensor, turn: int) -> Turn:
    r, poses, _ = _routed(functional.inverted_attention_routing, None, bias=bias, normalize=False, iterations=turn)
    return r, torch.nn.functional.normalize(poses, dim=-1), None


def _dynamic(bias: Tensor, turn: int) -> Turn:
    r, poses, _ = _routed(functional.dynamic_routing, None, bias=bias, iterations=turn)
    return r, poses, None


def _em(bias: Tensor, turn: int) -> Turn:
    beta = bias.new_zeros(PARENTS)
    r, poses, _ = _routed(functional.em_routing, None, None, beta, beta, bias=bias, iterations=turn)
    return r, poses, (r[..., None] * (bias[:, :, 0] - poses) ** 2).sum(0) / r.sum(0)[:, None]


def _heinsen(bias: Tensor, turn: int) -> Turn:
    beta = bias.new_zeros(1, PARENTS)
    r, poses, found = _routed(functional.heinsen_routing, None, None, bias, beta + 1.0, beta, iterations=turn)
    return r, poses, found.variances[0, :, 0]


def _pooling(bias: Tensor, turn: int) -> Turn:  # its last sum is a turn of this picture
    r, poses, _ = _routed(functional.routing_pool, bias=bias, iterations=turn - 1, sharpness=1.5)
    return r, poses, None


SCENES: dict[str, Callable[[Tensor, int], Turn]] = {
    "inverted-attention": _agreement,
    "dynamic": _dynamic,
    "em": _em,
    "heinsen": _heinsen,
    "pooling": _pooling,
}


def _panel(given: Tensor, r: Tensor, pose: Tensor, variance: Tensor | None, colour: str, arrow: bool) -> str:
    """Draw one parent in one turn: its votes, as large as their coefficients, and its pose."""

    def at(point: Tensor) -> tuple[float, float]:
        return SIDE / 2 + float(point[0]) * SIDE * 0.42, SIDE / 2 - float(point[1]) * SIDE * 0.42

    parts = [f'<rect width="{SIDE}" height="{SIDE}" rx="4" fill="none" stroke="#d5d8dc"/>']
    for child, (point, share) in enumerate(zip(given, r.tolist(), strict=True)):
        (x, y), own = at(point), COLOURS[child * PARENTS // CHILDREN]
        dot = f'cx="{x:.0f}" cy="{y:.0f}" r="{1.0 + 7.0 * share**0.5:.1f}" fill="{own}" fill-opacity=".55"'
        parts.append(f"<circle {dot}/>")
    x, y = at(pose)
    if variance is not None:
        wide, high = (float(one) ** 0.5 * SIDE * 0.42 for one in variance)
        parts.append(
            f'<ellipse cx="{x:.0f}" cy="{y:.0f}" rx="{wide:.0f}" ry="{high:.0f}" fill="none" stroke="{colour}"/>'
        )
    if arrow:
        parts.append(f'<path d="M{SIDE // 2} {SIDE // 2}L{x:.0f} {y:.0f}" stroke="{colour}" stroke-width="1.5"/>')
    cross = f"M{x - 5:.0f} {y:.0f}h10M{x:.0f} {y - 5:.0f}v10"
    return "".join([*parts, f'<path d="{cross}" stroke="#222" stroke-width="2"/>'])


def picture(name: str) -> str:
    """Return the SVG of one routing: a row a parent, a column a turn."""
    given, gap, left, top = votes(), 8, 22, 20
    width, height = left + TURNS * (SIDE + gap), top + PARENTS * (SIDE + gap)
    parts = [f'<text x="{left + t * (SIDE + gap) + SIDE // 2}" y="14" text-anchor="middle">turn {t + 1}</text>'
             for t in range(TURNS)]  # fmt: skip
    with fastcaps.backend("reference"):
        turns = [SCENES[name](given[:, :, None], turn + 1) for turn in range(TURNS)]
    for t, (r, poses, variances) in enumerate(turns):
        shares = r * CHILDREN / PARENTS if name == "pooling" else r  # whose sum over children is 1
        for m in range(PARENTS):
            panel = _panel(given[:, m], shares[:, m], poses[m], None if variances is None else variances[m],
                           COLOURS[m], name in ("inverted-attention", "dynamic"))  # fmt: skip
            parts.append(f'<g transform="translate({left + t * (SIDE + gap)} {top + m * (SIDE + gap)})">{panel}</g>')
    parts += [f'<text x="4" y="{top + m * (SIDE + gap) + SIDE // 2}" fill="{COLOURS[m]}">{"AB"[m]}</text>'
              for m in range(PARENTS)]  # fmt: skip
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="640" role="img" '
        f'aria-label="three turns of {name} routing"><rect width="100%" height="100%" fill="#fff"/>'
        f"<style>text{{font:12px system-ui,sans-serif}}</style>{''.join(parts)}</svg>\n"
    )


def main() -> None:
    for name in SCENES:
        (DOCS / f"{name}.svg").write_text(picture(name), encoding="utf-8")
        print(f"written: {DOCS / name}.svg")


if __name__ == "__main__":
    main()
