"""The documentation site: its pages, what is drawn and listed on them, links out of docs/, equations."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tools import routing_pictures, site

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_every_page_is_in_the_menu() -> None:
    menu = set(re.findall(r"\w: ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert menu == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | set(site.PAGES.values())


@pytest.mark.parametrize("name", routing_pictures.SCENES)
def test_a_routing_has_a_page_with_its_equation_and_its_picture_as_it_is_drawn_now(name: str) -> None:
    kept = (DOCS / f"routings/{name}.svg").read_text(encoding="utf-8")
    drawn = [
        [round(float(at)) for at in re.findall(r"[ML] ?([\d.]+)", each)]
        for each in (kept, routing_pictures.picture(name))
    ]
    assert drawn[0] == drawn[1] and len(drawn[0]) > routing_pictures.CHILDREN * routing_pictures.PARENTS
    page = (DOCS / f"routings/{name}.md").read_text(encoding="utf-8")
    assert f"]({name}.svg)" in page and re.search(r"^    r_im ", page, re.MULTILINE)


def test_routing_finds_who_agrees() -> None:
    """What the pictures show: in the last turn a child goes to the parent whose other children it agrees with."""
    own = [child * routing_pictures.PARENTS // routing_pictures.CHILDREN for child in range(routing_pictures.CHILDREN)]
    for name in routing_pictures.SCENES:
        r, _, _ = routing_pictures.scene(name, routing_pictures.TURNS)
        assert r.argmax(1).tolist() == own, name


def test_the_site_lists_all_recipes() -> None:
    pytest.importorskip("pydantic")
    from fastcaps.training.recipes import names

    assert site.RECIPES in (DOCS / "training.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([\w-]+)`", site.recipes(), re.MULTILINE) == list(names())


def test_links_that_leave_the_docs_are_turned_for_the_site() -> None:
    assert site.for_site("a/b.md", "[x](../../CONTRIBUTING.md#style) [y](../c.md) [z](../../bench/workloads.py)") == (
        "[x](../contributing.md#style) [y](../c.md) [z](../source/bench/workloads.py)"
    )
    assert "bench/workloads.py" in site.named_outside(DOCS)
    assert all((ROOT / path).is_file() for path in site.named_outside(DOCS))


def test_a_notebook_becomes_a_page() -> None:
    given = "# %% [markdown]\n# # Head\n#\n# [A page](../docs/l.md).\n\n# %%\nx = 1  # %% no cell\n\n# why\ny = 2\n"
    wanted = "# Head\n\n[A page](../docs/l.md).\n\n```python\nx = 1  # %% no cell\n\n# why\ny = 2\n```"
    assert site.as_page(given) == wanted


def test_docstrings_become_markdown() -> None:
    pytest.importorskip("griffe")
    pytest.importorskip("latex2mathml")
    from tools.docstrings import latex_left, translated

    given = """Route.

    .. math::
        a &= b, \\\\
        c &= \\Bigl\\langle d \\Bigr\\rangle

    See :func:`~fastcaps.convert` and :math:`x`.

    Parameters
    ----------
    in_capsules, \\
out_dim
        As ever.
    eps : float
        Small.
    stride, padding : int
        Of a window.
    """
    made = translated(given)
    assert made.count("<mtr>") == 2 and "stride : int\n    Of a window.\npadding : int\n    Of a window." in made
    assert made.count("<math") == 2 and "::" not in made and "`convert`" in made
    assert made.index("``out_dim``: As ever.") < made.index("Parameters") < made.index("eps : float")
    for path in (ROOT / "fastcaps").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node, clean=False)):
                assert not latex_left(translated(text)), (path, node.name)
