"""``fastcaps explain``."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated, Any

from typer import Argument, Option

from fastcaps.cli.common import Fail, Wrong, read_settings, show
from fastcaps.cli.info import read_device, read_dtype

TOKENS = 32  # of a text


def example(network: Any, batch: int, dtype: Any) -> Any:
    """Inputs of a network's size, whose numbers mean nothing."""
    import torch

    if hasattr(network, "embedding"):
        return torch.zeros(batch, TOKENS, network.layers, network.embedding, dtype=dtype)
    return torch.zeros(batch, network.in_channels, *network.image_size, dtype=dtype)


def explain(
    network: Annotated[str, Argument(metavar="NETWORK", help="a name that fastcaps train --list shows")],
    batch: Annotated[int, Option(min=1, help="images or texts")] = 1,
    settings: Annotated[
        list[str] | None,
        Option("--set", metavar="OPTION=VALUE", help="an option of the network, as in iterations=3 (repeat)"),
    ] = None,
    dtype: Annotated[str, Option(help="of weights and inputs")] = "float32",
    device: Annotated[str, Option(help="where they lie")] = "cpu",
    backend: Annotated[str | None, Option(help="force one: cuda, triton, cpu or reference")] = None,
    as_json: Annotated[bool, Option("--json", help="as JSON")] = False,
) -> int:
    """Tell on which kernel every routing call of a network runs, and why not on the others."""
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
            found = fastcaps.explain(net, example(net, batch, kind).to(device))
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
