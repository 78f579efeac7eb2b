"""Training: recipes, losses, optimisers, schedules, and the trainer that runs them.

``config`` has all settings, ``loss`` and ``optimizer`` their parts, ``recipes`` and ``tables`` the papers' experiments
as YAML. ``data``, ``module``, ``callbacks``, ``run`` and ``reproduce`` need Lightning and are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastcaps_lab.training.config import Data, Network, TrainConfig
from fastcaps_lab.training.recipes import Recipe, recipe
from fastcaps_lab.training.settings import RunError

if TYPE_CHECKING:
    from fastcaps_lab.training.data import ImageData
    from fastcaps_lab.training.folder import versions
    from fastcaps_lab.training.module import CapsuleClassifier
    from fastcaps_lab.training.run import SeedsResult, TrainResult, build_network, train, train_seeds

__all__ = [
    "CapsuleClassifier", "Data", "ImageData", "Network", "Recipe", "RunError", "SeedsResult", "TrainConfig",
    "TrainResult", "build_network", "recipe", "train", "train_seeds", "versions",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(import_module(f"{__name__}.run"), name)
