"""`import fastcaps` stays light: which modules it may load beside torch, and what it defers."""

from __future__ import annotations

import ast

from suite import python

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
