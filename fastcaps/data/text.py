"""Embeddings of texts from a transformer in a local folder: the inputs of Heinsen's (2019) network for text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastcaps.data.errors import CorruptDataError, MissingDataError


class TextEmbedder:
    """All layers' embeddings of all tokens, from a frozen transformer.

    Parameters
    ----------
    folder : str or Path
        A model with its tokenizer, as ``save_pretrained`` of ``transformers`` writes them. Nothing is downloaded.
    device : torch.device or str
        Where the transformer runs, and its embeddings lie.
    dtype : torch.dtype
        Of the transformer's weights and the embeddings.

    Raises
    ------
    MissingDataError
        If there is no such folder or no ``config.json`` in it, or ``transformers`` is not installed.
    CorruptDataError
        If ``transformers`` cannot load what is there.

    Examples
    --------
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
        try:
            from transformers import AutoModel, AutoTokenizer
        except ImportError as error:
            raise MissingDataError(
                f"{folder}: embeddings need transformers, which is not installed: pip install 'fastcaps[text]'"
            ) from error
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model: Any = AutoModel.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers raises whatever its readers meet
            raise CorruptDataError(
                f"{folder}: transformers cannot load a model and its tokenizer ({type(error).__name__}: {error})"
            ) from error
        self._model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
        self._device = torch.device(device)

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Embed a batch of texts.

        Returns
        -------
        embeddings, mask : Tensor
            ``[B, n, l, m]``: of n tokens (of the longest text), in the l layers, the first of which is the embedding of
            the token itself; and bool ``[B, n]``: which are tokens, and not padding. Padding is 0.
        """
        if not texts:
            raise ValueError("texts: got none, want one or more")
        tokens = [self._tokenizer(text)["input_ids"] for text in texts]  # not every tokenizer has a token to pad with
        if empty := [text for text, ids in zip(texts, tokens, strict=True) if not ids]:
            raise ValueError(f"texts: got {empty[0]!r}, which has no token")
        longest = max(map(len, tokens))
        ids = torch.zeros(len(texts), longest, dtype=torch.int64)
        mask = torch.zeros(len(texts), longest, dtype=torch.bool)
        for row, found in enumerate(tokens):
            ids[row, : len(found)] = torch.tensor(found)
            mask[row, : len(found)] = True
        ids, mask = ids.to(self._device), mask.to(self._device)
        made = self._model(input_ids=ids, attention_mask=mask.to(torch.int64), output_hidden_states=True)
        embeddings = torch.stack(made.hidden_states, 2)
        return embeddings.masked_fill(~mask[:, :, None, None], 0), mask
