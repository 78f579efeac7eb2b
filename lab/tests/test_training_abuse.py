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
from test_training import arguments

from fastcaps_lab import cli
from fastcaps_lab.training import RunError, TrainConfig, train
from fastcaps_lab.training.callbacks import Report, replacing
from fastcaps_lab.training.folder import read_checkpoint

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


def test_a_write_follows_no_link(tmp_path: Path) -> None:
    """Neither one in the place of the temporary file nor one in the place of the file."""
    victim, last = tmp_path / "victim", tmp_path / "last.ckpt"
    victim.write_bytes(b"untouched")
    for planted in (last, last.with_name("last.ckpt.writing")):
        planted.symlink_to(victim)
    with replacing(last) as fresh:
        fresh.write_bytes(b"new")
    assert victim.read_bytes() == b"untouched" and not last.is_symlink() and last.read_bytes() == b"new"
    assert sorted(tmp_path.iterdir()) == [last, victim]


def _damaged(held: dict[str, Any], what: str) -> None:
    """Damage one part of a checkpoint."""
    rows, loops = held["callbacks"]["MetricsWriter"], held["loops"]["fit_loop"]
    if what == "rows":
        rows["rows"] = [{"junk": 1.0}]
    elif what == "few rows":
        rows["rows"] = []
    elif what == "epochs":
        loops["epoch_progress"]["current"] = dict.fromkeys(("ready", "completed", "started", "processed"), 0)
    elif what == "batches":
        loops["epoch_loop.batch_progress"]["current"] = {"ready": 3, "completed": 3, "started": 3, "processed": 3}
    elif what == "no loops":
        held["loops"] = {}
    elif what == "weights":
        next(weight for weight in held["state_dict"].values() if weight.dim() > 1).view(-1)[3] = torch.nan
    elif what == "moments":
        held["optimizer_states"][0]["state"][0]["exp_avg"].view(-1)[0] = torch.inf


def test_a_damaged_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is damaged, resuming says so in one line that begins with the file."""
    out = tmp_path / "run"
    assert cli.main(arguments(out, *FEW, "--epochs", "1")) == 0
    kept, result = (out / "last.ckpt").read_bytes(), (out / "result.json").read_text()
    metrics = (out / "metrics.csv").read_text()

    def resumed(file: str, why: str) -> None:
        capsys.readouterr()
        assert cli.main(["train", "--resume", "--out", str(out)]) == 1, why
        shown = capsys.readouterr().err
        assert shown.startswith(f"fastcaps train: {out / file} cannot be ") and shown.count("\n") == 1, shown
        assert why in shown, shown

    head, row = metrics.splitlines()
    for content, why in (
        (f"{head}\n1,2,3\n", "row 1"),
        (f"{head}\n{row.replace('6', 'six', 1)}\n", "row 1"),
        (f"{head}\n{row},7\n", "row 1"),
        ("junk,more\n1,2\n", "row 1"),
    ):
        (out / "metrics.csv").write_text(content)
        resumed("metrics.csv", why)
    (out / "metrics.csv").write_bytes(b"\xff\n\xff\n")
    resumed("metrics.csv", "")
    (out / "metrics.csv").write_text(metrics)
    (out / "result.json").write_text(result.replace('"epochs": 1', '"epochs": 0'))  # not finished
    for what, why in (
        ("rows", "resumed from: row 1 is {'junk': 1.0}, want a number in every column"),
        ("few rows", "resumed from: got 0 rows of metrics, want 1 after 6 steps"),
        ("epochs", "resumed from: got 0 epochs of the loop, want 1 after 6 steps"),
        ("batches", "resumed from: got 3 batches of the loop, want 0 after 6 steps"),
        ("no loops", "resumed from: KeyError: 'fit_loop'"),
        ("weights", "has values that are not finite"),
        ("moments", "resumed from: optimizer.state.0.exp_avg has values that are not finite"),
    ):
        held = torch.load(io.BytesIO(kept), weights_only=True)
        _damaged(held, what)
        torch.save(held, out / "last.ckpt")
        resumed("last.ckpt", why)
    (out / "last.ckpt").write_bytes(kept)
    assert cli.main(["train", "--resume", "--out", str(out)]) == 0


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
    assert status == 1 and shown.count("\n") == 1 and "File too large" in shown and str(last) in shown
    assert last.read_bytes() == kept and not list(out.glob("*.writing"))
    for name, value in (
        ("total", {"ready": 50, "completed": 1, "started": 2, "processed": 2}),
        ("is_last_batch", True),
    ):
        held = torch.load(last, weights_only=True)  # of the middle of an epoch
        held["loops"]["fit_loop"]["epoch_loop.batch_progress"][name] = value
        torch.save(held, last)
        with pytest.raises(RunError, match=r"last\.ckpt .*loops"):
            train(config, resume=True, report=Report(quiet=True))
        last.write_bytes(kept)
    assert train(config, resume=True, report=Report(quiet=True)).history[-1]["step"] == 6


def test_a_batch_too_large_for_memory_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fastcaps_lab.training import CapsuleClassifier

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
