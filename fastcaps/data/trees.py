"""Reader of the parse trees of the Stanford Sentiment Treebank (Socher et al. 2013), and data sets of their phrases.

A line is a tree, ``(3 (2 (2 The) (2 Rock)) (4 ...))``: a node is a label, 0 (very negative) to 4 (very positive), and
a word or two nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastcaps.data.files import CorruptDataError, Place, existing

FIVE = ("very negative", "negative", "neutral", "positive", "very positive")
TWO = ("negative", "positive")
_BRACKETS = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "-LCB-": "{", "-RCB-": "}"}
_PARTS = re.compile(r"\(\s*([^\s()]*)|\)|[^\s()]+")  # the start of a node with its label, the end of a node, a word
_FILES = {"train": "train.txt", "validation": "dev.txt", "test": "test.txt"}
PLACE = Place(
    "Stanford Sentiment Treebank",
    folders=("trees", "trainDevTestTrees_PTB/trees", "sst/trees", "sst"),
    files=("train.txt",),
    where="the archive trainDevTestTrees_PTB.zip of Stanford's page on sentiment analysis, unpacked: its folder trees",
)


@dataclass(frozen=True)
class Phrases:
    """Texts with labels."""

    texts: tuple[str, ...]  # the treebank's tokens, separated by spaces
    labels: tuple[int, ...]  # a class for each

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class Treebank:
    """The treebank as used by Heinsen (2019): all unique phrases for training, whole sentences for testing."""

    train: Phrases
    validation: Phrases
    test: Phrases
    classes: tuple[str, ...]


def _nodes(line: str, where: str) -> Iterator[tuple[str, int]]:
    """Yield the phrase and the label of every node of a tree; the whole sentence comes last."""
    open_nodes: list[tuple[int, list[str]]] = []
    for count, part in enumerate(_PARTS.finditer(line)):
        text, opened = part[0], part[1]
        if not open_nodes and (count or opened is None):
            raise CorruptDataError(f"{where}: {text!r} is outside of the tree")
        if opened is not None:
            if opened not in ("0", "1", "2", "3", "4"):
                raise CorruptDataError(f"{where}: a node has the label {opened!r}, want 0 to 4")
            open_nodes.append((int(opened), []))
        elif text != ")":
            open_nodes[-1][1].append(_BRACKETS.get(text, text))
        else:
            label, phrase = open_nodes.pop()
            if not phrase:
                raise CorruptDataError(f"{where}: a node holds no word")
            yield " ".join(phrase), label
            if open_nodes:
                open_nodes[-1][1].extend(phrase)
    if open_nodes:
        raise CorruptDataError(f"{where}: ends early; {len(open_nodes)} brackets are not closed")


def read_trees(path: str | Path, *, phrases: bool) -> Phrases:
    """Return the phrases of a file of trees, one tree per line, for example ``train.txt``.

    With ``phrases`` every unique phrase with the label of its first node, otherwise every sentence. MissingDataError if
    there is no such file; CorruptDataError, naming the line, if it is not a text of trees.
    """
    path = existing(path, "a file of the treebank's trees")
    unique: dict[str, int] = {}
    sentences: list[tuple[str, int]] = []
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            where = f"{path}, line {number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise CorruptDataError(f"{where}: no UTF-8 text ({error.reason}); trees are wanted here") from error
            found = list(_nodes(line, where))
            sentences += found[-1:]
            for text, label in found if phrases else ():
                unique.setdefault(text, label)
    if not sentences:
        raise CorruptDataError(f"{path}: holds no tree, want one a line")
    texts, labels = zip(*(unique.items() if phrases else sentences), strict=True)
    return Phrases(texts, labels)


def load_treebank(data_dir: str | Path, *, classes: int = 5) -> Treebank:
    """Return the treebank of ``train.txt``, ``dev.txt`` and ``test.txt`` in ``trainDevTestTrees_PTB``, or below.

    It holds all unique phrases of the training trees, and the sentences of the others; with 2 ``classes`` instead of 5
    no neutral ones. MissingDataError or CorruptDataError if a file is missing or wrong.
    """
    if classes not in (2, 5):
        raise ValueError(f"classes: got {classes}, want 5 or 2")
    folder = PLACE.folder_under(data_dir)
    parts = {name: read_trees(folder / file, phrases=name == "train") for name, file in _FILES.items()}
    if classes == 2:
        for name, part in parts.items():
            kept = [(text, int(label > 2)) for text, label in zip(part.texts, part.labels, strict=True) if label != 2]
            parts[name] = Phrases(tuple(text for text, _ in kept), tuple(label for _, label in kept))
    return Treebank(**parts, classes=FIVE if classes == 5 else TWO)
