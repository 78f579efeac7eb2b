"""Texts: the reader of the Stanford Sentiment Treebank's parse trees (Socher et al. 2013), and data sets of phrases.

A line is a tree, ``(3 (2 (2 The) (2 Rock)) (4 ...))``: a node is a label, 0 (very negative) to 4 (very positive), and
a word or two nodes. A transformer from a local folder embeds the texts, for Heinsen's (2019) network.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from fastcaps_lab.data.files import CorruptDataError, MissingDataError, Place
from fastcaps_lab.data.transforms import DRAWS, Mixup

CLASSES = {5: ("very negative", "negative", "neutral", "positive", "very positive"), 2: ("negative", "positive")}
_BRACKETS = dict(zip(("-LRB-", "-RRB-", "-LSB-", "-RSB-", "-LCB-", "-RCB-"), "()[]{}", strict=True))
_PARTS = re.compile(r"\(\s*([0-4])\s|\)|[^\s()]+")  # the start of a node with its label, the end of a node, a word
FILES = {"train": "train.txt", "validation": "dev.txt", "test": "test.txt"}
PLACE = Place(
    "Stanford Sentiment Treebank",
    folders=("trees", "trainDevTestTrees_PTB/trees", "sst/trees", "sst"),
    files=("train.txt",),
    where="the archive trainDevTestTrees_PTB.zip of Stanford's page on sentiment analysis, unpacked: its folder trees",
)


Phrases = list[tuple[str, int]]
"""Texts, the treebank's tokens separated by spaces, with their labels."""


def _nodes(line: str) -> Iterator[tuple[str, int]]:
    """Yield the phrase and the label of every node of a tree, the whole sentence last; ValueError if it is no tree."""
    if re.sub(_PARTS, "", line).strip():
        raise ValueError(f"{re.sub(_PARTS, '', line).split()[0]!r} starts no node with a label from 0 to 4")
    open_nodes: list[tuple[int, list[str]]] = []
    for count, part in enumerate(_PARTS.finditer(line)):
        if not open_nodes and (count or part[1] is None):
            raise ValueError(f"{part[0]!r} is outside of the tree")
        if part[1] is not None:
            open_nodes.append((int(part[1]), []))
        elif part[0] != ")":
            open_nodes[-1][1].append(_BRACKETS.get(part[0], part[0]))
        else:
            label, phrase = open_nodes.pop()
            yield " ".join(phrase), label
            if open_nodes:
                open_nodes[-1][1].extend(phrase)
    if open_nodes:
        raise ValueError(f"ends early; {len(open_nodes)} brackets are not closed")


def read_trees(path: str | Path, *, phrases: bool, classes: int = 5) -> Phrases:
    """Return the phrases of a file of trees, one tree per line, for example ``train.txt``.

    With ``phrases``, return every unique phrase with the label of its first node, otherwise every sentence. With 2
    ``classes``, leave out neutral ones. MissingDataError if there is no such file; CorruptDataError, naming the line,
    if it is not a text of trees.
    """
    path = Path(path)
    if not path.is_file():
        raise MissingDataError(f"{path}: no such file; a file of the treebank's trees is wanted here")
    found: list[tuple[str, int]] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            nodes = list(_nodes(line.decode("utf-8-sig")))
        except ValueError as error:  # that of no UTF-8 is one, too
            raise CorruptDataError(f"{path}, line {number}: {error}; trees are wanted here") from error
        found += nodes if phrases else nodes[-1:]
    if not found:
        raise CorruptDataError(f"{path}: holds no tree, want one a line")
    first = dict(reversed(found))
    pairs = [(text, first[text]) for text in dict.fromkeys(text for text, _ in found)] if phrases else found
    if classes == 2:
        pairs = [(text, int(label > 2)) for text, label in pairs if label != 2]
    return pairs


class TextEmbedder:
    """A frozen transformer that returns all layers' embeddings of all tokens.

    ``folder`` holds a model and its tokenizer, as ``save_pretrained`` of ``transformers`` writes them. Nothing is
    downloaded. MissingDataError if the folder or its ``config.json`` is missing, or ``transformers`` is not installed;
    what ``transformers`` raises if it cannot load the files.

    >>> embed = TextEmbedder("path/to/gpt2-large")  # doctest: +SKIP
    >>> embeddings = embed.layers(*embed.tokens(["a fine film", "dull"]))  # [2, 3, 37, 1280]  # doctest: +SKIP
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder).expanduser()
        if not (folder / "config.json").is_file():
            raise MissingDataError(f"{folder}: no config.json here; want a folder of a transformer and its tokenizer")
        try:
            from transformers import AutoModel, AutoTokenizer
        except ImportError as error:
            raise MissingDataError(f"{folder}: embeddings need transformers: pip install './lab[text]'") from error
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model: Any = AutoModel.from_pretrained(folder, local_files_only=True)
        self._model = model.eval().requires_grad_(False)

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of layers l, with the token embedding, and of values m in an embedding."""
        one = torch.zeros(1, 1, dtype=torch.int64)
        layers, embedding = self.layers(one, one.new_ones(1, 1, dtype=torch.bool)).shape[2:]
        return layers, embedding

    def tokens(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return the token ids of texts, int64 ``[B, n]`` padded with 0, and a bool mask ``[B, n]``, on the CPU."""
        tokens = [self._tokenizer(text)["input_ids"] for text in texts]  # one by one: some tokenizers cannot pad
        ids = pad_sequence([torch.tensor(found, dtype=torch.int64) for found in tokens], batch_first=True)
        lengths = torch.tensor([len(found) for found in tokens])
        return ids, torch.arange(ids.shape[1]) < lengths[:, None]

    @torch.no_grad()
    def layers(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return embeddings ``[B, n, l, m]`` of n tokens in l layers, of which the first is the token embedding.

        The transformer moves to the tokens' device. Padding is 0.
        """
        self._model = self._model.to(ids.device)
        made = self._model(input_ids=ids, attention_mask=mask.to(torch.int64), output_hidden_states=True)
        return torch.stack(made.hidden_states, 2).masked_fill(~mask[:, :, None, None], 0)


class TextDataset(Dataset[tuple[str, int]]):
    """Labelled texts, embedded a batch at a time, in the steps of :class:`~fastcaps_lab.data.BatchDataset`.

    ``mixup`` blends embeddings, masks and targets; masks then hold values between 0 and 1.
    """

    def __init__(self, phrases: Phrases, embed: TextEmbedder, mixup: Mixup | None = None) -> None:
        self.phrases, self.embed, self.mixup = phrases, embed, mixup

    def __len__(self) -> int:
        return len(self.phrases)

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.phrases[index]

    def gather(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return tokens and their mask ``[n, longest]``, labels int64 ``[n]`` and random numbers."""
        texts, labels = zip(*(self[index] for index in indices), strict=True)
        return (*self.embed.tokens(texts), torch.tensor(labels), torch.rand(len(texts), DRAWS if self.mixup else 0))

    def finish(self, gathered: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return embeddings ``[n, longest, l, m]``, their mask, and int64 ``[n]`` or, with mixup, float32
        ``[n, classes]``."""
        ids, mask, labels, numbers = gathered
        embeddings = self.embed.layers(ids, mask)
        if self.mixup is None:
            return (embeddings, mask), labels
        return self.mixup((embeddings, mask.to(embeddings.dtype)), labels, numbers)
