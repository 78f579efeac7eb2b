"""Markdown tables, and their insertion into pages, for the reports of tools/ and the benchmark."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["as_markdown", "into"]


def as_markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return lines as a markdown table; the first is the header."""
    right = ["---", *["---:"] * (len(lines[0]) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], right, *lines[1:]])


def into(page: str, text: str, name: str) -> str:
    """Return ``page`` with ``text`` between its markers ``<!-- name:begin -->`` and ``<!-- name:end -->``.

    ValueError if the page does not have each marker once, in order, or would lose lines of its tables.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"the page needs one {begin} and, after it, one {end}")
    before, rest = page.split(begin)
    old, after = rest.split(end)
    had, has = (sum(line.startswith("| ") for line in part.splitlines()) for part in (old, text))
    if has < had:
        raise ValueError(f"{name}: the new tables have {has} lines, the page has {had}; is a record missing?")
    return f"{before}{begin}\n{text.strip()}\n{end}{after}"
