"""Training: recipes, losses, optimisers, schedules, and the trainer that runs them.

Modules: ``fields`` (settings as data), ``config`` (all settings), ``loss`` (with metrics), ``optimizer`` (with
schedules), ``data``, ``module`` (the LightningModule), ``callbacks``, ``folder`` (of a run), ``run``, ``files`` and
``recipes``; ``tables``, ``reproduce`` and ``figures`` for the papers' tables. Modules that need Lightning are imported
on first use, so that recipes can be read without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastcaps_lab.checks import did_you_mean
from fastcaps_lab.training.config import Data, Network, TrainConfig
from fastcaps_lab.training.fields import RunError, SettingError
from fastcaps_lab.training.recipes import Recipe, recipe

if TYPE_CHECKING:
    from fastcaps_lab.training.data import ImageData
    from fastcaps_lab.training.folder import versions
    from fastcaps_lab.training.module import CapsuleClassifier
    from fastcaps_lab.training.run import SeedsResult, TrainResult, build_network, quiet, train, train_seeds

__all__ = [
    "CapsuleClassifier", "Data", "ImageData", "Network", "Recipe", "RunError", "SeedsResult", "SettingError",
    "TrainConfig", "TrainResult", "build_network", "quiet", "recipe", "train", "train_seeds", "versions",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:  # the others need Lightning
        return getattr(import_module("fastcaps_lab.training.run"), name)
    hint = did_you_mean(name, __all__)
    raise AttributeError(f"module 'fastcaps_lab.training' has no attribute {name!r}{hint}", name=name)
