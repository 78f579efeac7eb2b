"""The Python of the README runs, and prints what its comments say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[1] / "README.md"
PRINTED = re.compile(r"^print\(.*\)\s+# (.+)$", re.MULTILINE)


def test_the_readme_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 8
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
        printed = capsys.readouterr().out.replace("torch.Size(", "").replace(")", "")
        for told in PRINTED.findall(block):
            wanted = re.sub(r"torch\.Size\(|\)|,(?= \[)", "", told)
            assert wanted in printed, (told, printed)
