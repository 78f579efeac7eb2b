"""Training: recipes, losses, optimisers, schedules, and the trainer that runs them.

One stem each: ``fields`` (settings as data), ``config`` (all of them), ``loss``, ``metric``, ``optimizer``,
``schedule``, ``data``, ``module`` (Lightning's view of a network), ``callbacks``, ``run`` (one run), ``seeds``
(several), ``recipes``; ``tables``, ``reproduce`` and ``figures`` make the papers' tables of them.
What needs Lightning is imported on first use, so that recipes can be read without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastcaps.training.config import Data, Network, TrainConfig
from fastcaps.training.fields import SettingError
from fastcaps.training.recipes import Recipe, recipe

if TYPE_CHECKING:
    from fastcaps.training.data import ImageData
    from fastcaps.training.module import CapsuleClassifier
    from fastcaps.training.run import RunError, TrainResult, build_network, quiet, train, versions
    from fastcaps.training.seeds import SeedsResult, train_seeds

__all__ = [
    "CapsuleClassifier",
    "Data",
    "ImageData",
    "Network",
    "Recipe",
    "RunError",
    "SeedsResult",
    "SettingError",
    "TrainConfig",
    "TrainResult",
    "build_network",
    "quiet",
    "recipe",
    "train",
    "train_seeds",
    "versions",
]

_LAZY = {
    **dict.fromkeys(("RunError", "TrainResult", "build_network", "quiet", "train", "versions"), "run"),
    **dict.fromkeys(("SeedsResult", "train_seeds"), "seeds"),
    "CapsuleClassifier": "module",
    "ImageData": "data",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"fastcaps.training.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'fastcaps.training' has no attribute {name!r}")
