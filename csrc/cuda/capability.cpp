// What this build of the CUDA kernels holds; asks nothing of a driver.
#include "capability.h"

#define FASTCAPS_EXPORT __attribute__((visibility("default")))

extern "C" {

FASTCAPS_EXPORT const char* fastcaps_cuda_toolkit(void) { return FASTCAPS_CUDA_TOOLKIT; }

FASTCAPS_EXPORT const char* fastcaps_cuda_architectures(void) { return FASTCAPS_CUDA_ARCHITECTURES; }

}  // extern "C"
