"""The settings of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from fastcaps_lab import models
from fastcaps_lab.checks import did_you_mean
from fastcaps_lab.training import fields
from fastcaps_lab.training.fields import SHORT, Count, Flag, Index, NotNegative, RunError, Settings
from fastcaps_lab.training.loss import AnyLoss, CrossEntropy
from fastcaps_lab.training.optimizer import Adam, AnyOptimizer, AnySchedule, OneCycle

WHERE = (
    *("out", "recipe", "data.dir", "data.options.transformer"),
    *("devices", "accelerator", "strategy", "workers", "checkpoint_every"),
)
"""Settings of where and how fast a run computes. Only these may change when a run resumes."""

FOLLOW = ("name", "device", "dtype", "classes", "in_channels", "image_size", "layers", "embedding")
"""Arguments of :func:`fastcaps_lab.models.create` that follow from other settings or from the data."""
MOST_SEED = 2**32 - 1  # NumPy's maximum
MOST_ITERATIONS = 10_000  # of routing; papers use at most tens
MOST_PIXELS = 4096  # of padding, or a side of a resized image


class Network(Settings):
    """The network; its channels, image size and number of classes follow from the data."""

    name: str  # of fastcaps_lab.models.names()
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments of fastcaps_lab.models.create

    def __post_init__(self) -> None:
        if self.name not in models.names():
            hint = did_you_mean(self.name, models.names(), most=3)
            raise ValueError(f"name: got {self.name!r}{hint}, want a network of fastcaps train --list")
        for name in FOLLOW:
            if name in self.options:
                raise ValueError(f"options.{name}: got {self.options[name]!r}, want none: it follows from the data")
        iterations = self.options.get("iterations")
        if isinstance(iterations, int) and iterations > MOST_ITERATIONS:
            raise fields.wrong("options.iterations", iterations, f"{MOST_ITERATIONS} or fewer")


class Data(Settings):
    """The data, and their augmentation.

    By default only CIFAR and smallNORB are augmented; ``pad`` or ``resize`` (one of the two) replaces ``augment``.
    Without ``crop``, crops have the images' original size. Only ``multi_crop`` changes test images: it averages the
    class probabilities of crops of the corners and the middle of the resized images and, with ``flip``, of their mirror
    images.
    """

    name: str  # of fastcaps_lab.data.names()
    dir: str | None = None  # the folder of its files
    augment: Flag | None = None  # as in fastcaps_lab.data.load, and flip
    flip: Flag | None = None
    pad: Annotated[Index, Field(le=MOST_PIXELS)] | None = None  # pad by so many pixels, and crop randomly
    resize: Annotated[Count, Field(le=MOST_PIXELS)] | None = None  # resize to so many pixels, and crop randomly
    crop: Count | None = None  # the size of these crops, and of the middle of test images, which are resized, too
    multi_crop: Flag = False
    jitter: Flag = False  # change the colours of training images
    mixup: NotNegative = 0.0  # the Beta distribution's parameter for blending images (or embeddings) and targets
    validation: Index = 0  # number of training images held out to choose the best epoch
    limit: Count | None = None  # use only the first training images, for a quick try
    options: Mapping[str, Any] = field(default_factory=dict)  # of fastcaps_lab.data.load: image_size, transformer

    def __post_init__(self) -> None:
        if self.pad is not None and self.resize is not None:
            raise ValueError(f"resize: got {self.resize} and pad {self.pad}, want one of them")
        if self.crop is not None and not self.crop <= (self.resize or 0):
            raise ValueError(
                f"crop: got {self.crop} with resize {self.resize}, want a resize to as many pixels or more"
            )
        if self.multi_crop and self.resize is None:
            raise ValueError("multi_crop: got true without resize, want the size to which images are resized")


class TrainConfig(Settings):
    """All settings of a run; :meth:`of` also takes names, or mappings, for declarations."""

    network: Annotated[Network, SHORT]
    data: Annotated[Data, SHORT]
    loss: AnyLoss = CrossEntropy()
    metric: Literal["accuracy", "exact-match", "top-2"] = "accuracy"
    optimizer: AnyOptimizer = Adam(lr=3e-3)
    schedule: AnySchedule = OneCycle()
    epochs: Count = 2
    batch_size: Count = 64  # images a step, on all devices together
    seed: Index = 0  # of initial weights, order of images and augmentation
    runs: Count = 1  # number of runs, with seed, seed + 1 and so on
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"] = "32-true"  # mixed: autocast
    accelerator: str = "auto"  # as in Lightning, and devices and strategy
    devices: str = "1"
    strategy: str = "auto"
    workers: Index = 0  # processes that gather batches, at most one per core; 0 is fastest on a CPU
    checkpoint_every: Count = 200  # steps
    out: str = ""  # the folder of all results; runs/NETWORK-DATA if empty
    recipe: str = ""  # the source of the settings

    def __post_init__(self) -> None:
        if self.seed + self.runs - 1 > MOST_SEED:
            raise ValueError(f"seed: got {self.seed} with {self.runs} runs, want seeds of {MOST_SEED} or less")

    @classmethod
    def of(cls, **settings: Any) -> TrainConfig:
        """Return settings read from declarations, names or mappings, as in a recipe; SettingError in one line.

        >>> config = TrainConfig.of(network="digits", data="digits", optimizer={"name": "sgd", "lr": 0.1})
        >>> config.optimizer.momentum
        0.9
        """
        return fields.read(cls, settings)

    def changed(self, changes: Mapping[str, Any]) -> TrainConfig:
        """Return a copy with other values, given by paths: ``config.changed({"optimizer.lr": 0.01})``."""
        return fields.read(TrainConfig, fields.changed(fields.as_data(self), changes))

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.out or f"runs/{Path(self.recipe).stem or f'{self.network.name}-{self.data.name}'}")


def defaults() -> dict[str, Any]:
    """Return the settings that have defaults, as data."""
    every = fields.as_data(TrainConfig(Network("digits"), Data("digits")))
    return {name: value for name, value in every.items() if name not in ("network", "data")}


def runs_of(config: TrainConfig) -> list[TrainConfig]:
    """Return a configuration's runs, one per seed; several get folders ``seed-0`` and so on."""
    if config.runs == 1:
        return [config]
    seeds = range(config.seed, config.seed + config.runs)
    return [replace(config, seed=seed, runs=1, out=str(config.folder / f"seed-{seed}")) for seed in seeds]


def kept(folder: Path) -> TrainConfig:
    """Return the settings of the run in a folder, from its ``config.json``; RunError if it cannot be read."""
    path = folder / "config.json"
    try:
        settings = json.loads(path.read_text())
        if isinstance(settings, dict):
            settings.pop("versions", None)
        return fields.read(TrainConfig, settings)
    except (OSError, RecursionError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}); restart the run with --overwrite") from error


def differences(before: TrainConfig, after: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two runs differ, by paths, with both values, except those of :data:`WHERE`."""
    old, new = fields.flat(fields.as_data(before)), fields.flat(fields.as_data(after))
    # names first, since they change others
    names = sorted({*old, *new} - {*WHERE}, key=lambda name: (not name.endswith(".name"), name))
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}


def check_same(folder: Path, before: TrainConfig, after: TrainConfig) -> None:
    """Raise RunError if the run in a folder has other settings than the one that would resume it."""
    differ = differences(before, after)
    if differ:
        name, (there, wanted) = next(iter(differ.items()))
        more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
        raise RunError(
            f"{folder} holds a run with other settings: {name} is {there} there and {wanted} here{more}; "
            "give the same settings, or another folder"
        )
