"""The folder of a run: its lock, settings, results and checkpoints."""

from __future__ import annotations

import csv
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
import torch
from filelock import FileLock, Timeout
from torch import nn

import fastcaps
from fastcaps_lab.training.config import TrainConfig
from fastcaps_lab.training.settings import RunError

WRITTEN = ("last.ckpt", "best.ckpt", "metrics.csv", "result.json")
"""The files of a run's results."""


def versions() -> dict[str, str]:
    """Return the versions of all packages, and the machine."""
    return {
        "fastcaps": fastcaps.__version__,
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
    }


@contextmanager
def replace(path: Path) -> Iterator[Path]:
    """Return a file to write beside ``path``, which it replaces at the end of the ``with`` block."""
    fresh = path.with_name(f"{path.name}.writing")
    yield fresh
    os.replace(fresh, path)


def write_text(path: Path, text: str) -> None:
    """Write a text file, which replaces the old one when it is complete."""
    with replace(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, which replaces the old one when it is complete."""
    write_text(path, json.dumps(value, indent=2) + "\n")


@contextmanager
def prepared(config: TrainConfig, resume: bool, overwrite: bool) -> Iterator[None]:
    """Create and lock the folder of a run, and write its settings; a dying process releases the lock.

    RunError if another run has locked it, or it holds a run and neither ``resume`` nor ``overwrite`` is set.
    """
    out = config.folder
    out.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(out / ".lock").acquire(blocking=False)
    except Timeout as error:
        raise RunError(f"{out} is in use by a run: wait for it, or use another folder") from error
    with lock:
        if not resume and (out / "config.json").exists():
            if not overwrite:
                raise RunError(
                    f"{out} already holds a run: continue it (--resume), replace it (--overwrite) or use another folder"
                )
            for path in (*(out / name for name in WRITTEN), *(out / "tensorboard").glob("events.out.tfevents.*")):
                path.unlink(missing_ok=True)
        write_json(out / "config.json", config.model_dump())
        yield


def read_result(out: Path) -> dict[str, Any] | None:
    """Return the ``result.json`` in the folder of a finished run, else None; RunError if it cannot be read."""
    path = out / "result.json"
    try:
        result: dict[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
    except ValueError as error:
        raise RunError(f"{path} cannot be read: {error}; delete it to finish the run again") from error
    return result


def read_metrics(out: Path) -> list[dict[str, float]]:
    """Return the rows of a run's ``metrics.csv``."""
    path = out / "metrics.csv"
    try:
        with path.open(newline="") as file:
            return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{path} cannot be read: {error}; restart with --overwrite") from error


def read_checkpoint(path: Path) -> Any:
    """Return the content of a checkpoint, on the CPU; RunError if it cannot be read."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch may raise anything
        text = f"{path} cannot be read: {type(error).__name__}: {error}; restart with --overwrite"
        raise RunError(text) from error


def load_weights(network: nn.Module, out: Path) -> int:
    """Load a run's weights, of its best epoch if it had validation images, else of its last; return the epoch."""
    best = out / "best.ckpt"
    saved = read_checkpoint(best if best.is_file() else out / "last.ckpt")
    weights = {name.removeprefix("network."): value for name, value in saved["state_dict"].items()}
    network.load_state_dict({name: weights[name] for name in network.state_dict()})
    return int(saved["epoch"]) + 1
