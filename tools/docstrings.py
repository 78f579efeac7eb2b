"""Docstrings for mkdocstrings: their equations, in LaTeX, become MathML; names in roles become code.

mkdocs.yml names this file. A browser draws MathML by itself, so that no script is loaded.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

import griffe
from latex2mathml.converter import convert

__all__ = ["Equations", "translated"]

BLOCK = re.compile(
    r"^(?P<indent> *)\.\. math::(?P<first>[^\n]*)\n(?P<rest>(?:(?P=indent) +[^\n]*\n|[ ]*\n)*)", re.MULTILINE
)
ROLE = re.compile(r":(?P<role>math|\w+):`(?P<text>[^`]+)`")

SHARED = re.compile(
    r"^(?P<head>Parameters\n-+\n)(?P<names>in_capsules, [\w, ]+)\n(?P<told>(?: +[^\n]*\n)+)", re.MULTILINE
)


def _shared(found: re.Match[str]) -> str:
    """Say once what many arguments have in common; a list would repeat it for each."""
    names = ", ".join(f"``{name.strip()}``" for name in found["names"].split(","))
    return f"{names}: {' '.join(found['told'].split())}\n\n{found['head']}"


def _block(found: re.Match[str]) -> str:
    latex = f"{found['first']}\n{textwrap.dedent(found['rest'])}".strip()
    if "&" in latex and r"\begin" not in latex:
        latex = rf"\begin{{aligned}}{latex}\end{{aligned}}"
    return f"\n{found['indent']}{' '.join(convert(latex, display='block').split())}\n\n"


def _role(found: re.Match[str]) -> str:
    if found["role"] == "math":
        return convert(found["text"], display="inline")
    return f"`{found['text'].rpartition('.')[2] if found['text'].startswith('~') else found['text']}`"


def translated(text: str) -> str:
    """Return a docstring as Markdown."""
    joined = inspect.cleandoc(re.sub(r"\\\n *", "", text))  # a list of names that goes on in the next line
    return ROLE.sub(_role, BLOCK.sub(_block, SHARED.sub(_shared, f"{joined}\n"))).rstrip("\n")


class Equations(griffe.Extension):
    """Translate every docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = translated(obj.docstring.value)
