"""Count the house: lines a room, files too long, functions of too many arguments; before and after, side by side.

``python tools/count.py 65ae045 HEAD .`` counts two commits and the working tree (``.``, the default). ``--names`` lists
the functions with more than eight arguments: what a user calls, what stands above the ops, and the ops and below.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

MOST_ARGUMENTS = 8
LONGEST_FILE = 500
PRODUCT = ("data", "train", "models", "compat", "training", "callbacks", "losses", "viz", "cli", "demo", "measure")
"""What lies around the core in fastcaps/: networks, training and the command line."""
PUBLIC = ("fastcaps", "fastcaps/nn", "fastcaps/functional", "fastcaps/compat", "fastcaps/models", "fastcaps/data")
"""Packages whose ``__all__`` is what a user calls."""
KINDS = ("public", "above the ops", "ops, below")
NATIVE = (".cpp", ".h", ".cu", ".cuh", ".in", ".cmake")


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], capture_output=True, check=True).stdout


def files(revision: str) -> dict[str, str]:
    """Every source of a revision, by its path; ``.`` is the working tree with what is not yet added."""
    if revision == ".":
        names = git("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    else:
        names = git("ls-tree", "-r", "-z", "--name-only", revision)
    found = {}
    for name in names.decode().split("\0"):
        if not name.endswith((".py", *NATIVE, "CMakeLists.txt", "Makefile", ".md", ".sh")):
            continue
        if revision != ".":
            found[name] = git("show", f"{revision}:{name}").decode()
        elif Path(name).is_file():  # it may be deleted, and not yet so in the index
            found[name] = Path(name).read_text()
    return found


def room(name: str) -> str:
    """The room that a file belongs to."""
    path = Path(name)
    if path.suffix == ".md":
        return "documents"
    if path.suffix == ".cmake":
        return "build"
    if path.parts[0] != "fastcaps":
        named = ("csrc", "triton_kernels", "tests", "bench", "tools")
        return path.parts[0] if path.parts[0] in named else "build"
    return "fastcaps around it" if path.parts[1].removesuffix(".py") in PRODUCT else "fastcaps core"


def exported(sources: dict[str, str]) -> set[str]:
    """The names that the public packages export."""
    names: set[str] = set()
    for package in PUBLIC:
        for node in ast.parse(sources.get(f"{package}/__init__.py", "")).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                names |= {str(element.value) for element in node.value.elts}  # type: ignore[attr-defined]
    return names


def functions(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, int]]:
    """Every function of a module, by its full name, with the number of its arguments but ``self``."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from functions(node.body, f"{owner}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield f"{owner}{node.name}", sum(one.arg not in ("self", "cls") for one in given)
            yield from functions(node.body, f"{owner}{node.name}.")


def count(revision: str) -> tuple[dict[str, int], list[str]]:
    """All figures of a revision, and the functions with too many arguments."""
    sources = files(revision)
    figures: dict[str, int] = {}
    for name, text in sources.items():
        figures[f"lines: {room(name)}"] = figures.get(f"lines: {room(name)}", 0) + text.count("\n")
    public = exported(sources)
    listed = []
    for name in sorted(sources):
        if name.startswith("fastcaps/") and name.endswith(".py"):
            for function, arguments in functions(ast.parse(sources[name]).body):
                if arguments > MOST_ARGUMENTS:
                    known = "/compat/" in name or function.split(".")[0] in public
                    below = name.startswith(("fastcaps/ops/", "fastcaps/reference/"))
                    kind = KINDS[2] if below else KINDS[0] if known else KINDS[1]
                    listed.append(f"{kind:<14} {arguments:>3}  {name}: {function}")
    for kind in KINDS:
        figures[f"functions of > {MOST_ARGUMENTS} arguments: {kind}"] = sum(line.startswith(kind) for line in listed)
    long = [name for name, text in sources.items() if text.count("\n") > LONGEST_FILE and not name.endswith(".md")]
    figures[f"files above {LONGEST_FILE} lines"] = len(long)
    return figures, listed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revisions", nargs="*", default=["."])
    parser.add_argument("--names", action="store_true", help="list the functions with too many arguments")
    asked = parser.parse_args()
    counted = {revision: count(revision) for revision in asked.revisions}
    print(f"{'':<40}" + "".join(f"{revision:>12}" for revision in counted))
    for name in sorted({name for figures, _ in counted.values() for name in figures}):
        print(f"{name:<40}" + "".join(f"{figures.get(name, 0):>12,}" for figures, _ in counted.values()))
    for revision, (_, listed) in counted.items() if asked.names else ():
        print(f"\n{revision}\n" + "\n".join(listed))


if __name__ == "__main__":
    main()
