"""Pictures of the records: one HTML page for a browser or a phone, and the picture that docs/performance.md opens with.

Inline SVG and nothing from the network. A chart is 400 units wide, so that its text is as large on a phone as it is
drawn; wide screens show several side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from bench.goals import number, place

__all__ = ["CHOSEN", "FIRST", "html", "picture"]

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
_OURS, _TRAINING, _OTHER = "var(--ours)", "var(--training)", "var(--other)"
_MODES = (("forward", _OURS), ("training step", _TRAINING))
_WAYS = (("fastcaps", _OURS), ("stored votes", _OTHER))
_COLOURS = {"--ours": "#1d5fd1", "--training": "#7fb0f5", "--other": "#c2670a", "--ink": "#222", "--faint": "#d5d8dc"}

_STYLE = """
:root { --ours: #1d5fd1; --training: #7fb0f5; --other: #c2670a; --ink: #1c2126; --faint: #d8dce1; --paper: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ours: #6ea8ff; --training: #33599a; --other: #f0a04b; --ink: #e3e6ea; --faint: #3a4149; --paper: #15191d; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 84rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .25rem; } p { margin: .25rem 0 .75rem; }
.wide { display: grid; gap: 1rem 2rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
svg { display: block; width: 100%; height: auto; max-width: 40rem; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.keys span { white-space: nowrap; margin-right: 1em; }
.keys i { display: inline-block; width: .75em; height: .75em; margin-right: .35em; border-radius: 2px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .8125rem; white-space: nowrap; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid var(--faint); }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); }
"""


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _line(x1: float, x2: float, y1: float, y2: float, dashed: bool = False, inside: str = "") -> str:
    stroke = 'stroke="var(--ink)" stroke-dasharray="3 3"' if dashed else 'stroke="var(--faint)"'
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" {stroke}>{inside}</line>'


def _svg(width: float, height: float, parts: Sequence[str], label: str) -> str:
    head = f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(label)}">'
    return head + "".join(parts) + "</svg>"


def bars(
    rows: Sequence[tuple[str, Sequence[float | None]]],
    unit: str,
    mark: float | None = None,
    keys: Sequence[tuple[str, str]] = _MODES,
) -> str:
    """Return a chart of a name and two bars a row, of the two ``keys``; ``mark`` is a line to compare with."""
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
    height = 32 * len(rows)
    if mark is not None:
        x = left + (right - left) * mark / most
        parts.append(_line(x, x, 0, height, dashed=True))
    return _svg(_WIDTH, height, parts, f"bars of {len(rows)} rows")


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


def _chart(title: str, keys: Sequence[tuple[str, str]], chart: str) -> str:
    """Return a chart with its title and the colours of its bars, 26 units higher."""
    head = _text(10, 16, title)
    for k, (name, colour) in enumerate(keys):
        x = 150 + 90 * k
        head += f'<rect x="{x}" y="6" width="11" height="11" fill="{colour}"/>' + _text(x + 15, 16, name)
    return f'{head}<g transform="translate(0 26)">{chart.partition(">")[2].removesuffix("</svg>")}</g>'


def _file(width: int, height: int, shown: int, body: str) -> str:
    """Return an SVG file of its own, whose colours are numbers."""
    made = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{shown}">'
        f'<rect width="100%" height="100%" fill="#fff"/><style>text{{fill:#222;font:12px system-ui,sans-serif}}</style>'
        f"{body}</svg>\n"
    )
    for name, colour in _COLOURS.items():
        made = made.replace(f"var({name})", colour)
    return made


def picture(rows: Sequence[Row], names: Sequence[str], memory: bool) -> str:
    """Return the speed-ups of some layers as an SVG file of its own; with ``memory`` that of their training steps."""
    pairs = _pairs([row for row in rows if row["workload"] in names], "speedup")
    left = _chart("times faster", _MODES, bars(pairs, "×", 1.0))
    if not memory:
        return _file(_WIDTH, 32 * len(pairs) + 30, 720, left)
    own = _memory(rows, [name for name, _ in pairs])
    right = _chart("a step's own MB", _WAYS, bars(own, "", keys=_WAYS))
    return _file(2 * _WIDTH, 32 * len(pairs) + 30, 800, f'{left}<g transform="translate({_WIDTH} 0)">{right}</g>')


def _legend(first: str, second: str, colour: str) -> str:
    keys = (f'<span><i style="background:{one}"></i>{name}</span>' for name, one in ((first, _OURS), (second, colour)))
    return f'<p class="keys">{" ".join(keys)}</p>'


def _section(title: str, text: str, legend: str, chart: str) -> str:
    """Return a chart under its title, or nothing where no row has what it shows."""
    return chart and f"<section><h2>{title}</h2><p>{text}</p>{legend}{chart}</section>"


def _machine(rows: Sequence[Row]) -> str:
    """Return the charts of one machine's rows."""
    timed = [row for row in rows if "fastcaps" in row]
    about = max((row["machine"] for row in timed), key=lambda machine: machine["date"])
    dates = sorted({row["machine"]["date"][:10] for row in timed})
    commits = ", ".join(sorted({row["machine"]["commit"] for row in timed}))
    modes = _legend("forward", "training step", _TRAINING)
    others = ", ".join(dict.fromkeys(name for row in timed for name in row["alternatives"]))
    measured = [one for one in _memory(timed, [name for name, _ in _pairs(timed, "speedup")]) if any(one[1])]
    sections = [
        _section("Speed-up against the fastest alternative", f"Of {others}. The dashed line is 1.", modes,
                 bars(_pairs(timed, "speedup"), "×", 1.0)),
        _section("Share of a large matrix product",
                 "Useful operations a second, as a share of the library's product of large matrices.", modes,
                 bars(_pairs(timed, "sgemm_share"), "%")),
        _section("Memory of a training step", "MB beside its inputs and results.",
                 _legend("fastcaps", "stored votes", _OTHER), bars(measured, "", keys=_WAYS) if measured else ""),
    ]  # fmt: skip
    return f"""
<h1>fastcaps on {escape(about["device"])}</h1>
<p>{about["threads"]} threads. Measured {dates[0]}{f" to {dates[-1]}" if len(dates) > 1 else ""}, commits {commits}.
torch {about["versions"]["torch"]}. {_load(timed)} Touch or point at a mark for its number.</p>
<div class="wide">
{"".join(sections)}
</div>
<section><h2>All rows</h2><div class="scroll">{_table(timed)}</div></section>
"""


def _load(rows: Sequence[Row]) -> str:
    """Return how quiet the machine was: the load, and how many rows are doubtful."""
    loads = sorted(row.get("load", 0.0) for row in rows)
    spread = f"{sum(bool(row.get('doubts')) for row in rows)} of {len(rows)} rows are doubtful (~)"
    return f"Load average before a row: {loads[0]:.1f} to {loads[-1]:.1f}; {spread}."


def _table(rows: Sequence[Row]) -> str:
    """Return the figures behind the charts."""
    lines = [
        "<tr><th>row</th><th>ms (p20-p80)</th><th>fastest alternative, ms</th><th>speed-up</th><th>doubts (~)</th></tr>"
    ]
    for row in rows:
        milliseconds = row["fastcaps"]["median"] * 1e3
        own = row["fastcaps"]
        spread = f"{number(own['p20'] * 1e3)}-{number(own['p80'] * 1e3)}"
        cells = [place(row), f"{number(milliseconds)} ({spread})", "", "", "; ".join(row.get("doubts", []))]
        if row["speedup"]:
            cells[2:4] = [
                f"{row['fastest']}, {number(row['speedup'] * milliseconds)}",
                f"{'~' * bool(row.get('doubts'))}{number(row['speedup'])}×",
            ]
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return f"<table>{''.join(lines)}</table>"


def html(rows: Sequence[Row]) -> str:
    """Return one page with the charts of every machine."""
    devices = dict.fromkeys(row["machine"]["device"] for row in rows if "fastcaps" in row)
    body = "<hr>".join(_machine([row for row in rows if row["machine"]["device"] == device]) for device in devices)
    return (
        '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>fastcaps: measured</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style>{body}</html>\n'
    )
