"""The settings of a run; pydantic checks them, and a wrong one raises ValueError with its path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from fastcaps_lab import models
from fastcaps_lab.training.loss import AnyLoss, CrossEntropy
from fastcaps_lab.training.optimizer import AnySchedule, Cosine, Optimizer
from fastcaps_lab.training.settings import SHORT, Options, RunError, Settings, changed, flat, read

WHERE = (
    *("out", "recipe", "data.dir", "data.options.transformer"),
    *("devices", "accelerator", "strategy", "workers", "checkpoint_every"),
)
"""Settings of where and how fast a run computes. Only these may change when a run resumes."""


class Network(Settings):
    """The network; its channels, image size and number of classes follow from the data."""

    name: str  # of fastcaps_lab.models.names()
    options: Options  # further arguments of fastcaps_lab.models.create

    @model_validator(mode="after")
    def _known(self) -> Network:
        models.config(self.name)  # raises ValueError for an unknown name, with similar ones
        return self


class Data(Settings):
    """The data, and their augmentation.

    By default only CIFAR and smallNORB are augmented; ``pad`` or ``resize`` (one of the two) replaces ``augment``.
    Without ``crop``, crops have the images' original size.
    """

    name: str  # of fastcaps_lab.data.names()
    dir: str | None = None  # the folder of its files
    augment: bool | None = None  # as in fastcaps_lab.data.load, and flip
    flip: bool | None = None
    pad: NonNegativeInt | None = None  # pad by so many pixels, and crop randomly
    resize: PositiveInt | None = None  # resize to so many pixels, and crop randomly
    crop: PositiveInt | None = None  # the size of these crops, and of the middle of test images, which are resized, too
    mixup: NonNegativeFloat = 0.0  # the Beta distribution's parameter for blending images (or embeddings) and targets
    validation: NonNegativeInt = 0  # number of training images held out to choose the best epoch
    limit: PositiveInt | None = None  # use only the first training images, for a quick try
    options: Options  # of fastcaps_lab.data.load: image_size, transformer

    @model_validator(mode="after")
    def _fitting(self) -> Data:
        if self.pad is not None and self.resize is not None:
            raise ValueError(f"resize is {self.resize} and pad is {self.pad}, want one of them")
        if self.crop is not None and self.crop > (self.resize or 0):
            raise ValueError(
                f"crop is {self.crop} and resize is {self.resize}, want a resize to as many pixels or more"
            )
        return self


class TrainConfig(Settings):
    """All settings of a run; :meth:`of` also takes names, or mappings, for its parts."""

    network: Annotated[Network, SHORT]
    data: Annotated[Data, SHORT]
    loss: AnyLoss = CrossEntropy()
    metric: Literal["accuracy", "exact-match", "top-2"] = "accuracy"
    optimizer: Annotated[Optimizer, SHORT] = Optimizer(lr=3e-3)
    schedule: AnySchedule = Cosine(warmup=0.2, start=0.04)
    epochs: PositiveInt = 2
    batch_size: PositiveInt = 64  # images a step, on all devices together
    seed: NonNegativeInt = 0  # of initial weights, order of images and augmentation
    runs: PositiveInt = 1  # number of runs, with seed, seed + 1 and so on
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"] = "32-true"  # mixed: autocast
    accelerator: str = "auto"  # as in Lightning, and devices and strategy
    devices: str = "1"
    strategy: str = "auto"
    workers: NonNegativeInt = 0  # processes that gather batches, at most one per core; 0 is fastest on a CPU
    checkpoint_every: PositiveInt = 200  # steps
    out: str = ""  # the folder of all results; runs/NETWORK-DATA if empty
    recipe: str = ""  # the source of the settings

    @classmethod
    def of(cls, **settings: Any) -> TrainConfig:
        """Return settings read from models, names or mappings, as in a recipe; ValueError in one line.

        >>> config = TrainConfig.of(network="digits", data="digits", optimizer={"name": "sgd", "momentum": 0.9})
        >>> config.optimizer.lr
        0.001
        """
        return read(cls, settings)

    def changed(self, changes: Mapping[str, Any]) -> TrainConfig:
        """Return a copy with other values, given by paths: ``config.changed({"optimizer.lr": 0.01})``."""
        return read(TrainConfig, changed(self.model_dump(), changes))

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.out or f"runs/{Path(self.recipe).stem or f'{self.network.name}-{self.data.name}'}")


def runs_of(config: TrainConfig) -> list[TrainConfig]:
    """Return a configuration's runs, one per seed; several get folders ``seed-0`` and so on."""
    if config.runs == 1:
        return [config]
    seeds = range(config.seed, config.seed + config.runs)
    return [config.changed({"seed": seed, "runs": 1, "out": str(config.folder / f"seed-{seed}")}) for seed in seeds]


def kept(folder: Path) -> TrainConfig:
    """Return the settings of the run in a folder, from its ``config.json``; RunError if it cannot be read."""
    path = folder / "config.json"
    try:
        return read(TrainConfig, json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}); restart the run with --overwrite") from error


def check_same(before: TrainConfig, after: TrainConfig) -> None:
    """Raise RunError if a run has other settings than the one that would resume it, except those of :data:`WHERE`."""
    old, new = (flat(config.model_dump()) for config in (before, after))
    differ = [name for name in sorted({*old, *new} - {*WHERE}) if old.get(name) != new.get(name)]
    if differ:
        raise RunError(
            f"{after.folder} holds a run with other settings: "
            + ", ".join(f"{name} is {old.get(name)} there and {new.get(name)} here" for name in differ)
            + "; give the same settings, or another folder"
        )
