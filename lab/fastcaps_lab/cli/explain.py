"""``fastcaps explain``."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated, Any

from typer import Argument, Option

from fastcaps_lab.cli.common import Fail, Wrong, read_settings, show

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
    from fastcaps.functional import Explanation
    from fastcaps_lab import models
    from fastcaps_lab.checks import did_you_mean

    kind, device, options = read_dtype(dtype), read_device(device), read_settings(settings) if settings else {}
    if network not in (known := models.names()):
        raise Wrong(
            f"no network is called {network!r}{did_you_mean(network, known, 3)}; fastcaps train --list shows all"
        )
    try:
        models.config(network, **options)
    except (ValueError, TypeError) as error:
        raise Wrong(f"--set: {str(error).replace('create() has no override', 'got')}") from error
    try:
        with nullcontext() if backend is None else fastcaps.backend(backend):
            net: Any = models.create(network, **options).to(device=device, dtype=kind)
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
