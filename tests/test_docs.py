"""The pages: their Python runs and prints what its comments say, their links lead somewhere, the site has them all."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pydoc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastcaps
from tools import site

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
LABORATORY = sorted((ROOT / "lab/docs").glob("*.md"))
"""Pages of the laboratory, whose code its own tests run."""
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
PRINTED = re.compile(r"^\s*print\(.*\)\s+# (.+)$", re.MULTILINE)
DOCS = ROOT / "docs"
FORMULA = re.compile(r"^```math\n(.*?)^```", re.DOTALL | re.MULTILINE)
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "fastcaps").rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)
LINK = re.compile(r"\]\((?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> list[str]:
    return BLOCK.findall(path.read_text(encoding="utf-8"))


def shape(text: str) -> str:
    """A shape as it is printed, or as a comment has it for short."""
    return re.sub(r"torch\.Size\(|\)|,(?= \[)", "", text)


def test_the_package_shows_what_the_pages_use_and_nothing_else() -> None:
    examples = "\n".join(path.read_text() for path in (ROOT / "examples").glob("*.py"))
    code = "\n".join([*(block for path in PAGES for block in blocks(path)), examples])
    used = set(re.findall(r"^(?!\s*from |\s*import ).*?\bfastcaps\.([a-zA-Z]\w*)", code, re.MULTILINE))
    assert len(used) > 8 and used <= {*fastcaps.__all__}
    known = set(re.findall(r"\w+", "\n".join([*(path.read_text() for path in PAGES), examples])))
    assert {*fastcaps.__all__} <= known | {"__version__"}
    assert dir(fastcaps) == sorted(fastcaps.__all__)
    assert all(getattr(fastcaps, name) is not None for name in fastcaps.__all__)


def test_help_begins_with_what_a_user_calls() -> None:
    """Before what torch's modules bring."""
    layers = [
        kind for kind in vars(fastcaps.nn).values() if inspect.isclass(kind) and issubclass(kind, torch.nn.Module)
    ]
    for layer in layers:
        shown = pydoc.render_doc(layer, renderer=pydoc.plaintext)
        methods = re.findall(r"^ \|  (\w+)\(self", shown.partition("torch.nn.modules.module.Module:")[0], re.MULTILINE)
        assert "forward" in methods
        if issubclass(layer, fastcaps.nn.RoutingLayer):  # first of its class's
            assert methods[methods.index("forward") - 1] in ("__init__", "run", "first_std")
    assert methods


