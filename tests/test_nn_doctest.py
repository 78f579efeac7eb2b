"""The examples in the docstrings of functions, modules, networks and published layers run as printed."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = [
    "fastcaps.functional.dynamic",
    "fastcaps.functional.em",
    "fastcaps.functional.heinsen",
    "fastcaps.functional.pooling",
    "fastcaps.losses",
    "fastcaps.ops.squash_sum",
    "fastcaps.sinkhorn",
    "fastcaps.vectors",
    "fastcaps.nn.cap_conv",
    "fastcaps.nn.capsnet",
    "fastcaps.nn.convert",
    "fastcaps.nn.dynamic",
    "fastcaps.nn.em",
    "fastcaps.nn.equilibrium",
    "fastcaps.nn.feedback",
    "fastcaps.nn.head",
    "fastcaps.nn.heinsen",
    "fastcaps.nn.inverted_attention",
    "fastcaps.nn.poses",
    "fastcaps.nn.primary",
    "fastcaps.nn.routing_pool",
    "fastcaps.nn.stack",
    "fastcaps.compat.dense_capsule",
    "fastcaps.compat.heinsen_routing",
    "fastcaps.compat.ml_capsules",
    "fastcaps.models",
    "fastcaps.models.heinsen",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
