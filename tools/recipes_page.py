"""The table of docs/recipes.md: every recipe with its source, network and what the paper reports.

python -m tools.recipes_page
"""

from __future__ import annotations

from pathlib import Path

from fastcaps._testing.markdown import as_markdown, into
from fastcaps.training.recipes import names, recipe

__all__ = ["main", "table"]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "recipes.md"


def table() -> str:
    """Return all recipes as a markdown table."""
    lines = [["recipe", "source", "network", "data", "the paper reports"]]
    for name in names():
        found = recipe(name)
        config = found.config
        told = (found.reported or "").replace("|", "/").replace("\n", " ").strip()
        lines.append([f"`{name}`", str(found.source), f"`{config.network.name}`", f"`{config.data.name}`", told])
    return as_markdown(lines).replace("---:", "---")


def main() -> None:
    PAGE.write_text(into(PAGE.read_text(encoding="utf-8"), table(), "recipes"), encoding="utf-8")


if __name__ == "__main__":
    main()