@pytest.fixture
def four_processes() -> Iterator[None]:
    """The first of four processes, without the other three: its messages are not received."""
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend)

    dist.init_process_group("fake", rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("page", [path for path in PAGES if blocks(path)], ids=name)
def test_the_python_of_a_page_runs_as_printed(
    page: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    if page.name == "distributed.md":
        request.getfixturevalue("four_processes")
    names: dict[str, Any] = {}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), names)
        printed = shape(capsys.readouterr().out)
        for line in PRINTED.findall(block):
            if re.match(r"torch\.Size|\[|\d|True|False", line):
                assert shape(line) in printed, (line, printed)


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as forges and the site make them."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    heads = (re.sub(r"[`*]|\]\([^)]*\)", "", head).lower() for head in re.findall(r"^#+ (.+)$", text, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", head).strip().replace(" ", "-") for head in heads}


def wrong_links(path: Path) -> Iterator[str]:
    for link in LINK.finditer(re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)):
        if link["path"].startswith(("http://", "https://")):
            continue
        target = path.parent / link["path"] if link["path"] else path
        if not target.exists() or (link["anchor"] and link["anchor"] not in anchors(target)):
            yield link[0]


@pytest.mark.parametrize("page", [*PAGES, *LABORATORY], ids=name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert not list(wrong_links(page))


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_docstrings_run_as_printed(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_every_page_is_in_the_menu() -> None:
    menu = set(re.findall(r"\w: ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    made = {*site.PAGES.values(), *(f"api/{module}.md" for module in site.API)}
    assert menu == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | made


@pytest.mark.parametrize("picture", sorted((DOCS / "routings").glob("*.svg")), ids=name)
def test_a_routing_has_a_page_with_its_equation_and_its_picture(picture: Path) -> None:
    page = picture.with_suffix(".md").read_text(encoding="utf-8")
    assert f"]({picture.name})" in page and "\nr_{im} &= " in "".join(FORMULA.findall(page))


def test_links_that_leave_the_docs_are_turned_for_the_site() -> None:
    for page, text, turned in (
        ("docs/a/b.md", "[x](../../CONTRIBUTING.md#style) [y](../c.md)", "[x](../contributing.md#style) [y](../c.md)"),
        ("docs/a/b.md", "[z](../../bench/workloads.py)", "[z](../source/bench/workloads.py)"),
        ("docs/index.md", "[n](../lab/docs/networks.md)", "[n](lab/networks.md)"),
        ("lab/docs/data.md", "[l](../../docs/layers.md) [n](networks.md)", "[l](../layers.md) [n](networks.md)"),
        ("CONTRIBUTING.md", "[l](docs/layers.md)", "[l](layers.md)"),
        ("examples/export.py", "[l](../docs/layers.md)", "[l](../layers.md)"),
    ):
        assert site.for_site(page, text) == turned
    sources = [*site.PAGES, *(name(path) for path in DOCS.rglob("*") if path.is_file())]
    files = {*map(site.place, sources), *map(site.place, site.named_outside())}
    for source in sources:
        if source.endswith((".md", ".py")):
            text = re.sub(r"```.*?```", "", (ROOT / source).read_text(encoding="utf-8"), flags=re.DOTALL)
            for link in site.LINK.finditer(site.for_site(source, text)):
                assert site.linked(site.place(source), link["path"]) in files, (source, link[0])


def test_the_api_describes_every_argument_of_a_layer_and_names_only_what_there_is() -> None:
    pytest.importorskip("griffe")
    pytest.importorskip("latex2mathml")
    from fastcaps import nn
    from fastcaps.nn.poses import arguments
    from tools.docstrings import translated

    layers = [
        each for each in map(vars(nn).get, nn.__all__) if isinstance(each, type) and issubclass(each, nn.RoutingLayer)
    ]
    for layer in layers:
        listed = set(re.findall(r"^(\w+)(?: :|$)", translated(layer.__doc__ or ""), re.MULTILINE))
        assert {*arguments(layer)} <= listed, layer
    assert len(layers) >= 6
    names = re.findall(r"^::: ([\w.]+)$", "\n".join(map(site.api, site.API)), re.MULTILINE)
    assert len(names) > 50 and len(names) == len({*names})


def test_the_first_pictures_fit_a_phone() -> None:
    """At 390 pixels, without a browser."""
    shown = re.findall(r"\((.*?\.svg)\)", (DOCS / "index.md").read_text())
    widths = [float(re.search(r'width="([\d.]+)pt"', (DOCS / path).read_text())[1]) for path in shown]
    assert len(shown) == 2 and max(widths) < 320  # points: 426 pixels, which a page scales by less than a fifth


def test_links_get_titles() -> None:
    assert (
        site.for_site("docs/index.md", "[layers.md](layers.md) [it](layers.md)")
        == "[Layers](layers.md) [it](layers.md)"
    )


def test_equations_become_mathml_and_docstrings_markdown() -> None:
    pytest.importorskip("griffe")
    pytest.importorskip("latex2mathml")
    from tools.docstrings import fenced, inline, latex_left, translated

    equations = [each for path in DOCS.rglob("*.md") for each in FORMULA.findall(path.read_text(encoding="utf-8"))]
    assert len(equations) > 9 and not [each for each in equations if latex_left(fenced(each))]
    made = inline("<td>$<code>\\langle a, b \\rangle</code>$ &lt; <code>$x</code></td>")
    assert made.startswith("<td><math") and made.endswith(" &lt; <code>$x</code></td>") and not latex_left(made)
    assert all(map(latex_left, (r"<p>\\alpha</p>", "<mi>&</mi>", "<p>$$ x $$</p>"))) and not latex_left(
        "<code>\\a</code>"
    )

    made = translated("Sum.\n\n.. math::\n    a &= b, \\\\\n    c &= d\n\nSee :func:`~fastcaps.convert` and :math:`x`.")
    assert made.count("<mtr>") == made.count("<math") == 2 and "::" not in made and "`convert`" in made
    for path in (ROOT / "fastcaps").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node, clean=False)):
                assert not latex_left(translated(text)), (path, node.name)
