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

__all__ = ["Equations", "latex_left", "translated"]

BLOCK = re.compile(
    r"^(?P<indent> *)\.\. math::(?P<first>[^\n]*)\n(?P<rest>(?:(?P=indent) +[^\n]*\n|[ ]*\n)*)", re.MULTILINE
)
ROLE = re.compile(r":(?P<role>math|\w+):`(?P<text>[^`]+)`")

SHARED = re.compile(
    r"^(?P<head>Parameters\n-+\n)(?P<names>in_capsules, [\w, ]+)\n(?P<told>(?: +[^\n]*\n)+)", re.MULTILINE
)

PARAMETERS = re.compile(r"^Parameters\n-+\n(?:(?!\w+\n-+\n).*\n)+", re.MULTILINE)
SEVERAL = re.compile(r"^(?P<names>\w+(?:, \w+)+)(?P<told>(?: :[^\n]*)?\n(?: +[^\n]*\n)+)", re.MULTILINE)
CODE = re.compile(r"<(code|pre|script|style)\b.*?</\1>|`[^`]*`", re.DOTALL)
LEFT = re.compile(r"\\[A-Za-z,;|{}\\][^<\n]{,40}|<m\w+[^>]*>&(?:amp;)?</|\.\. math::|:math:")


def latex_left(page: str) -> list[str]:
    """Return what a page, or a translated docstring, still says in LaTeX outside of code."""
    return [found[0] for found in LEFT.finditer(CODE.sub("", page))]


def _one_each(found: re.Match[str]) -> str:
    """List arguments that share a text one by one: griffe would give all of them the first one's default."""
    return "".join(f"{name}{found['told']}" for name in found["names"].split(", "))


def _shared(found: re.Match[str]) -> str:
    """Say once what many arguments have in common; a list would repeat it for each."""
    names = ", ".join(f"``{name.strip()}``" for name in found["names"].split(","))
    return f"{names}: {' '.join(found['told'].split())}\n\n{found['head']}"


def _block(found: re.Match[str]) -> str:
    latex = f"{found['first']}\n{textwrap.dedent(found['rest'])}".strip()
    if "&" in latex and r"\begin" not in latex:
        latex = rf"\begin{{align*}}{latex}\end{{align*}}"
    latex = re.sub(r"\\[Bb]ig(l|r)\b", lambda size: r"\left" if size[1] == "l" else r"\right", latex)
    return f"\n{found['indent']}{' '.join(convert(latex, display='block').split())}\n\n"


def _role(found: re.Match[str]) -> str:
    if found["role"] == "math":
        return convert(found["text"], display="inline")
    return f"`{found['text'].rpartition('.')[2] if found['text'].startswith('~') else found['text']}`"


def translated(text: str) -> str:
    """Return a docstring as Markdown."""
    # one backslash: a list of names that goes on in the next line; two end the row of an equation
    joined = inspect.cleandoc(re.sub(r"(?<!\\)\\\n *", "", text))
    listed = PARAMETERS.sub(lambda found: SEVERAL.sub(_one_each, found[0]), SHARED.sub(_shared, f"{joined}\n"))
    return ROLE.sub(_role, BLOCK.sub(_block, listed)).rstrip("\n")


class Equations(griffe.Extension):
    """Translate every docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = translated(obj.docstring.value)
