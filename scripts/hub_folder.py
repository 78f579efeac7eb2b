"""Make of a wheel a folder in the layout of the Hugging Face hub for kernels.

    python scripts/hub_folder.py dist/fastcaps-*.whl build/hub

The hub loads a package under a name of the hub's, from a folder that is not on Python's path. So imports of the package
become relative. Two of the hub's rules are not kept: the ops are ``torch.ops.fastcaps``, whatever the version, so that
a process can hold one version; and a wheel that was not built on an old system asks for a newer one than the hub wants
(docs/building.md).
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shutil
import sys
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

LEFT_OUT = re.compile(r"__main__\.py$")
CPU_LIBRARY, CUDA_LIBRARY = (f"fastcaps/lib/libfastcaps_{name}.so" for name in ("cpu", "cuda"))
IMPORT = re.compile(r"^(?P<before>[ \t]*)from fastcaps(?P<module>\.[\w.]+)? import ", re.MULTILINE)
PLAIN = re.compile(r"^[ \t]*import fastcaps\b.*", re.MULTILINE)


def relative(text: str, path: PurePosixPath) -> str:
    """Return the source of a module of the package with its imports of the package made relative.

    ValueError if it says ``import fastcaps``, which has no relative form.
    """
    dots = "." * len(path.parts)
    if plain := PLAIN.search(text):
        raise ValueError(f"{path}: {plain[0].strip()!r} has no relative form; import from the package instead")
    return IMPORT.sub(lambda found: f"{found['before']}from {dots}{(found['module'] or '.')[1:]} import ", text)


def variants(wheel: Path, files: zipfile.ZipFile) -> dict[str, dict[str, Any]]:
    """Return the hub's names for what a wheel has, each with its backend: a CUDA torch looks for one of its CUDA."""
    *_, platform = wheel.stem.split("-")
    if platform == "any":
        return {"torch-universal": {"type": "cpu"}}
    machine = re.search(r"(x86_64|aarch64|arm64)", platform)
    if machine is None or "linux" not in platform:
        raise ValueError(f"{wheel.name}: the hub's folder is made of Linux wheels, or of one without compiled code")
    name = f"torch-stable-abi210-%s-{machine[1]}-linux"
    found: dict[str, dict[str, Any]] = {name % "cpu": {"type": "cpu"}}
    if CUDA_LIBRARY in files.namelist():
        built = re.search(rb'"toolkit": "(\d+)\.(\d+)[^"]*", "architectures": \[([^]]*)\]', files.read(CPU_LIBRARY))
        assert built is not None, "the CPU library says what the CUDA library was built with"
        major, minor, architectures = (each.decode() for each in built.groups())
        archs = [f"{int(n) / 10}{'' if real else '+PTX'}" for n, real in re.findall(r'"(\d+)(-real)?"', architectures)]
        found[name % f"cu{major}{minor}"] = {"type": "cuda", "archs": archs}
    return found


def _write(root: Path, wheel: Path, files: zipfile.ZipFile, backend: dict[str, Any]) -> Path:
    shutil.rmtree(root, ignore_errors=True)
    version = wheel.name.split("-")[1]
    for member in files.namelist():
        path = PurePosixPath(member)
        folder = member.endswith("/")  # auditwheel lists folders too
        if folder or path.parts[0] != "fastcaps" or LEFT_OUT.search(member.removeprefix("fastcaps/")):
            continue
        if member == CUDA_LIBRARY and backend["type"] == "cpu":
            continue
        path, content = path.relative_to("fastcaps"), files.read(member)
        if path.suffix == ".py":
            content = relative(content.decode(), path).encode()
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    # older readers look for a folder of the repository's name
    (root / "fastcaps").mkdir()
    (root / "fastcaps/__init__.py").write_text(
        "import sys\n\n_package = sys.modules[__package__.rpartition('.')[0]]\n__all__ = _package.__all__\n\n\n"
        "def __getattr__(name):\n    return getattr(_package, name)\n"
    )
    paths = [path for path in sorted(root.rglob("*")) if path.is_file()]
    hashes = (base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode() for path in paths)
    digests = {path.relative_to(root).as_posix(): digest for path, digest in zip(paths, hashes, strict=True)}
    metadata = {"name": "fastcaps", "id": "fastcaps", "version": int(version.split(".")[0]), "license": "Apache-2.0"}
    metadata |= {"python-depends": [], "backend": backend, "digest": {"algorithm": "sha256", "files": digests}}
    (root / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return root


def main() -> int:
    parser = argparse.ArgumentParser(description="Make of a wheel a folder in the layout of the hub for kernels.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    try:
        with zipfile.ZipFile(given.wheel) as files:
            for name, how in variants(given.wheel, files).items():
                print(f"written: {_write(given.out / 'build' / name, given.wheel, files, how)}")
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        print(f"hub_folder: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
