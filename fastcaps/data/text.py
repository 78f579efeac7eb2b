"""Texts as torch data sets, embedded by a transformer from a local folder, for Heinsen's (2019) network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from fastcaps.data.draws import Draws
from fastcaps.data.files import CorruptDataError, MissingDataError, needing
from fastcaps.data.transforms import Mixup
from fastcaps.data.trees import Phrases


class TextEmbedder:
    """A frozen transformer that returns all layers' embeddings of all tokens.

    ``folder`` holds a model and its tokenizer, as ``save_pretrained`` of ``transformers`` writes them. Nothing is
    downloaded. MissingDataError if the folder or its ``config.json`` is missing, or ``transformers`` is not installed;
    CorruptDataError if ``transformers`` cannot load the files.

    >>> embed = TextEmbedder("path/to/gpt2-large", device="cuda")  # doctest: +SKIP
    >>> embeddings, mask = embed(["a fine film", "dull"])  # [2, 3, 37, 1280] and [2, 3]  # doctest: +SKIP
    >>> logits = fastcaps.models.create("heinsen-sst5")(embeddings, mask)  # doctest: +SKIP
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
        with needing("transformers", "text", f"{folder}: embeddings"):
            from transformers import AutoModel, AutoTokenizer
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
    """Labelled texts, embedded a batch at a time, in the steps of :class:`~fastcaps.data.BatchDataset`.

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
