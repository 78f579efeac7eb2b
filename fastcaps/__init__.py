"""Fast capsule layers for PyTorch, with memory that does not explode.

``fastcaps.functional`` has the routings as functions, ``fastcaps.nn`` as modules, ``fastcaps.models`` whole networks,
``fastcaps.losses`` the losses, ``fastcaps.data`` the data sets, ``fastcaps.training`` the trainer,
``fastcaps.compat`` twins of published layers, ``fastcaps.encapnet`` EncapNet, ``fastcaps.viz`` pictures;
``fastcaps.backends`` says what runs where.
Most modules are imported on first use, so that ``import fastcaps`` costs little beyond torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fastcaps import backends, functional
from fastcaps.backends import BackendError, backend
from fastcaps.checks import did_you_mean
from fastcaps.functional import Votes, Window, explain

if TYPE_CHECKING:
    from fastcaps import compat, data, encapnet, losses, models, nn, training, viz
    from fastcaps.compat.convert import convert
    from fastcaps.diagnosis import diagnose
    from fastcaps.encapnet import CapConv2d, CapFC
    from fastcaps.nn import (
        CapsNet,
        ClassHead,
        DynamicRouting,
        EMRouting,
        HeinsenRouting,
        InvertedAttentionRouting,
        PrimaryCapsules,
        RoutingPool,
        RoutingPool2d,
        RoutingStack,
    )

__version__ = "0.1.0"

__all__ = [
    "BackendError", "CapConv2d", "CapFC", "CapsNet", "ClassHead", "DynamicRouting", "EMRouting", "HeinsenRouting",
    "InvertedAttentionRouting", "PrimaryCapsules", "RoutingPool", "RoutingPool2d", "RoutingStack", "Votes",
    "Window", "__version__", "backend", "backends", "compat", "convert", "data", "diagnose", "encapnet", "explain",
    "functional", "losses", "models", "nn", "training", "viz",
]  # fmt: skip

_HOMES = {"CapConv2d": "encapnet", "CapFC": "encapnet", "convert": "compat", "diagnose": "diagnosis"}  # or else nn


def _near(name: str) -> str:
    """Return the end of a message about an unknown name: the module that has it, or the nearest name here."""
    if name.isidentifier() and name[0] != "_" and find_spec(f"{__name__}.{name}") is None:  # no module on its way in
        for home in ("nn", "functional", "losses", "models", "compat"):
            if name in import_module(f"{__name__}.{home}").__all__:
                return f" (it is fastcaps.{home}.{name})"
    return did_you_mean(name, __all__)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fastcaps' has no attribute {name!r}{_near(name)}", name=name)
    if name in _HOMES or name[0].isupper():
        return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'nn')}"), name)
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted(__all__)
