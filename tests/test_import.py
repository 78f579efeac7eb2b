"""`import fastcaps` stays light: which modules it may load beside torch, and what it defers."""

from __future__ import annotations

import ast
import importlib
import re

import pytest
from suite import python

import fastcaps

PARTS = {
    "backends", "checks", "functional", "libraries", "made", "ops", "reference", "results", "rules",
    "settings", "vectors", "votes", "watchers",
}  # fmt: skip
"""The parts of fastcaps that the import loads: not the layers, and nothing that trains, draws or reads data."""


def test_import_loads_little_and_registers_flop_formulas_later() -> None:
    done = python(
        "import sys, torch; before = {*sys.modules}; import fastcaps; print({*sys.modules} - before)\n"
        "from torch.utils.flop_counter import flop_registry\n"
        "print({str(op) for op in flop_registry} >= {'fastcaps.attention_routing', 'fastcaps.gaussian_routing'})"
    )
    assert done.returncode == 0, done.stderr
    loaded, registered = done.stdout.splitlines()
    names = {name.split(".")[1] if name.startswith("fastcaps.") else name for name in ast.literal_eval(loaded)}
    assert names <= PARTS | {"fastcaps"}, names - PARTS
    assert registered == "True"


def test_flop_formulas_wait_for_a_thread_that_imports_the_counter() -> None:
    done = python(
        "import sys, threading, torch\n"
        "thread = threading.Thread(target=lambda: __import__('torch.utils.flop_counter')); thread.start()\n"
        "while 'torch.utils.flop_counter' not in sys.modules: pass\n"
        "import fastcaps; thread.join()\n"
        "from torch.utils.flop_counter import FlopCounterMode\n"
        "with FlopCounterMode(display=False) as counter:\n"
        "    fastcaps.functional.dynamic_routing(torch.ones(2, 9, 4, 4), torch.ones(9, 5, 4, 4))\n"
        "print(counter.get_total_flops())"
    )
    assert done.returncode == 0 and int(done.stdout) > 0, done.stderr


@pytest.mark.parametrize("name", ["models", "training", "data", "viz", "encapnet", "diagnose", "CapConv2d", "CapFC"])
def test_what_moved_to_the_laboratory_says_so(name: str) -> None:
    """By attribute and by import, and in one line."""
    home = "encapnet." if name.startswith("Cap") else ""
    says = rf"^fastcaps\.{name} is fastcaps_lab\.{home}{name} now: in the checkout run pip install \./lab$"
    with pytest.raises(AttributeError, match=says):
        getattr(fastcaps, name)
    with pytest.raises(ImportError, match=says):
        importlib.import_module(f"fastcaps.{name}")
    with pytest.raises(ImportError, match=says):
        exec(f"from fastcaps import {name}")


def test_the_command_shows_every_backend_and_explains_a_call() -> None:
    done = python("-m", "fastcaps")
    assert done.returncode == 0 and max(map(len, done.stdout.partition("a routing pass")[0].splitlines())) < 80
    printed = " ".join(done.stdout.split())
    assert all(" ".join(str(entry).split()) in printed for entry in fastcaps.backends.listing())
    assert re.search("a routing pass with parents, float32 on cpu (cpu|reference): ", printed)
