"""Training a network on a data set, with Lightning: what ``fastcaps train`` and ``fastcaps demo`` run.

One call does everything::

    from fastcaps.training import TrainConfig, train

    result = train(TrainConfig(network="tsai-iar-simple-c10", data="mnist", data_dir="path/to/data", out="runs/mnist"))

A run writes into its ``out`` folder: ``config.json`` (every setting and version), ``metrics.csv`` (a row per epoch),
``tensorboard/``, ``last.ckpt`` (replaced as a whole every ``checkpoint_every`` steps and after every epoch) and
``result.json``. A run that was killed goes on from ``last.ckpt`` in the middle of its epoch: order of the images,
random state, optimiser and schedule are those that the run would have had, so on the CPU it ends in the same weights.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import pickle
import platform
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import tensorboard  # noqa: F401  (Lightning misses it only when a run begins)
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from fastcaps import models
from fastcaps.callbacks import CheckpointWriter, MetricsWriter, Report, read_metrics
from fastcaps.data import ShuffledBatches, Splits, load
from fastcaps.data.targets import cross_entropy

OPTIMIZERS = ("adam", "adamw", "sgd")
SCHEDULES = ("one-cycle", "cosine", "paper", "constant")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true")
RECIPES: dict[str, dict[str, Any]] = {
    # a few epochs on any machine
    "quick": {
        "epochs": 2,
        "batch_size": 64,
        "optimizer": "adam",
        "lr": 3e-3,
        "schedule": "one-cycle",
        "weight_decay": 0.0,
    },
    # Tsai et al. 2020, A.1: a tenth of the rate after 150 and 250 of 350 epochs; momentum and decay from their code
    "paper": {
        "epochs": 350,
        "batch_size": 128,
        "optimizer": "sgd",
        "lr": 0.1,
        "schedule": "paper",
        "weight_decay": 5e-4,
    },
}


@dataclass
class TrainConfig:
    """Every setting of a run.

    Attributes
    ----------
    network : str
        A name of :func:`fastcaps.models.names`. Channels, image size and number of classes are taken from the data.
    data, data_dir : str
        A name of :func:`fastcaps.data.names`, and where its files lie.
    out : str
        The folder that receives everything.
    epochs, batch_size : int
        Passes over the training images, and images a step (on each device).
    optimizer, lr, weight_decay, momentum
        One of ``OPTIMIZERS`` and its settings; ``momentum`` is for SGD.
    schedule : str
        One of ``SCHEDULES``. ``paper`` divides the rate by 10 after 3/7 and 5/7 of the run: 150 and 250 of 350 epochs.
    overrides : dict
        Passed on to :func:`fastcaps.models.create`, e.g. ``{"iterations": 3, "routing": "sequential"}``.
    seed : int
        Decides initial weights, order of images and augmentation.
    precision : str
        One of ``PRECISIONS``; ``mixed`` means autocast.
    accelerator, devices, strategy : str
        As Lightning takes them, e.g. ``gpu``, ``4``, ``ddp``.
    augment, flip : bool, optional
        As :func:`fastcaps.data.load` takes them; by default CIFAR is cropped and flipped, smallNORB cropped.
    limit : int, optional
        Use only the first training images, for a quick try.
    workers : int
        Processes that prepare batches. The data lie in memory, so 0 is fastest on a CPU.
    checkpoint_every : int
        Steps between two checkpoints.
    """

    network: str
    data: str
    out: str
    data_dir: str | None = None
    epochs: int = RECIPES["quick"]["epochs"]
    batch_size: int = RECIPES["quick"]["batch_size"]
    optimizer: str = RECIPES["quick"]["optimizer"]
    lr: float = RECIPES["quick"]["lr"]
    weight_decay: float = RECIPES["quick"]["weight_decay"]
    momentum: float = 0.9
    schedule: str = RECIPES["quick"]["schedule"]
    overrides: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    precision: str = "32-true"
    accelerator: str = "auto"
    devices: str = "1"
    strategy: str = "auto"
    augment: bool | None = None
    flip: bool | None = None
    limit: int | None = None
    workers: int = 0
    checkpoint_every: int = 200

    def validate(self) -> None:
        """Raise ValueError, naming the setting, if one is out of range."""
        for name, allowed in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES), ("precision", PRECISIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, want one of {', '.join(allowed)}")
        for name in ("epochs", "batch_size", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, want 1 or more")
        for name in ("weight_decay", "momentum", "workers", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, want 0 or more")
        if not self.lr > 0 or not math.isfinite(self.lr):
            raise ValueError(f"lr: got {self.lr}, want a finite number above 0")
        if self.network not in models.names():
            raise ValueError(f"network: got {self.network!r}, want one of {', '.join(models.names())}")


@dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    Attributes
    ----------
    network : torch.nn.Module
        The trained network, in evaluation mode, on the CPU.
    test_accuracy, test_loss : float
        Of the last epoch's weights over the whole test set; the accuracy is a share of 1.
    history : list of dict
        A row per epoch, as in ``metrics.csv``.
    out : Path
        The folder of the run.
    is_main : bool
        Whether this is the first of several processes: the one that should speak.
    """

    network: nn.Module
    test_accuracy: float
    test_loss: float
    history: list[dict[str, float]]
    out: Path
    is_main: bool = True


