"""Networks by name: ``fastcaps.models.create("tsai-iar-resnet-c10")``.

========================= ======== ===========================================================================
name                      images   what it is
========================= ======== ===========================================================================
``tsai-iar-simple-c10``   32x32x3  Tsai et al. (2020), Table 8: 0.56M parameters
``tsai-iar-simple-c100``  32x32x3  the same, Table 9: 1.46M
``tsai-iar-resnet-c10``   32x32x3  Table 8 behind the ResNet backbone of appendix A.1: 1.83M
``tsai-iar-resnet-c100``  32x32x3  Table 9 behind it: 2.80M
``li-encapnet-...``       32x32x3  Li et al. (2018): ``master``, ``v1``, ``v2``, ``v3``, ``six-master``, ``six``
``li-cnn-``, ``-resnet18``         the networks it is compared with: :mod:`fastcaps.models.li_encapnet`
``mnist``                 28x28x1  a small network of ours for MNIST and its kin
``digits``                8x8x1    a smaller one for scikit-learn's digits
========================= ======== ===========================================================================
"""

from __future__ import annotations

import difflib
from dataclasses import fields, replace
from typing import Any

from torch import nn

from fastcaps.models import li_encapnet
from fastcaps.models.backbones import BasicBlock, ResNetBackbone, SimpleBackbone, SmallBackbone
from fastcaps.models.networks import NETWORKS as CAPSNETS
from fastcaps.models.networks import NetworkConfig, build

__all__ = [
    "BasicBlock",
    "NetworkConfig",
    "ResNetBackbone",
    "SimpleBackbone",
    "SmallBackbone",
    "build",
    "config",
    "create",
    "names",
]

NETWORKS: dict[str, Any] = {**CAPSNETS, **li_encapnet.NETWORKS}


def names() -> list[str]:
    """The names that :func:`create` knows."""
    return sorted(NETWORKS)


def config(name: str, **overrides: Any) -> Any:
    """The configuration of the network ``name``, with ``overrides`` in place.

    Raises
    ------
    ValueError
        If there is no such network.
    TypeError
        If an override is not a field of its configuration.
    """
    if name not in NETWORKS:
        near = difflib.get_close_matches(name, NETWORKS, n=1, cutoff=0.4)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"no network is called {name!r}{hint}; there are: {', '.join(names())}")
    known = [field.name for field in fields(NETWORKS[name])]
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise TypeError(f"create() has no override {', '.join(unknown)}; there are: {', '.join(known)}")
    return replace(NETWORKS[name], **overrides)


def create(name: str, **overrides: Any) -> nn.Module:
    """Build the network ``name``, freshly drawn.

    Parameters
    ----------
    name : str
        One of :func:`names`.
    **overrides
        Any field of its configuration: in_channels, image_size, classes, iterations, routing, layer_norm,
        activations, dropout...

    Returns
    -------
    Module
        Images to logits ``[B, classes]``.

    Examples
    --------
    >>> import torch
    >>> net = create("tsai-iar-simple-c10", in_channels=1, image_size=(28, 40), classes=7)
    >>> net(torch.randn(1, 1, 28, 40)).shape
    torch.Size([1, 7])
    """
    found = config(name, **overrides)
    return build(found) if isinstance(found, NetworkConfig) else found.build()
