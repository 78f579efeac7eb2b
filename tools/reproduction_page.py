"""Fill docs/reproduction.md: between its markers stands what ``fastcaps reproduce NAME --short --collect`` shows.

Run it from the repository's root:

    python tools/reproduction_page.py runs/reproduce

Every table that the page marks is collected from the folder of its name (or NAME-short) in there; its Markdown goes
between the markers, its picture to docs/reproduction/NAME.png. A table of which nothing has been run is left as it is.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from fastcaps import cli

PAGE = Path("docs/reproduction.md")
BLOCK = re.compile(r"(<!-- table (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(text: str, runs: Path, pictures: Path) -> str:
    """The page with its tables as they are now; ValueError if one cannot be collected."""

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        out = next((each for each in (runs / name, runs / f"{name}-short") if each.is_dir()), None)
        if out is None:
            print(f"{name}: no folder in {runs}")
            return match[0]
        if cli.main(["reproduce", name, "--short", "--collect", "--out", str(out)]):
            raise ValueError(f"{name} cannot be collected from {out}")
        pictures.mkdir(exist_ok=True)
        shutil.copyfile(out / "picture.png", pictures / f"{name}.png")
        table = (out / "table.md").read_text(encoding="utf-8").strip()
        return f"{match[1]}{table}\n\n![{name}]({pictures.name}/{name}.png)\n{match[3]}"

    return BLOCK.sub(block, text)


def main(arguments: list[str]) -> int:
    """Fill the page from the runs in a folder."""
    if len(arguments) != 1:
        print(f"usage: python {sys.argv[0]} RUNS", file=sys.stderr)
        return 2
    page = fill(PAGE.read_text(encoding="utf-8"), Path(arguments[0]), PAGE.with_suffix(""))
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
