"""Training: what a run writes, that it learns, and that a killed run ends as if nothing had happened."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from stand_ins import python

from fastcaps_lab import cli, data
from fastcaps_lab.training import RunError, TrainConfig, train, train_seeds
from fastcaps_lab.training.callbacks import COLUMNS, Report, read_metrics
from fastcaps_lab.training.config import kept, runs_of
from fastcaps_lab.training.folder import only_run

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


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Any:
    """One run over all digits, shared by the tests that look at what it left."""
    out = tmp_path_factory.mktemp("finished")
    return run(settings(out, data__limit=None, epochs=3, checkpoint_every=5, seed=3))


def test_what_a_run_leaves(finished: Any) -> None:
    """Its figures are those of its weights, in every file."""
    out, history = finished.out, finished.history
    left = "config.json last.ckpt metrics.csv result.json tensorboard"
    assert sorted(path.name for path in out.glob("[!.]*")) == left.split()
    assert finished.test_accuracy > 0.9 and history[-1]["train_loss"] < history[0]["train_loss"] / 2
    images, labels = data.load("digits").test.batch(slice(None))
    with torch.no_grad():
        logits = finished.network(images)
    assert finished.test_accuracy == pytest.approx((logits.argmax(1) == labels).double().mean().item(), abs=1e-6)
    loss = torch.nn.functional.cross_entropy(logits.double(), labels).item()
    assert finished.test_loss == pytest.approx(loss, rel=1e-5)
    with (out / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS[:-2]  # nothing was held out
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert [row["step"] for row in rows] == ["23", "46", "69"]  # 1,438 images in batches of 64
    result, kept = (json.loads((out / f"{name}.json").read_text()) for name in ("result", "config"))
    assert result["test_accuracy"] == finished.test_accuracy
    assert result["epochs"] == len(result["seconds_per_epoch"]) == 3
    assert result["parameters"] == sum(p.numel() for p in finished.network.parameters())
    assert kept["seed"] == 3 and kept["versions"]["torch"] == torch.__version__
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    accuracies = [event.value for event in events.Scalars("test_accuracy")]
    assert accuracies == pytest.approx([row["test_accuracy"] for row in history], abs=1e-6)
    assert len(events.Scalars("step/train_loss")) > 3


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
    """In the middle of the second epoch and of writing, in a process that has no chance to clean up."""
    config = settings(tmp_path, data__limit=None, epochs=3, checkpoint_every=5, seed=3)
    given = arguments(tmp_path, "--epochs", "3", "--checkpoint-every", "5", "--seed", "3")
    killed = python("-c", KILLED_WHILE_WRITING, "7", *given, OMP_NUM_THREADS="1")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done_before = read_metrics(tmp_path / "metrics.csv")
    assert len(done_before) == 1 and not (tmp_path / "result.json").exists()
    assert (tmp_path / "last.ckpt.writing").exists()
    with pytest.raises(ValueError, match="23 steps per epoch and this run 45; resume with the same data, batch size"):
        run(config.changed({"batch_size": 32}), resume=True)
    resumed = run(config, resume=True)
    assert same_weights(resumed.network, finished.network)
    for mine, theirs in zip(resumed.history, finished.history, strict=True):
        assert mine | {"seconds": 0} == theirs | {"seconds": 0}
    assert resumed.history[0]["seconds"] == done_before[0]["seconds"]


def test_resuming_what_is_finished_reports_it_again(finished: Any) -> None:
    left = {path: path.stat().st_mtime_ns for path in finished.out.rglob("[!.]*")}
    again = run(kept(finished.out), resume=True)
    assert again.history == finished.history and same_weights(again.network, finished.network)
    assert {path: path.stat().st_mtime_ns for path in finished.out.rglob("[!.]*")} == left


def test_a_folder_is_not_overwritten_by_accident_and_has_one_run(tmp_path: Path) -> None:
    config = settings(tmp_path, epochs=1)
    first = run(config)
    with pytest.raises(RunError, match=r"already holds a run: continue it \(--resume\), replace it"):
        run(config)
    with only_run(tmp_path):
        for options in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(RunError, match=r"is in use by a run: wait for it, or use"):
                run(config, **options)
    assert (tmp_path / "result.json").exists()  # nothing was deleted
    second = run(config, overwrite=True)
    assert same_weights(first.network, second.network)  # the same seed: the same bits
    other = run(config.changed({"seed": 1}), overwrite=True)
    assert not same_weights(first.network, other.network)
    assert len(read_metrics(tmp_path / "metrics.csv")) == 1


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"out: got .*file, which cannot be created \(File exists\); want a folder"):
        run(settings(tmp_path / "file", epochs=1))
    (tmp_path / "run" / "metrics.csv.writing").mkdir(parents=True)  # as good as a full disk
    assert cli.main(arguments(tmp_path / "run", "--limit", "64")) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("fastcaps train: [Errno ") and "metrics.csv.writing" in shown and shown.count("\n") == 1


@pytest.mark.parametrize(
    ("accuracy", "changes"),
    [
        (0.5, {"precision": "bf16-mixed", "optimizer__name": "sgd", "optimizer__lr": 0.1}),
        (0.5, {"precision": "64-true", "optimizer__name": "adamw", "optimizer__lr": 3e-3, "loss": "margin"}),
        (0.2, {"loss": "bce", "metric": "exact-match"}),  # few after 30 steps, but chance would have next to none
    ],
)
def test_other_settings_learn(tmp_path: Path, accuracy: float, changes: dict[str, Any]) -> None:
    result = run(settings(tmp_path, epochs=3, data__limit=640, **changes))
    assert result.history[-1]["train_loss"] < 0.7 * result.history[0]["train_loss"]
    assert result.test_accuracy > accuracy
    wide = torch.float64 if changes.get("precision") == "64-true" else torch.float32
    assert {parameter.dtype for parameter in result.network.parameters()} == {wide}


def test_the_best_epoch_is_chosen_by_images_held_out(tmp_path: Path) -> None:
    config = settings(tmp_path, epochs=4, data__limit=384, data__validation=100, optimizer__lr=0.02)
    result = run(config)
    held_out = [row["validation_accuracy"] for row in result.history]
    assert result.best_epoch == held_out.index(max(held_out)) + 1
    assert result.history[0]["step"] == 5  # 284 images in batches of 64
    assert result.test_accuracy == result.history[result.best_epoch - 1]["test_accuracy"]
    images, labels = data.load("digits").test.batch(slice(None))
    with torch.no_grad():  # the weights are those of that epoch
        right = (result.network(images).argmax(1) == labels).double().mean().item()
    assert right == pytest.approx(result.test_accuracy, abs=1e-6)
    shown = json.loads((tmp_path / "result.json").read_text())
    assert shown["best_epoch"] == result.best_epoch and shown["validation_accuracy"] == max(held_out)
    best = tmp_path / "best.ckpt"
    best.write_bytes(best.read_bytes()[:1000])
    with pytest.raises(RunError, match=r"best\.ckpt cannot be read: \w+: .*; restart with --overwrite"):
        run(config, resume=True)


def test_several_seeds_give_mean_and_spread(tmp_path: Path) -> None:
    config = settings(tmp_path / "runs", runs=2, epochs=1, seed=4, data__limit=64)
    with pytest.raises(ValueError, match="runs: got 2, want 1"):
        run(config)
    several = train_seeds(config, report=Report(quiet=True))
    found = [result.test_accuracy for result in several.results]
    assert several.mean == pytest.approx(sum(found) / 2) and found[0] != found[1]
    assert several.spread == pytest.approx(abs(found[0] - found[1]) / 2**0.5)
    alone = run(settings(tmp_path / "alone", epochs=1, seed=5, data__limit=64))
    assert same_weights(alone.network, several.results[1].network)
    assert sorted(path.name for path in (tmp_path / "runs").glob("seed-*")) == ["seed-4", "seed-5"]
    shown = json.loads((tmp_path / "runs" / "result.json").read_text())
    assert shown["test_accuracy"] == {"mean": several.mean, "spread": several.spread} and shown["seeds"] == [4, 5]
    with pytest.raises(RunError, match="already holds a run"):
        train_seeds(config, report=Report(quiet=True))
    again = train_seeds(config, resume=True, report=Report(quiet=True))  # all are finished
    assert [result.test_accuracy for result in again.results] == found

    class Stops(Report):
        def on_train_batch_end(self, *_: Any) -> None:
            raise RunError("stopped")

    new = config.changed({"optimizer.lr": 0.01})
    with pytest.raises(RunError, match="stopped"):
        train_seeds(new, overwrite=True, report=Stops(quiet=True))
    several = train_seeds(new, resume=True, report=Report(quiet=True))
    alone = run(runs_of(new)[1].changed({"out": str(tmp_path / "other")}))
    assert same_weights(several.results[1].network, alone.network)  # not the old run's


def test_workers_are_one_a_core_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    shown = io.StringIO()
    many = settings(tmp_path / "many", epochs=1, data__limit=64, workers=100_000)
    result = train(many, report=Report(Console(file=shown)))
    assert shown.getvalue().startswith("workers: got 100000, 1 are started, one per core\n")
    assert same_weights(result.network, run(many.changed({"out": str(tmp_path / "none"), "workers": 0})).network)


@pytest.mark.slow
def test_two_processes_train_several_seeds(tmp_path: Path) -> None:
    given = arguments(tmp_path, "--devices", "2", "--strategy", "ddp", "--runs", "2")
    done = python("-m", "fastcaps_lab", *given, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    # two epochs of two runs and the end: only the first process speaks
    assert done.stdout.count("test accuracy") == 5 and "mean and standard deviation of 2 runs" in done.stdout
    for seed in (0, 1):
        rows = read_metrics(tmp_path / f"seed-{seed}" / "metrics.csv")
        assert [row["step"] for row in rows] == [23, 46]  # half the images each, in batches of 32
        assert rows[-1]["test_accuracy"] > 0.9
