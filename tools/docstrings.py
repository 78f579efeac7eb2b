"""Docstrings for mkdocstrings: equations become MathML, arguments that refer to another docstring are written out.

mkdocs.yml names this file. A browser draws MathML by itself, so that no script is loaded. Pages have their equations in
fences called ``math``, which a forge draws too.
"""

from __future__ import annotations

import html
import importlib
import inspect
import pydoc
import re
from typing import Any

import griffe
from latex2mathml.converter import convert

BLOCK = re.compile(
    r"^(?P<indent> *)\.\. math::(?P<first>[^\n]*)\n(?P<rest>(?:(?P=indent) +[^\n]*\n|[ ]*\n)*)", re.MULTILINE
)
ROLE = re.compile(r":(?P<role>math|\w+):`(?P<text>[^`]+)`")

LISTED = re.compile(r"^(?P<head>Parameters|Attributes)\n-+\n(?:(?!\w+\n-+\n).*\n)+", re.MULTILINE)
ENTRY = re.compile(
    r"^(?P<names>\**\w+(?:, \w+)*)(?P<kind> :[^\n]*)?\n(?P<text>(?: +[^\n]*\n|\n(?= +\S))+)", re.MULTILINE
)
ELSEWHERE = re.compile(
    r"\s*(?:Of [^,]+, )?(?:as|see) :\w+:`~?(?P<home>[\w.]+)`(?: has them| takes (?:it|them))?(?P<rest>.*)", re.I | re.S
)
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


def _entries(text: str, home: str) -> dict[str, str]:
    """Return what a docstring says of each parameter; of those that refer to another docstring, what that one says."""
    found: dict[str, str] = {}
    for entry in (entry for listed in LISTED.finditer(text) for entry in ENTRY.finditer(listed[0])):
        kind = re.sub(r", (?!optional)| or ", " | ", entry["kind"] or "")
        elsewhere = ELSEWHERE.fullmatch(entry["text"])
        known = described(elsewhere["home"], home) if elsewhere else {}
        for name in entry["names"].split(", "):
            found[name] = known.get(name, f"{kind}\n{entry['text']}")
    return found


def described(path: str, home: str) -> dict[str, str]:
    """Return what the docstring of an object of the package, or of its class, says of each parameter."""
    found: dict[str, str] = {}
    for each in (path.rpartition(".")[0], path):
        thing: Any = pydoc.locate(each) or pydoc.locate(f"{home}.{each}")
        if inspect.isroutine(thing) or inspect.isclass(thing):
            found |= _entries(_joined(thing.__doc__ or ""), thing.__module__)
    return found


def _joined(text: str) -> str:
    """Join names of parameters over lines."""
    return re.sub(r"^(\w+(?:, \w+)+),\n(?=\w)", r"\1, ", inspect.cleandoc(text), flags=re.MULTILINE) + "\n"


def _written_out(text: str, home: str) -> str:
    """List each argument for itself, and say before the list what is added to a reference to another docstring."""

    def listed(section: re.Match[str]) -> str:
        known = (ELSEWHERE.fullmatch(entry["text"]) for entry in ENTRY.finditer(section[0]))
        rests = (" ".join(found["rest"].split()).strip(" .;,") for found in known if found)
        notes = "".join(f"{rest[0].upper()}{rest[1:]}.\n\n" for rest in rests if rest)
        return notes + _list(section["head"], _entries(section[0], home))

    return LISTED.sub(listed, text)


def _list(head: str, entries: dict[str, str]) -> str:
    return f"{head}\n{'-' * len(head)}\n" + "".join(f"{name}{text.rstrip()}\n" for name, text in entries.items()) + "\n"


def _inherited(function: griffe.Function, text: str) -> str:
    """Add to a method's docstring the arguments that only the base class's method describes."""
    if function.parent is None or not function.parent.is_class:
        return text
    kind = getattr(importlib.import_module(function.module.path), function.parent.name)
    known = [_entries(_joined(getattr(base, function.name).__doc__ or ""), base.__module__)
             for base in kind.__mro__ if hasattr(base, function.name)]  # fmt: skip
    names = [name for name in (each.name for each in function.parameters) if any(name in entries for entries in known)]
    found = {name: next(entries[name] for entries in known if name in entries) for name in names}
    section = LISTED.search(text)
    start, end = section.span() if section else (len(text), len(text))
    return f"{text[:start]}\n{_list('Parameters', found)}{text[end:]}" if found else text


def _role(found: re.Match[str]) -> str:
    if found["role"] == "math":  # within a span: at a line's start Markdown takes math for a block
        return f"<span>{convert(found['text'], display='inline')}</span>"
    return f"`{found['text'].rpartition('.')[2] if found['text'].startswith('~') else found['text']}`"


def translated(text: str, home: str = "fastcaps") -> str:
    """Return a docstring as Markdown; ``home`` is its module."""
    drawn = BLOCK.sub(lambda found: f"\n{found['indent']}{fenced(found['first'] + found['rest'])}\n\n",
                      _written_out(_joined(text), home))  # fmt: skip
    return ROLE.sub(_role, drawn).rstrip("\n")


class Docstrings(griffe.Extension):
    """Translate every docstring, and write out what a constructor passes on to its base."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value
            if isinstance(obj, griffe.Function) and obj.name == "forward":
                text = _inherited(obj, _joined(text))
            obj.docstring.value = translated(text, obj.module.path)

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        from fastcaps.nn.poses import arguments

        init = cls.members.get("__init__")
        if not isinstance(init, griffe.Function) or not any(
            "Unpack" in str(each.annotation) for each in init.parameters
        ):
            return
        kinds: dict[int, griffe.ParameterKind] = {
            1: griffe.ParameterKind.positional_or_keyword,
            3: griffe.ParameterKind.keyword_only,
        }
        found = arguments(getattr(importlib.import_module(cls.module.path), cls.name))
        for name, each in sorted(found.items(), key=lambda item: item[1].kind):
            default = None if each.default is each.empty else repr(each.default)
            if name not in init.parameters:
                init.parameters.add(griffe.Parameter(name, kind=kinds[each.kind], default=default))
        del init.parameters["options"]
