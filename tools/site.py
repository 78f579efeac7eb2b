"""What MkDocs does besides turning docs/ into pages (mkdocs.yml names this file).

Pages link to files of the tree as a forge shows them, `../bench/workloads.py`. The site gets a copy of each such file;
CONTRIBUTING.md, CHANGELOG.md, the notebooks of examples/ and lab/docs become pages, and so does each public module of
fastcaps (api/).
"""

from __future__ import annotations

import importlib
import inspect
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CELL = re.compile(r"^# %%(?P<kind> \[markdown\])?\n", re.MULTILINE)
NOTEBOOKS = [path for path in sorted((ROOT / "examples").glob("*.py")) if CELL.match(path.read_text(encoding="utf-8"))]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
PAGES |= {f"examples/{path.name}": f"examples/{path.stem}.md" for path in NOTEBOOKS}
PAGES |= {f"lab/docs/{path.name}": f"lab/{path.name}" for path in sorted((ROOT / "lab/docs").glob("*.md"))}
LINK = re.compile(r"\[(?P<text>[^\[\]]*)\]\((?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")
API = {
    **dict.fromkeys(("nn", "functional", "losses", "compat")),
    "backends": ("backend", "BackendError", "listing", "tf32x3"),
}
"""The modules that have a page, and of some the names that users need; of the others, ``__all__``."""


def place(path: str) -> str:
    """Return where the site has a file of the tree."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}"


def linked(source: str, link: str) -> str:
    """Return the path in the tree that a link of a file of the tree leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def for_site(source: str, text: str) -> str:
    """Return the text of a page, which is ``source`` in the tree, with its links turned to where the site has files.

    A link whose text is the name of a page gets that page's title.
    """

    def turned(link: re.Match[str]) -> str:
        path = linked(source, link["path"])
        here = posixpath.relpath(place(path), posixpath.dirname(place(source)) or ".")
        shown = link["text"]
        if re.fullmatch(r"[\w./-]+\.md", shown) and (ROOT / path).is_file():
            title = re.search(r"^# (.+)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
            shown = re.sub(r"[`*]", "", title[1])
        return f"[{shown}]({here}{link['anchor'] or ''})"

    return LINK.sub(turned, text)


def api(module: str) -> str:
    """Return the page of a public module: what it says of itself, and all that it offers."""
    found = importlib.import_module(f"fastcaps.{module}")
    said = re.sub(r":\w+:`~?(?:\.?\w+\.)*(\w+)`", r"`\1`", found.__doc__ or "").strip()
    things = {name: getattr(found, name) for name in API[module] or found.__all__}
    shown = [name for name, thing in things.items() if callable(thing) and not hasattr(thing, "__origin__")]
    shown.sort(key=lambda name: inspect.isclass(things[name]))  # functions first
    return "\n\n".join([f"# fastcaps.{module}", said, *(f"::: fastcaps.{module}.{name}" for name in shown)])


def named_outside() -> set[str]:
    """Return the files of the tree, other than pages and what lies in docs/, that pages link to."""
    sources = [*PAGES, *(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
    texts = {source: (ROOT / source).read_text(encoding="utf-8") for source in sources}
    found = {linked(source, link["path"]) for source, text in texts.items() for link in LINK.finditer(text)}
    return {path for path in found if path not in PAGES and not path.startswith("docs/") and (ROOT / path).is_file()}


def as_page(notebook: str) -> str:
    """Return a Python file in cells as Markdown: the text of its text cells, the rest as code."""
    _, *parts = CELL.split(notebook)
    cells = zip(parts[::2], (part.strip() for part in parts[1::2]), strict=True)
    return "\n\n".join(
        re.sub(r"^# ?", "", text, flags=re.MULTILINE) if kind else f"```python\n{text}\n```" for kind, text in cells
    )


def on_config(config: Any) -> Any:
    """Name the version."""
    from fastcaps import __version__

    config.site_name = f"fastcaps {__version__}"
    config.copyright = f"fastcaps {__version__}, Apache-2.0"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add what is not in docs/."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=as_page(text) if name.endswith(".py") else text))
    for module in API:
        files.append(File.generated(config, f"api/{module}.md", content=api(module)))
    for path in sorted(named_outside()):
        files.append(File.generated(config, place(path), content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to where the site has files."""
    shown = page.file.src_uri
    return for_site(next((source for source, name in PAGES.items() if name == shown), f"docs/{shown}"), markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Draw inline formulas; refuse a page that would show its reader LaTeX."""
    from mkdocs.exceptions import PluginError

    from tools.docstrings import inline, latex_left

    html = inline(html)
    if left := latex_left(html):
        raise PluginError(f"{page.file.src_uri} shows LaTeX: {', '.join(left)}")
    return html
