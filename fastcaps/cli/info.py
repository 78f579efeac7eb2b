"""``fastcaps info``."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Option

from fastcaps.cli.common import Wrong, show, show_list

DTYPES = ("float32", "float64", "bfloat16", "float16")


def read_dtype(name: str) -> Any:
    """The dtype of a ``--dtype``."""
    import torch

    if name not in DTYPES:
        raise Wrong(f"--dtype: got {name}, want one of {', '.join(DTYPES)}")
    return getattr(torch, name)


def read_device(name: str) -> str:
    """The device of a ``--device``, which must be there."""
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch has no error of its own for a device
        raise Wrong(f"--device: got {name}, but torch finds no such device here") from error
    return name


def _joined(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_joined(part)}" for key, part in value.items())
    return ", ".join(value) if isinstance(value, list) else str(value or "none")


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

    build, kind, device = _build(), read_dtype(dtype), read_device(device)
    try:
        children = torch.empty(1, 8, 4, 4, dtype=kind, device=device)
        weight = torch.empty(8, 10, 4, 4, dtype=kind, device=device)
        parents = torch.empty(1, 10, 4, 4, dtype=kind, device=device)
        runs: Any = fastcaps.explain(children, weight, parents)
    except (RuntimeError, TypeError) as error:
        runs = f"no such call: {str(error).splitlines()[0]}"
    listing = fastcaps.backends.listing()
    if as_json:
        backends = {entry.name: {"available": entry.available, "detail": entry.detail} for entry in listing}
        versions = {"fastcaps": fastcaps.__version__, "torch": torch.__version__}
        show({**versions, "build": build, "backends": backends, "explain": str(runs)})
        return 0
    print(f"fastcaps {fastcaps.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print("build" if build else "build: no native library (FASTCAPS_BUILD=0); the reference serves")
    build.pop("cuda_why_not", "")  # the list of backends has it
    show_list({f"  {name.replace('_', ' ')}": _joined(value) for name, value in build.items()})
    print("\nbackends")
    show_list({f"  {one.name:<9}  {'yes' if one.available else 'no '}": one.detail for one in listing})
    print(f"\na routing pass with parents, {dtype} on {device}, runs on")
    if isinstance(runs, str):
        print(f"  {runs}")
        return 0
    print(f"  {runs.backend}: {runs.how}")  # the list of backends says why not on others
    show_list({f"  {name}": getattr(runs, name) for name in ("call", "forward", "backward")})
    return 0
