"""Faults that can be planted in a source, each switched on while the program runs: what ``tools/mutate.py`` draws from.

A fault changes one thing in one line: a comparison, a sign, an index term, a guard, a mask, a constant, a call that is
left out. The sources are written anew with all faults drawn, each behind ``FASTCAPS_FAULT(its number)``, so that one
build has all of them and only what is said to be wrong is wrong.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OPPOSITES = (("<", "<="), (">", ">="), ("==", "!="), ("&&", "||"))
SWAPS = (
    *((f" {re.escape(one)} ", f" {other} ") for pair in _OPPOSITES for one, other in (pair, pair[::-1])),
    (r"(?<![(,=]) \+ ", " - "),
    (r"(?<![(,=?:]) - ", " + "),
    (r"(?<=[\w)\]]) \* (?=[\w(])", " + "),
    (r" / ", " * "),
    (r" % ", " / "),
    (r"\bmin\(", "max("),
    (r"\bmax\(", "min("),
    (r"(?<=[\[( ])0(?=[\]), ;])", "1"),
    (r"(?<=[\[( ])1(?=[\]), ;])", "2"),
    (r"\btrue\b", "false"),
    (r"\bfalse\b", "true"),
    (r"(?<!\w)!(?=\w)", ""),
)
"""Patterns within an expression of C++, and their replacements."""
STATEMENT = re.compile(
    r"^\s*((if|for) \(.*\) )?"
    r"([\w:.<>-]+\(.*\)|\*?\w[\w.>-]*(\[[^\]]*\]|\([^)]*\)|[\w.>-])* [-+*|&]?= .*|continue|return);$"
)
DECLARES = re.compile(r"^\s*(const|int|int64_t|float|double|auto|bool|char|V|T|X|return|using|else|case)\b.*[ =(]")
KEPT = re.compile(
    r"^\s*(//|#|template|static_assert|using|struct|namespace|extern|STD_TORCH_CHECK|FASTCAPS_IMPL|requires)|constexpr|NOINLINE|Built<|prefetch"
    r"|^\s*[\w:<>, ]+ \w+\[.*\];$"
)
"""Lines that hold no code that runs later, what must be known to the compiler, and what changes only the speed."""


@dataclass(frozen=True)
class Fault:
    """A line of a source, its replacement, and the line that has both, where ``@`` is the fault's number."""

    path: str
    line: int
    before: str
    after: str
    both: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before.strip()}  ->  {self.after.strip() or '(left out)'}"


# ---- C++ -------------------------------------------------------------------------------------------------------------


def _bound(tokens: Iterable[re.Match[str]], opening: str, closing: str, ends: str) -> re.Match[str] | None:
    """Return the first token that ends an expression outside of all brackets."""
    depth = 0
    for token in tokens:
        if depth == 0 and token[0] in ends:
            return token
        depth += (token[0] in opening) - (token[0] in closing)
    return None


def _expression(code: str, begin: int, end: int) -> tuple[int, int] | None:
    """Return the smallest whole expression in a line that holds a part of it; None where the line cuts it off."""
    tokens = list(re.finditer(r"::|[=!<>]=|.", code))
    before = [token for token in tokens if token.end() <= begin]
    left = _bound(reversed(before), ")]}", "([{", "([{,;?:=")
    right = _bound((token for token in tokens if token.start() >= end), "([{", ")]}", ")]},;?:=")
    if right is None or right[0] == "=" or (left is None and not code.lstrip().startswith("return ")):
        return None
    return left.end() if left else code.index("return ") + len("return "), right.start()


def faults_of_line(text: str, earlier: str = ";", later: str = "") -> Iterator[tuple[str, str]]:
    """Yield what a line of C++ becomes by each fault that it can have, alone and beside what it was.

    ``earlier`` and ``later`` are the lines about it: whether it is a whole statement depends on them.
    """
    code = text.partition("//")[0].rstrip()
    if KEPT.search(code) or not code.strip() or '"' in code or "'" in code:
        return
    for pattern, other in SWAPS:
        for found in re.finditer(pattern, code):
            bounds = _expression(code, *found.span())
            if bounds is None or re.search(r"\w<[^<>();]*$", code[: found.start()]):  # of a template
                continue
            first, last = bounds
            whole = code[first:last]
            changed = code[first : found.start()] + other + code[found.end() : last]
            both = f" (FASTCAPS_FAULT(@) ? ({changed}) : ({whole}))"
            yield code[:first] + changed + code[last:], code[:first] + both + code[last:]
    head = earlier.partition("//")[0].rstrip()
    if (head and not head.endswith((";", "{", "}", ")", "else"))) or later.strip().startswith("else"):
        return
    balanced = all(code.count(a) == code.count(b) for a, b in ("()", "{}"))
    if not STATEMENT.match(code) or DECLARES.match(code) or not balanced:
        return
    yield "", f"if (!FASTCAPS_FAULT(@)) {{ {code} }}"
    for sign in re.finditer(r" ([-+*|&])= ", code):
        other = code[: sign.start(1)] + code[sign.end(1) :]
        yield other, f"if (FASTCAPS_FAULT(@)) {{ {other} }} else {{ {code} }}"


