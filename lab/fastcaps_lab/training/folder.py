"""The folder of a run: its lock, settings, results and checkpoints."""

from __future__ import annotations

import json
import platform
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning
import torch
from filelock import FileLock, Timeout
from torch import nn

import fastcaps
from fastcaps_lab.training.callbacks import replacing
from fastcaps_lab.training.config import TrainConfig
from fastcaps_lab.training.fields import RunError, as_data

WRITTEN = ("last.ckpt", "best.ckpt", "metrics.csv", "result.json")
"""The files of a run's results."""


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of all packages, and the machine."""
    return {
        "fastcaps": fastcaps.__version__,
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "python": platform.python_version(),
        "machine": f"{_processor()}, {torch.get_num_threads()} threads",
    }


@contextmanager
def only_run(out: Path) -> Iterator[None]:
    """Lock a folder in a ``with`` block; RunError if another run has locked it. A dying process releases the lock."""
    try:
        held = FileLock(out / ".lock").acquire(blocking=False)
    except Timeout as error:
        raise RunError(f"{out} is in use by a run: wait for it, or use another folder") from error
    with held:
        yield


@contextmanager
def prepared(config: TrainConfig, resume: bool, overwrite: bool) -> Iterator[None]:
    """Create and lock the folder of a run, and write its settings.

    RunError if it holds a run and neither ``resume`` nor ``overwrite`` is set, or the folder cannot be used.
    """
    out = config.folder
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"out: got {out}, which cannot be created ({error.strerror}); want a folder") from error
    with only_run(out):
        if not resume and (out / "config.json").exists():
            if not overwrite:
                raise RunError(
                    f"{out} already holds a run: continue it (--resume), replace it (--overwrite) or use another folder"
                )
            clear(out)
        if not (resume and is_finished(config)):
            write_settings(config)
        yield


def clear(out: Path) -> None:
    """Delete the results of a run, but not its settings."""
    for name in WRITTEN:
        (out / name).unlink(missing_ok=True)
    for events in (out / "tensorboard").glob("events.out.tfevents.*"):
        events.unlink()


def is_finished(config: TrainConfig) -> bool:
    """Return whether the ``result.json`` of a run covers all its epochs."""
    try:
        return bool(json.loads((config.folder / "result.json").read_text())["epochs"] == config.epochs)
    except (OSError, RecursionError, ValueError, LookupError, TypeError):
        return False


def check_sums(path: Path) -> None:
    """Raise BadZipFile if a checkpoint's checksums do not match, as torch does not compare them."""
    if not zipfile.is_zipfile(path):
        return  # torch.load raises
    try:
        with zipfile.ZipFile(path) as held:
            folders = [entry.filename for entry in held.infolist() if entry.external_attr & 16]
            damaged = held.testzip() or next(iter(folders), None)  # torch would ignore a folder
    except Exception as error:  # damaged entries may raise anything
        raise zipfile.BadZipFile(f"damaged ({error})") from error
    if damaged is not None:
        raise zipfile.BadZipFile(f"damaged: {damaged} has changed since it was written")


def read_checkpoint(path: Path) -> Any:
    """Return the content of a checkpoint, on the CPU; RunError if it cannot be read."""
    try:
        check_sums(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch may raise anything
        raise RunError(f"{path} cannot be read: {in_one_line(error, True)}; restart with --overwrite") from error


def load_weights(network: nn.Module, out: Path) -> int:
    """Load a run's weights, of its best epoch if it had validation images, else of its last; return the epoch."""
    best = out / "best.ckpt"
    saved = read_checkpoint(best if best.is_file() else out / "last.ckpt")
    weights = {name.removeprefix("network."): value for name, value in saved["state_dict"].items()}
    network.load_state_dict({name: weights[name] for name in network.state_dict()})
    return int(saved["epoch"]) + 1


def in_one_line(error: Exception, named: bool = False) -> str:
    """Return the text of another library's error, with the name of its class if ``named``."""
    return " ".join(f"{type(error).__name__ + ': ' if named else ''}{error}".split())


def write_settings(config: TrainConfig) -> None:
    """Write ``config.json``."""
    write_json(config.folder / "config.json", {**as_data(config), "versions": versions()})


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, which replaces the old one when it is complete."""
    write_whole(path, json.dumps(value, indent=2, default=repr) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a text file, which replaces the old one when it is complete."""
    with replacing(path) as fresh:
        fresh.write_text(text, encoding="utf-8")
