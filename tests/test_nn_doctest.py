"""The examples in the docstrings of modules, networks and the authors' layers run as printed."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = [
    "fastcaps.nn.capsnet",
    "fastcaps.nn.convert",
    "fastcaps.nn.head",
    "fastcaps.nn.inverted_attention",
    "fastcaps.nn.poses",
    "fastcaps.nn.primary",
    "fastcaps.nn.stack",
    "fastcaps.compat.ml_capsules",
    "fastcaps.models",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
