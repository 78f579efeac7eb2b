"""The same run with several seeds: mean and spread."""

from __future__ import annotations

import json
import statistics
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from fastcaps.training.callbacks import Report
from fastcaps.training.config import TrainConfig, one_run
from fastcaps.training.data import read_data
from fastcaps.training.run import (
    TrainResult,
    clear,
    is_finished,
    prepared,
    train,
    versions,
    write_settings,
    write_whole,
)


@dataclass(frozen=True)
class SeedsResult:
    """The results of several runs.

    Attributes
    ----------
    results : list of TrainResult
        One a seed.
    mean, spread : float
        Of their test accuracies: the mean, and the standard deviation of a sample (n − 1).
    out : Path
        The folder that holds theirs.
    """

    results: list[TrainResult]
    mean: float
    spread: float
    out: Path

    @property
    def is_main(self) -> bool:
        """Whether this process should speak."""
        return self.results[0].is_main


def train_seeds(
    config: TrainConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    report: Report | None = None,
) -> SeedsResult:
    """Train ``config.runs`` networks, which differ in their seed alone, one after the other.

    Each has a folder of its own in ``config.out``, ``seed-0`` and so on; ``result.json`` beside them has the figures of
    all. Settings and errors are those of :func:`fastcaps.training.train`. With ``resume``, a killed run goes on, and a
    finished one is only reported again.
    """
    if config.runs < 2:
        raise ValueError(f"runs: got {config.runs}, want 2 or more (train makes one)")
    splits = read_data(config.data)
    out = config.folder
    every = [one_run(config, index) for index in range(config.runs)]
    # Lightning starts this very command once more for every further device
    is_main = rank_zero_only.rank == 0  # type: ignore[attr-defined]
    only_report = resume and (out / "result.json").is_file() and all(is_finished(one) for one in every)
    with prepared(out, resume, overwrite) if is_main else nullcontext():
        # all at once: if this is killed and resumed, no old result must pass for a new one
        if is_main and overwrite:
            for one in every:
                clear(one.folder)
        if is_main and not only_report:
            write_settings(config, out)
        options: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "splits": splits}
        results = [train(one, report=report or Report(), **options) for one in every]
        accuracies = [result.test_accuracy for result in results]
        mean, spread = statistics.mean(accuracies), statistics.stdev(accuracies)
        summary: dict[str, Any] = {
            "test_accuracy": {"mean": mean, "spread": spread},
            "test_accuracies": accuracies,
            "seeds": [one.seed for one in every],
            "metric": config.metric,
            "versions": versions(),
        }
        if is_main and not only_report:
            write_whole(out / "result.json", json.dumps(summary, indent=2) + "\n")
    return SeedsResult(results, mean, spread, out)
