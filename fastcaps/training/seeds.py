"""The same run with several seeds: mean and spread."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastcaps.data import Splits
from fastcaps.training.callbacks import Report
from fastcaps.training.config import TrainConfig, one_run
from fastcaps.training.data import read_data
from fastcaps.training.run import TrainResult, prepare_folder, train, versions, write_settings, write_whole


@dataclass(frozen=True)
class SeedsResult:
    """What several runs came to.

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
    splits: Splits | None = None,
) -> SeedsResult:
    """Train ``config.runs`` networks, which differ in their seed alone, one after the other.

    Each has a folder of its own, ``seed-0`` and so on, in ``config.out``, where ``result.json`` has all of them. The
    arguments, and what is raised, are those of :func:`fastcaps.training.train`; what was killed is resumed, what is
    finished only reported again.
    """
    if config.runs < 2:
        raise ValueError(f"runs: got {config.runs}, want 2 or more (train makes one)")
    if config.devices not in ("1", "auto") and config.strategy != "auto":
        raise ValueError(
            f"runs: got {config.runs} on devices {config.devices!r}; where Lightning starts a process for each device, "
            "start each run by itself: --set runs=1 --seed 0, --seed 1, …"
        )
    splits = splits or read_data(config.data)
    out = config.folder
    prepare_folder(out, resume, overwrite)
    write_settings(config, out)
    results = []
    for index in range(config.runs):
        one = one_run(config, index)
        results.append(train(one, resume=resume, overwrite=overwrite, report=report or Report(), splits=splits))
    accuracies = [result.test_accuracy for result in results]
    mean, spread = statistics.mean(accuracies), statistics.stdev(accuracies)
    summary: dict[str, Any] = {
        "test_accuracy": {"mean": mean, "spread": spread},
        "test_accuracies": accuracies,
        "seeds": [config.seed + index for index in range(config.runs)],
        "metric": config.metric,
        "versions": versions(),
    }
    write_whole(out / "result.json", json.dumps(summary, indent=2) + "\n")
    return SeedsResult(results, mean, spread, out)
