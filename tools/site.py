"""What MkDocs does besides turning docs/ into pages (mkdocs.yml names this file).

Pages link to files of the tree as a forge shows them, `../bench/workloads.py`. The site gets a copy of each such file;
CONTRIBUTING.md, CHANGELOG.md and the notebooks of examples/ become pages, and so does each public module (api/). The
page of all measured rows is drawn from bench/results, the table of recipes from the recipes.
"""

from __future__ import annotations

import importlib
import inspect
import posixpath
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
CELL = re.compile(r"^# %%(?P<kind> \[markdown\])?\n", re.MULTILINE)
NOTEBOOKS = [path for path in sorted((ROOT / "examples").glob("*.py")) if CELL.match(path.read_text(encoding="utf-8"))]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
PAGES |= {f"examples/{path.name}": f"examples/{path.stem}.md" for path in NOTEBOOKS}
LINK = re.compile(r"\[(?P<text>[^\[\]]*)\]\((?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")
API = {
    **dict.fromkeys(("nn", "functional", "encapnet", "models", "losses", "viz", "compat", "data", "training")),
    "diagnosis": ("diagnose", "Diagnosis", "LayerDiagnosis"),
    "backends": ("backend", "BackendError", "listing", "tf32x3"),
}
"""The modules that have a page, and of some the names that users need; of the others, ``__all__``."""

MEASURED, RECIPES = "<!-- site: measured -->", "<!-- site: recipes -->"


def outside(page: str, link: str) -> str | None:
    """Return the path in the tree that a link of a page of docs/ leads to, or None if it stays in docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith("docs/") else path


def place(path: str) -> str:
    """Return where the site has a file of the tree."""
    return PAGES.get(path, f"source/{path}")


def for_site(page: str, text: str) -> str:
    """Return a page's text with the links that leave docs/ turned to where the site has those files.

    A link whose text is the name of a page gets that page's title.
    """

    def turned(link: re.Match[str]) -> str:
        path, target = outside(page, link["path"]), ROOT / "docs" / posixpath.dirname(page) / link["path"]
        here = link["path"] if path is None else posixpath.relpath(place(path), posixpath.dirname(page) or ".")
        shown = link["text"]
        if re.fullmatch(r"[\w./-]+\.md", shown) and target.is_file():
            shown = re.sub(r"[`*]", "", re.search(r"^# (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)[1])
        return f"[{shown}]({here}{link['anchor'] or ''})"

    return LINK.sub(turned, text)


def api(module: str) -> str:
    """Return the page of a public module: what it says of itself, and all that it offers."""
    found = importlib.import_module(f"fastcaps.{module}")
    said = re.sub(r":\w+:`~?(?:\.?\w+\.)*(\w+)`", r"`\1`", found.__doc__ or "").strip()
    things = {name: getattr(found, name) for name in API[module] or found.__all__}
    parts = [f"# fastcaps.{module}", said]
    for name, thing in sorted(things.items(), key=lambda each: inspect.isclass(each[1])):  # functions first
        if not callable(thing) or hasattr(thing, "__origin__"):  # a type's other name
            continue
        is_layer = inspect.isclass(thing) and issubclass(thing, torch.nn.Module)
        kinds = (property, classmethod, staticmethod, types.FunctionType)
        defined = vars(thing) if inspect.isclass(thing) else {}
        members = [*getattr(thing, "_fields", ()), *(key for key, each in defined.items() if isinstance(each, kinds))]
        shown = ["build", "forward"] if is_layer else [key for key in members if key[0] != "_"] or "false"
        parts.append(f"::: fastcaps.{module}.{name}\n    options: {{members: {shown}, inherited_members: {is_layer}}}")
    return "\n\n".join(parts)


def named_outside(docs: Path) -> set[str]:
    """Return the files of the tree, other than pages, that pages of docs/ link to."""
    pages = {path.relative_to(docs).as_posix(): path.read_text(encoding="utf-8") for path in docs.rglob("*.md")}
    found = {outside(page, link["path"]) for page, text in pages.items() for link in LINK.finditer(text)}
    return {path for path in found if path is not None and path not in PAGES}


def as_page(notebook: str) -> str:
    """Return a Python file in cells as Markdown: the text of its text cells, the rest as code."""
    _, *parts = CELL.split(notebook)
    cells = zip(parts[::2], (part.strip() for part in parts[1::2]), strict=True)
    return "\n\n".join(
        re.sub(r"^# ?", "", text, flags=re.MULTILINE) if kind else f"```python\n{text}\n```" for kind, text in cells
    )


def recipes() -> str:
    """Return every recipe with its source, network, data and what the paper reports, as a table."""
    from fastcaps._testing.markdown import as_markdown
    from fastcaps.training.recipes import names, recipe

    lines = [["recipe", "source", "network", "data", "the paper reports"]]
    for name, found in ((name, recipe(name)) for name in names()):
        reported = (found.reported or "").replace("|", "/").replace("\n", " ").strip()
        config = found.config
        lines.append([f"`{name}`", str(found.source), f"`{config.network.name}`", f"`{config.data.name}`", reported])
    return as_markdown(lines).replace("---:", "---")


def on_config(config: Any) -> Any:
    """Name the version, and the repository if the package names one."""
    from fastcaps import __version__

    config.site_name = f"fastcaps {__version__}"
    config.copyright = f"fastcaps {__version__}, Apache-2.0"
    urls = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.urls]")[2].partition("\n[")[0]
    if found := re.search(r'^(?:Repository|Source) *= *"(.+)"', urls, re.MULTILINE):
        config.repo_url = found[1]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add what is not in docs/."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():  # their links lead from the top of the tree, or from examples/
        text = (ROOT / name).read_text(encoding="utf-8")
        text = as_page(text) if name.endswith(".py") else text
        files.append(File.generated(config, page, content=re.sub(r"\]\((\.\./)?docs/", r"](\1", text)))
    for module in API:
        files.append(File.generated(config, f"api/{module}.md", content=api(module)))
    for path in sorted(named_outside(Path(config["docs_dir"]))):
        files.append(File.generated(config, place(path), content=(ROOT / path).read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "measured.html"
        subprocess.run([sys.executable, "-m", "bench.report", "--html", str(page)], cwd=ROOT, check=True)
        files.append(File.generated(config, f"performance/{page.name}", content=page.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links; put the page of all measured rows, and the table of recipes, where their markers are."""
    frame = (
        '<iframe class="measured" src="performance/measured.html" title="all measured rows"></iframe>\n\n'
        "[Open it alone](performance/measured.html)"
    )
    text = for_site(page.file.src_uri, markdown).replace(MEASURED, frame)
    return text.replace(RECIPES, recipes()) if RECIPES in text else text


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Draw inline formulas; refuse a page that would show its reader LaTeX."""
    from mkdocs.exceptions import PluginError

    from tools.docstrings import inline, latex_left

    html = inline(html)
    if left := latex_left(html):
        raise PluginError(f"{page.file.src_uri} shows LaTeX: {', '.join(left)}")
    return html
