"""The examples in docstrings run as printed."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import fastcaps

ROOT = Path(fastcaps.__file__).parent
FILES = [path.relative_to(ROOT.parent) for path in ROOT.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8")]
MODULES = sorted(".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in FILES)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
