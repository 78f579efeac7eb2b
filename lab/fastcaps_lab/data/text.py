"""Texts: the reader of the Stanford Sentiment Treebank's parse trees (Socher et al. 2013), and data sets of phrases.

A line is a tree, ``(3 (2 (2 The) (2 Rock)) (4 ...))``: a node is a label, 0 (very negative) to 4 (very positive), and
a word or two nodes. A transformer from a local folder embeds the texts, for Heinsen's (2019) network.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from fastcaps_lab.data.draws import Draws
from fastcaps_lab.data.files import CorruptDataError, MissingDataError, Place, existing
from fastcaps_lab.data.transforms import Mixup

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

    With ``phrases``, return every unique phrase with the label of its first node, otherwise every sentence.
    MissingDataError if there is no such file; CorruptDataError, naming the line, if it is not a text of trees.
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

    It holds all unique phrases of the training trees, and the sentences of the other files; with 2 ``classes`` instead
    of 5, it leaves out neutral ones. MissingDataError or CorruptDataError if a file is missing or wrong.
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


class TextEmbedder:
    """A frozen transformer that returns all layers' embeddings of all tokens.

    ``folder`` holds a model and its tokenizer, as ``save_pretrained`` of ``transformers`` writes them. Nothing is
    downloaded. MissingDataError if the folder or its ``config.json`` is missing, or ``transformers`` is not installed;
    CorruptDataError if ``transformers`` cannot load the files.

    >>> embed = TextEmbedder("path/to/gpt2-large", device="cuda")  # doctest: +SKIP
    >>> embeddings, mask = embed(["a fine film", "dull"])  # [2, 3, 37, 1280] and [2, 3]  # doctest: +SKIP
    >>> logits = fastcaps_lab.models.create("heinsen-sst5")(embeddings, mask)  # doctest: +SKIP
    """

    def __init__(
        self, folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        folder = Path(folder).expanduser()
        if not (folder / "config.json").is_file():
            raise MissingDataError(
                f"{folder}: no config.json here; want a folder of a transformer and its tokenizer, "
                "as save_pretrained writes it"
            )
        try:
            from transformers import AutoModel, AutoTokenizer
        except ImportError as error:
            raise MissingDataError(f"{folder}: embeddings need transformers: pip install './lab[text]'") from error
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model: Any = AutoModel.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers may raise anything
            raise CorruptDataError(
                f"{folder}: transformers cannot load a model and its tokenizer ({type(error).__name__}: {error})"
            ) from error
        self._model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
        self._device = torch.device(device)

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of layers l, with the token embedding, and of values m in an embedding."""
        one = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        layers, embedding = self.layers(one, one.new_ones(1, 1, dtype=torch.bool)).shape[2:]
        return layers, embedding

    def tokens(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return the token ids of texts, int64 ``[B, n]`` padded with 0, and a bool mask ``[B, n]``, on the CPU."""
        if not texts:
            raise ValueError("texts: got none, want one or more")
        tokens = [self._tokenizer(text)["input_ids"] for text in texts]  # one by one: some tokenizers cannot pad
        if empty := [text for text, ids in zip(texts, tokens, strict=True) if not ids]:
            raise ValueError(f"texts: got {empty[0]!r}, which has no token")
        ids = pad_sequence([torch.tensor(found) for found in tokens], batch_first=True)
        lengths = torch.tensor([len(found) for found in tokens])
        return ids, torch.arange(ids.shape[1]) < lengths[:, None]

    @torch.no_grad()
    def layers(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return embeddings ``[B, n, l, m]`` of n tokens in l layers, of which the first is the token embedding.

        The transformer moves to the tokens' device. Padding is 0.
        """
        if ids.device != self._device:
            self._model, self._device = self._model.to(ids.device), ids.device
        made = self._model(input_ids=ids, attention_mask=mask.to(torch.int64), output_hidden_states=True)
        return torch.stack(made.hidden_states, 2).masked_fill(~mask[:, :, None, None], 0)

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return the embeddings ``[B, n, l, m]`` of texts as :meth:`layers` does, and the mask of :meth:`tokens`."""
        ids, mask = (each.to(self._device) for each in self.tokens(texts))
        return self.layers(ids, mask), mask


class TextDataset(Dataset[tuple[str, int]]):
    """Labelled texts, embedded a batch at a time, in the steps of :class:`~fastcaps_lab.data.BatchDataset`.

    ``mixup`` blends embeddings, masks and targets; masks then hold values between 0 and 1.
    """

    def __init__(self, phrases: Phrases, embed: TextEmbedder, mixup: Mixup | None = None) -> None:
        self.phrases, self.embed, self.mixup = phrases, embed, mixup

    def __len__(self) -> int:
        return len(self.phrases)

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.phrases.texts[index], self.phrases.labels[index]

    def gather(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return tokens and their mask ``[n, longest]``, labels int64 ``[n]`` and, for mixup, the states of draws."""
        texts, labels = zip(*(self[index] for index in indices), strict=True)
        gathered = (*self.embed.tokens(texts), torch.tensor(labels))
        return gathered if self.mixup is None else (*gathered, Draws.fresh(len(texts)).states)

    def finish(self, gathered: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return embeddings ``[n, longest, l, m]``, their mask, and int64 ``[n]`` or, with mixup, float32
        ``[n, classes]``."""
        ids, mask, labels, *states = gathered
        embeddings = self.embed.layers(ids, mask)
        if self.mixup is None:
            return (embeddings, mask), labels
        return self.mixup((embeddings, mask.to(embeddings.dtype)), labels, Draws.going_on(*states))
