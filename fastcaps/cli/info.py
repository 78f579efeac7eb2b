"""``fastcaps info`` and ``fastcaps explain``."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated, Any

from typer import Argument, Option

from fastcaps.cli.common import Fail, Wrong, read_settings, show, show_list

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
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch has no separate error for a device
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
    """Show what was built, what runs here, and why."""
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
    print("build" if build else "build: no native library (FASTCAPS_BUILD=0); the reference runs")
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


def explain(
    network: Annotated[str, Argument(metavar="NETWORK", help="a name that fastcaps train --list shows")],
    batch: Annotated[int, Option(min=1, help="images or texts")] = 1,
    settings: Annotated[
        list[str] | None,
        Option("--set", metavar="OPTION=VALUE", help="an option of the network, as in iterations=3 (repeat)"),
    ] = None,
    dtype: Annotated[str, Option(help="of weights and inputs")] = "float32",
    device: Annotated[str, Option(help="their device")] = "cpu",
    backend: Annotated[str | None, Option(help="force one: cuda, triton, cpu or reference")] = None,
    as_json: Annotated[bool, Option("--json", help="as JSON")] = False,
) -> int:
    """Show on which kernel every routing call of a network runs, and why not on the others."""
    import torch

    import fastcaps
    from fastcaps.checks import did_you_mean
    from fastcaps.functional.explanation import Explanation

    kind, device, options = read_dtype(dtype), read_device(device), read_settings(settings) if settings else {}
    if network not in (known := fastcaps.models.names()):
        raise Wrong(
            f"no network is called {network!r}{did_you_mean(network, known, 3)}; fastcaps train --list shows all"
        )
    try:
        fastcaps.models.config(network, **options)
    except (ValueError, TypeError) as error:
        raise Wrong(f"--set: {str(error).replace('create() has no override', 'got')}") from error
    try:
        with nullcontext() if backend is None else fastcaps.backend(backend):
            net: Any = fastcaps.models.create(network, **options).to(device=device, dtype=kind)
            texts = hasattr(net, "embedding")  # of 32 tokens
            size = (32, net.layers, net.embedding) if texts else (net.in_channels, *net.image_size)
            found = fastcaps.explain(net, torch.zeros(batch, *size, dtype=kind, device=device))
    except (ValueError, TypeError, RuntimeError) as error:
        raise (Fail if isinstance(error, RuntimeError) else Wrong)(str(error).splitlines()[0]) from error
    calls = [found] if isinstance(found, Explanation) else list(found)
    refused = int(any(call.backend is None for call in calls))
    if as_json:
        show({"network": network, "batch": batch, "calls": [asdict(call) for call in calls]})
        return refused
    print(f"{network}, batch {batch}, {dtype} on {device}: {len(calls)} routing call{'' if len(calls) == 1 else 's'}\n")
    print(found)
    return refused
