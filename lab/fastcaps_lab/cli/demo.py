"""``fastcaps demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from fastcaps_lab.cli.common import one_line_errors, progress_console, show


def demo(
    out: Annotated[Path, Option(help="folder for the pictures and figures")] = Path("fastcaps-demo"),
    epochs: Annotated[int | None, Option(help="passes over the digits", show_default="10")] = None,
    seed: Annotated[int, Option(help="seed of the training")] = 0,
    skip_speed: Annotated[bool, Option("--skip-speed", help="leave out the measurement of speed and memory")] = False,
    as_json: Annotated[bool, Option("--json", help="print what demo.json holds, and nothing else")] = False,
) -> int:
    """Train on handwritten digits, measure this machine, draw two pictures."""
    from fastcaps_lab.demo import EPOCHS, run

    with one_line_errors():
        passes = EPOCHS if epochs is None else epochs
        summary = run(out, epochs=passes, seed=seed, speed=not skip_speed, console=progress_console(as_json))
    if as_json:
        show(summary)
    return 0
