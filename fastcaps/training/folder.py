"""The folder of a run: its lock, its settings, and checkpoints that are read with suspicion."""

from __future__ import annotations

import json
import platform
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
import torch
from filelock import FileLock, Timeout
from torch import nn

import fastcaps
from fastcaps.training.callbacks import replacing
from fastcaps.training.config import TrainConfig
from fastcaps.training.fields import RunError, as_data

WRITTEN = ("last.ckpt", "best.ckpt", "metrics.csv", "result.json")
"""The files of a run's results."""


def _processor() -> str:
    """The processor's name as its maker writes it, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions() -> dict[str, str]:
    """What a figure depends on: versions of everything, and the machine."""
    return {
        "fastcaps": fastcaps.__version__,
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "python": platform.python_version(),
        "machine": f"{_processor()}, {torch.get_num_threads()} threads",
    }


@contextmanager
def only_run(out: Path) -> Iterator[None]:
    """Lock a folder as long as the block lasts; RunError if another run has locked it.

    The system releases the lock when the process dies.
    """
    try:
        held = FileLock(out / ".lock").acquire(blocking=False)
    except Timeout as error:
        raise RunError(f"{out} is in use by a run that has not ended: wait for it, or take another") from error
    with held:
        yield


@contextmanager
def prepared(config: TrainConfig, resume: bool, overwrite: bool) -> Iterator[None]:
    """Make the folder of a run and write its settings; keep other runs out during the block.

    RunError if there is a run already and neither ``resume`` nor ``overwrite``, or the folder cannot be used.
    """
    out = config.folder
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"out: got {out}, which cannot be made ({error.strerror}); want a folder") from error
    with only_run(out):
        if not resume and (out / "config.json").exists():
            if not overwrite:
                raise RunError(
                    f"{out} holds a run already: go on with it (--resume), replace it (--overwrite) or take another"
                )
            clear(out)
        if not (resume and is_finished(config)):
            write_settings(config)
        yield


def clear(out: Path) -> None:
    """Delete what a run left in its folder, but for its settings."""
    for name in WRITTEN:
        (out / name).unlink(missing_ok=True)
    for events in (out / "tensorboard").glob("events.out.tfevents.*"):
        events.unlink()


def is_finished(config: TrainConfig) -> bool:
    """Whether the ``result.json`` of a run tells of all its epochs."""
    try:
        return bool(json.loads((config.folder / "result.json").read_text())["epochs"] == config.epochs)
    except (OSError, RecursionError, ValueError, LookupError, TypeError):
        return False


def check_sums(path: Path) -> None:
    """Raise BadZipFile if a checkpoint's bytes are not those that were written: torch compares no checksums."""
    if not zipfile.is_zipfile(path):  # torch.load says what it is instead
        return
    try:
        with zipfile.ZipFile(path) as held:
            folders = [entry.filename for entry in held.infolist() if entry.external_attr & 16]
            damaged = held.testzip() or next(iter(folders), None)  # of a folder torch reads nothing
    except Exception as error:  # damaged entries raise whatever they look like
        raise zipfile.BadZipFile(f"damaged ({error})") from error
    if damaged is not None:
        raise zipfile.BadZipFile(f"damaged: {damaged} is not what was written")


def read_checkpoint(path: Path) -> Any:
    """What is in a checkpoint, on the CPU; RunError if it cannot be read."""
    try:
        check_sums(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever it meets
        raise RunError(f"{path} cannot be read: {in_one_line(error, True)}; train anew with --overwrite") from error


def load_weights(network: nn.Module, out: Path) -> int:
    """Load a run's weights, of its best epoch if images were held out, else of its last; returns the epoch, from 1."""
    best = out / "best.ckpt"
    saved = read_checkpoint(best if best.is_file() else out / "last.ckpt")
    own = {name.removeprefix("network."): value for name, value in saved["state_dict"].items()}
    network.load_state_dict({name: own[name] for name in network.state_dict()})
    return int(saved["epoch"]) + 1


def in_one_line(error: Exception, named: bool = False) -> str:
    """The text of an error that somebody else raised, after its name if asked for."""
    return " ".join(f"{type(error).__name__ + ': ' if named else ''}{error}".split())


def write_settings(config: TrainConfig) -> None:
    """Write ``config.json``."""
    write_json(config.folder / "config.json", {**as_data(config), "versions": versions()})


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file that takes the old one's place when it is whole."""
    write_whole(path, json.dumps(value, indent=2, default=repr) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file that takes the old one's place when it is whole."""
    with replacing(path) as fresh:
        fresh.write_text(text, encoding="utf-8")
