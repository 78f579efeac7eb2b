"""Training: what a run writes, that it learns, and that a killed run ends as if nothing had happened."""

from __future__ import annotations

import json
import logging
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from stand_ins import python

from fastcaps_lab import cli, data
from fastcaps_lab.training import RunError, TrainConfig, train, train_seeds
from fastcaps_lab.training.callbacks import Report
from fastcaps_lab.training.folder import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")


def settings(out: Path, **changes: Any) -> TrainConfig:
    """Two epochs of three steps on some of the digits; changes by their paths, with __ for a dot."""
    small = TrainConfig.of(network="digits", data={"name": "digits", "limit": 192}, out=str(out), accelerator="cpu")
    return small.changed({path.replace("__", "."): value for path, value in changes.items()})


def run(config: TrainConfig, **options: Any) -> Any:
    """Train, which leaves the process as it was."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels, filters = [logger.level for logger in loggers], list(warnings.filters)
    result = train(config, report=Report(quiet=True), **options)
    assert warnings.filters == filters and [logger.level for logger in loggers] == levels
    return result


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def accuracy(network: torch.nn.Module) -> float:
    """Of the digits to test."""
    images, labels = data.load("digits").test.batch(slice(None))
    with torch.no_grad():
        return float((network(images).argmax(1) == labels).double().mean())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Any:
    """One run over all digits, shared by the tests that look at what it left."""
    out = tmp_path_factory.mktemp("finished")
    return run(settings(out, data__limit=None, data__validation=100, epochs=3, checkpoint_every=5, seed=3))


def test_what_a_run_leaves(finished: Any) -> None:
    """Its figures are those of its weights, in every file; the best epoch on images held out is chosen."""
    out, history = finished.out, finished.history
    left = "best.ckpt config.json last.ckpt metrics.csv result.json tensorboard"
    assert sorted(path.name for path in out.glob("[!.]*")) == left.split()
    assert finished.test_accuracy > 0.9 and history[-1]["train_loss"] < history[0]["train_loss"] / 2
    assert finished.test_accuracy == pytest.approx(accuracy(finished.network), abs=1e-6)
    held_out = [row["validation_accuracy"] for row in history]
    assert finished.best_epoch == held_out.index(max(held_out)) + 1
    assert finished.test_accuracy == history[finished.best_epoch - 1]["test_accuracy"]
    assert read_metrics(out) == history and [row["step"] for row in history] == [21, 42, 63]  # of 64 images
    result, kept = (json.loads((out / f"{name}.json").read_text()) for name in ("result", "config"))
    assert (result["test_accuracy"], result["best_epoch"]) == (finished.test_accuracy, finished.best_epoch)
    assert result["parameters"] == sum(p.numel() for p in finished.network.parameters())
    assert kept["seed"] == 3 and result["versions"]["torch"] == torch.__version__


KILLED_WHILE_WRITING = """
import os, signal, sys
from fastcaps_lab import cli
replace, left = os.replace, int(sys.argv.pop(1))
def kill_halfway(source, target):
    global left
    left -= str(source).endswith("last.ckpt.writing")
    if left == 0:
        os.truncate(source, os.path.getsize(source) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = kill_halfway
sys.exit(cli.main(sys.argv[1:]))
"""
"""The command, killed when half of a checkpoint is written; its first argument says which."""


def arguments(out: Path, *more: str) -> list[str]:
    """Train on the digits."""
    return ["train", "--network", "digits", "--data", "digits", "--out", str(out), "--accelerator", "cpu", *more]


def test_a_killed_run_ends_as_if_nothing_had_happened(tmp_path: Path, finished: Any) -> None:
    """In the middle of the second epoch and of writing, in a process that has no chance to clean up; then it moves."""
    old, new = tmp_path / "old", tmp_path / "new"
    more = ["--epochs", "3", "--seed", "3", "--set", "checkpoint_every=5", "--set", "data.validation=100"]
    killed = python("-c", KILLED_WHILE_WRITING, "7", *arguments(old, *more), OMP_NUM_THREADS="1")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (old / "last.ckpt.writing").exists() and not (old / "result.json").exists()
    old.rename(new)
    done_before = read_metrics(new)
    assert len(done_before) == 1
    config = settings(new, data__limit=None, data__validation=100, epochs=3, checkpoint_every=7, seed=3)
    with pytest.raises(RunError, match="holds a run with other settings: batch_size is 64 there and 32 here; give"):
        run(config.changed({"batch_size": 32}), resume=True)
    resumed = run(config, resume=True)
    assert same_weights(resumed.network, finished.network) and resumed.best_epoch == finished.best_epoch
    for mine, theirs in zip(resumed.history, finished.history, strict=True):
        assert mine | {"seconds": 0} == theirs | {"seconds": 0}
    assert resumed.history[0] == done_before[0]
    left = {path: path.stat().st_mtime_ns for path in new.rglob("*")}  # what is finished is reported again
    assert same_weights(run(config, resume=True).network, finished.network)
    assert {path: path.stat().st_mtime_ns for path in new.rglob("*")} == left


def test_a_folder_has_one_run_and_is_not_overwritten_by_accident(tmp_path: Path) -> None:
    config = settings(tmp_path, epochs=1)
    first = run(config)
    with pytest.raises(RunError, match=r"already holds a run: continue it \(--resume\), replace it"):
        run(config)
    with FileLock(tmp_path / ".lock"), pytest.raises(RunError, match=r"is in use by a run: wait for it, or use"):
        run(config, overwrite=True)
    for wrong in ({"data.validation": 192}, {"network.options.types": 3}, {"devices": "-3"}):
        with pytest.raises(ValueError):
            run(config.changed(wrong), overwrite=True)
    assert (tmp_path / "result.json").exists()  # nothing was deleted
    assert same_weights(first.network, run(config, overwrite=True).network)  # the same seed: the same bits
    assert not same_weights(first.network, run(config.changed({"seed": 1}), overwrite=True).network)
    assert len(read_metrics(tmp_path)) == 1
    for damaged, said in (("", "got 0 epochs of a finished run, want 1"), ("epoch\nx\n", "cannot be read: could not")):
        (tmp_path / "metrics.csv").write_text(damaged)
        with pytest.raises(RunError, match=rf"metrics\.csv:? {said}"):
            run(config.changed({"seed": 1}), resume=True)
    last = tmp_path / "last.ckpt"
    last.write_bytes(last.read_bytes()[:1000])
    with pytest.raises(RunError, match=r"last\.ckpt cannot be read: \w+: .*; restart with --overwrite"):
        run(config.changed({"seed": 1}), resume=True)


@pytest.mark.parametrize(
    ("wanted", "changes"),
    [
        (0.5, {"precision": "64-true", "optimizer": {"name": "adamw", "lr": 3e-3}, "loss": "margin"}),
        (0.2, {"precision": "bf16-mixed", "loss": "bce", "metric": "exact-match"}),  # chance would have next to none
    ],
)
def test_other_settings_learn(tmp_path: Path, wanted: float, changes: dict[str, Any]) -> None:
    result = run(settings(tmp_path, epochs=3, data__limit=640, **changes))
    assert result.history[-1]["train_loss"] < 0.7 * result.history[0]["train_loss"]
    assert result.test_accuracy > wanted
    wide = torch.float64 if changes["precision"] == "64-true" else torch.float32
    assert {parameter.dtype for parameter in result.network.parameters()} == {wide}


def test_several_seeds_give_mean_and_spread(tmp_path: Path) -> None:
    config = settings(tmp_path / "runs", runs=2, epochs=1, seed=4, data__limit=64)
    with pytest.raises(ValueError, match="runs: got 2, want 1"):
        run(config)
    several = train_seeds(config, report=Report(quiet=True))
    found = [result.test_accuracy for result in several.results]
    assert several.mean == pytest.approx(sum(found) / 2) and found[0] != found[1]
    assert several.spread == pytest.approx(abs(found[0] - found[1]) / 2**0.5)
    alone = run(settings(tmp_path / "alone", epochs=1, seed=5, data__limit=64, workers=1))
    assert same_weights(alone.network, several.results[1].network)
    assert sorted(path.name for path in (tmp_path / "runs").glob("seed-*")) == ["seed-4", "seed-5"]


def test_ctrl_c_ends_a_run_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(self: Any, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Report, "on_train_batch_end", press)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        status = cli.main(arguments(tmp_path / "run", "--limit", "384", "--set", "checkpoint_every=2"))
    finally:
        signal.signal(signal.SIGINT, before)
    again = f"fastcaps train --resume {tmp_path / 'run'}"
    assert (status, capsys.readouterr().err) == (130, f"fastcaps: stopped; to continue: {again}\n")
    assert (tmp_path / "run" / "last.ckpt").exists() and not (tmp_path / "run" / "result.json").exists()


@pytest.mark.slow
def test_two_processes_train_several_seeds(tmp_path: Path) -> None:
    given = arguments(tmp_path, "--set", "devices=2", "--set", "strategy=ddp", "--runs", "2")
    done = python("-m", "fastcaps_lab", *given, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    # two epochs of two runs and the end: only the first process speaks
    assert done.stdout.count("test accuracy") == 5 and "% of 2 runs" in done.stdout
    for seed in (0, 1):
        rows = read_metrics(tmp_path / f"seed-{seed}")
        assert [row["step"] for row in rows] == [23, 46]  # half the images each, in batches of 32
        assert rows[-1]["test_accuracy"] > 0.9
