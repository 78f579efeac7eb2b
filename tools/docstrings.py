"""Docstrings for mkdocstrings: equations become MathML, roles become links.

mkdocs.yml names this file. A browser draws MathML by itself, so that no script is loaded. Pages have their equations in
fences called ``math``, which a forge draws too.
"""

from __future__ import annotations

import html
import inspect
import re
from typing import Any

import griffe
from latex2mathml.converter import convert

BLOCK = re.compile(
    r"^(?P<indent> *)\.\. math::(?P<first>[^\n]*)\n(?P<rest>(?:(?P=indent) +[^\n]*\n|[ ]*\n)*)", re.MULTILINE
)
ROLE = re.compile(r":(?P<role>math|\w+):`(?P<text>[^`]+)`")
ENTRY = re.compile(r"^(\w+(?:,\s\w+)+)( :[^\n]*)?\n((?: +[^\n]*\n|\n(?= +\S))+)", re.MULTILINE)
"""A description that several parameters share; their names may be on several lines."""
FORMULA = re.compile(r"\$<code>([^<]*)</code>\$")
CODE = re.compile(r"<(code|pre|script|style)\b.*?</\1>|`[^`]*`", re.DOTALL)
LEFT = re.compile(r"\\\S[^<\n]{,40}|<m\w+[^>]*>&(?:amp;)?</|\.\. math::|:math:|\$\$")


def latex_left(page: str) -> list[str]:
    """Return what a page, or a translated docstring, still says in LaTeX outside of code."""
    return [found[0] for found in LEFT.finditer(CODE.sub("", page))]


def inline(page: str) -> str:
    """Return a rendered page with its inline formulas, code between dollars as on a forge, as MathML."""
    return FORMULA.sub(lambda found: convert(html.unescape(found[1]), display="inline"), page)


def fenced(latex: str, *_: Any, **__: Any) -> str:
    """Return an equation of a page or docstring as MathML."""
    latex = latex.strip()
    if "&" in latex and r"\begin" not in latex:
        latex = rf"\begin{{align*}}{latex}\end{{align*}}"
    latex = re.sub(r"\\[Bb]ig(l|r)\b", lambda size: r"\left" if size[1] == "l" else r"\right", latex)
    drawn = re.sub(
        r"<mi>(exp|ln|log|max|min)</mi>",
        r'<mo lspace="0.17em" rspace="0.17em">\1</mo>',
        convert(latex, display="block"),
    )
    return " ".join(re.sub(r"<msup>(<mi>[^<]*)</mi><mi>(&#x02032;)</mi></msup>", r"\1\2</mi>", drawn).split())


def _role(found: re.Match[str]) -> str:
    if found["role"] == "math":  # within a span: at a line's start Markdown takes math for a block
        return f"<span>{convert(found['text'], display='inline')}</span>"
    path = found["text"].lstrip("~")
    shown = path.rpartition(".")[2] if found["text"].startswith("~") else path
    return f'<autoref identifier="{path}" optional>`{shown}`</autoref>'


def translated(text: str) -> str:
    """Return a docstring as Markdown, each parameter described for itself."""
    each = lambda found: "".join(f"{name}{found[2] or ''}\n{found[3]}" for name in re.split(r",\s", found[1]))  # noqa: E731
    text = ENTRY.sub(each, inspect.cleandoc(text) + "\n")
    drawn = BLOCK.sub(lambda found: f"\n{found['indent']}{fenced(found['first'] + found['rest'])}\n\n", text)
    return ROLE.sub(_role, drawn).rstrip("\n")


class Docstrings(griffe.Extension):
    """Translate every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = translated(obj.docstring.value)