class RunError(RuntimeError):
    """The folder of a run cannot serve: it holds another run already, or a checkpoint that cannot be read."""


def schedule_factor(schedule: str, step: int, total: int) -> float:
    """The learning rate at a step, as a share of ``lr``.

    ``one-cycle`` warms up linearly over the first fifth and falls to zero along a cosine; ``cosine`` only falls.
    """
    done = min(step / max(total, 1), 1.0)
    if schedule == "one-cycle":
        warm = 0.2
        return 0.04 + 0.96 * done / warm if done < warm else 0.5 * (1 + math.cos(math.pi * (done - warm) / (1 - warm)))
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    if schedule == "paper":
        return 0.1 ** ((done >= 150 / 350) + (done >= 250 / 350))
    return 1.0


class ImageData(pl.LightningDataModule):
    """Lightning's view of a :class:`fastcaps.data.Splits`; remembers how far its epoch had come."""

    def __init__(self, splits: Splits, batch_size: int, *, seed: int = 0, workers: int = 0) -> None:
        super().__init__()
        self.splits = splits
        self.batch_size = batch_size
        self.seed = seed
        self.workers = workers
        self._epoch = self._start = 0

    def _loader(self, dataset: Any, batches: Any) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_sampler=batches,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            # its own generator: a loader takes a seed when iteration begins, and a run that resumes begins once more
            generator=torch.Generator().manual_seed(self.seed),
        )

    def steps_per_epoch(self) -> int:
        """Training batches of each rank in one epoch."""
        world_size = self.trainer.world_size if self.trainer is not None else 1
        return len(ShuffledBatches(len(self.splits.train), self.batch_size, self.seed, world_size=world_size))

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        batches = ShuffledBatches(
            len(self.splits.train),
            self.batch_size,
            self.seed,
            epoch=self._epoch,
            start=self._start,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
        )
        return self._loader(self.splits.train, batches)

    def val_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        mine = range(self.trainer.global_rank, len(self.splits.test), self.trainer.world_size)
        size = max(self.batch_size, 128)
        return self._loader(self.splits.test, [list(mine[i : i + size]) for i in range(0, len(mine), size)])

    def state_dict(self) -> dict[str, Any]:
        assert self.trainer is not None
        epoch, start = divmod(self.trainer.global_step, self.steps_per_epoch())
        return {"epoch": epoch, "start": start, "steps_per_epoch": self.steps_per_epoch()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["steps_per_epoch"] != self.steps_per_epoch():
            raise ValueError(
                f"the checkpoint has {state_dict['steps_per_epoch']} steps an epoch and this run "
                f"{self.steps_per_epoch()}; "
                "resume with the data, batch size and number of devices that the run began with"
            )
        self._epoch, self._start = state_dict["epoch"], state_dict["start"]


class CapsuleClassifier(pl.LightningModule):
    """A network of class logits; cross-entropy as the targets ask for it, accuracy over whole epochs."""

    def __init__(self, network: nn.Module, config: TrainConfig) -> None:
        super().__init__()
        self.network = network
        self.config = config
        self.train_loss, self.train_accuracy = MeanMetric(), MeanMetric()
        self.test_loss, self.test_accuracy = MeanMetric(), MeanMetric()
        for metric in (self.train_loss, self.train_accuracy):
            metric.persistent(True)  # in the checkpoint: an epoch resumed in its middle still reports all of itself

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[B, classes]`` of images ``[B, channels, height, width]``."""
        return self.network(images)

    def _step(self, batch: tuple[Tensor, Tensor], loss_mean: MeanMetric, accuracy_mean: MeanMetric) -> Tensor:
        images, labels = batch
        logits = self(images.to(self.dtype))
        loss, right = cross_entropy(logits, labels)
        loss_mean.update(loss.detach(), len(labels))
        accuracy_mean.update(right.float().mean(), len(labels))
        return loss

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        loss = self._step(batch, self.train_loss, self.train_accuracy)
        self.log("step/train_loss", loss.detach())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        self._step(batch, self.test_loss, self.test_accuracy)

    def on_validation_epoch_end(self) -> None:
        self.log_dict({"test_loss": self.test_loss.compute(), "test_accuracy": self.test_accuracy.compute()})
        self.test_loss.reset()
        self.test_accuracy.reset()

    def on_train_epoch_end(self) -> None:
        self.log_dict({"train_loss": self.train_loss.compute(), "train_accuracy": self.train_accuracy.compute()})
        self.train_loss.reset()
        self.train_accuracy.reset()

    def configure_optimizers(self) -> Any:
        c, parameters = self.config, self.network.parameters()
        optimizer: torch.optim.Optimizer
        if c.optimizer == "sgd":
            optimizer = torch.optim.SGD(parameters, lr=c.lr, momentum=c.momentum, weight_decay=c.weight_decay)
        elif c.optimizer == "adamw":
            optimizer = torch.optim.AdamW(parameters, lr=c.lr, weight_decay=c.weight_decay)
        else:
            optimizer = torch.optim.Adam(parameters, lr=c.lr, weight_decay=c.weight_decay)
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule_factor(c.schedule, step, total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["random_state"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # only the first rank's state is saved; other ranks must not all draw the same augmentation
        if self.trainer.world_size == 1:
            torch.set_rng_state(checkpoint["random_state"].cpu())


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what Lightning says to its own developers, for as long as the block lasts."""
    names = ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric")
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in names}
    messages = (
        ".*does not have many workers.*",
        ".*smaller than the logging interval.*",
        ".*ended before the epoch ended and your dataloader is not resumable.*",  # ours resumes by its own state
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*GPU available but not used.*",
        ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
        ".*It is recommended to use `self.log.*sync_dist=True`.*",  # the means are synchronised before they are logged
        ".*Consider setting `persistent_workers=True`.*",
    )
    try:
        with warnings.catch_warnings():
            for message in messages:
                warnings.filterwarnings("ignore", message=message)
            for logger in levels:
                logger.setLevel(logging.ERROR)
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def _processor() -> str:
    """The processor's name as its maker writes it, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions() -> dict[str, str]:
    """What a figure depends on: versions of everything, and the machine."""
    import lightning

    import fastcaps

    return {
        "fastcaps": getattr(fastcaps, "__version__", "unknown"),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "python": platform.python_version(),
        "machine": f"{_processor()}, {torch.get_num_threads()} threads",
    }


def build_network(config: TrainConfig, splits: Splits) -> nn.Module:
    """The network of a configuration, sized for the data.

    Raises
    ------
    ValueError
        If the network cannot take images of this size or does not know an override; the message says which.
    """
    overrides = {
        "in_channels": splits.in_channels,
        "image_size": splits.image_size,
        "classes": len(splits.classes),
        **config.overrides,
    }
    try:
        return models.create(config.network, **overrides)
    except (TypeError, ValueError) as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in overrides.items())
        raise ValueError(f"network {config.network} cannot be built for {config.data} ({shown}): {error}") from error


def _prepare_folder(out: Path, resume: bool, overwrite: bool) -> None:
    """Make the folder of a run, or see that the one that is there may be used."""
    out.mkdir(parents=True, exist_ok=True)
    if resume or not (out / "config.json").exists():
        return
    if not overwrite:
        raise RunError(f"{out} holds a run already: go on with it (--resume), replace it (--overwrite) or take another")
    for name in ("last.ckpt", "metrics.csv", "result.json"):
        (out / name).unlink(missing_ok=True)
    for events in (out / "tensorboard").glob("events.out.tfevents.*"):
        events.unlink()


def _make_trainer(config: TrainConfig, out: Path, callbacks: list[pl.Callback]) -> pl.Trainer:
    """Lightning's Trainer; what it refuses becomes a ValueError that shows what was asked for."""
    try:
        return pl.Trainer(
            accelerator=config.accelerator,
            devices=int(config.devices) if config.devices.lstrip("-").isdigit() else config.devices,
            strategy=config.strategy,
            precision=config.precision,  # type: ignore[arg-type]
            max_epochs=config.epochs,
            logger=TensorBoardLogger(out, name="", version="tensorboard"),
            callbacks=callbacks,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,  # ShuffledBatches knows its rank
            num_sanity_val_steps=0,
            log_every_n_steps=10,
        )
    except (MisconfigurationException, RuntimeError, TypeError, ValueError) as error:
        asked = f"accelerator {config.accelerator!r}, devices {config.devices!r}, strategy {config.strategy!r}"
        raise ValueError(f"{asked}, precision {config.precision!r}: {error}") from error


