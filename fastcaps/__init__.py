"""Fast capsule layers for PyTorch, with memory that does not explode.

``fastcaps.functional`` has the routings as functions, ``fastcaps.nn`` as modules, ``fastcaps.losses`` the losses,
``fastcaps.compat`` twins of published layers; ``fastcaps.backends`` says what runs where. Networks of the papers, data,
training and pictures are another package of the same repository, ``fastcaps_lab``.
Most modules are imported on first use, so that ``import fastcaps`` costs little beyond torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fastcaps import backends, functional
from fastcaps.backends import BackendError, backend
from fastcaps.checks import did_you_mean
from fastcaps.functional import Votes, Window, explain

if TYPE_CHECKING:
    from fastcaps import compat, losses, nn
    from fastcaps.compat.convert import convert
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
    "BackendError", "CapsNet", "ClassHead", "DynamicRouting", "EMRouting", "HeinsenRouting", "InvertedAttentionRouting",
    "PrimaryCapsules", "RoutingPool", "RoutingPool2d", "RoutingStack", "Votes", "Window", "__version__", "backend",
    "backends", "compat", "convert", "explain", "functional", "losses", "nn",
]  # fmt: skip

_MOVED = dict.fromkeys(("cli", "data", "demo", "diagnose", "encapnet", "models", "training", "viz"), "")
_MOVED |= dict.fromkeys(("CapConv2d", "CapFC"), "encapnet.")
"""What is in fastcaps_lab now, and in which of its modules."""


def _near(name: str) -> str:
    """Return the end of a message about an unknown name: the module that has it, or the nearest name here."""
    if name.isidentifier() and name[0] != "_" and find_spec(f"{__name__}.{name}") is None:  # no module on its way in
        for home in ("nn", "functional", "losses", "compat"):
            if name in import_module(f"{__name__}.{home}").__all__:
                return f" (it is fastcaps.{home}.{name})"
    return did_you_mean(name, __all__)


def _moved(name: str) -> str:
    return f"fastcaps.{name} is fastcaps_lab.{_MOVED[name]}{name} now: in the checkout run pip install ./lab"


class _Finder:
    """Answers imports of modules that have moved. It comes first, as folders that an update empties stay importable."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        package, _, moved = name.rpartition(".")
        if package == __name__ and moved in _MOVED:
            raise ImportError(_moved(moved), name=name)


sys.meta_path.insert(0, _Finder)


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        raise AttributeError(_moved(name), name=name)
    if name not in __all__:
        raise AttributeError(f"module 'fastcaps' has no attribute {name!r}{_near(name)}", name=name)
    if name == "convert" or name[0].isupper():
        return getattr(import_module(f"{__name__}.{'compat' if name == 'convert' else 'nn'}"), name)
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted(__all__)
