"""The Python of the README and of docs/ runs, and prints what its comments say; their links lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
PRINTED = re.compile(r"^\s*print\(.*\)\s+# (.+)$", re.MULTILINE)
LINK = re.compile(r"\]\((?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> list[str]:
    return BLOCK.findall(path.read_text(encoding="utf-8"))


def shape(text: str) -> str:
    """A shape as it is printed, or as a comment has it for short."""
    return re.sub(r"torch\.Size\(|\)|,(?= \[)", "", text)


@pytest.fixture
def four_processes() -> Iterator[None]:
    """The first of four processes, of which there are no others: messages are sent to nobody."""
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
    monkeypatch.chdir(tmp_path)  # some write checkpoints
    if page.name == "distributed.md":
        request.getfixturevalue("four_processes")
    names: dict[str, Any] = {}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), names)
        printed = shape(capsys.readouterr().out)
        for told in PRINTED.findall(block):
            if re.match(r"torch\.Size|\[|\d|True|False", told):
                assert shape(told) in printed, (told, printed)


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


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert not list(wrong_links(page))