def _of_cpp(name: str, text: str) -> Iterator[Fault]:
    lines = ["", *text.splitlines(), ""]
    for k in range(1, len(lines) - 1):
        for after, both in dict.fromkeys(faults_of_line(lines[k], lines[k - 1], lines[k + 1])):
            yield Fault(name, k, lines[k], after, both)


# ---- Python ----------------------------------------------------------------------------------------------------------

OPPOSITE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
            ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
            ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
            ast.And: ast.Or, ast.Or: ast.And}  # fmt: skip
CALLED = {"minimum": "maximum", "maximum": "minimum", "max": "min", "min": "max", "exp": "log", "zeros": "ones"}


def _changed(node: ast.AST) -> Iterator[str]:
    """Yield what an expression of Python becomes by each fault that it can have."""
    copy: Any = deepcopy(node)
    if isinstance(copy, ast.Compare) and type(copy.ops[0]) in OPPOSITE:
        copy.ops[0] = OPPOSITE[type(copy.ops[0])]()
        yield ast.unparse(copy)
    elif isinstance(copy, (ast.BinOp, ast.BoolOp)) and type(copy.op) in OPPOSITE:
        copy.op = OPPOSITE[type(copy.op)]()
        yield ast.unparse(copy)
    elif isinstance(copy, ast.UnaryOp) and not isinstance(copy.operand, ast.Constant):
        yield ast.unparse(copy.operand)
    elif isinstance(copy, ast.Constant) and type(copy.value) in (int, float) and copy.value in (0, 1):
        yield ast.unparse(ast.Constant(copy.value + 1))
    elif isinstance(copy, ast.Call):
        name = getattr(copy.func, "attr", "")
        if name == "where" and len(copy.args) == 3:
            copy.args[1:] = reversed(copy.args[1:])
            yield ast.unparse(copy)
        elif name in CALLED:
            copy.func.attr = CALLED[name]
            yield ast.unparse(copy)
        for keyword in (each for each in copy.keywords if each.arg == "mask"):
            keyword.value = ast.Constant(None)
            yield ast.unparse(copy)


def _of_python(name: str, text: str) -> Iterator[Fault]:
    lines = text.splitlines()
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    inside = [node for function in functions for part in function.body for node in ast.walk(part)]
    spared = [node for node in inside if isinstance(node, (ast.JoinedStr, ast.Raise, ast.Slice, ast.arguments))]
    spared += [node.annotation for node in inside if isinstance(node, ast.AnnAssign)]
    left = {id(part) for node in spared for part in ast.walk(node)}
    for node in (each for each in inside if id(each) not in left and hasattr(each, "lineno")):
        at: Any = node
        if at.lineno != at.end_lineno:
            continue
        line = lines[at.lineno - 1]
        begin, end = (len(line.encode()[:k].decode()) for k in (at.col_offset, at.end_col_offset))  # of UTF-8's bytes
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if (is_call or isinstance(node, ast.AugAssign)) and line[:begin].strip() == "":
            yield Fault(name, at.lineno, line, "", f"{line[:begin]}if not FASTCAPS_FAULT(@): {line[begin:]}")
        for after in _changed(node):
            both = f"(({after}) if FASTCAPS_FAULT(@) else ({line[begin:end]}))"
            yield Fault(name, at.lineno, line, line[:begin] + after + line[end:], line[:begin] + both + line[end:])


# ---- files -----------------------------------------------------------------------------------------------------------


def faults(root: Path, names: Iterable[str]) -> list[Fault]:
    """Return all faults that can be planted in some files below a folder."""
    found: list[Fault] = []
    for name in names:
        found += (_of_python if name.endswith(".py") else _of_cpp)(name, (root / name).read_text())
    return found


def drawn(everything: list[Fault], count: int, seed: int) -> list[Fault]:
    """Return so many faults, no two of them in one line."""
    order = random.Random(seed).sample(everything, len(everything))
    return list({(one.path, one.line): one for one in reversed(order)}.values())[::-1][:count]


def planted(name: str, text: str, numbered: dict[int, Fault]) -> str:
    """Return the text of a file with those of the faults that are its own, each behind its number."""
    lines = text.splitlines()
    for number, fault in numbered.items():
        if fault.path == name:
            lines[fault.line - 1] = fault.both.replace("@", str(number))
    return "\n".join(lines) + "\n"
