"""Networks by name: ``fastcaps.models.create("tsai-iar-resnet-c10")``.

A file a paper: each has its networks as data, in ``NETWORKS``. docs/networks.md lists all of them, with their sources
and numbers of parameters, and says what is our reading.
"""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import nn

from fastcaps.checks import did_you_mean
from fastcaps.models.layers import BasicBlock
from fastcaps.models.networks import CNNConfig, Config, NetworkConfig, override

__all__ = [
    "BasicBlock",
    "CNNConfig",
    "Config",
    "NetworkConfig",
    "config",
    "create",
    "names",
    "register",
]

PAPERS = (
    *(f"{__name__}.{paper}" for paper in ("tsai", "sabour", "hinton", "heinsen", "zhao", "li", "ours")),
    f"{__package__.rpartition('.')[0]}.encapnet.networks",  # whatever name the package goes by
)
"""Modules with a ``NETWORKS``; a new one is entered here."""

_NETWORKS: dict[str, Config] = {}


def register(name: str, config: Config) -> None:
    """Give a network a name, which :func:`create` shall know; ValueError if it is taken.

    A configuration is a frozen dataclass with a method ``build``; its fields are the overrides.
    """
    if name in _NETWORKS:
        raise ValueError(f"name must be a new one, got {name!r}, which is taken")
    _NETWORKS[name] = config


for _paper in PAPERS:
    for _name, _config in import_module(_paper).NETWORKS.items():
        register(_name, _config)


def names() -> list[str]:
    """The names that :func:`create` knows."""
    return sorted(_NETWORKS)


def config(name: str, **overrides: Any) -> Any:
    """The configuration of the network ``name``, with ``overrides`` in place: a :class:`NetworkConfig`, a
    :class:`CNNConfig` or one of its own. ValueError if there is none, TypeError if it does not know an override.
    """
    if name not in _NETWORKS:
        hint = did_you_mean(name, _NETWORKS, most=3)
        raise ValueError(f"no network is called {name!r}{hint}, fastcaps.models.names() lists all")
    return override(_NETWORKS[name], overrides)


def create(
    name: str, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None, **overrides: Any
) -> nn.Module:
    """Build the network ``name``, freshly drawn.

    Parameters
    ----------
    name : str
        One of :func:`names`.
    device, dtype : optional
        Where its parameters lie (drawn there), and what they are.
    **overrides
        Any field of its configuration: in_channels, image_size, classes, iterations, routing... Of a
        :class:`NetworkConfig` also what all its routing layers know and the network does not fix: layer_norm, dropout,
        compete, prior, start...; of a :class:`CNNConfig` with routing as pooling: detach, dim, iterations, sharpness.

    Returns
    -------
    Module
        A :class:`~fastcaps.nn.CapsNet` from a :class:`NetworkConfig`, else what its configuration builds. It gives
        logits ``[B, classes]``.

    Raises
    ------
    ValueError
        If there is no such network, or an override's value cannot be.
    TypeError
        If the network does not know an override.

    Examples
    --------
    >>> import torch
    >>> net = create("tsai-iar-simple-c10", in_channels=1, image_size=(28, 40), classes=7)
    >>> net(torch.randn(1, 1, 28, 40)).shape
    torch.Size([1, 7])
    >>> net = create("sabour-mnist", image_size=20, compete="children")
    >>> logits, images = net(torch.randn(1, 1, 20, 20), reconstruct=torch.tensor([3]))
    >>> images.shape
    torch.Size([1, 1, 20, 20])
    """
    with nullcontext() if device is None else torch.device(device):
        net: nn.Module = config(name, **overrides).build()
    return net if dtype is None else net.to(dtype)