@quiet()
def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    report: Report | None = None,
    splits: Splits | None = None,
) -> TrainResult:
    """Train a network and test it after every epoch.

    Parameters
    ----------
    config : TrainConfig
        The settings.
    resume : bool
        Go on from ``config.out``'s checkpoint, where there is one. A finished run is only reported again.
    overwrite : bool
        Replace a run that ``config.out`` holds already.
    report : Report, optional
        What the person at the terminal sees; a progress bar (or plain lines where there is no terminal) by default.
    splits : Splits, optional
        The data, if they have been loaded already.

    Returns
    -------
    TrainResult
        The accuracy is that of the last epoch: the test set chooses nothing.

    Raises
    ------
    ValueError, DataError
        If a setting, the data, or their combination is wrong; before anything is computed.
    RunError
        If ``config.out`` holds another run, or its checkpoint cannot be read.
    """
    config.validate()
    splits = splits or load(config.data, config.data_dir, augment=config.augment, flip=config.flip, limit=config.limit)
    pl.seed_everything(config.seed, workers=True, verbose=False)
    network = build_network(config, splits)
    out = Path(config.out)
    checkpoint = out / "last.ckpt"
    module = CapsuleClassifier(network, config)
    data = ImageData(splits, config.batch_size, seed=config.seed, workers=config.workers)
    metrics = MetricsWriter(out / "metrics.csv")
    callbacks = [metrics, CheckpointWriter(checkpoint, config.checkpoint_every), report or Report()]
    trainer = _make_trainer(config, out, callbacks)
    if trainer.is_global_zero:
        _prepare_folder(out, resume, overwrite)
        settings = {**dataclasses.asdict(config), "versions": versions()}
        (out / "config.json").write_text(json.dumps(settings, indent=2, default=repr) + "\n")
    began = time.perf_counter()
    going_on = resume and checkpoint.is_file()
    try:
        trainer.fit(module, datamodule=data, ckpt_path=str(checkpoint) if going_on else None, weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        if going_on and trainer.global_step == 0:
            raise RunError(f"{checkpoint} cannot be resumed from: {error}") from error
        raise
    history = metrics.rows or read_metrics(metrics.path)  # processes that Lightning spawned keep their rows
    last = history[-1]
    network = module.network.cpu().eval()
    is_main = trainer.is_global_zero
    result = TrainResult(network, last["test_accuracy"], last["test_loss"], history, out, is_main)
    if trainer.is_global_zero:
        summary = {
            "test_accuracy": result.test_accuracy,
            "test_loss": result.test_loss,
            "epochs": len(history),
            "seconds_per_epoch": [row["seconds"] for row in history],
            "seconds_this_call": time.perf_counter() - began,
            "parameters": sum(p.numel() for p in network.parameters()),
            "seed": config.seed,
            "versions": versions(),
        }
        (out / "result.json").write_text(json.dumps(summary, indent=2) + "\n")
    return result
