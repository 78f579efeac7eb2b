"""What the native library was built with, and what it chose here; absent from an install with FASTCAPS_BUILD=0."""

from typing import TypedDict

class BuildInfo(TypedDict):
    version: str  # of fastcaps
    compiler: str  # e.g. "GNU 12.2.0"
    torch_version: str  # the torch whose headers were used
    stable_abi_target: str  # the oldest torch that the library serves, e.g. "2.10"
    flags: str  # common to all native code
    level_flags: dict[str, str]  # added for each instruction-set level

def build_info() -> BuildInfo: ...
def capabilities_built() -> list[str]: ...
def capability() -> str: ...
def ops() -> list[str]: ...
