"""``fastcaps info``."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Option

from fastcaps.cli.common import Fail, show


def read_dtype(name: str) -> Any:
    """The dtype of a ``--dtype``."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise Fail(f"--dtype {name}: not a dtype of torch (float32, float64, bfloat16, float16)")
    return dtype


def read_device(name: str) -> str:
    """The device of a ``--device``, which must be there."""
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch has no error of its own for a device
        raise Fail(f"--device: got {name}, but torch finds no such device here") from error
    return name


def _joined(value: Any) -> Any:
    return ", ".join(value) if isinstance(value, list) else value


def _build() -> dict[str, Any]:
    """What the native library was built with; empty if there is none."""
    from fastcaps.libraries import library, native_build_info

    build, ask = native_build_info(), library("cpu").ask
    if build:
        build["levels built"] = (ask("fastcaps_capabilities_built") or "").split(",")
        build["level chosen"] = ask("fastcaps_capability") or "none: see FASTCAPS_CPU_CAPABILITY"
    return build


def info(
    as_json: Annotated[bool, Option("--json", help="as JSON")] = False,
    device: Annotated[str, Option(help="device of the call that is explained")] = "cpu",
    dtype: Annotated[str, Option(help="its dtype")] = "float32",
) -> int:
    """Tell what was built, what runs here, and why."""
    import torch

    import fastcaps

    build, kind = _build(), read_dtype(dtype)
    try:
        children = torch.empty(1, 8, 4, 4, dtype=kind, device=device)
        weight = torch.empty(8, 10, 4, 4, dtype=kind, device=device)
        parents = torch.empty(1, 10, 4, 4, dtype=kind, device=device)
        explanation = str(fastcaps.explain(children, weight, parents))
    except (RuntimeError, AssertionError, TypeError) as error:
        explanation = f"no such call: {str(error).splitlines()[0]}"
    listing = fastcaps.backends.listing()
    if as_json:
        backends = {entry.name: {"available": entry.available, "detail": entry.detail} for entry in listing}
        versions = {"fastcaps": fastcaps.__version__, "torch": torch.__version__}
        show({**versions, "build": build, "backends": backends, "explain": explanation})
        return 0
    print(f"fastcaps {fastcaps.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print("build" if build else "build: no native library (FASTCAPS_BUILD=0); the reference serves")
    why_not = build.pop("cuda_why_not", "")
    if why_not:
        build["cuda"] = f"none: {why_not}"
    for name, value in build.items():
        if isinstance(value, dict):
            value = "; ".join(f"{key}: {_joined(part)}" for key, part in value.items())
        print(f"  {name.replace('_', ' '):<20}{_joined(value)}")
    print("\nbackends")
    for entry in listing:
        print(f"  {entry}")
    print(f"\na routing pass with parents, {dtype} on {device}, runs on")
    print("  " + explanation.replace("\n", "\n  "))
    return 0
