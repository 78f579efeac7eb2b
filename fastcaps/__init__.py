"""fastcaps: kernels and modules for capsule networks that never store a vote.

``fastcaps.functional`` has the routings as functions, ``fastcaps.nn`` as modules, ``fastcaps.models`` whole networks,
``fastcaps.losses`` what they are trained on, ``fastcaps.data`` the data sets, ``fastcaps.training`` what trains,
``fastcaps.compat`` layers of published codes, ``fastcaps.viz`` pictures; ``fastcaps.backends`` says what runs where.
Most modules are imported on first use, so that ``import fastcaps`` costs little beyond torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastcaps import backends, functional, ops
from fastcaps.backends import BackendError, backend
from fastcaps.functional import Window, explain

if TYPE_CHECKING:
    from fastcaps import data, losses, models, nn, training
    from fastcaps.diagnosis import diagnose
    from fastcaps.nn import (
        CapConv2d,
        CapFC,
        CapsNet,
        ClassHead,
        DynamicRouting,
        EMRouting,
        EquilibriumRouting,
        HeinsenRouting,
        InvertedAttentionRouting,
        PrimaryCapsules,
        RoutingPool,
        RoutingPool2d,
        RoutingStack,
    )
    from fastcaps.nn.convert import convert

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "CapConv2d",
    "CapFC",
    "CapsNet",
    "ClassHead",
    "DynamicRouting",
    "EMRouting",
    "EquilibriumRouting",
    "HeinsenRouting",
    "InvertedAttentionRouting",
    "PrimaryCapsules",
    "RoutingPool",
    "RoutingPool2d",
    "RoutingStack",
    "Window",
    "__version__",
    "backend",
    "backends",
    "convert",
    "data",
    "diagnose",
    "explain",
    "functional",
    "losses",
    "models",
    "nn",
    "ops",
    "training",
]

_LAZY = {"diagnose": f"{__name__}.diagnosis"} | dict.fromkeys(
    (
        "CapConv2d",
        "CapFC",
        "CapsNet",
        "ClassHead",
        "DynamicRouting",
        "EMRouting",
        "EquilibriumRouting",
        "HeinsenRouting",
        "InvertedAttentionRouting",
        "PrimaryCapsules",
        "RoutingPool",
        "RoutingPool2d",
        "RoutingStack",
        "convert",
    ),
    f"{__name__}.nn",
)
_LAZY_MODULES = ("compat", "data", "distributed", "losses", "models", "nn", "training", "viz")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name in _LAZY_MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'fastcaps' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LAZY_MODULES})
