"""Networks by name: ``fastcaps_lab.models.create("tsai-iar-resnet-c10")``.

Each paper has a file with its networks as data, in ``NETWORKS``. lab/docs/networks.md lists them with their sources and
numbers of parameters, and our choices where a paper is silent.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from fastcaps_lab.checks import did_you_mean
from fastcaps_lab.encapnet import networks as encapnet
from fastcaps_lab.models import heinsen, hinton, li, ours, sabour, tsai, zhao
from fastcaps_lab.models.layers import BasicBlock
from fastcaps_lab.models.networks import CNNConfig, Config, NetworkConfig

__all__ = ["NETWORKS", "BasicBlock", "CNNConfig", "Config", "NetworkConfig", "config", "create", "names"]

NETWORKS: dict[str, Config] = {
    **tsai.NETWORKS, **sabour.NETWORKS, **hinton.NETWORKS, **heinsen.NETWORKS, **zhao.NETWORKS, **li.NETWORKS,
    **encapnet.NETWORKS, **ours.NETWORKS,
}  # fmt: skip
"""The configurations by name; add your own, a frozen dataclass with a method ``build``, whose fields are overrides."""


def names() -> list[str]:
    """Return the names of all networks."""
    return sorted(NETWORKS)


def config(name: str, **overrides: Any) -> Any:
    """Return the configuration of the network ``name``, with ``overrides``: a :class:`NetworkConfig`, a
    :class:`CNNConfig` or another. ValueError for an unknown name, TypeError for an unknown override.

    Overrides are fields, of a :class:`NetworkConfig` also its ``options``; of these the routing layers, when they are
    built, refuse those that they do not have.
    """
    if name not in NETWORKS:
        hint = did_you_mean(name, NETWORKS, most=3)
        raise ValueError(f"no network is called {name!r}{hint}, fastcaps_lab.models.names() lists all")
    found: Any = NETWORKS[name]
    known = {each.name for each in fields(found)}
    options = {option: overrides.pop(option) for option in overrides.keys() - known}
    if options and not isinstance(found, NetworkConfig):
        raise TypeError(f"no override {next(iter(options))}{did_you_mean(next(iter(options)), known)}")
    if options:
        overrides["options"] = {**overrides.get("options", found.options), **options}
    return replace(found, **overrides)


def create(
    name: str, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None, **overrides: Any
) -> nn.Module:
    """Return the network ``name``, one of :func:`names`, with new weights; it returns logits ``[B, classes]``.

    It is a :class:`~fastcaps.nn.CapsNet` of a :class:`NetworkConfig`, else the module of its configuration, with its
    parameters on ``device``. ``overrides`` are fields of its configuration: in_channels, image_size, classes,
    iterations, routing... For a :class:`NetworkConfig` they are also arguments of its routing layers: layer_norm,
    dropout, compete, prior, start... ValueError or TypeError if there is no such network or override, or an override's
    value is invalid.

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
