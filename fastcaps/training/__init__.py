"""Training: recipes, losses, optimisers, schedules, and the trainer that runs them.

Modules: ``fields`` (settings as data), ``config`` (all settings), ``loss`` (with metrics), ``optimizer`` (with
schedules), ``data``, ``module`` (the LightningModule), ``callbacks``, ``folder`` (of a run), ``run``, ``files`` and
``recipes``; ``tables``, ``reproduce`` and ``figures`` for the papers' tables. Modules that need Lightning are imported
on first use, so that recipes can be read without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastcaps.checks import did_you_mean
from fastcaps.training.config import Data, Network, TrainConfig
from fastcaps.training.fields import RunError, SettingError
from fastcaps.training.recipes import Recipe, recipe

if TYPE_CHECKING:
    from fastcaps.training.data import ImageData
    from fastcaps.training.folder import versions
    from fastcaps.training.module import CapsuleClassifier
    from fastcaps.training.run import SeedsResult, TrainResult, build_network, quiet, train, train_seeds

__all__ = [
    "CapsuleClassifier", "Data", "ImageData", "Network", "Recipe", "RunError", "SeedsResult", "SettingError",
    "TrainConfig", "TrainResult", "build_network", "quiet", "recipe", "train", "train_seeds", "versions",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:  # the others need Lightning
        return getattr(import_module("fastcaps.training.run"), name)
    hint = did_you_mean(name, __all__)
    raise AttributeError(f"module 'fastcaps.training' has no attribute {name!r}{hint}", name=name)
