"""``python -m fastcaps`` shows what was built, which backends can run here, and which one a call takes."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import Any

import torch

import fastcaps
from fastcaps.libraries import library, native_build_info


def text(value: Any) -> str:
    """Return a value of the build's description as one line."""
    if isinstance(value, dict):
        return "; ".join(f"{name}: {text(part)}" for name, part in value.items())
    return ", ".join(value) if isinstance(value, list) else str(value or "none")


def table(rows: dict[str, str]) -> None:
    """Print names with their descriptions, wrapped to the terminal."""
    room, names = shutil.get_terminal_size().columns - 1, max(map(len, rows)) + 4
    for name, what in rows.items():
        indents: Any = {"initial_indent": f"  {name:<{names - 2}}", "subsequent_indent": " " * names}
        print(textwrap.fill(what, room, break_long_words=False, break_on_hyphens=False, **indents))


def main() -> None:
    """Print the whole description."""
    print(f"fastcaps {fastcaps.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    if build := native_build_info():
        ask = library("cpu").ask
        build["levels built"] = (ask("fastcaps_capabilities_built") or "").split(",")
        build["level chosen"] = ask("fastcaps_capability") or "none: see FASTCAPS_CPU_CAPABILITY"
        build.pop("cuda_why_not", "")  # the list of backends has it
        print("build")
        table({name.replace("_", " "): text(value) for name, value in build.items()})
    else:
        print("build: no native library (FASTCAPS_BUILD=0); the reference runs")
    print("\nbackends")
    table({f"{one.name:<9}  {'yes' if one.available else 'no '}": one.detail for one in fastcaps.backends.listing()})
    for device in ("cpu", *["cuda"] * torch.cuda.is_available()):
        children, weight = torch.empty(1, 8, 4, 4, device=device), torch.empty(8, 10, 4, 4, device=device)
        print(f"\na routing pass with parents, float32 on {device}")
        print(textwrap.indent(str(fastcaps.explain(children, weight, children.new_empty(1, 10, 4, 4))), "  "))


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(
            "python -m fastcaps takes no arguments; train, explain and others are of fastcaps_lab: pip install ./lab"
        )
    main()
