"""The laboratory's pages, docstrings and examples: their Python runs and prints what its comments say."""

from __future__ import annotations

import doctest
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from stand_ins import ROOT, python

from fastcaps_lab import models

PAGES = sorted((ROOT / "lab/docs").glob("*.md"))
BLOCKS = {path: re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL) for path in PAGES}
MODULES = [
    ".".join(path.relative_to(ROOT / "lab").with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "lab/fastcaps_lab").rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


def shape(text: str) -> str:
    """Return a shape as it is printed, or as a comment has it for short."""
    return re.sub(r"torch\.Size\(|\)|,(?= \[)", "", text)


@pytest.mark.parametrize("page", [path for path in PAGES if BLOCKS[path]], ids=lambda path: path.stem)
def test_the_python_of_a_page_runs_as_printed(
    page: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some write checkpoints
    monkeypatch.setattr(models, "NETWORKS", {**models.NETWORKS})  # or register a network
    names: dict[str, Any] = {}
    for block in BLOCKS[page]:
        exec(compile(block, str(page), "exec"), names)
        printed = shape(capsys.readouterr().out)
        for line in re.findall(r"^\s*print\(.*\)\s+# (torch\.Size.*)$", block, re.MULTILINE):
            assert shape(line) in printed, (line, printed)


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_docstrings_run_as_printed(module: str) -> None:
    assert doctest.testmod(import_module(module)).failed == 0


def test_the_api_names_only_what_there_is() -> None:
    names = re.findall(r"^::: ([\w.]+)$", (ROOT / "lab/docs/api.md").read_text(encoding="utf-8"), re.MULTILINE)
    found = [getattr(import_module(home), name, None) for home, _, name in (each.rpartition(".") for each in names)]
    assert len(found) > 25 and None not in found


@pytest.mark.slow
def test_the_example_with_lightning_learns() -> None:
    small = ["--images", "128", "--epochs", "2"]
    interface = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    done = python("lab/examples/lightning_parallel.py", *small, **interface)
    assert done.returncode == 0, done.stderr
    assert float(re.findall(r"loss ([0-9.]+)", done.stdout)[-1]) < 2.3  # ln 10, what guessing costs
