"""What tests share: small data, a transformer, a treebank, processes, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastcaps_lab import models

ROOT = Path(__file__).parents[2]
SHAPES = {  # channels, pixels, classes; where a recipe crops, its crop counts
    "mnist": (1, 28, 10),
    "fashion-mnist": (1, 28, 10),
    "cifar10": (3, 32, 10),
    "cifar100": (3, 32, 100),
    "svhn": (3, 32, 10),
    "smallnorb": (2, 96, 5),
    "multimnist": (1, 36, 10),
    "diverse-multimnist": (1, 36, 10),
    "affnist": (1, 40, 10),
    "folder": (3, 128, 200),
}
SEVERAL = ("multimnist", "diverse-multimnist")
"""Those whose images show several classes."""
RECIPE = """
source: Somebody 2020, section 1
network: {name: digits, options: {iterations: 2}}
data: {name: digits, limit: 128}
loss: {name: cross-entropy}
optimizer: {name: adam, lr: 1e-3}
schedule: {name: milestones, at: [0.5, 0.75]}
epochs: 1
batch_size: 64
accelerator: cpu
"""
"""A user's recipe that takes seconds."""


def python(*command: str, **environ: str) -> Any:
    """Run a fresh interpreter, which finds what this one finds: code, or several arguments."""
    arguments = ["-c", *command] if len(command) == 1 else command
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environ}
    return subprocess.run([sys.executable, *arguments], env=variables, cwd=ROOT, capture_output=True, text=True)


def refusals(*rows: tuple[type[Exception], str, Callable[[], Any]]) -> Any:
    """Return a test that each of some calls raises an error, whose one line matches a pattern."""

    @pytest.mark.parametrize(("error", "says", "call"), rows)
    def test(error: type[Exception], says: str, call: Callable[[], Any]) -> None:
        with pytest.raises(error, match=says) as caught:
            call()
        assert "\n" not in str(caught.value)

    return test


def network_of(config: Any) -> torch.nn.Module:
    """The network of a run, of the size that its data have."""
    sizes: dict[str, Any] = {}
    if config.data.name in SHAPES:
        channels, pixels, classes = SHAPES[config.data.name]
        sizes = {"in_channels": channels, "image_size": config.data.crop or pixels, "classes": classes}
    return models.create(config.network.name, **{**sizes, **config.network.options})


class Tokens:
    """A tokenizer of letters."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("a") + 1 for letter in text if letter != " "]}


class Layers(torch.nn.Module):
    """A transformer of two layers; a token sees the mean of what the mask says are tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(27, 6)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, output_hidden_states: bool) -> Any:
        assert output_hidden_states and not self.training
        first = self.embedding(input_ids)
        weight = attention_mask[..., None].to(first.dtype)
        second = first + (first * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
        return type("Output", (), {"hidden_states": (first, second, second.tanh())})


def fake_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(made: type) -> type:
        def from_pretrained(folder: Path, local_files_only: bool) -> Any:
            assert local_files_only
            if (folder / "config.json").read_text() != "{}":
                raise OSError("no model")
            return made()

        return type("Auto", (), {"from_pretrained": staticmethod(from_pretrained)})

    module = type(sys)("transformers")
    module.AutoTokenizer, module.AutoModel = loads(Tokens), loads(Layers)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", module)


def write_bank(folder: Path) -> Path:
    """A treebank of words of letters; its 22 phrases are of all five classes."""
    folder.mkdir(parents=True)
    words = ("bad", "dull", "film", "nice", "fine")
    lines = [f"({(i + j) % 5} ({i} {words[i]}) ({j} {words[j]}))" for i in range(5) for j in range(5) if i != j]
    (folder / "train.txt").write_text("\n".join(lines[:17]))
    (folder / "dev.txt").write_text("(3 (3 very) (3 nice))\n(0 (2 a) (0 bad))\n(4 fine)\n")
    (folder / "test.txt").write_text("(0 bad)\n(4 (2 a) (4 (4 fine) (2 film)))\n(2 film)\n(3 nice)\n")
    return folder
