"""What the native library was built with, and what it chose here; absent from an install with FASTCAPS_BUILD=0."""

from typing import TypedDict

class CudaInfo(TypedDict):
    toolkit: str  # e.g. "13.0.88"
    architectures: list[str]  # "90-real": code for 9.0; "90-virtual": PTX; "90": both
    flags: str

class BuildInfo(TypedDict):
    version: str  # of fastcaps
    compiler: str  # e.g. "GNU 12.2.0"
    torch_version: str  # the torch whose headers were used
    stable_abi_target: str  # the oldest torch that the library serves, e.g. "2.10"
    flags: str  # common to all native code
    level_flags: dict[str, str]  # added for each instruction-set level
    cuda: CudaInfo | None  # the CUDA kernels, if they were built
    cuda_why_not: str  # why they were not; else empty

def build_info() -> BuildInfo: ...
def capabilities_built() -> list[str]: ...
def capability() -> str: ...
def multiply_adds(rounds: int) -> float: ...
