"""Training under abuse: full disks, too little memory, pickles that would run code, Ctrl-C."""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from test_training import arguments

from fastcaps import cli
from fastcaps.training import RunError, TrainConfig, train
from fastcaps.training.callbacks import Report, replacing
from fastcaps.training.folder import read_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


FEW = ("--epochs", "3", "--limit", "384", "--checkpoint-every", "2", "--seed", "7")
"""Three epochs of six steps, and a checkpoint after every second one."""


class Bomb:
    """What unpickling would run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_broken_checkpoint_is_told_and_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments(tmp_path / "run", *FEW, "--epochs", "1")) == 0
    checkpoint, mark = tmp_path / "run" / "last.ckpt", tmp_path / "mark"
    (tmp_path / "run" / "result.json").unlink()  # not finished
    whole = checkpoint.read_bytes()
    held = torch.load(checkpoint, weights_only=True)
    zipped, other = io.BytesIO(), io.BytesIO()
    torch.save({**held, "bomb": Bomb(mark)}, zipped)
    torch.save({"state_dict": {}}, other)
    weights = max((weight.numpy().tobytes() for weight in held["state_dict"].values()), key=len)
    at = whole.index(weights) + len(weights) // 2
    flipped = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
    # attributes of an entry; of one marked as a folder torch reads nothing
    folder = whole.rindex(b"PK\1\2", 0, whole.rindex(b"/data/0")) + 38
    renamed = whole[:folder] + bytes([whole[folder] ^ 16]) + whole[folder + 1 :]
    for content, message in (
        (whole[: len(whole) // 2], ""),
        (b"", ""),
        (other.getvalue(), ""),
        (zipped.getvalue(), "UnpicklingError"),
        (pickle.dumps(Bomb(mark)), "UnpicklingError"),
        (renamed, "BadZipFile: damaged: .*/data/0 has changed since it was written"),
        (flipped, "BadZipFile: damaged: .*/data/[0-9]+ has changed since it was written"),
    ):
        checkpoint.write_bytes(content)
        capsys.readouterr()
        assert cli.main(["train", "--resume", "--out", str(tmp_path / "run")]) == 1
        shown = capsys.readouterr().err
        assert re.search(f"last.ckpt cannot be resumed from: {message}", shown) and shown.count("\n") == 1, shown
        assert not mark.exists()
    with pytest.raises(RunError, match=f"last.ckpt cannot be read: {message}"):
        read_checkpoint(checkpoint)


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    last = tmp_path / "last.ckpt"
    last.write_bytes(b"old")
    with pytest.raises(OSError, match="No space"), replacing(last) as fresh:
        fresh.write_bytes(b"half of a ne")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == [last] and last.read_bytes() == b"old"


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit on the size of files simulates the disk: a checkpoint does not fit, the other files do."""
    out = tmp_path / "run"
    last = out / "last.ckpt"

    class Stops(Report):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                raise RunError("stopped")

    config = TrainConfig.of(network="digits", data={"name": "digits", "limit": 384}, out=str(out), accelerator="cpu")
    config = config.changed({"epochs": 1, "checkpoint_every": 2})
    with pytest.raises(RunError, match="stopped"):
        train(config, report=Stops(quiet=True))
    kept, size = last.read_bytes(), last.stat().st_size // 2
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        status = cli.main(["train", "--resume", "--out", str(out)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    shown = capsys.readouterr().err
    assert status == 1 and shown.count("\n") == 1 and "File too large" in shown
    assert last.read_bytes() == kept and not list(out.glob("*.writing"))
    assert train(config, resume=True, report=Report(quiet=True)).history[-1]["step"] == 6


def test_a_batch_too_large_for_memory_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fastcaps.training import CapsuleClassifier

    monkeypatch.setattr(CapsuleClassifier, "training_step", lambda *_: torch.empty(2**55))
    assert cli.main(arguments(tmp_path / "run", *FEW)) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("fastcaps train: batch_size: got 64, too large for the memory here: ")
    assert shown.count("\n") == 1


def test_ctrl_c_ends_a_run_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(self: Any, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Report, "on_train_batch_end", press)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        status = cli.main(arguments(tmp_path / "run", *FEW))
    finally:
        signal.signal(signal.SIGINT, before)
    shown = capsys.readouterr().err
    again = f"fastcaps train --resume {tmp_path / 'run'}"
    assert (status, shown) == (130, f"fastcaps train: stopped; to continue: {again}\n")
    assert (tmp_path / "run" / "last.ckpt").exists() and not (tmp_path / "run" / "result.json").exists()
