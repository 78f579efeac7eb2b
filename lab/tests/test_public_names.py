"""The laboratory imports only public names of fastcaps, and nothing of fastcaps imports the laboratory."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from stand_ins import ROOT

PUBLIC = ("fastcaps", *(f"fastcaps.{name}" for name in ("backends", "compat", "functional", "losses", "nn")))


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yield every module that a file imports, with each name that it takes of it, or an empty one."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", each.name) for each in node.names)
        elif isinstance(node, ast.Import):
            yield from ((each.name, "") for each in node.names)


def of(package: str, *folders: str) -> list[tuple[Path, str, str]]:
    """Return the imports of a package in the Python files of folders."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert paths
    return [(path, *each) for path in paths for each in imports(path) if each[0].partition(".")[0] == package]


def test_only_public_names_of_fastcaps_are_imported() -> None:
    found = of("fastcaps", "lab")
    private = [each for each in found if each[1] not in PUBLIC or each[2] not in ("", *import_module(each[1]).__all__)]
    assert len(found) > 30 and not private


@pytest.mark.parametrize("folder", ["fastcaps", "tests", "bench", "tools", "scripts", "examples"])
def test_nothing_of_fastcaps_imports_the_laboratory(folder: str) -> None:
    assert not of("fastcaps_lab", folder)
