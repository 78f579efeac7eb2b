"""Charts of the records, as SVG: for README, docs and the page of all rows. Nothing comes from the network.

A chart is 400 units wide, so that its text is as large on a phone as it is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from bench.goals import number

Row = dict[str, Any]

CHOSEN = (  # noqa: SIM905
    "tsai-c10-conv1 tsai-c10-fc tsai-c100-fc1 tsai-dmm-matrix-conv tsai-dmm-vector-set sabour-mnist tsai-dr-c100 "
    "hinton-conv hinton-fc heinsen-norb-1 heinsen-sst-1 zhao-pool li-capnet-dynamic li-capnet-em"
).split()
"""The layers of the first table and picture of docs/performance.md, one or two of every kind."""

FIRST = (  # noqa: SIM905
    "tsai-c10-conv1 tsai-c100-fc1 tsai-dmm-vector-conv sabour-mnist hinton-conv heinsen-norb-1 li-capnet-dynamic"
).split()
"""The layers of the README's table and picture: own matrices, and shared ones."""

_WIDTH = 400
_OURS, _TRAINING, _OTHER, _INK = "#1d5fd1", "#7fb0f5", "#c2670a", "#222"
_MODES = (("forward", _OURS), ("training step", _TRAINING))
_WAYS = (("fastcaps", _OURS), ("stored votes", _OTHER))


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def bars(
    rows: Sequence[tuple[str, Sequence[float | None]]],
    unit: str,
    mark: float | None = None,
    keys: Sequence[tuple[str, str]] = _MODES,
) -> str:
    """Return a name and two bars a row, of the two ``keys``; ``mark`` is a line to compare with."""
    left, right = 150, _WIDTH - 52
    most = max((value for _, values in rows for value in values if value is not None), default=1.0)
    most = max(most, mark or 0.0)
    parts = []
    for k, (name, values) in enumerate(rows):
        top = 32 * k + 4
        parts.append(_text(left - 6, top + 17, name, "end"))
        for j, (value, (key, colour)) in enumerate(zip(values, keys, strict=True)):
            if value is None:
                continue
            width, y = (right - left) * value / most, top + 13 * j
            label = f"{value:.0%}" if unit == "%" else f"{number(value)}{unit}"
            what = f"{name}, {key}: {label}"
            parts.append(f'<rect x="{left}" y="{y}" width="{width:.1f}" height="11" fill="{colour}">')
            parts.append(f"<title>{escape(what)}</title></rect>{_text(left + width + 4, y + 10, label)}")
    if mark is not None:
        x, height = left + (right - left) * mark / most, 32 * len(rows)
        line = f'x1="{x:.1f}" x2="{x:.1f}" y1="0.0" y2="{height:.1f}"'
        parts.append(f'<line {line} stroke="{_INK}" stroke-dasharray="3 3"></line>')
    return "".join(parts)


def _pairs(rows: Sequence[Row], field: str) -> list[tuple[str, list[float | None]]]:
    """Return a name with the field of its forward and training rows at the default batch (or the largest, where a quick
    run had others), largest first."""
    shown: dict[str, tuple[bool, int]] = {}
    for row in rows:
        shown[row["workload"]] = max(shown.get(row["workload"], (False, 0)), (row["default"], row["batch"]))
    found: dict[str, list[float | None]] = {}
    for row in rows:
        if row.get(field) and shown[row["workload"]] == (row["default"], row["batch"]):
            name = row["workload"] + ("" if row["precision"] == "fp32" else f", {row['precision']}")
            found.setdefault(name, [None, None])[row["mode"] != "forward"] = row[field]
    return sorted(found.items(), key=lambda item: -max(value or 0.0 for value in item[1]))


def _memory(rows: Sequence[Row], names: Sequence[str]) -> list[tuple[str, list[float | None]]]:
    """Return a name with the MB of its training step beside inputs and results: the package's, and stored votes'."""
    own: dict[str, list[float | None]] = {name: [None, None] for name in names}
    for row in rows:
        if row["default"] and row["mode"] != "forward" and row["workload"] in own:
            found = [(row.get("memory") or {}).get(name, {}).get("beyond") for name in ("fastcaps", "batched-matmul")]
            own[row["workload"]] = [None if one is None else one / 1e6 for one in found]
    return [*own.items()]


def _chart(title: str, keys: Sequence[tuple[str, str]], bars: str) -> str:
    """Return bars with their title and what their colours mean, 26 units higher."""
    head = _text(10, 16, title)
    for k, (name, colour) in enumerate(keys):
        x = 150 + 90 * k
        head += f'<rect x="{x}" y="6" width="11" height="11" fill="{colour}"/>' + _text(x + 15, 16, name)
    return f'{head}<g transform="translate(0 26)">{bars}</g>'


def _file(width: int, height: int, shown: int, body: str) -> str:
    """Return an SVG file of its own."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{shown}">'
        f'<rect width="100%" height="100%" fill="#fff"/><style>text{{fill:{_INK};font:12px system-ui,sans-serif}}'
        f"</style>{body}</svg>\n"
    )


def picture(rows: Sequence[Row], names: Sequence[str], memory: bool) -> str:
    """Return the speed-ups of some layers as an SVG file of its own; with ``memory`` that of their training steps."""
    pairs = _pairs([row for row in rows if row["workload"] in names], "speedup")
    left = _chart("times faster", _MODES, bars(pairs, "×", 1.0))
    if not memory:
        return _file(_WIDTH, 32 * len(pairs) + 30, 720, left)
    own = _memory(rows, [name for name, _ in pairs])
    right = _chart("a step's own MB", _WAYS, bars(own, "", keys=_WAYS))
    return _file(2 * _WIDTH, 32 * len(pairs) + 30, 800, f'{left}<g transform="translate({_WIDTH} 0)">{right}</g>')


def drawn(rows: Sequence[Row]) -> list[str]:
    """Return the charts of one machine's rows: speed-up, share of a large matrix product, a training step's memory."""
    speed, share = _pairs(rows, "speedup"), _pairs(rows, "sgemm_share")
    own = [one for one in _memory(rows, [name for name, _ in speed]) if any(one[1])]
    made = [
        (speed, _chart("times faster", _MODES, bars(speed, "×", 1.0))),
        (share, _chart("of sgemm", _MODES, bars(share, "%"))),
        (own, _chart("a step's own MB", _WAYS, bars(own, "", keys=_WAYS))),
    ]
    return [_file(_WIDTH, 32 * len(of) + 30, _WIDTH, body) for of, body in made if of]
