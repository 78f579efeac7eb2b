"""The routing of every workload on a device: first against eager PyTorch, then against torch.compile of it."""

from __future__ import annotations

import pytest

from bench.device_session import DeviceSession, LeftOut
from bench.device_worker import DeviceCase


def test_routing(device_case: DeviceCase, device_session: DeviceSession) -> None:
    """Time one row; it fails, and no figure is kept, if a result disagrees with the float64 reference."""
    try:
        row = device_session.run(device_case)
    except LeftOut as reason:
        pytest.skip(str(reason))
    if "refused" in row:
        pytest.fail(f"no speed figure: {row['refused']}", pytrace=False)
    assert row["fastcaps"]["median"] > 0


def test_against_compiled(device_case: DeviceCase, device_session: DeviceSession) -> None:
    """Add torch.compile of the alternatives to a row, as far as the time goes."""
    try:
        row = device_session.compile(device_case)
    except LeftOut as reason:
        pytest.skip(str(reason))
    assert row["fastcaps"]["median"] > 0
