"""Fill lab/docs/reproduction.md with what ``fastcaps reproduce NAME --short --collect`` shows of the runs in a folder.

    python lab/reproduction_page.py runs/reproduce

Every table that has a run (in the folder of its name, or NAME-short) has its rows in one table, and its source, claim
and settings in a list; both are between the page's markers. Nothing is said twice: a table of another one's runs names
it, and settings that most tables have come first. Pictures go to lab/docs/reproduction/NAME.png.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastcaps_lab import cli
from fastcaps_lab.training.tables import names

PAGE = Path(__file__).resolve().parent / "docs" / "reproduction.md"
COLUMNS = {"ours": "short run", "paper": "paper, in full"} | {n: n for n in ("epochs × images", "parameters")}
_SHORTENED = re.compile(r"Shortened: (.*?)\.(?: ([A-Z].*))?")


def into(page: str, text: str, name: str) -> str:
    """Return ``page`` with ``text`` between its markers ``<!-- name:begin -->`` and ``<!-- name:end -->``."""
    before, _, rest = page.partition(begin := f"<!-- {name}:begin -->")
    return f"{before}{begin}\n{text.strip()}\n<!-- {name}:end -->{rest.partition(f'<!-- {name}:end -->')[2]}"


def collect(runs: Path, pictures: Path) -> dict[str, Any]:
    """Return the ``table.json`` of every table by name, its picture copied; ValueError if one cannot be collected."""
    found = {}
    for name in names():
        out = next((each for each in (runs / name, runs / f"{name}-short") if each.is_dir()), None)
        if out is None:
            continue
        if cli.main(["reproduce", name, "--short", "--collect", "--out", str(out)]):
            raise ValueError(f"{name} cannot be collected from {out}")
        pictures.mkdir(exist_ok=True)
        shutil.copyfile(out / "picture.png", pictures / f"{name}.png")
        found[name] = json.loads((out / "table.json").read_text(encoding="utf-8"))
    return found


def _rows(name: str, table: Mapping[str, Any]) -> list[list[str]]:
    """Return a line for each row of a table; varied values share one line."""
    lines: dict[str, list[dict[str, str]]] = {}
    for row in table["rows"]:
        lines.setdefault(row["row"]["label"], []).append(row["shown"])
    measure = table["remarks"][0].partition(",")[0].partition(";")[0].rstrip(".")
    found = []
    for shown in lines.values():
        label = ", ".join([shown[0][""], *(one[""].rpartition(" ")[2] for one in shown[1:])])
        cells = ([one[column] for one in shown] for column in COLUMNS)
        joined = [", ".join(cell if len(set(cell)) > 1 else cell[:1]) for cell in cells]
        found.append(["" if found else f"`{name}`: {measure[0].lower()}{measure[1:]}", label, *joined])
    return found


def _short(table: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return the settings that differ in the short form and the seeds, and the note on them."""
    found = [match for match in map(_SHORTENED.fullmatch, table["remarks"]) if match]
    settings = [part for match in found for part in match[1].split(", ")]
    return [*settings, table["remarks"][-1].partition("; ")[0].lower()], " ".join(match[2] or "" for match in found)


def _field(setting: str) -> str:
    return setting.removeprefix("no ").split()[0].removesuffix("s")


def page(text: str, tables: Mapping[str, Any]) -> str:
    """Return the page with the tables as they are now."""
    rows = [["table", "row", *COLUMNS.values()]]
    counts = Counter(setting for table in tables.values() for setting in _short(table)[0])
    common = [setting for setting, count in counts.items() if 2 * count > max(len(tables), 2)]
    about, versions, runs, forms = [], [], dict[tuple[str, ...], str](), dict[str, str]()
    for name, table in tables.items():
        versions += table["remarks"][-1].partition("; ")[2].rstrip(".").split("; ")
        paragraph = [f"- **`{name}`** ({table['source']}). The claim: {table['claim']}"]
        paragraph += [each for each in table["remarks"][1:-1] if not each.startswith(("Best first", "Shortened"))]
        lines = _rows(name, table)
        shown = [(line[2], *line[4:]) for line in lines]  # of a run, so without the paper's value
        (same, *others) = {runs.get(each, "") for each in shown}
        if same and not others:
            paragraph.append(f"The runs of `{same}`.")
        else:
            rows += lines
            runs |= {each: name for each in shown if each[-1] and each not in runs}
            settings, note = _short(table)
            fields = {*map(_field, settings)}
            shortened = [each for each in settings if each not in common]
            shortened += [f"{_field(each)} as in full" for each in common if _field(each) not in fields]
            form = forms.setdefault(", ".join(shortened), name)
            paragraph += [f"Shortened: {', '.join(shortened) if form == name else f'as `{form}`'}."] * bool(shortened)
            paragraph += [note] * bool(note)
        about.append(" ".join(paragraph))
    lines = ["| " + " | ".join(line) + " |" for line in [rows[0], ["---"] * len(rows[0]), *rows[1:]]]
    text = into(text, "\n".join(lines), "results")
    head = [f"Shortened in every table, unless its line differs: {', '.join(common)}.", ""] * bool(common)
    made_by = f"Made by {'; '.join(dict.fromkeys(versions))}."
    return into(text, "\n".join([*head, *about, "", made_by]), "settings")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fill docs/reproduction.md from the runs in a folder.")
    parser.add_argument("runs", type=Path)
    tables = collect(parser.parse_args().runs, PAGE.with_suffix(""))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), tables), encoding="utf-8")


if __name__ == "__main__":
    main()
