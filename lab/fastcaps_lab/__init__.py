"""The laboratory of fastcaps: what trains, reads data, draws, and repeats the papers' experiments.

``fastcaps_lab.models`` has the papers' networks, ``fastcaps_lab.encapnet`` EncapNet, ``fastcaps_lab.data`` the data
sets, ``fastcaps_lab.training`` the trainer with recipes and tables, ``fastcaps_lab.viz`` pictures,
``fastcaps_lab.diagnose`` what happens inside a network, ``fastcaps_lab.cli`` the ``fastcaps`` command. Modules are
imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastcaps_lab import cli, data, encapnet, models, training, viz
    from fastcaps_lab.diagnosis import diagnose

__all__ = ["cli", "data", "diagnose", "encapnet", "models", "training", "viz"]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return (
        import_module(f"{__name__}.diagnosis").diagnose if name == "diagnose" else import_module(f"{__name__}.{name}")
    )
