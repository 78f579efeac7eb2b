"""``fastcaps demo``: train a capsule network on handwritten digits, draw what it does, measure what routing costs."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fastcaps
from fastcaps import backends
from fastcaps_lab import data, measure, viz
from fastcaps_lab.training import TrainConfig, TrainResult, train, versions
from fastcaps_lab.training.callbacks import Report
from fastcaps_lab.training.folder import write_json

EPOCHS = 10
TARGET = 0.97
SHOWN = (0, 2, 3, 4, 7)  # classes of the digits to draw; a misclassified one, if any, comes last
Figures = dict[str, dict[str, dict[str, float]]]
"""What :func:`fastcaps_lab.measure.measure` returns, by workload and backend."""


def measure_machine(console: Console) -> Figures:
    """Return every workload's figures on the compiled kernels and the reference."""
    names = [entry.name for entry in backends.listing() if entry.name in ("cpu", "reference") and entry.available]
    figures: Figures = {name: {} for name in measure.WORKLOADS}
    with console.status("measuring") as status:
        for name, backend in itertools.product(figures, names):
            status.update(f"measuring {measure.WORKLOADS[name].title} on {backend}, in a fresh process")
            figures[name][backend] = measure.apart("fastcaps_lab.measure", name, backend)
    return figures


def speed_table(figures: Figures) -> Table:
    """Return a table of the figures; ratios are plain PyTorch's figure over the kernels'."""
    title = f"One routing pass on this machine: {torch.get_num_threads()} threads, float32, 4 × 4 poses"
    caption = "Medians. Memory: what a training step adds at its peak, in a fresh process."
    table = Table("children → parents", "", title=title, caption=caption, title_justify="left", caption_justify="left")
    for heading in ("kernels", "plain PyTorch", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    quantities = (("forward", "forward_ms", "ms"), ("training step", "step_ms", "ms"), ("memory", "step_mb", "MB"))
    for name, row in figures.items():
        workload, slow, fast = measure.WORKLOADS[name], row["reference"], row.get("cpu")
        titles = (workload.title, f"{workload.children[0]} images", "")
        for title, (label, quantity, unit) in zip(titles, quantities, strict=True):
            ours, ratio = "—", "—"
            if fast is not None:
                ours = f"[bold]{fast[quantity]:,.1f}[/] {unit}"
                ratio = f"[bold green]{slow[quantity] / max(fast[quantity], 0.1):,.0f}×[/]"
            table.add_row(title, label, ours, f"{slow[quantity]:,.1f} {unit}", ratio)
        table.add_section()
    return table


def draw(result: TrainResult, splits: data.Splits, out: Path) -> list[Path]:
    """Write the two pictures into ``out``, and return their paths."""
    network: Any = result.network
    images, labels = splits.test.batch(slice(None))
    with torch.no_grad():
        predictions = network(images).argmax(dim=1)
    right = predictions == labels
    picked = [int(hits[0]) for digit in SHOWN if len(hits := ((labels == digit) & right).nonzero().flatten())]
    picked += (~right).nonzero().flatten()[:1].tolist()
    curve = viz.learning_curve(
        result.history,
        out / "learning_curve.png",
        title=f"A capsule network learns {len(splits.train):,} handwritten digits",
        target=TARGET,
    )
    listening = viz.listening_map(
        splits.test.images[picked][:, 0],
        viz.listening(network, images[picked]),
        labels[picked].tolist(),
        predictions[picked].tolist(),
        out / "who_listened_to_what.png",
        classes=splits.classes,
        title="Which children each class listened to (test images the network never trained on)",
    )
    return [curve, listening]


def run(
    out: Path, *, epochs: int = EPOCHS, seed: int = 0, speed: bool = True, console: Console | None = None
) -> dict[str, Any]:
    """Run the whole demo, and return the content of ``demo.json``.

    ``out`` is the folder for the pictures, ``demo.json`` and the training's files; ``speed`` is whether to measure this
    machine. The same seed and number of threads give the same weights.
    """
    console = console or Console()
    kernels = next(entry for entry in backends.listing() if entry.name == "cpu")
    console.print(f"fastcaps {fastcaps.__version__}, {kernels.detail}", highlight=False)
    console.print("\n[bold]1. A capsule network learns handwritten digits[/] (scikit-learn's, 8 × 8 pixels)")
    began = time.perf_counter()
    splits, digits = data.load("digits"), {"network": "digits", "data": "digits", "accelerator": "cpu"}
    config = TrainConfig.of(**digits, out=str(out), epochs=epochs, seed=seed)
    result = train(config, overwrite=True, report=Report(console), splits=splits)
    seconds = time.perf_counter() - began
    console.print(
        f"[bold]test accuracy {100 * result.test_accuracy:.2f} %[/] on {len(splits.test)} digits it had not seen, "
        f"after {seconds:.0f} s",
        highlight=False,
    )
    figures: Figures = {}
    if speed:
        console.print(
            "\n[bold]2. What routing costs on this machine[/]: the kernels, and fastcaps' reference in plain PyTorch.\n"
            "[bold]python -m pytest bench[/] in a checkout compares with the fastest ways to write it."
        )
        figures = measure_machine(console)
        console.print(speed_table(figures))
    pictures = draw(result, splits, out)
    summary = {
        "test_accuracy": result.test_accuracy,
        "training_seconds": seconds,
        "epochs": epochs,
        "seed": seed,
        "workloads": figures,
        "versions": versions(),
        "pictures": [str(path) for path in pictures],
    }
    write_json(out / "demo.json", summary)
    console.print(f"\n[bold]{'3' if speed else '2'}. Pictures[/]")
    for path, what in zip(pictures, ("how it learned", "which children each class listened to"), strict=True):
        console.print(f"  {path}  ({what})", highlight=False, soft_wrap=True)
    return summary
