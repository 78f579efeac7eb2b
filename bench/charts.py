"""Bar charts of the records, as SVG: for README, docs and the page of all rows. matplotlib draws them."""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from bench.goals import number

Row = dict[str, Any]

CHOSEN = (  # noqa: SIM905
    "tsai-c10-conv1 tsai-c10-fc tsai-c100-fc1 tsai-dmm-matrix-conv tsai-dmm-vector-set sabour-mnist tsai-dr-c100 "
    "hinton-conv hinton-fc heinsen-norb-1 heinsen-sst-1 zhao-pool li-capnet-dynamic li-capnet-em"
).split()
"""The layers of the first table and picture of docs/performance.md, one or two of every kind."""

FIRST = {
    "tsai-c10-conv1": "inverted attention,\nCIFAR-10, convolution",
    "tsai-c100-fc1": "inverted attention,\nCIFAR-100, 800 to 20",
    "sabour-mnist": "dynamic routing,\nMNIST, 1,152 to 10",
    "hinton-conv": "EM routing,\nCIFAR-10, convolution",
    "heinsen-sst-1": "Heinsen's routing,\nsentences",
    "heinsen-norb-1": "Heinsen's routing,\nsmallNORB, shared matrices",
    "li-capnet-dynamic": "dynamic routing,\n2,048 to 512, shared matrices",
}
"""The layers of the README's pictures, and what they call them: own matrices, and shared ones."""

BLUE, LIGHT_BLUE, ORANGE, GREY = "#0072B2", "#56B4E9", "#D55E00", "#8C8C8C"  # distinguishable with every colour vision
MODES = ("forward", "training step")
PANELS = {
    "speedup": ("times as fast as the best of PyTorch", lambda value: f"{number(value)}×", MODES),
    "sgemm_share": ("share of torch.mm's rate, large matrices", lambda value: f"{value:.0%}", MODES),
    "memory": ("extra memory of a training step, MB", number, ("fastcaps", "PyTorch, votes stored")),
}
"""Of what can be drawn: the title, how a number is written, and what the two bars of a layer are."""


def pyplot() -> Any:
    """Return matplotlib.pyplot, set up to draw into files, without a screen."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    return plt


def as_svg(figure: Any) -> str:
    """Return a figure as an SVG file of one line, the same for the same figure, and forget it. Its ground is
    transparent; what is black becomes light where the reader's browser is dark."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fastcaps"}):
        figure.savefig(file, format="svg", metadata={"Date": None}, transparent=True)
    pyplot().close(figure)
    text = " ".join(file.getvalue().split()) + "\n"
    text = re.sub("<[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), text)  # coordinates, not the labels
    text = text.replace("#000000", "currentColor").replace("<text ", '<text fill="currentColor" ')
    dark = "@media (prefers-color-scheme: dark) { svg { color: #dddddd } }"
    return text.replace("</style>", f" {dark}</style>", 1)


def own_bytes(row: Row, name: str) -> float | None:
    """Return what a call needed beside its inputs and results, the package's own or that of an alternative."""
    return (row.get("memory") or {}).get(name, {}).get("beyond")


def by_layer(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Return the last row of each layer and precision, by its name and by its mode."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        name = row["workload"] + ("" if row["precision"] == "fp32" else f", {row['precision']}")
        found.setdefault(name, {})[row["mode"]] = row
    return found


def _pair(modes: dict[str, Row], panel: str) -> list[float | None]:
    if panel != "memory":
        return [modes.get(mode, {}).get(panel) for mode in MODES]
    counts = [own_bytes(modes.get(MODES[1], {}), name) for name in ("fastcaps", "batched-matmul")]
    return [None if count is None else count / 1e6 for count in counts]


def picture(rows: Sequence[Row], names: Collection[str] = (), panels: Iterable[str] = PANELS) -> str:
    """Return charts side by side as an SVG file, a pair of bars for each layer, fastest first: at its default batch, or
    the largest of a quick run. ``names`` are the layers, all if there are none; a mapping says how each is called."""
    some = [row for row in rows if not names or row["workload"] in names]
    found = by_layer(sorted(some, key=lambda row: (row["default"], row["batch"])))
    layers = sorted(found, key=lambda name: -max(one["speedup"] or 0 for one in found[name].values()))
    drawn = {panel: [_pair(found[name], panel) for name in layers] for panel in panels}
    drawn = {panel: pairs for panel, pairs in drawn.items() if any(any(pair) for pair in pairs)}
    size = 4.3 * len(drawn), 1.5 + 0.5 * len(layers)  # inches; two pictures fit a page, and each a phone
    figure, plots = pyplot().subplots(1, len(drawn), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for plot, (panel, pairs) in zip(plots[0], drawn.items(), strict=True):
        title, said, labels = PANELS[panel]
        colours = BLUE, GREY if panel == "memory" else LIGHT_BLUE
        for k, (label, colour) in enumerate(zip(labels, colours, strict=True)):
            values = [pair[k] for pair in pairs]
            bars = plot.barh([at + 0.4 * k - 0.2 for at in range(len(layers))], [value or 0 for value in values], 0.38,
                             color=colour, label=label)  # fmt: skip
            doubts = [panel != "memory" and found[name].get(MODES[k], {}).get("doubts") for name in layers]
            texts = ["" if v is None else "~" * bool(doubt) + said(v) for v, doubt in zip(values, doubts, strict=True)]
            for text in plot.bar_label(bars, texts, padding=3):
                if panel == "speedup":
                    text.xy = (max(text.xy[0], 1.0), text.xy[1])  # the dashed line crosses no figure
        if panel == "speedup":
            plot.axvline(1.0, color="black", linestyle="--", linewidth=0.8)
        called = [names.get(name, name) if isinstance(names, Mapping) else name for name in layers]
        plot.set_title(title, loc="right")  # it may be wider than the plot, but not than plot and labels
        plot.set(yticks=range(len(layers)), yticklabels=called)
        plot.set_xticks(*([1.0], ["1× as fast"]) if panel == "speedup" else ([], []))
        plot.margins(x=0.25)
        plot.legend(frameon=False, loc="lower right")
        plot.spines[["top", "right"]].set_visible(False)
    plots[0][0].set_ylim(len(layers) + 0.6, -0.6)  # downwards, with room for the legends
    return as_svg(figure)
