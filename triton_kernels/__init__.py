"""The Triton half of fastcaps, installed as ``fastcaps.triton_kernels``.

A routing lives here under its own name (``attention`` beside ``csrc/cpu/attention.cpp``): a module with
``attention_routing`` and ``attention_routing_backward`` (the ops' records and results, one iteration at a time),
``refusal`` and ``schedule_call``. The folder stands at the top of the repository because it is a backend like
``csrc``; it is installed under ``fastcaps`` because the bare name ``triton_kernels`` belongs to another package.
"""

from __future__ import annotations

import importlib.util


def available() -> str:
    """Return why there are no Triton kernels here, or an empty string."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'fastcaps[triton]')"
    try:
        from . import attention, gaussian, pooling  # noqa: F401
    except Exception as error:  # whatever a broken installation of Triton raises
        return f"triton does not load ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
    return ""


def devices() -> tuple[str, ...]:
    """Return the types of devices that the kernels serve; with ``TRITON_INTERPRET=1`` the CPU is one of them."""
    if available():
        return ()
    from .call import served_devices

    return served_devices()
