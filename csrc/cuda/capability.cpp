// What this build of the CUDA kernels holds, for fastcaps/libraries.py; asks nothing of a driver. What concerns a call:
// introspection.cu.
#define FASTCAPS_ANSWER extern "C" __attribute__((visibility("default"))) const char*

// The toolkit's version, e.g. "13.0.88".
FASTCAPS_ANSWER fastcaps_cuda_toolkit(void) { return FASTCAPS_CUDA_TOOLKIT; }

// Comma-separated: what the kernels are compiled for, as CMake writes it ("90-real" is code for 9.0, "90" code and
// PTX).
FASTCAPS_ANSWER fastcaps_cuda_architectures(void) { return FASTCAPS_CUDA_ARCHITECTURES; }
