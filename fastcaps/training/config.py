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
    SettingError,
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
MOST_SEED = 2**32 - 1
"""NumPy takes no more."""
MOST_ITERATIONS = 10_000
"""The most routing iterations: memory and time grow with them, and no paper makes more than tens."""
MOST_PIXELS = 4096
"""The largest padding, and the largest side of a resized image."""


@dataclass(frozen=True, config=STRICT)
class Network:
    """Which network.

    Attributes
    ----------
    name : str
        A name of :func:`fastcaps.models.names`. Channels, image size and number of classes are taken from the data.
    options : mapping
        Passed on to :func:`fastcaps.models.create`, e.g. ``{"iterations": 3, "routing": "sequential"}``.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

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
class Data:
    """Which data, and what is done to them.

    Attributes
    ----------
    name, dir : str
        A name of :func:`fastcaps.data.names`, and where its files lie.
    augment, flip : bool, optional
        As :func:`fastcaps.data.load` takes them; by default CIFAR is cropped and flipped at random and nothing else is.
    pad : int, optional
        Pad training images by so many pixels and crop them at random, in the place of ``augment``.
    resize : int, optional
        Resize training images to so many pixels and crop them at random, in the place of ``augment``.
    crop : int, optional
        The size of these crops; test images are then resized too, and their middle is cut out. Without it crops have
        the images' own size, and test images are left as they are, but for ``multi_crop``.
    multi_crop : bool
        Test on the corners and the middle of the resized images, and with ``flip`` on their mirror images: the class
        probabilities of the five or ten are averaged. It needs ``resize``.
    jitter : bool
        Disturb the colours of training images.
    mixup : float
        The Beta distribution's parameter for blending training images (of texts: embeddings) and their targets; 0 for
        no mixup.
    validation : int
        How many training images are held out; the best epoch is chosen by them.
    limit : int, optional
        Use only the first training images, for a quick try.
    options : mapping
        Further arguments of :func:`fastcaps.data.load`: ``image_size`` of a folder, ``transformer`` for texts.
    """

    name: str
    dir: str | None = None
    augment: Flag | None = None
    flip: Flag | None = None
    pad: Annotated[Index, Field(le=MOST_PIXELS)] | None = None
    resize: Annotated[Count, Field(le=MOST_PIXELS)] | None = None
    crop: Count | None = None
    multi_crop: Flag = False
    jitter: Flag = False
    mixup: NotNegative = 0.0
    validation: Index = 0
    limit: Count | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

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
class TrainConfig:
    """Every setting of a run.

    Attributes
    ----------
    network, data, loss, optimizer, schedule
        Declarations; :meth:`of` also takes their names, or mappings.
    metric : str
        How right answers are counted (:class:`fastcaps.training.metric.right`).
    epochs, batch_size : int
        Passes over the training images, and images a step: on all devices together.
    seed : int
        Decides initial weights, order of images and augmentation.
    runs : int
        How many runs: the first with ``seed``, the next with the seed after it, and so on.
    precision : str
        ``mixed`` means autocast.
    accelerator, devices, strategy : str
        As Lightning takes them, e.g. ``gpu``, ``4``, ``ddp``.
    workers : int
        Processes that gather what batches are made of, one a core at most. The data lie in memory, so 0 is fastest on a
        CPU.
    checkpoint_every : int
        Steps between two checkpoints.
    out : str
        The folder that receives everything; ``runs/NETWORK-DATA`` if empty.
    recipe : str
        Where the settings came from.
    """

    network: Annotated[Network, SHORT]
    data: Annotated[Data, SHORT]
    loss: AnyLoss = CrossEntropy()
    metric: Literal["accuracy", "exact-match", "top-2"] = "accuracy"
    optimizer: AnyOptimizer = Adam(lr=3e-3)
    schedule: AnySchedule = OneCycle()
    epochs: Count = 2
    batch_size: Count = 64
    seed: Index = 0
    runs: Count = 1
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"] = "32-true"
    accelerator: str = "auto"
    devices: str = "1"
    strategy: str = "auto"
    workers: Index = 0
    checkpoint_every: Count = 200
    out: str = ""
    recipe: str = ""

    def __post_init__(self) -> None:
        if self.seed + self.runs - 1 > MOST_SEED:
            raise ValueError(f"seed: got {self.seed} with {self.runs} runs, want seeds of {MOST_SEED} or less")

    @classmethod
    def of(cls, **settings: Any) -> TrainConfig:
        """Read settings: declarations, names or mappings, as a recipe has them.

        Raises
        ------
        ValueError
            One line: the field, what came and what is wanted.

        Examples
        --------
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
    """The settings of the run in a folder, from its ``config.json``.

    Raises
    ------
    SettingError
        If the file cannot be read.
    """
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
    names = sorted({*old, *new} - {*WHERE})
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}
