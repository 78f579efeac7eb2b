"""Bar charts of the records, as SVG, for README and docs. matplotlib draws them."""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Mapping
from typing import Any

from bench.alternatives import OURS, STORED
from bench.figures import MODES, extra_bytes, number, ratio, speedup
from bench.record import Calls
from bench.workloads import WORKLOADS

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

BLUE, LIGHT, ORANGE, GREY = "#0072B2", "#56B4E9", "#D55E00", "#8C8C8C"  # distinguishable with every colour vision


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


def picture(calls: Calls, names: Collection[str], panel: str) -> str:
    """Return a chart as an SVG file, a pair of bars for each layer at its default batch, fastest first. A mapping of
    ``names`` says how each layer is called; ``panel`` is "speed-up" (of both modes) or "memory" (ours, stored)."""
    both = {name: [calls.get((name, WORKLOADS[name].batch, mode, "fp32"), {}) for mode in MODES]
            for name in names}  # fmt: skip
    both = {name: pair for name, pair in both.items() if any(pair)}
    layers = sorted(both, key=lambda name: -max(ratio(one) or 0 for one in both[name]))
    figure, plot = pyplot().subplots(figsize=(4.3, 1.5 + 0.5 * len(layers)), layout="constrained")  # inches: two a page
    fast = panel == "speed-up"
    bars = ((MODES[0], BLUE), (MODES[1], LIGHT)) if fast else ((OURS, BLUE), ("PyTorch, votes stored", GREY))
    for k, (label, colour) in enumerate(bars):
        if fast:
            values = [ratio(both[name][k]) if both[name][k] else None for name in layers]
            texts = [speedup(both[name][k]) if both[name][k] else "" for name in layers]
        else:
            counts = [extra_bytes(both[name][1].get((OURS, STORED)[k])) for name in layers]
            values = [None if count is None else count / 1e6 for count in counts]
            texts = ["" if value is None else number(value) for value in values]
        drawn = plot.barh([at + 0.4 * k - 0.2 for at in range(len(layers))], [value or 0 for value in values], 0.38,
                          color=colour, label=label)  # fmt: skip
        for text in plot.bar_label(drawn, texts, padding=3):
            if fast:
                text.xy = (max(text.xy[0], 1.0), text.xy[1])  # the dashed line crosses no figure
    if fast:
        plot.axvline(1.0, color="black", linestyle="--", linewidth=0.8)
    title = "times as fast as the best of PyTorch" if fast else "extra memory of a training step, MB"
    plot.set_title(title, loc="right")  # it may be wider than the plot, but not than plot and labels
    called = [names.get(name, name) if isinstance(names, Mapping) else name for name in layers]
    plot.set(yticks=range(len(layers)), yticklabels=called)
    plot.set_xticks(*([1.0], ["1× as fast"]) if fast else ([], []))
    plot.margins(x=0.25)
    plot.legend(frameon=False, loc="lower right")
    plot.spines[["top", "right"]].set_visible(False)
    plot.set_ylim(len(layers) + 0.6, -0.6)  # downwards, with room for the legend
    return as_svg(figure)
