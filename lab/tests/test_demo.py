"""The demo: it writes what it says; its pictures show what the network really did; its figures are measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from fastcaps_lab import demo, measure


def test_a_short_demo_writes_what_it_says(tmp_path: Path) -> None:
    console = Console(record=True, width=100, file=(tmp_path / "log").open("w"))
    summary = demo.run(tmp_path / "out", epochs=2, speed=False, console=console)
    printed = console.export_text()
    assert summary["test_accuracy"] > 0.9
    assert f"test accuracy {100 * summary['test_accuracy']:.2f} % on 359 digits" in printed
    assert json.loads((tmp_path / "out" / "demo.json").read_text()) == summary
    assert len(summary["pictures"]) == 2
    for picture in map(Path, summary["pictures"]):
        assert picture.name in printed.replace("\n", "")
        pixels = np.asarray(Image.open(picture).convert("L"))
        assert pixels.shape[1] >= 1000 and pixels.shape[0] >= 400 and pixels.std() > 12  # not an empty page


@pytest.mark.slow
def test_the_demo_keeps_its_promise(tmp_path: Path) -> None:
    assert demo.run(tmp_path, speed=False, console=Console(quiet=True))["test_accuracy"] >= 0.97


def test_memory_is_measured_in_a_fresh_process() -> None:
    figures = measure.apart("fastcaps_lab.measure", "classes", "reference")
    assert figures["step_mb"] > 1.5 * 8 * 800 * 10 * 16 * 4 / 1e6  # the reference stores values for each pair
