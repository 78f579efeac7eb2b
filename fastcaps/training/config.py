"""Every setting of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from fastcaps import models
from fastcaps.checks import did_you_mean
from fastcaps.training.fields import (
    SHORT,
    STRICT,
    Count,
    Flag,
    Index,
    NotNegative,
    RunError,
    SettingError,
    Settings,
    as_data,
    changed,
    flat,
    read,
)
from fastcaps.training.loss import AnyLoss, CrossEntropy
from fastcaps.training.optimizer import Adam, AnyOptimizer
from fastcaps.training.schedule import AnySchedule, OneCycle

WHERE = (
    *("out", "recipe", "data.dir", "data.options.transformer"),
    *("devices", "accelerator", "strategy", "workers", "checkpoint_every"),
)
"""Settings that say where and how fast a run computes. They may change when it goes on; all others must not."""

FOLLOW = ("name", "device", "dtype", "classes", "in_channels", "image_size", "layers", "embedding")
"""Arguments of :func:`fastcaps.models.create` that follow from other settings or from the data."""
MOST_SEED = 2**32 - 1  # NumPy takes no more
MOST_ITERATIONS = 10_000  # of routing: memory and time grow with them, and no paper makes more than tens
MOST_PIXELS = 4096  # of a padding, or a side of a resized image


@dataclass(frozen=True, config=STRICT)
class Network(Settings):
    """Which network; channels, image size and number of classes are taken from the data."""

    name: str  # of fastcaps.models.names()
    options: Mapping[str, Any] = field(default_factory=dict)  # passed on to fastcaps.models.create

    def __post_init__(self) -> None:
        if self.name not in models.names():
            hint = did_you_mean(self.name, models.names(), most=3)
            raise ValueError(f"name: got {self.name!r}{hint}, want a network of fastcaps train --list")
        for name in FOLLOW:
            if name in self.options:
                raise ValueError(f"options.{name}: got {self.options[name]!r}, want none: it follows from the rest")
        iterations = self.options.get("iterations")
        if isinstance(iterations, int) and iterations > MOST_ITERATIONS:
            raise ValueError(f"options.iterations: got {iterations}, want {MOST_ITERATIONS} or fewer")


@dataclass(frozen=True, config=STRICT)
class Data(Settings):
    """Which data, and what is done to them.

    By default CIFAR is cropped and flipped at random and nothing else is; ``pad`` and ``resize`` (one of the two) take
    the place of ``augment``. Without ``crop``, crops have the images' own size, and test images are left as they are,
    but for ``multi_crop``: with it the class probabilities of the corners and the middle of the resized images, and
    with ``flip`` of their mirror images, are averaged.
    """

    name: str  # of fastcaps.data.names()
    dir: str | None = None  # where its files lie
    augment: Flag | None = None  # as fastcaps.data.load takes it, and flip
    flip: Flag | None = None
    pad: Annotated[Index, Field(le=MOST_PIXELS)] | None = None  # by so many pixels, and crop at random
    resize: Annotated[Count, Field(le=MOST_PIXELS)] | None = None  # to so many pixels, and crop at random
    crop: Count | None = None  # the size of these crops, and of the middle of test images, which are then resized too
    multi_crop: Flag = False
    jitter: Flag = False  # disturb the colours of training images
    mixup: NotNegative = 0.0  # the Beta distribution's parameter for blending images (or embeddings) and targets
    validation: Index = 0  # how many training images are held out; the best epoch is chosen by them
    limit: Count | None = None  # use only the first training images, for a quick try
    options: Mapping[str, Any] = field(default_factory=dict)  # of fastcaps.data.load: image_size, transformer

    def __post_init__(self) -> None:
        if self.pad is not None and self.resize is not None:
            raise ValueError(f"resize: got {self.resize} beside pad {self.pad}, want one of them")
        if self.crop is not None and not self.crop <= (self.resize or 0):
            raise ValueError(
                f"crop: got {self.crop} with resize {self.resize}, want a resize to as many pixels or more"
            )
        if self.multi_crop and self.resize is None:
            raise ValueError("multi_crop: got true without resize, want the size of the images that crops are cut from")


@dataclass(frozen=True, config=STRICT)
class TrainConfig(Settings):
    """Every setting of a run; :meth:`of` also takes names, or mappings, for declarations."""

    network: Annotated[Network, SHORT]
    data: Annotated[Data, SHORT]
    loss: AnyLoss = CrossEntropy()
    metric: Literal["accuracy", "exact-match", "top-2"] = "accuracy"  # how right answers are counted
    optimizer: AnyOptimizer = Adam(lr=3e-3)
    schedule: AnySchedule = OneCycle()
    epochs: Count = 2
    batch_size: Count = 64  # images a step, on all devices together
    seed: Index = 0  # decides initial weights, order of images and augmentation
    runs: Count = 1  # how many: the first with seed, the next with the seed after it, and so on
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"] = "32-true"  # mixed: autocast
    accelerator: str = "auto"  # as Lightning takes it, as do devices and strategy
    devices: str = "1"
    strategy: str = "auto"
    workers: Index = 0  # processes that gather batches, one a core at most; data lie in memory: 0 is fastest on a CPU
    checkpoint_every: Count = 200  # steps
    out: str = ""  # the folder that receives everything; runs/NETWORK-DATA if empty
    recipe: str = ""  # where the settings came from

    def __post_init__(self) -> None:
        if self.seed + self.runs - 1 > MOST_SEED:
            raise ValueError(f"seed: got {self.seed} with {self.runs} runs, want seeds of {MOST_SEED} or less")

    @classmethod
    def of(cls, **settings: Any) -> TrainConfig:
        """Read settings: declarations, names or mappings, as a recipe has them; ValueError in one line.

        >>> config = TrainConfig.of(network="digits", data="digits", optimizer={"name": "sgd", "lr": 0.1})
        >>> config.optimizer.momentum
        0.9
        """
        return read(cls, settings)

    def changed(self, changes: Mapping[str, Any]) -> TrainConfig:
        """A copy with other values, given by paths: ``config.changed({"optimizer.lr": 0.01})``."""
        return read(TrainConfig, changed(as_data(self), changes))

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return Path(self.out or f"runs/{Path(self.recipe).stem or f'{self.network.name}-{self.data.name}'}")


def defaults() -> dict[str, Any]:
    """The settings that have defaults, as data."""
    every = as_data(TrainConfig(Network("digits"), Data("digits")))
    return {name: value for name, value in every.items() if name not in ("network", "data")}


def runs_of(config: TrainConfig) -> list[TrainConfig]:
    """The runs that a configuration stands for: one a seed, several in folders ``seed-0`` and so on."""
    seeds = range(config.seed, config.seed + config.runs)
    folder = config.folder
    several = [replace(config, seed=seed, runs=1, out=str(folder / f"seed-{seed}")) for seed in seeds]
    return several if config.runs > 1 else [config]


def kept(folder: Path) -> TrainConfig:
    """The settings of the run in a folder, from its ``config.json``; SettingError if it cannot be read."""
    path = folder / "config.json"
    try:
        settings = json.loads(path.read_text())
        if isinstance(settings, dict):
            settings.pop("versions", None)
        return read(TrainConfig, settings)
    except (OSError, RecursionError, ValueError) as error:
        raise SettingError(f"{path} cannot be read ({error}); begin the run anew with --overwrite") from error


def differences(before: TrainConfig, after: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The settings in which two runs differ, by paths, with both values; those of :data:`WHERE` are left out."""
    old, new = flat(as_data(before)), flat(as_data(after))
    # names first: others differ for their sake
    names = sorted({*old, *new} - {*WHERE}, key=lambda name: (not name.endswith(".name"), name))
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}


def check_same(folder: Path, before: TrainConfig, after: TrainConfig) -> None:
    """Raise RunError if the run in a folder has other settings than one that would go on with it."""
    differ = differences(before, after)
    if differ:
        name, (there, wanted) = next(iter(differ.items()))
        more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
        raise RunError(
            f"{folder} holds a run with other settings: {name} is {there} there and {wanted} here{more}; "
            "give the same settings, or another folder"
        )
